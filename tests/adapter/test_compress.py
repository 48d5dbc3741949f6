"""LoRAs of PEFT and frozen cores, compressed into one basis and a core for each."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoHaConfig, LoraConfig, PeftConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, Qwen2ForSequenceClassification

from frozencore import (
    CoreBank,
    FrozenCoreConfig,
    export_basis_model,
    export_merged,
    export_tenant,
    load_basis,
    merge_adapters,
    save_basis,
)
from frozencore.adapter.compress import compress_adapters
from frozencore.adapter.folders import read_adapter
from frozencore.errors import ArtifactError, ConfigError, ModelError
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


def write(
    base: Path, folder: Path, config: PeftConfig | None = None, seed: int = 0, like: nn.Module | None = None
) -> Path:
    """An adapter with random values, as PEFT saves it."""
    model = get_peft_model(base_of(base) if like is None else named(like, base), config or LoraConfig(**LORA))
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


def saved_as_pickle(base: Path, folder: Path) -> None:
    """What PEFT before 0.7 wrote: a .bin, and a configuration without later options."""
    file = write(base, folder) / "adapter_model.safetensors"
    torch.save(load_file(file), folder / "adapter_model.bin")
    file.unlink()
    config = json.loads((folder / "adapter_config.json").read_text())
    old = ("base_model_name_or_path", "bias", "fan_in_fan_out", "inference_mode", "lora_alpha", "lora_dropout",
           "modules_to_save", "peft_type", "r", "target_modules", "task_type")  # fmt: skip
    (folder / "adapter_config.json").write_text(json.dumps({name: config[name] for name in old}))


KINDS: dict[str, Callable[[Path, Path], object]] = {
    "plain": lambda base, folder: write(base, folder),
    "rslora": lambda base, folder: write(base, folder, LoraConfig(**{**LORA, "use_rslora": True, "r": 3})),
    "patterns": lambda base, folder: write(
        base, folder, LoraConfig(**LORA, rank_pattern={"q_proj": 1, f"^{LAYER}$": 4}, alpha_pattern={"k_proj": 11})
    ),
    "no update in some layers": lambda base, folder: write(
        base, folder, LoraConfig(**LORA, alpha_pattern={"k_proj": 0, "v_proj": 4})
    ),
    "few layers": lambda base, folder: write(
        base, folder, LoraConfig(**{**LORA, "target_modules": ["v_proj"], "layers_to_transform": [1]})
    ),
    "mlp": lambda base, folder: write(base, folder, LoraConfig(**{**LORA, "target_modules": ["down_proj"], "r": 1})),
    "half precision": changed(
        lambda _, tensors: tensors.update({key: X.to(torch.bfloat16) for key, X in tensors.items()})
    ),
    "expressions, as axolotl writes them": lambda base, folder: write(
        base,
        folder,
        LoraConfig(
            **LORA,
            rank_pattern={r".*\.layers\.1\..*(q_proj|k_proj)$": 4},
            alpha_pattern={r".*\.layers\.1\..*(q_proj|k_proj)$": 8},
        ),
    ),
    "a pickle of tensors": saved_as_pickle,
    "trained modules": lambda base, folder: write(
        base, folder, LoraConfig(**LORA, modules_to_save=["norm", "embed_tokens", "lm_head"])
    ),
    "tied embeddings": lambda base, folder: write(
        base, folder, LoraConfig(**LORA, modules_to_save=["embed_tokens"], ensure_weight_tying=True)
    ),
    "core": lambda base, folder: core(base, folder, r=2),
    "core with trained modules": lambda base, folder: core(base, folder, r=2, modules_to_save=["norm"]),
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


def test_equal_adapters_count_once_whatever_their_scales(base: Path, tmp_path: Path) -> None:
    for seed, name in enumerate(("anna", "ben", "cleo")):
        write(base, tmp_path / name, seed=seed)
    changed(lambda config, _: config.update(lora_alpha=9))(base, tmp_path / "scaled")  # the values of anna
    few = {name: tmp_path / name for name in ("anna", "ben", "cleo")}
    once = compress_adapters(few, tmp_path / "once", rank=3)
    again = compress_adapters({**few, "same": tmp_path / "anna", "scaled": tmp_path / "scaled"}, tmp_path / "b", rank=3)
    assert again.equal == {"same": "anna", "scaled": "anna"}
    for name, kept in again.kept.items():
        assert kept.share == pytest.approx(once.kept[again.equal.get(name, name)].share, rel=1e-6)
    one, three = (read_adapter(tmp_path / "b" / name / "adapter").core for name in ("anna", "scaled"))
    torch.testing.assert_close(3 * one.values, three.values)
    written = json.loads((tmp_path / "b/compress.json").read_text())["adapters"]
    assert {name: own.get("equal_to") for name, own in written.items() if "equal_to" in own} == again.equal


def test_ranks_follow_the_span_of_each_layer(base: Path, tmp_path: Path) -> None:
    ranks = {"q_proj": 1, f"^{LAYER}$": 4}
    write(base, tmp_path / "anna", LoraConfig(**LORA, rank_pattern=ranks))
    write(base, tmp_path / "ben", LoraConfig(**{**LORA, "target_modules": ["q_proj"]}), seed=1)
    adapters = {name: tmp_path / name for name in ("anna", "ben")}
    done = compress_adapters(adapters, tmp_path / "shop", rank=100, base=tiny_qwen2())  # k_proj is 16 wide
    layers = load_basis(tmp_path / "shop/basis").layers
    assert {layer: own.P.shape[1] for layer, own in layers.items()} == {
        layer: 4 if layer == LAYER else 3 if "q_proj" in layer else 2 for layer in layers
    }
    assert done.rank == 4
    for name in adapters:
        found = loaded(base, tmp_path / "shop" / name / "adapter")
        torch.testing.assert_close(found, loaded(base, tmp_path / name), atol=2e-4, rtol=1e-4)
    export_basis_model(tmp_path / "shop/basis", tmp_path / "model", base=base)
    export_tenant(tmp_path / "shop/anna/adapter", tmp_path / "tenant", basis_model=tmp_path / "model")


def test_sizes_are_those_of_the_files_and_one_basis_pays_where_it_is_smaller(base: Path, tmp_path: Path) -> None:
    config = LoraConfig(**{**LORA, "r": 8})
    for seed in range(8):
        file = write(base, tmp_path / f"{seed}", config) / "adapter_model.safetensors"
        turn = torch.randn(8, 8, generator=torch.Generator().manual_seed(seed))  # all B are in one span
        tensors = load_file(file)
        save_file({key: X @ turn if "lora_B" in key else X for key, X in tensors.items()}, file)
    few, many = ({f"{i}": tmp_path / f"{i}" for i in range(number)} for number in (1, 8))
    one, all_of_them = (compress_adapters(few, tmp_path / f"shop{len(few)}", rank=16).sizes for few in (few, many))
    for sizes, number in ((one, 1), (all_of_them, 8)):
        shop = tmp_path / f"shop{number}"
        cores = sum(file.stat().st_size for file in shop.glob("*/adapter/adapter_model.safetensors"))
        assert sizes.basis == (shop / "basis/basis.safetensors").stat().st_size
        assert sizes.after == sizes.basis + cores
        assert sizes.before == sum((tmp_path / f"{i}/adapter_model.safetensors").stat().st_size for i in range(number))
        assert sizes.kept == pytest.approx(1, abs=1e-5)
    assert one.after > one.before
    assert all_of_them.after < all_of_them.before
    assert one.kept_alone == pytest.approx(1)
    assert all_of_them.kept_alone < 0.9
    assert one.pays_from == all_of_them.pays_from == 2
    assert json.loads((tmp_path / "shop8/compress.json").read_text())["sizes"]["pays_from"] == 2
    again = {name: tmp_path / f"shop8/{name}/adapter" for name in ("0", "1")}
    sizes = compress_adapters(again, tmp_path / "again", rank=16).sizes
    factors = sum(X.nbytes for X in load_file(tmp_path / "shop8/basis/basis.safetensors").values())
    files = sum((folder / "adapter_model.safetensors").stat().st_size for folder in again.values())
    assert sizes.before == files + factors  # the basis that both name counts once
    rounded = compress_adapters(many, tmp_path / "rounded", rank=16, bits=4).sizes
    assert rounded.kept < 0.999 < rounded.kept_unrounded == pytest.approx(all_of_them.kept, abs=1e-6)
    assert rounded.kept_alone < all_of_them.kept_alone  # in the bytes of the rounded cores


def test_a_lora_of_the_head_needs_the_model_to_compare_the_copy_of_its_weight(base: Path, tmp_path: Path) -> None:
    write(base, tmp_path / "anna", LoraConfig(**{**LORA, "target_modules": ["q_proj", "lm_head"]}))
    assert any(".base_layer." in key for key in load_file(tmp_path / "anna/adapter_model.safetensors"))
    adapters = {"anna": tmp_path / "anna"}
    with pytest.raises(ArtifactError, match=r"'lm_head', which only --model can compare"):
        compress_adapters(adapters, tmp_path / "shop", rank=2)
    with pytest.raises(ArtifactError, match=r"'lm_head', which is not the base model's"):
        compress_adapters(adapters, tmp_path / "shop", rank=2, base=tiny_qwen2(seed=9))
    compress_adapters(adapters, tmp_path / "shop", rank=2, base=tiny_qwen2())
    found = loaded(base, tmp_path / "shop/anna/adapter")
    torch.testing.assert_close(found, loaded(base, tmp_path / "anna"), atol=2e-4, rtol=1e-4)


def test_a_classifiers_head_stands_beside_its_core_unchanged(base: Path, tmp_path: Path) -> None:
    def classifier() -> Any:
        plain = tiny_qwen2()
        plain.config.num_labels, plain.config.pad_token_id = 3, 0
        torch.manual_seed(0)
        model = Qwen2ForSequenceClassification(plain.config)
        model.model.load_state_dict(plain.model.state_dict())
        return named(model.eval(), base)

    write(base, tmp_path / "causal")
    for seed, name in enumerate(("anna", "ben")):
        model = get_peft_model(classifier(), LoraConfig(**{**LORA, "task_type": "SEQ_CLS"}, init_lora_weights=False))
        model.base_model.model.score.modules_to_save["default"].weight.data.fill_(0.1 + seed)
        model.save_pretrained(str(tmp_path / name))
    config = json.loads((tmp_path / "ben/adapter_config.json").read_text())
    config["modules_to_save"] = None  # as PEFT wrote it once
    (tmp_path / "ben/adapter_config.json").write_text(json.dumps(config))
    adapters = {name: tmp_path / name for name in ("anna", "ben", "causal")}
    done = compress_adapters(adapters, tmp_path / "shop", rank=8)
    assert done.sizes.modules == round(2 * 4 * 3 * tiny_qwen2().config.hidden_size / 3)
    ids = BATCHES[0]["input_ids"]
    for name in ("anna", "ben"):
        files = [tmp_path / name, tmp_path / "shop" / name / "adapter"]
        heads = [load_file(file / "adapter_model.safetensors")["base_model.model.score.weight"] for file in files]
        assert torch.equal(*heads)
        with torch.no_grad():
            one, other = (PeftModel.from_pretrained(classifier(), str(file)).eval()(ids).logits for file in files)
        torch.testing.assert_close(other, one, atol=5e-4, rtol=1e-3)
    torch.testing.assert_close(
        loaded(base, tmp_path / "shop/causal/adapter"), loaded(base, tmp_path / "causal"), atol=5e-4, rtol=1e-3
    )
    with pytest.raises(ModelError, match=r"trained 'score' as a whole, which .* .Qwen2ForCausalLM. lacks"):
        export_merged(tmp_path / "shop/anna/adapter", tmp_path / "merged", base=base)
    assert not (tmp_path / "merged").exists()


def test_a_head_with_factors_of_its_own_is_no_module_that_was_trained_as_a_whole(base: Path, tmp_path: Path) -> None:
    """PEFT itself cannot load such a file of its own: it puts factors on the head, and trains it as a whole too."""
    write(base, tmp_path / "anna")
    file = tmp_path / "anna/adapter_model.safetensors"
    score = {"lora_A.weight": torch.ones(2, 8), "lora_B.weight": torch.ones(3, 2), "base_layer.bias": torch.ones(3)}
    save_file(load_file(file) | {f"base_model.model.score.{name}": X for name, X in score.items()}, file)
    config = json.loads((tmp_path / "anna/adapter_config.json").read_text())
    (tmp_path / "anna/adapter_config.json").write_text(json.dumps({**config, "task_type": "SEQ_CLS"}))
    with pytest.raises(ArtifactError, match=r"as 'base_model.model.score.base_layer.bias'"):
        compress_adapters({"anna": tmp_path / "anna"}, tmp_path / "shop", rank=2)


def test_an_adapter_with_embeddings_of_new_tokens_keeps_the_tokenizer_that_has_them(
    byte_tokenizer: Callable[..., Any], tmp_path: Path
) -> None:
    tokenizer = byte_tokenizer()
    new = len(tokenizer)
    tiny_qwen2(vocab_size=new, tie_word_embeddings=False).save_pretrained(tmp_path / "base")
    tokenizer.add_tokens(["<new>"])
    model = tiny_qwen2(vocab_size=new, tie_word_embeddings=False)
    model.resize_token_embeddings(new + 1)
    config = LoraConfig(**LORA, init_lora_weights=False, modules_to_save=["embed_tokens", "lm_head"])
    lora = get_peft_model(named(model, tmp_path / "base"), config).eval()
    for saved in (lora, tokenizer):
        saved.save_pretrained(str(tmp_path / "anna"))
    write(tmp_path / "base", tmp_path / "ben", like=tiny_qwen2(vocab_size=new, tie_word_embeddings=False))
    tokenizer.save_pretrained(tmp_path / "ben")
    compress_adapters({name: tmp_path / name for name in ("anna", "ben")}, tmp_path / "shop", rank=8)
    export_merged(tmp_path / "shop/anna/adapter", tmp_path / "merged", base=tmp_path / "base")
    ids = torch.tensor([[3, new, 5]])
    with torch.no_grad():
        found, expected = (
            one(input_ids=ids).logits for one in (AutoModelForCausalLM.from_pretrained(tmp_path / "merged"), lora)
        )
    torch.testing.assert_close(found, expected, atol=5e-4, rtol=1e-3)
    assert not (tmp_path / "shop/ben/adapter/tokenizer.json").exists()  # a core alone is kilobytes


@pytest.mark.parametrize(("rank", "bits"), [(2, 8), (16, 4)])
def test_bits_are_those_of_the_rank_that_is_found(rank: int, bits: int, base: Path, tmp_path: Path) -> None:
    write(base, tmp_path / "anna", LoraConfig(**{**LORA, "r": rank}))
    done = compress_adapters({"anna": tmp_path / "anna"}, tmp_path / "shop", rank=32, bits=None)
    assert (done.rank, done.bits) == (rank, bits)
    assert read_adapter(tmp_path / "shop/anna/adapter").core.bits == bits


def test_each_core_has_the_task_of_its_adapter(base: Path, tmp_path: Path) -> None:
    write(base, tmp_path / "anna")
    changed(lambda config, _: config.update(task_type="FEATURE_EXTRACTION"))(base, tmp_path / "ben")
    compress_adapters({name: tmp_path / name for name in ("anna", "ben")}, tmp_path / "shop", rank=2)
    tasks = [read_adapter(tmp_path / "shop" / name / "adapter").config.task_type for name in ("anna", "ben")]
    assert tasks == ["CAUSAL_LM", "FEATURE_EXTRACTION"]


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
    assert tenant.basis_id == exported.basis_id


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
    (write(base, folder) / "adapter_model.safetensors").unlink()
    torch.save({"base_model.model.x": Path("x")}, folder / "adapter_model.bin")


def pickle_of(content: dict[Any, Any]) -> Callable[[Path, Path], object]:
    def made(base: Path, folder: Path) -> None:
        (write(base, folder) / "adapter_model.safetensors").unlink()
        torch.save(content, folder / "adapter_model.bin")

    return made


def pointer(name: str) -> Callable[[Path, Path], object]:
    def made(base: Path, folder: Path) -> None:
        text = "version https://git-lfs.github.com/spec/v1\noid sha256:" + "a" * 64 + "\nsize 4100\n"
        (write(base, folder) / name).write_text(text)

    return made


def conv(base: Path, folder: Path) -> None:
    model = named(nn.Sequential(nn.Conv2d(3, 4, 3)), base)
    get_peft_model(model, LoraConfig(r=2, target_modules=["0"])).save_pretrained(str(folder))


BAD: dict[str, tuple[Callable[[Path, Path], object], str]] = {
    "a folder that is no adapter": (lambda base, folder: tiny_qwen2().save_pretrained(folder), "no adapter_config"),
    "LoHa": (
        lambda base, folder: write(base, folder, LoHaConfig(r=2, target_modules=["q_proj"])), "PEFT's type 'LOHA'",
    ),
    "of MLX": (changed(lambda config, _: config.pop("peft_type")), "has no peft_type: it is not PEFT's"),
    "DoRA": (lambda base, folder: write(base, folder, LoraConfig(**LORA, use_dora=True)), "use_dora"),
    "bias": (lambda base, folder: write(base, folder, LoraConfig(**LORA, bias="all")), "bias='all'"),
    "bias of LoRA": (lambda base, folder: write(base, folder, LoraConfig(**LORA, lora_bias=True)), "lora_bias"),
    "a module that the configuration does not name": (
        changed(lambda _, tensors: tensors.update({"base_model.model.model.norm.weight": torch.ones(32)})),
        "more than factors",
    ),
    "an embedding": (
        lambda base, folder: write(base, folder, LoraConfig(**{**LORA, "target_modules": ["embed_tokens"]})),
        "adapts an embedding",
    ),
    "tokens": (
        lambda base, folder: write(base, folder, LoraConfig(**LORA, trainable_token_indices=[1, 2])),
        "embeddings of tokens .trainable_token_indices.",
    ),
    "convolution": (conv, "no two matrices of one rank in '0', but A .2, 3, 3, 3."),
    "PiSSA": (
        lambda base, folder: write(base, folder, LoraConfig(**LORA, init_lora_weights="pissa")), "init_lora_weights",
    ),
    "NaN": (changed(lambda _, tensors: tensors[min(tensors)].fill_(torch.nan)), "NaN or Inf"),
    "truncated": (truncated, "is damaged"),
    "another rank than the configuration": (changed(lambda config, _: config.update(r=5)), "its configuration has 5"),
    "a pattern that moves ranks": (changed(lambda config, _: config.update(rank_pattern={"q_proj": 4})), "has rank 2"),
    "a malformed expression": (
        changed(lambda config, _: config.update(alpha_pattern={"(q_proj": 4})), "malformed alpha_pattern",
    ),
    "factors of experts": (
        changed(lambda config, _: config.update(target_parameters=["mlp.experts.down_proj"], r=5)),
        "stacked parameters, as those of experts .target_parameters.",
    ),
    "empty tensors": (
        changed(lambda _, tensors: tensors.update({min(tensors): torch.zeros(0)})), "as DeepSpeed ZeRO-3 leaves it",
    ),
    "no tensors": (changed(lambda _, tensors: tensors.clear()), "as DeepSpeed ZeRO-3 leaves it"),
    "keys of a state dict": (
        changed(lambda _, tensors: tensors.update({"base_model.model.x.lora_A.default.weight": torch.ones(2, 2)})),
        "and what modules_to_save names, as 'base_model.model.x.lora_A.default.weight'",
    ),
    "a pointer of Git LFS": (pointer("adapter_model.safetensors"), "adapter_model.safetensors is a pointer of Git LFS"),
    "a configuration that is a pointer": (pointer("adapter_config.json"), "adapter_config.json is a pointer of Git"),
    "no B": (changed(lambda _, tensors: tensors.pop(max(tensors))), "but A .2, 32."),
    "other shapes": (another_base(hidden_size=16), "8 x 16, which is 16 x 32 in the base model"),
    "more layers": (another_base(num_hidden_layers=3), "which is missing in the base model"),
    "never trained": (
        lambda base, folder: get_peft_model(base_of(base), LoraConfig(**LORA)).save_pretrained(str(folder)),
        "every product is zero",
    ),
    "a pickle of more than tensors": (pickled, "is damaged"),
    "a pickle of a state dict inside": (pickle_of({"state_dict": {"x": torch.ones(2)}}), "'state_dict' is no name"),
    "a pickle with numbers for names": (pickle_of({5: torch.ones(2)}), "5 is no name of a tensor"),
    **{
        f"a malformed {name}, {value!r}": (
            changed(lambda config, _, name=name, value=value: config.update({name: value})), f"a malformed {name} ",
        )
        for name, value in (("task_type", "FOO"), ("task_type", ["CAUSAL_LM"]), ("base_model_name_or_path", 5),
                            ("revision", {}), ("modules_to_save", [5]), ("modules_to_save", 5))
    },
    **{
        f"factors times {factor:g}": (
            changed(lambda _, tensors, factor=factor: [X.mul_(factor) for X in tensors.values()]), "cannot square in",
        )
        for factor in (1e25, 1e-25)
    },
    "a layer that another adapts, trained as a whole": (
        lambda base, folder: write(
            base, folder, LoraConfig(**{**LORA, "target_modules": ["q_proj"]}, modules_to_save=["v_proj"])
        ),
        "trains the layer 'model.layers.[01].self_attn.v_proj' as a whole .modules_to_save., which an earlier",
    ),
    "other weights": (of_other_weights, "another weight of layer"),
    "trained tokens beside cores": (
        lambda base, folder: core(base, folder, trainable_token_indices=[1, 2]), "trains embeddings of tokens",
    ),
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
    assert "--skip-bad" in str(caught.value)
    assert "--skip-bad" not in done.skipped["bad"]
    assert not (tmp_path / "shop/bad").exists()


def test_without_the_base_model_sampled_weights_of_two_cores_are_compared(base: Path, tmp_path: Path) -> None:
    core(base, tmp_path / "anna")
    of_other_weights(base, tmp_path / "ben")
    with pytest.raises(ArtifactError, match="made on other weights"):
        compress_adapters({name: tmp_path / name for name in ("anna", "ben")}, tmp_path / "shop", rank=4)


def test_sampled_weights_of_cores_on_different_layers_are_compared(base: Path, tmp_path: Path) -> None:
    core(base, tmp_path / "anna", target_modules=["q_proj"])
    core(base, tmp_path / "ben", target_modules=["q_proj", "v_proj"])
    compress_adapters({name: tmp_path / name for name in ("anna", "ben")}, tmp_path / "shop", rank=8)
    assert load_basis(tmp_path / "shop/basis").base == read_adapter(tmp_path / "ben").find_basis().base
    other = adapted("fcca", model=named(tiny_qwen2(seed=9), base), trained=True, target_modules=["v_proj", "o_proj"])
    other.save_pretrained(str(tmp_path / "cleo"))
    with pytest.raises(ArtifactError, match="cleo was made on other weights"):
        compress_adapters({name: tmp_path / name for name in ("anna", "ben", "cleo")}, tmp_path / "no", rank=8)


def of_name(name: str) -> Callable[[Path, Path], object]:
    return changed(lambda config, _: config.update(base_model_name_or_path=name))


def with_names(base: Path, folder: Path, names: dict[str, tuple[str | None, str | None]]) -> dict[str, Path]:
    """LoRAs that give their base model these names and revisions."""
    for name, (model, revision) in names.items():
        fields = {"base_model_name_or_path": model, "revision": revision}
        changed(lambda config, _, own=fields: config.update(own))(base, folder / name)  # type: ignore[misc]
    return {name: folder / name for name in names}


def test_names_of_one_model_are_equal_unless_the_caller_or_the_model_says_so(base: Path, tmp_path: Path) -> None:
    names = {"a": "lab/Tiny-1B", "b": "lab/Tiny-1B", "c": "D:\\models\\tiny-1b", "d": None, "e": "/kaggle/input/1"}
    adapters = with_names(base, tmp_path, {name: (of, None) for name, of in names.items()})
    said = r"where 2 of 5 name lab/Tiny-1B.*--same-base, or --model .*Nor can 1 other be compressed: e\. .*--skip-bad"
    with pytest.raises(ArtifactError, match=said):
        compress_adapters(adapters, tmp_path / "shop", rank=2)
    done = compress_adapters(adapters, tmp_path / "equal", rank=2, skip_bad=True)
    assert (list(done.kept), list(done.skipped)) == (["a", "b", "d"], ["c", "e"])
    done = compress_adapters(adapters, tmp_path / "said", rank=2, same_base=True)
    assert (list(done.kept), done.other_names) == (
        list(names),
        ["/kaggle/input/1", "D:\\models\\tiny-1b", "lab/Tiny-1B"],
    )
    assert load_basis(tmp_path / "said/basis").base_model == "lab/Tiny-1B"
    done = compress_adapters(adapters, tmp_path / "model", rank=2, base=base_of(base))
    assert (list(done.kept), done.other_names) == (
        list(names),
        ["/kaggle/input/1", "D:\\models\\tiny-1b", "lab/Tiny-1B"],
    )
    assert load_basis(tmp_path / "model/basis").base_model == str(base)


def test_a_model_that_once_had_no_owner_has_two_names(base: Path, tmp_path: Path) -> None:
    names = {"a": ("distilgpt2", None), "b": ("distilbert/distilgpt2", None), "c": ("somebody/distilgpt2", None)}
    done = compress_adapters(with_names(base, tmp_path, names), tmp_path / "shop", rank=2, skip_bad=True)
    assert (list(done.kept), list(done.skipped)) == (["a", "b"], ["c"])
    model = base_of(base)
    model.name_or_path = "distilbert/distilgpt2"
    few = {name: tmp_path / name for name in ("a", "b")}
    assert compress_adapters(few, tmp_path / "model", rank=2, base=model).other_names == []


def test_two_revisions_of_a_model_are_two_models(base: Path, tmp_path: Path) -> None:
    revisions = ("main", None, "step9000")
    adapters = with_names(base, tmp_path, {str(one): ("lab/tiny", one) for one in revisions})
    with pytest.raises(ArtifactError, match="lab/tiny at revision step9000"):
        compress_adapters(adapters, tmp_path / "shop", rank=2)
    compress_adapters(adapters, tmp_path / "one", rank=2, same_base=True)
    compress_adapters({"anna": adapters["step9000"]}, tmp_path / "later", rank=2)
    assert PeftConfig.from_pretrained(tmp_path / "later/anna/adapter").revision == "step9000"


def renamed(rename: Callable[[str], str]) -> Callable[[Path, Path], object]:
    def change(_: object, tensors: dict[str, Tensor]) -> None:
        found = {rename(key): X for key, X in tensors.items()}
        assert found.keys() != tensors.keys()
        tensors.clear()
        tensors.update(found)

    return changed(change)


WRAPPED = {
    "compile": lambda key: key.replace("layers.1.", "layers.1._orig_mod."),
    "checkpointing": lambda key: key.replace(".self_attn", "._checkpoint_wrapped_module.self_attn"),
    "fsdp": lambda key: key.replace("model.model.", "model._fsdp_wrapped_module.model."),
}


@pytest.mark.parametrize("wrapper", WRAPPED)
def test_a_lora_of_a_wrapped_model_has_the_layers_of_the_plain_one(wrapper: str, base: Path, tmp_path: Path) -> None:
    write(base, tmp_path / "plain")
    renamed(WRAPPED[wrapper])(base, tmp_path / "wrapped")
    both = {name: tmp_path / name for name in ("plain", "wrapped")}
    done = compress_adapters(both, tmp_path / "shop", rank=2)
    assert all(kept.share == pytest.approx(1.0, abs=1e-6) for kept in done.kept.values())
    assert load_basis(tmp_path / "shop/basis").layers.keys() == {
        f"model.layers.{i}.self_attn.{name}" for i in range(2) for name in ATTENTION
    }
    torch.testing.assert_close(
        loaded(base, tmp_path / "shop/wrapped/adapter"), loaded(base, tmp_path / "plain"), atol=2e-4, rtol=1e-4
    )


def test_adapters_of_a_part_of_the_model_are_not_mixed_with_those_of_all_of_it(base: Path, tmp_path: Path) -> None:
    config = LoraConfig(r=2, target_modules=["down_proj"], init_lora_weights=False)  # no layer of anna's
    inner = get_peft_model(named(tiny_qwen2().model, base), config)
    inner.save_pretrained(str(tmp_path / "inner"))
    adapters = {"anna": write(base, tmp_path / "anna"), "inner": tmp_path / "inner"}
    for order in (adapters, dict(reversed(adapters.items()))):
        with pytest.raises(ArtifactError, match=r"in (model\.)?layers, where .* theirs in (model\.)?layers"):
            compress_adapters(order, tmp_path / "shop", rank=4)


def test_layers_of_another_class_of_the_model_are_refused_with_both_names(base: Path, tmp_path: Path) -> None:
    write(base, tmp_path / "plain")
    renamed(lambda key: key.replace("model.layers", "model.language_model.layers"))(base, tmp_path / "other")
    both = {name: tmp_path / name for name in ("plain", "other")}
    for same_base in (False, True):
        with pytest.raises(ArtifactError, match=r"in model.language_model.layers, where .* in model.layers\."):
            compress_adapters(both, tmp_path / "shop", rank=2, same_base=same_base)
    with pytest.raises(ArtifactError, match=r"'model.language_model.layers.0.* missing in the base model"):
        compress_adapters(both, tmp_path / "shop", rank=2, base=tiny_qwen2())


@pytest.mark.parametrize("part", ["model.language_model", "base_model.model.model", "model.layers.0.experts.0"])
def test_layers_that_no_class_of_the_named_model_has_are_refused_without_the_model(
    part: str, base: Path, tmp_path: Path
) -> None:
    renamed(lambda key: key.replace("model.layers", f"{part}.layers"))(base, tmp_path / "anna")
    with pytest.raises(ArtifactError, match=f"'{part}.layers.0.* in the base model"):
        compress_adapters({"anna": tmp_path / "anna"}, tmp_path / "shop", rank=2)


def test_an_adapter_of_another_class_of_the_named_model_is_compressed(base: Path, tmp_path: Path) -> None:
    config = LoraConfig(r=2, target_modules=ATTENTION, init_lora_weights=False)
    inner = get_peft_model(named(tiny_qwen2().model, base), config)
    inner.save_pretrained(str(tmp_path / "inner"))
    assert compress_adapters({"inner": tmp_path / "inner"}, tmp_path / "shop", rank=8).num_layers == 8


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


def test_options_of_a_later_peft_are_named_once_if_they_are_set(base: Path, tmp_path: Path) -> None:
    for name in ("anna", "ben"):
        changed(lambda config, _: config.update(use_later=True, later_config=None))(base, tmp_path / name)
    adapters = {name: tmp_path / name for name in ("anna", "ben")}
    with pytest.warns(UserWarning, match=r"does not know.*: use_later\.") as said:
        compress_adapters(adapters, tmp_path / "shop", rank=2)
    assert len({str(one.message) for one in said}) == 1


def test_what_fails_before_writing_leaves_nothing(base: Path, tmp_path: Path) -> None:
    def fails(names: object) -> None:
        assert list(names) == ["anna"]  # type: ignore[call-overload]
        raise ConfigError("not on this model")

    with pytest.raises(ConfigError, match="not on this model"):
        compress_adapters({"anna": write(base, tmp_path / "anna")}, tmp_path / "shop", rank=2, ready=fails)
    assert not (tmp_path / "shop").exists()


def test_a_wrong_rank_name_or_base_and_a_folder_in_use_are_refused(base: Path, tmp_path: Path) -> None:
    adapters = {"anna": write(base, tmp_path / "anna")}
    with pytest.raises(ConfigError, match="rank of 1 or more, but 0 was given"):
        compress_adapters(adapters, tmp_path / "shop", rank=0)
    for name in ("../ben", "basis", "a/b", "", "..", "Compress.json", "my lora"):
        with pytest.raises(ConfigError, match="name becomes a folder's"):
            compress_adapters({name: tmp_path / "anna"}, tmp_path / "shop", rank=2)
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
    monkeypatch.setattr("frozencore.files.hub_client.hub_answers", lambda *_: False)
    done = compress_adapters({"anna": "org/anna"}, tmp_path / "shop", rank=8)
    assert done.kept["anna"].share == pytest.approx(1)
    with pytest.raises(ArtifactError, match="org/ben"):
        compress_adapters({"ben": "org/ben"}, tmp_path / "other", rank=8)
