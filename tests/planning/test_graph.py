"""Any assignment of blocks to ranks becomes a sound program that moves what it must, once."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.plans.samples import assigned, small

import ultraattn as ua
from ultraattn.errors import InputError
from ultraattn.planning.blocks import blocks_of, head_ranges
from ultraattn.plans import Compute, LocalOp, Merge, Pass, Tensor, Transfer
from ultraattn.plans.head_ranges import runs

RULE = settings(deadline=None, derandomize=True, max_examples=40)
MASKS = {
    "causal": ua.masks.causal(),
    "window": ua.masks.sliding_window(7),
    "strided": ua.masks.strided(),
    "rectangle": ua.masks.from_ranges([(3, 9)], [(4, 20)], ["full"]),
    "full": ua.masks.full(),
}


@RULE
@given(
    st.sampled_from(list(MASKS)),
    st.sampled_from(["contiguous", "zigzag", "striped"]),
    st.integers(1, 4),
    st.sampled_from([(2, 2), (6, 2), (4, 1)]),
    st.integers(1, 4),
    st.integers(20, 40),
    st.randoms(use_true_random=False),
)
def test_any_assignment_gives_a_sound_program(
    mask: str, layout: str, ranks: int, heads: tuple[int, int], groups: int, length: int, draw: Any
) -> None:
    plan = small(
        MASKS[mask], seqlen=length, layout=layout, ranks=ranks, heads=heads[0], kv_heads=heads[1],
        head_groups=min(groups, heads[0]),
    )  # fmt: skip
    random = assigned(plan, lambda block: draw.randrange(ranks))
    random.check()
    assert random.forward_account.load.sum() == plan.problem.visible_pairs


@pytest.mark.parametrize("pass_", list(Pass))
def test_a_rank_receives_a_chunk_in_one_message(pass_: Pass) -> None:
    plan = small(ua.masks.full(), ranks=4, heads=8, kv_heads=2, head_groups=4)
    program = plan.pass_plan(pass_).program
    messages = Counter(
        (program.value_views[task.writes[0]].rank, program.value_views[task.writes[0]].chunk,
         program.value_views[task.writes[0]].tensor.by_key)
        for task in program.task_views
        if isinstance(task, Transfer)
        and program.value_views[task.writes[0]].tensor not in pass_.results
    )  # fmt: skip
    assert messages
    assert set(messages.values()) == {1}


@pytest.mark.parametrize("pass_", list(Pass))
def test_a_partial_of_another_ranks_chunk_is_sent_once(pass_: Pass) -> None:
    plan = assigned(small(ua.masks.full(), ranks=3), lambda b: (b.q_chunk + b.kv_chunk) % 3)
    program = plan.pass_plan(pass_).program
    sent = Counter(
        (task.rank, program.value_views[number].tensor, program.value_views[number].chunk)
        for task in program.task_views
        if isinstance(task, Transfer)
        for number in task.reads
        if program.value_views[number].tensor in pass_.results
    )
    assert sent
    assert set(sent.values()) == {1}


def test_launches_double_with_arrivals() -> None:
    """What is owned, then 1, 1, 2, 4 arrivals: few launches, few merges."""
    plan = small(ua.masks.full(), seqlen=72, ranks=9)
    launches = [
        len(task.tile)
        for task in plan.forward.program.task_views
        if isinstance(task, Compute) and task.rank == 0
    ]
    assert launches == [1, 1, 1, 2, 4]


def test_delta_is_made_once_by_the_owner() -> None:
    plan = assigned(small(ua.masks.full(), ranks=3), lambda b: (b.q_chunk + b.kv_chunk) % 3)
    program = plan.backward.program
    made = [
        (task.rank, program.value_views[task.writes[0]].chunk)
        for task in program.task_views
        if getattr(task, "op", None) is LocalOp.DELTA
    ]
    assert made == [(0, 0), (1, 1), (2, 2)]


def test_gradients_of_several_launches_stay_wide_until_they_are_sent() -> None:
    plan = small(ua.masks.causal(), dtype="bfloat16", ranks=4, chunks=8, seqlen=64)
    far = assigned(plan, lambda b: 3)
    program = far.backward.program
    merges = [task for task in program.task_views if isinstance(task, Merge)]
    for task in merges:
        written = program.value_views[task.writes[0]]
        owner = far.q_layout.owners[written.chunk]
        if task.rank != owner:
            assert all(program.value_views[read].wide for read in task.reads)
            assert not written.wide
    assert any(
        task.rank != far.q_layout.owners[program.value_views[task.writes[0]].chunk]
        for task in merges
    )


def test_rows_that_nothing_sees_are_filled() -> None:
    plan = small(MASKS["rectangle"], ranks=3)
    program = plan.forward.program
    filled = {
        program.value_views[number].chunk
        for task in program.task_views
        if getattr(task, "op", None) is LocalOp.FILL
        for number in task.writes
    }
    assert filled == {2}


@RULE
@given(st.lists(st.tuples(st.integers(0, 12), st.integers(1, 5)), max_size=6))
def test_runs_are_the_union_of_ranges(spans: list[tuple[int, int]]) -> None:
    ranges = [(start, start + size) for start, size in spans]
    held = {head for a, b in ranges for head in range(a, b)}
    found = runs(ranges)
    assert {head for a, b in found for head in range(a, b)} == held
    assert all(b < c for (_, b), (c, _) in itertools.pairwise(found))


@RULE
@given(st.integers(1, 40), st.integers(1, 40))
def test_head_ranges_hold_every_head_once(heads: int, groups: int) -> None:
    if groups > heads:
        with pytest.raises(InputError, match=f"head_groups {groups} of {heads} heads"):
            head_ranges(heads, groups)
        return
    found = head_ranges(heads, groups)
    assert [head for a, b in found for head in range(a, b)] == list(range(heads))
    assert len(found) == groups


def test_blocks_are_cut_where_a_mask_varies_by_head() -> None:
    """Heads 0 and 1 are causal, heads 2 and 3 see everything."""

    def visible(b: Any, h: Any, q: Any, kv: Any) -> Any:
        return (h >= 2) | (q >= kv)

    plan = small(ua.masks.from_mask_mod(visible), heads=4, ranks=2, seqlen=8)
    blocks = plan.forward.program.block_views
    diagonal = [b for b in blocks if (b.q_chunk, b.kv_chunk) == (0, 0)]
    assert [(b.head_start, b.head_stop, b.kind) for b in diagonal] == [
        (0, 2, "band"),
        (2, 4, "full"),
    ]
    assert [(b.head_start, b.head_stop) for b in blocks if (b.q_chunk, b.kv_chunk) == (0, 1)] == [
        (2, 4)
    ]
    assert sum(b.weight for b in blocks) == 2 * 36 + 2 * 64


def test_blocks_of_a_grid_with_other_heads_are_refused() -> None:
    chunks = small().q_layout.chunks

    def visible(b: Any, h: Any, q: Any, kv: Any) -> Any:
        return h >= q - kv

    grid = ua.masks.from_mask_mod(visible).grid(chunks, chunks, heads=4)
    with pytest.raises(InputError, match="the mask has 4 heads, the problem 2"):
        blocks_of(grid, 2)


def test_values_of_inputs_are_named_once_a_rank() -> None:
    plan = small(ua.masks.full(), ranks=4, heads=8, kv_heads=2, head_groups=4)
    values = plan.forward.program.value_views
    inputs = Counter(v for v in values if v.tensor in (Tensor.Q, Tensor.K, Tensor.V))
    places = Counter((v.tensor, v.chunk, v.rank, v.head_start) for v in inputs)
    assert set(places.values()) == {1}
    assert np.unique([v.buffer for v in values if v.buffer >= 0]).size == sum(
        v.buffer >= 0 for v in values
    )
