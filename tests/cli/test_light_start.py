"""The imports of a new process: the command line starts without torch, and a user's program still gets the method."""

from __future__ import annotations

import json
import re
import resource
import subprocess
import sys
from importlib.util import find_spec, module_from_spec
from pathlib import Path
from types import ModuleType

import pytest

import frozencore
from adapted import adapted
from frozencore import __version__, public, words
from frozencore.cli.verbs import all_verbs
from places import LAB

SMOLLM2 = LAB / "results" / "smollm2"
HEAVY = {"torch", "transformers", "peft", "datasets", "accelerate", "matplotlib", "scipy", "torchao", "bitsandbytes"}


def imported(*words: str, script: Path | None = None) -> tuple[set[str], str, str]:
    """Heavy packages that ``frozencore`` imports with those words, what it prints, and its other lines on stderr."""
    program = ["-m", "frozencore_command"] if script is None else [str(script)]
    done = subprocess.run([sys.executable, "-X", "importtime", *program, *words], capture_output=True, text=True)
    lines = done.stderr.splitlines()
    times = [line for line in lines if line.startswith("import time:")]
    assert len(times) > 100
    packages = {line.rpartition("|")[2].strip().partition(".")[0] for line in times}
    return packages & HEAVY, done.stdout, "\n".join(line for line in lines if line not in times)


TELLS = {
    ("--version",): f"frozencore {__version__}",
    ("tasks", "list"): "pocket-math",
    ("schema",): "weighting",
    ("campaign", "--help"): "Make many runs from one YAML file",
    ("tune", "--help"): "--calibration-size",
    ("export", "--help"): "--to",
    ("campaign", "status", str(SMOLLM2)): "smollm2: ",
}
ONE_AFTER_THE_OTHER = """
import io, json, sys
from contextlib import redirect_stderr, redirect_stdout, suppress
from frozencore_command import main
lines, told = json.loads(sys.argv[1]), []
for words in lines:
    sys.argv[1:] = words
    with redirect_stdout(io.StringIO()) as out, redirect_stderr(io.StringIO()) as err, suppress(SystemExit):
        main()
    packages = {name.partition(".")[0] for name in sys.modules}
    told.append([sorted(packages), out.getvalue(), err.getvalue()])
print(json.dumps(told))
"""


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, ...], tuple[set[str], str, str]]:
    """As ``imported``, of all lines in one process: a package that one imports is seen from there on."""
    folder = tmp_path_factory.mktemp("bin")
    script = folder / "frozencore"
    adapted("fcca", trained=True).save_pretrained(str(folder / "run/adapter"))
    (folder / "run/result.json").write_text((SMOLLM2 / "records.jsonl").read_text().partition("\n")[0])
    (folder / "rows.txt").write_text("rows")
    for name in ("tenants/anna.jsonl", "many/anna/result.json"):
        (folder / name).parent.mkdir(parents=True)
        (folder / name).write_text("{}")
    script.write_text(ONE_AFTER_THE_OTHER)
    words = [sys.executable, str(script), json.dumps([list(words) for words in (*TELLS, *REFUSED)])]
    done = subprocess.run(words, capture_output=True, text=True, check=True, cwd=folder)
    found = [(set(packages) & HEAVY, out, err) for packages, out, err in json.loads(done.stdout)]
    return dict(zip((*TELLS, *REFUSED), found, strict=True))


@pytest.mark.parametrize("words", TELLS, ids=" ".join)
def test_what_only_tells_imports_no_torch_and_prints_nothing_else(
    words: tuple[str, ...], told: dict[tuple[str, ...], tuple[set[str], str, str]]
) -> None:
    heavy, out, err = told[words]
    assert TELLS[words] in out
    assert (heavy, err) == (set(), "")


RUN = ("--model", "pocket", "--task", "pocket-math", "--out", "x")
REFUSED = {
    ("tune", "--model", "pocket", "--data", "none.jsonl", "--out", "x"): "there is no file none.jsonl",
    ("tune", "--model", "pocket", "--data", "rows.txt", "--out", "x"): "Convert it to one of these",
    ("tune", "--model", "./none", "--task", "sst2", "--out", "x"): "there is no such folder",
    ("tune", "--model", "run", "--task", "sst2", "--out", "x"): "it has no config.json",
    ("tune", *RUN, "--method", "fccca"): "Did you mean 'fcca'",
    ("tune", *RUN, "--data-root", "none"): "there is no folder none",
    ("tune", *RUN, "--basis", "none"): "has no basis.json",
    ("tune", *RUN, "--moments", "none"): "There is no moments file at none",
    ("tune", *RUN[:-1], "run"): "already holds a finished run",
    ("tune", *RUN[:-1], "run", "--resume"): "there is nothing to resume",
    ("tune", "--model", "smolm2", *RUN[2:]): "Did you mean 'smollm2'?",
    ("tune", *RUN, "--dry-run", "--data-root", "none"): "there is no folder none",
    ("tune-many", "--model", "pocket", "--tenants", "none", "--out", "x"): "a folder of row files or a YAML file",
    ("calibrate", "--model", "none/at/all", "--task", "sst2", "--out", "x"): "there is no such folder",
    ("evaluate", "--model", "pocket", "--task", "sst3", "--out", "x"): "Did you mean 'sst2'",
    ("evaluate", "--model", "./none", "--task", "sst2", "--out", "x"): "there is no such folder",
    ("evaluate", "--model", "pocket", "--data", "none.jsonl", "--out", "x"): "there is no file none.jsonl",
    ("evaluate", *RUN[:2], "--task", "sst2", "--adapter", "none", "--out", "x"): "none has no adapter_config.json",
    ("export", "run", "--to", "merge", "--out", "x"): "Did you mean 'merged'",
    ("export", "none", "--out", "x"): "none has no adapter_config.json",
    ("inspect", "none"): "none has no adapter_config.json",
    ("merge", "run", "none", "--out", "x"): "none has no adapter_config.json",
    ("adapter", "pack", "none", "--out", "x"): "none has no adapter_config.json",
    ("chat", "none"): "none has no adapter_config.json",
    ("check", "none"): "none has no adapter_config.json",
    ("tune-many", *RUN[:2], "--tenants", "tenants", "--out", "many"): "already holds a finished run of 'anna'",
    ("calibrate", *RUN[:-1], "run"): "already holds a finished run",
    ("calibrate", *RUN[:-1], "rows.txt"): "rows.txt is not a writable folder",
    ("evaluate", *RUN[:-1], "rows.txt"): "rows.txt is not a writable folder",
    ("export", "run", "--out", "many"): "many is there already",
    ("export", "run", "--to", "merged", "--base", "./none", "--out", "x"): "there is no such folder",
    ("inspect", "run", "--moments", "none"): "There is no moments file at none",
    ("merge", "run", "run", "--out", "many"): "many is there already",
    ("adapter", "pack", "run", "--out", "many"): "many is there already",
    ("adapter", "pack", "run", "--basis", "none", "--out", "x"): "none has no basis.json",
    ("adapter", "unpack", "run", "--out", "many"): "many is there already",
}


@pytest.mark.parametrize("words", REFUSED, ids=" ".join)
def test_a_wrong_word_is_refused_before_torch_and_peft_are_imported(
    words: tuple[str, ...], told: dict[tuple[str, ...], tuple[set[str], str, str]]
) -> None:
    heavy, out, err = told[words]
    assert REFUSED[words] in err
    assert (heavy, out, err.count("\n")) == (set(), "", 1)


@pytest.mark.parametrize(
    "words",
    [
        ("tune", "--model", "pocket", "--data", "none.jsonl", "--out", "x"),
        ("tune", *RUN, "--method", "fccca"),
        ("tune", *RUN[:-1], "."),
        ("tune", *RUN, "--learing-rate", "1"),
        ("export", ".", "--to", "merge", "--out", "x"),
        ("export", ".", "--out", "full"),
    ],
    ids=" ".join,
)
def test_a_wrong_word_costs_a_second_of_processor_time(words: tuple[str, ...], tmp_path: Path) -> None:
    (tmp_path / "result.json").write_text("{}")
    (tmp_path / "adapter_config.json").write_text("{}")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run([sys.executable, "-m", "frozencore_command", *words], cwd=tmp_path, capture_output=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert (done.returncode, done.stderr.count(b"\n")) == (2, 1)
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 1.5  # importing PEFT takes six


def test_a_fresh_process_that_only_helps_imports_no_torch() -> None:
    heavy, out, err = imported("--help")
    assert "calibrate" in out
    assert (heavy, err) == (set(), "")


def test_the_installed_script_starts_as_light_as_the_module(tmp_path: Path) -> None:
    script = tmp_path / "frozencore"  # as pip writes it
    script.write_text("import sys\nfrom frozencore_command import main\nsys.exit(main())\n")
    assert imported("--version", script=script) == (set(), f"frozencore {__version__}\n", "")


def test_in_the_commands_own_process_every_public_name_is_there_when_it_is_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "frozencore_command", ModuleType("frozencore_command"))
    spec = find_spec("frozencore")
    assert spec is not None
    assert spec.loader is not None
    package = module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "frozencore", package)
    spec.loader.exec_module(package)
    assert not {"calibrate", "public", "adapter"} & set(vars(package))
    assert not hasattr(package, "no_such_name")
    assert not hasattr(package, "__wrapped__")
    names: dict[str, object] = {}
    exec("from frozencore import *; from frozencore import words", names)
    assert {name: names[name] for name in public.__all__} == {name: getattr(public, name) for name in public.__all__}
    assert names["words"] is words


def test_the_package_lists_its_public_names_and_no_others() -> None:
    assert dir(frozencore) == sorted([*public.__all__, "__version__"])


def test_the_list_of_verbs_shows_every_verb_and_each_shows_the_same_line(command) -> None:  # type: ignore[no-untyped-def]
    listed = re.findall(r"^│ ([a-z][a-z-]*) {2,}", command("--help")[1], flags=re.MULTILINE)
    assert listed == [verb.name for verb in all_verbs()]
    for verb in all_verbs():
        text = " ".join(command(verb.name, "--help")[1].split())
        assert verb.help in text
        assert f"frozencore {verb.name} " in text
