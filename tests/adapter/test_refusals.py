"""What the room of the adapter refuses, in one line that names the way out; nothing is changed or written then."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache, partial
from inspect import signature
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import cpu_offload
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune
from transformers import Qwen2ForSequenceClassification

from families import make
from frozencore import (
    Core,
    CoreBank,
    FrozenCoreConfig,
    calibrate,
    export_basis_model,
    export_lora,
    export_merged,
    export_tenant,
    get_basis,
    get_core,
    load_basis,
    merge_adapters,
    prepare_swap,
    save_basis,
    set_basis,
    swap_core,
    tenant_weights,
)
from frozencore.adapter.config import INSTEAD_OF_LORA
from frozencore.adapter.folders import read_adapter
from frozencore.adapter.swap import round_core
from frozencore.calibration.collect import collect_moments
from frozencore.errors import ArtifactError, CalibrationError, ConfigError, FrozenCoreError, ModelError
from frozencore.maths.basis import LayerBasis, known_basis
from frozencore.maths.moments import LayerMoments
from tiny import BATCHES, adapted, attention_names, cores_of, same_tensors, tiny_llama, tiny_qwen2, train_at_random

Q, LAST = "model.layers.0.self_attn.q_proj", "model.layers.1.self_attn.o_proj"
Refusal = tuple[Callable[["Room"], object], type[FrozenCoreError], str]


@cache
def new(**options: Any) -> PeftModel:
    """An uncalibrated adapter; refusals leave it as it is, so that all rows share it."""
    return adapted(**{"constructor": "fcca", "calibrated": False, **options})


def merged(model: PeftModel) -> PeftModel:
    model.merge_adapter()
    return model


def lora() -> PeftModel:
    return get_peft_model(tiny_qwen2(), LoraConfig(target_modules=["q_proj"]))


def of_no_class(folder: Path) -> None:
    base = tiny_qwen2()
    base.save_pretrained(folder)
    base.config.architectures = ["Nobody"]
    base.config.save_pretrained(folder)


def quantised(folder: Path) -> None:
    tiny_qwen2().save_pretrained(folder)
    values = json.loads((folder / "config.json").read_text())
    values["quantization_config"] = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    (folder / "config.json").write_text(json.dumps(values))


def of_base_name(name: str | None, folder: Path) -> None:
    adapted("random").save_pretrained(folder)
    values = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps({**values, "base_model_name_or_path": name}))


def other_base() -> PeftModel:
    """Layers of a basis that do not say which base model they are of."""
    model = adapted("random", model=tiny_qwen2(seed=3), alpha=6.0)
    set_basis(model, get_basis(adapted("fcca", alpha=6.0)).layers)
    train_at_random(model)
    return model


FOLDERS: dict[str, Callable[[Path], object]] = {
    "base": lambda folder: tiny_qwen2().save_pretrained(folder),
    "base of other weights": lambda folder: tiny_qwen2(seed=3).save_pretrained(folder),
    "base of other shapes": lambda folder: tiny_llama().save_pretrained(folder),
    "classifier": lambda folder: Qwen2ForSequenceClassification(tiny_qwen2().config).save_pretrained(folder),
    "quantised base": quantised,
    "base of no class": of_no_class,
    "adapter": partial(of_base_name, None),
    "adapter of a lost base": partial(of_base_name, "/none/model"),
    "own basis": lambda folder: adapted("random", alpha=6.0, trained=True).save_pretrained(folder),
    "other scale": lambda folder: adapted("fcca", alpha=7.0, trained=True).save_pretrained(folder),
    "other rank": lambda folder: adapted("fcca", alpha=6.0, r=2, trained=True).save_pretrained(folder),
    "fewer layers": lambda folder: adapted("fcca", alpha=6.0, target_modules=["q_proj"]).save_pretrained(folder),
    "module": lambda folder: adapted("fcca", alpha=6.0, modules_to_save=["norm"]).save_pretrained(folder),
    "same basis": lambda folder: adapted("fcca", alpha=6.0, trained=True).save_pretrained(folder),
    "same basis, other base": lambda folder: other_base().save_pretrained(folder),
    "one side": lambda folder: adapted("random", trained=True, target_modules=["q_proj"]).save_pretrained(folder),
    "uncalibrated": lambda folder: adapted("fcca", calibrated=False).save_pretrained(folder),
    "on the head": lambda folder: adapted("random", model=tiny_llama(), target_modules=["lm_head"]).save_pretrained(
        folder
    ),
    "base of shared weights": lambda folder: make("zamba2").save_pretrained(folder),
    "of shared weights": lambda folder: adapted("random", model=make("zamba2")).save_pretrained(folder),
    "lora": lambda folder: lora().save_pretrained(folder),
    "basis": lambda folder: save_basis(adapted("fcca", alpha=6.0), folder),
    "basis of rawgrad": lambda folder: save_basis(adapted("rawgrad", alpha=6.0), folder),
    "basis of signgrad": lambda folder: save_basis(adapted("signgrad"), folder),
    "with a step": lambda folder: adapted("signgrad", initial_step=0.1).save_pretrained(folder),
    "mine": lambda folder: (folder.mkdir(), (folder / "thesis.txt").write_text("years of work")),
}  # fmt: skip


class Room:
    """A trained adapter ``default`` and another one on a basis of its own, an output folder, and folders by name."""

    def __init__(self, made: Path, out: Path) -> None:
        self._made, self.out = made, out
        self.model = adapted("fcca", alpha=6.0, trained=True)
        self.model.add_adapter("own", FrozenCoreConfig(r=3, alpha=6.0, constructor="random", seed=1))

    def __truediv__(self, name: str) -> Path:
        folder = self._made / name
        if not folder.exists():
            FOLDERS[name](folder)
        return folder

    @property
    def state(self) -> dict[str, Tensor]:
        return get_peft_model_state_dict(self.model, adapter_name="default")

    @property
    def core(self) -> Core:
        return read_adapter(self / "same basis").core

    def sum(self, adapters: list[str], weights: list[float], **options: Any) -> None:
        self.model.add_weighted_adapter(adapters, weights, "sum", **options)


# ------------------------------------------------------------------------------------------------- configurations

RANK, ALPHA = "r must be a whole number from 1 to 100000, but", "alpha must be a number above 0 or one of auto"
OPTIONS: list[tuple[dict[str, Any], str]] = [
    ({"constructor": "fca"}, "'fca'.*Did you mean 'fcca'"),
    ({"constructor": None}, "constructor"),
    ({"r": 0}, f"{RANK} 0 was given"),
    ({"r": "16"}, f"{RANK} '16' was given"),
    ({"rank_pattern": {"q_proj": -1}}, f"{RANK} -1 was given"),
    ({"alpha": 0}, f"{ALPHA} or none, but 0 was given"),
    ({"alpha": float("nan")}, f"{ALPHA} or none, but nan was given"),
    ({"alpha": "r"}, f"{ALPHA} or none, but 'r' was given"),
    ({"alpha_pattern": {"q_proj": 0}}, f"{ALPHA} or none, but 0 was given"),
    ({"damping": 0}, "damping must be a number above 0 or a list of 2"),
    ({"shrinkage": 0.5}, "needs fisher='dense'"),
    ({"initial_step": 0.1}, "'fcca' does not read initial_step .it is for signgrad.. Leave it out"),
    ({"layers_pattern": "layers"}, "layers_to_transform"),
    ({"target_modules": ".*q_proj", "layers_to_transform": [0]}, "`layers_to_transform` cannot be used when"),
    ({"target_modules": ".*q_proj", "layers_pattern": "layers"}, "`layers_pattern` cannot be used when"),
    *(({option: expression}, "") for expression in ("(", "a{99999999999}", "(" * 9000 + ")" * 9000)
      for option in ("target_modules", "exclude_modules")),
    *(({"rank_pattern": {expression: 2}}, "") for expression in ("(", "a{99999999999}", "(" * 9000 + ")" * 9000)),
    ({"allow_other_base": "false"}, "allow_other_base must be true or false, but 'false' was given"),
    ({"init_weights": 3}, "init_weights must be true or false, but 3 was given"),
    ({"learning_rate": "x"}, "learning_rate must be a number or none, but 'x' was given"),
    ({"layers_to_transform": "a"}, "layers_to_transform must be .*, but 'a' was given"),
    ({"target_modules": 3}, "target_modules must be .*, but 3 was given"),
    ({"rank_pattern": [1]}, "rank_pattern must be .*, but .1. was given"),
    *(({name: 1}, f"argument '{name}'. It is LoraConfig's: .*") for name in INSTEAD_OF_LORA),
    *(({name: 1}, f"unexpected keyword argument '{name}'. Give {ours} instead") for name, ours in (
        ("method", "constructor"), ("rank", "r"), ("lora_r", "r"), ("targets", "target_modules"), ("dampin", "damping")
    )),
]  # fmt: skip


@pytest.mark.usefixtures("as_a_user")
@pytest.mark.parametrize(("options", "message"), OPTIONS, ids=lambda value: str(value)[:60])
def test_a_configuration_refuses_what_it_cannot_mean(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as refused:
        FrozenCoreConfig(**options)
    assert len(str(refused.value)) < 500
    if "keyword" in message or "LoraConfig" in message:
        assert isinstance(refused.value, TypeError)  # as Python's own of an unknown argument, by which PEFT asks


def test_lora_has_the_names_that_are_refused_as_its() -> None:
    assert INSTEAD_OF_LORA.keys() <= signature(LoraConfig).parameters.keys()


# ---------------------------------------------------------------------------------------------------- adapters


def add(base: Callable[[], nn.Module] = tiny_qwen2, **options: Any) -> Callable[[Room], object]:
    return lambda _: get_peft_model(base(), FrozenCoreConfig(**{"r": 2, "constructor": "random", **options}))


ADDING: list[Refusal] = [
    (add(target_modules=["embed_tokens"]), ModelError, r"'model\.embed_tokens' is a Embedding"),
    (add(partial(make, "mixtral"), target_modules=["experts"]), ModelError, r"is a MixtralExperts.*fused experts"),
    (add(rank_pattern={"q_proj": 0}, target_modules=["q_proj"]), ConfigError, "rank_pattern gives each rank 0"),
    (add(target_modules=["q_proj"], layers_to_transform=[9]), ConfigError, r"layers_to_transform=\[9\] leaves none"),
    (add(target_modules=["q_prj"]), ConfigError, "Did you mean 'q_proj'.*are called down_proj, gate_proj, k_proj"),
    *((lambda room, name=name: room.model.add_adapter(name, FrozenCoreConfig(r=2, constructor="random")),
       ConfigError, r"An adapter's name is one plain part of a path .* Choose another name\.")
      for name in ("v1.5", ".", "..", "", "/", "a/b", "a\\b", " a", "a\n", "n" * 256, "train", "items", "share", "join",
                   "0", "1", "layers", "q_proj", "weight", "model", "base_layer", "__base__")),
]  # fmt: skip


@pytest.mark.parametrize(
    "options",
    [
        {"target_modules": ["q_proj", "norm"]},
        {"constructor": "compressed"},
        {"constructor": "lora_xs", "target_modules": ["q_proj", "k_proj"]},
    ],
    ids=str,
)
def test_a_refused_adapter_leaves_the_model_as_it_was(options: dict[str, Any]) -> None:
    base, half = with_nan(), FrozenCoreConfig(r=2, constructor="random", target_modules=["down_proj"])
    names, expected = [name for name, _ in base.named_modules()], base(**BATCHES[0]).logits
    with pytest.raises(FrozenCoreError):
        get_peft_model(base, FrozenCoreConfig(**{"r": 2, "constructor": "random", **options}))
    assert [name for name, _ in base.named_modules()] == names
    assert all(parameter.requires_grad for parameter in base.parameters())
    torch.testing.assert_close(base(**BATCHES[0]).logits, expected, rtol=0, atol=0, equal_nan=True)
    model = get_peft_model(base, half)
    assert {name.split(".")[-4] for name, p in model.named_parameters() if p.requires_grad} == {"down_proj"}
    with pytest.raises(FrozenCoreError):
        model.add_adapter("more", FrozenCoreConfig(**{"r": 2, "constructor": "random", **options}))
    assert list(model.peft_config) == ["default"]
    assert {name.split(".")[-4] for name, p in model.named_parameters() if p.requires_grad} == {"down_proj"}


# ------------------------------------------------------------------------------------------------------ bases


def wrong_basis(change: Callable[[dict[str, LayerBasis]], object], message: str) -> Refusal:
    def call(_: Room) -> None:
        layers = dict(get_basis(adapted("fcca", coordinates="qr")).layers)
        change(layers)
        set_basis(new(coordinates="qr"), layers)

    return call, ArtifactError, message


@cache
def moments() -> dict[str, LayerMoments]:
    return collect_moments(tiny_qwen2(), BATCHES, attention_names(tiny_qwen2()))


def wrong_moments(change: Callable[[dict[str, LayerMoments]], Mapping[str, LayerMoments]], message: str) -> Refusal:
    return lambda _: calibrate(new(), moments=change(dict(moments())), progress=False), FrozenCoreError, message


def with_nan() -> nn.Module:
    model = tiny_qwen2()
    model.model.layers[1].self_attn.k_proj.weight.data[0, 0] = float("nan")
    return model


def calibrated(model: Callable[[Room], nn.Module], data: Any = BATCHES, **options: Any) -> Callable[[Room], object]:
    return lambda room: calibrate(model(room), data, progress=False, **options)


BASES: list[Refusal] = [
    wrong_basis(lambda layers: layers.pop(LAST), f"has nothing for layer '{LAST}', and this model 32 x 32 of"),
    wrong_basis(lambda layers: layers.update({"lm_head": layers[LAST]}), "layer 'lm_head', and this model nothing"),
    wrong_basis(lambda layers: layers.update({LAST: known_basis(layers[LAST].P[:, :2], layers[LAST].Q[:, :2])}),
                "of rank 2 at .* of rank 3 at .* Use the adapter's rank"),
    (lambda _: set_basis(new(constructor="signgrad", initial_step=0.1),
                         get_basis(adapted("signgrad")).layers),
     ConfigError, "moments collected once"),
    (lambda _: set_basis(new(constructor="signgrad", initial_step=0.1), get_basis(adapted("signgrad"))),
     ConfigError, "a saved basis has none"),
    (lambda _: set_basis(new(), {name: replace(basis, P=basis.P * torch.nan)
                                 for name, basis in get_basis(adapted("random")).layers.items()}),
     CalibrationError, "NaN or Inf"),
    *((calibrated(lambda _: new(), loss_fn=loss_fn), CalibrationError, f"loss_fn returns one number, .*, not a {kind}")
      for loss_fn, kind in ((lambda model, batch: model(**batch), "CausalLMOutputWithPast"),
                            (lambda model, batch: model(**batch).logits, r"tensor of shape \("))),
    (lambda _: set_basis(tiny_qwen2(), {}), ConfigError, "get_peft_model"),
    (lambda _: get_basis(lora()), ConfigError, "get_peft_model"),
    (lambda _: get_basis(new()), CalibrationError, "needs a basis, but layer"),
    (lambda room: set_basis(room.model, get_basis(room.model)), CalibrationError, "Pass reset=True"),
    (lambda room: set_basis(adapted("random"), load_basis(room / "basis")), ArtifactError, "at scale 2 .* at scale 1 "),
    (lambda room: set_basis(adapted("random", model=tiny_qwen2(seed=2), alpha=6.0), load_basis(room / "basis")),
     ArtifactError, "another base model"),
    *((lambda room, name=name, value=value: FrozenCoreConfig(basis=str(room / "basis"), **{name: value}),
       ConfigError, f"Leave {name} out")
      for name, value in {"r": 4, "constructor": "eva", "alpha": 1.0}.items()),
    (lambda room: set_basis(adapted("random", alpha=6.0, target_modules=["q_proj"]), load_basis(room / "basis")),
     ArtifactError, "and this model nothing .6 layers differ"),
    (lambda room: get_peft_model(
        tiny_qwen2(), FrozenCoreConfig(basis=str(room / "basis of signgrad"), initial_step=0.1)),
     ConfigError, "a saved basis has none"),
    (calibrated(lambda room: room.model, adapter_name="default"), CalibrationError, "Pass reset=True"),
    (calibrated(lambda room: merged(room.model), adapter_name="own", reset=True), CalibrationError, "unmerge_adapter"),
    (calibrated(lambda _: new(model=with_nan())), CalibrationError, f"'{LAST}' in calibration batch 0"),
    wrong_moments(lambda held: {name: one for name, one in held.items() if name != LAST}, LAST),
    wrong_moments(lambda held: held | {LAST: held["model.layers.0.self_attn.k_proj"]}, LAST),
    (calibrated(lambda _: new(), None), CalibrationError, "calibrate\\(model, dataloader\\)"),
    (calibrated(lambda _: new(r=16), BATCHES[:1], num_examples=1), CalibrationError,
     "A basis of rank 16 is made of 16 tokens or more, but layer '.*' received [4-9]"),
    (calibrated(lambda _: new(), num_examples=0), ConfigError, "at least 1, but 0 was given"),
    (calibrated(lambda _: lora()), ConfigError, "no frozen-core adapter. Call peft.get_peft_model"),
    (calibrated(lambda room: room.model, adapter_name="nobody"), ConfigError, "'nobody'.*'default', 'own'"),
]  # fmt: skip

# ------------------------------------------------------------------------------------------- cores, sums, packing


def stale(change: Callable[[Room], object]) -> Callable[[Room], object]:
    def call(room: Room) -> None:
        ready = prepare_swap(room.model, room.core)
        change(room)
        ready.swap_in()

    return call


def pruned() -> PeftModel:
    model = adapted("fcca", alpha=6.0, trained=True)
    prune.l1_unstructured(cores_of(model)[0].frozencore_R["default"], "weight", 0.5)
    return model


def with_pruned_weight(base: nn.Module) -> nn.Module:
    prune.l1_unstructured(base.model.layers[0].self_attn.q_proj, "weight", 0.5)
    return base


def with_normed_weight(base: nn.Module) -> nn.Module:
    parametrizations.weight_norm(base.model.layers[0].self_attn.q_proj)
    return base


def offloaded(model: PeftModel | None = None) -> PeftModel:
    model = model or adapted("fcca", alpha=6.0, trained=True)
    return cpu_offload(model, torch.device("cpu"), offload_buffers=True)


def swap_in_offloaded(room: Room) -> None:
    ready = prepare_swap(model := adapted("fcca", alpha=6.0), room.core)
    offloaded(model)
    ready.swap_in()


def with_both(use: Callable[[PeftModel], object]) -> Callable[[Room], object]:
    def call(room: Room) -> None:
        room.model.base_model.set_adapter(["default", "own"])
        use(room.model)

    return call


OTHER_BASIS = "has a core on the basis [0-9a-f]{32}, but the model has [0-9a-f]{32}"
SOURCES: list[tuple[Callable[[Room], Any], str]] = [
    *((lambda room, name=name: room / name, OTHER_BASIS)
      for name in ("own basis", "other scale", "other rank", "fewer layers", "same basis, other base")),
    (lambda room: room / "module", "Only cores can be swapped"),
    (lambda room: {**room.state, "base_model.model.lm_head.weight": torch.ones(40, 32)}, "lm_head.weight"),
    (lambda room: Core(room.core.basis_id, room.core.values * torch.nan), "NaN"),
    (lambda room: Core(room.core.basis_id, room.core.values[:-1]), "has 72 values, but 71 were given"),
]  # fmt: skip
CORES: list[Refusal] = [
    *((lambda room, take=take, source=source: take(room.model, source(room)), ArtifactError, message)
      for take in (swap_core, lambda model, source: CoreBank(model, 1).put("a", source))
      for source, message in SOURCES),
    *((lambda room, use=use, made=made: use(made(), room), ModelError, message)
      for made, message in ((pruned, "computed from other tensors. Call torch.nn.utils.prune.remove"),
                            (offloaded, "accelerate offloaded that of layer"))
      for use in (lambda model, room: swap_core(model, room.core), lambda model, _: get_core(model),
                  lambda model, room: set_basis(model, load_basis(room / "basis"), reset=True))),
    *((with_both(use), ConfigError, "'default', 'own' are active. Give one as adapter_name") for use in
      (get_core, get_basis, tenant_weights, partial(round_core, bits=8), partial(export_lora, out="none"))),
    (swap_in_offloaded, ModelError, "accelerate offloaded that of layer"),
    (lambda _: get_peft_model_state_dict(pruned()), ModelError, "computed from other tensors"),
    (lambda room: get_peft_model_state_dict(room.model, adapter_name="default", state_dict={
        name: X for name, X in room.model.state_dict().items() if "layers.0" in name}),
     ArtifactError, "saved whole, but the state dict has 4 of its 8 cores"),
    (lambda room: swap_core(room.model, room.core, adapter_name="other"), ConfigError, "no .* adapter 'other', only"),
    (lambda room: swap_core(merged(room.model), room.core), ConfigError, "unmerge_adapter"),
    (stale(lambda room: room.model.merge_adapter()), ConfigError, "unmerge_adapter"),
    (stale(lambda room: set_basis(room.model, get_basis(room.model, "own"), adapter_name="default", reset=True)),
     ArtifactError, "What was prepared has a core on the basis"),
    (lambda room: room.sum(["default", "own"], [1.0, 1.0]), ArtifactError, "Cores are summed on one basis"),
    (lambda room: room.model.add_weighted_adapter(["default"], [1.0], "a.b"), ConfigError, "one plain part of a path"),
    (lambda _: merged(adapted("random", model=tiny_qwen2(tie_word_embeddings=True), target_modules=["lm_head"],
                              trainable_token_indices=[1])),
     ModelError, "'lm_head' computes its weight from other tensors"),
    *((lambda _, change=change: merged(adapted("random", model=change(tiny_qwen2()), trained=True)),
       ModelError, "q_proj' computes its weight from other tensors .trainable_token_indices, pruning")
      for change in (with_pruned_weight, with_normed_weight)),
    (lambda room: room.sum(["default"] * 2, [1.0]), ConfigError, "as many weights"),
    (lambda room: room.sum(["default"], [1e300]), ArtifactError, "with other weights"),
    (lambda room: room.sum(["default"], [float("nan")]), ConfigError, "weights of a sum are finite numbers, but nan"),
    (lambda room: room.sum([], []), ConfigError, "A sum has one core at least"),
    (lambda room: room.sum(["default"], [1.0], combination_type="ties", density=0.5), ConfigError, "'ties', density"),
    (lambda room: merge_adapters([room / "same basis", room / "own basis"], room.out), ArtifactError, "on one basis"),
    (lambda room: merge_adapters([room / "same basis", room / "module"], room.out), ConfigError, "other modules too"),
    (lambda room: merge_adapters([room / "same basis"] * 2, room.out, weights=[1.0]), ConfigError, "as many weights"),
    *((lambda room, bits=bits: merge_adapters([room / "same basis"], room.out, bits=bits),
       ConfigError, f"values of 8, 4, 2 or 32 bits, but {bits} was given") for bits in (1, 3, 5, 7)),
    (lambda room: merge_adapters([room / "same basis", room / "same basis, other base"], room.out),
     ArtifactError, "Cores are summed on one basis"),
    (lambda room: CoreBank(room.model, 1, dtype=torch.float64), ConfigError, "keeps cores in float32, bfloat16 or"),
    (lambda room: read_adapter(room / "lora"), ArtifactError, "has a LORA adapter"),
]  # fmt: skip

# ---------------------------------------------------------------------------------------------- exports, inspection


def to_lora(source: Callable[[Room], Any], **options: Any) -> Callable[[Room], object]:
    return lambda room: export_lora(source(room), room.out, **options)


def to_basis_model(adapter: str, base: str) -> Callable[[Room], object]:
    return lambda room: export_basis_model(room / adapter, room.out, base=room / base)


def huge() -> PeftModel:
    model = adapted("random")
    train_at_random(model, size=1e6)
    return model


LAYER = known_basis(torch.eye(12, 4), torch.eye(20, 4))
EXPORTS: list[Refusal] = [
    (to_lora(lambda _: adapted("random", modules_to_save=["lm_head"])), ConfigError, "lm_head"),
    (to_lora(lambda room: room / "module"), ConfigError, "a core alone, but this one trains .* .norm."),
    (to_lora(lambda _: adapted("random", trainable_token_indices=[1, 2])), ConfigError, "token embeddings"),
    (to_lora(lambda _: adapted("random"), dtype=torch.float64), ConfigError, "torch.float64"),
    (to_lora(lambda _: new()), CalibrationError, "needs a basis, but layer"),
    (to_lora(lambda _: tiny_qwen2()), ConfigError, "model has no frozen-core adapter"),
    (to_lora(lambda _: lora()), ConfigError, "model has no frozen-core adapter"),
    (to_lora(lambda room: room.model, adapter_name="third"), ConfigError, ".default., .own."),
    (to_lora(lambda _: huge(), dtype=torch.float16), ArtifactError, "NaN or Inf in torch.float16"),
    (to_lora(lambda room: room / "one side"), ArtifactError, "give base="),
    (to_lora(lambda room: room / "same basis", base=tiny_qwen2(hidden_size=48)), ArtifactError, "another base model"),
    (lambda room: export_lora(adapted("random"), room / "mine", overwrite=True), ArtifactError, "holds no model"),
    (lambda room: export_lora(room / "same basis", room / "same basis", overwrite=True), ArtifactError, "another fol"),
    (lambda room: export_merged(room / "adapter", room.out), ConfigError, "names no base model"),
    (lambda room: export_merged(room / "adapter of a lost base", room.out), ConfigError, "model, which is gone"),
    (lambda room: export_merged(room / "adapter", room.out, base=room.out), ModelError, "there is no such folder"),
    (lambda room: export_merged(room / "adapter", room.out, base=room / "quantised base"), ModelError, "is quantised"),
    (lambda room: export_merged(room / "adapter", room.out, base=room / "base of no class"),
     ModelError, "names the class Nobody, which transformers does not have. Give its folder"),
    (to_basis_model("uncalibrated", "base"), CalibrationError, "needs a basis, but layer"),
    (to_basis_model("on the head", "base of other shapes"), ModelError, "below the head"),
    (to_basis_model("own basis", "base of other weights"), ArtifactError, "was made on another base model"),
    (to_basis_model("own basis", "base of other shapes"), ArtifactError, "is of another base model"),
    (to_basis_model("own basis", "quantised base"), ModelError, "is quantised, and a basis stands beside plain"),
    (to_basis_model("own basis", "classifier"), ModelError, "is a Qwen2ForSequenceClassification"),
    (to_basis_model("of shared weights", "base of shared weights"), ModelError, "shares its weight with another layer"),
    (lambda room: export_tenant(new(), room.out), CalibrationError, "needs a basis, but layer"),
    (lambda room: export_tenant(adapted("random", modules_to_save=["norm"]), room.out), ConfigError, "too .norm"),
    (lambda room: export_tenant(room / "own basis", room.out, basis_model=room / "base"),
     ArtifactError, "no basis model"),
]  # fmt: skip

REFUSALS = [*ADDING, *BASES, *CORES, *EXPORTS]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("made")


def snapshot(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items() if ".base_layer." not in name}


@pytest.mark.usefixtures("as_a_user")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("call", "error", "message"), REFUSALS, ids=lambda value: value if type(value) is str else "")
def test_a_refusal_names_its_reason_and_changes_nothing(
    call: Callable[[Room], object], error: type[FrozenCoreError], message: str, made: Path, tmp_path: Path
) -> None:
    room = Room(made, tmp_path / "out")
    shared = new(coordinates="qr"), new()
    adapters, before = list(room.model.peft_config), [snapshot(model) for model in (room.model, *shared)]
    with pytest.raises(error, match=message):
        call(room)
    assert not room.out.exists()
    assert list(room.model.peft_config) == adapters
    for state, model in zip(before, (room.model, *shared), strict=True):
        if "What was prepared" not in message:  # there the adapter was given another basis first
            assert same_tensors(snapshot(model), state)
