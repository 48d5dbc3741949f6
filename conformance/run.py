"""``make conformance``: PEFT's own test suite, run against frozen cores.

It fetches the tests of the installed PEFT, and builds stand-ins for the hub models. It runs the suite once for a
constructor without data and once for a calibrated one. It prints the passed, failed and excluded tests (with reasons),
and writes results.json. The exit status is 1 if a test failed.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

from source import CACHE, QUANTISERS, fetch_quantisers, fetch_tests, versions_of  # noqa: E402

from frozencore import __version__  # noqa: E402

FILES = ["custom_models", "decoder_models", "encoder_decoder_models", "feature_extraction_models", "seq_classifier",
         "token_classification_qa", "config", "quantization"]  # fmt: skip
CONSTRUCTORS = ["random", "fcca"]
FEWEST_CASES = 1200  # fewer passes mean that the tables were not understood, not that all is well


def run_suite(
    constructor: str, *, workers: int = 0, sabotage: str = "", select: str = "", files: list[str] = FILES
) -> dict:
    """Run the suite in a process of its own; its counts, failures and reasons of exclusion."""
    from tiny_models import build_models

    tests = fetch_tests()
    models, outcomes = CACHE / "models", CACHE / f"outcomes-{constructor}{sabotage}.json"
    build_models(models)
    outcomes.unlink(missing_ok=True)
    command = [sys.executable, "-m", "pytest", "-q", "--tb=no", "--no-header", "-c", os.devnull, f"--rootdir={tests}"]
    command += ["-p", "retarget", "-p", "no:cacheprovider", "-W", "ignore", "--import-mode=importlib"]
    command += ["-o", f"pythonpath={tests}", "-o", "consider_namespace_packages=true"]  # its tests are no package
    command += [f"--constructor={constructor}", f"--outcomes={outcomes}", f"--sabotage={sabotage}", "-n", str(workers)]
    command += ["-k", select] if select else []
    path = os.pathsep.join([str(HERE), str(fetch_quantisers())])
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONPATH": path}
    started = time.perf_counter()
    done = subprocess.run(
        [*command, *(str(tests / "tests" / f"test_{file}.py") for file in files)],
        cwd=models, env={"OMP_NUM_THREADS": "1", **environment}, stdout=subprocess.DEVNULL if select else None,
    )  # fmt: skip
    if not outcomes.is_file():
        raise SystemExit(f"The suite did not run to its end for {constructor} (pytest exit status {done.returncode}).")
    cases: dict[str, tuple[str, str]] = json.loads(outcomes.read_text())
    counts = Counter(outcome for outcome, _ in cases.values())
    return {
        **{outcome: counts[outcome] for outcome in ("passed", "failed", "excluded")},
        "seconds": round(time.perf_counter() - started, 1),
        "failures": {case: reason for case, (outcome, reason) in cases.items() if outcome == "failed"},
        "reasons": dict(Counter(reason for outcome, reason in cases.values() if outcome == "excluded").most_common()),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--constructors", nargs="+", default=CONSTRUCTORS)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--results", type=Path, default=HERE / "results.json")
    options = parser.parse_args()
    runs = {name: run_suite(name, workers=options.workers) for name in options.constructors}
    for name, run in runs.items():
        print(
            f"\n{name}: {run['passed']} passed, {run['failed']} failed, {run['excluded']} excluded, {run['seconds']} s"
        )
        for reason, count in run["reasons"].items():
            print(f"  excluded {count:4d}  {reason}")
        for case, reason in run["failures"].items():
            print(f"  FAILED {case}: {reason}")
        if run["passed"] < FEWEST_CASES:
            print(f"  FAILED: {run['passed']} cases passed where at least {FEWEST_CASES} are expected")
    packages = versions_of(("peft", "transformers", "torch", "accelerate", "pytest", *QUANTISERS))
    versions = {"python": platform.python_version(), "frozencore": __version__, **packages}
    options.results.write_text(json.dumps({"versions": versions, "runs": runs}, indent=1) + "\n")
    return int(any(run["failed"] or run["passed"] < FEWEST_CASES for run in runs.values()))


if __name__ == "__main__":
    raise SystemExit(main())
