"""What every mask offers: token truth, key intervals, grids, paper units, and a spec to save.

A mask says which keys a query sees. Analytic masks say it as `Strips` (see strips.py), from which
intervals, exact grids and combinations follow; the others say it token by token.
"""

from __future__ import annotations

import dataclasses
import itertools
import operator
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeAlias

import numpy as np
import numpy.typing as npt

from ultraattn.chunks import Chunk, Chunks
from ultraattn.enums import StrEnum
from ultraattn.errors import InputError
from ultraattn.masks.blocks import grid_of_strips
from ultraattn.masks.grid import Grid, Ints
from ultraattn.masks.strips import Bools, Strips
from ultraattn.masks.tokens import grid_of_tokens

JSON: TypeAlias = "bool | int | float | str | list[JSON] | dict[str, JSON] | None"
Progress: TypeAlias = Callable[[int, int], None]


@dataclass(frozen=True)
class Lengths:
    """Tokens on each axis of the attention matrix: `q` queries and `kv` keys."""

    q: int
    kv: int

    def __str__(self) -> str:
        return f"{self.q} queries and {self.kv} keys"


class CellKind(StrEnum):
    """What a cell of a mask's own grid shows; CAUSAL: key position <= query position within it."""

    EMPTY = "empty"
    FULL = "full"
    CAUSAL = "causal"

    @property
    def code(self) -> int:
        """Its number in cell tables: 0, 1, 2."""
        return CELL_ORDER.index(self)


CELL_ORDER = (CellKind.EMPTY, CellKind.FULL, CellKind.CAUSAL)


@dataclass(frozen=True, repr=False)
class Mask(ABC):
    """Which keys each query sees. Frozen; compares by value; `&` and `|` combine."""

    name: ClassVar[str]

    @property
    def savable(self) -> bool:
        """Whether `spec` can hold it (not so for Python functions)."""
        return True

    @property
    def analytic(self) -> bool:
        """Whether it has key intervals, so that grids cost no time by tokens squared."""
        return True

    @property
    def cells(self) -> int | None:
        """Cells along each side of the mask's own square grid, if it has one."""
        return None

    def cell_table(self) -> npt.NDArray[np.int8] | None:
        """`CellKind.code` of each (query cell, key cell) of the mask's own grid, int8, or None."""
        return None

    def cell_order(self) -> tuple[int, ...] | None:
        """The order in which the mask likes its cells kept (the remap), None for token order."""
        return None

    def params(self) -> dict[str, JSON]:
        """The arguments of its factory, as JSON values."""
        return {f.name: to_json(getattr(self, f.name)) for f in dataclasses.fields(self)}

    def spec(self) -> dict[str, JSON]:
        """Name and parameters, from which `masks.from_spec` makes an equal mask.

        Raises:
            InputError: the mask holds a Python function.
        """
        if not self.savable:
            raise InputError(
                f"mask {self} holds a Python function and has no spec; save its grid's digest and "
                "hand the mask over again where it is used"
            )
        return {"name": self.name, **self.params()}

    def check(self, lengths: Lengths, heads: int | None = None) -> None:  # noqa: B027
        """Raises InputError where the mask cannot serve these lengths or number of heads."""

    @abstractmethod
    def visible(
        self, q: npt.ArrayLike, kv: npt.ArrayLike, lengths: Lengths, head: int = 0, batch: int = 0
    ) -> Bools:
        """Token truth for token indices `q` and `kv` that broadcast together (that shape)."""

    def strips(self, lengths: Lengths) -> Strips:
        """The key intervals by bands of query rows; analytic masks only."""
        raise InputError(
            f"mask {self} is known token by token and has no key intervals; "
            "use visible() or grid() instead"
        )

    def intervals(self, rows: npt.ArrayLike, lengths: Lengths) -> tuple[Ints, Ints]:
        """The key intervals [start, stop) that each query row sees, analytic masks only.

        Returns starts and stops, int64 (rows, most intervals): sorted, disjoint and not touching;
        rows with fewer are filled up at the end with empty ones (start == stop).
        """
        self.check(lengths)
        return self.strips(lengths).at(np.asarray(rows, dtype=np.int64))

    def dense(
        self,
        q: Ints,
        kv: Ints,
        lengths: Lengths,
        *,
        heads: int | None = None,
        batch: int | None = None,
    ) -> Bools:
        """Truth of every pair of tokens `q` (Q,) and `kv` (K,): bool (1, heads or 1, Q, K)."""
        return self.visible(q[:, None], kv[None, :], lengths)[None, None]

    def grid(
        self,
        q_chunks: Chunks | Sequence[int] | Ints,
        kv_chunks: Chunks | Sequence[int] | Ints,
        *,
        heads: int | None = None,
        batch: int | None = None,
        progress: Progress | None = None,
    ) -> Grid:
        """Kinds, band limits and exact weights of every block of these chunks.

        Chunks may be stripes, in any order, or empty; token edges stand for contiguous chunks.
        `heads` and `batch` matter to masks that vary along them; `progress(done, total)` is told
        the rows done where tokens are evaluated one by one.

        Raises:
            InputError: impossible lengths; a mask that varies over the batch, or over heads whose
                number is not given.
        """
        q, kv = as_chunks(q_chunks), as_chunks(kv_chunks)
        lengths = Lengths(q.length, kv.length)
        self.check(lengths, heads)
        if self.analytic:
            return grid_of_strips(self.strips(lengths), q, kv)
        return grid_of_tokens(self, q, kv, lengths, heads=heads, batch=batch, progress=progress)

    def nominal(self, q_parts: int, kv_parts: int, *, remapped: bool = False) -> tuple[Ints, int]:
        """Weights in the paper's units: the visible fraction of each of q_parts x kv_parts blocks.

        Returns numerators, int64 (q_parts, kv_parts), and their common denominator: FULL is 1,
        a CAUSAL cell 1/2, and a cell is spread evenly over what it covers. `remapped` takes the
        mask's cells in `cell_order`.

        Raises:
            InputError: the mask has no grid of its own, hence no units free of lengths.
        """
        raise InputError(
            f"mask {self} has no cells of its own, so no weights in the paper's units; "
            "use --units product (exact pairs and bytes) or a mask such as strided or causal"
        )

    def __and__(self, other: object) -> Mask:
        from ultraattn.masks.combine import And

        return And(self, other) if isinstance(other, Mask) else NotImplemented

    def __or__(self, other: object) -> Mask:
        from ultraattn.masks.combine import Or

        return Or(self, other) if isinstance(other, Mask) else NotImplemented

    def __str__(self) -> str:
        inner = ", ".join(f"{name}={_short(value)}" for name, value in self.params().items())
        return f"{self.name}({inner})" if inner else self.name

    def __repr__(self) -> str:
        return str(self)


class Table:
    """A read-only int8 table that compares and hashes by value."""

    def __init__(self, values: npt.ArrayLike) -> None:
        self.values: npt.NDArray[np.int8] = np.array(values, dtype=np.int8)
        self.values.setflags(write=False)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Table) and np.array_equal(self.values, other.values)

    def __hash__(self) -> int:
        return hash((self.values.shape, self.values.tobytes()))

    def __repr__(self) -> str:
        return f"Table({'x'.join(map(str, self.values.shape))})"


def to_json(value: Any) -> JSON:
    """Parameters of masks as JSON: tuples become lists, tables nested lists, masks their specs."""
    if isinstance(value, tuple):
        return [to_json(item) for item in value]
    if isinstance(value, Table):
        nested: list[JSON] = value.values.tolist()
        return nested
    if isinstance(value, Mask):
        return value.spec()
    if isinstance(value, str):
        return str(value)
    if value is None or isinstance(value, (bool, int, float)):
        return value
    raise InputError(f"a mask parameter of type {type(value).__name__} cannot be saved as JSON")


def whole(value: object, what: str, least: int = 1) -> int:
    """`value` as an int >= `least`; raises InputError that names `what`."""
    try:
        if isinstance(value, (bool, np.bool_)):
            raise TypeError
        number = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        number = least - 1
    if number < least:
        raise InputError(f"{what} is {value!r}; expected a whole number of at least {least}")
    return number


def flag(value: object, what: str) -> bool:
    """`value` as a bool; raises InputError that names `what`."""
    if not isinstance(value, (bool, np.bool_)):
        raise InputError(f"{what} is {value!r}; expected True or False")
    return bool(value)


def listed(value: object, what: str) -> list[Any]:
    """`value` as a list; raises InputError that names `what`."""
    if isinstance(value, (str, bytes)) or not hasattr(value, "__iter__"):
        raise InputError(f"{what} is {value!r}; expected a list")
    return list(value)


def need_equal(mask: Mask, lengths: Lengths) -> None:
    """Raises InputError unless there are as many queries as keys."""
    if lengths.q != lengths.kv:
        raise InputError(
            f"mask {mask} with {lengths}: expected equal lengths, for it places queries and keys "
            "on one axis; use causal, sliding_window, full or from_ranges for other lengths"
        )


def as_chunks(chunks: Chunks | Sequence[int] | Ints) -> Chunks:
    """Chunks as they are, or the contiguous ones between token edges ``[0, ..., length]``."""
    if isinstance(chunks, Chunks):
        return chunks
    cuts = [whole(edge, "a token edge", least=0) for edge in listed(chunks, "token edges")]
    if not cuts or cuts[0] != 0 or cuts != sorted(cuts):
        raise InputError(
            f"token edges {cuts[:8]}: expected 0 first and then no smaller number; pass edges as "
            "ultraattn.chunks.edges gives them"
        )
    return Chunks(cuts[-1], tuple(Chunk(a, b) for a, b in itertools.pairwise(cuts)))


def _short(value: JSON) -> str:
    if isinstance(value, list) and value and isinstance(value[0], list):
        return f"{len(value)}x{len(value[0])}"
    if isinstance(value, list) and len(value) > 8:
        return f"[{', '.join(map(str, value[:3]))}, ..., {len(value)} in all]"
    return str(value)
