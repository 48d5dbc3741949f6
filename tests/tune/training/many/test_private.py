"""Private tenants beside others: each is the private training alone and resumes to the bit; a failure ends no other."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from adapted import adapted, cores_of
from frozencore import FrozenCoreConfig
from frozencore.adapter.private import checks, private_training
from frozencore.errors import ConfigError
from frozencore.privacy import PrivateBudget
from frozencore.tune.rows import TokenRow
from frozencore.tune.run.many.tune import tune_many
from frozencore.tune.training.checkpoints import TENANT_STATES
from frozencore.tune.training.many import active_tenants
from frozencore.tune.training.many import tenant as many_tenant
from frozencore.tune.training.many.tenant import Tenant, Trained, Validation
from frozencore.tune.training.many.train import train_many
from frozencore.tune.training.recipe import Recipe
from frozencore.tune.training.train import train
from tiny import draw_examples

opacus = pytest.importorskip("opacus")

SECRET = "5a" * 32
PLAIN = Recipe(learning_rate=1e-2, epochs=2, batch_size=2, accumulation=1, warmup=0.3)
RECIPE = replace(PLAIN, private=PrivateBudget(8.0, 1e-3, 0.5))


def rows_of(num_rows: int, seed: int) -> list[TokenRow]:
    examples = draw_examples(num_rows, seed=seed)
    return [TokenRow(f"row-{i}", list(e.ids), e.num_prompt) for i, e in enumerate(examples)]


TENANTS = {
    "anna": Tenant(rows_of(20, seed=5), RECIPE),
    "ben": Tenant(rows_of(9, seed=6), replace(RECIPE, private=PrivateBudget(4.0, 1e-2, 1.0))),
    "cleo": Tenant(rows_of(9, seed=7), PLAIN),
}


@pytest.fixture(autouse=True)
def same_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (private_training, active_tenants):
        monkeypatch.setattr(module, "new_secret", lambda: SECRET)


@pytest.fixture
def same_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    """The noise of a step does not follow from its sum, whose rounding differs beside others."""
    plain = private_training.noise_of
    monkeypatch.setattr(private_training, "noise_of", lambda secret, step, total: plain(secret, step, total * 0))


def difference(cores: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> float:
    """The relative error over all layers."""
    distance = sum(float((cores[name] - R).norm() ** 2) for name, R in expected.items())
    return (distance / sum(float(R.norm() ** 2) for R in expected.values())) ** 0.5


@pytest.mark.usefixtures("same_noise")
@pytest.mark.parametrize("tokens_per_batch", [None, 20])
def test_a_private_tenant_beside_others_is_the_private_training_alone(tokens_per_batch: int | None) -> None:
    """With one secret; the rows drawn for a step, none included, and the noise are those that it would have alone."""
    trained = train_many(adapted("random"), TENANTS, pad_id=0, tokens_per_batch=tokens_per_batch)
    for name, tenant in TENANTS.items():
        model = adapted("random")
        report = train(model, tenant.rows, tenant.recipe, pad_id=0)
        cores = {layer.name: layer.core("default").detach() for layer in cores_of(model)}
        assert difference(trained[name].cores, cores) < 1e-4
        assert trained[name].report.schedule == report.schedule
        assert (report.schedule is None) == (name == "cleo")
        assert trained[name].report.losses == pytest.approx(report.losses, rel=1e-4, abs=1e-6)


def test_each_private_tenant_draws_a_secret_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[str] = []
    monkeypatch.setattr(active_tenants, "new_secret", lambda: drawn.append(f"{len(drawn):064x}") or drawn[-1])
    same = dict.fromkeys(("first", "second"), TENANTS["anna"])
    trained = train_many(adapted("random"), same, pad_id=0)
    assert len(drawn) == 2
    assert difference(trained["first"].cores, trained["second"].cores) > 0.1


def test_private_tenants_resume_to_the_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = train_many(adapted("random"), TENANTS, pad_id=0, num_slots=2)

    class StoppedError(Exception):
        pass

    steps = iter(range(100))

    def stop(*_: object) -> None:
        if next(steps) == 11:  # one has ended by then
            raise StoppedError

    with pytest.raises(StoppedError):
        train_many(
            adapted("random"), TENANTS, pad_id=0, num_slots=2, checkpoint_dir=tmp_path, checkpoint_s=0, progress=stop
        )
    monkeypatch.setattr(active_tenants, "new_secret", lambda: "not that of the checkpoint")
    monkeypatch.setattr(checks, "FAR", 0.0)  # the first step was checked; later gradients may be short
    resumed: dict[str, Trained] = train_many(
        adapted("random"), TENANTS, pad_id=0, num_slots=2, checkpoint_dir=tmp_path, resume=True
    )
    for name, one in whole.items():
        assert all(torch.equal(R, resumed[name].cores[layer]) for layer, R in one.cores.items())
        assert resumed[name].report.schedule == one.report.schedule
        assert resumed[name].report.losses == one.report.losses


def test_a_tenant_that_ended_since_the_newest_checkpoint_ends_again_in_the_same_cores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a new secret, its rows would be in two adapters with a noise of their own, and its budget spent twice."""
    secrets = (f"{number:064x}" for number in range(100))
    monkeypatch.setattr(active_tenants, "new_secret", lambda: next(secrets))
    ended: list[Mapping[str, Trained]] = []

    def stop(*_: object) -> None:
        if ended:
            raise KeyboardInterrupt

    tenants = {name: TENANTS[name] for name in ("anna", "ben")}
    options = {"pad_id": 0, "num_slots": 2, "checkpoint_dir": tmp_path, "on_end": ended.append}
    with pytest.raises(KeyboardInterrupt):
        train_many(adapted("random"), tenants, checkpoint_s=1e9, progress=stop, **options)
    train_many(adapted("random"), tenants, resume=True, **options)
    first, again, _ = ended
    assert first.keys() == again.keys() == {"ben"}
    (last,) = tmp_path.glob("checkpoint-20")
    assert not re.search("[0-9a-f]{64}", (last / TENANT_STATES).read_text())  # all have ended
    assert all(torch.equal(R, again["ben"].cores[layer]) for layer, R in first["ben"].cores.items())


def test_steps_in_which_no_tenant_has_a_row_are_noise_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(many_tenant, "drawn_rows", lambda *_: [])
    trained = train_many(adapted("random"), {"anna": TENANTS["anna"]}, pad_id=0)["anna"]
    assert trained.report.num_steps == 20
    assert all(bool(R.any()) for R in trained.cores.values())


def test_a_tenant_with_a_row_whose_loss_is_not_finite_trains_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside others, which learn nothing of it."""
    rows, plain = TENANTS["anna"].rows, active_tenants.row_losses

    def losses(model: Any, batch: dict[str, Tensor]) -> Tensor:
        is_first = (batch["input_ids"][:, :3] == torch.tensor(rows[0].input_ids[:3])).all(1)
        return plain(model, batch) * torch.where(is_first, torch.inf, 1.0)

    alone = train_many(adapted("random"), TENANTS, pad_id=0)
    monkeypatch.setattr(active_tenants, "row_losses", losses)
    trained = train_many(adapted("random"), TENANTS, pad_id=0)
    assert not all(map(math.isfinite, trained["anna"].report.losses))
    assert trained["anna"].diverged is None
    assert trained["anna"].report.num_steps == 20
    for name in ("ben", "cleo"):
        assert all(torch.equal(R, trained[name].cores[layer]) for layer, R in alone[name].cores.items())


def test_a_tenants_basis_of_private_rows_is_refused_unless_it_is_said_to_be_public() -> None:
    model = adapted("fcca")
    model.add_adapter("other", FrozenCoreConfig(r=3, constructor="random"))
    for active in ("default", "other"):  # the adapter "default" trains in any case
        model.set_adapter(active)
        with pytest.raises(ConfigError, match="basis_is_public=True"):
            tune_many(model, None, {"anna": [{"text": "words"}]}, RECIPE)


def test_a_tenant_whose_gradients_drown_in_noise_ends_and_no_other_does() -> None:
    drowned = Tenant(TENANTS["anna"].rows, replace(RECIPE, private=PrivateBudget(8.0, 1e-3, 1e6)))
    trained = train_many(adapted("random"), {"drowned": drowned, "anna": TENANTS["anna"]}, pad_id=0)
    assert "the noise would hide it" in str(trained["drowned"].diverged)
    assert trained["anna"].diverged is None
    assert trained["anna"].report.num_steps == TENANTS["anna"].num_steps


def test_scores_choose_no_step_of_a_private_tenant() -> None:
    with pytest.raises(ConfigError, match="does not cover scores"):
        Tenant(rows_of(4, seed=1), RECIPE, Validation(rows_of(2, seed=2)))
