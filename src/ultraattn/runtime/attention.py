"""Makes a plan a torch.nn.Module: local query, key and value in, local output and gradients out."""

from __future__ import annotations

import json
import weakref
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor as Array

from ultraattn.errors import InputError
from ultraattn.masks import Mask, from_spec
from ultraattn.plans.passes import Pass
from ultraattn.plans.plan import Plan
from ultraattn.plans.tensors import Tensor
from ultraattn.runtime import operators
from ultraattn.runtime.execute import Execution
from ultraattn.runtime.graphs import Replays
from ultraattn.runtime.kernels import check_name
from ultraattn.runtime.kernels.standin import nonzero_rows
from ultraattn.runtime.pieces import DTYPES, Between, Own
from ultraattn.runtime.rehearsal import rehearsal_of
from ultraattn.runtime.session import Session, as_group, session_of
from ultraattn.runtime.steps import steps_of
from ultraattn.runtime.tiles import Tiles
from ultraattn.runtime.transports.base import NoPlaces
from ultraattn.runtime.transports.places import ALIGN_BYTES

HINTS = {
    "attn_mask": "the mask belongs to the plan: make one with ultraattn.masks",
    "bias": "additive biases are not supported",
    "attn_bias": "additive biases are not supported",
    "dropout_p": "dropout is not supported; apply it outside, or pass nothing",
    "dropout": "dropout is not supported; apply it outside, or pass nothing",
    "is_causal": "the mask belongs to the plan: make one with ultraattn.masks.causal()",
    "scale": "the scale belongs to the plan: ultraattn.plan(..., scale=...)",
    "softcap": "softcap is not supported",
    "enable_gqa": "grouped heads follow from the plan's kv_heads; leave it out",
    "s_aux": "attention sinks are not supported",
    "sinks": "attention sinks are not supported",
}


class Attention(torch.nn.Module):
    """One attention over a sequence that is sharded across the ranks of a process group.

    Every rank makes it with the same plan, in the same order; they compare digests before the
    first transfer and fail together where they differ.

    Args:
        plan: from `ultraattn.plan`, `ultraattn.share` or `Plan.load`.
        mesh: a one-dimensional DeviceMesh, a ProcessGroup, or None for the default group.
        mask: the mask again, where the plan could not save it (`masks.from_mask_mod`).
        kernel: a kernel's name, or "auto" for the best that serves each block.
        timeout_s: the longest wait for a peer before the call fails and says who is at fault.
        transport: auto, gloo, nccl or symmetric; auto is the fastest that serves the group.
        graph: on CUDA, capture each pass as a graph once its tensors come back at the same places
            (or keep moving), and replay it; by default where the device is CUDA and the transport
            can be captured.
        deterministic: give the same bits in every run: kernels alone that add in a fixed order
            (on CUDA `sparse`), others refused. Always so on CPUs.

    Raises:
        InputError: the group has another size than the plan; the mask is missing or another one.
        MissingExtraError: the package of the kernel that is asked for is not installed.
        PlanError: the plan is unsound, on every rank alike.
        RunError: ranks hold different plans, or some rank did not come.
    """

    def __init__(
        self,
        plan: Plan,
        mesh: Any = None,
        *,
        mask: Mask | None = None,
        kernel: str = "auto",
        timeout_s: float = 600.0,
        transport: str = "auto",
        graph: bool | None = None,
        deterministic: bool = False,
    ) -> None:
        super().__init__()
        check_name(kernel)
        self._session = session_of(as_group(mesh), transport)
        if self._session.ranks != plan.ranks:
            raise InputError(
                f"plan for {plan.ranks} ranks, process group of {self._session.ranks}; plan for "
                f"ranks={self._session.ranks}, or pass the group that the plan is for"
            )
        self.plan = plan
        rank_plan = plan.for_rank(self._session.rank)
        self._layouts = plan.q_layout, plan.kv_layout
        deterministic = deterministic or plan.problem.deterministic
        self._tiles = Tiles(
            rank_plan, mask_of(plan, mask), kernel, self._session.device, deterministic
        )
        self._steps = {
            pass_: steps_of(
                pass_,
                rank_plan,
                tags=len(plan.pass_plan(pass_).program.tasks.rank),
                early=self._session.device.type == "cuda",
            )
            for pass_ in Pass
        }
        placed = not isinstance(self._session.transport, NoPlaces)
        self._most_bytes = {pass_: most_bytes(plan, pass_) if placed else 0 for pass_ in Pass}
        self._names = {pass_: f"{pass_} of plan {plan.digest[:12]}" for pass_ in Pass}
        self._expected = expected_inputs(plan, self._session.rank, self._session.device)
        self._timeout_s = timeout_s
        self._rehearsed: set[tuple[Pass, int, frozenset[Tensor | Between]]] = set()
        device = self._session.device
        if graph and device.type != "cuda":
            raise InputError(f"graph=True on {device}: graphs are of CUDA; leave it out")
        links = self._session.transport
        capturable = self._session.ranks == 1 or getattr(links, "capturable", False)
        if graph and not capturable:
            raise InputError(
                f"graph=True over transport {links.name!r}: its messages are not captured; use "
                "transport='symmetric', or leave graph out"
            )
        wanted = device.type == "cuda" and capturable if graph is None else graph
        run = weakref.WeakMethod(self._run_tasks)  # no cycle: graphs go when the module does
        self._replays = Replays(run, device, self._session.transport) if wanted else None
        self._session.workspace.trim()
        self._session.agree("plan", plan.digest, timeout_s)
        plan.check()  # After the ranks agreed: an unsound plan fails on all of them alike.
        if mask is not None:
            plan.check_mask(mask)
        self._handle = operators.register(self)
        self._checked: Any = None
        self._nothing: Array | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> Attention:
        """Itself: it has no parameters, and ranks would have to agree on a copy anew."""
        return self

    @property
    def rank(self) -> int:
        """This process's rank in the group."""
        return self._session.rank

    @property
    def bytes_sent(self) -> int:
        """Bytes that this rank sent to its peers so far, over all plans of the group."""
        return self._session.transport.bytes_sent

    @property
    def bytes_received(self) -> int:
        """Bytes that this rank received from its peers so far, over all plans of the group."""
        return self._session.transport.bytes_received

    def forward(
        self,
        query: Array,
        key: Array,
        value: Array,
        *,
        return_lse: bool = False,
        **unsupported: Any,
    ) -> Array | tuple[Array, Array]:
        """Attention of this rank's queries over the whole sequence.

        Args:
            query: (batch, heads, local tokens, head_dim), any strides.
            key: (batch, kv_heads, local key tokens, head_dim).
            value: (batch, kv_heads, local key tokens, value_dim).
            return_lse: also return the natural-log LSE, (batch, heads, local tokens), in float32
                (float64 for float64); -inf where a query sees nothing.

        Returns:
            (batch, heads, local tokens, value_dim) in the dtype of `query`.

        Raises:
            InputError: shapes, dtypes or devices other than the plan's, or an argument that is not
                supported.
            RunError: a rank failed, died or hung; names it, its task and its cause.
        """
        if unsupported:
            name = min(unsupported)
            hint = HINTS.get(name, "it is unknown; expected query, key, value and return_lse")
            raise InputError(f"argument {name!r} of Attention: {hint}")
        self._check(query, key, value)
        out, lse, _ = operators.attend(query, key, value, self._handle)
        return (out, lse) if return_lse else out

    def _check(self, query: Array, key: Array, value: Array) -> None:
        e = self._expected
        seen = (query.shape, key.shape, value.shape, query.dtype, key.dtype, value.dtype)
        places = (query.device, key.device, value.device)
        tracing = torch.compiler.is_compiling()
        if not tracing and (seen, places) == self._checked:
            return
        for name, tensor, shape in (
            ("query", query, e.query),
            ("key", key, e.key),
            ("value", value, e.value),
        ):
            if tensor.ndim != 4 or tuple(tensor.shape[1:]) != shape:
                raise InputError(
                    f"{name} of shape {tuple(tensor.shape)} on rank {e.rank}: the plan expects "
                    f"(batch, {', '.join(map(str, shape))}), its part of the sequence as "
                    "plan.shard gives it"
                )
            if tensor.shape[0] != query.shape[0]:
                raise InputError(
                    f"{name} with batch {tensor.shape[0]}, query with {query.shape[0]}: expected "
                    "one batch"
                )
            if tensor.dtype != e.dtype:
                raise InputError(
                    f"{name} of dtype {str(tensor.dtype).removeprefix('torch.')}: the plan is for "
                    f"{str(e.dtype).removeprefix('torch.')}; cast it, or plan with dtype="
                )
            if tensor.device.type != e.device:
                raise InputError(
                    f"{name} on device {tensor.device}: the group's transport serves {e.device}; "
                    "move it there, or use a group for its device"
                )
        if not tracing:
            self._checked = seen, places

    # Called by the operators, on real tensors.

    @property
    def kept_elements(self) -> int:
        """Elements of what a forward pass keeps for its backward, for one batch entry."""
        kept = self._steps[Pass.FORWARD].kept
        return kept.bytes // DTYPES[self.plan.problem.dtype].itemsize

    def run_forward(
        self, query: Array, key: Array, value: Array, keep: bool
    ) -> tuple[Array, Array, Array]:
        """One forward pass over the group: out, LSE, and what to `keep` for backward (flat)."""
        p = self.plan.problem
        batch, _, rows, _ = query.shape
        out = query.new_empty((batch, p.heads, rows, p.value_dim))
        lse = query.new_empty((batch, p.heads, rows), dtype=operators.lse_dtype(query.dtype))
        kept = self._kept(query, batch if keep else 0)
        own: Own = {
            Tensor.Q: query,
            Tensor.K: key,
            Tensor.V: value,
            Tensor.O: out,
            Tensor.LSE: lse,
        }
        if kept.numel():
            own[Between.KEPT] = kept
        self._execute(Pass.FORWARD, own, batch)
        return out, lse, kept

    def _kept(self, like: Array, batch: int) -> Array:
        """Room for what is kept; where nothing is, one empty tensor for all calls."""
        keeping = self._steps[Pass.FORWARD].kept
        if batch * keeping.bytes:
            return keeping.empty(like, batch)
        if self._nothing is None or self._nothing.device != like.device:
            self._nothing = like.new_empty(0)
        return self._nothing

    def run_backward(
        self,
        dout: Array,
        dlse: Array | None,
        query: Array,
        key: Array,
        value: Array,
        out: Array,
        lse: Array,
        kept: Array,
    ) -> tuple[Array, Array, Array]:
        """One backward pass over the group: dQ, dK, dV."""
        grads = [x.new_empty(x.shape) for x in (query, key, value)]
        own: Own = {
            Tensor.Q: query,
            Tensor.K: key,
            Tensor.V: value,
            Tensor.O: out,
            Tensor.LSE: lse,
            Tensor.DO: dout,
            Tensor.DQ: grads[0],
            Tensor.DK: grads[1],
            Tensor.DV: grads[2],
        }
        if kept.numel():
            own[Between.KEPT] = kept
        if dlse is not None:
            own[Tensor.DELTA] = dlse
            if dout.device.type == "cuda":
                own[Tensor.DO] = nonzero_rows(dout, dlse)
        self._execute(Pass.BACKWARD, own, query.shape[0])
        return grads[0], grads[1], grads[2]

    def _execute(self, pass_: Pass, own: Own, batch: int) -> None:
        if self._replays is not None and batch:
            self._session.refuse_if_failed()
            self._replays(pass_, own, batch)
        else:
            self._run_tasks(pass_, own, batch)
        if self._session.watchdog is not None:
            self._session.watchdog.launched(
                self._steps[pass_], self._names[pass_], self._timeout_s, self._size(pass_, batch)
            )

    def _run_tasks(self, pass_: Pass, own: Own, batch: int) -> None:
        kind = (pass_, batch, frozenset(own))
        if self._session.device.type == "cuda" and kind not in self._rehearsed:
            self._rehearsed.add(kind)
            self._session.transport.reserve(self._size(pass_, batch))
            self._run_on(rehearsal_of(self._session), pass_, own, batch)
        self._run_on(self._session, pass_, own, batch)

    def _size(self, pass_: Pass, batch: int) -> int:
        """Bytes of places that a call has in each direction."""
        return batch * self._most_bytes[pass_]

    def _run_on(self, session: Session, pass_: Pass, own: Own, batch: int) -> None:
        session.transport.begin(self._size(pass_, batch))
        session.workspace.user = weakref.ref(self)
        with torch.no_grad():
            Execution(
                session,
                self._steps[pass_],
                self._layouts,
                own,
                batch,
                self._tiles,
                self._timeout_s,
                f"{self._names[pass_]} with batch {batch}",
            ).run()


@dataclass(frozen=True)
class Expected:
    """What a rank's inputs look like, but for the batch."""

    rank: int
    query: tuple[int, int, int]
    key: tuple[int, int, int]
    value: tuple[int, int, int]
    dtype: torch.dtype
    device: str


def expected_inputs(plan: Plan, rank: int, device: torch.device) -> Expected:
    """The shapes (heads, local tokens, width), dtype and device that a rank's inputs must have."""
    p = plan.problem
    rows, cols = plan.q_layout.local_tokens(rank), plan.kv_layout.local_tokens(rank)
    return Expected(
        rank,
        (p.heads, rows, p.head_dim),
        (p.kv_heads, cols, p.head_dim),
        (p.kv_heads, cols, p.value_dim),
        DTYPES[p.dtype],
        device.type,
    )


def most_bytes(plan: Plan, pass_: Pass) -> int:
    """The most bytes that one rank sends to another in a pass, for one batch entry, with gaps."""
    directions: dict[tuple[int, int], int] = defaultdict(int)
    for rank in range(plan.ranks):
        for message in steps_of(pass_, plan.for_rank(rank), 0).receives:
            size = -(-message.room.bytes // ALIGN_BYTES) * ALIGN_BYTES
            directions[message.peer, rank] += size
    return max(directions.values(), default=0)


def mask_of(plan: Plan, given: Mask | None) -> Mask:
    """The plan's mask: its saved form, or the one handed over, whose grid must match.

    Raises:
        InputError: the plan could not save its mask and none was given, or another one was.
    """
    if plan.problem.mask and given is None:
        return from_spec(json.loads(plan.problem.mask))
    if given is None:
        raise InputError(
            f"the plan's mask, {plan.problem.mask_label}, is a Python function, which a plan "
            "cannot save; hand it over again with Attention(plan, mesh, mask=...)"
        )
    grid = given.grid(plan.q_layout.chunks, plan.kv_layout.chunks, heads=plan.problem.heads)
    digest = grid.digest()
    if digest != plan.problem.mask_digest:
        raise InputError(
            f"mask {given} has grid digest {digest[:12]}, the plan was made for "
            f"{plan.problem.mask_label} with {plan.problem.mask_digest[:12]}; hand over the mask "
            "that was planned, or plan again"
        )
    return given
