"""Advice on a tiny model: what a gain is, what is compared, and that the model is left alone."""

from __future__ import annotations

import copy
import itertools
from dataclasses import replace

import pytest
import torch
from torch import nn

from adapted import adapted
from frozencore import Advice, FrozenCoreConfig, advise
from frozencore.advice import evidence as evidence_module
from frozencore.advice import trials as trials_module
from frozencore.advice.evidence import gather
from frozencore.advice.settings import Setting
from frozencore.advice.trials import Trials, Worth
from frozencore.calibration.calibration_options import CalibrationOptions
from frozencore.calibration.preserve import preserved
from frozencore.calibration.update_loss import NotSideBySideError, mean_loss
from frozencore.constructors import CONSTRUCTORS
from frozencore.errors import ConfigError
from frozencore.maths.allocation import num_values
from tiny import batches_of, draw_examples, tiny_qwen2

BATCHES = batches_of(draw_examples(num_examples=32, seed=3), 4)
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]


@pytest.fixture(scope="module")
def model() -> nn.Module:
    return tiny_qwen2()


@pytest.fixture(scope="module")
def advice(model: nn.Module) -> Advice:
    return advise(model, BATCHES, r=3, progress=False)


def test_every_constructor_and_variants_of_the_metric_are_compared_at_the_rank_asked_about(advice: Advice) -> None:
    plain = [worth.setting.method for worth in advice.bases if not worth.setting.options]
    assert sorted(plain) == sorted(CONSTRUCTORS)
    assert {key for worth in advice.bases for key in worth.setting.options} == {"damping", "whiten"}
    assert {rank for worth in advice.bases for rank in worth.ranks.values()} == {3}
    assert [worth.gain for worth in advice.bases] == sorted((worth.gain for worth in advice.bases), reverse=True)


def test_other_places_have_no_more_values_and_all_linear_is_one_of_them(advice: Advice) -> None:
    asked = advice.best_bases.num_values
    assert {worth.setting.on for worth in advice.shapes} >= {"all-linear"}
    assert all(num_values(worth.ranks) == worth.num_values <= asked for worth in advice.shapes)
    assert advice.recommended.num_values <= asked


def test_a_larger_budget_holds_more_of_what_the_halves_agree_on(advice: Advice) -> None:
    shares = list(advice.bought.values())
    assert shares == sorted(shares)
    assert 0 < shares[-1] <= 1


def test_equal_halves_agree_on_everything_and_random_rows_on_next_to_nothing(model: nn.Module, advice: Advice) -> None:
    twice = [batch for batch in BATCHES[:2] for _ in range(2)]
    alike = advise(model, twice, r=3, progress=False, only_bases=True)
    assert (alike.num_agreed, alike.num_looked_at) == (6, 6)
    assert advice.num_agreed < 3


def test_examples_go_through_the_model_forward_and_backward_once_and_few_of_them_forward_again(
    model: nn.Module,
) -> None:
    """The measured plain pass takes one of the eight batches again; one of them scores settings and lengths."""
    rows = {True: 0, False: 0}

    def count(module: nn.Module, args: object, kwargs: dict[str, torch.Tensor]) -> None:
        rows[torch.is_grad_enabled()] += len(kwargs["input_ids"])

    handle = model.register_forward_pre_hook(count, with_kwargs=True)
    found = advise(model, BATCHES, r=3, progress=False)
    handle.remove()
    num_lengths = trials_module.LAST_POWER - trials_module.FIRST_POWER + 1
    num_settings = len(found.bases) + len(found.shapes)
    assert rows[True] == 32 + 4
    assert rows[False] <= 4 * (num_settings + num_lengths + 2)  # and twice the base model
    assert found.num_rows == 32


def test_between_two_reports_lies_at_most_one_basis_or_comparison_of_a_layer_or_one_forward_pass(
    model: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[tuple[str, int, int | None]] = []
    work: list[int] = []

    def counted(module: object, name: str) -> None:
        inner = getattr(module, name)

        def call(*args: object, **kwargs: object) -> object:
            work.append(len(told))
            return inner(*args, **kwargs)

        monkeypatch.setattr(module, name, call)

    counted(evidence_module, "crossed_by_gram")
    for name in ("build_basis", "mean_loss", "mean_losses"):
        counted(trials_module, name)
    advise(model, BATCHES, r=3, progress=lambda stage, done, total, note="": told.append((stage, done, total)))
    most = max(work.count(number) for number in set(work))
    assert most <= 2  # the last basis of a setting, and the loss with it
    assert {stage for stage, _, _ in told} == {"calibration", "halves", "length", "try bases", "try places"}
    for one, other in itertools.pairwise(told):
        assert other[1] > one[1] or other[0] != one[0] or one[1] == one[2], (one, other)  # each of them moves a bar
    assert all(done <= total for _, done, total in told if total is not None)


def test_a_gain_is_the_true_fall_of_the_loss_with_the_step_in_the_weights(model: nn.Module) -> None:
    options = CalibrationOptions()
    setting = Setting("rawgrad", rank=3)
    with preserved(model):
        evidence = gather(model, BATCHES, ATTENTION, options, None, settings=[setting], elsewhere=False)
        trials = Trials(model, evidence, options, evidence.held_back, seed=0)
        trials.find_length(setting)
        (worth,) = trials.worths([setting], "try bases")
        stepped = copy.deepcopy(model)
        step, squares = {}, 0.0
        for name, moments in evidence.seen.items():
            U, _, Vh = torch.linalg.svd(moments.G.double())
            P, Q = U[:, :3], Vh[:3].mT
            second = (P.mT @ moments.D.double() @ P).diagonal()[:, None] * (Q.mT @ moments.A.double() @ Q).diagonal()
            core = -(P.mT @ moments.G.double() @ Q) / second.sqrt()
            squares += float(core.square().sum()) / len(evidence.seen)
            step[name] = P @ core @ Q.mT
        with torch.no_grad():
            for name, change in step.items():
                stepped.get_submodule(name).weight += (change * trials.length / squares**0.5).float()
        before, after = (mean_loss(one, evidence.held_back, options) for one in (model, stepped))
    assert worth.gain == pytest.approx(before - after, rel=1e-3)
    assert worth.gain > 0


def test_rows_and_settings_that_go_through_the_model_together_gain_what_they_gain_alone(
    model: nn.Module, advice: Advice, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(evidence_module, "TOKENS_AT_ONCE", 1)
    alone = advise(model, BATCHES, r=3, progress=False)
    assert advice.length == alone.length
    for part in ("bases", "shapes"):
        one, other = (
            {str(worth.setting): (worth.gain, worth.ranks) for worth in getattr(found, part)}
            for found in (advice, alone)
        )
        assert one.keys() == other.keys()
        for name, (gain, ranks) in one.items():
            assert gain == pytest.approx(other[name][0], abs=2e-5), name
            assert ranks == other[name][1], name


def test_rows_on_which_every_step_raises_the_loss_are_compared_by_how_little(model: nn.Module) -> None:
    """The halves want opposite things of the same prompt."""
    halves = []
    for end in (5, 6):
        ids = torch.tensor([[1, 2, 3, 4, end]])
        labels = torch.where(torch.arange(5) < 4, -100, ids)
        halves.append({"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels})
    found = advise(model, halves, r=2, only_bases=True, progress=False)
    assert found.length == 10 ** (trials_module.FIRST_POWER / 2)
    assert found.kept.gain < 0


def test_settings_go_one_by_one_where_a_layer_does_not_see_rows_of_tokens(
    model: nn.Module, advice: Advice, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise NotSideBySideError

    monkeypatch.setattr(trials_module, "mean_losses", refuse)
    alone = advise(model, BATCHES, r=3, progress=False, only_bases=True)
    assert [worth.gain for worth in alone.bases] == pytest.approx([worth.gain for worth in advice.bases], abs=2e-5)


def test_the_half_that_bases_are_made_from_is_not_what_gains_are_of(model: nn.Module) -> None:
    with preserved(model):
        evidence = gather(model, BATCHES, ATTENTION, CalibrationOptions(), None, settings=[], elsewhere=False)
    held_back = {row.numpy().tobytes() for batch in evidence.held_back for row in batch["input_ids"]}
    tokens = sum(
        int(batch["attention_mask"].sum())
        for batch in BATCHES
        if batch["input_ids"][0].numpy().tobytes() not in held_back
    )
    assert {moments.num_tokens for moments in evidence.seen.values()} == {tokens}


def test_the_model_is_as_it_was(model: nn.Module) -> None:
    fresh = tiny_qwen2()
    own = copy.deepcopy(model).train()
    torch.manual_seed(7)
    state = torch.get_rng_state()
    advise(own, BATCHES, r=2, progress=False, only_bases=True)
    assert own.training
    assert torch.equal(torch.get_rng_state(), state)
    assert all(parameter.requires_grad and parameter.grad is None for parameter in own.parameters())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in own.modules())
    assert list(own.state_dict()) == list(fresh.state_dict())
    assert all(torch.equal(a, b) for a, b in zip(own.state_dict().values(), fresh.state_dict().values(), strict=True))
    assert not getattr(own, "peft_config", None)
    assert type(adapted("random", model=own).peft_config["default"]) is FrozenCoreConfig  # an adapter still goes on it


def test_what_stays_where_it_is_level_is_fcca_and_then_a_constructor_as_it_stands(advice: Advice) -> None:
    def best_of(fcca: float, rawgrad: float, damped: float) -> tuple[str, dict[str, object]]:
        gains = {("fcca", False): fcca, ("rawgrad", False): rawgrad, ("fcca", True): damped}
        worths = [
            Worth(Setting(method, {"damping": 10.0} if varied else {}, rank=3), gain, 9, {})
            for (method, varied), gain in gains.items()
        ]
        found = replace(advice, bases=tuple(worths), kept=worths[0]).best_bases.setting
        return found.method, dict(found.options)

    assert best_of(0.99, 1.0, 1.0) == ("fcca", {})
    assert best_of(0.9, 0.99, 1.0) == ("rawgrad", {})
    assert best_of(0.9, 0.97, 1.0) == ("fcca", {"damping": 10.0})
    assert best_of(-1.01, -1.2, -1.0) == ("fcca", {})


def test_only_bases_compares_nothing_else(model: nn.Module) -> None:
    found = advise(model, BATCHES, rank_budget=72, progress=False, only_bases=True)
    assert (found.shapes, found.bought) == ((), {})
    assert found.recommended is found.best_bases
    assert all(worth.num_values <= 72 for worth in found.bases)


def test_what_cannot_be_advised_on_is_refused_in_one_line(model: nn.Module) -> None:
    with pytest.raises(ConfigError, match=r"^Advice is of a plain base model, but this one has adapters\."):
        advise(adapted(), BATCHES)
    with pytest.raises(ConfigError, match=r"^rank_budget chooses the ranks, but r=4 came too\."):
        advise(model, BATCHES, r=4, rank_budget=100)
