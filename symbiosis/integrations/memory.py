"""How much memory this process takes, from the kernel.

One rule: what is reported of a client is its peak above bare imports: torch, transformers and peft take about
270 MB before any work is done, and would hide what a client adds.
"""

from __future__ import annotations

import resource
import sys
from pathlib import Path

STATUS = Path("/proc/self/status")


def resident_bytes() -> int:
    """Resident memory now; where the kernel does not tell (not Linux), the peak so far."""
    return _status("VmRSS") or peak_bytes()


def peak_bytes() -> int:
    """The most resident memory that this process ever had."""
    unit = 1 if sys.platform == "darwin" else 1024
    return _status("VmHWM") or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _status(field: str) -> int:
    try:
        lines = STATUS.read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:")), 0)
