"""What ranks do in the behaviour tests; importable by their processes."""

from __future__ import annotations

import gc
import os
import time
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

import ultraattn as ua
from tests.exactness.ranks import packed, shard_all
from ultraattn import masks
from ultraattn.plans import Plan
from ultraattn.runtime import operators
from ultraattn.runtime.session import session_of

TIMEOUT_S = 60.0


def leaves(plan: Plan, rank: int, batch: int = 2, shift: float = 0.0):
    """Local query, key, value (that need gradients) and the gradient of the output."""
    q, k, v, dout = shard_all(plan, rank, batch)
    return *((x + shift).requires_grad_() for x in (q, k, v)), dout


def results(out, gradients) -> dict[str, Any]:
    names = ("out", "dq", "dk", "dv")
    return {name: packed(x) for name, x in zip(names, (out, *gradients), strict=True)}


def make(plan: Plan, **options: Any) -> ua.Attention:
    return ua.Attention(plan, **{"timeout_s": TIMEOUT_S, **options})


def once(rank: int, plan: Plan, batch: int, options: dict[str, Any] | None = None):
    """One forward and one backward pass."""
    attention = make(plan, **(options or {}))
    q, k, v, dout = leaves(plan, rank, batch)
    out = attention(q, k, v)
    return results(out, torch.autograd.grad(out, (q, k, v), dout))


def two_calls(rank: int, plan: Plan, first_back: int):
    """The same module twice forward, with other inputs, then backward in either order."""
    attention = make(plan)
    calls = []
    for shift in (0.0, 0.5):
        q, k, v, dout = leaves(plan, rank, shift=shift)
        calls.append((attention(q, k, v), (q, k, v), dout))
    grads: dict[int, Any] = {}
    for index in (first_back, 1 - first_back):
        out, inputs, dout = calls[index]
        grads[index] = torch.autograd.grad(out, inputs, dout)
    return [results(calls[index][0], grads[index]) for index in (0, 1)]


def interleaved(rank: int, plans: list[Plan]):
    """Two plans of other shapes: all forward passes, then all backward passes in that order."""
    modules = [make(plan) for plan in plans]
    calls = []
    for module, plan in zip(modules, plans, strict=True):
        q, k, v, dout = leaves(plan, rank)
        calls.append((module(q, k, v), (q, k, v), dout))
    return [results(out, torch.autograd.grad(out, inputs, dout)) for out, inputs, dout in calls]


def checkpointed(rank: int, plan: Plan, reentrant: bool):
    attention = make(plan)
    q, k, v, dout = leaves(plan, rank)
    out = checkpoint(attention, q, k, v, use_reentrant=reentrant)
    out.backward(dout)
    return results(out, (q.grad, k.grad, v.grad))


def compiled(rank: int, plan: Plan, backend: str):
    torch._dynamo.reset()
    attention = torch.compile(make(plan), backend=backend, fullgraph=True)
    q, k, v, dout = leaves(plan, rank)
    out = attention(q, k, v)
    return results(out, torch.autograd.grad(out, (q, k, v), dout))


def dropped_module(rank: int, plan: Plan):
    """The caller keeps the output alone; the module is collected before the backward pass."""
    q, k, v, dout = leaves(plan, rank)
    out = make(plan)(q, k, v)
    gc.collect()
    return results(out, torch.autograd.grad(out, (q, k, v), dout))


def without_grad(rank: int, plan: Plan):
    attention = make(plan)
    q, k, v, _ = leaves(plan, rank)
    with torch.no_grad():
        out = attention(q, k, v)
    with torch.inference_mode():
        again = attention(q, k, v)
    return out.requires_grad, again.requires_grad, bool((out == again).all())


def lse_gradient(rank: int, plan: Plan, dlse_whole, with_out: bool):
    """Gradients of a loss over the LSE (and the output); `dlse_whole` is for the whole sequence."""
    attention = make(plan)
    q, k, v, dout = leaves(plan, rank)
    out, lse = attention(q, k, v, return_lse=True)
    dlse = plan.shard(torch.from_numpy(dlse_whole), rank, dim=2)
    outputs, grads = ((out, lse), (dout, dlse)) if with_out else ((lse,), (dlse,))
    return results(lse, torch.autograd.grad(outputs, (q, k, v), grads))


def strided(rank: int, plan: Plan):
    """Inputs and gradients as no kernel likes them: transposed, sliced, expanded."""
    attention = make(plan)
    q, k, v, dout = leaves(plan, rank)
    base_q = q.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_()
    base_k = torch.stack((k.detach(), k.detach()), dim=-1)[..., 0].requires_grad_()
    base_v = v.detach().mT.contiguous().mT.requires_grad_()
    strange = torch.stack((dout, dout + 1), dim=2)[:, :, 0]
    assert not any(x.is_contiguous() for x in (base_q, base_k, base_v, strange) if x.numel() > 99)
    out = attention(base_q, base_k, base_v)
    return results(out, torch.autograd.grad(out, (base_q, base_k, base_v), strange))


def expanded_gradient(rank: int, plan: Plan):
    """The gradient of a sum: one number in memory, strides 0."""
    attention = make(plan)
    q, k, v, _ = leaves(plan, rank)
    out = attention(q, k, v)
    return results(out, torch.autograd.grad(out.sum(), (q, k, v)))


def refused(rank: int, plan: Plan, case: str):
    """The error of a call that cannot be served, and that the next call works all the same."""
    attention = make(plan)
    q, k, v, _ = leaves(plan, rank)
    calls = {
        "unknown": lambda: attention(q, k, v, tau=1.0),
        "dropout_p": lambda: attention(q, k, v, dropout_p=0.1),
        "attn_mask": lambda: attention(q, k, v, attn_mask=None),
        "bias": lambda: attention(q, k, v, bias=torch.zeros(1)),
        "sinks": lambda: attention(q, k, v, sinks=torch.zeros(1)),
        "scale": lambda: attention(q, k, v, scale=2.0),
        "is_causal": lambda: attention(q, k, v, is_causal=True),
        "query shape": lambda: attention(q[:, :, :-1], k, v),
        "query heads": lambda: attention(q[:, :-1], k, v),
        "key shape": lambda: attention(q, k[:, :, 1:], v),
        "value width": lambda: attention(q, k, v[..., 1:]),
        "three axes": lambda: attention(q[0], k[0], v[0]),
        "key batch": lambda: attention(q, k[:1], v),
        "dtype": lambda: attention(q.float(), k.float(), v.float()),
        "value dtype": lambda: attention(q, k, v.bfloat16()),
        "device": lambda: attention(q.to("meta"), k, v),
    }
    try:
        calls[case]()
    except ua.InputError as error:
        attention(q, k, v)
        return str(error)
    return "nothing was raised"


def constructed(rank: int, plan: Plan, options: dict[str, Any]):
    """The error of making an Attention."""
    try:
        make(plan, **options)
    except ua.UltraAttnError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


def differing(rank: int, plans: list[Plan]):
    """Every rank brings its own plan."""
    return constructed(rank, plans[rank], {"timeout_s": 5.0})


def on_mesh(rank: int, plan: Plan, shape: tuple[int, ...]):
    from torch.distributed.device_mesh import init_device_mesh

    names = ("a", "cp")[-len(shape) :]
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    try:
        return once(rank, plan, 2, {"mesh": mesh})
    except ua.InputError as error:
        return str(error)


def on_mesh_slice(rank: int, plan: Plan):
    """Two groups of two ranks, each with an attention of its own over mesh['cp']."""
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))["cp"]
    return once(mesh.get_local_rank(), plan, 2, {"mesh": mesh})


def shared(rank: int, plan: Plan | None, source: int):
    """`share`, and a run of what came."""
    try:
        got = ua.share(plan if rank == source else None, source=source, timeout_s=5.0)
    except ua.UltraAttnError as error:
        return f"{type(error).__name__}: {error}"
    return got == plan, got.digest, once(rank, got, 1)


def many_calls(rank: int, plan: Plan, calls: int):
    """Workspace bytes held after some calls and after many; bytes still lent."""
    attention = make(plan)
    workspace = session_of(torch.distributed.group.WORLD).workspace
    q, k, v, dout = leaves(plan, rank)
    held = []
    for call in range(calls):
        out = attention(q, k, v)
        torch.autograd.grad(out, (q, k, v), dout)
        if call in (4, calls - 1):
            held.append(workspace.bytes_held)
    return held, workspace.bytes_lent


def one_after_another(rank: int, big: Plan, small: Plan):
    """Workspace bytes held after a module of a big plan was used, and after one of a small plan."""
    workspace = session_of(torch.distributed.group.WORLD).workspace
    held = []
    for plan in (big, small):
        attention = make(plan)
        q, k, v, dout = leaves(plan, rank)
        torch.autograd.grad(attention(q, k, v), (q, k, v), dout)
        del attention
        held.append(workspace.bytes_held)
    return held


def seen_by_a_mode(rank: int, plan: Plan):
    """The operators that a dispatch mode sees in both passes; none look on in a plain call."""
    from torch.utils._python_dispatch import TorchDispatchMode

    names = []

    class Seeing(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            names.append(func._schema.name)
            return func(*args, **(kwargs or {}))

    attention = make(plan)
    q, k, v, dout = leaves(plan, rank)
    with Seeing():
        seen = torch.autograd.grad(attention(q, k, v), (q, k, v), dout)
    plain = torch.autograd.grad(attention(q, k, v), (q, k, v), dout)
    same = all(torch.equal(a, b) for a, b in zip(seen, plain, strict=True))
    return [name for name in names if name.startswith("ultraattn::")], same


def traced(rank: int, plan: Plan):
    """(pass, task) in the order in which they ran."""
    attention = make(plan)
    session = session_of(torch.distributed.group.WORLD)
    session.trace = []
    try:
        q, k, v, dout = leaves(plan, rank)
        out = attention(q, k, v)
        torch.autograd.grad(out, (q, k, v), dout)
        return session.trace
    finally:
        session.trace = None


def operator_checks(rank: int, plan: Plan):
    """torch's own checks of the two operators: schema, fake, autograd, AOT dispatch."""
    attention = make(plan)
    q, k, v, dout = leaves(plan, rank)
    out, lse, kept = torch.ops.ultraattn.attention(q, k, v, attention._handle)
    first = torch.library.opcheck(torch.ops.ultraattn.attention, (q, k, v, attention._handle))
    detached = [x.detach() for x in (q, k, v, out, lse, kept)]
    second = torch.library.opcheck(
        torch.ops.ultraattn.attention_backward, (dout, None, *detached, attention._handle)
    )
    return {**first, **{f"backward {name}": result for name, result in second.items()}}


HANG_S = 6.0

# Failures: every function tells how long it took and what was raised.


def timed(attention: ua.Attention, plan: Plan, rank: int):
    start = time.monotonic()
    try:
        q, k, v, dout = leaves(plan, rank)
        out = attention(q, k, v)
        torch.autograd.grad(out, (q, k, v), dout)
        text = "nothing was raised"
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
    return time.monotonic() - start, text


class Broken:
    """Stands in for a rank's tiles; does `what` at its first launch of a pass."""

    def __init__(self, tiles: Any, what: str, pass_name: str) -> None:
        self._tiles, self._what, self._pass = tiles, what, pass_name

    def run(self, pass_: Any, *args: Any) -> None:
        if str(pass_) == self._pass:
            if self._what == "raises":
                raise ValueError("a kernel that does not like its input")
            if self._what == "dies":
                time.sleep(0.8)
                os._exit(17)
            if self._what == "hangs":
                self._what = ""
                time.sleep(HANG_S)
        self._tiles.run(pass_, *args)


def broken_rank(rank: int, plan: Plan, culprit: int, what: str, pass_name: str, timeout_s: float):
    """One rank raises, dies or hangs in the middle of a pass."""
    attention = ua.Attention(plan, timeout_s=timeout_s)
    if rank == culprit:
        attention._tiles = Broken(attention._tiles, what, pass_name)
    return timed(attention, plan, rank)


def broken_in_a_row(rank: int, plans: list[Plan], culprit: int, timeout_s: float):
    """A rank hangs in the backward pass of the first plan; then comes the second."""
    modules = [ua.Attention(plan, timeout_s=timeout_s) for plan in plans]
    if rank == culprit:
        modules[0]._tiles = Broken(modules[0]._tiles, "hangs", "backward")
    return [timed(module, plan, rank) for module, plan in zip(modules, plans, strict=True)]


def broken_then_again(rank: int, plan: Plan, culprit: int):
    """A rank raises; another call on the same group is refused at once."""
    attention = ua.Attention(plan, timeout_s=5.0)
    if rank == culprit:
        attention._tiles = Broken(attention._tiles, "raises", "forward")
    first = timed(attention, plan, rank)
    return first, timed(attention, plan, rank), constructed(rank, plan, {})


def absent_call(rank: int, plan: Plan, culprit: int, timeout_s: float):
    """One rank makes its Attention but never calls it."""
    attention = ua.Attention(plan, timeout_s=timeout_s)
    if rank == culprit:
        time.sleep(HANG_S)
        return 0.0, "stayed away"
    return timed(attention, plan, rank)


def absent_module(rank: int, plan: Plan, culprit: int, timeout_s: float, planning_fails: bool):
    """One rank never makes its Attention, or fails to plan."""
    start = time.monotonic()
    try:
        if rank == culprit:
            if planning_fails:
                ua.plan(masks.document([1, 2]), seqlen=4, heads=1, head_dim=8, ranks=2)
            time.sleep(HANG_S)
            return 0.0, "stayed away"
        ua.Attention(plan, timeout_s=timeout_s)
        text = "nothing was raised"
    except ua.UltraAttnError as error:
        text = f"{type(error).__name__}: {error}"
    return time.monotonic() - start, text


def other_batch(rank: int, plan: Plan, culprit: int, timeout_s: float):
    """One rank comes with another batch."""
    attention = ua.Attention(plan, timeout_s=timeout_s)
    start = time.monotonic()
    q, k, v, _ = leaves(plan, rank, batch=3 if rank == culprit else 2)
    try:
        attention(q, k, v)
        text = "nothing was raised"
    except ua.UltraAttnError as error:
        text = f"{type(error).__name__}: {error}"
    return time.monotonic() - start, text


def kept_elements(rank: int, plan: Plan):
    """What a call saves for backward beyond its inputs and results, with gradients and without."""
    attention = make(plan)
    q, k, v, _ = leaves(plan, rank)
    saved: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x.numel()) or x, id):
        attention(q, k, v)
    with torch.no_grad():
        _, _, kept = operators.attend(q, k, v, attention._handle)
    return saved[-1], kept.numel()
