"""Tiny models, tokenizers and batches, the real data and model where a checkout has them beside it, and its places.

jaxtyping's shapes of the package are checked in every test. ``tests`` and ``lab/tests`` share these fixtures.
"""

from __future__ import annotations

from pathlib import Path

import jaxtyping

ROOT = Path(__file__).parent.parent
SOURCES = ROOT / "src"
LAB = ROOT / "lab"
PAPER_TABLES = LAB / "tests" / "data"
SHARED = ROOT.parent / "shared"

# Only modules that say shapes: wrapping every function of the others took a quarter of the tests' time for nothing.
SHAPE_CHECKED = [
    ".".join(file.relative_to(SOURCES).with_suffix("").parts)
    for file in sorted((SOURCES / "frozencore").rglob("*.py"))
    if "from jaxtyping import" in file.read_text(encoding="utf-8")
]
jaxtyping.install_import_hook(SHAPE_CHECKED, "beartype.beartype")  # must come before the first import of frozencore

# torch, transformers and what needs them are imported in the fixtures: pytest-xdist's controller reads this file too,
# runs no test, and would need nine seconds for them.
import gc  # noqa: E402
import io  # noqa: E402
import os  # noqa: E402
import signal  # noqa: E402
import subprocess  # noqa: E402
import sys  # noqa: E402
from collections.abc import Callable, Iterable, Iterator  # noqa: E402
from contextlib import redirect_stdout  # noqa: E402
from typing import TYPE_CHECKING, Any  # noqa: E402

import pytest  # noqa: E402
from hypothesis import HealthCheck, settings  # noqa: E402
from rich.console import Console  # noqa: E402

if TYPE_CHECKING:
    from torch import nn

    from frozencore.tune.rows.prompts import PromptEncoder

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.pop("COLUMNS", None)  # of the terminal that the tests were started in
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where a shell started them in the background
# No deadline and no example that is too slow: on a busy machine these would be failures of the machine. Nothing is
# kept between runs, so that two of them try the same.
settings.register_profile(
    "fixed", derandomize=True, database=None, deadline=None, max_examples=40,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)  # fmt: skip
settings.register_profile(
    "search", settings.get_profile("fixed"), derandomize=False, max_examples=1000, print_blob=True
)
settings.load_profile("fixed")

CHAT_TEMPLATE = (
    "{% for m in messages %}<s>{{ m.role }}\n{{ m.content }}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant\n{% endif %}"
)


def few(values: Iterable[Any], *fast: Any) -> list[Any]:
    """All values of a parameter, of which only these are tried in fast tests."""
    return [value if value in fast else pytest.param(value, marks=pytest.mark.slow) for value in values]


def tried(times: float) -> settings:
    """So many times as often as a property is tried otherwise: for what is quick and wide, or slow."""
    return settings(max_examples=round(times * settings().max_examples))


def shown(renderable: object) -> str:
    """The text of what rich prints, on a wide screen."""
    console = Console(width=220, file=io.StringIO())
    console.print(renderable)
    return console.file.getvalue()  # type: ignore[attr-defined]


def printed(*words: object) -> str:
    """What ``frozencore`` with those words prints to its good end; for fixtures of a whole module."""
    from frozencore.cli import app as cli

    with pytest.MonkeyPatch.context() as patch, redirect_stdout(io.StringIO()) as out:
        patch.setattr(sys, "argv", ["frozencore", *map(str, words)])
        with pytest.raises(SystemExit) as end:
            cli.main()
    assert not end.value.code
    return out.getvalue()


def pytest_collection_finish() -> None:
    """Freeze imported objects, so that the garbage collection of every Trainer does not visit them."""
    import transformers  # noqa: F401 - before a test: its log keeps the stderr that it finds, and a test's is closed

    import frozencore.cli.display  # noqa: F401 - before a test that sets COLUMNS: it reads them once

    gc.collect()
    gc.freeze()


@pytest.fixture
def qwen2() -> nn.Module:
    """Two layers, width 32, four heads over two key/value heads, float32."""
    from tiny import tiny_qwen2

    return tiny_qwen2()


@pytest.fixture
def gpt2() -> nn.Module:
    """Conv1D weights, learned positions, dropout 0.3 in the config."""
    from tiny import tiny_gpt2

    return tiny_gpt2()


@pytest.fixture
def as_a_user() -> Iterator[None]:
    """No runtime type checks, as in a user's process: a wrong option must meet our own refusal."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


@pytest.fixture(autouse=True)
def same_global_seed() -> None:
    import torch

    torch.manual_seed(0)


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):  # type: ignore[no-untyped-def]
    """Runs ``frozencore`` with those words: exit status, what it printed, and its errors."""
    from frozencore.cli import app as cli

    def run(*words: str | Path) -> tuple[int, str, str]:
        capsys.readouterr()  # what the fixtures wrote
        monkeypatch.setattr(sys, "argv", ["frozencore", *map(str, words)])
        with pytest.raises(SystemExit) as exit_:
            cli.main()
        captured = capsys.readouterr()
        return int(exit_.value.code or 0), captured.out, captured.err

    return run


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """Mounts a small file system in memory, with those options."""
    folder = tmp_path / "mounted"
    folder.mkdir()

    def make(options: str) -> Path:
        done = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "none", folder], capture_output=True, check=False)
        if done.returncode:
            pytest.skip("this process may not mount a file system")
        return folder

    yield make
    subprocess.run(["umount", "--lazy", folder], capture_output=True, check=False)


@pytest.fixture
def shared_data() -> Path:
    """The real benchmark rows, of the hub's schema."""
    if not (SHARED / "data").is_dir():
        pytest.skip("no ../shared/data beside this checkout")
    return SHARED / "data"


@pytest.fixture
def tiny1m() -> Path:
    """A real pretrained Llama of a million parameters; it puts ``<s>`` in front and pads with ``</s>``."""
    if not (SHARED / "models" / "tiny1m").is_dir():
        pytest.skip("no ../shared/models/tiny1m beside this checkout")
    return SHARED / "models" / "tiny1m"


@pytest.fixture
def byte_tokenizer() -> Callable[..., Any]:
    """Makes a tokenizer of one token a byte (258 in all), plus merges of the pairs given."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    def make(
        *,
        adds_start: bool = False,
        chat: bool = False,
        merges: tuple[tuple[str, str], ...] = (),
        special: tuple[str, ...] = (),
        end: str = "</s>",
    ) -> Any:
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        pieces = [*alphabet, *(left + right for left, right in merges)]
        tokenizer = Tokenizer(models.BPE(vocab={piece: i for i, piece in enumerate(pieces)}, merges=list(merges)))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.decoder = decoders.ByteLevel()
        tokenizer.add_special_tokens([AddedToken(token, special=True) for token in ("<s>", "</s>", *special)])
        if adds_start:
            tokenizer.post_processor = processors.TemplateProcessing(
                single="<s> $A", special_tokens=[("<s>", tokenizer.token_to_id("<s>"))]
            )
        fast = PreTrainedTokenizerFast(
            tokenizer_object=tokenizer, bos_token="<s>", eos_token=end, pad_token=end, model_max_length=512
        )
        fast.chat_template = CHAT_TEMPLATE if chat else None
        return fast

    return make


@pytest.fixture
def encoder(byte_tokenizer: Callable[..., Any]) -> PromptEncoder:
    """An encoder of one token a byte."""
    from frozencore.tune.rows.prompts import PromptEncoder

    return PromptEncoder(byte_tokenizer())


@pytest.fixture
def byte_model() -> nn.Module:
    """A tiny Qwen2 over the byte tokenizer's vocabulary."""
    from tiny import tiny_qwen2

    return tiny_qwen2(vocab_size=300, max_position_embeddings=512)
