"""DPO: against TRL's trainer on text, against the formula in float64, and as it leaves the model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import DPOConfig, DPOTrainer

from adapted import cores_of
from frozencore import FrozenCoreConfig
from frozencore.tune.pocket import pocket_model_path
from frozencore.tune.rows import Example, PreferenceRow
from frozencore.tune.rows.prompts import PromptEncoder
from frozencore.tune.rows.token_batches import PaddingCollator
from frozencore.tune.scoring.preferences import first_loss, score_preferences
from frozencore.tune.training.recipe import Recipe
from frozencore.tune.training.train import train
from resumed import require_bit_equal_resume

BETA = 0.3
PAIRS = [
    (f"tom has {i} apples and", f" {i % 3} pears .", f" the {i % 4} show was bad ." * (1 + i % 2)) for i in range(8)
]
RECIPE = Recipe(learning_rate=2e-2, warmup=0.0, epochs=3, batch_size=8, accumulation=1, beta=BETA)


@pytest.fixture(scope="module")
def encoder() -> PromptEncoder:
    return PromptEncoder(AutoTokenizer.from_pretrained(pocket_model_path()), preferences=True)


@pytest.fixture(scope="module")
def rows(encoder: PromptEncoder) -> list[PreferenceRow]:
    texts = [encoder.render(Example(str(i), p, c, (c, r))) for i, (p, c, r) in enumerate(PAIRS)]
    return encoder.preference_rows(texts)


def base_model() -> nn.Module:
    return AutoModelForCausalLM.from_pretrained(pocket_model_path(), dtype=torch.float32)


def adapted(config: Any = None) -> PeftModel:
    return get_peft_model(base_model(), config or FrozenCoreConfig(r=4, constructor="random", task_type="CAUSAL_LM"))


def trained(rows: list[PreferenceRow], encoder: PromptEncoder, model: PeftModel) -> tuple[PeftModel, Any]:
    return model, train(model, rows, RECIPE, pad_id=encoder.pad_id, tokenizer=encoder.tokenizer)


def test_the_training_and_its_score_are_those_of_trl_on_the_same_text(
    rows: list[PreferenceRow], encoder: PromptEncoder, tmp_path: Path
) -> None:
    model, report = trained(rows, encoder, adapted())
    text = Dataset.from_list([dict(zip(("prompt", "chosen", "rejected"), pair, strict=True)) for pair in PAIRS])
    theirs = DPOTrainer(
        base_model(),
        args=DPOConfig(
            str(tmp_path), learning_rate=RECIPE.learning_rate, lr_scheduler_type="cosine", num_train_epochs=3,
            beta=BETA,
            per_device_train_batch_size=8, per_device_eval_batch_size=8, weight_decay=0.0, logging_steps=1, bf16=False,
            use_cpu=True, report_to="none", disable_tqdm=True, save_strategy="no",
        ),
        train_dataset=text,
        processing_class=encoder.tokenizer,
        peft_config=FrozenCoreConfig(r=4, constructor="random", task_type="CAUSAL_LM"),
    )  # fmt: skip
    theirs.train()
    losses = [entry["loss"] for entry in theirs.state.log_history if "loss" in entry]
    assert report.losses == pytest.approx(losses, abs=1e-5)
    assert losses[-1] < 0.9 * losses[0]
    for mine, other in zip(cores_of(model), cores_of(theirs.model), strict=True):
        torch.testing.assert_close(mine.core("default"), other.core("default"), atol=1e-5, rtol=1e-3)
    score = score_preferences(model, rows, BETA, pad_id=encoder.pad_id)
    found = theirs.evaluate(text)
    assert score is not None
    assert score.held_out_loss == pytest.approx(found["eval_loss"], abs=1e-4)
    assert score.accuracy == pytest.approx(found["eval_rewards/accuracies"])


def test_the_score_is_the_formula_against_a_model_without_the_adapter(
    rows: list[PreferenceRow], encoder: PromptEncoder
) -> None:
    model = adapted()
    generator = torch.Generator().manual_seed(0)
    for layer in cores_of(model):
        layer.core("default").data = 0.3 * torch.randn(4, 4, generator=generator)
    score = score_preferences(model, rows, BETA, pad_id=encoder.pad_id)
    assert score is not None

    @torch.no_grad()
    def log_likelihood(of: nn.Module, ids: list[int], start: int) -> float:
        logprobs = of(input_ids=torch.tensor([ids])).logits[0].double().log_softmax(-1)
        return sum(float(logprobs[place - 1, ids[place]]) for place in range(start, len(ids)))

    reference, losses = base_model().eval(), []
    for row, prediction in zip(rows, score.predictions, strict=True):
        gains = [
            BETA * (log_likelihood(model.eval(), one.input_ids, row.num_context)
            - log_likelihood(reference, one.input_ids, row.num_context))
            for one in (row, row.rejected)
        ]  # fmt: skip
        assert prediction.logprobs == pytest.approx(gains, abs=1e-3)
        assert prediction.correct == (gains[0] > gains[1])
        losses.append(-torch.nn.functional.logsigmoid(torch.tensor(gains[0] - gains[1])))
    assert score.held_out_loss == pytest.approx(float(torch.stack(losses).mean()), abs=1e-4)
    assert 0 < sum(prediction.correct for prediction in score.predictions) < len(rows)


def test_calibration_takes_the_gradient_of_dpo_at_a_core_of_zeros(
    rows: list[PreferenceRow], encoder: PromptEncoder
) -> None:
    batch = PaddingCollator(encoder.pad_id)(rows)
    mine, whole = adapted(), adapted()
    first_loss(BETA)(mine, batch).backward()
    own = [
        torch.stack([
            whole(input_ids=torch.tensor([one.input_ids])).logits[0, :-1].log_softmax(-1)
            .gather(1, torch.tensor(one.input_ids[1:])[:, None])[row.num_context - 1 :].sum()
            for one in (row, row.rejected)
        ])
        for row in rows
    ]  # fmt: skip
    margins = torch.stack([gain[0] - gain[1] for gain in own])
    (-torch.nn.functional.logsigmoid(BETA * (margins - margins.detach()))).mean().backward()
    for layer, other in zip(cores_of(mine), cores_of(whole), strict=True):
        torch.testing.assert_close(layer.core("default").grad, other.core("default").grad, atol=1e-6, rtol=1e-3)
        assert layer.core("default").grad.any()


LORA = LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")


@pytest.mark.parametrize("config", [None, LORA], ids=["core", "LoRA"])
def test_the_model_is_afterwards_as_it_was_but_for_what_trained(
    config: Any, rows: list[PreferenceRow], encoder: PromptEncoder
) -> None:
    model = adapted(config)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    told = (model.config.pad_token_id, model.generation_config.pad_token_id, encoder.tokenizer.pad_token)
    trained(rows, encoder, model)
    assert model.state_dict().keys() == before.keys()
    changed = {name for name, value in model.state_dict().items() if not torch.equal(value, before[name])}
    assert changed == {name for name, p in model.named_parameters() if p.requires_grad}
    assert list(model.peft_config) == ["default"]
    assert not {"forward", "model_tags"} & vars(model.get_base_model()).keys()
    assert told == (model.config.pad_token_id, model.generation_config.pad_token_id, encoder.tokenizer.pad_token)
    assert getattr(model.peft_config["default"], "load_bases", False) is False


def test_trl_makes_no_bases_for_the_reference_that_it_does_not_need(
    rows: list[PreferenceRow], encoder: PromptEncoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, built = adapted(), []
    monkeypatch.setattr("frozencore.adapter.model.FrozenCoreModel._build_from_weight", lambda *_: built.append(1))
    trained(rows, encoder, model)
    assert not built


def test_trl_tells_nobody_of_the_training(
    rows: list[PreferenceRow], encoder: PromptEncoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[Any] = []
    monkeypatch.delenv("CI", raising=False)
    monkeypatch.setattr("trl.trainer.base_trainer.send_telemetry", lambda **options: told.append(options))
    trained(rows, encoder, adapted())
    assert not told


@pytest.mark.slow
def test_a_stopped_training_resumes_to_the_bit(
    rows: list[PreferenceRow], encoder: PromptEncoder, tmp_path: Path
) -> None:
    recipe = Recipe(learning_rate=5e-3, warmup=0.1, epochs=3, batch_size=2, accumulation=1, beta=BETA)
    require_bit_equal_resume(adapted, rows, recipe, tmp_path, tokenizer=encoder.tokenizer)


@pytest.fixture
def bytes_of(byte_tokenizer: Callable[..., Any]) -> Callable[..., PromptEncoder]:
    return lambda **options: PromptEncoder(byte_tokenizer(adds_start=True), preferences=True, **options)


def test_both_answers_follow_one_prompt_however_it_is_cut(bytes_of: Callable[..., PromptEncoder]) -> None:
    encoder = bytes_of(max_length=16, too_long="truncate")
    (text,) = [encoder.render(Example("1", "0123456789", " yes", (" yes", " certainly")))]
    (row,) = encoder.preference_rows([text])
    assert encoder.tokenizer.decode(row.input_ids) == "<s>6789 yes</s>"
    assert encoder.tokenizer.decode(row.rejected.input_ids) == "<s>6789 certainly</s>"
    assert len(row.rejected.input_ids) == 16


@pytest.mark.parametrize(("limit", "fits"), [(16, ["whole"]), (15, ["too long"])])
def test_a_pair_fits_if_its_longer_answer_does(
    limit: int, fits: list[str], bytes_of: Callable[..., PromptEncoder]
) -> None:
    encoder = bytes_of(max_length=limit)
    text = encoder.render(Example("1", "6789", " yes", (" yes", " certainly")))
    assert encoder.fits([text]) == fits
