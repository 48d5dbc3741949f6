"""The model card of a saved adapter: its kind, its origin, and how to load it.

PEFT writes an empty card before it saves the configuration; our text replaces it. A card that a person has written
keeps its text and gets ours as a marked section.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from tempfile import gettempdir, gettempprefix
from typing import Any

import peft
from huggingface_hub import ModelCard, ModelCardData
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id
from safetensors import safe_open

from frozencore.adapter.core import is_core_key
from frozencore.errors import ArtifactError
from frozencore.files.adapter_folder import PEFT_TYPE, WEIGHTS_FILE
from frozencore.files.atomic_write import final_place
from frozencore.text import bytes_in_words, one_line

CARD_FILE = "README.md"
_BEGIN, _END = "<!-- frozencore:begin -->", "<!-- frozencore:end -->"
_UNFILLED = "[More Information Needed]"
_GENERATED = re.compile(
    r"### Framework versions|- PEFT [\w.+]+|This is the model card of a .* automatically generated\."
)
_TAG = "frozencore"
_HEADING = re.compile(r"^# (.+)$", re.MULTILINE)
_NAMED = re.compile(r"^(?:base_model|- Model): ([\w.-]+/[\w.-]+)", re.MULTILINE)


def write_model_card(
    directory: str | Path,
    *,
    calibration: str | None = None,
    scores: Mapping[str, float | str] | None = None,
    license: str | None = None,
    place: str | None = None,
) -> None:
    """Write or update ``README.md`` in an adapter folder.

    Args:
        directory: A folder with ``adapter_config.json``, of a frozen core or of its LoRA export.
        calibration: The calibration data, for instance ``"svamp, 128 rows"``.
        scores: Named results, for instance ``{"accuracy": "71.0 % of 100 rows (95 % interval 61.5 to 79.0)"}``.
        license: Identifier of the licence, for instance ``"apache-2.0"``; the base model's terms apply besides.
        place: The folder or hub id from which the card's code loads the adapter; by default ``directory``.

    Raises:
        ArtifactError: There is no adapter configuration, or the existing card cannot be read.
    """
    directory = Path(directory)
    path = directory / CARD_FILE
    try:
        config = json.loads((directory / "adapter_config.json").read_text())
        card = ModelCard.load(path) if path.exists() else ModelCard.from_template(ModelCardData())
    except (OSError, ValueError) as error:
        raise ArtifactError(f"The card of {directory} cannot be brought up to date: {error}.") from error
    kind = config.get("peft_type") if isinstance(config, dict) else None
    if kind not in (PEFT_TYPE, "LORA"):
        raise ArtifactError(
            f"A card is of a frozen core or of its export as a LoRA, but {directory} holds a {one_line(kind, 40)} "
            "adapter."
        )
    _describe(card.data, config, license)
    lines = _lines(directory, config, calibration, scores, card.data.get("license"), place or place_of(directory))
    section = "\n".join([_BEGIN, *lines, _END])
    card.text = _placed(card.text, section)
    card.save(path)


def begin_model_card(directory: Path) -> None:
    """Write an empty card if there is none, because PEFT's long template takes longer than saving."""
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / CARD_FILE
    if not path.exists():
        path.write_text(f"---\nbase_model: null\nlibrary_name: peft\n---\n{_UNFILLED}\n", encoding="utf-8")


def _describe(data: ModelCardData, config: Mapping[str, Any], license: str | None) -> None:
    data["library_name"] = "peft"
    lora = ["lora"] if config["peft_type"] == "LORA" else []
    base = _hub_id(config.get("base_model_name_or_path")) or data.get("base_model")
    tags = {*(data.get("tags") or []), _TAG, *lora}
    if not _is_hub_id(base):  # the hub refuses a card that names a local folder
        tags = {tag for tag in tags if not tag.startswith("base_model:")}
    else:
        tags.add(f"base_model:adapter:{base}")
    data["tags"] = sorted(tags)
    data["base_model"] = base if _is_hub_id(base) else None
    if license:
        data["license"] = license


def _lines(
    directory: Path,
    config: Mapping[str, Any],
    calibration: str | None,
    scores: Mapping[str, float | str] | None,
    license: str | None,
    place: str,
) -> list[str]:
    is_lora, weights = config["peft_type"] == "LORA", directory / WEIGHTS_FILE
    base, targets = _hub_id(config.get("base_model_name_or_path")), config["target_modules"]
    model = _code(base) if _is_hub_id(base) else f"a local folder, {_code(_local_name(Path(base or '')))}"
    own = "LoRA, exported exactly from a frozen core" if is_lora else f"frozen core, {_code(config['constructor'])}"
    facts = {
        "Base model": model if base else None,
        "Method": own,
        "Rank": str(config["r"]),
        "Trained values": None if is_lora else _trained_values(weights),
        "Saved in": bytes_in_words(weights.stat().st_size) if weights.is_file() else None,
        "Layers": ", ".join(map(_code, [targets] if isinstance(targets, str) else sorted(targets or []))),
        "Calibrated on": calibration or num_tokens(config.get("calibration_tokens")),
        "Scores": _in_words(scores or {}) or None,
        "Licence": f"{license}; the base model's terms apply besides" if license else "not stated; ask the author",
    }
    table = [f"- {name}: {value}" for name, value in facts.items() if value is not None]
    title = "# LoRA export of a frozen core" if is_lora else "# Frozen-core adapter"
    own_import = [] if is_lora else ["import frozencore  # registers the method with PEFT"]
    loading = [
        *own_import,
        "from peft import PeftModel",
        "from transformers import AutoModelForCausalLM",
        "",
        f'base = AutoModelForCausalLM.from_pretrained("{base if _is_hub_id(base) else "BASE_MODEL"}")',
        f'model = PeftModel.from_pretrained(base, "{place}")',
    ]
    return [title, "", *table, "", "```python", *loading, "```", "", f"- PEFT {peft.__version__}"]


def _in_words(scores: Mapping[str, float | str]) -> str:
    return ", ".join(f"{name} {value if isinstance(value, str) else f'{value:.4g}'}" for name, value in scores.items())


def place_of(directory: Path) -> str:
    """The path from which an adapter will load when it is written; a library's temporary folder has none."""
    place = final_place(directory)
    above = [place, *place.parents]
    is_temporary = any(str(one.parent) == gettempdir() and one.name.startswith(gettempprefix()) for one in above)
    return "FOLDER_OR_HUB_ID" if is_temporary else str(place)


def with_scores(card: str, scores: Mapping[str, float | str]) -> str:
    """The text of a card that shows other scores, or none."""
    line = f"- Scores: {_in_words(scores)}\n" if scores else ""
    return re.sub(r"^- Scores: .*\n", lambda _: line, card, flags=re.MULTILINE)


def at_place(card: str, place: str) -> str:
    """The text of a card whose code loads the adapter from another place."""
    return re.sub(r'(?<=from_pretrained\(base, ").*(?="\)$)', lambda _: place, card, flags=re.MULTILINE)


def _trained_values(weights: Path) -> str | None:
    """The number of values of all cores in a file, from its header."""
    if not weights.is_file():
        return None
    with safe_open(weights, framework="np") as stored:
        keys = [key for key in stored.keys() if is_core_key(key)]  # noqa: SIM118 - not a mapping
        ranks = [stored.get_tensor(key) for key in keys if key.endswith(".ranks")]  # of a core of few bits
        sizes = [math.prod(stored.get_slice(key).get_shape()) for key in keys]
    return f"{sum(int(r) ** 2 for r in ranks[0]) if ranks else sum(sizes):,}"


def _hub_id(base: str | None) -> str | None:
    """The hub id of a base model in a folder, if its place in the hub's cache or its own card names one."""
    folder = Path(base or "")
    if not base or not folder.is_dir():
        return base
    cached = next((part for part in folder.parts if part.startswith("models--")), None)
    if cached is not None:
        return cached.removeprefix("models--").replace("--", "/", 1)
    card = folder / CARD_FILE
    found = _NAMED.search(card.read_text(encoding="utf-8", errors="replace")) if card.is_file() else None
    return found[1] if found else base


def _local_name(folder: Path) -> str:
    """The name of a model in a folder: the heading of its card, such as ``The pocket model``, or the folder's name."""
    card = folder / CARD_FILE
    found = _HEADING.search(card.read_text(encoding="utf-8", errors="replace")) if card.is_file() else None
    return found[1] if found else folder.name


def _is_hub_id(name: str | None) -> bool:
    try:
        validate_repo_id(name or "")
    except HFValidationError:
        return False
    return True


def _code(text: object) -> str:
    """Put a text on one line between backticks, without its own backticks."""
    return f"`{one_line(text).replace('`', chr(39))}`"


def num_tokens(count: int | None) -> str | None:
    """Describe the size of a calibration."""
    return None if count is None else f"{count:,} tokens"


def _placed(text: str, section: str) -> str:
    """A card with our section: in place of an earlier one, of an unchanged template, or at the end."""
    if _BEGIN in text and _END in text:
        before, _, rest = text.partition(_BEGIN)
        return before + section + rest.partition(_END)[2]
    lines = {line.strip() for line in text.split("\n")}
    is_template = _UNFILLED in text and all(one in _template_lines() or _GENERATED.fullmatch(one) for one in lines)
    if text.strip() in ("", _UNFILLED) or is_template:
        return section + "\n"
    return f"{text.rstrip()}\n\n{section}\n"


@cache
def _template_lines() -> frozenset[str]:
    return frozenset(line.strip() for line in ModelCard.from_template(ModelCardData()).text.split("\n"))
