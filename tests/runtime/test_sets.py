"""Launches as sets: what is written in place, when a set is faster, and (with Triton) results."""

from __future__ import annotations

import os
import threading
from collections import Counter

import numpy as np
import pytest
import torch

import ultraattn as ua
from ultraattn.cluster import Cluster
from ultraattn.masks import Lengths
from ultraattn.plans.passes import Pass
from ultraattn.plans.program import Compute, Merge
from ultraattn.plans.tensors import Tensor
from ultraattn.runtime import reduce
from ultraattn.runtime.dense import dense_attention, dense_backward
from ultraattn.runtime.kernels import rates, sparse
from ultraattn.runtime.pieces import Pieces, part_of
from ultraattn.runtime.sets import Sets, finals
from ultraattn.runtime.together import Together

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def plan_of(mask, tokens=256, ranks=2, heads=2, chunks=None, **shape):
    return ua.plan(
        mask, seqlen=tokens, heads=heads, head_dim=16, chunks=chunks, effort="instant",
        cluster=Cluster.load("cpu").resize(nodes=1, gpus_per_node=ranks), **shape,
    )  # fmt: skip


def test_a_partial_result_stands_in_a_final_one_only_where_no_other_part_overlaps_it():
    plan = plan_of(ua.masks.sliding_window(80), chunks=8)
    alone = shared = 0
    for rank in range(2):
        for program in (plan.for_rank(rank).forward, plan.for_rank(rank).backward):
            found = finals(program)
            values = program.values
            reads = Counter(n for task in program.tasks for n in task.reads)
            for task in program.tasks:
                if not isinstance(task, Merge) or task.rank != rank:
                    continue
                for final in task.writes:
                    parts = [
                        n
                        for n in task.reads
                        if values[n].tensor is values[final].tensor
                        and values[n].chunk == values[final].chunk
                    ]
                    whole = {
                        (r, h)
                        for r in range(values[final].row_start, values[final].row_stop)
                        for h in range(values[final].head_start, values[final].head_stop)
                    }
                    for n in parts:
                        cells = [
                            (r, h)
                            for r in range(values[n].row_start, values[n].row_stop)
                            for h in range(values[n].head_start, values[n].head_stop)
                        ]
                        others = sum(
                            (r, h) in whole and _holds(values[m], r, h)
                            for m in parts
                            if m != n
                            for r, h in cells
                        )
                        if found.get(n) == final:
                            alone += 1
                            assert others == 0
                            assert set(cells) <= whole
                            assert reads[n] == 1
                        elif reads[n] == 1 and values[n].rank == rank:
                            shared += 1
                            assert others
    assert alone
    assert shared


def _holds(value, row, head):
    return value.row_start <= row < value.row_stop and value.head_start <= head < value.head_stop


@pytest.mark.parametrize("in_place", [True, False])
def test_a_merge_of_one_part_that_stands_in_its_place_moves_nothing(in_place):
    plan = plan_of(ua.masks.causal(), chunks=8)
    program = plan.for_rank(0).backward
    part, final = min(finals(program).items())
    own = {
        tensor: torch.zeros(1, 2, plan.q_layout.local_tokens(0), 16)
        for tensor in (Tensor.DQ, Tensor.DK, Tensor.DV)
    }
    pieces = Pieces(
        own, plan.q_layout, plan.kv_layout, program.values, plan.problem.widths, batch=1
    )
    place = pieces.own_place(final)
    target = part_of(place, program.values[final], program.values[part])
    pieces.stand(part, target if in_place else torch.full_like(target, 7.0))
    target.fill_(7.0 if in_place else 0.0)
    written = target._version
    reduce.merge({final: place}, {final: [part]}, program.values, pieces)
    assert bool((target == 7.0).all())
    assert (target._version == written) == in_place


def calls(rows, blocks, heads=32, full=True):
    """Rows of square FULL blocks."""
    return [
        [rates.Call(rows, rows, heads, rows * rows * heads, full) for _ in range(blocks)]
        for _ in range(blocks)
    ]


@pytest.mark.parametrize("pass_", Pass)
def test_many_small_blocks_are_faster_as_a_set_and_a_large_one_as_rows(pass_):
    small, large = calls(256, 8, heads=4), calls(16384, 1)
    assert rates.set_seconds(pass_, small, 128) < rates.rows_seconds(pass_, small, 128)
    assert rates.set_seconds(pass_, large, 128) > rates.rows_seconds(pass_, large, 128)


def test_large_blocks_of_a_window_are_rows_where_a_kernel_takes_bands():
    plan = plan_of(ua.masks.sliding_window(80))
    blocks = plan.forward.program.block_views
    serve = [
        rates.rows_serve(blocks, 128, 128, torch.bfloat16, plan.q_layout.chunks, bands)
        for bands in (False, True)
    ]
    assert serve == [False, True]
    call = rates.Call(8192, 8192, 32, 32 * 8192 * 4096, False, cudnn=False)
    for pass_ in Pass:
        whole = rates.rows_seconds(pass_, [[call]], 128)
        assert whole < rates.set_seconds(pass_, [[call]], 128)
        assert whole > rates.FLOP_PER_PAIR[pass_] * 128 * call.pairs / rates.BANDS_FLOPS[pass_]


def test_keys_that_lie_side_by_side_cost_no_joining():
    blocks = calls(1024, 1)[0] * 3
    beside = [call._replace(place=1024 * i) for i, call in enumerate(blocks)]
    received = [call._replace(place=-1) for call in blocks]
    seconds = [rates.rows_seconds(Pass.FORWARD, [row], 128) for row in (beside, received)]
    assert seconds[0] < seconds[1]


def test_sets_are_made_on_gpus_alone():
    plan = plan_of(ua.masks.sliding_window(80)).for_rank(0)
    task = next(t for t in plan.forward.tasks if isinstance(t, Compute))
    blocks = [plan.forward.blocks[b] for b in task.tile]
    for kernel in ("auto", "reference"):
        sets = Sets(plan, ua.masks.sliding_window(80), kernel, torch.device("cpu"))
        assert (sets.of(Pass.FORWARD, task, blocks) is None) is (
            not INTERPRETED or kernel == "reference"
        )


@pytest.mark.skipif(not INTERPRETED, reason="needs Triton and TRITON_INTERPRET=1")
@pytest.mark.parametrize("name", ["window", "document", "global_local", "by head"])
def test_sets_equal_dense_attention(name, monkeypatch):
    tokens, lock = 160, threading.RLock()  # the interpreter serves one thread
    launch = Sets.forward, Sets.backward
    for which, function in zip(("forward", "backward"), launch, strict=True):

        def locked(*args, function=function):
            with lock:
                function(*args)

        monkeypatch.setattr(Sets, which, locked)
    monkeypatch.setattr(sparse, "sizes", lambda *_: sparse.Sizes(32, 32, 4, 2))
    mask = {
        "window": ua.masks.sliding_window(60),
        "document": ua.masks.document([37, 70, 53]),
        "global_local": ua.masks.global_local(),
        "by head": ua.masks.from_mask_mod(lambda b, h, q, k: (q >= k) & ((q + k + h) % 5 != 0)),
    }[name]
    plan = plan_of(mask, tokens, heads=4, kv_heads=2, dtype="float32", chunks=16)
    q, k, v, dout = (torch.randn(1, tokens, h, 16).transpose(1, 2) for h in (4, 2, 2, 4))
    every = np.arange(tokens)
    table = mask.dense(every, every, Lengths(tokens, tokens), heads=4)
    seen = torch.from_numpy(np.array(table[0]))
    ranks = Together(plan, kernel="sparse", mask=mask)
    out, lse = ranks.forward(q, k, v)
    got = (out, *ranks.backward(dout, q, k, v, out, lse))
    wide = [x.double() for x in (q, k, v)]
    true = dense_attention(*wide, seen)[0], *dense_backward(dout.double(), *wide, seen)
    for some, wanted in zip(got, true, strict=True):
        assert float((some.double() - wanted).norm() / wanted.norm()) < 3e-6


def test_every_result_of_a_launch_is_an_o_with_its_lse_or_a_gradient():
    """What `Sets` relies on: an O and its LSE have one rectangle, dK and dV come in pairs."""
    plan = plan_of(ua.masks.document([100, 30, 126]), chunks=8)
    for rank in range(2):
        for program in (plan.for_rank(rank).forward, plan.for_rank(rank).backward):
            for task in program.tasks:
                if not isinstance(task, Compute):
                    continue
                at = Counter(
                    (program.values[n].tensor, program.values[n].chunk, program.values[n][4:6])
                    for n in task.writes
                )
                for (tensor, *place), count in at.items():
                    partner = {Tensor.O: Tensor.LSE, Tensor.DK: Tensor.DV}.get(tensor)
                    assert count == 1
                    assert partner is None or (partner, *place) in at
