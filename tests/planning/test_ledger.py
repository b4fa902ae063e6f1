from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from problems import heads, worked_example

from ultraattn.errors import InputError
from ultraattn.planning.ledger import TilingProblem, evaluate


def place(problem: TilingProblem, ranks: dict[tuple[int, int], int]) -> np.ndarray:
    assignment = np.full(problem.weight.shape, -1, dtype=np.int64)
    for (row, column), rank in ranks.items():
        assignment[0, row, column] = rank
    return assignment


def test_ledger_of_an_optimum_of_the_worked_example() -> None:
    problem = worked_example()
    where = {(0, 0): 0, (1, 0): 0, (1, 1): 1, (2, 2): 1, (2, 0): 2, (3, 0): 2, (3, 3): 3}
    ledger = evaluate(problem, place(problem, where))
    assert ledger.table() == [
        (1, 0, 0, 1, 1, 3),
        (1, 1, 1, 0, 4, 2),
        (1, 1, 1, 1, 4, 4),
        (0, 0, 1, 0, 1, 1),
    ]
    assert ledger.load.tolist() == [2, 2, 2, 1]
    assert ledger.value == (4, 10, 2)


def test_each_rank_its_own_row_costs_six() -> None:
    problem = worked_example()
    rows = np.where(problem.weight > 0, problem.q_owner[None, :, None], -1)
    assert evaluate(problem, rows).max_volume == 6


def test_head_ranges_that_share_a_segment_fetch_it_once() -> None:
    ones = np.ones((2, 2), dtype=np.int64)
    shared = heads(4, 1, 2, ones, cap=16)
    apart = heads(4, 4, 2, ones, cap=16)
    rows = np.broadcast_to(shared.q_owner[None, :, None], shared.weight.shape)
    assert evaluate(shared, rows).recv.tolist() == [2, 2]
    assert evaluate(apart, rows).recv.tolist() == [8, 8]


@settings(max_examples=30, deadline=None, derandomize=True)
@given(st.data())
def test_ledger_equals_a_count_rank_by_rank(data: st.DataObject) -> None:
    ranks, ranges, chunks = (data.draw(st.integers(1, 4)) for _ in range(3))
    segments = data.draw(st.integers(1, ranges))
    rng = np.random.default_rng(data.draw(st.integers(0, 10**6)))

    def sizes(count: int) -> np.ndarray:
        return rng.integers(0, 5, (count, chunks))

    problem = TilingProblem(
        ranks=ranks,
        weight=rng.integers(0, 3, (ranges, chunks, chunks)),
        q_owner=rng.integers(0, ranks, chunks),
        kv_owner=rng.integers(0, ranks, chunks),
        row_in=sizes(ranges),
        row_out=sizes(ranges),
        col_in=sizes(segments),
        col_out=sizes(segments),
        segments=tuple((g % segments, (g + 1) % segments) for g in range(ranges)),
        cap=100,
    )
    assignment = problem.spread(rng.integers(0, ranks, len(problem.blocks)))
    recv, send = [0] * ranks, [0] * ranks
    for rank in range(ranks):
        rows, columns = set(), set()
        for g, i, j in np.argwhere(assignment == rank).tolist():
            rows.add((g, i))
            columns |= {(s, j) for s in problem.segments[g]}
        for g, i in rows:
            owner = int(problem.q_owner[i])
            if owner != rank:
                recv[rank] += int(problem.row_in[g, i])
                send[owner] += int(problem.row_in[g, i])
                send[rank] += int(problem.row_out[g, i])
                recv[owner] += int(problem.row_out[g, i])
        for s, j in columns:
            owner = int(problem.kv_owner[j])
            if owner != rank:
                recv[rank] += int(problem.col_in[s, j])
                send[owner] += int(problem.col_in[s, j])
                send[rank] += int(problem.col_out[s, j])
                recv[owner] += int(problem.col_out[s, j])
    ledger = evaluate(problem, assignment)
    assert (ledger.recv.tolist(), ledger.send.tolist()) == (recv, send)


def test_a_block_without_a_rank_is_refused() -> None:
    problem = worked_example()
    with pytest.raises(InputError, match=r"block \(0, 0, 0\) has weight 1 and rank -1"):
        evaluate(problem, np.full(problem.weight.shape, -1, dtype=np.int64))


def test_a_size_of_the_wrong_shape_is_refused() -> None:
    problem = worked_example()
    with pytest.raises(InputError, match="q_owner"):
        TilingProblem(**{**vars(problem), "q_owner": np.zeros(3, dtype=np.int64)})
