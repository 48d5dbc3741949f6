"""The entry point of the ``frozencore`` command, outside the package.

``import frozencore`` imports PEFT to register the method, which takes seconds. If this module was imported first, the
package leaves the registration to the verbs that need it.
"""

from __future__ import annotations


def main() -> None:
    """Run the command line."""
    from frozencore.cli.app import main as run

    run()


if __name__ == "__main__":
    from frozencore_command import main as start  # the package looks for this name

    start()
