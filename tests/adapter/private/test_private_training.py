"""A Trainer's private steps: what is drawn, cut, added, counted, refused and resumed."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import PeftModel
from torch import Tensor
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import DataLoader
from transformers import (
    AutoModelForCausalLM,
    EarlyStoppingCallback,
    OPTConfig,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)
from transformers.integrations import TensorBoardCallback
from transformers.optimization import GreedyLR
from transformers.trainer_utils import SaveStrategy

from adapted import adapted, cores_of
from frozencore import PrivateTraining, per_example_gradients
from frozencore.adapter.private import checks, private_training, sampling
from frozencore.adapter.private.private_training import clipped_sum
from frozencore.errors import ConfigError, DataError, TrainingError
from frozencore.privacy import PrivateBudget, Schedule
from frozencore.tune.rows import TokenRow
from frozencore.tune.training.batching import lay_end_to_end
from frozencore.tune.training.callbacks import LossMonitor
from tiny import VOCABULARY, Example, batch_of, draw_examples, tiny_qwen2

opacus = pytest.importorskip("opacus")

ROWS = draw_examples(num_examples=24, seed=3)
SECRET = "5a" * 32


def arguments(folder: Path, **options: Any) -> TrainingArguments:
    own = {
        "per_device_train_batch_size": 2, "gradient_accumulation_steps": 3, "num_train_epochs": 2, "max_grad_norm": 0.0,
        "learning_rate": 1e-2, "logging_steps": 1, "save_strategy": "no", "report_to": "none", "disable_tqdm": True,
        "remove_unused_columns": False, "use_cpu": True, "dataloader_pin_memory": False,
    }  # fmt: skip
    return TrainingArguments(output_dir=str(folder), **{**own, **options})


def trainer_of(folder: Path, model: PeftModel | None = None, **options: Any) -> Trainer:
    callbacks = options.pop("callbacks", [])
    return Trainer(
        model=adapted("random", trained=True) if model is None else model, args=arguments(folder, **options),
        train_dataset=ROWS, data_collator=batch_of, callbacks=callbacks,
    )  # fmt: skip


def private(trainer: Trainer, **options: Any) -> PrivateTraining:
    return PrivateTraining(trainer, **{"epsilon": 8.0, "delta": 1e-3, "clip": 0.5, **options})


@pytest.fixture(autouse=True)
def same_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(private_training, "new_secret", lambda: SECRET)


def cores(model: Any) -> Tensor:
    return torch.cat([layer.core("default").detach().flatten() for layer in cores_of(model)])


@pytest.fixture
def noises(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """The noise of each step, in order."""
    drawn: list[Tensor] = []

    def noise_of(secret: str, step: int, total: Tensor) -> Tensor:
        drawn.append(sampling.noise_of(secret, step, total))
        return drawn[-1]

    monkeypatch.setattr(private_training, "noise_of", noise_of)
    return drawn


class Keeps(TrainerCallback):
    """The gradient and the cores before each optimiser step."""

    def __init__(self) -> None:
        self.gradients: list[Tensor] = []
        self.cores: list[Tensor] = []

    def on_pre_optimizer_step(self, *_: Any, model: Any, **__: Any) -> None:
        self.gradients.append(torch.cat([layer.core("default").grad.flatten() for layer in cores_of(model)]))
        self.cores.append(cores(model))


def with_cores(model: PeftModel, values: Tensor) -> PeftModel:
    start = 0
    for layer in cores_of(model):
        R = layer.core("default")
        R.data.copy_(values[start : start + R.numel()].view_as(R))
        start += R.numel()
    return model


def test_each_step_is_the_noised_sum_of_a_loop_over_the_drawn_rows(tmp_path: Path, noises: list[Tensor]) -> None:
    keeps = Keeps()
    trainer = trainer_of(tmp_path, callbacks=[keeps])
    own = private(trainer)
    trainer.train()
    schedule = own.schedule
    assert (schedule.num_steps, schedule.rows_a_step, schedule.num_rows) == (8, 6, 24)
    assert len({tuple(sampling.drawn_rows(SECRET, step, 24, 0.25)) for step in range(8)}) > 1
    model, cut = adapted("random", trained=True), 0
    for step, (gradient, values) in enumerate(zip(keeps.gradients, keeps.cores, strict=True)):
        with_cores(model, values)
        total = torch.zeros_like(values)
        for index in sampling.drawn_rows(SECRET, step, 24, 6 / 24):
            loss = model(**batch_of([ROWS[index]])).loss
            one = torch.autograd.grad(loss, [layer.core("default") for layer in cores_of(model)])
            g = torch.cat([part.flatten() for part in one])
            cut += bool(g.norm() > 0.5)
            total += g * min(1.0, 0.5 / float(g.norm()))
        noise = noises[step] * schedule.noise_multiplier * 0.5
        torch.testing.assert_close(gradient, (total + noise) / 6, rtol=5e-5, atol=1e-6)
    assert cut  # or clipping was not tried


def test_a_row_adds_no_more_than_the_clipping_length_and_nothing_if_it_is_not_finite() -> None:
    generator = torch.Generator().manual_seed(0)
    gradients = torch.randn(50, 7, generator=generator) * torch.logspace(-4, 4, 50).unsqueeze(1)
    for one in gradients:
        total, _ = clipped_sum(one.unsqueeze(0), 0.3)
        assert float(total.norm()) <= 0.3
        if one.norm() < 0.29:
            torch.testing.assert_close(total, one)
    expected = sum(g * min(1.0, 0.3 / float(g.norm())) for g in gradients)
    broken = torch.cat([gradients, torch.full((1, 7), torch.nan), torch.full((1, 7), torch.inf)])
    torch.testing.assert_close(clipped_sum(broken, 0.3)[0], expected, rtol=1e-4, atol=1e-5)
    assert not clipped_sum(torch.empty(0, 7), 0.3)[0].any()


def test_the_noise_has_the_promised_variance_and_differs_between_steps() -> None:
    """Bounds of six standard errors; the draws are the same in every run of this test."""
    total = torch.zeros(4096)
    noise = torch.stack([sampling.noise_of(SECRET, step, total) for step in range(50)]).double()
    count = noise.numel()
    assert abs(float(noise.mean())) < 6 / math.sqrt(count)
    assert abs(float(noise.var()) - 1) < 6 * math.sqrt(2 / count)
    assert abs(float((noise.abs() < 1).double().mean()) - math.erf(1 / math.sqrt(2))) < 6 * 0.5 / math.sqrt(count)
    between = (noise[:-1] * noise[1:]).mean()
    assert abs(float(between)) < 6 / math.sqrt(count)
    assert not torch.equal(noise[0], sampling.noise_of("6b" * 32, 0, total).double())


def test_rows_are_drawn_one_by_one_with_the_promised_probability() -> None:
    """Poisson sampling: sizes are binomial, each row's share is q, and two rows come together with q²."""
    rate, steps, num_rows = 0.2, 4000, 30
    drawn = np.zeros((steps, num_rows))
    for step in range(steps):
        drawn[step, sampling.drawn_rows(SECRET, step, num_rows, rate)] = 1
    sizes = drawn.sum(1)
    deviation = math.sqrt(rate * (1 - rate))
    assert abs(drawn.mean(0) - rate).max() < 5 * deviation / math.sqrt(steps)
    expected = num_rows * rate * (1 - rate)
    assert abs(sizes.var() - expected) < 6 * expected * math.sqrt(2 / steps)
    together = (drawn[:, 0] * drawn[:, 1]).mean()
    assert abs(together - rate**2) < 5 * math.sqrt(rate**2 / steps)
    in_turn = np.corrcoef(drawn[:-1, 0], drawn[1:, 0])[0, 1]
    assert abs(in_turn) < 5 / math.sqrt(steps)
    assert sampling.drawn_rows(SECRET, 0, num_rows, 1.0) == list(range(num_rows))


@pytest.mark.parametrize(("epsilon", "num_rows", "steps"), [(8.0, 1000, 96), (1.0, 500, 50), (3.0, 100, 400)])
def test_epsilon_is_that_of_opacus_on_the_same_schedule(epsilon: float, num_rows: int, steps: int) -> None:
    from opacus.accountants import RDPAccountant

    schedule = Schedule.of(PrivateBudget(epsilon, 1e-5), num_rows, 32, steps)
    accountant = RDPAccountant()
    for step in range(1, steps + 1):
        accountant.step(noise_multiplier=schedule.noise_multiplier, sample_rate=32 / num_rows)
        if step in (1, steps // 2, steps):
            assert schedule.spent(step) == pytest.approx(accountant.get_epsilon(1e-5), rel=1e-3)
    assert 0.98 * epsilon < schedule.spent(steps) <= epsilon
    assert schedule.spent(0) == 0


def test_the_spent_epsilon_rises_in_the_logs_to_the_budget(tmp_path: Path) -> None:
    told: list[tuple[float, float]] = []

    class Told(TrainerCallback):
        def on_log(self, *_: Any, logs: dict[str, float], **__: Any) -> None:
            if "loss" in logs:
                told.append((logs["epsilon"], logs["clipped"]))

    trainer = trainer_of(tmp_path, callbacks=[Told()])
    own = private(trainer)
    trainer.train()
    spent = [epsilon for epsilon, _ in told]
    assert spent == [own.schedule.spent(step) for step in range(1, 9)]
    assert spent == sorted(spent)
    assert own.spent == spent[-1] <= 8.0
    assert all(0 <= share <= 1 for _, share in told)


@pytest.mark.parametrize("at", [2, 4, 7])
def test_an_interrupted_training_goes_on_to_the_bit_and_spends_once(
    tmp_path: Path, at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = trainer_of(tmp_path / "whole")
    private(whole)
    whole.train()

    class StopsAt(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            control.should_save = control.should_training_stop = state.global_step == at

    folder = tmp_path / "parts"
    first = trainer_of(folder, callbacks=[StopsAt()])
    before = private(first)
    first.train()
    assert before.num_steps == at
    monkeypatch.setattr(private_training, "new_secret", lambda: "not the one that the checkpoint has")
    monkeypatch.setattr(checks, "FAR", 0.0)  # the first step was checked; later gradients may be short
    second = trainer_of(folder)
    after = private(second)
    second.train(resume_from_checkpoint=str(folder / f"checkpoint-{at}"))
    assert torch.equal(cores(second.model), cores(whole.model))
    assert after.num_steps == 8
    assert after.spent == after.schedule.spent(8) > before.spent == before.schedule.spent(at)


@pytest.mark.parametrize("changed", ["a row", "an option"])
def test_two_resumes_of_one_checkpoint_share_no_noise_unless_they_are_the_same(tmp_path: Path, changed: str) -> None:
    """With the same noise, the difference of both adapters would hold the rows' gradients without any."""
    first = trainer_of(tmp_path, max_steps=2, save_strategy="steps", save_steps=1)
    private(first)
    first.train()
    found, step = [], 1 if changed == "a row" else 2
    for resumed in range(2):
        keeps = Keeps()
        options = {"max_grad_norm": 1e-3} if resumed and changed == "an option" else {}
        trainer = trainer_of(tmp_path, callbacks=[keeps], max_steps=4, **options)
        if resumed and changed == "a row":
            place = sampling.drawn_rows(SECRET, step, 24, 0.25)[0]
            trainer.train_dataset = [*ROWS[:place], Example((1, 2, 3, 4), 2), *ROWS[place + 1 :]]
        own = private(trainer)
        folder = tmp_path / "checkpoint-1"
        state = json.loads((folder / "trainer_state.json").read_text())
        state["stateful_callbacks"]["PrivateTraining"]["attributes"]["max_steps"] = 4
        (folder / "trainer_state.json").write_text(json.dumps(state))
        trainer.train(resume_from_checkpoint=str(folder))
        found.append(keeps.gradients[step - 1] * 6)
    deviation = own.schedule.noise_multiplier * 0.5
    difference = found[1] - found[0]
    assert float(difference.std()) == pytest.approx(deviation * math.sqrt(2), rel=0.3)


def test_a_row_whose_loss_is_not_finite_ends_no_training(tmp_path: Path) -> None:
    """It adds nothing to a step, so whether the training ends must not tell of it either."""
    model = adapted("random", trained=True)

    def losses(outputs: Any, batch: Any) -> Tensor:
        means = outputs.logits.float().logsumexp(-1).mean(1)
        return means * torch.where(batch["input_ids"][:, 0] == ROWS[0].ids[0], torch.inf, 1.0)

    trainer = trainer_of(tmp_path, model, callbacks=[LossMonitor(None)], logging_nan_inf_filter=False)
    own = private(trainer, loss_fn=losses)
    trainer.train()
    assert own.num_steps == 8
    assert any(not math.isfinite(entry["loss"]) for entry in trainer.state.log_history if "loss" in entry)
    assert bool(cores(model).isfinite().all())


def test_a_step_of_more_rows_than_there_are_is_the_mean_over_all(tmp_path: Path, noises: list[Tensor]) -> None:
    keeps = Keeps()
    trainer = trainer_of(tmp_path, callbacks=[keeps], per_device_train_batch_size=40, gradient_accumulation_steps=1)
    own = private(trainer, epsilon=90.0, clip=50.0)
    trainer.train()
    assert own.schedule.rows_a_step == own.schedule.num_rows == 24
    model = with_cores(adapted("random", trained=True), keeps.cores[0])
    gradients = per_example_gradients(model, batch_of(ROWS))
    noise = noises[0] * own.schedule.noise_multiplier * 50 / 24
    torch.testing.assert_close(keeps.gradients[0] - noise, gradients.mean(0), rtol=1e-3, atol=1e-3)


def test_a_callback_that_comes_later_is_refused_too(tmp_path: Path) -> None:
    model = adapted()
    trainer = trainer_of(tmp_path, model)
    private(trainer, basis_is_public=True)
    trainer.add_callback(EarlyStoppingCallback())
    with pytest.raises(ConfigError, match="EarlyStoppingCallback reads rows"):
        trainer.train()


def test_a_checkpoint_of_another_training_is_refused(tmp_path: Path) -> None:
    plain = trainer_of(tmp_path / "plain", save_strategy="steps", save_steps=2)
    plain.train()
    own = trainer_of(tmp_path / "own")
    private(own)
    with pytest.raises(TrainingError, match="resumes from its own checkpoint"):
        own.train(resume_from_checkpoint=str(tmp_path / "plain" / "checkpoint-2"))
    saved = trainer_of(tmp_path / "saved", save_strategy="steps", save_steps=2)
    private(saved)
    saved.train()
    other = trainer_of(tmp_path / "other")
    private(other, clip=0.7)
    with pytest.raises(TrainingError, match="clip is 0.5 in the checkpoint and 0.7 now"):
        other.train(resume_from_checkpoint=str(tmp_path / "saved" / "checkpoint-2"))


def test_a_budget_is_spent_once_and_the_saved_state_holds_no_secret(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path)
    private(trainer)
    trainer.train()
    trainer.save_state()
    assert SECRET not in (tmp_path / "trainer_state.json").read_text()
    assert "PrivateTraining" not in json.loads((tmp_path / "trainer_state.json").read_text())["stateful_callbacks"]
    with pytest.raises(TrainingError, match="spends its budget once"):
        trainer.train()


def test_a_step_without_rows_is_noise_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keeps = Keeps()
    trainer = trainer_of(tmp_path, callbacks=[keeps], max_steps=3)
    own = private(trainer)
    monkeypatch.setattr(private_training, "drawn_rows", lambda *_: [])
    trainer.train()
    size = len(keeps.gradients[0])
    expected = sampling.noise_of(SECRET, 1, torch.zeros(size)) * own.schedule.noise_multiplier * 0.5 / 6
    torch.testing.assert_close(keeps.gradients[1], expected)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"load_best_model_at_end": True, "eval_strategy": "no", "save_strategy": "no"}, "load_best_model_at_end"),
        ({"save_strategy": SaveStrategy.BEST}, "save_strategy"),
        ({"report_to": ["tensorboard"]}, "report_to"),
        ({"push_to_hub": True}, "push_to_hub"),
        ({"auto_find_batch_size": True}, "auto_find_batch_size"),
        ({"ignore_data_skip": True}, "ignore_data_skip"),
        ({"restore_callback_states_from_checkpoint": True}, "restore_callback_states"),
        ({"fp16": True}, "fp16"),
        ({"packing": True}, "packing"),
        ({"lr_scheduler_type": "greedy"}, "lr_scheduler_type"),
    ],
)
def test_arguments_that_leak_or_repeat_are_refused(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    trainer = trainer_of(tmp_path)
    for name, value in options.items():
        setattr(trainer.args, name, value)
    with pytest.raises(ConfigError, match=message):
        private(trainer)


@pytest.mark.parametrize("kind", [ReduceLROnPlateau, GreedyLR])
def test_a_scheduler_that_reads_scores_is_refused_as_an_object_too(tmp_path: Path, kind: Any) -> None:
    early, late = trainer_of(tmp_path), trainer_of(tmp_path)
    private(late)
    for trainer in (early, late):
        trainer.optimizer = torch.optim.AdamW(p for p in trainer.model.parameters() if p.requires_grad)
        trainer.lr_scheduler = kind(trainer.optimizer)
    with pytest.raises(ConfigError, match=f"{kind.__name__}.* reads scores"):
        private(early)
    with pytest.raises(ConfigError, match=f"{kind.__name__}.* reads scores"):
        late.train()


def test_a_reporter_given_as_a_callback_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    with pytest.raises(ConfigError, match="TensorBoardCallback .* publishes losses"):
        private(trainer_of(tmp_path, callbacks=[TensorBoardCallback()]))


def test_a_second_private_training_of_one_trainer_is_refused(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path)
    private(trainer)
    with pytest.raises(ConfigError, match="has a PrivateTraining already"):
        private(trainer)


def test_a_step_that_was_not_noised_ends_the_training_and_is_not_counted(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path)
    own = private(trainer)
    trainer.training_step = lambda model, inputs, *_: sum(model(**one).loss for one in inputs["batches"])  # type: ignore
    before = cores(trainer.model)
    with pytest.raises(TrainingError, match="of 1 only 0 were"):
        trainer.train()
    assert own.spent == 0
    assert torch.equal(cores(trainer.model), before)


def test_a_loader_of_other_rows_than_those_that_count_is_refused(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path)
    plain = trainer.get_train_dataloader
    trainer.get_train_dataloader = lambda: DataLoader(plain().dataset[:12], collate_fn=batch_of)  # type: ignore
    private(trainer)
    with pytest.raises(ConfigError, match=r"train_dataset \(24\).* loader has 12"):
        trainer.train()


def flat(rows: list[Example]) -> dict[str, Any]:
    return lay_end_to_end([TokenRow("", list(row.ids), row.num_prompt) for row in rows])


def tiny_opt() -> Any:
    config = OPTConfig(
        vocab_size=VOCABULARY, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, ffn_dim=32,
        word_embed_proj_dim=16, max_position_embeddings=64,
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config)


@pytest.mark.parametrize("make", [tiny_qwen2, tiny_opt])
def test_packed_rows_need_a_model_that_keeps_them_apart(tmp_path: Path, make: Any) -> None:
    """OPT takes position_ids, and lets each token see the rows before its own."""
    trainer = trainer_of(tmp_path, adapted("random", model=make(), trained=True))
    trainer.data_collator = flat
    private(trainer)
    if make is tiny_qwen2:
        trainer.train()
    else:
        with pytest.raises(ConfigError, match="rows see one another"):
            trainer.train()


@pytest.mark.parametrize(
    ("changed", "error"),
    [("two sequences", "packed rows in one sequence, but a batch has 2"), ("nan", "packed rows is not finite")],
)
def test_packed_rows_that_could_change_others_end_the_training(tmp_path: Path, changed: str, error: str) -> None:
    def twice(rows: list[Any]) -> dict[str, Any]:
        return {name: part.repeat(2, 1) if isinstance(part, Tensor) else part for name, part in flat(rows).items()}

    trainer = trainer_of(tmp_path, per_device_train_batch_size=12)
    trainer.data_collator = twice if changed == "two sequences" else flat

    def not_finite(outputs: Any, batch: Any) -> Tensor:
        return outputs.logits.sum() * torch.full((int((batch["position_ids"] == 0).sum()),), math.nan)

    private(trainer, loss_fn=not_finite if changed == "nan" else None)
    with pytest.raises((ConfigError, TrainingError), match=error):
        trainer.train()


def test_callbacks_that_look_at_rows_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="EarlyStoppingCallback"):
        private(trainer_of(tmp_path, callbacks=[EarlyStoppingCallback()]))


def test_a_basis_of_private_rows_is_refused_unless_it_is_said_to_be_public(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="basis_is_public=True"):
        private(trainer_of(tmp_path, adapted("fcca")))
    private(trainer_of(tmp_path, adapted("fcca")), basis_is_public=True)


def test_what_trains_beside_cores_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="modules_to_save"):
        private(trainer_of(tmp_path, adapted("random", modules_to_save=["lm_head"])))
    model = adapted("random")
    model.get_input_embeddings().weight.requires_grad_(True)
    with pytest.raises(ConfigError, match="trains as well"):
        private(trainer_of(tmp_path, model))
    with pytest.raises(ConfigError, match="has none"):
        private(Trainer(model=tiny_qwen2(), args=arguments(tmp_path), train_dataset=ROWS, data_collator=batch_of))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"epsilon": 0.0}, "epsilon"),
        ({"epsilon": math.nan}, "epsilon"),
        ({"delta": 1.0}, "delta"),
        ({"clip": 0.0}, "clip"),
    ],
)
def test_a_budget_out_of_bounds_is_refused(tmp_path: Path, options: dict[str, float], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        private(trainer_of(tmp_path), **options)


def test_a_delta_that_could_publish_a_row_is_refused(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path)
    private(trainer, delta=1 / 24)
    with pytest.raises(ConfigError, match="below one in the number of rows"):
        trainer.train()


def test_the_first_step_says_that_clipping_drowns_the_gradients(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path)
    private(trainer, clip=1e6)
    with pytest.raises(TrainingError, match="Clip near the typical length"):
        trainer.train()


def test_the_first_step_says_that_a_core_has_no_gradient(tmp_path: Path) -> None:
    """As when a loss does not reach a layer: the noise would hide it."""
    model = adapted("random", trained=True)
    cores_of(model)[2].register_forward_hook(lambda layer, args, output: layer.base_layer(*args))
    trainer = trainer_of(tmp_path, model)
    private(trainer)
    with pytest.raises(TrainingError, match=r"\(1 of 8\) has none in any row"):
        trainer.train()


def test_the_first_step_says_that_a_core_did_not_move(tmp_path: Path) -> None:
    model = adapted("random", trained=True)
    own = [layer.core("default") for layer in cores_of(model)]
    trainer = trainer_of(tmp_path, model)
    trainer.optimizer = torch.optim.SGD(own[1:], lr=0.1)
    private(trainer)
    with pytest.raises(TrainingError, match=r"\(1 of 8\) did not"):
        trainer.train()


def test_a_collator_that_joins_rows_is_refused(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path)

    def joined(rows: list[Any]) -> dict[str, Tensor]:
        whole = batch_of(rows)
        return {name: value.reshape(1, -1) for name, value in whole.items()}

    trainer.data_collator = joined
    private(trainer)
    with pytest.raises(DataError, match="keeps rows apart"):
        trainer.train()


def test_the_same_step_twice_is_refused(tmp_path: Path) -> None:
    class Again(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            state.global_step = 0

    trainer = trainer_of(tmp_path, callbacks=[Again()])
    private(trainer)
    with pytest.raises(TrainingError, match="each once"):
        trainer.train()
