"""Compare the needs of a real campaign with this machine: models and data sets, the hub, memory, disk."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

from frozencore.device import memory_of
from frozencore.errors import ModelError
from frozencore.files.gguf_model import find_gguf
from frozencore.files.hub import hub_answers
from frozencore.tune.run.models import memory_bytes, size_of
from frozencore.tune.run.refuse_early import model_location
from frozencore.words import bytes_in_words
from frozencore_lab.campaign.estimate import RECORD_BYTES, shared_bytes
from frozencore_lab.campaign.plan import plan
from frozencore_lab.campaign.spec import Campaign
from frozencore_lab.rehearsal.models import Original
from frozencore_lab.rehearsal.rehearsal_rows import FewRows

HUB_TIMEOUT_S = 3.0
STORED_BYTES = 2  # per value, as in most hub models
WEIGHTS = ("*.safetensors", "*.bin")


@dataclass(frozen=True)
class Need:
    """A need of a real campaign."""

    what: str
    here: str
    is_missing: bool


def real_needs(campaign: Campaign, originals: Mapping[str, Original], rows: FewRows, folder: Path) -> list[Need]:
    """All needs of a real campaign.

    Args:
        originals: The models, by their names in the campaign.
        folder: The rehearsal's folder, on the disk that is assumed for the real campaign.
    """
    sizes = {name: size_of(original.config) for name, original in originals.items()}
    weights = {name: size.num_parameters * STORED_BYTES for name, size in sizes.items()}
    absent = [location for location in originals if not has_weights(location)]
    needs = []
    for name, size in weights.items():
        here = "neither a folder nor in the cache" if name in absent else "here"
        needs.append(Need(f"model {name}, {bytes_in_words(size)}", here, name in absent))
    needs += [Need(f"data set {name}", "here", is_missing=False) for name in rows.at_hand]
    needs += [Need(f"data set {name}", why, is_missing=True) for name, why in rows.made_up.items()]
    if absent or rows.made_up:
        needs.append(_hub(absent, list(rows.made_up)))
    jobs = [run.job for run in plan(campaign, lambda _: None) if run.job]
    memory = max(memory_bytes(job.config, sizes[job.config.model]) for job in jobs)
    disk = sum(weights[name] for name in absent) + shared_bytes(jobs, sizes) + len(jobs) * RECORD_BYTES
    on_gpu = torch.cuda.is_available()
    there = memory_of(torch.device("cuda", 0) if on_gpu else torch.device("cpu"))
    nearest = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    free = shutil.disk_usage(nearest).free
    where = "on the first GPU" if on_gpu else "in this machine"
    return [
        *needs,
        Need(f"memory of a worker, {bytes_in_words(memory)}", f"{bytes_in_words(there)} {where}", memory > there),
        Need(f"disk, {bytes_in_words(disk)} with the models", f"{bytes_in_words(free)} free", disk > free),
    ]


def _hub(models: list[str], data_sets: list[str]) -> Need:
    """Ask the hub once, for a few seconds at most, about the first missing model or data set."""
    if models:
        answers = hub_answers("model", models[0], timeout_s=HUB_TIMEOUT_S)
    else:
        answers = hub_answers("dataset", data_sets[0].split(" ")[0], timeout_s=HUB_TIMEOUT_S)
    return Need("the hub, for what is missing", "it answers" if answers else "it cannot be reached", not answers)


def has_weights(location: str) -> bool:
    """Return whether a model is in a folder or completely in the offline cache."""
    try:
        location = model_location(location)
        if find_gguf(location) is not None:
            return True
    except ModelError:  # not fetched, or not readable
        return False
    folder = Path(location)
    if not folder.is_dir():
        try:
            folder = Path(snapshot_download(location, local_files_only=True))
        except (LocalEntryNotFoundError, HFValidationError, OSError):
            return False
    return any(any(folder.glob(pattern)) for pattern in WEIGHTS)
