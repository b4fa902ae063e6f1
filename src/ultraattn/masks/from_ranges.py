"""The mask that is a union of rectangles of queries and keys, each full or cut by a diagonal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ultraattn.enums import StrEnum
from ultraattn.errors import InputError
from ultraattn.masks.base import Lengths, Mask, listed, whole
from ultraattn.masks.draw import show
from ultraattn.masks.strips import Bools, Pieces, Strips


class RangeKind(StrEnum):
    """What a rectangle shows.

    CAUSAL: the last query sees the last key, each earlier query one key fewer (aligned to the end
    corner). INVERSE_CAUSAL: the first query sees all keys, each later one a key fewer, from the
    first on (aligned to the start corner), as in MagiAttention.
    """

    FULL = "full"
    CAUSAL = "causal"
    INVERSE_CAUSAL = "inverse_causal"


@dataclass(frozen=True, repr=False)
class Ranges(Mask):
    """See `from_ranges`."""

    q_ranges: tuple[tuple[int, int], ...]
    k_ranges: tuple[tuple[int, int], ...]
    kinds: tuple[RangeKind, ...]

    name = "from_ranges"

    def check(self, lengths: Lengths, heads: int | None = None) -> None:
        for what, limit, ranges in (
            ("query", lengths.q, self.q_ranges),
            ("key", lengths.kv, self.k_ranges),
        ):
            past = [r for r in ranges if r[1] > limit]
            if past:
                raise InputError(
                    f"{what} range {past[0]} of {self} with {lengths}: expected an end of at most "
                    f"{limit}; shorten the range or lengthen the sequence"
                )

    def visible(
        self, q: npt.ArrayLike, kv: npt.ArrayLike, lengths: Lengths, head: int = 0, batch: int = 0
    ) -> Bools:
        self.check(lengths)
        q, kv = np.asarray(q, dtype=np.int64), np.asarray(kv, dtype=np.int64)
        seen = np.zeros(np.broadcast_shapes(q.shape, kv.shape), dtype=np.bool_)
        for (q0, q1), (k0, k1), kind in zip(self.q_ranges, self.k_ranges, self.kinds, strict=True):
            inside = (q >= q0) & (q < q1) & (kv >= k0) & (kv < k1)
            if kind is RangeKind.CAUSAL:
                inside = inside & (k1 - kv >= q1 - q)
            elif kind is RangeKind.INVERSE_CAUSAL:
                inside = inside & (kv - k0 >= q - q0)
            seen |= inside
        return seen

    def strips(self, lengths: Lengths) -> Strips:
        q = np.array(self.q_ranges, dtype=np.int64).reshape(-1, 2)
        k = np.array(self.k_ranges, dtype=np.int64).reshape(-1, 2)
        q0, q1, k0, k1 = q[:, 0], q[:, 1], k[:, 0], k[:, 1]
        causal = np.array([kind is RangeKind.CAUSAL for kind in self.kinds], dtype=np.bool_)
        inverse = np.array(
            [kind is RangeKind.INVERSE_CAUSAL for kind in self.kinds], dtype=np.bool_
        )
        stop = np.where(causal, k1 - (q1 - q0) + 1, k1)
        pieces = Pieces.of(q0, q1, k0, stop, inverse.astype(np.int64), causal.astype(np.int64))
        return pieces.strips(lengths.q, lengths.kv)


def from_ranges(
    q_ranges: Sequence[tuple[int, int]],
    k_ranges: Sequence[tuple[int, int]],
    kinds: Sequence[RangeKind | str] | RangeKind | str = RangeKind.FULL,
) -> Ranges:
    """Query range r sees key range r, both half-open, as `kinds` says (one for all, or one each).

    Pairs that several ranges hold are visible once: a union.
    """
    q, k = _pairs(q_ranges, "query"), _pairs(k_ranges, "key")
    given = [kinds] * len(q) if isinstance(kinds, str) else listed(kinds, "from_ranges: kinds")
    if not len(q) == len(k) == len(given):
        raise InputError(
            f"from_ranges with {len(q)} query ranges, {len(k)} key ranges and {len(given)} kinds: "
            "expected as many of each; give one key range and one kind to each query range"
        )
    return Ranges(q, k, tuple(_kind(kind) for kind in given))


def _pairs(ranges: object, what: str) -> tuple[tuple[int, int], ...]:
    pairs = []
    for item in listed(ranges, f"from_ranges: {what} ranges"):
        ends = [whole(end, f"an end of a {what} range", least=0) for end in listed(item, "a range")]
        if len(ends) != 2 or ends[0] > ends[1]:
            raise InputError(
                f"{what} range {item!r}: expected (start, stop) with start <= stop, half-open"
            )
        pairs.append((ends[0], ends[1]))
    return tuple(pairs)


def _kind(kind: object) -> RangeKind:
    if not isinstance(kind, str) or kind not in list(RangeKind):
        raise InputError(f"range kind {kind!r}; choose one of {', '.join(RangeKind)}")
    return RangeKind(kind)


def main() -> None:
    """Draws it."""
    show(
        from_ranges(
            [(0, 64), (64, 160), (128, 256)],
            [(0, 64), (0, 160), (100, 200)],
            [RangeKind.FULL, RangeKind.CAUSAL, RangeKind.INVERSE_CAUSAL],
        )
    )


if __name__ == "__main__":
    main()
