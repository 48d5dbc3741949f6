"""The fixtures of all tests."""

import os

# A forked process can wait for ever in MKL's own keeping of memory, whose state it copies at any moment.
os.environ.setdefault("MKL_DISABLE_FAST_MM", "1")

from fixtures import *  # noqa: F403
