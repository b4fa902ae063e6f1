"""The mask given as a FlexAttention mask_mod: a Python function over token indices."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ultraattn.errors import InputError
from ultraattn.masks.base import JSON, Lengths, Mask
from ultraattn.masks.draw import show
from ultraattn.masks.grid import Ints
from ultraattn.masks.strips import Bools


@dataclass(frozen=True, repr=False)
class MaskMod(Mask):
    """See `from_mask_mod`."""

    function: Callable[..., Any]

    name = "from_mask_mod"

    @property
    def savable(self) -> bool:
        return False

    @property
    def analytic(self) -> bool:
        return False

    def params(self) -> dict[str, JSON]:
        return {"function": str(getattr(self.function, "__qualname__", repr(self.function)))}

    def visible(
        self, q: npt.ArrayLike, kv: npt.ArrayLike, lengths: Lengths, head: int = 0, batch: int = 0
    ) -> Bools:
        q, kv = np.asarray(q, dtype=np.int64), np.asarray(kv, dtype=np.int64)
        shape = np.broadcast_shapes(q.shape, kv.shape)
        truth = call_mask_mod(self.function, np.int64(batch), np.int64(head), q, kv)
        return _fitting(self.function, truth, shape)

    def dense(
        self,
        q: Ints,
        kv: Ints,
        lengths: Lengths,
        *,
        heads: int | None = None,
        batch: int | None = None,
    ) -> Bools:
        return dense_mask_mod(self.function, q, kv, heads=heads, batch=batch)


def from_mask_mod(mask_mod: Callable[..., Any]) -> MaskMod:
    """``mask_mod(batch, head, q_index, kv_index) -> bool`` over torch index tensors (CPU).

    The function is called with int64 tensors that broadcast, as FlexAttention does under vmap;
    captured tensors, `torch.where`, 0-d and broadcastable results are fine. What varies by head
    or batch is found out by evaluating it; a mask that varies over the batch is refused.
    """
    if not callable(mask_mod):
        raise InputError(
            f"from_mask_mod was given {mask_mod!r}; expected a function "
            "(batch, head, q_index, kv_index) -> bool tensor"
        )
    return MaskMod(mask_mod)


def dense_mask_mod(
    function: Callable[..., Any], q: Ints, kv: Ints, *, heads: int | None, batch: int | None
) -> Bools:
    """Truth of every pair of tokens `q` (Q,) and `kv` (K,): bool (1, heads or 1, Q, K).

    An axis that is not given is probed with indices 0 and 1. A function that reads tables with one
    entry there cannot vary along it, and is called with index 0.

    Raises:
        InputError: another dtype or shape; it varies over the batch; it depends on the head or
            the batch while their number is not given.
    """
    q4, kv4 = q.reshape(1, 1, -1, 1), kv.reshape(1, 1, 1, -1)
    b4 = np.arange(2 if batch is None else batch).reshape(-1, 1, 1, 1)
    h4 = np.arange(2 if heads is None else heads).reshape(1, -1, 1, 1)
    tries = [(b4, h4)]
    if heads is None:
        tries.append((b4, h4[:, :1]))
    if batch is None:
        tries.extend([(b[:1], h) for b, h in tries])
    for attempt, (b, h) in enumerate(tries):
        try:
            truth = call_mask_mod(function, b, h, q4, kv4)
        except InputError as error:
            past_a_table = isinstance(error.__cause__, IndexError)
            if not past_a_table or attempt == len(tries) - 1:
                raise
            continue
        break
    truth = truth.reshape(1, 1, 1, 1) if truth.size == 1 else truth
    varies = [size > 1 for size in truth.shape[:2]]
    axes = tuple(n if v else 1 for n, v in zip((len(b), h.shape[1]), varies, strict=False))
    truth = _fitting(function, truth, (*axes, len(q), len(kv)))
    if len(truth) > 1 and bool((truth != truth[:1]).any()):
        raise InputError(
            f"mask_mod {_named(function)} varies over the batch: expected one mask for all samples"
            "; plan the samples as packed sequences (one sequence, masks.document) instead"
        )
    if len(truth) > 1 and batch is None:
        raise InputError(
            f"mask_mod {_named(function)} depends on the batch index and the batch size is not "
            "known: pass batch=, or index captured tensors without it"
        )
    if truth.shape[1] > 1 and heads is None:
        raise InputError(
            f"mask_mod {_named(function)} depends on the head and the number of heads is not "
            "known: pass heads="
        )
    return truth[:1]


def call_mask_mod(
    function: Callable[..., Any], batch: Any, head: Any, q: npt.ArrayLike, kv: npt.ArrayLike
) -> Bools:
    """What the function says of these indices, in the shape it says it; checks the dtype."""
    import torch

    arguments = [torch.as_tensor(np.asarray(x, dtype=np.int64)) for x in (batch, head, q, kv)]
    try:
        with torch.no_grad():
            result = torch.as_tensor(function(*arguments)).cpu()
    except Exception as error:
        raise InputError(
            f"mask_mod {_named(function)} raised {type(error).__name__}: {error}; it is called with"
            " int64 tensors (batch, head, q_index, kv_index) on the CPU: captured tensors must be "
            "there and cover every index"
        ) from error
    if result.dtype != torch.bool:
        raise InputError(
            f"mask_mod {_named(function)} returned {result.dtype}; expected torch.bool: return a "
            "comparison such as q_index >= kv_index"
        )
    truth: Bools = result.numpy()
    return truth


def _fitting(function: Callable[..., Any], truth: Bools, shape: tuple[int, ...]) -> Bools:
    """`truth` broadcast to `shape`; fewer axes than that would align with the wrong ones."""
    try:
        if truth.ndim not in (0, len(shape)) and truth.size != 1:
            raise ValueError
        return np.broadcast_to(truth, shape)
    except ValueError:
        raise InputError(
            f"mask_mod {_named(function)} returned shape {truth.shape}, which does not broadcast "
            f"to {shape}; expected one truth for each (batch, head, q_index, kv_index)"
        ) from None


def _named(function: Callable[..., Any]) -> str:
    return str(getattr(function, "__qualname__", repr(function)))


def main() -> None:
    """Draws one with dilated keys."""

    def dilated(batch: Any, head: Any, q_index: Any, kv_index: Any) -> Any:
        return (q_index >= kv_index) & ((q_index - kv_index) // 16 % 3 == 0)

    show(from_mask_mod(dilated))


if __name__ == "__main__":
    main()
