"""The number of examples of a property: a few fixed ones in every run, many new ones in a search for faults.

``pytest`` takes the profile ``fixed``; ``make test-slow`` takes ``search``.
"""

from __future__ import annotations

from hypothesis import HealthCheck, settings

FIXED, SEARCH = "fixed", "search"

# No deadline and no example that is too slow: on a busy machine these would be failures of the machine. Nothing is
# kept between runs, so that two of them try the same.
settings.register_profile(
    FIXED, derandomize=True, database=None, deadline=None, max_examples=40,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)  # fmt: skip
settings.register_profile(SEARCH, settings.get_profile(FIXED), derandomize=False, max_examples=1000, print_blob=True)


def tried(times: float) -> settings:
    """So many times as often as a property is tried otherwise: for what is quick and wide, or slow."""
    return settings(max_examples=round(times * settings().max_examples))
