"""What starting a process beside the page takes, be it a trainer or a measurement.

be_nice(process.pid)         # who looks at the page goes first
device_kind("auto")          # what the process will find: presets differ by it
"""

import os
import sys

NICENESS = 10


def be_nice(pid: int) -> None:
    """Lower the priority of a process that has just begun. Windows is told so when it starts one."""
    if not hasattr(os, "setpriority"):
        return
    try:
        os.setpriority(os.PRIO_PROCESS, pid, NICENESS)
    except OSError as error:
        print(f"Process {pid} runs at the usual priority: {error}", file=sys.stderr)


def device_kind(device: str) -> str:
    """ "cuda", "mps" or "cpu", of TrainConfig's `device`. ValueError for one that is not here."""
    from vit.device import pick_device

    return pick_device(None if device == "auto" else device).type
