"""The command as a program: how it starts, how it ends on Ctrl-C and on errors, and how wide it prints."""

from __future__ import annotations

import io
import json
import os
import runpy
import signal
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec, module_from_spec
from pathlib import Path
from types import ModuleType

import pytest
import torch

import frozencore
import frozencore_command
from frozencore import public, text
from frozencore.cli import app as cli
from frozencore.errors import ArtifactError
from frozencore.tune.pocket import pocket_model_path

Command = Callable[..., tuple[int, str, str]]
FEW = ("--model", pocket_model_path(), "--task", "pocket-sentiment")


def raising(error: BaseException | type[BaseException]) -> Callable[..., None]:
    def fail(*_: object, **__: object) -> None:
        raise error

    return fail


def test_ctrl_c_sigterm_and_sighup_are_one_line_and_128_with_their_number(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests may run under nohup
    for status, how, end in (
        (130, "interrupted", raising(KeyboardInterrupt)),
        (143, "terminated", lambda: signal.raise_signal(signal.SIGTERM)),
        (129, "terminated", lambda: signal.raise_signal(signal.SIGHUP)),
    ):
        monkeypatch.setattr("frozencore_lab.campaign.results.status_lines", lambda _, end=end: end())
        came, _, err = command("campaign", "status", tmp_path)
        assert came == status
        assert err.splitlines()[-1] == f"frozencore: {how}; the same command continues from what is saved"
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup
    monkeypatch.setattr(
        "frozencore_lab.campaign.results.status_lines", lambda _: [str(signal.raise_signal(signal.SIGHUP))]
    )
    assert command("campaign", "status", tmp_path)[0] == 0
    for number, handler in before.items():
        signal.signal(number, handler)


def test_a_program_whose_streams_are_closed_ends_as_with_open_ones() -> None:
    words = f"'{sys.executable}' -m frozencore"
    for line, status in (("--version >&-", 0), ("tune --model pocket --data none --out x 2>&- >&-", 2)):
        assert subprocess.run(f"{words} {line}", shell=True, check=False).returncode == status


def test_a_letter_that_the_encoding_of_the_screen_lacks_is_escaped(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("frozencore_lab.campaign.results.status_lines", lambda _: ["Grüße"])
    screen = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", screen)
    assert command("campaign", "status", tmp_path)[0] == 0
    screen.seek(0)
    assert screen.read() == "Gr\\xfc\\xdfe\n"


def test_ctrl_c_says_that_something_goes_on_only_if_something_is_saved(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from_the_beginning = "the same command starts from the beginning"
    monkeypatch.setattr("frozencore.cli.runs.execute", raising(KeyboardInterrupt))
    asked, out = ("tune", *FEW, "--resume"), tmp_path / "tune"
    status, _, err = command(*asked, "--out", out)
    assert status == 130
    assert err.splitlines()[-1] == f"frozencore: interrupted; nothing is saved yet; {from_the_beginning}"
    out.mkdir()
    for name, content in (("inputs.json", {"model": 64 * "0"}), ("base-score.json", {})):
        (out / name).write_text(json.dumps(content))
    assert command(*asked, "--out", out)[2].splitlines()[-1].endswith(" continues from what is saved")

    monkeypatch.chdir(tmp_path)
    Path("tune").mkdir(exist_ok=True)
    Path("tune/adapter_config.json").write_text('{"peft_type": "FROZENCORE"}')  # it is called as a verb
    monkeypatch.setattr("frozencore.adapter.folders.merge_adapters", raising(KeyboardInterrupt))
    status, _, err = command("merge", "tune", "--out", "merged")
    assert status == 130, err
    assert err.splitlines()[-1] == f"frozencore: interrupted; {from_the_beginning}"


@pytest.mark.parametrize(
    ("error", "is_foreseen"),
    [
        (PermissionError(13, "No", "/some/file"), True),
        (torch.OutOfMemoryError("CUDA out of memory."), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
    ],
)
def test_a_foreseen_error_is_one_line_and_debug_shows_its_traceback(
    error: Exception, is_foreseen: bool, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cli, "app", raising(error))
    monkeypatch.delenv("FROZENCORE_DEBUG", raising=False)
    if is_foreseen:
        status, _, err = command()
        assert (status, err.count("\n")) == (2, 1)
        monkeypatch.setenv("FROZENCORE_DEBUG", "1")
    with pytest.raises(type(error)) as caught:
        cli.main()
    assert caught.value is error


def test_debug_is_a_flag_of_every_verb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FROZENCORE_DEBUG", "")  # so that it is put back
    monkeypatch.setattr(sys, "argv", ["frozencore", "--debug", "inspect", str(tmp_path)])
    with pytest.raises(ArtifactError, match="has no adapter_config.json"):
        cli.main()


@pytest.mark.filterwarnings("ignore:'frozencore.cli.display' found in sys.modules")
def test_tables_are_as_wide_as_the_terminal_or_as_columns_and_wide_in_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    for columns, forced, width in (("70", "1", 70), ("70", "", 70), (None, "", 160)):
        monkeypatch.setenv("FORCE_COLOR", forced)
        monkeypatch.delenv("COLUMNS", raising=False)
        if columns is not None:
            monkeypatch.setenv("COLUMNS", columns)
        assert runpy.run_module("frozencore.cli.display")["console"].width == width


def test_the_module_is_the_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["frozencore", "schema"])
    with pytest.raises(SystemExit) as exit_:
        runpy.run_module("frozencore", run_name="__main__")
    assert not exit_.value.code
    assert json.loads(capsys.readouterr().out)["title"] == "Campaign"


def test_the_script_that_pip_writes_and_the_module_start_without_torch(tmp_path: Path) -> None:
    script = tmp_path / "frozencore"
    script.write_text("import sys\nfrom frozencore_command import main\nsys.exit(main())\n")
    for program in ([str(script)], ["-m", "frozencore_command"]):
        words = [sys.executable, "-X", "importtime", *program, "--help"]
        done = subprocess.run(words, capture_output=True, text=True, check=True)
        assert "calibrate" in done.stdout
        imported = {line.rpartition("|")[2].strip().partition(".")[0] for line in done.stderr.splitlines()}
        assert len(imported) > 50
        assert not imported & {"torch", "transformers", "peft", "datasets", "accelerate", "matplotlib", "scipy"}


def test_the_command_limits_the_kernels_that_torch_keeps_but_for_limits_that_were_given(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ours, given = frozencore_command.KERNEL_CACHES
    monkeypatch.setenv(ours, "")
    monkeypatch.delenv(ours)
    monkeypatch.setenv(given, "7")
    monkeypatch.setattr(frozencore_command, "NEEDED", ("not_installed",))
    with pytest.raises(SystemExit):
        frozencore_command.main()
    assert (os.environ[ours], os.environ[given]) == ("64", "7")


GROWS = """
import torch
def resident():
    with open("/proc/self/statm") as found:
        return int(found.read().split()[1])
torch.set_num_threads(1)
W = torch.randn(1536, 576).bfloat16()
before = resident()
for tokens in range(2, 202):
    torch.nn.functional.linear(torch.randn(tokens, 576).bfloat16().requires_grad_(True), W).sum().backward()
print(resident() - before)
"""


@pytest.mark.slow
def test_memory_grows_little_with_the_shapes_of_products_in_bfloat16() -> None:
    if not torch.cpu._is_avx512_bf16_supported():
        pytest.skip("this CPU has no products in bfloat16")
    pages = []
    for limits in ({}, dict.fromkeys(frozencore_command.KERNEL_CACHES, "64")):
        words = [sys.executable, "-c", GROWS]
        done = subprocess.run(words, env=os.environ | limits, capture_output=True, text=True, check=True)
        pages.append(int(done.stdout))
    assert pages[1] < pages[0] / 2


def test_in_the_commands_own_process_every_public_name_is_there_when_it_is_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "frozencore_command", ModuleType("frozencore_command"))
    spec = find_spec("frozencore")
    package = module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "frozencore", package)
    spec.loader.exec_module(package)
    assert not {"calibrate", "public", "adapter"} & set(vars(package))
    assert not hasattr(package, "no_such_name")
    assert not hasattr(package, "__wrapped__")
    names: dict[str, object] = {}
    exec("from frozencore import *; from frozencore import text", names)
    assert {name: names[name] for name in public.__all__} == {name: getattr(public, name) for name in public.__all__}
    assert names["text"] is text


def test_the_package_lists_its_public_names_and_no_others() -> None:
    assert dir(frozencore) == sorted([*public.__all__, "__version__"])
