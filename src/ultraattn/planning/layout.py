"""Turns a sequence length and a layout's name into chunks and their owners (the context remap)."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from ultraattn.chunks import Chunk, Chunks, edges, split
from ultraattn.enums import StrEnum
from ultraattn.errors import InputError
from ultraattn.plans.layout import Layout


class LayoutName(StrEnum):
    """The layouts that can be asked for by name."""

    CONTIGUOUS = "contiguous"
    ZIGZAG = "zigzag"
    STRIPED = "striped"
    REMAPPED = "remapped"
    AUTO = "auto"


def contiguous(length: int, ranks: int, chunks: int | None = None, align: int = 1) -> Layout:
    """Chunk i of P to rank ``floor(i * N / P)``; P is N unless given."""
    parts = chunks or ranks
    owners = tuple(i * ranks // parts for i in range(parts))
    return Layout("contiguous", split(length, parts, align), owners, ranks)


def zigzag(length: int, ranks: int, chunks: int | None = None, align: int = 1) -> Layout:
    """Rank r owns pieces r and 2N - 1 - r of 2N, each of ``chunks / 2N`` chunks."""
    parts = chunks or 2 * ranks
    if parts % (2 * ranks):
        raise InputError(
            f"zigzag with {parts} chunks over {ranks} ranks: each rank owns two mirrored pieces; "
            f"pass a multiple of {2 * ranks} chunks"
        )
    per = parts // (2 * ranks)
    pieces = [i // per for i in range(parts)]
    owners = tuple(min(piece, 2 * ranks - 1 - piece) for piece in pieces)
    return Layout("zigzag", split(length, parts, align), owners, ranks)


def striped(length: int, ranks: int, chunks: int | None = None) -> Layout:
    """Rank r owns tokens r, r + N, r + 2N, ..., in ``chunks / N`` chunks one after another."""
    parts = chunks or ranks
    if parts % ranks:
        raise InputError(
            f"striped with {parts} chunks over {ranks} ranks: each rank owns an equal number of "
            f"chunks; pass a multiple of {ranks} chunks"
        )
    per = parts // ranks
    items, owners = [], []
    for rank in range(ranks):
        count = len(range(rank, length, ranks))
        cuts = edges(count, per).tolist()
        for a, b in itertools.pairwise(cuts):
            start = min(rank + a * ranks, length)
            items.append(Chunk(start, min(rank + b * ranks, length) if b > a else start, ranks))
            owners.append(rank)
    return Layout("striped", Chunks(length, tuple(items)), tuple(owners), ranks)


def remapped(
    length: int, ranks: int, order: Sequence[int], chunks: int | None = None, align: int = 1
) -> Layout:
    """The mask's own cells in `order`, cut finer where asked, then contiguous over the ranks.

    `order` names the cells of the mask's grid in their new order. P is the least multiple of the
    number of cells that has at least N chunks, unless given.
    """
    cells = len(order)
    parts = chunks or cells * max(1, -(-ranks // cells))
    if parts % cells:
        raise InputError(
            f"remapped with {parts} chunks: the mask's own order is of {cells} cells; pass a "
            f"multiple of {cells} chunks, or another layout"
        )
    per = parts // cells
    fine = split(length, parts, align)
    items = tuple(fine[cell * per + piece] for cell in order for piece in range(per))
    owners = tuple(i * ranks // parts for i in range(parts))
    return Layout("remapped", Chunks(length, items), owners, ranks)


def explicit(length: int, ranks: int, chunks: Sequence[Chunk], owners: Sequence[int]) -> Layout:
    """Chunks in a given order, each with its owner.

    Raises:
        InputError: chunks overlap, leave a gap, or lack an owner.
    """
    return Layout("explicit", Chunks.make(length, chunks), tuple(owners), ranks)


def layout_by_name(
    name: str,
    length: int,
    ranks: int,
    *,
    order: Sequence[int] | None,
    chunks: int | None = None,
    align: int = 1,
) -> Layout:
    """The layout called `name`; `order` is the mask's own (None where it has none).

    Raises:
        InputError: an unknown name (lists the valid ones), or chunks that do not fit it.
    """
    if name not in list(LayoutName):
        raise InputError(f"layout {name!r}: expected one of {', '.join(LayoutName)}")
    if chunks is not None and chunks < 1:
        raise InputError(f"chunks {chunks}: expected at least 1")
    if name == LayoutName.ZIGZAG:
        return zigzag(length, ranks, chunks, align)
    if name == LayoutName.STRIPED:
        return striped(length, ranks, chunks)
    if name == LayoutName.REMAPPED and order is not None:
        return remapped(length, ranks, order, chunks, align)
    return contiguous(length, ranks, chunks, align)
