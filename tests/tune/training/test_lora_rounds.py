"""LoRA in rounds: the sum is a plain LoRA, the base model is untouched, and a killed training goes on bit for bit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from torch import nn
from transformers import TrainerCallback

from frozencore.errors import ConfigError, DivergenceError, TrainingError
from frozencore.tune.methods import METHODS, AdapterOptions
from frozencore.tune.rows import TokenRow
from frozencore.tune.run.config import make_config
from frozencore.tune.scoring.forward import take_off
from frozencore.tune.training import train as train_module
from frozencore.tune.training.lora_rounds import LoRARounds
from frozencore.tune.training.recipe import Recipe
from frozencore.tune.training.train import TrainingReport, train
from tiny import ATTENTION, VOCABULARY, draw_examples, tiny_llama, tiny_qwen2

ROWS = [TokenRow(f"row-{i}", list(e.ids), e.num_prompt) for i, e in enumerate(draw_examples(8, seed=5))]
RECIPE = Recipe(learning_rate=3e-2, warmup=0.0, epochs=3, batch_size=2, accumulation=1, refresh=3)
STEPS_A_ROUND = 4
TOKENS = torch.arange(3, 15).reshape(2, 6) % VOCABULARY
RANK = 2


def logits(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(TOKENS).logits


def adapted(model: nn.Module | None = None, rank: int = RANK) -> PeftModel:
    return METHODS["lora"].add(model or tiny_qwen2(), AdapterOptions(rank, ATTENTION, 3, {}))


def trained(**options: Any) -> tuple[PeftModel, TrainingReport]:
    model = adapted()
    return model, train(model, ROWS, RECIPE, pad_id=0, **options)


def factors_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {key: value.detach().clone() for key, value in model.named_parameters() if "lora_" in key}


def test_the_sum_is_a_lora_of_all_rounds_that_peft_loads_on_the_original_base(tmp_path: Path) -> None:
    base = tiny_qwen2()
    original = {key: value.clone() for key, value in base.state_dict().items()}
    model = adapted(base)
    report = train(model, ROWS, RECIPE, pad_id=0)
    in_memory = logits(model)
    assert (in_memory - logits(tiny_qwen2())).abs().max() > 1e-2
    METHODS["lora"].save(model, tmp_path / "adapter", tmp_path / "start")
    loaded = PeftModel.from_pretrained(tiny_qwen2(), tmp_path / "adapter")
    assert loaded.peft_config["default"].r == 3 * RANK
    torch.testing.assert_close(logits(loaded), in_memory, atol=0, rtol=0)
    merged = PeftModel.from_pretrained(tiny_qwen2(), tmp_path / "adapter").merge_and_unload()
    torch.testing.assert_close(logits(merged), in_memory, atol=1e-5, rtol=1e-4)
    bare = take_off(model)
    assert all(torch.equal(bare.state_dict()[key], value) for key, value in original.items())
    assert report.rounds == 3
    at_once = sum(p.numel() for p in adapted().parameters() if p.requires_grad)
    assert report.values_at_once == at_once
    assert sum(factor.numel() for factor in factors_of(loaded).values()) == 3 * at_once


def test_it_is_lora_merged_by_hand_between_trainings_of_a_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """PEFT's own merge, a new adapter and a new optimiser, each round at the rates that the callback gave."""
    rates: list[float] = []
    batches: list[dict[str, torch.Tensor]] = []

    class Look(TrainerCallback):
        def on_pre_optimizer_step(self, *_: Any, optimizer: Any, **__: Any) -> None:
            rates.append(optimizer.param_groups[0]["lr"])

    class Looking(train_module.CompletionTrainer):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            self.add_callback(Look())

        def compute_loss(self, model: nn.Module, inputs: Any, *args: Any, **options: Any) -> Any:
            batches.append({key: value.clone() for key, value in inputs.items()})
            return super().compute_loss(model, inputs, *args, **options)

    monkeypatch.setattr(train_module, "CompletionTrainer", Looking)
    model, _ = trained()
    whole = tiny_qwen2()
    firsts = [first_factors(model, number) for number in range(3)]
    for number in range(3):
        own = adapted(whole)
        with torch.no_grad():
            for key, parameter in own.named_parameters():
                if "lora_A" in key:
                    parameter.copy_(firsts[number][key])
        optimiser = torch.optim.AdamW([p for p in own.parameters() if p.requires_grad], weight_decay=0.0)
        own.train()
        for step in range(number * STEPS_A_ROUND, (number + 1) * STEPS_A_ROUND):
            optimiser.param_groups[0]["lr"] = rates[step]
            own(**batches[step]).loss.backward()
            nn.utils.clip_grad_norm_(own.parameters(), 1.0)
            optimiser.step()
            optimiser.zero_grad()
        whole = own.merge_and_unload()
    torch.testing.assert_close(logits(model), logits(whole), atol=2e-4, rtol=2e-3)
    assert rates[STEPS_A_ROUND] < rates[STEPS_A_ROUND + 1]  # each round begins small


def first_factors(model: PeftModel, number: int) -> dict[str, torch.Tensor]:
    """A of each layer at the beginning of a round: PEFT's own draw, by the seed of the round."""
    drawn = adapted()
    if number:
        torch.manual_seed(RECIPE.seed + number)
        for module in drawn.modules():
            if hasattr(module, "reset_lora_parameters"):
                module.reset_lora_parameters("default", True)
    return factors_of(drawn)


def test_each_round_starts_from_the_sum_and_from_fresh_state() -> None:
    model = adapted()
    rounds = LoRARounds(model, 3)
    rounds._seed = 1
    optimiser = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    for number in range(1, 4):
        model(TOKENS).logits.square().sum().backward()
        optimiser.step()
        before, first = logits(model), factors_of(model)
        assert len(optimiser.state) == len(first)
        rounds.next_round(optimiser)
        torch.testing.assert_close(logits(model), before, atol=1e-5, rtol=1e-4)
        after = factors_of(model)
        assert all(not value.any() for key, value in after.items() if "lora_B" in key)
        assert not any(torch.equal(value, first[key]) for key, value in after.items())
        assert (rounds.round_now, len(optimiser.state)) == (number + 1, 0)
        rounds.take_back_round()
        torch.testing.assert_close(logits(model), before, atol=1e-5, rtol=1e-4)
        assert all(torch.equal(value, first[key]) for key, value in factors_of(model).items())
        rounds.next_round(optimiser)
    rounds.close()
    assert all(torch.equal(a, b) for a, b in zip(weights(model), weights(adapted()), strict=True))


def weights(model: nn.Module) -> list[torch.Tensor]:
    return [value for key, value in model.state_dict().items() if "lora_" not in key]


@pytest.mark.parametrize("stopped_at", [2, 4, 5, 8, 11])
def test_a_resumed_training_is_bit_equal_to_an_uninterrupted_one(stopped_at: int, tmp_path: Path) -> None:
    def stop(stage: str, done: int, total: int | None, note: str = "") -> None:
        if done == stopped_at:
            raise KeyboardInterrupt

    with pytest.raises((KeyboardInterrupt, TrainingError)):
        trained(checkpoint_dir=tmp_path, checkpoint_steps=1, progress=stop)
    resumed, report = trained(checkpoint_dir=tmp_path, checkpoint_steps=1, resume=True)
    whole, expected = trained()
    assert all(torch.equal(value, factors_of(resumed)[key]) for key, value in factors_of(whole).items())
    assert (report.rounds, report.values_at_once) == (3, expected.values_at_once)


def test_on_a_16_bit_base_the_sum_is_not_rounded_to_it() -> None:
    base = tiny_llama().to(torch.bfloat16)
    original = [value.clone() for value in base.state_dict().values()]
    model = adapted(base)
    train(model, ROWS, replace(RECIPE, learning_rate=1e-3), pad_id=0)
    assert {factor.dtype for factor in factors_of(model).values()} == {torch.float32}
    assert all(torch.equal(*pair) for pair in zip(take_off(model).state_dict().values(), original, strict=True))


def test_on_a_16_bit_base_earlier_rounds_are_computed_with_beside_weights_that_stay() -> None:
    model = adapted(tiny_llama().to(torch.bfloat16))
    rounds = LoRARounds(model, 2)
    rounds._seed = 1
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if "lora_B" in key:
                parameter.normal_(std=0.3, generator=torch.Generator().manual_seed(1))
    before, own = logits(model), weights(model)
    rounds.next_round(torch.optim.AdamW([p for p in model.parameters() if p.requires_grad]))
    assert all(torch.equal(*pair) for pair in zip(weights(model), own, strict=True))
    beside = (logits(model) - before).abs().max()
    rounds.close()
    assert beside < 0.05 * (logits(model) - before).abs().max()


def test_a_training_that_diverges_leaves_the_base_as_it_was() -> None:
    base = tiny_qwen2()
    original = {key: value.clone() for key, value in base.state_dict().items()}
    model = adapted(base)
    with pytest.raises(DivergenceError):
        train(model, ROWS, replace(RECIPE, learning_rate=1e30), pad_id=0)
    bare = take_off(model)
    assert all(torch.equal(bare.state_dict()[key], value) for key, value in original.items())


def test_what_does_not_add_up_is_refused_in_one_line() -> None:
    run = {"model": "pocket", "task": "pocket-math", "refresh": 2}
    assert make_config(**run, method="lora").refresh == 2
    for options, reason in (
        ({"method": "dora"}, "does not read"),
        ({"method": "pissa"}, "does not read"),
        ({"method": "full"}, "does not read"),
        ({"method": "lora", "refresh": "auto"}, "auto counts the rounds of a core"),
        ({"method": "lora", "refresh_cost": 0.5}, "does not read refresh_cost"),
        ({"method": "lora", "select_checkpoint": "epoch"}, "keeps its last step"),
    ):
        with pytest.raises(ConfigError, match=reason):
            make_config(**{**run, **options})
    options = AdapterOptions(RANK, ATTENTION, 3, {})
    with pytest.raises(ConfigError, match="not with use_dora=True"):
        LoRARounds(METHODS["dora"].add(tiny_qwen2(), options), 2)
    with pytest.raises(ConfigError, match="Only a frozen core or a LoRA"):
        LoRARounds(METHODS["full"].add(tiny_qwen2(), options), 2)
    with pytest.raises(ConfigError, match="at least one step, but refresh=99"):
        train(adapted(), ROWS, replace(RECIPE, refresh=99), pad_id=0)
