from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ultraattn.planning.ledger import Ints, TilingProblem


def contiguous(chunks: int, ranks: int) -> Ints:
    return np.arange(chunks, dtype=np.int64) * ranks // chunks


def paper(weight: Ints, ranks: int, cap: int, *, backward: bool = False) -> TilingProblem:
    """One head range, in the paper's units: forward 1, 2, 1, 0; backward 2, 2, 1, 2."""
    rows, columns = weight.shape
    row_in, col_in, row_out, col_out = (2, 2, 1, 2) if backward else (1, 2, 1, 0)

    def fill(value: int, count: int) -> Ints:
        return np.full((1, count), value, dtype=np.int64)

    return TilingProblem(
        ranks=ranks,
        weight=weight[None].astype(np.int64),
        q_owner=contiguous(rows, ranks),
        kv_owner=contiguous(columns, ranks),
        row_in=fill(row_in, rows),
        row_out=fill(row_out, rows),
        col_in=fill(col_in, columns),
        col_out=fill(col_out, columns),
        segments=((0,),),
        cap=cap,
    )


def causal(chunks: int) -> Ints:
    """Twice the weight in full blocks: 2 below the diagonal, 1 on it."""
    return 2 * np.tri(chunks, k=-1, dtype=np.int64) + np.eye(chunks, dtype=np.int64)


def star_eight() -> Ints:
    """star() on 8 chunks, twice the weight: each cell of its 4 x 4 grid is 2 x 2 blocks."""
    cells = np.zeros((4, 4), dtype=np.int64)
    cells[1:, 0] = 2
    weight = np.kron(cells, np.ones((2, 2), dtype=np.int64))
    return weight + np.kron(np.eye(4, dtype=np.int64), causal(2))


def streaming_eight() -> Ints:
    """streaming() on its own 8 x 8 grid, twice the weight."""
    row, column = np.indices((8, 8))
    band = (column < row) & ((column == 0) | (row - column < 3))
    return 2 * band + np.eye(8, dtype=np.int64)


def table(lines: Sequence[str]) -> Ints:
    return np.array([[int(c) for c in line] for line in lines], dtype=np.int64)


def worked_example() -> TilingProblem:
    """First column plus diagonal of 4 x 4: 7 blocks of weight 1 on 4 ranks, cap 2."""
    weight = np.eye(4, dtype=np.int64)
    weight[:, 0] = 1
    return paper(weight, ranks=4, cap=2)


def heads(
    ranges: int, kv_segments: int, ranks: int, weight: Ints, cap: int, *, backward: bool = False
) -> TilingProblem:
    """`ranges` equal head ranges over `kv_segments`; a chunk with all heads is `ranges` units."""
    rows, columns = weight.shape
    row_in, col_in, row_out, col_out = (2, 2, 1, 2) if backward else (1, 2, 1, 0)
    share = ranges // kv_segments

    def fill(value: int, count: int, chunks: int) -> Ints:
        return np.full((count, chunks), value, dtype=np.int64)

    return TilingProblem(
        ranks=ranks,
        weight=np.repeat(weight[None], ranges, axis=0).astype(np.int64),
        q_owner=contiguous(rows, ranks),
        kv_owner=contiguous(columns, ranks),
        row_in=fill(row_in, ranges, rows),
        row_out=fill(row_out, ranges, rows),
        col_in=fill(col_in, kv_segments, columns),
        col_out=fill(col_out, kv_segments, columns),
        segments=tuple((g // share,) for g in range(ranges)),
        cap=cap,
    )
