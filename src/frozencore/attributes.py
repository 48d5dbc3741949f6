"""Set attributes of an object for a while."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def with_attributes(owner: Any, **values: Any) -> Iterator[None]:
    """Set attributes inside, and restore them afterwards, also after an error; attributes that are new are removed."""
    absent = object()
    before = {name: getattr(owner, name, absent) for name in values}
    try:
        for name, value in values.items():
            setattr(owner, name, value)
        yield
    finally:
        for name, value in before.items():
            if value is absent:
                delattr(owner, name)
            else:
                setattr(owner, name, value)
