"""Rows of bytes, places of messages, and final merges that stand early."""

from types import SimpleNamespace

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import ultraattn as ua
from ultraattn.plans.passes import Pass
from ultraattn.plans.program import Merge
from ultraattn.runtime.copies import as_rows
from ultraattn.runtime.steps import steps_of
from ultraattn.runtime.transports.places import ALIGN_BYTES, MESSAGES, Direction, fitting


def some_heads(tokens, heads, dim, first, last, batch=1):
    """(batch, heads, tokens, dim) of a head range, tokens first in memory."""
    whole = torch.zeros(batch, tokens, heads, dim, dtype=torch.bfloat16).transpose(1, 2)
    return whole[:, first:last]


def test_a_head_range_of_a_chunk_is_rows_of_bytes():
    packed, part = some_heads(64, 4, 128, 0, 4), some_heads(64, 8, 128, 4, 8)
    assert as_rows(packed, part) == (64, 4 * 128 * 2, 4 * 128 * 2, 8 * 128 * 2)
    assert as_rows(part, packed) == (64, 4 * 128 * 2, 8 * 128 * 2, 4 * 128 * 2)


def test_batches_of_whole_sequences_are_rows_too():
    both = some_heads(64, 8, 128, 4, 8, batch=2)
    assert as_rows(some_heads(64, 4, 128, 0, 4, batch=2), both) == (128, 1024, 1024, 2048)


def test_what_is_no_rows_is_left_to_kernels():
    whole = some_heads(64, 4, 128, 0, 4)
    assert as_rows(whole, whole) is None  # contiguous: one copy anyway
    assert as_rows(whole, whole.transpose(1, 2).contiguous().transpose(1, 2)) is None
    expanded = torch.zeros(1, 1, 1, 128, dtype=torch.bfloat16).expand(whole.shape)
    assert as_rows(whole, expanded) is None
    head_first = torch.zeros(1, 4, 64, 128, dtype=torch.bfloat16)
    assert as_rows(whole, head_first) is None
    assert as_rows(some_heads(64, 8, 16, 0, 2), some_heads(64, 2, 16, 0, 2)) is None  # short rows


@settings(deadline=None, derandomize=True, max_examples=50)
@given(st.lists(st.integers(1, 100), min_size=1, max_size=8), st.integers(0, 100))
def test_a_call_keeps_its_places_when_larger_ones_are_made(sizes, size):
    made, seen = [], set()
    for needed in [size, *sizes]:
        if not made or made[-1].capacity < needed:
            made.append(SimpleNamespace(capacity=needed))
        seen.add(id(fitting(made, size)))
    assert len(seen) == 1
    assert fitting(made, size).capacity >= size


def test_the_largest_places_serve_calls_that_fit_none():
    small, large = SimpleNamespace(capacity=1), SimpleNamespace(capacity=2)
    assert fitting([small, large], 3) is large
    assert fitting([], 3) is None


@settings(deadline=None, derandomize=True, max_examples=50)
@given(st.lists(st.integers(1, 5000), max_size=40), st.integers(0, 40_000))
def test_places_of_a_direction_are_aligned_and_apart(sizes, capacity):
    direction, end, full = Direction(), 0, False
    for size in sizes:
        found = direction.take(size, capacity)
        full |= end + size > capacity  # what comes after one that does not fit has no place either
        assert (found is None) == full
        if found is None:
            continue
        start, _ = found
        assert start % ALIGN_BYTES == 0
        assert end <= start
        assert start + size <= capacity
        end = direction.bytes


def test_a_direction_has_so_many_messages():
    direction = Direction()
    taken = [direction.take(1, 2**40) for _ in range(MESSAGES + 2)]
    assert [x is None for x in taken] == [False] * MESSAGES + [True] * 2
    assert [x[1] for x in taken[:MESSAGES]] == list(range(MESSAGES))


def test_early_final_merges_follow_what_they_read_and_change_nothing_else():
    plan = ua.plan(
        ua.masks.causal(), seqlen=4096, heads=8, head_dim=64, effort="fast", dtype="bfloat16",
        cluster=ua.Cluster.load("h200").resize(nodes=1, gpus_per_node=4),
    )  # fmt: skip
    moved = 0
    for rank in range(4):
        loaded = plan.for_rank(rank)
        for pass_ in Pass:
            plain = steps_of(pass_, loaded, 0)
            early = steps_of(pass_, loaded, 0, early=True)
            assert early.receives == plain.receives
            order = [step.task.index for step in early.steps]
            assert sorted(order) == [step.task.index for step in plain.steps]
            assert [i for s in early.steps if not s.final for i in [s.task.index]] == [
                step.task.index for step in plain.steps if not step.final
            ]
            filled, freed = set(), set()
            for step in early.steps:
                if step.final:
                    assert isinstance(step.task, Merge)
                    here = [
                        n for n in step.reads if n in {w for s in plain.steps for w in s.writes}
                    ]
                    assert filled.issuperset(here)
                filled.update(step.writes)
                assert not freed & set(step.frees)
                freed |= set(step.frees)
            assert freed | set(early.left) == {
                room for step in plain.steps for room in step.frees
            } | set(plain.left)
            moved += order != sorted(order)
    assert moved  # the property is about something
