"""Several processes that train one model, as `torchrun` starts them; one process when nobody did.

    workers = Workers.start("auto")       # reads what torchrun put into the environment
    net = workers.wrap(model)             # gradients become those of the whole batch
    progress, stop = workers.agree(progress, stop)
    workers.end()
    leave(0)                              # the process's last line, instead of sys.exit

NCCL on GPUs, gloo on CPUs. What all must decide alike is decided by the first and told to the others.
"""

import logging
import os
import sys
from dataclasses import dataclass
from datetime import timedelta
from typing import NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn

from vit.device import pick_device

# While the first evaluates or is paused, the others wait. One that dies is noticed at once, without it.
PATIENCE = timedelta(days=365)


@dataclass(frozen=True)
class Workers:
    rank: int = 0
    count: int = 1
    local_rank: int = 0
    talk: object = None  # a gloo group: decisions are numbers on the CPU, whatever the model runs on

    @classmethod
    def start(cls, device: str = "auto") -> "Workers":
        """Join the others; at once where there are none. ValueError for a device that is not here."""
        if not _of_several():
            return cls()
        on_gpu = pick_device(None if device == "auto" else device).type == "cuda"
        if on_gpu:
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
            dist.init_process_group("nccl")
            talk = dist.new_group(backend="gloo", timeout=PATIENCE)
        else:
            dist.init_process_group("gloo", timeout=PATIENCE)
            talk = dist.group.WORLD
        rank, count = dist.get_rank(), dist.get_world_size()
        return cls(rank, count, int(os.environ.get("LOCAL_RANK", rank)), talk)

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def wrap(self, net: nn.Module) -> nn.Module:
        """The same module, or one that averages gradients over processes while it goes backwards."""
        if self.count == 1:
            return net
        on_gpu = next(net.parameters()).is_cuda
        return nn.parallel.DistributedDataParallel(net, device_ids=[self.local_rank] if on_gpu else None)

    def mean(self, value: Tensor) -> Tensor:
        """The mean over processes of a number on the device."""
        if self.count > 1:
            dist.all_reduce(value)
            value = value / self.count
        return value

    def agree(self, *numbers: float) -> list[float]:
        """The first process's numbers, in all processes."""
        if self.count == 1:
            return list(numbers)
        told = torch.tensor(numbers, dtype=torch.float64)
        dist.broadcast(told, src=0, group=self.talk)
        return told.tolist()

    def end(self) -> None:
        if self.count > 1:
            dist.destroy_process_group()


def leave(code: int) -> NoReturn:
    """End the process with that exit code, as `sys.exit` does; under torchrun, at once.

    Threads of gloo outlive `destroy_process_group`. One that asks for the interpreter's lock while the
    interpreter is being taken down aborts the process, and torchrun calls a finished run failed: with torch
    2.14 this befell 10 of 25 starts of four processes that made 20 steps.
    """
    if not _of_several():
        sys.exit(code)
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code)


def _of_several() -> bool:
    """Whether torchrun started this process."""
    return "WORLD_SIZE" in os.environ and "RANK" in os.environ
