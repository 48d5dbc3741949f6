"""Tiny language models with adapters on them, examples in padded batches, random layers with their moments, and a
constructor of bases from outside of the package."""

from __future__ import annotations

import copy
import itertools
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import peft
import pytest
import torch
import transformers.integrations.peft
from packaging import version
from peft import PeftModel, get_peft_model
from torch import Tensor, nn
from torch.utils.data import IterableDataset
from transformers import (
    BartConfig,
    BartForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from frozencore import (
    Core,
    FrozenCoreConfig,
    basis_id,
    calibrate,
    get_basis,
    load_basis,
    register_constructor,
    save_basis,
    set_basis,
)
from frozencore.adapter.layer import FrozenCoreLinear
from frozencore.constructors import CONSTRUCTORS, BasisOptions, Constructor, LayerData
from frozencore.maths.basis import LayerBasis, basis_from_factors
from frozencore.maths.moments import LayerMoments, MomentName
from frozencore.options import Bounds
from frozencore.tune.rows.row import TokenRow
from references import Array, Evidence

VOCABULARY = 40
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")


@dataclass(frozen=True)
class Example:
    """Token ids; the first ``num_prompt`` of them carry no loss."""

    ids: tuple[int, ...]
    num_prompt: int


def draw_examples(num_examples: int, seed: int, longest: int = 9) -> list[Example]:
    generator = torch.Generator().manual_seed(seed)

    def integer(low: int, high: int) -> int:
        return int(torch.randint(low, high, (), generator=generator))

    examples = []
    for _ in range(num_examples):
        length = integer(4, longest + 1)
        ids = tuple(integer(1, VOCABULARY) for _ in range(length))
        examples.append(Example(ids, integer(1, length - 1)))
    return examples


def draw_rows(num_rows: int, seed: int, longest: int = 9) -> list[TokenRow]:
    """The same examples as rows to train on."""
    examples = draw_examples(num_rows, seed, longest)
    return [TokenRow(f"row-{i}", list(example.ids), example.num_prompt) for i, example in enumerate(examples)]


def batch_of(
    examples: list[Example], side: Literal["left", "right"] = "right", padding_id: int = 7
) -> dict[str, Tensor]:
    """One batch, padded with a real token so that padding has x ≠ 0."""
    longest = max(len(example.ids) for example in examples)
    rows: dict[str, list[list[int]]] = {"input_ids": [], "attention_mask": [], "labels": []}
    for example in examples:
        missing = longest - len(example.ids)
        labels = [-100] * example.num_prompt + list(example.ids[example.num_prompt :])
        for key, values, filler in (
            ("input_ids", list(example.ids), padding_id),
            ("attention_mask", [1] * len(example.ids), 0),
            ("labels", labels, -100),
        ):
            padding = [filler] * missing
            rows[key].append(padding + values if side == "left" else values + padding)
    return {key: torch.tensor(value) for key, value in rows.items()}


def batches_of(
    examples: list[Example], batch_size: int, side: Literal["left", "right"] = "right"
) -> list[dict[str, Tensor]]:
    return [batch_of(examples[i : i + batch_size], side) for i in range(0, len(examples), batch_size)]


def with_positions(batches: list[dict[str, Tensor]]) -> list[dict[str, Tensor]]:
    """Left padding must not shift them: GPT-2's are absolute, and rotations by others round otherwise."""
    return [{**b, "position_ids": (b["attention_mask"].cumsum(1) - 1).clamp_min(0)} for b in batches]


def tiny_qwen2(seed: int = 0, **overrides: object) -> nn.Module:
    settings = {
        "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64, "initializer_range": 0.2,
        "tie_word_embeddings": True, "pad_token_id": 0,
    }  # fmt: skip
    return _made(Qwen2ForCausalLM, Qwen2Config(**{**settings, **overrides}), seed)


def tiny_llama(seed: int = 0) -> nn.Module:
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=64, initializer_range=0.2, pad_token_id=0,
    )  # fmt: skip
    return _made(LlamaForCausalLM, config, seed)


def tiny_gpt2(seed: int = 0) -> nn.Module:
    config = GPT2Config(
        vocab_size=VOCABULARY, n_embd=16, n_layer=2, n_head=2, n_positions=64, initializer_range=0.2,
        resid_pdrop=0.3, embd_pdrop=0.3, attn_pdrop=0.3, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    return _made(GPT2LMHeadModel, config, seed)


def tiny_bart(seed: int = 0) -> nn.Module:
    """A decoder that counts padding as positions, and whose own loss does not shift the labels."""
    config = BartConfig(
        vocab_size=VOCABULARY, d_model=16, decoder_layers=2, decoder_attention_heads=2, decoder_ffn_dim=24,
        max_position_embeddings=64, init_std=0.2, dropout=0.0, pad_token_id=0, bos_token_id=1, eos_token_id=2,
        decoder_start_token_id=2, forced_eos_token_id=None,
    )  # fmt: skip
    return _made(BartForCausalLM, config, seed)


def _made(kind: type[nn.Module], config: object, seed: int) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return kind(config).eval()


def attention_names(model: nn.Module) -> list[str]:
    """q, k, v and o of every layer, in the order of the model."""
    return [name for name, _ in model.named_modules() if name.rsplit(".", 1)[-1] in ATTENTION]


class AllLogits(Qwen2ForCausalLM):
    """Qwen2 with the arguments of an older model."""

    def forward(  # type: ignore[override]
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
    ) -> Any:
        return super().forward(input_ids=input_ids, attention_mask=attention_mask, labels=labels, use_cache=use_cache)


def tiny_all_logits(seed: int = 0) -> AllLogits:
    """The weights of ``tiny_qwen2``."""
    model: Any = tiny_qwen2(seed)
    model.__class__ = AllLogits
    return model


@dataclass(frozen=True)
class DrawnLayer:
    """Inputs X (N x n) and output errors E (N x m) of N tokens, and a weight W (m x n)."""

    X: Array
    E: Array
    W: Array

    def moments(self, dtype: torch.dtype = torch.float64) -> LayerMoments:
        """The moments that calibration would return."""
        X, E, Y = self.X, self.E, self.X @ self.W.T
        sums = {
            "cross": E.T @ X, "input_square": (X**2).sum(0), "error_square": (E**2).sum(0),
            "input_outer": X.T @ X, "error_outer": E.T @ E, "input_total": X.sum(0),
            "output_outer": Y.T @ Y, "output_total": Y.sum(0),
        }  # fmt: skip
        return LayerMoments(
            num_tokens=len(X), **{name: torch.tensor(value, dtype=dtype) for name, value in sums.items()}
        )

    def reference(self) -> Evidence:
        """The same, token by token, as means."""
        N, n = self.X.shape
        m = self.E.shape[1]
        e = Evidence(np.zeros((m, n)), np.zeros((n, n)), np.zeros((m, m)), self.W, np.zeros(n), np.zeros((m, m)),
                     np.zeros(m))  # fmt: skip
        for x, delta in zip(self.X, self.E, strict=True):
            y = self.W @ x
            e.G += np.outer(delta, x) / N
            e.A += np.outer(x, x) / N
            e.D += np.outer(delta, delta) / N
            e.x_mean += x / N
            e.Y += np.outer(y, y) / N
            e.y_mean += y / N
        return e

    def evidence(self, dtype: torch.dtype = torch.float64, name: str = "layer.0") -> LayerData:
        W = torch.tensor(self.W, dtype=dtype)
        return LayerData(name, self.W.shape, lambda: W, self.moments(dtype))


def drawn_layer(
    m: int = 12, n: int = 10, num_tokens: int = 150, seed: int = 0, spread: float = 1.5, mean: float = 0.4
) -> DrawnLayer:
    """Correlated tokens with coordinate scales from ``10^-spread`` to ``10^spread`` in a rotated frame."""
    rng = np.random.default_rng(seed)
    shared = rng.normal(size=(num_tokens, min(m, n) // 2 + 1))
    X = shared @ rng.normal(size=(shared.shape[1], n)) + rng.normal(size=(num_tokens, n)) + mean
    E = shared @ rng.normal(size=(shared.shape[1], m)) * 0.5 + rng.normal(size=(num_tokens, m))
    X *= 10 ** rng.uniform(-spread / 2, spread / 2, size=n)
    E *= 1e-2 * 10 ** rng.uniform(-spread / 2, spread / 2, size=m)
    return DrawnLayer(X, E, rng.normal(size=(m, n)))


def layer_of_rank(rank: int, m: int = 12, n: int = 10, seed: int = 0) -> DrawnLayer:
    """A layer whose cross moment, input and output error moments all have that rank."""
    rng = np.random.default_rng(seed)
    codes = rng.normal(size=(60, rank))
    X, E = codes @ rng.normal(size=(rank, n)), codes @ rng.normal(size=(rank, m))
    return DrawnLayer(X, E, rng.normal(size=(m, rank)) @ rng.normal(size=(rank, n)))


class Stream(IterableDataset):
    """Data without a known end."""

    def __iter__(self) -> Iterator[Any]:
        yield from itertools.cycle(EXAMPLES)


def refuse_by_device() -> None:
    raise torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate 2.00 GiB.")


def refuse_by_machine() -> None:
    torch.empty(2**50)


# ---------------------------------------------------------------------------------------------------- adapters

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


def on_two_bases(model: nn.Module, other: dict[str, object], **options: object) -> PeftModel:
    """Adapters a and b, each on a basis of its own."""
    model = get_peft_model(model, FrozenCoreConfig(r=3, constructor="random", **options), adapter_name="a")
    model.add_adapter("b", FrozenCoreConfig(**{"r": 2, "constructor": "vera", **options, **other}))
    for seed, name in enumerate("ab"):
        train_at_random(model, name, seed=seed)
    return model.eval()


def on_one_basis(*names: str, place: Path | None = None, **options: object) -> PeftModel:
    """Adapters of trained cores on one basis: each with a copy, or by the name of the basis saved at ``place``."""
    model = adapted("fcca", **options)
    first, basis = model.peft_config["default"], get_basis(model)
    if place is not None:
        save_basis(model, place)
    for seed, name in enumerate(names):
        model.add_adapter(name, copy.deepcopy(first))
        set_basis(model, basis if place is None else load_basis(place), adapter_name=name)
        train_at_random(model, name, seed=seed)
    model.delete_adapter("default")
    model.set_adapter(names[0])
    return model.eval()


def set_values(folder: Path, **changed: object) -> None:
    """Other values in the configuration of a saved adapter."""
    file = folder / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changed))


def cores_of(model: nn.Module, adapter_name: str = "default") -> list[FrozenCoreLinear]:
    return [m for m in model.modules() if isinstance(m, FrozenCoreLinear) and adapter_name in m.frozencore_R]


def factors_of(model: nn.Module, adapter_name: str = "default") -> list[Tensor]:
    """Copies of P, Q and R of every layer."""
    return [X.detach().clone() for layer in cores_of(model, adapter_name) for X in layer.factors(adapter_name)]


def core_with(model: nn.Module, cores: dict[str, Tensor]) -> Core:
    """A core on the model's basis, from R by layer name."""
    return Core.of(basis_id(model), cores)


def all_equal(one: list[Tensor], other: list[Tensor]) -> bool:
    return len(one) == len(other) and all(map(torch.equal, one, other))


def same_tensors(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    """Equal names, and equal values bit by bit."""
    return one.keys() == other.keys() and all(torch.equal(X, other[name]) for name, X in one.items())


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


@dataclass
class ToyOptions(BasisOptions):
    toy_offset: Annotated[int, Bounds(ge=0, le=8), "The coordinate that comes first."] = 0


def coordinates_from(offset: int, width: int, rank: int) -> Tensor:
    return torch.eye(width)[:, offset : offset + rank]


class Toy(Constructor[ToyOptions]):
    options = ToyOptions

    def needs(self, options: ToyOptions) -> frozenset[MomentName]:
        return frozenset()

    def build(self, layer: LayerData, options: ToyOptions) -> LayerBasis:
        P0, Q0 = (coordinates_from(options.toy_offset, width, options.r) for width in layer.shape)
        return basis_from_factors(P0, Q0, rank=options.r, spectrum=torch.empty(0), coordinates=options.coordinates)


TOY = Toy()


def register_toy(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a user would; forgotten when the test ends."""
    monkeypatch.setitem(CONSTRUCTORS, "toy", TOY)
    del CONSTRUCTORS["toy"]
    register_constructor("toy", TOY)
