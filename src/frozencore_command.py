"""The entry point of the ``frozencore`` command, outside the package.

``import frozencore`` imports PEFT to register the method, which takes seconds. If this module was imported first, the
package leaves the registration to the verbs that need it.
"""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec

NEEDED = ("datasets", "matplotlib", "pydantic", "rich", "typer", "yaml")
"""What the extra ``frozencore[tune]`` brings."""
KERNEL_CACHES = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")
"""Limits of two caches that torch reads at its first product in bfloat16 on a CPU.

By default each holds 1,024 kernels, one for each shape of a product. Batches have ever new shapes, so memory grew by
740 MB in 48 steps of SmolLM2; with 64 it stays, and a step takes some 5 % longer.
"""


def main() -> None:
    """Run the command line."""
    for name in KERNEL_CACHES:
        os.environ.setdefault(name, "64")
    if missing := [name for name in NEEDED if find_spec(name) is None]:
        named = ", ".join(missing)
        sys.stderr.write(f"frozencore: the command needs {named}. Install it: pip install 'frozencore[tune]'\n")
        sys.exit(2)
    from frozencore.cli.app import main as run

    run()


if __name__ == "__main__":
    from frozencore_command import main as start  # the package looks for this name

    start()
