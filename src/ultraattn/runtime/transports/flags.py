"""Lets streams wait for flags in memory and set them: no kernel spins, and no host waits."""

from __future__ import annotations

import ctypes

import torch

from ultraattn.runtime.copies import check, driver

WAIT, WRITE = 1, 2
"""CU_STREAM_MEM_OP_WAIT_VALUE_32, CU_STREAM_MEM_OP_WRITE_VALUE_32."""
EQUAL = 1
"""CU_STREAM_WAIT_VALUE_EQ."""


class _Operation(ctypes.Structure):
    """CUstreamBatchMemOpParams."""

    _fields_ = [
        ("operation", ctypes.c_uint64), ("address", ctypes.c_uint64), ("value", ctypes.c_uint64),
        ("flags", ctypes.c_uint64), ("alias", ctypes.c_uint64), ("pad", ctypes.c_uint64),
    ]  # fmt: skip


def new_stream() -> int:
    """A stream of the current device that nobody else gets, unlike those of PyTorch's pool."""
    found = ctypes.c_void_p()
    check(driver().cuStreamCreate(ctypes.byref(found), 1), "making a stream")
    assert found.value is not None
    return found.value


def wait(stream: torch.cuda.Stream, address: int) -> None:
    """The stream goes on once the flag is 1."""
    _do(stream, [(WAIT, address, 1)], "waiting for a flag")


def wait_and_clear(stream: torch.cuda.Stream, address: int) -> None:
    """The stream goes on once the flag is 1, and sets it to 0."""
    _do(stream, [(WAIT, address, 1), (WRITE, address, 0)], "taking a flag")


def put(stream: torch.cuda.Stream, address: int) -> None:
    """The stream sets the flag to 1 after all that stands before it is visible to its reader."""
    _do(stream, [(WRITE, address, 1)], "setting a flag")


def _do(stream: torch.cuda.Stream, operations: list[tuple[int, int, int]], what: str) -> None:
    """Operations in their order, as one node of a graph."""
    array = (_Operation * len(operations))(
        *(
            _Operation(operation, address, value, EQUAL if operation == WAIT else 0)
            for operation, address, value in operations
        )
    )
    at = ctypes.c_void_p(stream.cuda_stream)
    check(driver().cuStreamBatchMemOp_v2(at, len(operations), array, 0), what)
