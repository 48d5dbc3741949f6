"""Models with a frozen-core adapter on them, and a constructor of bases from outside of the package."""

from __future__ import annotations

import copy
import json
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Annotated

import peft
import pytest
import torch
import transformers.integrations.peft
from packaging import version
from peft import PeftModel, get_peft_model
from pydantic import Field
from torch import Tensor, nn

from frozencore import FrozenCoreConfig, calibrate, get_bases, load_basis, register_constructor, save_basis, set_bases
from frozencore.adapter.layer import FrozenCoreLinear
from frozencore.adapter.saved.adapter import checksum_of
from frozencore.constructors import CONSTRUCTORS, BasisOptions, Constructor, LayerData
from frozencore.maths.basis import Basis, basis_from_factors
from frozencore.maths.moments import MomentName
from tiny import batches_of, draw_examples, tiny_qwen2

EXAMPLES = draw_examples(num_examples=8, seed=5)
BATCHES = batches_of(EXAMPLES, 4)
DATA_DRIVEN = ("fcca", "rawgrad", "signgrad", "filora", "eva")


def adapted(
    constructor: str = "fcca", *, model: nn.Module | None = None, dtype: torch.dtype | None = torch.float32,
    calibrated: bool = True, trained: bool = False, **options: object,
) -> PeftModel:  # fmt: skip
    """A tiny model with one adapter of rank 3, in the paper's coordinates and at its scale of 1 unless ``options`` say
    otherwise; ``trained`` cores are random instead of zero; no ``dtype`` leaves the model as it is."""
    papers = {} if "basis" in options else {"alpha": None, "coordinates": "qr"}
    options = {"r": 3, "constructor": constructor, **papers, **options}
    if model is None:
        adapter = copy.deepcopy(_once(dtype, calibrated, json.dumps(options)))
    else:
        adapter = _adapted(model, dtype, calibrated, options)
    if trained:
        train_at_random(adapter)
    return adapter.eval()


def _adapted(base: nn.Module, dtype: torch.dtype | None, calibrated: bool, options: dict[str, object]) -> PeftModel:
    adapter = get_peft_model(base if dtype is None else base.to(dtype), FrozenCoreConfig(**options))
    if calibrated and options["constructor"] in DATA_DRIVEN:
        calibrate(adapter, BATCHES, progress=False)
    return adapter


@lru_cache(maxsize=64)
def _once(dtype: torch.dtype | None, calibrated: bool, options: str) -> PeftModel:
    """Wrapping and calibrating takes four times as long as a copy of what it gave."""
    return _adapted(tiny_qwen2(), dtype, calibrated, json.loads(options))


def on_one_basis(*names: str, place: Path | None = None, **options: object) -> PeftModel:
    """Adapters of trained cores on one basis: each with a copy, or by the name of the basis saved at ``place``."""
    model = adapted("fcca", **options)
    first, bases = model.peft_config["default"], get_bases(model)
    if place is not None:
        save_basis(model, place)
    for seed, name in enumerate(names):
        model.add_adapter(name, copy.deepcopy(first))
        set_bases(model, bases if place is None else load_basis(place), adapter_name=name)
        train_at_random(model, name, seed=seed)
    model.delete_adapter("default")
    model.set_adapter(names[0])
    return model.eval()


def set_values(folder: Path, **changed: object) -> None:
    """Other values in the configuration of a saved adapter, with the checksum that they give."""
    file = folder / "adapter_config.json"
    content = json.loads(file.read_text()) | changed
    file.write_text(json.dumps(content | {"checksum": checksum_of(content)}))


def cores_of(model: nn.Module, adapter_name: str = "default") -> list[FrozenCoreLinear]:
    return [m for m in model.modules() if isinstance(m, FrozenCoreLinear) and adapter_name in m.frozencore_R]


def factors_of(model: nn.Module, adapter_name: str = "default") -> list[Tensor]:
    """Copies of P, Q and R of every layer."""
    return [X.detach().clone() for layer in cores_of(model, adapter_name) for X in layer.factors(adapter_name)]


def all_equal(one: list[Tensor], other: list[Tensor]) -> bool:
    return len(one) == len(other) and all(map(torch.equal, one, other))


def train_at_random(model: nn.Module, adapter_name: str = "default", size: float = 0.5, seed: int = 0) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for layer in cores_of(model, adapter_name):
            R = layer.frozencore_R[adapter_name].weight
            R.copy_(size * torch.randn(R.shape, generator=generator))


@torch.no_grad()
def logits(model: nn.Module) -> Tensor:
    batch = BATCHES[0]
    return model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits


needs_own_integration = pytest.mark.skipif(
    version.parse(peft.__version__) < version.parse(transformers.integrations.peft.MIN_PEFT_VERSION),
    reason="this transformers refuses this PEFT in its own add_adapter and load_adapter",
)


@dataclass(frozen=True)
class ToyOptions(BasisOptions):
    toy_offset: Annotated[int, Field(ge=0, le=8, description="The coordinate that comes first.")] = 0


def coordinates_from(offset: int, width: int, rank: int) -> Tensor:
    return torch.eye(width)[:, offset : offset + rank]


class Toy(Constructor[ToyOptions]):
    options = ToyOptions

    def needs(self, options: ToyOptions) -> frozenset[MomentName]:
        return frozenset()

    def build(self, layer: LayerData, options: ToyOptions) -> Basis:
        P0, Q0 = (coordinates_from(options.toy_offset, width, options.rank) for width in layer.shape)
        return basis_from_factors(P0, Q0, rank=options.rank, spectrum=torch.empty(0), coordinates=options.coordinates)


TOY = Toy()


def register_toy(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a user would; forgotten when the test ends."""
    monkeypatch.setitem(CONSTRUCTORS, "toy", TOY)
    del CONSTRUCTORS["toy"]
    register_constructor("toy", TOY)
