"""Where a model runs: CUDA, else Apple's MPS, else the CPU, or as asked."""

import torch


def pick_device(asked: str | None = None) -> torch.device:
    """The device as asked, else CUDA, else MPS, else the CPU. ValueError if the one asked for is not here."""
    available = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    if asked is None:
        return torch.device(next(kind for kind, here in available.items() if here))
    try:
        device = torch.device(asked)
    except RuntimeError as error:
        raise ValueError(f"{asked!r} is not a device: use cuda, cuda:1, mps or cpu") from error
    count = torch.cuda.device_count() if device.type == "cuda" else 1
    if not available.get(device.type) or (device.index or 0) >= count:
        here = ", ".join(kind for kind, is_here in available.items() if is_here)
        raise ValueError(f"device {asked!r} is not on this machine; it has {here}")
    return device
