"""Registers distributed attention as torch operators, so that autograd and compile know it.

An operator takes tensors and plain numbers only, so a module is named by a number: `register`
gives one, and the module is found again by it for as long as it lives. Where nothing traces, a
call goes round the operator's dispatch (`attend`), which costs the host more than a graph's launch.
"""

from __future__ import annotations

import itertools
import weakref
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ultraattn.errors import InputError


class Runner(Protocol):
    """What the operators call: `ultraattn.runtime.attention.Attention`."""

    @property
    def kept_elements(self) -> int:
        """Elements of what forward keeps for backward, for one batch entry."""

    def run_forward(
        self, query: Tensor, key: Tensor, value: Tensor, keep: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Out, LSE, and what forward keeps for backward: empty unless asked to `keep` it."""

    def run_backward(
        self,
        dout: Tensor,
        dlse: Tensor | None,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        out: Tensor,
        lse: Tensor,
        kept: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """dQ, dK, dV."""


_numbers = itertools.count(1)
_runners: weakref.WeakValueDictionary[int, Runner] = weakref.WeakValueDictionary()


def register(runner: Runner) -> int:
    """A number by which the operators find `runner`; it does not keep it alive."""
    number = next(_numbers)
    _runners[number] = runner
    return number


def lse_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of an LSE for inputs of `dtype`."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def _runner(number: int) -> Runner:
    found = _runners.get(number)
    if found is None:
        raise InputError(
            f"attention module {number} no longer exists; keep the Attention alive until its "
            "backward pass is done"
        )
    return found


@torch.library.custom_op("ultraattn::attention", mutates_args=())
def attention(
    query: Tensor, key: Tensor, value: Tensor, handle: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Distributed attention of the module that `handle` names: out, LSE, what backward needs."""
    out, lse, kept = _runner(handle).run_forward(query, key, value, True)
    return out, lse, kept if kept.numel() else kept.clone()  # An operator's results are its own.


@torch.library.custom_op("ultraattn::attention_backward", mutates_args=())
def attention_backward(
    dout: Tensor,
    dlse: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    kept: Tensor,
    handle: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of `attention`: dQ, dK, dV."""
    return _runner(handle).run_backward(dout, dlse, query, key, value, out, lse, kept)


@attention.register_fake
def _attention_fake(
    query: Tensor, key: Tensor, value: Tensor, handle: int
) -> tuple[Tensor, Tensor, Tensor]:
    batch, heads, rows, _ = query.shape
    out = query.new_empty((batch, heads, rows, value.shape[3]))
    lse = query.new_empty((batch, heads, rows), dtype=lse_dtype(query.dtype))
    return out, lse, query.new_empty(batch * _runner(handle).kept_elements)


@attention_backward.register_fake
def _attention_backward_fake(
    dout: Tensor,
    dlse: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    kept: Tensor,
    handle: int,
) -> tuple[Tensor, Tensor, Tensor]:
    return (
        query.new_empty(query.shape),
        key.new_empty(key.shape),
        value.new_empty(value.shape),
    )


def _setup_context(
    ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]
) -> None:
    query, key, value, ctx.handle = inputs
    ctx.runner = _runners.get(ctx.handle)  # keeps the module alive until its backward pass
    ctx.save_for_backward(query, key, value, *output)
    ctx.mark_non_differentiable(output[2])
    ctx.set_materialize_grads(False)


def _backward(
    ctx: Any, dout: Tensor | None, dlse: Tensor | None, dkept: None
) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
    query, key, value, out, lse, kept = ctx.saved_tensors
    if dout is None:
        dout = torch.zeros_like(out)
    dq, dk, dv = attention_backward(dout, dlse, query, key, value, out, lse, kept, ctx.handle)
    return dq, dk, dv, None


attention.register_autograd(_backward, setup_context=_setup_context)


def attend(query: Tensor, key: Tensor, value: Tensor, handle: int) -> tuple[Tensor, Tensor, Tensor]:
    """As `attention`, without an operator's dispatch where nobody needs to see the operator.

    Keeps nothing for backward where there will be none.
    """
    if not _plain(query, key, value):
        found: tuple[Tensor, Tensor, Tensor] = attention(query, key, value, handle)
        return found
    if torch.is_grad_enabled() and (
        query.requires_grad or key.requires_grad or value.requires_grad
    ):
        out, lse, kept = _Attend.apply(query, key, value, handle)  # type: ignore[no-untyped-call]
        return out, lse, kept
    return _runner(handle).run_forward(query, key, value, False)


def _plain(*tensors: Tensor) -> bool:
    """Whether the tensors are real and no mode, compiler or function transform looks on."""
    return (
        not torch.compiler.is_compiling()
        and all(type(x) is Tensor or type(x) is torch.nn.Parameter for x in tensors)
        and torch._C._len_torch_dispatch_stack() == 0
        and torch._C._functorch.peek_interpreter_stack() is None
    )


class _Attend(torch.autograd.Function):
    """`attention` as a function of autograd."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, handle: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        found = _runner(handle).run_forward(query, key, value, True)
        _setup_context(ctx, (query, key, value, handle), found)
        return found

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, dout: Tensor | None, dlse: Tensor | None, dkept: None
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        query, key, value, out, lse, kept = ctx.saved_tensors
        if dout is None:
            dout = torch.zeros_like(out)
        runner = _runner(ctx.handle)
        return *runner.run_backward(dout, dlse, query, key, value, out, lse, kept), None
