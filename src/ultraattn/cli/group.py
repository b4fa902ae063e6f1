"""Joins the process group of torchrun, on the GPUs of the node where there are enough of them."""

from __future__ import annotations

import contextlib
import datetime
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

from ultraattn.errors import InputError

if TYPE_CHECKING:
    import torch

DEVICES = ("auto", "cpu", "cuda")


def started_by_torchrun() -> bool:
    """Whether this process is one of those that torchrun started."""
    return {"RANK", "WORLD_SIZE", "MASTER_ADDR"} <= os.environ.keys()


@contextlib.contextmanager
def torchrun_group(timeout_s: float, device: str = "auto") -> Iterator[torch.device]:
    """The default process group while it lasts; gives this rank's device.

    Args:
        timeout_s: the longest wait for a rank.
        device: "cuda" (NCCL, one GPU a rank), "cpu" (gloo), or "auto": CUDA where the node has a
            GPU for each of its ranks.

    Raises:
        InputError: no such device, or "cuda" with too few GPUs.
    """
    import torch
    import torch.distributed as dist

    if device not in DEVICES:
        raise InputError(f"--device {device!r}: expected one of {', '.join(DEVICES)}")
    here = int(os.environ.get("LOCAL_WORLD_SIZE", os.environ["WORLD_SIZE"]))
    gpus = torch.cuda.device_count()
    if device == "cuda" and gpus < here:
        raise InputError(
            f"--device cuda with {gpus} GPUs for the {here} ranks of this node: expected one a "
            "rank; start fewer ranks, or pass --device cpu"
        )
    on_gpus = device == "cuda" or (device == "auto" and gpus >= here)
    place = torch.device("cpu")
    if on_gpus:
        place = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(place)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if on_gpus else "gloo",
        timeout=datetime.timedelta(seconds=timeout_s),
    )
    try:
        yield place
    finally:
        dist.destroy_process_group()
