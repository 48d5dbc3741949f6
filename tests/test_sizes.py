"""Sizes and times in words, against what reads them again and against the calendar."""

from __future__ import annotations

import pytest

from frozencore.sizes import at_least, bytes_in_words, read_size, time_in_words


@pytest.mark.parametrize("num_bytes", [1, 1023, 1025, 700_000, 10 * 2**20, 10 * 2**20 + 1, 97_000_001, 3 * 2**40 + 5])
def test_the_smallest_size_that_works_is_read_again_as_no_less_and_hardly_more(num_bytes: int) -> None:
    read = read_size(at_least(num_bytes))
    assert read is not None
    size, has_unit = read
    assert has_unit
    assert num_bytes <= size < num_bytes + max(1024, num_bytes / 10)


def test_bytes_are_said_to_a_tenth_of_their_unit() -> None:
    sizes = (1000, 2**20, 300 * 2**20, 2**40)
    assert [bytes_in_words(size) for size in sizes] == ["1.0 KiB", "1.0 MiB", "300.0 MiB", "1024.0 GiB"]


def test_a_time_is_said_in_seconds_minutes_hours_or_days() -> None:
    times = {0: "0 s", 119: "119 s", 120: "2 min", 3599: "1 h 00 min", 11_100: "3 h 05 min", 187_200: "2 days 4 h"}
    assert {seconds: time_in_words(seconds) for seconds in times} == times
