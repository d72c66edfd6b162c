"""How many threads a model gets where nobody says. Imports no engine."""

import math
import os


def default_threads() -> int:
    """Half of the cores this process may use: the other half is the other end's, where both run on one machine."""
    return max(1, math.ceil(len(os.sched_getaffinity(0)) / 2) if hasattr(os, "sched_getaffinity") else 1)
