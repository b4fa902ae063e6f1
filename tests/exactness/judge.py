"""Runs one case over real processes and judges it: errors, infinities, bytes moved."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch

from tests.exactness.cases import HEAD_DIM, Case
from tests.exactness.ranks import Numbers, attend, inputs, unpacked
from ultraattn.masks import Lengths, Mask
from ultraattn.plans import Plan
from ultraattn.plans.passes import Pass
from ultraattn.runtime.local import LocalRanks
from ultraattn.runtime.pieces import DTYPES
from ultraattn.runtime.verify import (
    Errors,
    Results,
    above,
    compare,
    dense_results,
    device_results,
    limit,
)

LSE_ERROR = {"float64": 1e-12, "float32": 1e-5, "bfloat16": 1e-4}
"""Largest error of an LSE, over the largest LSE: it is kept in float32, or float64."""


@dataclass(frozen=True)
class Verdict:
    """What became of a case; it passed where nothing is wrong."""

    wrong: tuple[str, ...]
    errors: Errors
    limits: Errors
    digest: str


@lru_cache(maxsize=2)
def truth(
    mask: str, lengths: tuple[int, int], heads: tuple[int, int], dtype: str, batch: int
) -> tuple[Results, Results | None]:
    """Dense results, and those of one device where the limits depend on it."""
    q, k, v, dout = inputs(lengths, heads, (HEAD_DIM, HEAD_DIM), dtype, batch)
    made = Case(mask, "contiguous", 1, lengths, heads, dtype, 1).make_mask()
    rows, cols = (torch.arange(n).numpy() for n in lengths)
    seen = torch.tensor(made.dense(rows, cols, Lengths(*lengths), heads=heads[0])[0])
    device = None if dtype == "float64" else device_results(q, k, v, dout, seen)
    return dense_results(q, k, v, dout, seen), device


def first(results: Results, batch: int) -> Results:
    """The first entries of a batch."""
    return Results(
        *(getattr(results, name)[:batch] for name in ("out", "dq", "dk", "dv")),
        None if results.lse is None else results.lse[:batch],
        results.terms,
    )


def run_case(case: Case, mask: Mask, plan: Plan, pool: Callable[[int], LocalRanks]) -> Verdict:
    """Runs a case on `pool(ranks)` and judges it."""
    return run_batches([case], mask, plan, pool, case.batch)[0]


def run_batches(
    cases: Sequence[Case],
    mask: Mask,
    plan: Plan,
    pool: Callable[[int], LocalRanks],
    dense_batch: int,
) -> list[Verdict]:
    """Runs cases that differ in their batch alone, by one module on each rank, and judges each.

    Dense results are made for `dense_batch` entries: the largest batch where cases of one group
    follow each other. The plan is checked here, once, and not by every rank again.
    """
    plan.check()
    given = None if mask.savable else mask
    ranks = pool(cases[0].ranks).run(attend, plan, given, [case.batch for case in cases])
    return [
        _judge(case, plan, [answers[number] for answers in ranks], dense_batch)
        for number, case in enumerate(cases)
    ]


def _judge(
    case: Case, plan: Plan, answers: Sequence[tuple[Numbers, list[int]]], dense_batch: int
) -> Verdict:
    whole = {
        name: plan.unshard(
            [unpacked(numbers[name]) for numbers, _ in answers], dim=2, keys=name in ("dk", "dv")
        )
        for name in ("out", "dq", "dk", "dv", "lse")
    }
    dense, device = truth(case.mask, case.lengths, case.heads, case.dtype, dense_batch)
    dense = first(dense, case.batch)
    errors = compare(Results(**whole), dense)
    alone = errors if device is None else compare(first(device, case.batch), dense)
    limits = limit(DTYPES[case.dtype], alone)
    wrong = [
        *above(errors, limits),
        *_lse_faults(whole["lse"], dense.lse, LSE_ERROR[case.dtype]),
        *_dtype_faults(case, whole),
        *_traffic_faults(plan, case.batch, [traffic for _, traffic in answers]),
    ]
    return Verdict(tuple(wrong), errors, limits, plan.digest)


def _lse_faults(lse: torch.Tensor, true: torch.Tensor, most: float) -> list[str]:
    blind = torch.isinf(true)
    if not torch.equal(lse == float("-inf"), blind):
        return ["lse: -inf elsewhere than where queries see nothing"]
    off = (lse.double() - true)[~blind].abs()
    size = true[~blind].abs()
    error = float(off.max() / size.max().clamp(min=1.0)) if off.numel() else 0.0
    return [] if error <= most else [f"lse: error {error:.3g}, limit {most:.3g}"]


def _dtype_faults(case: Case, whole: dict[str, torch.Tensor]) -> list[str]:
    wide = torch.float64 if case.dtype == "float64" else torch.float32
    expected = dict.fromkeys(whole, DTYPES[case.dtype]) | {"lse": wide}
    return [
        f"{name}: dtype {x.dtype}, expected {expected[name]}"
        for name, x in whole.items()
        if x.dtype != expected[name]
    ]


def _traffic_faults(plan: Plan, batch: int, counted: list[list[int]]) -> list[str]:
    wrong = []
    for rank, (sent, received, sent_back, received_back) in enumerate(counted):
        both = {Pass.FORWARD: (sent, received), Pass.BACKWARD: (sent_back, received_back)}
        for pass_, got in both.items():
            costs = plan.account(pass_)
            said = (batch * int(costs.sent[rank]), batch * int(costs.received[rank]))
            if got != said:
                wrong.append(
                    f"rank {rank}, {pass_}: sent and received {got} bytes, the plan says {said}"
                )
    return wrong
