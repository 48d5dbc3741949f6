"""Tiny random models and padded batches; jaxtyping shapes of the package are checked in every test."""

from __future__ import annotations

import jaxtyping

SHAPE_CHECKED = [
    "frozencore.linalg", "frozencore.moments", "frozencore.basis", "frozencore.whitening", "frozencore.objective",
    "frozencore.constructors", "frozencore.calibration", "frozencore.adapter", "frozencore.fingerprint",
    "frozencore.accounting", "frozencore.inspection",
]  # fmt: skip
jaxtyping.install_import_hook(SHAPE_CHECKED, "beartype.beartype")  # must come before the first import of frozencore

import os  # noqa: E402
import sys  # noqa: E402
from collections.abc import Iterator  # noqa: E402
from pathlib import Path  # noqa: E402

import pytest  # noqa: E402
import torch  # noqa: E402
from torch import nn  # noqa: E402

from tiny import Example, draw_examples, tiny_gpt2, tiny_llama, tiny_qwen2  # noqa: E402

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


@pytest.fixture
def examples() -> list[Example]:
    """Seven examples of 4 to 9 tokens."""
    return draw_examples(num_examples=7, seed=3)


@pytest.fixture
def qwen2() -> nn.Module:
    """Two layers, width 32, four heads over two key/value heads, float32."""
    return tiny_qwen2()


@pytest.fixture
def llama() -> nn.Module:
    return tiny_llama()


@pytest.fixture
def gpt2() -> nn.Module:
    """Conv1D weights, learned positions, dropout 0.3 in the config."""
    return tiny_gpt2()


@pytest.fixture
def as_a_user() -> Iterator[None]:
    """No runtime type checks, as in a user's process: a wrong option must meet our own refusal."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


@pytest.fixture(autouse=True)
def _same_global_seed() -> None:
    torch.manual_seed(0)


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):  # type: ignore[no-untyped-def]
    """Runs ``frozencore`` with those words: exit status, what it printed, and its errors."""
    from frozencore import cli

    def run(*words: str | Path) -> tuple[int, str, str]:
        capsys.readouterr()  # what the fixtures wrote
        monkeypatch.setattr(sys, "argv", ["frozencore", *map(str, words)])
        with pytest.raises(SystemExit) as exit_:
            cli.main()
        captured = capsys.readouterr()
        return int(exit_.value.code or 0), captured.out, captured.err

    return run
