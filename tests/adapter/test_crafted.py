"""Crafted adapters and bases end in one line, through every way in."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import ways_in as ways
from frozencore.errors import FrozenCoreError

HUGE = int("9" * 400)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made")
    ways.make_sources(folder)
    return folder


@pytest.fixture
def copied(made: Path, tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    def copy(kind: str) -> Path:
        return Path(shutil.copytree(made / kind, tmp_path / kind))

    return copy


def outcomes(doors: dict[str, Callable[[Path], object]], folder: Path) -> set[str]:
    """The ways that took a folder; the others refused it in one line, and each within seconds."""
    took = set()
    for name, enter in doors.items():
        started = time.process_time()
        refusal: str | None
        try:
            enter(folder)
        except FrozenCoreError as error:
            refusal = str(error)
        else:
            refusal = None
        if refusal is None:
            took.add(name)
        else:
            assert len(refusal.splitlines()) <= 1, name
            assert len(refusal) < 1000, name
        assert time.process_time() - started < 20, name
    return took


REFUSED: dict[str, dict[str, Any]] = {
    "a scale of 400 digits": {"alpha": HUGE},
    "a layer's scale of 400 digits": {"alpha_pattern": {"q_proj": HUGE}},
    "a scale that is no finite number in float32": {"alpha": 1e300},
    "target_modules a number": {"target_modules": 7},
    "target_modules a mapping": {"target_modules": {"q_proj": 1}},
    "target_modules a list of numbers": {"target_modules": [1, 2]},
    "target_modules a list in a list": {"target_modules": [["q_proj"]]},
    "target_modules a broken expression": {"target_modules": "("},
    "target_modules empty": {"target_modules": []},
    "target_modules empty text": {"target_modules": ""},
    "target_modules with an empty name": {"target_modules": ["q_proj", ""]},
    "exclude_modules a number": {"exclude_modules": 7},
    "a constructor that is a list": {"constructor": ["random"]},
    "a constructor that is a mapping": {"constructor": {}},
    "rounds of 400 digits": {"rounds": HUGE},
    "rounds of 64 bits": {"rounds": 2**63},
    "a basis that grew": {"scale_rank": 2},
    "a rank budget of 64 bits": {"rank_budget": 2**63},
    "a rank of 400 digits for one layer": {"rank_pattern": {"q_proj": HUGE}},
    "a rank pattern that is a list": {"rank_pattern": [1]},
    "modules_to_save of what is not in the file": {"modules_to_save": ["lm_head"]},
    "token indices of 10^12": {"trainable_token_indices": [10**12]},
    "negative token indices": {"trainable_token_indices": [-1]},
    "token indices of no token": {"trainable_token_indices": []},
    "token indices by name of no token": {"trainable_token_indices": {"embed_tokens": []}},
    "token indices by name of 10^12": {"trainable_token_indices": {"embed_tokens": [10**12]}},
    "tokens that are not in the file": {"trainable_token_indices": [1]},
    "layers_to_transform a text": {"layers_to_transform": "x"},
    "a seal that is a number": {"seal": 7},
}
LOADS_ONTO_A_MODEL = {"PEFT", "PEFT, a second adapter", "evaluate", "merged"}


@pytest.mark.parametrize("kind", ["adapter", "cores"])
@pytest.mark.parametrize("case", REFUSED)
def test_crafted_values_are_refused_in_one_line(
    case: str, kind: str, made: Path, copied: Callable[[str], Path]
) -> None:
    folder = copied(kind)
    ways.set_values(folder, **REFUSED[case])
    took = outcomes(ways.ways_in(made), folder)
    assert not took & LOADS_ONTO_A_MODEL


def _every(part: str, change: Callable[[Tensor], Tensor]) -> Callable[[dict[str, Tensor]], dict[str, Tensor]]:
    """A change of the tensors whose names end so."""
    return lambda tensors: {k: change(X) if k.endswith(part) else X for k, X in tensors.items()}


BAD_TENSORS: dict[str, Callable[[dict[str, Tensor]], dict[str, Tensor]]] = {
    "P in 8 bits": _every("_P", lambda X: X.to(torch.float8_e4m3fn)),
    "Q in 8 bits": _every("_Q", lambda X: X.to(torch.float8_e5m2)),
    "R in 8 bits": _every("_R.weight", lambda X: X.to(torch.float8_e4m3fn)),
    "P complex": _every("_P", lambda X: X.to(torch.complex64)),
    "P whole numbers": _every("_P", lambda X: X.to(torch.int8)),
    "P of no rows": _every("_P", lambda X: X[:0]),
    "Q of no rows": _every("_Q", lambda X: X[:0]),
    "nothing of rank": _every("_P", lambda X: X[:, :0]),
    "R of no values": _every("_R.weight", lambda X: X[:0, :0]),
    "cores that no float32 holds": _every("_R.weight", lambda X: torch.full_like(X, 1e300, dtype=torch.float64)),
    "bases that no float32 holds": _every("_P", lambda X: torch.full_like(X, 1e300, dtype=torch.float64)),
    "a tensor with the name of a path": lambda tensors: {**tensors, "../x": torch.zeros(1)},
    "a tensor with a terminal's escape": lambda tensors: {**tensors, "a\x1b[31m": torch.zeros(1)},
}


@pytest.mark.parametrize("case", BAD_TENSORS)
def test_crafted_tensors_are_refused_in_one_line(case: str, made: Path, copied: Callable[[str], Path]) -> None:
    folder = copied("adapter")
    ways.set_tensors(folder, BAD_TENSORS[case])
    assert not outcomes(ways.ways_in(made), folder)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bool, torch.float8_e4m3fn, torch.complex64])
def test_cores_alone_that_are_no_floats_to_compute_with_are_refused(
    dtype: torch.dtype, made: Path, copied: Callable[[str], Path]
) -> None:
    folder = copied("cores")
    ways.set_tensors(folder, _every("", lambda X: X.to(dtype)))
    assert not outcomes(ways.ways_in(made), folder)


@pytest.mark.parametrize("value", [1e300, float("nan"), 3.5e38])
def test_cores_alone_that_no_float32_holds_are_refused(value: float, made: Path, copied: Callable[[str], Path]) -> None:
    folder = copied("cores")
    ways.set_tensors(folder, _every("", lambda X: torch.full_like(X, value, dtype=torch.float64)))
    assert not outcomes(ways.ways_in(made), folder)


BAD_HEADERS: dict[str, tuple[tuple[str, ...], Any]] = {
    "a scale of 400 digits": (("scales", "model.layers.0.self_attn.q_proj"), HUGE),
    "a scale that is no finite number in float32": (("scales", "model.layers.0.self_attn.q_proj"), 1e300),
    "target_modules a number": (("options", "target_modules"), 7),
    "target_modules a mapping": (("options", "target_modules"), {"a": 1}),
    "target_modules a list of numbers": (("options", "target_modules"), [1]),
    "a constructor that is a list": (("options", "constructor"), ["random"]),
    "a rank of 400 digits": (("options", "r"), HUGE),
    "an alpha of 400 digits": (("options", "alpha"), HUGE),
    "a rank pattern that is a list": (("options", "rank_pattern"), [1]),
    "a rank pattern that is a number": (("options", "rank_pattern"), -1),
    "an alpha pattern that is a number": (("options", "alpha_pattern"), 1e300),
    "scales that are a list": (("scales",), [1]),
    "options that are a list": (("options",), [1]),
    "a format of 400 digits": (("format",), HUGE),
    "an identity that is a list": (("identity",), [1]),
}


@pytest.mark.parametrize("case", BAD_HEADERS)
def test_crafted_headers_of_a_basis_are_refused_in_one_line(
    case: str, made: Path, copied: Callable[[str], Path]
) -> None:
    folder = copied("cores")
    ways.set_in_header(folder / "basis", *BAD_HEADERS[case])
    assert "configuration" not in outcomes(ways.ways_into_a_basis(made), folder / "basis")
    took = outcomes(ways.ways_in(made), folder)
    assert not took & {"PEFT", "merged"} or BAD_HEADERS[case][0][0] == "options"


NO_PLACES = {"long": "x" * 5000, "deep": "a/" * 3000, "zero": "\x00", "home": "~nobody/x", "share": "//server/share"}


@pytest.mark.parametrize("case", NO_PLACES)
def test_a_name_of_a_basis_that_no_file_may_have_is_refused(
    case: str, made: Path, copied: Callable[[str], Path]
) -> None:
    folder, name = copied("cores"), NO_PLACES[case]
    shutil.rmtree(folder / "basis")
    ways.set_values(folder, basis=name)
    assert not outcomes(ways.ways_in(made), folder)
    with pytest.raises(FrozenCoreError):
        ways.load_basis(name)


def test_sound_folders_are_taken_by_every_way_that_is_theirs(made: Path) -> None:
    """So the refusals above are of what was crafted."""
    doors = ways.ways_in(made)
    assert outcomes(doors, made / "adapter") == doors.keys() - {"unpack"}
    assert outcomes(doors, made / "cores") >= doors.keys() - {"pack", "bank", "swap"}
    assert outcomes(ways.ways_into_a_basis(made), made / "cores" / "basis") == ways.ways_into_a_basis(made).keys()
