"""The peak resident memory of calibration under a memory budget, each time in a new process.

    python benchmarks/memory.py            # about two minutes;  --quick: one small model

All linear layers, ``fcca``; a small model (width 896, two blocks) and one block of Qwen2.5-7B's shapes. The program
that is run is that of the tests, ``tests/calibration/peak_memory.py``.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

from frozencore.calibration.budget import memory_bytes
from harness import ROOT, parser_of, write_found
from speed_tables import memory

PROGRAM = ROOT / "tests" / "calibration" / "peak_memory.py"
SMALL, BLOCK_OF_7B = (896, 1792, 2), (3584, 18944, 1)  # hidden, intermediate, layers
CASES = [(SMALL, "12MiB"), (SMALL, "40MiB"), (SMALL, "80MiB"), (BLOCK_OF_7B, "180MiB"), (BLOCK_OF_7B, "2GiB")]


def peak(sizes: tuple[int, int, int], budget: str) -> dict[str, Any]:
    environment = os.environ | {"PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT / 'tests'}"}
    words = [sys.executable, str(PROGRAM), "fcca", budget, "empirical", *map(str, sizes)]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, check=True)
    found = json.loads(done.stdout.strip().splitlines()[-1])
    hidden, intermediate, layers = sizes
    share = found["taken"] / memory_bytes(budget)
    return (
        {"hidden": hidden, "intermediate": intermediate, "layers": layers, "budget": budget} | found | {"share": share}
    )


def main() -> None:
    options = parser_of(__doc__, "memory").parse_args()
    rows = [peak(*case) for case in (CASES[1:2] if options.quick else CASES)]
    print(memory({"rows": rows}))
    write_found(options, rows=rows)


if __name__ == "__main__":
    main()
