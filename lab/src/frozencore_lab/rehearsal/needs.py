"""What a real run of a campaign needs, beside what is here: models and data sets, the hub, memory, disk."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

from frozencore.device import memory_of
from frozencore.errors import ModelError
from frozencore.files.gguf_model import find_gguf
from frozencore.files.hub import hub_answers
from frozencore.tune.run.model_names import model_location
from frozencore.tune.run.model_size import ModelSize, memory_bytes, size_of
from frozencore.words import bytes_in_words
from frozencore_lab.campaign.estimate import RECORD_BYTES, shared_bytes
from frozencore_lab.campaign.job import Job
from frozencore_lab.campaign.plan import plan
from frozencore_lab.campaign.spec import Campaign
from frozencore_lab.rehearsal.models import Original
from frozencore_lab.rehearsal.stand_ins import StandIns

HUB_TIMEOUT_S = 3.0
STORED_BYTES = 2  # of a value, as hub models are mostly stored
WEIGHTS = ("*.safetensors", "*.bin")


@dataclass(frozen=True)
class Need:
    """Something that a real run needs."""

    what: str
    here: str
    is_missing: bool


def needs_of_models(originals: Mapping[str, Original]) -> list[Need]:
    """The models that a campaign names, by what it says of them."""
    found = []
    for location, original in originals.items():
        size = bytes_in_words(size_of(original.config).num_parameters * STORED_BYTES)
        here = has_weights(location)
        found.append(
            Need(f"model {location}, {size}", "here" if here else "neither a folder nor in the cache", not here)
        )
    return found


def needs_of_data(at_hand: Sequence[str], made_up: Mapping[str, str]) -> list[Need]:
    """The data sets of a campaign's tasks.

    Args:
        made_up: Why each of the others is not at hand.
    """
    needs = [Need(f"data set {name}", "here", is_missing=False) for name in at_hand]
    return needs + [Need(f"data set {name}", why, is_missing=True) for name, why in made_up.items()]


def need_of_hub(models: Sequence[str], data_sets: Sequence[str]) -> Need:
    """Whether the hub answers, asked once, for no longer than a few seconds, about the first thing that is missing."""
    kind, name = ("model", models[0]) if models else ("dataset", data_sets[0].split(" ")[0])
    answers = hub_answers(kind, name, timeout_s=HUB_TIMEOUT_S)  # type: ignore[arg-type]
    return Need("the hub, for what is missing", "it answers" if answers else "it cannot be reached", not answers)


def needs_of_machine(jobs: Sequence[Job], originals: Mapping[str, Original], folder: Path) -> list[Need]:
    """Memory of a worker and disk, as `campaign plan` estimates them, against this machine.

    Args:
        folder: Where the real campaign might lie: its disk is looked at.
    """
    sizes: dict[str, ModelSize | None] = {name: size_of(original.config) for name, original in originals.items()}
    memory = max(memory_bytes(job.config, size) for job in jobs if (size := sizes[job.config.model]))
    there, where = machine_memory()
    weights = sum(size.num_parameters * STORED_BYTES for name, size in sizes.items() if size and not has_weights(name))
    disk = weights + shared_bytes(jobs, sizes) + len(jobs) * RECORD_BYTES
    nearest = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    free = shutil.disk_usage(nearest).free
    return [
        Need(f"memory of a worker, {bytes_in_words(memory)}", f"{bytes_in_words(there)} {where}", memory > there),
        Need(f"disk, {bytes_in_words(disk)} with the models", f"{bytes_in_words(free)} free", disk > free),
    ]


def machine_memory() -> tuple[int, str]:
    """Bytes of the first GPU, or of the machine without one; and which."""
    if torch.cuda.is_available():
        return memory_of(torch.device("cuda", 0)), "on the first GPU"
    return memory_of(torch.device("cpu")), "in this machine"


def has_weights(location: str) -> bool:
    """Whether a model lies in a folder or, whole, in the offline cache."""
    try:
        location = model_location(location)
        if find_gguf(location) is not None:
            return True
    except ModelError:  # not fetched yet, or not readable here
        return False
    folder = Path(location)
    if not folder.is_dir():
        try:
            folder = Path(snapshot_download(location, local_files_only=True))
        except (LocalEntryNotFoundError, HFValidationError, OSError):
            return False
    return any(any(folder.glob(pattern)) for pattern in WEIGHTS)


def real_needs(campaign: Campaign, stand_ins: StandIns, folder: Path) -> list[Need]:
    """All that a real run needs.

    Args:
        folder: The rehearsal's: the disk that the real campaign is supposed to be on.
    """
    originals, data = stand_ins.originals, stand_ins.data
    absent = [location for location in originals if not has_weights(location)]
    hub = [need_of_hub(absent, list(data.made_up))] if absent or data.made_up else []
    jobs = [run.job for run in plan(campaign, lambda _: None) if run.job]
    return [
        *needs_of_models(originals),
        *needs_of_data(data.at_hand, data.made_up),
        *hub,
        *needs_of_machine(jobs, originals, folder),
    ]
