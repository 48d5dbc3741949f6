"""Verbs of packages that are installed beside us."""

from __future__ import annotations

import pytest

from frozencore.cli import verbs


@pytest.fixture
def without_lab(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if only frozencore were installed."""
    monkeypatch.setattr(verbs, "entry_points", lambda **_: ())
    verbs.all_verbs.cache_clear()


@pytest.fixture(autouse=True)
def _forget() -> object:
    yield
    verbs.all_verbs.cache_clear()


def test_the_labs_verbs_stand_behind_ours() -> None:
    assert {verb.name for verb in verbs.all_verbs()[-3:]} == set(verbs.IN_LAB)


@pytest.mark.usefixtures("without_lab")
@pytest.mark.parametrize("verb", verbs.IN_LAB)
def test_without_the_lab_its_verbs_say_in_one_line_how_to_get_it(verb: str, command) -> None:  # type: ignore[no-untyped-def]
    status, out, err = command(verb)
    assert (status, out) == (2, "")
    assert err == f"frozencore: frozencore {verb}: {verbs.LAB_MISSING}\n"


@pytest.mark.usefixtures("without_lab")
def test_without_the_lab_the_help_lists_the_other_verbs(command) -> None:  # type: ignore[no-untyped-def]
    out = command("--help")[1]
    assert "tune-many" in out
    assert "campaign" not in out
