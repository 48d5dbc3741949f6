"""Half an hour of one GPU, in pieces of nine minutes that go on where the one before stopped, the most important first.

    python benchmarks/gpu_session.py plan                     # what would be done, and how long it is expected to take
    python benchmarks/gpu_session.py pack FOLDER --model GGUF --data-root DIR     # here: what the GPU's machine lacks
    python benchmarks/gpu_session.py run --carried FOLDER     # there, again and again, until nothing is left
    python benchmarks/gpu_session.py take FOLDER              # here: put what came back where it belongs

``pack`` writes wheels of the packages that a machine with PyTorch and transformers usually lacks, the model's file in
parts, each in a folder of its own so that they can travel one after the other, and the data. ``run`` installs them,
unpacks the model, makes the one of 4 bits, and then: steps, calibration and tenants (benchmarks/gpu.py); how many
workers the device keeps busy; the tests that need a device; ``lab/campaigns/smollm2-gpu.yaml``. What is finished is not
done again, on a new machine neither, if what came back lies in the folder that is carried. Everything is written to
``--out`` again every half a minute, compressed, so that a piece that is ended leaves what it had.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from gpu_carry import PACKAGES, RESULTS, ROOT, joined, pack, take, take_over, unpack_results

CAMPAIGN = ROOT / "lab" / "campaigns" / "smollm2-gpu.yaml"
TESTS = ("tests/test_on_cuda.py", "tests/calibration/test_cuda.py", "tests/calibration/test_several_devices.py")
KEPT = ("campaign.json", "runs", "failed", "report")
BACK_EVERY_S = 30.0
FOUR_BITS = """
import sys, torch
from transformers import AutoModelForCausalLM, AutoTokenizer, TorchAoConfig
from torchao.quantization import IntxWeightOnlyConfig
from torchao.quantization.granularity import PerGroup
source, target = sys.argv[1:]
config = TorchAoConfig(IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=PerGroup(32)))
model = AutoModelForCausalLM.from_pretrained(source, quantization_config=config, dtype=torch.bfloat16)
model.save_pretrained(target)
AutoTokenizer.from_pretrained(source).save_pretrained(target)
"""


@dataclass(frozen=True)
class Session:
    """Where things lie and how large they are.

    Attributes:
        model: A model folder; by default the file that was carried is unpacked.
        tiny: On the CPU, at sizes that only show that it runs.
    """

    work: Path
    out: Path
    carried: Path | None
    model: Path | None
    data_root: Path | None
    campaign: Path
    workers: tuple[int, ...]
    deadline: float
    tiny: bool

    @property
    def device(self) -> str:
        return "cpu" if self.tiny else "cuda"

    @property
    def left_s(self) -> float:
        return self.deadline - time.monotonic()

    @property
    def smollm2(self) -> Path:
        return self.model or self.work / "cache" / "frozencore" / "smollm2"

    @property
    def data(self) -> Path:
        return self.data_root or self.work / "carried" / "data"

    @property
    def campaign_folder(self) -> Path:
        return self.work / self.campaign.stem

    def call(self, *words: object, most_s: float | None = None) -> int:
        """Run a Python program with what was installed, for so many seconds at most, and bring back what it writes."""
        site, cache = self.work / "site", self.work / "cache"
        paths = [str(site)] if site.exists() else [str(ROOT / "src"), str(ROOT / "lab" / "src")]
        own = {"PYTHONPATH": os.pathsep.join([*paths, os.environ.get("PYTHONPATH", "")]), "XDG_CACHE_HOME": str(cache)}
        end = time.monotonic() + (self.left_s if most_s is None else most_s)
        with subprocess.Popen([sys.executable, *map(str, words)], cwd=ROOT, env=os.environ | own) as program:
            asked, next_back = 0, time.monotonic() + BACK_EVERY_S
            while program.poll() is None:
                time.sleep(0.2)
                if time.monotonic() > next_back:
                    self.bring_back()
                    next_back = time.monotonic() + BACK_EVERY_S
                if time.monotonic() > end + 15 * asked and asked < 2:
                    program.send_signal((signal.SIGINT, signal.SIGKILL)[asked])
                    asked += 1
        self.bring_back()
        return program.returncode

    def bring_back(self) -> None:
        """Copy results to ``out``, and records as one compressed file."""
        self.out.mkdir(parents=True, exist_ok=True)
        for name in RESULTS:
            if (self.work / name).exists():
                shutil.copyfile(self.work / name, self.out / name)
        if self.campaign_folder.exists():
            archive = self.out / f"{self.campaign.stem}.tar.xz"
            with tarfile.open(archive.with_suffix(".new"), "w:xz") as packed:
                for name in KEPT:
                    if (self.campaign_folder / name).exists():
                        packed.add(self.campaign_folder / name, f"{self.campaign.stem}/{name}", filter=_small)
            archive.with_suffix(".new").replace(archive)


def _small(entry: tarfile.TarInfo) -> tarfile.TarInfo | None:
    name = Path(entry.name).name
    return None if name in ("adapter", "checkpoints") or name.endswith(".partial") else entry


def install(session: Session) -> None:
    """Take over what was carried, install it, and make the model folders. Parts may come with several calls."""
    carried = session.work / "carried"
    if session.carried:
        take_over(session.carried, carried)
        unpack_results(session.carried, session.work)
    site = session.work / "site"
    if (carried / "wheels").is_dir() and not site.exists():
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--no-build-isolation"]
        wheels = sorted((carried / "wheels").glob("*.whl"))
        subprocess.run([*pip, "--target", site.with_suffix(".new"), *wheels, ROOT, ROOT / "lab"], check=True)
        site.with_suffix(".new").rename(site)
    if session.model is None and not session.smollm2.exists():
        session.call("-m", "frozencore.tune.smollm2", joined(carried))
    four_bits = session.work / "smollm2-int4"
    if not four_bits.exists() and session.call("-c", FOUR_BITS, session.smollm2, four_bits):
        print("The model of 4 bits could not be made: its runs will fail and can be tried again.")


def measure_gpu(session: Session) -> None:
    words = ["--smollm2", session.smollm2, "--data-root", session.data, "--out", session.work / "gpu.json"]
    small = ["--tiny", "--models", "SmolLM2-135M", "--sections", "race"] if session.tiny else []
    session.call(ROOT / "benchmarks" / "gpu.py", *words, "--budget", session.left_s - 10, *small)


def measure_workers(session: Session) -> None:
    """Find the number of processes on one device with the most runs a minute, from two small runs for each process."""
    rates: dict[str, float] = {}
    for number in session.workers:
        folder = session.work / f"workers-{number}"
        base = {"num_train": 16 if session.tiny else 256, "num_evaluation": 8 if session.tiny else 64}
        base |= {"batch_size": 8, "accumulation": 1, "epochs": 1, "max_length": 128, "truncate": True}
        axes = {"model": ["smollm2"], "task": ["sst2"], "method": ["fcca"], "seed": list(range(2 * number))}
        study = {"title": "Workers", "axes": axes, "report": {"rows": ["task"], "columns": ["method"]}}
        name = folder.name
        spec = {"name": name, "models": {"smollm2": str(session.smollm2)}, "base": base, "studies": {name: study}}
        file = session.work / f"{name}.yaml"
        file.write_text(json.dumps(spec))
        session.call(*_campaign(session, file, folder, 0 if session.tiny else number), most_s=120)
        times = [json.loads(record.read_text())["total_s"] for record in folder.glob("runs/*/result.json")]
        if times:
            rates[str(number)] = 60 * number / median(times)
    (session.work / "workers.json").write_text(json.dumps({"device": session.device, "runs_a_minute": rates}))
    print(f"Runs a minute by workers: {rates}")


def _campaign(session: Session, file: Path, folder: Path, workers: int) -> Iterator[object]:
    yield from ("-m", "frozencore", "campaign", "run", file, "--output", folder, "--data-root", session.data)
    yield from ("--device", session.device, "--workers", workers)


def run_tests(session: Session) -> None:
    words = ["-q", "-m", "not rehearsal", "-p", "no:cacheprovider", *TESTS]
    site = session.work / "site"
    environment = os.environ | ({"PYTHONPATH": str(site)} if site.exists() else {})
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *words], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    (session.work / "suite.txt").write_text(done.stdout + done.stderr)
    print(done.stdout[-1500:])
    session.bring_back()


def run_campaign(session: Session) -> None:
    """The campaign with the workers that were best, until the time is over or it is finished."""
    found = session.work / "workers.json"
    rates = json.loads(found.read_text())["runs_a_minute"] if found.exists() else {}
    workers = 0 if session.tiny else int(max(rates, key=rates.get, default=8))
    models = [f"smollm2={session.smollm2}", f"smollm2-int4={session.work / 'smollm2-int4'}"]
    known = session.campaign.read_text()
    words = [word for model in models if model.split("=")[0] in known for word in ("--model-path", model)]
    run = _campaign(session, session.campaign, session.campaign_folder, workers)
    session.call(*run, *words, most_s=session.left_s - 25)
    if session.left_s > 0:
        session.call("-m", "frozencore", "campaign", "report", session.campaign_folder)


@dataclass(frozen=True)
class Piece:
    """A part of the session.

    Attributes:
        expected_s: What it takes, by what such parts took before or by arithmetic; nobody has measured it yet.
        needs_s: Seconds that must be left to begin it.
    """

    name: str
    what: str
    expected_s: float
    needs_s: float
    run: Callable[[Session], None]
    result: str | None = None


PIECES = (
    Piece("install", "wheels, SmolLM2 unpacked and in 4 bits", 60, 60, install),
    Piece("gpu", "benchmarks/gpu.py: steps, calibration, tenants on three models", 590, 60, measure_gpu),
    Piece("workers", "runs a minute with 1, 4, 8 and 16 processes", 160, 160, measure_workers, "workers.json"),
    Piece("tests", "tests that need a device", 90, 90, run_tests, "suite.txt"),
    Piece("campaign", "lab/campaigns/smollm2-gpu.yaml", 900, 60, run_campaign),
)


def run(session: Session, names: Sequence[str]) -> None:
    """Each piece that is not finished and for which enough time is left."""
    for piece in PIECES:
        is_done = piece.result is not None and (session.work / piece.result).exists()
        if piece.name not in names or is_done:
            continue
        if not session.tiny and session.left_s < piece.needs_s:
            print(f"{session.left_s:.0f} s are left, {piece.name} needs {piece.needs_s:.0f}. Call again.", flush=True)
            return
        started = time.monotonic()
        piece.run(session)
        print(f"{piece.name}: {time.monotonic() - started:.0f} s", flush=True)
    session.bring_back()


def show_plan(seconds: float) -> None:
    end, call = 0.0, 1
    for piece in PIECES:
        print(f"{piece.name:9} {piece.expected_s:4.0f} s  {piece.what}")
        end += piece.expected_s
    call = -(-int(end) // int(seconds))
    print(f"About {end:.0f} s, in {call} calls of {seconds:.0f} s. Campaign and gpu go on with the next call.")
    print("In order: " + "; ".join(piece.name for piece in PIECES) + ". Expected seconds are estimates.")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(dest="verb", required=True)
    planning, packing, running, taking = (verbs.add_parser(verb) for verb in ("plan", "pack", "run", "take"))
    for one in (planning, running):
        one.add_argument("--seconds", type=float, default=540, help="Of one call.")
    packing.add_argument("folder", type=Path)
    packing.add_argument("--model", type=Path, required=True, help="The GGUF file of SmolLM2.")
    packing.add_argument("--data-root", type=Path, required=True)
    packing.add_argument("--part-mb", type=int, default=16, help="Size of a part of the model's file.")
    packing.add_argument("--packages", nargs="*", default=PACKAGES)
    running.add_argument("--carried", type=Path, help="Folder of what pack wrote, or of some of it, and of results.")
    running.add_argument("--model", type=Path, help="A model folder instead of the file that was carried.")
    running.add_argument("--data-root", type=Path)
    running.add_argument("--campaign", type=Path, default=CAMPAIGN)
    running.add_argument("--workers", type=int, nargs="+", default=[1, 4, 8, 16], help="Numbers to be measured.")
    running.add_argument("--work", type=Path, default=ROOT / "runs" / "gpu-session")
    running.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", ROOT / "runs" / "gpu-session" / "out")))
    running.add_argument("--pieces", nargs="+", choices=[p.name for p in PIECES], default=[p.name for p in PIECES])
    running.add_argument("--tiny", action="store_true", help="On the CPU, to see that it runs.")
    taking.add_argument("folder", type=Path)
    taking.add_argument("--place", type=Path, default=ROOT)
    options = parser.parse_args()
    if options.verb == "plan":
        show_plan(options.seconds)
    elif options.verb == "pack":
        pack(options.folder, options.model, options.data_root, options.part_mb * 2**20, options.packages)
    elif options.verb == "take":
        take(options.folder, options.place)
    else:
        options.work.mkdir(parents=True, exist_ok=True)
        session = Session(
            work=options.work.resolve(), out=options.out.resolve(), carried=options.carried, model=options.model,
            data_root=options.data_root, campaign=options.campaign, workers=tuple(options.workers),
            deadline=time.monotonic() + options.seconds, tiny=options.tiny,
        )  # fmt: skip
        run(session, options.pieces)


if __name__ == "__main__":
    main()
