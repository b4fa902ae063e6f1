"""What a kernel is: from one query chunk and one key chunk to a partial result, and back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from ultraattn.errors import InputError
from ultraattn.masks.grid import OPEN_HI, OPEN_LO, BlockKind


@dataclass(frozen=True, eq=False)
class Piece:
    """The key side of one block, and which of its (query, key) pairs are visible.

    Attributes:
        k: (batch, kv_heads, cols, dim), any strides.
        v: (batch, kv_heads, cols, dim_v), any strides.
        kv_of_head: for each query head, the index of its key head within `k`. Usually
            ``h * kv_heads // heads``, irregular where a head range splits a group.
        kind: EMPTY, FULL, BAND or PARTIAL.
        lo, hi: limits of a BAND in local positions: query i sees key j iff lo <= i - j <= hi.
        mask: for PARTIAL, what is visible: bool, (1 or heads, rows, cols).
    """

    k: Tensor
    v: Tensor
    kv_of_head: tuple[int, ...]
    kind: BlockKind = BlockKind.FULL
    lo: int = OPEN_LO
    hi: int = OPEN_HI
    mask: Tensor | None = None

    @property
    def cols(self) -> int:
        """Number of keys."""
        return int(self.k.shape[2])


class Kernel(Protocol):
    """One way to compute attention over a piece; a module with these names is one.

    Both passes take any strides, write to none of their inputs, and serve empty rows, columns,
    heads and batches. Results come in the accumulation dtype or in the query's.
    """

    name: str

    def refusal(self, q: Tensor, piece: Piece, deterministic: bool) -> str | None:
        """None when the kernel can serve these, else why it cannot."""

    def forward(self, q: Tensor, piece: Piece, scale: float) -> tuple[Tensor, Tensor]:
        """Partial attention of `q` (batch, heads, rows, dim) over the piece.

        Returns:
            O of (batch, heads, rows, dim_v), and its LSE in natural logarithm of
            (batch, heads, rows), contiguous, in the accumulation dtype. Rows that see nothing
            are (0, -inf).
        """

    def backward(
        self, dout: Tensor, q: Tensor, lse: Tensor, delta: Tensor, piece: Piece, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """This piece's share of dQ, and its dK and dV, each of the shape of its input.

        Args:
            dout: gradient of the global output, (batch, heads, rows, dim_v).
            q: (batch, heads, rows, dim).
            lse: global LSE, over all the keys a row sees anywhere, (batch, heads, rows);
                rows at -inf get and give zero gradients.
            delta: rowsum(dO * O) with the global O, (batch, heads, rows); less the gradient of
                the LSE where that has one.
            piece: the keys, values and visible pairs.
            scale: factor of the scores.
        """


def check_piece(q: Tensor, piece: Piece) -> None:
    """Checks that a piece fits its queries.

    Raises:
        InputError: says which shape, dtype or map does not fit, and what would.
    """
    batch, heads, rows, dim = q.shape
    kv_heads, cols = piece.k.shape[1:3]
    wanted = (batch, kv_heads, cols)
    if (*piece.k.shape[:3], piece.k.shape[3]) != (*wanted, dim) or piece.v.shape[:3] != wanted:
        raise InputError(
            f"keys {tuple(piece.k.shape)} and values {tuple(piece.v.shape)} for queries "
            f"{tuple(q.shape)}: expected keys (batch, kv_heads, cols, {dim}) and values "
            f"(batch, kv_heads, cols, dim_v) with batch {batch}"
        )
    if not piece.k.dtype == piece.v.dtype == q.dtype:
        raise InputError(
            f"queries {q.dtype}, keys {piece.k.dtype}, values {piece.v.dtype}: expected one dtype; "
            "cast them before the call"
        )
    if len(piece.kv_of_head) != heads or not all(0 <= g < kv_heads for g in piece.kv_of_head):
        raise InputError(
            f"kv_of_head {piece.kv_of_head} for {heads} query heads over {kv_heads} key heads: "
            f"expected {heads} indices below {kv_heads}"
        )
    if piece.kind is BlockKind.PARTIAL:
        found = None if piece.mask is None else (tuple(piece.mask.shape), str(piece.mask.dtype))
        shapes = ((1, rows, cols), (heads, rows, cols))
        if found is None or found[0] not in shapes or found[1] != "torch.bool":
            raise InputError(
                f"mask {found} of a PARTIAL piece: expected torch.bool of shape {shapes[0]} or "
                f"{shapes[1]}"
            )
