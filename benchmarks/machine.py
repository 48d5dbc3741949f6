"""What this machine is called in the results."""

from __future__ import annotations

import os
import platform
import re
from pathlib import Path


def processor() -> str:
    """The processor's own name where the system tells it, else its architecture."""
    info = Path("/proc/cpuinfo")
    found = re.search(r"^model name\s*:\s*(.+)$", info.read_text(), re.MULTILINE) if info.exists() else None
    return found.group(1).strip() if found else platform.processor() or platform.machine()


def load_average() -> float | None:
    """Programs that wanted to run, on average over the last minute, this one included; None where no one counts."""
    return round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None


def machine_name() -> str:
    """Processor and cores, as a file may be called."""
    return re.sub(r"[^a-z0-9]+", "-", f"{processor()} {os.cpu_count()} cores".lower()).strip("-")
