"""The wheel and the source distribution, as a user gets them: built here, installed in an environment of their own."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from fixtures import ROOT

pytestmark = pytest.mark.slow
CONSTRAINTS = ROOT / "constraints.txt"


def run(*words: str | Path, cwd: Path) -> str:
    own = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}  # pip would count it as installed
    done = subprocess.run([str(word) for word in words], cwd=cwd, env=own, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with both, made from what git would clone: nothing that lies about in this checkout."""
    folder = tmp_path_factory.mktemp("distribution")
    run("git", "clone", "--quiet", ROOT, folder / "clone", cwd=folder)
    run(sys.executable, "-m", "venv", folder / "builder", cwd=folder)
    run(folder / "builder/bin/pip", "install", "--quiet", "build", cwd=folder)
    run(folder / "builder/bin/python", "-m", "build", "--outdir", folder, folder / "clone", cwd=folder)
    return folder


@pytest.fixture(scope="module")
def environment(built: Path) -> Path:
    """An environment of its own with the wheel and what it asks for."""
    run(sys.executable, "-m", "venv", built / "environment", cwd=built)
    wheel = next(built.glob("*.whl"))
    run(built / "environment/bin/pip", "install", "--quiet", "-c", CONSTRAINTS, f"{wheel}[tune]", cwd=built)
    return built / "environment/bin"


def test_both_hold_the_package_and_its_model_and_no_test(built: Path) -> None:
    wheel = zipfile.ZipFile(next(built.glob("*.whl"))).namelist()
    with tarfile.open(next(built.glob("*.tar.gz"))) as archive:
        source = archive.getnames()
    for names in (wheel, source):
        for file in ("frozencore/py.typed", "frozencore/tune/pocket/model/model.safetensors", "frozencore/cli/app.py"):
            assert any(name.endswith(file) for name in names), file
    assert not [name for name in wheel if not name.startswith("frozencore")]


def test_the_wheel_runs_without_what_only_tests_need(environment: Path, tmp_path: Path) -> None:
    assert "tune" in run(environment / "python", "-m", "frozencore", "--help", cwd=tmp_path)
    out = run(
        environment / "frozencore", "tune", "--model", "pocket", "--data", ROOT / "examples/reviews.jsonl",
        "--num-train", "16",
        "--num-evaluation", "8", "--calibration-size", "8", "--output", "run", cwd=tmp_path,
    )  # fmt: skip
    assert "trained values" in out
    assert (tmp_path / "run" / "adapter" / "adapter_model.safetensors").is_file()


def test_the_wheel_without_its_extra_trains_an_adapter(built: Path, tmp_path: Path) -> None:
    run(sys.executable, "-m", "venv", built / "plain", cwd=built)
    run(built / "plain/bin/pip", "install", "--quiet", "-c", CONSTRAINTS, next(built.glob("*.whl")), cwd=built)
    installed = run(built / "plain/bin/pip", "list", cwd=tmp_path).split()
    assert {"datasets", "pyarrow", "pandas", "matplotlib", "scipy"}.isdisjoint(installed)
    rows, model = tmp_path / "rows.jsonl", ROOT / "src/frozencore/tune/pocket/model"
    rows.write_text('{"prompt": "Tom has cats .", "completion": " two cats"}\n' * 8)
    options = ("--model", model, "--data", rows, "--output", tmp_path, "--rank", "4")
    run(built / "plain/bin/python", ROOT / "examples/finetune.py", *options, cwd=tmp_path)
    assert (tmp_path / "adapter" / "adapter_model.safetensors").is_file()


def test_the_source_distribution_installs_over_it(built: Path, environment: Path, tmp_path: Path) -> None:
    source = next(built.glob("*.tar.gz"))
    run(environment / "pip", "install", "--quiet", "--no-deps", "--force-reinstall", source, cwd=tmp_path)
    assert "tune" in run(environment / "frozencore", "--help", cwd=tmp_path)
