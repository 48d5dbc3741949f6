"""``python -m frozencore``."""

from frozencore.cli.app import main

main()
