"""Measures this machine with local processes, and turns the times into a cluster for the planner.

Kernels are timed on one rank alone; how ranks share cores is measured apart (all ranks compute at
once), and so is what a transfer takes from a kernel beside it. The simulator puts these together
again (`ultraattn.simulation`).
"""

from __future__ import annotations

import contextlib
import itertools
import platform
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

from ultraattn import masks
from ultraattn.cluster import Cluster, Costs, Kernel, KernelTable, Link
from ultraattn.errors import InputError
from ultraattn.planning import plan
from ultraattn.plans.storage import dumps
from ultraattn.profiling import worker
from ultraattn.runtime.local import LocalRanks

Step = Callable[[str], AbstractContextManager[None]]
ALONE_AT = 1.15
"""Slower than this beside other ranks counts as sharing cores."""
LEAST_RATE = 0.2
"""No transfer is said to slow a kernel further than that."""


@dataclass(frozen=True)
class Amount:
    """How much is measured. Tokens, bytes, seconds."""

    sides: tuple[int, ...] = (16, 64, 256, 1024)
    heads: tuple[int, ...] = (1, 8)
    head_dim: int = 64
    bytes_: tuple[int, ...] = (256, 4096, 65536, 2**20, 2**22, 2**24)
    merge_rows: tuple[int, ...] = (16, 4096)
    repeats: int = 15
    budget_s: float = 0.15
    """For each kernel."""


def _no_step(_: str) -> AbstractContextManager[None]:
    return contextlib.nullcontext()


def profile(
    ranks: int, *, amount: Amount | None = None, seed: int = 0, step: Step = _no_step
) -> Cluster:
    """The cluster that `ranks` local processes of this machine are, measured.

    Args:
        ranks: processes, at least 2.
        amount: how much to measure; about a minute or two unless given.
        seed: of the random inputs.
        step: wraps each part, for progress.

    Raises:
        InputError: fewer than 2 ranks.
        RunError: a process failed.
    """
    if ranks < 2:
        raise InputError(f"ranks {ranks}: a profile measures messages, so expected at least 2")
    amount = amount or Amount()
    with step(f"start {ranks} local processes"):
        local = LocalRanks(ranks)
    with local:
        return _measured(local, ranks, amount, seed, step)


def _measured(local: LocalRanks, ranks: int, amount: Amount, seed: int, step: Step) -> Cluster:
    how = (amount.head_dim, "float32", seed, amount.budget_s)
    cases = _cases(amount)
    times: list[float] = []
    for at, (pass_, kind) in enumerate(dict.fromkeys((c[0], c[1]) for c in cases)):
        part = [c for c in cases if c[:2] == (pass_, kind)]
        with step(f"kernels {at + 1} of 6: {pass_}, {kind} blocks, {len(part)} shapes"):
            times += local.run(worker.kernels, part, *how)[0]
    side, heads = amount.sides[-1], amount.heads[-1]
    probe: worker.Case = ("forward", "full", (side, side, heads))
    with step("kernels in other dtypes"):
        factors = _dtype_factors(local, amount, seed)
    with step(f"kernels of {ranks} ranks at once"):
        alone = times[cases.index(probe)]
        shared = max(local.run(worker.together, probe, *how))
    with step("messages"):
        exchanged = local.run(worker.messages, amount.bytes_, amount.repeats)[0]
    with step("merges"):
        merged = local.run(
            worker.merges, amount.merge_rows, heads, amount.head_dim, seed, amount.budget_s
        )[0]
    with step("kernels beside transfers"):
        free, beside = local.run(
            worker.beside, probe, amount.head_dim, "float32", seed, amount.bytes_[-1],
            amount.budget_s,
        )[0]  # fmt: skip
    with step("launches"):
        launch = _launch_s(local, amount, times[0])
    issue = min(seconds for _, seconds in exchanged)
    # What the host does to issue a message is not the message's own time.
    rows = tuple(
        (size, max(seconds - 2 * issue, 1e-7))
        for size, (seconds, _) in zip(amount.bytes_, exchanged, strict=True)
    )
    link = Link("gloo", issue, rows)
    (small, start), (large, slow) = merged[0], merged[-1]
    slowdown = max(1.0, shared / alone)
    cores = max(1, round(ranks / slowdown)) if slowdown > ALONE_AT else 0
    costs = Costs(
        head_dim=amount.head_dim,
        dtype="float32",
        dtype_factors=factors,
        kernels=(Kernel("auto", False, None, _tables(cases, times)),),
        inside=link,
        between=link,
        nics_per_node=1,
        memory_bytes_per_s=(large - small) / max(slow - start, 1e-9),
        local_start_s=start,
        launch_s=launch,
        compute_rate=(("gloo", min(1.0, max(LEAST_RATE, free / beside))),),
        host_serial=True,
        cores_per_node=cores,
        measured=True,
        notes=(
            f"Measured by `ultraattn profile` with {ranks} processes, torch threads 1, seed {seed}",
            f"{platform.machine()} {platform.system()}: a kernel of all {ranks} ranks at once took "
            f"{slowdown:.2f} times as long as alone",
        ),
    )
    return Cluster("measured", 1, ranks, align=1, costs=costs)


def _cases(amount: Amount) -> list[worker.Case]:
    squares = [(side, side) for side in amount.sides]
    oblong = [(a, b) for a, b in itertools.pairwise(amount.sides)]
    oblong += [(b, a) for a, b in oblong]
    shapes = {"full": squares + oblong, "causal": squares, "partial": squares + oblong}
    return [
        (pass_, kind, (q, kv, heads))
        for pass_ in ("forward", "backward")
        for kind, sides in shapes.items()
        for q, kv in sides
        for heads in amount.heads
    ]


def _tables(cases: Sequence[worker.Case], times: Sequence[float]) -> tuple[KernelTable, ...]:
    rows: dict[tuple[str, str], list[tuple[int, int, int, float]]] = {}
    for (pass_, kind, shape), seconds in zip(cases, times, strict=True):
        rows.setdefault((pass_, kind), []).append((*shape, seconds))
    return tuple(KernelTable(*which, tuple(found)) for which, found in rows.items())


def _dtype_factors(local: LocalRanks, amount: Amount, seed: int) -> tuple[tuple[str, float], ...]:
    side, heads = amount.sides[-2], amount.heads[-1]
    cases: list[worker.Case] = [
        (pass_, "full", (side, side, heads)) for pass_ in ("forward", "backward")
    ]
    seconds = {
        dtype: sum(
            local.run(worker.kernels, cases, amount.head_dim, dtype, seed, amount.budget_s)[0]
        )
        for dtype in ("float32", "bfloat16", "float16", "float64")
    }
    base = seconds.pop("float32")
    return tuple((dtype, found / base) for dtype, found in seconds.items())


def _launch_s(local: LocalRanks, amount: Amount, kernel_s: float) -> float:
    """Host seconds of a task past its kernel, by a tiny plan."""
    side = amount.sides[0]
    tiny = plan(
        masks.full(), seqlen=side, heads=1, head_dim=amount.head_dim, dtype="float32", ranks=1,
        strategy="rows", effort="instant",
    )  # fmt: skip
    seconds = local.run(worker.overhead, dumps(tiny), amount.repeats)[0]
    tasks = len(tiny.forward.program.tasks.rank)
    return float(max(seconds - kernel_s, 1e-6) / tasks)
