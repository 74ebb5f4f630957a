"""How much memory a run takes: on a GPU what torch has there, on a CPU the process."""

import sys
from pathlib import Path

import torch


def memory_bytes(device: str) -> int | None:
    """Of this process, on its device; None where the system does not say."""
    if device.startswith("cuda"):
        return torch.cuda.memory_reserved(device)
    if device.startswith("mps"):
        return torch.mps.driver_allocated_memory()
    statm = Path("/proc/self/statm")
    if statm.is_file():
        import resource

        return int(statm.read_text().split()[1]) * resource.getpagesize()
    if sys.platform == "darwin":
        import resource

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # the most so far: macOS tells no more
    return None
