"""The fixtures of all tests."""

from fixtures import *  # noqa: F403
