"""The completions that a shell offers for the beginning of a command line."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from frozencore.cli.verbs import all_verbs

OFFERED = {
    "": {verb.name for verb in all_verbs()},
    "tu": {"tune", "tune-many"},
    "tune --calibration-": {"--calibration-size", "--calibration-task"},
    "tune --method mil": {"milora"},
    "tune --task pocket-m": {"pocket-math"},
    "tune --dtype b": {"bfloat16"},
    "campaign st": {"status"},
    "tasks ": {"list", "show"},
}


@pytest.mark.parametrize("shell", ["bash", "zsh"])
@pytest.mark.parametrize("begun", OFFERED)
def test_verbs_flags_and_the_values_that_have_names_are_offered(  # type: ignore[no-untyped-def]
    begun: str, shell: str, command, monkeypatch: pytest.MonkeyPatch
) -> None:
    line = f"frozencore {begun}"
    monkeypatch.setenv("_FROZENCORE_COMPLETE", f"complete_{shell}")
    if shell == "bash":
        monkeypatch.setenv("COMP_WORDS", line)
        monkeypatch.setenv("COMP_CWORD", str(len(line.split(" ")) - 1))
    else:
        monkeypatch.setenv("_TYPER_COMPLETE_ARGS", line)
    status, out, err = command()
    assert (status, err) == (0, "")
    if shell == "bash":
        assert set(out.split()) == OFFERED[begun]
    else:
        assert all(f'"{word}"' in out for word in OFFERED[begun])


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash here")
def test_the_script_that_is_printed_completes_in_a_bash_without_torch(tmp_path: Path) -> None:
    program = tmp_path / "frozencore"
    program.write_text(
        f"#!{sys.executable}\nimport sys\nfrom frozencore_command import main\ntry:\n    main()\nfinally:\n"
        "    print('torch' if 'torch' in sys.modules else 'light', file=sys.stderr)\n"
    )
    program.chmod(0o755)
    asked = (
        'eval "$(frozencore --show-completion bash)"; complete -p frozencore; '
        "COMP_WORDS=(frozencore tune --calibration-s); COMP_CWORD=2; _frozencore_completion frozencore; "
        "echo offered ${COMPREPLY[@]}"
    )
    done = subprocess.run(
        ["bash", "--norc", "-c", asked],
        env={**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert "-F _frozencore_completion frozencore" in done.stdout
    assert "offered --calibration-size\n" in done.stdout
    assert done.stderr.split() == ["light", "light"]
