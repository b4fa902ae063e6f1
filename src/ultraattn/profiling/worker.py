"""What one rank measures for a profile: kernels, messages, merges, transfers beside kernels.

Every function is called on all ranks at once (`LocalRanks.run`) and gives seconds on rank 0, the
median of several repetitions; the other ranks help or wait.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from ultraattn.masks.grid import BlockKind
from ultraattn.runtime.kernels import Piece, choose
from ultraattn.runtime.merge import merge_partials
from ultraattn.runtime.pieces import DTYPES

Shape = tuple[int, int, int]
"""q tokens, kv tokens, heads."""
Case = tuple[str, str, Shape]
"""Pass, kind of block, shape."""

LEAST, MOST = 3, 50
"""Repetitions of one measurement."""


def median_s(call: Callable[[], object], budget_s: float) -> float:
    """The median seconds of a call, repeated for about `budget_s`."""
    call()
    times: list[float] = []
    end = time.perf_counter() + budget_s
    while len(times) < LEAST or (len(times) < MOST and time.perf_counter() < end):
        begin = time.perf_counter()
        call()
        times.append(time.perf_counter() - begin)
    return statistics.median(times)


def kernel_call(
    case: Case, head_dim: int, dtype: str, seed: int, scale: float = 0.125
) -> Callable[[], object]:
    """One launch of the kernel that a run would choose for the case."""
    pass_, kind, (rows, cols, heads) = case
    random = torch.Generator().manual_seed(seed)

    def tensor(length: int) -> Tensor:
        return torch.randn(1, heads, length, head_dim, generator=random).to(DTYPES[dtype])

    q, k, v, dout = tensor(rows), tensor(cols), tensor(cols), tensor(rows)
    own = tuple(range(heads))
    if kind == "causal":
        piece = Piece(k, v, own, BlockKind.BAND, lo=0)
    elif kind == "partial":
        # Nearly everything is visible: the price of a mask, not of fewer pairs.
        mask = torch.rand(1, rows, cols, generator=random) < 0.95
        piece = Piece(k, v, own, BlockKind.PARTIAL, mask=mask)
    else:
        piece = Piece(k, v, own)
    kernel = choose(q, piece)
    if pass_ == "forward":
        return lambda: kernel.forward(q, piece, scale)
    out, lse = kernel.forward(q, piece, scale)
    delta = (dout.to(out.dtype) * out).sum(dim=-1).to(lse.dtype)
    return lambda: kernel.backward(dout, q, lse, delta, piece, scale)


def kernels(
    rank: int, cases: Sequence[Case], head_dim: int, dtype: str, seed: int, budget_s: float
) -> list[float]:
    """Seconds of each case on rank 0 alone."""
    if rank:
        return []
    return [median_s(kernel_call(case, head_dim, dtype, seed), budget_s) for case in cases]


def together(rank: int, case: Case, head_dim: int, dtype: str, seed: int, budget_s: float) -> float:
    """Seconds of a case while every rank computes it."""
    call = kernel_call(case, head_dim, dtype, seed)
    dist.barrier()
    seconds = median_s(call, budget_s)
    dist.barrier()
    return seconds


def messages(rank: int, sizes: Sequence[int], repeats: int) -> list[tuple[float, float]]:
    """(seconds of an exchange, seconds to issue a send) of ranks 0 and 1, for each size."""
    if rank > 1:
        return []
    found = []
    for size in sizes:
        out, into = torch.zeros(size, dtype=torch.uint8), torch.empty(size, dtype=torch.uint8)
        whole, issue = [], []
        for _ in range(repeats + 1):
            begin = time.perf_counter()
            receive = dist.irecv(into, 1 - rank)
            middle = time.perf_counter()
            send = dist.isend(out, 1 - rank)
            issued = time.perf_counter()
            for work in (receive, send):
                if work is not None:
                    work.wait()
            whole.append(time.perf_counter() - begin)
            issue.append(issued - middle)
        found.append((statistics.median(whole[1:]), statistics.median(issue[1:])))
    return found


def merges(
    rank: int, rows: Sequence[int], heads: int, head_dim: int, seed: int, budget_s: float
) -> list[tuple[int, float]]:
    """(bytes read and written, seconds) of merging two partial outputs, for each number of rows."""
    if rank:
        return []
    random = torch.Generator().manual_seed(seed)
    found = []
    for count in rows:
        outs = [torch.randn(1, heads, count, head_dim, generator=random) for _ in range(2)]
        lses = [torch.randn(1, heads, count, generator=random) for _ in range(2)]
        moved = 3 * (outs[0].numel() + lses[0].numel()) * outs[0].element_size()

        def call(outs: list[Tensor] = outs, lses: list[Tensor] = lses) -> object:
            return merge_partials(outs, lses)

        found.append((moved, median_s(call, budget_s)))
    return found


def beside(
    rank: int, case: Case, head_dim: int, dtype: str, seed: int, bytes_: int, budget_s: float
) -> tuple[float, float]:
    """Seconds of a case on rank 0 alone, and while ranks 0 and 1 exchange messages."""
    if rank > 1:
        return 0.0, 0.0
    call = kernel_call(case, head_dim, dtype, seed)
    call()
    alone = median_s(call, budget_s) if rank == 0 else 0.0
    out, into = torch.zeros(bytes_, dtype=torch.uint8), torch.empty(bytes_, dtype=torch.uint8)
    times = []
    for _ in range(LEAST + 2):
        works = [dist.irecv(into, 1 - rank), dist.isend(out, 1 - rank)]
        if rank == 0:
            begin = time.perf_counter()
            call()
            times.append(time.perf_counter() - begin)
        for work in works:
            if work is not None:
                work.wait()
    return alone, statistics.median(times) if times else 0.0


def overhead(rank: int, plan_text: str, repeats: int) -> float:
    """Seconds of the forward pass of a tiny plan on one rank, all included."""
    from ultraattn.plans.storage import loads
    from ultraattn.runtime import Attention

    if rank:
        dist.new_group([0])
        return 0.0
    group = dist.new_group([0])
    plan = loads(plan_text)
    attention = Attention(plan, group)
    p = plan.problem
    q = torch.zeros(1, p.heads, p.q_len, p.head_dim)
    k = torch.zeros(1, p.kv_heads, p.kv_len, p.head_dim)
    times = []
    with torch.no_grad():
        for _ in range(repeats + 2):
            begin = time.perf_counter()
            attention(q, k, k)
            times.append(time.perf_counter() - begin)
    return statistics.median(times[2:])
