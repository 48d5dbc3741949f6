"""The model card of a saved adapter: its kind, its origin, and how to load it.

PEFT writes an empty card before it saves the configuration; our text replaces it. A card that a person has written
keeps its text and gets ours as a marked section.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import peft
from huggingface_hub import ModelCard, ModelCardData
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id
from peft.auto import MODEL_TYPE_TO_PEFT_MODEL_MAPPING
from safetensors import safe_open

from frozencore.adapter.core import Core, is_core_key
from frozencore.files.names import CARD_FILE, CONFIG_FILE, WEIGHTS_FILE
from frozencore.text import bytes_in_words, one_line

_BEGIN, _END = "<!-- frozencore:begin -->", "<!-- frozencore:end -->"
_UNFILLED = "[More Information Needed]"
_ADDED = re.compile(r"### Framework versions|- PEFT [\w.+]+")  # by PEFT, to any card
CLASS_OF_TASK: Mapping[str, Any] = {
    task: getattr(peft, f"Auto{wrapper.__name__}")._target_class
    for task, wrapper in MODEL_TYPE_TO_PEFT_MODEL_MAPPING.items()
}
"""The class in which PEFT's AutoPeftModels load a base model for a task."""


def write_model_card(
    directory: str | Path,
    *,
    calibration: str | None = None,
    scores: Mapping[str, float | str] | None = None,
    license: str | None = None,
) -> None:
    """Write or update ``README.md`` in an adapter folder.

    Args:
        directory: A folder with ``adapter_config.json``, of a frozen core or of its LoRA export.
        calibration: The calibration data, for instance ``"svamp, 128 rows"``.
        scores: Named results, for instance ``{"accuracy": "71.0 % of 100 rows (95 % interval 61.5 to 79.0)"}``.
        license: Identifier of the licence, for instance ``"apache-2.0"``; the base model's terms apply besides.

    Raises:
        FileNotFoundError: The folder has no ``adapter_config.json``, as that of a basis.
    """
    path = Path(directory) / CARD_FILE
    config = json.loads((path.parent / CONFIG_FILE).read_text(encoding="utf-8"))
    card = ModelCard.load(path) if path.exists() else ModelCard.from_template(ModelCardData())
    base = config.get("base_model_name_or_path")
    is_on_hub, is_lora = _is_hub_id(base), config["peft_type"] == "LORA"
    tags = {*(card.data.get("tags") or []), "frozencore", *(["lora"] if is_lora else [])}
    tags = {tag for tag in tags if not tag.startswith("base_model:")}  # the hub refuses the name of a local folder
    card.data["tags"] = sorted(tags | ({f"base_model:adapter:{base}"} if is_on_hub else set()))
    card.data["base_model"], card.data["library_name"] = base if is_on_hub else None, "peft"
    if license:
        card.data["license"] = license
    facts = {
        "Base model": _code(base) if is_on_hub else f"a local folder, {_code(Path(base).name)}" if base else None,
        "Method": "LoRA, exported exactly from a frozen core"
        if is_lora
        else f"frozen core, {_code(config['constructor'])}",
        "Basis": _code(config["basis_id"]) if config.get("basis") else None,
        "Rank": config["r"],
        **_sizes_in(path.with_name(WEIGHTS_FILE)),
        "Layers": ", ".join(map(_code, _listed(config["target_modules"]))),
        "Calibrated on": calibration or num_tokens(config.get("calibration_tokens")),
        "Scores": _in_words(scores or {}) or None,
        "Licence": f"{given}; the base model's terms apply besides"
        if (given := card.data.get("license"))
        else "not stated; ask the author",
    }
    library, kind = _class_of_base(config)
    basis = f', basis="{config["basis"] if _is_hub_id(config["basis"]) else "BASIS"}"' if config.get("basis") else ""
    loading = [
        *([] if is_lora else ["import frozencore  # registers the method with PEFT"]),
        "from peft import PeftModel",
        f"from {library} import {kind}",
        "",
        f'base = {kind}.from_pretrained("{base if is_on_hub else "BASE_MODEL"}")',
        f'model = PeftModel.from_pretrained(base, "ADAPTER"{basis})  # this folder, or its hub id',
    ]
    table = [f"- {name}: {value}" for name, value in facts.items() if value is not None]
    title = "# LoRA export of a frozen core" if is_lora else "# Frozen-core adapter"
    lines = [_BEGIN, title, "", *table, "", "```python", *loading, "```", "", f"- PEFT {peft.__version__}", _END]
    card.text = _with_section(card.text, "\n".join(lines))
    card.save(path)


def begin_model_card(directory: Path) -> None:
    """Write an empty card if there is none, because PEFT's long template takes longer than saving."""
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / CARD_FILE
    if not path.exists():
        path.write_text(f"---\nbase_model: null\nlibrary_name: peft\n---\n{_UNFILLED}\n", encoding="utf-8")


def with_scores(card: str, scores: Mapping[str, float | str]) -> str:
    """The text of a card that shows other scores, or none."""
    line = f"- Scores: {_in_words(scores)}\n" if scores else ""
    return re.sub(r"^- Scores: .*\n", lambda _: line, card, flags=re.MULTILINE)


def with_sizes(card: str, core: Core, num_bytes: int) -> str:
    """The text of a card that shows the values of a core, and the bytes of the file that has it."""
    for name, size in _sizes(core, num_bytes).items():
        card = re.sub(rf"^- {name}: .*$", f"- {name}: {size}", card, count=1, flags=re.MULTILINE)
    return card


def num_tokens(count: int | None) -> str | None:
    """Describe the size of a calibration."""
    return None if count is None else f"{count:,} tokens"


def _class_of_base(config: Mapping[str, Any]) -> tuple[str, str]:
    """The library and class with which PEFT's AutoPeftModels load the base model: the task's, or the recorded one."""
    if task := config.get("task_type"):
        return "transformers", CLASS_OF_TASK[task].__name__
    recorded = config.get("auto_mapping") or {
        "parent_library": "transformers",
        "base_model_class": "AutoModelForCausalLM",
    }
    return recorded["parent_library"], recorded["base_model_class"]


def _with_section(text: str, section: str) -> str:
    """A card with our section: in place of an earlier one, of a template that nobody has filled in, or at the end."""
    if _BEGIN in text and _END in text:
        before, _, rest = text.partition(_BEGIN)
        return before + section + rest.partition(_END)[2]
    blanks = text.count(_UNFILLED)
    if _ADDED.sub("", text).strip() in ("", _UNFILLED) or (
        blanks and blanks == ModelCard.from_template(ModelCardData()).text.count(_UNFILLED)
    ):
        return section + "\n"
    return f"{text.rstrip()}\n\n{section}\n"


def _sizes_in(weights: Path) -> dict[str, str]:
    """The sizes of a file's core, if it has one, and of the file."""
    if not weights.is_file():
        return {}
    with safe_open(weights, framework="pt") as stored:
        tensors = {key: stored.get_tensor(key) for key in stored.keys() if is_core_key(key)}  # noqa: SIM118 - no mapping
    return _sizes(Core.read(str(weights), tensors) if tensors else None, weights.stat().st_size)


def _sizes(core: Core | None, num_bytes: int) -> dict[str, str]:
    """The number of a core's values with their bits, and the bytes of its file."""
    size = {"Saved in": bytes_in_words(num_bytes)}
    if core is None:
        return size
    bits = "" if core.bits == 32 else f", of {core.bits} bits"
    return {"Trained values": f"{len(core.values):,}{bits}", **size}


def _listed(targets: Any) -> list[str]:
    return [targets] if isinstance(targets, str) else sorted(targets or [])


def _in_words(scores: Mapping[str, float | str]) -> str:
    return ", ".join(f"{name} {value if isinstance(value, str) else f'{value:.4g}'}" for name, value in scores.items())


def _is_hub_id(name: str | None) -> bool:
    if name and Path(name).exists():  # a relative folder may look like one
        return False
    try:
        validate_repo_id(name or "")
    except HFValidationError:
        return False
    return True


def _code(text: object) -> str:
    """Put a text on one line between backticks, without the backticks in it."""
    return f"`{one_line(text).replace('`', chr(39))}`"
