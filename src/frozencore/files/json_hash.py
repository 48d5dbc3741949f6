"""The hash of a JSON-like mapping; unlike hashes of tensors it needs no torch."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any


def fingerprint_options(options: Mapping[str, Any]) -> str:
    """SHA-256 of a JSON-like mapping, independent of the order of its keys."""
    return hashlib.sha256(json.dumps(options, sort_keys=True, allow_nan=False).encode()).hexdigest()
