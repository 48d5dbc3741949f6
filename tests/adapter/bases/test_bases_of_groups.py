"""``calibrate(..., groups=...)``: bases that hold what every group wants, on a model."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from adapted import adapted, cores_of
from frozencore import calibrate
from frozencore.errors import CalibrationError, ConfigError
from tiny import batches_of, draw_examples

GROUPS = {name: batches_of(draw_examples(6, seed=seed), 3) for seed, name in enumerate(("anna", "ben", "cleo"))}


def bases(model: nn.Module) -> dict[str, tuple[Tensor, Tensor]]:
    return {layer.name: layer.factors("default")[:2] for layer in cores_of(model)}


def grouped(constructor: str = "fcca", **options: object) -> tuple[dict[str, tuple[Tensor, Tensor]], object]:
    model = adapted(constructor, calibrated=False)
    found = calibrate(model, **{"groups": GROUPS, "progress": False, **options})  # type: ignore[arg-type]
    return bases(model), found


@pytest.mark.parametrize("coordinates", ["qr", "fisher"])
@pytest.mark.parametrize("constructor", ["fcca", "rawgrad"])
def test_one_group_is_the_plain_basis_to_the_byte(constructor: str, coordinates: str) -> None:
    found = []
    alone = {"groups": {"anna": GROUPS["anna"]}}
    for given in ({"data": GROUPS["anna"]}, alone, {**alone, "weights": {"anna": 0.3}}):
        model = adapted(constructor, calibrated=False, coordinates=coordinates)
        assert calibrate(model, progress=False, **given).shares == {}  # type: ignore[arg-type]
        found.append(bases(model))
    for name, pair in found[0].items():
        for other in found[1:]:
            assert all(torch.equal(X, Y) for X, Y in zip(pair, other[name], strict=True))


def test_equal_weights_change_no_byte_and_a_heavier_group_is_held_better() -> None:
    plain, found = grouped()
    equal, _ = grouped(weights=dict.fromkeys(GROUPS, 7))
    for name, pair in plain.items():
        assert all(torch.equal(X, Y) for X, Y in zip(pair, equal[name], strict=True))
    _, heavy = grouped(weights={"ben": 20})  # the others have the weight 1
    assert heavy.shares["ben"].held > found.shares["ben"].held + 0.01  # type: ignore[attr-defined]


def test_every_group_is_told_what_the_bases_hold_of_it_and_all_together_more_than_the_mean_does() -> None:
    _, found = grouped()
    assert list(found.shares) == list(GROUPS)  # type: ignore[attr-defined]
    for share in found.shares.values():  # type: ignore[attr-defined]
        assert share.random < share.held <= share.own <= 1
    assert all(layer.num_tokens > 0 for layer in found.layers.values())  # type: ignore[attr-defined]


@pytest.mark.parametrize("coordinates", ["qr", "fisher"])
def test_bases_are_written_in_the_coordinates_of_the_adapter(coordinates: str) -> None:
    model = adapted(calibrated=False, coordinates=coordinates)
    calibrate(model, groups=GROUPS, progress=False)
    errors = [(X.mT @ X - torch.eye(3)).abs().max() for pair in bases(model).values() for X in pair]
    assert (float(max(errors)) < 1e-5) == (coordinates == "qr")


def test_the_scale_of_one_groups_loss_changes_nothing() -> None:
    def loss_fn(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        inputs = {key: value for key, value in batch.items() if key != "scale"}
        return model(**inputs).loss * batch["scale"].mean()

    found = []
    for loud in (1.0, 512.0):
        scaled = {
            name: [{**batch, "scale": torch.full((3,), loud if name == "ben" else 1.0)} for batch in batches]
            for name, batches in GROUPS.items()
        }
        found.append(grouped(groups=scaled, loss_fn=loss_fn)[0])
    for name, pair in found[0].items():
        for X, Y in zip(pair, found[1][name], strict=True):
            torch.testing.assert_close(X, Y, rtol=0, atol=2e-4)


def test_a_memory_budget_makes_passes_of_few_layers_and_the_same_bases() -> None:
    plain, _ = grouped()
    stages: list[str] = []
    tight, _ = grouped(memory_budget=300_000, progress=lambda stage, *_: stages.append(stage))
    assert stages.index("bases") < len(stages) - 1 - stages[::-1].index("calibration")  # bases before the last pass
    for name, pair in plain.items():
        assert all(torch.equal(X, Y) for X, Y in zip(pair, tight[name], strict=True))
    with pytest.raises(ConfigError, match="too small for these layers"):
        grouped(memory_budget=1000)


@pytest.mark.parametrize(
    ("constructor", "given", "message"),
    [
        ("fcca", {"groups": {}}, "groups must name the rows of one group at least, but is empty"),
        ("fcca", {"weights": {"benn": 1}}, "weights names 'benn', but there is no such group. Did you mean 'ben'"),
        ("fcca", {"weights": {"ben": 0}}, "A group's weight is a positive finite number, but 'ben' has 0"),
        ("fcca", {"weights": {"ben": float("inf")}}, "A group's weight is a positive finite number, but 'ben' has inf"),
        ("fcca", {"weights": {"ben": float("nan")}}, "A group's weight is a positive finite number, but 'ben' has nan"),
        ("fcca", {"weights": {"ben": "2"}}, "A group's weight is a positive finite number, but 'ben' has '2'"),
        ("fcca", {"groups": None, "data": GROUPS["anna"], "weights": {"anna": 1}}, "weights are for groups"),
        ("eva", {}, "'eva' here reads others. Use fcca"),
        ("random", {}, "'random' here reads others"),
    ],
)
def test_wrong_groups_are_refused_in_one_line(constructor: str, given: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        grouped(constructor, **given)
    assert "\n" not in str(caught.value)


def test_groups_beside_data_are_refused() -> None:
    with pytest.raises(CalibrationError, match="groups hold all rows, but data or moments came too"):
        grouped(data=GROUPS["anna"])
