"""Every family of transformers against plain autograd, stock PEFT, and the table of docs/models.md."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from peft import PeftModel, get_peft_model
from torch import nn
from transformers import BertForQuestionAnswering, BertForSequenceClassification, BertForTokenClassification
from transformers.pytorch_utils import Conv1D

from families import FAMILIES, batch_for, make, outcome, row_on_page, rows_on_page, without_padding
from fixtures import few
from frozencore import FrozenCoreConfig, calibrate, export_lora, frozen_core_layers
from frozencore.errors import CalibrationError, ConfigError, ModelError

LARGEST_ERROR = 2e-5  # float32
REFUSED = {
    "calibrate": {"xlnet"},  # batches with padding: its layers read tokens first
    "merge": {"zamba", "zamba2"},  # two blocks share their weights
    "export": {"mamba", "mamba2", "falcon_h1", "nemotron_h"},  # PEFT refuses out_proj of these
}


FEW = (
    "llama", "gemma3n_text", "phi3", "gpt2", "falcon", "xlnet", "gpt_oss", "falcon_h1", "zamba", "qwen2_vl",
    "bert", "t5",
)  # fmt: skip
EVERY = few(FAMILIES, *FEW)


@pytest.mark.parametrize("name", EVERY)
def test_a_family_is_calibrated_trained_saved_merged_and_exported_as_the_plain_model(name: str) -> None:
    found = outcome(name)
    assert {step for step, names in REFUSED.items() if name in names} == found.refusals.keys(), found.refusals
    assert all(error < LARGEST_ERROR for error in found.errors.values()), found.errors
    assert found.row(name) == row_on_page(name), "python tests/families.py writes the table"


@pytest.mark.parametrize("name", EVERY)
def test_without_names_the_attention_projections_on_the_page_are_adapted_and_calibrated(name: str) -> None:
    base = make(name)
    linear = [layer for layer, module in base.named_modules() if isinstance(module, nn.Linear | Conv1D)]
    targets = tuple(f".{target}" for target in re.findall("`([^`]*)`", row_on_page(name).split("|")[2]))
    if not targets:
        with pytest.raises(ConfigError, match="No default layers are known .* target_modules"):
            get_peft_model(base, FrozenCoreConfig(r=2))
        return
    model = get_peft_model(base, FrozenCoreConfig(r=2))
    adapted = frozen_core_layers(model, "default")
    assert list(adapted) == [layer for layer in linear if layer.endswith(targets)]
    assert all(re.search("(?i)att|mixer|block.0|h.0.attn", layer) for layer in adapted)
    calibrate(model, list(without_padding(batch_for(base))), progress=False)
    assert all(layer.factors("default")[0].any() for layer in adapted.values())


def test_the_vision_tower_of_a_model_that_writes_text_is_no_default_target() -> None:
    adapted = frozen_core_layers(get_peft_model(make("qwen2_vl"), FrozenCoreConfig(r=2)), "default")
    assert all(layer.startswith("model.language_model.layers.0.self_attn.") for layer in adapted)
    assert len(adapted) == 4


def test_the_table_has_a_row_for_each_family() -> None:
    assert sorted(name for names, _ in rows_on_page() for name in names) == sorted(FAMILIES)


def test_a_classifier_whose_head_has_another_name_than_pefts_reloads(tmp_path: Path) -> None:
    model = get_peft_model(make("xlm classifier"), FrozenCoreConfig(r=2, constructor="random", task_type="SEQ_CLS"))
    model.save_pretrained(tmp_path)
    again = PeftModel.from_pretrained(make("xlm classifier"), tmp_path)
    ids = torch.tensor([[3, 4, 5]])
    assert torch.equal(model.eval()(ids).logits, again(ids).logits)


@pytest.mark.filterwarnings("error:No module is called")
@pytest.mark.parametrize(
    ("kind", "task_type", "head"),
    [
        (BertForSequenceClassification, "SEQ_CLS", "classifier"),
        (BertForTokenClassification, "TOKEN_CLS", "classifier"),
        (BertForQuestionAnswering, "QUESTION_ANS", "qa_outputs"),
    ],
)
@pytest.mark.parametrize("others", [None, ["word_embeddings"]])
def test_the_head_of_a_task_trains_and_is_saved(
    kind: type, task_type: str, head: str, others: list[str] | None, tmp_path: Path
) -> None:
    def base() -> nn.Module:
        torch.manual_seed(0)
        return kind(make("bert").config)

    config = FrozenCoreConfig(r=2, constructor="random", task_type=task_type, modules_to_save=others and [*others])
    model = get_peft_model(base(), config)
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert any(f".{head}." in name for name in trained)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name in trained:
                parameter.add_(0.1)
    model.save_pretrained(tmp_path)
    ids = torch.tensor([[3, 4, 5]])
    assert torch.equal(PeftModel.from_pretrained(base(), tmp_path)(ids)[0], model.eval()(ids)[0])


def test_a_router_is_no_target() -> None:
    with pytest.raises(ModelError, match="'model.layers.0.*router' is a .*Router.*routers"):
        get_peft_model(make("phimoe"), FrozenCoreConfig(target_modules=["router"]))


def test_a_layer_of_two_blocks_is_no_target_but_a_block_in_two_places_is() -> None:
    projection = nn.Linear(8, 8)
    blocks = nn.ModuleDict({name: nn.ModuleDict({"proj": projection}) for name in ("enc", "dec")})
    with pytest.raises(ModelError, match="'enc.proj' is 'dec.proj' too, and a core on it would act under the first"):
        get_peft_model(blocks, FrozenCoreConfig(r=2, target_modules=["proj"], constructor="random"))
    assert type(blocks["enc"]["proj"]) is nn.Linear
    block = nn.Sequential(nn.Linear(8, 8))
    twice = get_peft_model(
        nn.Sequential(block, nn.Tanh(), block),
        FrozenCoreConfig(r=2, target_modules=["0.0"], constructor="random", init_weights=False),
    )
    x = torch.randn(3, 8)
    own = twice.get_base_model()[0][0]
    assert torch.equal(twice(x), own(own(x).tanh()))
    assert not torch.allclose(twice(x), own.get_base_layer()(own.get_base_layer()(x).tanh()))


def test_a_layer_that_its_block_does_not_call_is_no_target() -> None:
    with pytest.raises(ModelError, match="MambaMixer computes with the weight of '.*mixer.dt_proj' .* no effect"):
        get_peft_model(make("mamba"), FrozenCoreConfig(constructor="random", target_modules=["dt_proj"]))
    attention = nn.Sequential(nn.MultiheadAttention(8, 2))
    with pytest.raises(ModelError, match="MultiheadAttention computes with the weight of '0.out_proj'"):
        get_peft_model(attention, FrozenCoreConfig(constructor="random", target_modules=["out_proj"]))


def test_a_layer_whose_weight_a_kernel_of_training_takes_is_refused_in_calibration(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Here a function stands for the kernel of ``mamba_ssm``, which computes with the weight of ``out_proj``."""

    def kernel(projected: torch.Tensor, *_: object, outproj_weight: torch.Tensor, **__: object) -> torch.Tensor:
        return projected[..., : outproj_weight.shape[1]] @ outproj_weight.mT

    model = get_peft_model(make("mamba2"), FrozenCoreConfig(r=2, target_modules=["in_proj", "out_proj"]))
    batches = list(without_padding(batch_for(model)))
    calibrate(model, batches, progress=False)
    monkeypatch.setattr("transformers.models.mamba2.modeling_mamba2.mamba2_split_conv1d_scan_combined", kernel)
    with pytest.raises(CalibrationError, match=r"'.*out_proj' .* received no counted token"):
        calibrate(model, batches, progress=False)
    assert not any(module.training for module in model.eval().modules())


def test_a_core_in_torchs_encoder_layer_acts_in_evaluation_as_in_training(monkeypatch: pytest.MonkeyPatch) -> None:
    def encoder(*, batch_first: bool) -> PeftModel:
        config = FrozenCoreConfig(r=2, constructor="random", target_modules=["linear1"], init_weights=False)
        return get_peft_model(nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=batch_first), config)

    with pytest.raises(ModelError, match=r"the weight of 'linear1' and does not .*set_fastpath_enabled.False."):
        encoder(batch_first=True)
    models = [encoder(batch_first=False)]
    monkeypatch.setattr(torch.backends.mha, "_is_fastpath_enabled", False)
    models.append(encoder(batch_first=True))
    x = torch.randn(3, 4, 8)
    for model in models:
        torch.testing.assert_close(model.eval()(x), model.train()(x))


@pytest.mark.parametrize("name", sorted(REFUSED["export"]))
def test_what_peft_refuses_is_not_exported(name: str, tmp_path: Path) -> None:
    model = get_peft_model(make(name), FrozenCoreConfig(r=2, constructor="random", target_modules=["out_proj"]))
    with pytest.raises(ConfigError, match="PEFT refuses it: .*out_proj.*--to merged"):
        export_lora(model, tmp_path / "lora")
    assert not (tmp_path / "lora").exists()
