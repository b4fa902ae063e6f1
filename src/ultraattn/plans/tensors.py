"""Names the tensors of attention and says how each is sized: axes, heads, width, element."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from ultraattn.enums import StrEnum
from ultraattn.errors import InputError

ELEMENT_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
"""Bytes of one element of each dtype that a plan can be made for."""


class Tensor(StrEnum):
    """A tensor of the forward or the backward pass. O and LSE name partial and final results."""

    Q = "q"
    K = "k"
    V = "v"
    O = "o"  # noqa: E741  the field's name for it
    LSE = "lse"
    DO = "do"
    DELTA = "delta"
    DQ = "dq"
    DK = "dk"
    DV = "dv"

    by_key: bool
    """Whether its rows are keys and its heads key/value heads (else queries)."""
    code: int
    """Its number in the columns of a program."""

    def __init__(self, name: str) -> None:
        # Plain attributes: plans ask for them hundreds of thousands of times.
        self.by_key = name in ("k", "v", "dk", "dv")
        self.code = len(type(self).__members__)


TENSOR_ORDER = tuple(Tensor)
SUMMED = (Tensor.DQ, Tensor.DK, Tensor.DV)
"""Tensors whose partial results merge by plain sums."""


def accumulate_dtype(dtype: str) -> str:
    """The dtype of LSE, delta and of accumulation: float64 for float64, else float32."""
    return "float64" if dtype == "float64" else "float32"


@dataclass(frozen=True)
class Widths:
    """Elements in a row of one head, and bytes of an element, for every tensor of a problem."""

    head_dim: int
    value_dim: int
    dtype: str

    def __post_init__(self) -> None:
        if self.dtype not in ELEMENT_BYTES:
            raise InputError(f"dtype {self.dtype!r}: expected one of {', '.join(ELEMENT_BYTES)}")

    def width(self, tensor: Tensor) -> int:
        """Elements of `tensor` for one row and one head."""
        if tensor in (Tensor.LSE, Tensor.DELTA):
            return 1
        if tensor in (Tensor.V, Tensor.O, Tensor.DO, Tensor.DV):
            return self.value_dim
        return self.head_dim

    def element(self, tensor: Tensor, wide: bool = False) -> str:
        """The dtype in which `tensor` is kept and travels; `wide` is the accumulation dtype."""
        if wide or tensor in (Tensor.LSE, Tensor.DELTA):
            return accumulate_dtype(self.dtype)
        return self.dtype

    def row_bytes(self, tensor: Tensor, wide: bool = False) -> int:
        """Bytes of `tensor` for one row and one head."""
        return self.width(tensor) * ELEMENT_BYTES[self.element(tensor, wide)]

    @cached_property
    def table(self) -> npt.NDArray[np.int64]:
        """`row_bytes` by (code of the tensor, wide): int64, shape (tensors, 2)."""
        rows = [[self.row_bytes(tensor, wide) for wide in (False, True)] for tensor in TENSOR_ORDER]
        return np.array(rows, dtype=np.int64)
