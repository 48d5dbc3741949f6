"""Adapter and basis folders with crafted values, and every way in that reads them.

A class of values is a field with what a stranger may write there: another type, a number too large for a float, a
name too long for a file, an expression that never ends. Seals and identities are made anew, so that the value itself is
what is met.
"""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import Qwen2Config, Qwen2ForCausalLM

from frozencore import CoreBank, FrozenCoreConfig, export_lora, load_basis, save_basis, set_bases, swap_core
from frozencore.adapter.export.base_model import export_merged
from frozencore.adapter.export.basis_model import export_basis_model, export_tenant
from frozencore.adapter.folders import merge_adapters, pack_adapter, read_adapter, read_adapter_or_basis, unpack_adapter
from frozencore.adapter.inspection import inspect_adapter
from frozencore.files.fingerprint import fingerprint_options
from frozencore.tune.evaluation.adapters import BaseWithAdapter

WEIGHTS, CONFIG, HEADER = "adapter_model.safetensors", "adapter_config.json", "basis.json"


def tiny_base() -> nn.Module:
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=20, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=16, tie_word_embeddings=False,
    )  # fmt: skip
    return Qwen2ForCausalLM(config).eval()


def random_cores() -> PeftModel:
    config = FrozenCoreConfig(r=2, target_modules=["q_proj", "v_proj"], constructor="random")
    return get_peft_model(tiny_base(), config)


def make_sources(folder: Path) -> dict[str, Path]:
    """Sound folders: an adapter, one of cores alone on a basis beside it, and that basis."""
    random_cores().save_pretrained(str(folder / "adapter"))
    on_basis = random_cores()
    save_basis(on_basis, folder / "cores" / "basis")
    on_basis.save_pretrained(str(folder / "cores"))
    tiny_base().save_pretrained(folder / "base")
    return {name: folder / name for name in ("adapter", "cores")}


def ways_in(folder: Path) -> dict[str, Callable[[Path], object]]:
    """The readers of an adapter folder, by name.

    Args:
        folder: Of :func:`make_sources`; outputs are written into it too.
    """
    base, out = tiny_base(), itertools.count()

    def new() -> Path:
        place = folder / "written" / str(next(out))
        place.parent.mkdir(exist_ok=True)
        return place

    def worn() -> PeftModel:
        return PeftModel.from_pretrained(tiny_base(), str(folder / "adapter"))

    def load_with_peft(path: Path) -> None:
        PeftModel.from_pretrained(tiny_base(), str(path))

    def evaluate(path: Path) -> None:
        BaseWithAdapter(tiny_base()).with_adapter(path)

    def inspect(path: Path) -> None:
        inspect_adapter(*read_adapter_or_basis(path))

    def written(write: Callable[[Path, Path], object]) -> Callable[[Path], None]:
        def do(path: Path) -> None:
            place = new()
            try:
                write(path, place)
            finally:
                shutil.rmtree(place, ignore_errors=True)

        return do

    return {
        "PEFT": load_with_peft,
        "PEFT, a second adapter": lambda path: worn().load_adapter(str(path), adapter_name="second"),
        "read": read_adapter,
        "inspect": inspect,
        "evaluate": evaluate,
        "LoRA": written(lambda path, to: export_lora(path, to, base=base)),
        "merged": written(lambda path, to: export_merged(path, to, base=folder / "base")),
        "tenant": written(lambda path, to: export_tenant(path, to)),
        "basis model": written(lambda path, to: export_basis_model(path, to, base=folder / "base")),
        "bank": lambda path: CoreBank(worn(), 1).put("a", path),
        "swap": lambda path: swap_core(worn(), path),
        "pack": written(lambda path, to: pack_adapter(path, folder / "cores" / "basis", to)),
        "unpack": written(lambda path, to: unpack_adapter(path, to)),
        "sum": written(lambda path, to: merge_adapters([path, path], to)),
    }


def ways_into_a_basis(folder: Path) -> dict[str, Callable[[Path], object]]:
    """The readers of a basis folder, by name."""
    return {
        "load_basis": load_basis,
        "inspect": lambda path: inspect_adapter(*read_adapter_or_basis(path)),
        "configuration": lambda path: get_peft_model(tiny_base(), FrozenCoreConfig(basis=str(path))),
        "set_bases": lambda path: set_bases(random_cores(), load_basis(path)),
    }


def set_values(folder: Path, **values: Any) -> None:
    """Write values into the configuration of an adapter."""
    file = folder / CONFIG
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def set_in_header(folder: Path, keys: tuple[str, ...], value: Any) -> None:
    """Write a value into ``basis.json``, and the identity that this gives; an adapter above it names that one."""
    file = folder / HEADER
    header = json.loads(file.read_text())
    place = header
    for key in keys[:-1]:
        place = place[key]
    place[keys[-1]] = value
    rest = {key: held for key, held in header.items() if key != "identity"}
    if keys != ("identity",):
        header["identity"] = fingerprint_options(rest)
    file.write_text(json.dumps(header))
    if (folder.parent / CONFIG).is_file():
        set_values(folder.parent, basis_id=header["identity"])


def set_tensors(folder: Path, change: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> None:
    """Write other tensors into an adapter, without a seal."""
    tensors = change(load_file(folder / WEIGHTS))
    save_file({key: X.contiguous() for key, X in tensors.items()}, folder / WEIGHTS, {"format": "pt"})
    set_values(folder, seal=None)
