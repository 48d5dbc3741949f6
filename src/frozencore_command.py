"""The ``frozencore`` command starts here, beside the package.

``import frozencore`` imports PEFT to register the method with it, which takes seconds. Where this module was imported
first, the package leaves that to the verbs that need it.
"""

from __future__ import annotations


def main() -> None:
    """Run the command line."""
    from frozencore.cli.app import main as run

    run()


if __name__ == "__main__":
    from frozencore_command import main as start  # under its own name, by which the package knows it

    start()
