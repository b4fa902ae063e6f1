"""Says what each pass of attention reads, needs and gives back."""

from __future__ import annotations

from ultraattn.enums import StrEnum
from ultraattn.plans.tensors import Tensor


class Pass(StrEnum):
    """Which way a program runs."""

    FORWARD = "forward"
    BACKWARD = "backward"

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        """Tensors that a rank owns when the pass begins."""
        if self is Pass.FORWARD:
            return (Tensor.Q, Tensor.K, Tensor.V)
        return (Tensor.Q, Tensor.K, Tensor.V, Tensor.O, Tensor.LSE, Tensor.DO)

    @property
    def needs(self) -> tuple[Tensor, ...]:
        """Tensors that the kernel of a block reads."""
        if self is Pass.FORWARD:
            return (Tensor.Q, Tensor.K, Tensor.V)
        return (Tensor.Q, Tensor.K, Tensor.V, Tensor.DO, Tensor.LSE, Tensor.DELTA)

    @property
    def results(self) -> tuple[Tensor, ...]:
        """Tensors that the pass gives back to the owners."""
        if self is Pass.FORWARD:
            return (Tensor.O, Tensor.LSE)
        return (Tensor.DQ, Tensor.DK, Tensor.DV)
