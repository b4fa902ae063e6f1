"""The masks' definitions, written again token by token, to hold the package against."""

from __future__ import annotations

import itertools

import numpy as np

from ultraattn import masks
from ultraattn.chunks import Chunk, Chunks, edges
from ultraattn.masks import OPEN_HI, OPEN_LO, BlockKind, Grid


def cell(token, length, cells):
    return token * cells // length


def dense(rule, lengths):
    return np.array(
        [[bool(rule(q, k)) for k in range(lengths.kv)] for q in range(lengths.q)], dtype=bool
    ).reshape(lengths.q, lengths.kv)


def position_in_cell(token, length, cells):
    own = cell(token, length, cells)
    return token - min(t for t in range(length) if cell(t, length, cells) == own)


def cells_rule(length, cells, full, causal):
    """`full(i, j)` and `causal(i, j)` over cells, as a rule over tokens."""
    places = [(cell(t, length, cells), position_in_cell(t, length, cells)) for t in range(length)]

    def rule(q, k):
        (i, own), (j, other) = places[q], places[k]
        return full(i, j) or (causal(i, j) and other <= own)

    return rule


def truth_of(mask, lengths):
    return mask.visible(np.arange(lengths.q)[:, None], np.arange(lengths.kv)[None, :], lengths)


def truth_of_intervals(mask, lengths):
    starts, stops = mask.intervals(np.arange(lengths.q), lengths)
    key = np.arange(lengths.kv)
    return ((key >= starts[..., None]) & (key < stops[..., None])).any(axis=1)


def random_document(rng, length):
    cuts = np.sort(rng.integers(0, length + 1, size=int(rng.integers(0, 5))))
    return np.diff(np.concatenate([[0], cuts, [length]])).tolist()


def random_range(rng, length):
    return tuple(sorted(int(x) for x in rng.integers(0, length + 1, size=2)))


def random_mask(rng, lengths, depth=2):
    """Any analytic mask that these lengths allow, combinations included."""
    if depth and rng.random() < 0.4:
        left, right = (random_mask(rng, lengths, depth - 1) for _ in range(2))
        return left & right if rng.random() < 0.5 else left | right
    count = int(rng.integers(1, 5))
    choices = [
        masks.full,
        masks.causal,
        lambda: masks.sliding_window(int(rng.integers(1, 12))),
        lambda: masks.from_ranges(
            [random_range(rng, lengths.q) for _ in range(count)],
            [random_range(rng, lengths.kv) for _ in range(count)],
            [list(masks.RangeKind)[i] for i in rng.integers(0, 3, size=count)],
        ),
    ]
    if lengths.q == lengths.kv:
        choices += [
            lambda: masks.document(random_document(rng, lengths.q), causal=rng.random() < 0.5),
            lambda: masks.strided(grid=9, period=int(rng.integers(1, 4)), width=2),
            lambda: masks.global_local(grid=6),
            masks.star,
            masks.streaming,
            lambda: masks.from_blocks(rng.integers(0, 3, size=(5, 5))),
        ]
    else:
        choices.append(lambda: masks.from_blocks(rng.integers(0, 2, size=(3, 4))))
    return choices[int(rng.integers(len(choices)))]()


def random_chunks(rng, length):
    """Contiguous, striped, or cut unevenly and shuffled; some chunks empty."""
    parts = int(rng.integers(1, 6))
    style = int(rng.integers(3))
    if style == 0:
        cuts = edges(length, parts, align=int(rng.integers(1, 4))).tolist()
    elif style == 1:
        stripes = [Chunk(min(r, length), length, parts) for r in range(parts)]
        return Chunks.make(length, [stripes[i] for i in rng.permutation(parts)])
    else:
        cuts = [0, *np.sort(rng.integers(0, length + 1, size=parts - 1)).tolist(), length]
    items = [Chunk(a, b) for a, b in itertools.pairwise(cuts)]
    if len(items) > 1 and rng.random() < 0.3 and len(items[0]) > 1:
        first = items.pop(0)
        items += [Chunk(first.start, first.stop, 2), Chunk(first.start + 1, first.stop, 2)]
    return Chunks.make(length, [items[i] for i in rng.permutation(len(items))])


def assert_grid_shows(grid: Grid, truth, head=0):
    """Every block's kind, limits and weight say exactly what `truth` (queries, keys) shows."""
    head = head if grid.heads > 1 else 0
    for i, q in enumerate(grid.q_chunks):
        for j, k in enumerate(grid.kv_chunks):
            block = truth[np.ix_(q.tokens(), k.tokens())]
            difference = np.arange(len(q))[:, None] - np.arange(len(k))[None, :]
            place = (0, head, i, j)
            assert grid.weights[place] == block.sum()
            assert grid.kinds[place] == expected_kind(block, difference).code
            if grid.kind(i, j, head) is BlockKind.BAND:
                lo, hi = grid.lo[place], grid.hi[place]
                assert np.array_equal((difference >= lo) & (difference <= hi), block)
                assert (lo == OPEN_LO) == (difference[block].min() == difference.min())
                assert (hi == OPEN_HI) == (difference[block].max() == difference.max())


def expected_kind(block, difference):
    if not block.any():
        return BlockKind.EMPTY
    if block.all():
        return BlockKind.FULL
    lo, hi = difference[block].min(), difference[block].max()
    band = (difference >= lo) & (difference <= hi)
    return BlockKind.BAND if np.array_equal(band, block) else BlockKind.PARTIAL
