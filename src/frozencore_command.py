"""The entry point of the ``frozencore`` command, outside the package.

``import frozencore`` imports PEFT to register the method, which takes seconds. If this module was imported first, the
package leaves the registration to the verbs that need it.
"""

from __future__ import annotations

import sys
from importlib.util import find_spec

NEEDED = ("datasets", "matplotlib", "pydantic", "rich", "typer", "yaml")
"""What the extra ``frozencore[tune]`` brings."""


def main() -> None:
    """Run the command line."""
    if missing := [name for name in NEEDED if find_spec(name) is None]:
        named = ", ".join(missing)
        sys.stderr.write(f"frozencore: the command needs {named}. Install it: pip install 'frozencore[tune]'\n")
        sys.exit(2)
    from frozencore.cli.app import main as run

    run()


if __name__ == "__main__":
    from frozencore_command import main as start  # the package looks for this name

    start()
