"""Masks made of two others: what both show, and what either shows."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import numpy.typing as npt

from ultraattn.masks.base import JSON, Lengths, Mask, to_json
from ultraattn.masks.grid import Ints
from ultraattn.masks.strips import Bools, Strips, combine


@dataclass(frozen=True, repr=False)
class Pair(Mask):
    """Two masks under one rule: on intervals where both are analytic, else on token truth."""

    left: Mask
    right: Mask

    sign: ClassVar[str]

    @abstractmethod
    def rule(self, left: Bools, right: Bools) -> Bools:
        """Whether a pair is visible, given whether each mask shows it."""

    @property
    def savable(self) -> bool:
        return self.left.savable and self.right.savable

    @property
    def analytic(self) -> bool:
        return self.left.analytic and self.right.analytic

    def params(self) -> dict[str, JSON]:
        return {"masks": [to_json(self.left), to_json(self.right)]}

    def check(self, lengths: Lengths, heads: int | None = None) -> None:
        self.left.check(lengths, heads)
        self.right.check(lengths, heads)

    def visible(
        self, q: npt.ArrayLike, kv: npt.ArrayLike, lengths: Lengths, head: int = 0, batch: int = 0
    ) -> Bools:
        left, right = (m.visible(q, kv, lengths, head, batch) for m in (self.left, self.right))
        return self.rule(left, right)

    def dense(
        self,
        q: Ints,
        kv: Ints,
        lengths: Lengths,
        *,
        heads: int | None = None,
        batch: int | None = None,
    ) -> Bools:
        left, right = (
            m.dense(q, kv, lengths, heads=heads, batch=batch) for m in (self.left, self.right)
        )
        return self.rule(left, right)

    def strips(self, lengths: Lengths) -> Strips:
        if not self.analytic:
            return super().strips(lengths)
        left, right = self.left.strips(lengths), self.right.strips(lengths)
        return combine(left, right, self.rule)

    def __str__(self) -> str:
        parts = (f"({m})" if isinstance(m, Pair) else str(m) for m in (self.left, self.right))
        return f" {self.sign} ".join(parts)


class And(Pair):
    """A pair is visible where both masks show it."""

    name = "and"
    sign = "&"

    def rule(self, left: Bools, right: Bools) -> Bools:
        return left & right


class Or(Pair):
    """A pair is visible where either mask shows it."""

    name = "or"
    sign = "|"

    def rule(self, left: Bools, right: Bools) -> Bools:
        return left | right
