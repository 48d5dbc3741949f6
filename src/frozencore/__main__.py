"""``python -m frozencore``."""

from frozencore_command import main

main()
