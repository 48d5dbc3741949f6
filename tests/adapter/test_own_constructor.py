"""A constructor of a user's own: one registered row, and PEFT's configuration and files know its option."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Annotated

import pytest
import torch
from peft import PeftConfig, PeftModel, get_peft_model
from pydantic import Field

from adapted import cores_of
from frozencore import FrozenCoreConfig, register_constructor, save_basis
from frozencore.constructors import CONSTRUCTORS, BasisOptions, FCCAOptions
from frozencore.errors import ArtifactError, ConfigError
from frozencore.options import options_of
from tiny import tiny_qwen2
from toy import TOY, Toy, ToyOptions, coordinates_from, register_toy

pytestmark = pytest.mark.usefixtures("as_a_user")


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch) -> None:
    register_toy(monkeypatch)


@pytest.mark.usefixtures("toy")
def test_its_option_is_a_keyword_argument_with_its_default() -> None:
    assert FrozenCoreConfig(constructor="toy").basis_options() == ToyOptions()
    assert FrozenCoreConfig(constructor="toy", toy_offset=3).basis_options() == ToyOptions(toy_offset=3)
    assert FrozenCoreConfig(constructor="toy", own_options={"toy_offset": 3}).basis_options() == ToyOptions(
        toy_offset=3
    )
    with pytest.raises(TypeError, match="'no_such' argument|keyword argument 'no_such'"):
        FrozenCoreConfig(constructor="toy", own_options={"no_such": 3})


@pytest.mark.usefixtures("toy")
def test_its_bases_are_built_as_its_option_says_and_survive_their_file(tmp_path: Path) -> None:
    config = FrozenCoreConfig(r=4, target_modules=["q_proj"], constructor="toy", toy_offset=2)
    model = get_peft_model(tiny_qwen2(), config)
    for layer in cores_of(model):
        P, Q, _ = layer.factors("default")
        assert torch.equal(P, coordinates_from(2, len(P), 4))
        assert torch.equal(Q, coordinates_from(2, len(Q), 4))
    model.save_pretrained(str(tmp_path))
    assert json.loads((tmp_path / "adapter_config.json").read_text())["toy_offset"] == 2
    loaded = PeftModel.from_pretrained(tiny_qwen2(), str(tmp_path)).peft_config["default"]
    assert (loaded.constructor, loaded.basis_options(4)) == ("toy", ToyOptions(rank=4, toy_offset=2))


@pytest.mark.usefixtures("toy")
def test_its_option_is_kept_by_a_basis_that_adapters_share(tmp_path: Path) -> None:
    config = FrozenCoreConfig(r=4, target_modules=["q_proj"], constructor="toy", toy_offset=2)
    save_basis(get_peft_model(tiny_qwen2(), config), tmp_path / "basis")
    assert FrozenCoreConfig(basis=str(tmp_path / "basis")).basis_options() == ToyOptions(rank=4, toy_offset=2)


@pytest.mark.usefixtures("toy")
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"constructor": "toy", "toy_offset": 9}, "toy_offset must be a whole number from 0 to 8, but 9 came"),
        ({"constructor": "toy", "toy_offset": 1.5}, "toy_offset must be a whole number from 0 to 8, but 1.5 came"),
        ({"constructor": "fcca", "toy_offset": 1}, "'fcca' does not read toy_offset .it is for toy.. Leave it out"),
        ({"constructor": "toy", "damping": 0.1}, "'toy' does not read damping .it is for fcca.. Leave it out"),
    ],
)
def test_what_it_does_not_allow_or_does_not_read_is_refused(options: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        FrozenCoreConfig(**options)


def test_without_the_row_the_option_is_none() -> None:
    with pytest.raises(TypeError, match="toy_offset"):
        FrozenCoreConfig(toy_offset=1)


@dataclasses.dataclass(frozen=True)
class OtherDamping(BasisOptions):
    damping: Annotated[int, Field(description="Something else.")] = 3


@dataclasses.dataclass(frozen=True)
class FarDamping(BasisOptions):
    """That of fcca but for its bound."""

    damping: Annotated[
        Annotated[float, Field(gt=1)] | tuple[float, float],
        Field(description=options_of(FCCAOptions)["damping"].help),
    ] = FCCAOptions.damping


@dataclasses.dataclass(frozen=True)
class Alpha(BasisOptions):
    alpha: float = 1.0


def toy_with(options: type[BasisOptions]) -> Toy:
    own = Toy()
    own.options = options  # type: ignore[assignment]
    return own


@pytest.mark.parametrize(
    ("name", "row", "taken"),
    [
        ("fcca", TOY, "fcca"),
        ("other", toy_with(OtherDamping), "damping"),
        ("other", toy_with(FarDamping), "damping"),
        ("other", toy_with(Alpha), "alpha"),
    ],
)
def test_a_name_that_means_something_already_is_refused(name: str, row: Toy, taken: str) -> None:
    before = dict(CONSTRUCTORS)
    with pytest.raises(ConfigError, match=f"'{taken}' is taken"):
        register_constructor(name, row)
    assert before == CONSTRUCTORS


def test_two_constructors_may_read_one_option(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(CONSTRUCTORS, "again", TOY)
    del CONSTRUCTORS["again"]
    register_toy(monkeypatch)
    register_constructor("again", TOY)
    assert FrozenCoreConfig(constructor="again", toy_offset=1).basis_options() == ToyOptions(toy_offset=1)
    with pytest.raises(ConfigError, match=r"it is for toy, again"):
        FrozenCoreConfig(constructor="eva", toy_offset=1)


def test_an_adapter_that_was_saved_with_what_its_constructor_does_not_read_still_loads(tmp_path: Path) -> None:
    """Such configurations were taken once, and the option changed nothing."""
    get_peft_model(
        tiny_qwen2(), FrozenCoreConfig(r=4, target_modules=["q_proj"], constructor="random")
    ).save_pretrained(str(tmp_path))
    file = tmp_path / "adapter_config.json"
    file.write_text(file.read_text().replace('"damping": 0.001', '"damping": [0.1, 0.2]'))
    loaded = PeftConfig.from_pretrained(str(tmp_path))
    assert (loaded.constructor, loaded.damping) == ("random", [0.1, 0.2])
    file.write_text(file.read_text().replace('"eva_output": "weight_times_input"', '"eva_output": 3'))
    with pytest.raises(ArtifactError, match="eva_output"):
        FrozenCoreConfig.from_pretrained(str(tmp_path))
