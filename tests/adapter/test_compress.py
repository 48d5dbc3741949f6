"""LoRAs of PEFT and frozen cores, compressed into one basis and a core for each."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoHaConfig, LoraConfig, PeftConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from frozencore import (
    CoreBank,
    FrozenCoreConfig,
    export_basis_model,
    export_tenant,
    load_basis,
    merge_adapters,
    save_basis,
)
from frozencore.adapter.compress import compress_adapters
from frozencore.adapter.folders import read_adapter
from frozencore.adapter.one_base import is_same_name
from frozencore.errors import ArtifactError, ConfigError
from tiny import BATCHES, adapted, logits, tiny_gpt2, tiny_qwen2

ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
LORA = {"r": 2, "lora_alpha": 3, "target_modules": ATTENTION, "task_type": "CAUSAL_LM"}
LAYER = "model.layers.1.self_attn.v_proj"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base") / "base"
    tiny_qwen2().save_pretrained(folder)
    return folder


def base_of(folder: Path) -> Any:
    return named(tiny_qwen2(), folder)


def named(model: Any, folder: Path) -> Any:
    model.name_or_path = str(folder)  # PEFT records it
    return model


def write(base: Path, folder: Path, config: PeftConfig | None = None, seed: int = 0) -> Path:
    """An adapter with random values, as PEFT saves it."""
    model = get_peft_model(base_of(base), config or LoraConfig(**LORA))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.copy_(0.2 * torch.randn(parameter.shape, generator=generator))
    model.save_pretrained(str(folder))
    return folder


def core(base: Path, folder: Path, seed: int = 0, **options: Any) -> Path:
    model = adapted("fcca", model=base_of(base), trained=True, **options)
    model.save_pretrained(str(folder))
    return folder


def loaded(base: Path, folder: Path) -> Tensor:
    return logits(PeftModel.from_pretrained(base_of(base), str(folder)).eval())


def changed(change: Callable[[dict[str, Any], dict[str, Tensor]], object]) -> Callable[[Path, Path], object]:
    def made(base: Path, folder: Path) -> None:
        write(base, folder)
        config = json.loads((folder / "adapter_config.json").read_text())
        tensors = load_file(folder / "adapter_model.safetensors")
        change(config, tensors)
        (folder / "adapter_config.json").write_text(json.dumps(config))
        save_file(tensors, folder / "adapter_model.safetensors")

    return made


KINDS: dict[str, Callable[[Path, Path], object]] = {
    "plain": lambda base, folder: write(base, folder),
    "rslora": lambda base, folder: write(base, folder, LoraConfig(**{**LORA, "use_rslora": True, "r": 3})),
    "patterns": lambda base, folder: write(
        base, folder, LoraConfig(**LORA, rank_pattern={"q_proj": 1, f"^{LAYER}$": 4}, alpha_pattern={"k_proj": 11})
    ),
    "few layers": lambda base, folder: write(
        base, folder, LoraConfig(**{**LORA, "target_modules": ["v_proj"], "layers_to_transform": [1]})
    ),
    "mlp": lambda base, folder: write(base, folder, LoraConfig(**{**LORA, "target_modules": ["down_proj"], "r": 1})),
    "half precision": changed(
        lambda _, tensors: tensors.update({key: X.to(torch.bfloat16) for key, X in tensors.items()})
    ),
    "core": lambda base, folder: core(base, folder, r=2),
    "core in fisher coordinates": lambda base, folder: core(base, folder, r=2, coordinates="fisher", alpha="auto"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_an_adapter_that_fits_gives_the_same_outputs_as_a_core(kind: str, base: Path, tmp_path: Path) -> None:
    KINDS[kind](base, tmp_path / "own")
    done = compress_adapters({"anna": tmp_path / "own"}, tmp_path / "shop", rank=4)
    assert done.kept["anna"].share == pytest.approx(1.0, abs=1e-6)
    whole = loaded(base, tmp_path / "own")
    assert not torch.allclose(whole, logits(base_of(base)), atol=1e-2)
    torch.testing.assert_close(loaded(base, tmp_path / "shop/anna/adapter"), whole, atol=2e-4, rtol=1e-4)
    assert (tmp_path / "shop/anna/adapter/README.md").is_file()


def test_layers_of_gpt2_that_lie_the_other_way_round_are_compressed_too(tmp_path: Path) -> None:
    lora = get_peft_model(tiny_gpt2(), LoraConfig(r=2, target_modules=["c_attn"], init_lora_weights=False))
    lora.save_pretrained(str(tmp_path / "anna"))
    compress_adapters({"anna": tmp_path / "anna"}, tmp_path / "shop", rank=4)
    found = PeftModel.from_pretrained(tiny_gpt2(), str(tmp_path / "shop/anna/adapter")).eval()
    torch.testing.assert_close(logits(found), logits(lora.eval()), atol=2e-4, rtol=1e-4)


@pytest.fixture(scope="module")
def shop(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """LoRAs and cores together, on one basis."""
    folder = tmp_path_factory.mktemp("shop")
    write(base, folder / "anna")
    write(base, folder / "ben", LoraConfig(**{**LORA, "target_modules": ["q_proj", "o_proj"]}), seed=1)
    core(base, folder / "cleo", r=2)
    emil = adapted("fcca", model=base_of(base), r=2, trained=True)
    save_basis(emil, folder / "emil-basis")
    emil.save_pretrained(str(folder / "emil"))
    names = ("anna", "ben", "cleo", "emil")
    done = compress_adapters({name: folder / name for name in names}, folder / "shop", rank=8, base=tiny_qwen2())
    assert all(kept.share > 0.999 for kept in done.kept.values())
    assert done.kept["ben"].layers.keys() != done.kept["anna"].layers.keys()
    return folder


def test_mixed_adapters_share_a_basis_that_names_its_base_model_and_serve_from_a_bank(shop: Path, base: Path) -> None:
    basis = load_basis(shop / "shop/basis")
    assert basis.base is not None
    assert basis.base_model == str(base)
    assert "4 adapters" in str(basis.calibrated_on)
    assert sorted(basis.options["target_modules"]) == sorted(ATTENTION)
    model = get_peft_model(base_of(base), FrozenCoreConfig(basis=str(shop / "shop/basis"))).eval()
    bank = CoreBank(model, capacity=4)
    names = ["anna", "ben", "cleo", "emil"]
    for name in names:
        bank.put(name, str(shop / "shop" / name / "adapter"))
    ids = BATCHES[0]["input_ids"][:1]
    with torch.no_grad(), bank.rows([*names, None]):
        rows = model(input_ids=ids.expand(5, -1)).logits
    for row, name in zip(rows, names, strict=False):
        with torch.no_grad():
            whole = PeftModel.from_pretrained(base_of(base), str(shop / name)).eval()(input_ids=ids).logits[0]
        torch.testing.assert_close(row, whole, atol=5e-4, rtol=1e-3)


def test_compressed_adapters_are_summed_and_exported_as_tenants_of_a_basis_model(
    shop: Path, base: Path, tmp_path: Path
) -> None:
    both = merge_adapters(
        [shop / "shop/anna/adapter", shop / "shop/cleo/adapter"], tmp_path / "both", weights=[1.0, 0.0]
    )
    torch.testing.assert_close(loaded(base, both), loaded(base, shop / "anna"), atol=5e-4, rtol=1e-3)
    exported = export_basis_model(shop / "shop/basis", tmp_path / "model", base=base)
    tenant = export_tenant(shop / "shop/anna/adapter", tmp_path / "tenant", basis_model=tmp_path / "model")
    assert tenant.identity == exported.identity


def another_base(**options: Any) -> Callable[[Path, Path], object]:
    def made(base: Path, folder: Path) -> None:
        config = LoraConfig(**LORA, init_lora_weights=False)
        get_peft_model(named(tiny_qwen2(**options), base), config).save_pretrained(str(folder))

    return made


def of_other_weights(base: Path, folder: Path) -> None:
    adapted("fcca", model=named(tiny_qwen2(seed=9), base), trained=True).save_pretrained(str(folder))


def truncated(base: Path, folder: Path) -> None:
    file = write(base, folder) / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def pickled(base: Path, folder: Path) -> None:
    (write(base, folder) / "adapter_model.safetensors").rename(folder / "adapter_model.bin")


def conv(base: Path, folder: Path) -> None:
    model = named(nn.Sequential(nn.Conv2d(3, 4, 3)), base)
    get_peft_model(model, LoraConfig(r=2, target_modules=["0"])).save_pretrained(str(folder))


BAD: dict[str, tuple[Callable[[Path, Path], object], str]] = {
    "a folder that is no adapter": (lambda base, folder: tiny_qwen2().save_pretrained(folder), "no adapter_config"),
    "LoHa": (
        lambda base, folder: write(base, folder, LoHaConfig(r=2, target_modules=["q_proj"])), "peft_type is 'LOHA'",
    ),
    "DoRA": (lambda base, folder: write(base, folder, LoraConfig(**LORA, use_dora=True)), "use_dora is true"),
    "bias": (lambda base, folder: write(base, folder, LoraConfig(**LORA, bias="all")), "bias is 'all'"),
    "bias of LoRA": (lambda base, folder: write(base, folder, LoraConfig(**LORA, lora_bias=True)), "lora_bias set"),
    "modules": (
        lambda base, folder: write(base, folder, LoraConfig(**LORA, modules_to_save=["norm"])), "modules_to_save is",
    ),
    "an embedding": (
        lambda base, folder: write(base, folder, LoraConfig(**{**LORA, "target_modules": ["embed_tokens"]})),
        "adapts an embedding|the file holds",
    ),
    "tokens": (
        lambda base, folder: write(base, folder, LoraConfig(**LORA, trainable_token_indices=[1, 2])),
        "trainable_token_indices is set|the file holds",
    ),
    "convolution": (conv, "has A .2, 3, 3, 3."),
    "PiSSA": (
        lambda base, folder: write(base, folder, LoraConfig(**LORA, init_lora_weights="pissa")), "init_lora_weights",
    ),
    "NaN": (changed(lambda _, tensors: tensors[min(tensors)].fill_(torch.nan)), "NaN or Inf"),
    "truncated": (truncated, "is damaged"),
    "another rank than the configuration": (changed(lambda config, _: config.update(r=5)), "r = 5"),
    "a pattern that moves ranks": (changed(lambda config, _: config.update(rank_pattern={"q_proj": 4})), "has rank 2"),
    "an expression": (
        changed(lambda config, _: config.update(alpha_pattern={"(a+)+q_proj": 4})), "full names",
    ),
    "two alphas of a layer": (
        changed(lambda config, _: config.update(alpha_pattern={"k_proj": 3, "self_attn.k_proj": 4})), "two alphas",
    ),
    "no B": (changed(lambda _, tensors: tensors.pop(min(tensors))), "only"),
    "another name of a base": (
        changed(lambda config, _: config.update(base_model_name_or_path="else/where")),
        "names the base model else/where",
    ),
    "other shapes": (another_base(hidden_size=16), "8 x 16, which is 16 x 32 in the base model"),
    "more layers": (another_base(num_hidden_layers=3), "which is missing in the base model"),
    "never trained": (
        lambda base, folder: get_peft_model(base_of(base), LoraConfig(**LORA)).save_pretrained(str(folder)),
        "every product is zero",
    ),
    "pickled": (pickled, "never opened"),
    "other weights": (of_other_weights, "the weight of layer"),
    "trained modules beside cores": (lambda base, folder: core(base, folder, modules_to_save=["norm"]), "were trained"),
}  # fmt: skip


@pytest.mark.parametrize("kind", BAD)
def test_what_cannot_be_compressed_is_refused_in_one_line_and_left_out_on_request(
    kind: str, base: Path, tmp_path: Path
) -> None:
    make, message = BAD[kind]
    make(base, tmp_path / "bad")
    adapters = {"anna": write(base, tmp_path / "anna"), "bad": tmp_path / "bad", "ben": write(base, tmp_path / "ben")}
    model = tiny_qwen2()
    with pytest.raises(ArtifactError, match=message) as caught:
        compress_adapters(adapters, tmp_path / "shop", rank=4, base=model)
    assert "\n" not in str(caught.value)
    assert str(tmp_path / "bad") in str(caught.value)
    assert sorted(path.name for path in tmp_path.iterdir() if "shop" in path.name) == []
    done = compress_adapters(adapters, tmp_path / "shop", rank=4, base=model, skip_bad=True)
    assert list(done.kept) == ["anna", "ben"]
    assert done.skipped.keys() == {"bad"}
    assert not (tmp_path / "shop/bad").exists()


def test_without_the_base_model_sampled_weights_of_two_cores_are_compared(base: Path, tmp_path: Path) -> None:
    core(base, tmp_path / "anna")
    of_other_weights(base, tmp_path / "ben")
    with pytest.raises(ArtifactError, match="the weights of its base model"):
        compress_adapters({name: tmp_path / name for name in ("anna", "ben")}, tmp_path / "shop", rank=4)


def test_sampled_weights_of_cores_on_different_layers_are_compared(base: Path, tmp_path: Path) -> None:
    core(base, tmp_path / "anna", target_modules=["q_proj"])
    core(base, tmp_path / "ben", target_modules=["q_proj", "v_proj"])
    compress_adapters({name: tmp_path / name for name in ("anna", "ben")}, tmp_path / "shop", rank=8)
    assert load_basis(tmp_path / "shop/basis").base == read_adapter(tmp_path / "ben")[0].base_record
    other = adapted("fcca", model=named(tiny_qwen2(seed=9), base), trained=True, target_modules=["v_proj", "o_proj"])
    other.save_pretrained(str(tmp_path / "cleo"))
    with pytest.raises(ArtifactError, match=r"cleo the weights of its base model"):
        compress_adapters({name: tmp_path / name for name in ("anna", "ben", "cleo")}, tmp_path / "no", rank=8)


def of_name(name: str) -> Callable[[Path, Path], object]:
    return changed(lambda config, _: config.update(base_model_name_or_path=name))


NAMES = ("lab/Tiny-1B", "lab/Tiny-1B/", "/models/tiny-1b", "unsloth/tiny-1b-unsloth-bnb-4bit",
         "/root/.cache/models--lab--Tiny-1B/snapshots/0a1b")  # fmt: skip
SAME = [*combinations(NAMES, 2), ("./merged", "./merged/")]
UNLIKE = [
    ("lab/tiny-1b", "other/tiny-1b"), ("lab/tiny-1b", "lab/tiny-2b"), ("/a/mistral/merged", "/b/llama/merged"),
    ("/a/x/checkpoint-500", "/a/y/checkpoint-500"), ("lab/tiny-1b", "models--other--tiny-1b/snapshots/0a1b"),
]  # fmt: skip


@pytest.mark.parametrize(("one", "other", "same"), [*((*pair, True) for pair in SAME), *((*p, False) for p in UNLIKE)])
def test_which_names_may_be_of_one_model(one: str, other: str, same: bool) -> None:
    assert is_same_name(one, other) == is_same_name(other, one) == same


def test_two_folders_that_are_here_are_one_model_only_if_they_are_the_same(base: Path, tmp_path: Path) -> None:
    for parent in ("a", "b"):
        (tmp_path / parent / "tiny-1b").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "a/tiny-1b")
    assert is_same_name(str(tmp_path / "a/tiny-1b"), str(tmp_path / "link"))
    adapters = {}
    for name, of in {"anna": "lab/tiny-1b", "ben": f"{tmp_path}/a/tiny-1b", "cleo": f"{tmp_path}/b/tiny-1b"}.items():
        of_name(of)(base, tmp_path / name)
        adapters[name] = tmp_path / name
    done = compress_adapters(adapters, tmp_path / "shop", rank=2, skip_bad=True)
    assert done.skipped.keys() == {"cleo"}


def test_the_given_models_name_decides_and_the_commonest_where_no_adapter_has_it(base: Path, tmp_path: Path) -> None:
    adapters = {}
    for number, name in enumerate(NAMES):
        of_name(name)(base, folder := tmp_path / f"a{number}")
        adapters[folder.name] = folder
    for number in range(2):
        of_name("lab/other-1b")(base, folder := tmp_path / f"b{number}")
        adapters[folder.name] = folder
    assert compress_adapters(adapters, tmp_path / "shop", rank=2, skip_bad=True).skipped.keys() == {"b0", "b1"}
    own = {"anna": write(base, tmp_path / "anna")}
    model = base_of(base)
    done = compress_adapters(adapters | own, tmp_path / "one", rank=2, base=model, skip_bad=True)
    assert (list(done.kept), done.other_name) == (["anna"], None)
    some = {name: folder for name, folder in adapters.items() if name[0] == "a"}
    done = compress_adapters(some, tmp_path / "other", rank=2, base=model)
    assert done.other_name == NAMES[0]
    assert load_basis(tmp_path / "other/basis").base_model == str(base)
    quantised = {"a3": adapters["a3"]}  # the plain model's name is better than its 4-bit copy's
    compress_adapters(quantised, tmp_path / "plain", rank=2, base=named(tiny_qwen2(), Path(NAMES[0])))
    assert load_basis(tmp_path / "plain/basis").base_model == NAMES[0]


def test_two_revisions_of_a_model_are_two_models(base: Path, tmp_path: Path) -> None:
    for revision in ("step1000", "step9000", None):
        changed(lambda config, _, own=revision: config.update(revision=own))(base, tmp_path / str(revision))  # type: ignore[misc]
    adapters = {name: tmp_path / name for name in ("step1000", "None", "step9000")}
    with pytest.raises(ArtifactError, match="names revision step9000"):
        compress_adapters(adapters, tmp_path / "shop", rank=2)


def test_adapters_of_a_part_of_the_model_are_not_mixed_with_those_of_all_of_it(base: Path, tmp_path: Path) -> None:
    config = LoraConfig(r=2, target_modules=["down_proj"], init_lora_weights=False)  # no layer of anna's
    inner = get_peft_model(named(tiny_qwen2().model, base), config)
    inner.save_pretrained(str(tmp_path / "inner"))
    adapters = {"anna": write(base, tmp_path / "anna"), "inner": tmp_path / "inner"}
    for order in (adapters, dict(reversed(adapters.items()))):
        with pytest.raises(ArtifactError, match="saved from a part of the model"):
            compress_adapters(order, tmp_path / "shop", rank=4)


def test_a_layer_whose_name_is_the_end_of_anothers_is_the_only_one_of_its_adapter(tmp_path: Path) -> None:
    def net() -> nn.Module:
        torch.manual_seed(0)
        inner = nn.Sequential()
        inner.add_module("proj", nn.Linear(4, 4))
        outer = nn.Sequential()
        outer.add_module("proj", nn.Linear(4, 4))
        outer.add_module("inner", inner)
        return outer

    lora = get_peft_model(net(), LoraConfig(r=2, target_modules="proj", init_lora_weights=False))
    lora.save_pretrained(str(tmp_path / "anna"))
    compress_adapters({"anna": tmp_path / "anna"}, tmp_path / "shop", rank=2, base=net())
    found = PeftModel.from_pretrained(net(), str(tmp_path / "shop/anna/adapter")).eval()
    X = torch.randn(3, 4, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(found(X), lora.eval()(X), atol=2e-4, rtol=1e-4)


def test_an_adapter_without_the_tensors_of_a_layer_that_its_names_select_can_be_loaded(
    base: Path, tmp_path: Path
) -> None:
    changed(lambda _, tensors: [tensors.pop(key) for key in list(tensors) if LAYER in key])(base, tmp_path / "anna")
    compress_adapters({"anna": tmp_path / "anna"}, tmp_path / "shop", rank=4)
    found = loaded(base, tmp_path / "shop/anna/adapter")
    torch.testing.assert_close(found, loaded(base, tmp_path / "anna"), atol=2e-4, rtol=1e-4)


def test_what_fails_before_writing_leaves_nothing(base: Path, tmp_path: Path) -> None:
    def fails(names: object) -> None:
        assert list(names) == ["anna"]  # type: ignore[call-overload]
        raise ConfigError("not on this model")

    with pytest.raises(ConfigError, match="not on this model"):
        compress_adapters({"anna": write(base, tmp_path / "anna")}, tmp_path / "shop", rank=2, ready=fails)
    assert not (tmp_path / "shop").exists()


def test_a_wrong_rank_name_or_base_and_a_folder_in_use_are_refused(base: Path, tmp_path: Path) -> None:
    adapters = {"anna": write(base, tmp_path / "anna")}
    with pytest.raises(ConfigError, match="Give --rank 16 or less"):
        compress_adapters(adapters, tmp_path / "shop", rank=17)
    for name in ("../ben", "basis", "a/b", "", "..", "Compress.json", "my lora"):
        with pytest.raises(ConfigError, match="name becomes a folder's"):
            compress_adapters({name: tmp_path / "anna"}, tmp_path / "shop", rank=2)
    with pytest.raises(ConfigError, match="Load the plain model"):
        compress_adapters(adapters, tmp_path / "shop", rank=2, base=adapted("random"))
    with pytest.raises(ArtifactError, match="is there already"):
        compress_adapters(adapters, tmp_path / "anna", rank=2)
    with pytest.raises(ArtifactError, match="no adapter to compress"):
        compress_adapters({}, tmp_path / "shop", rank=2)


def test_a_hub_id_is_read_from_the_offline_cache(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cached = tmp_path / "models--org--anna"
    (cached / "refs").mkdir(parents=True)
    (cached / "refs/main").write_text("c" * 40)
    write(base, cached / "snapshots" / ("c" * 40))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("frozencore.files.adapter_folder.hub_answers", lambda *_: False)
    done = compress_adapters({"anna": "org/anna"}, tmp_path / "shop", rank=8)
    assert done.kept["anna"].share == pytest.approx(1)
    with pytest.raises(ArtifactError, match="org/ben"):
        compress_adapters({"ben": "org/ben"}, tmp_path / "other", rank=8)
