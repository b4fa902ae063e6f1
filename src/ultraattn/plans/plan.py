"""Holds the result of planning: one frozen value that is run, simulated, drawn, saved, compared."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from ultraattn.chunks import Ints
from ultraattn.errors import InputError
from ultraattn.masks import Mask, from_spec
from ultraattn.plans.account import Account, account, value_bytes
from ultraattn.plans.check import check_program
from ultraattn.plans.check.mask import check_mask
from ultraattn.plans.columns import ByContent
from ultraattn.plans.kept import Kept, kept_of, kept_values
from ultraattn.plans.layout import Layout
from ultraattn.plans.passes import Pass
from ultraattn.plans.problem import Problem
from ultraattn.plans.program import Program
from ultraattn.plans.rank_program import RankProgram, rank_program


@dataclass(frozen=True)
class Bounds:
    """What is known of the traffic of one pass: direct transfers only, the busiest rank.

    `max_volume` and `lower_bound` are in bytes, or in the paper's units where the plan was made
    with them (`units`).
    """

    max_volume: float
    lower_bound: float
    proved: bool
    units: str = "bytes"

    @property
    def gap(self) -> float:
        """``(max_volume - lower_bound) / max_volume``; 0 where proved or nothing moves."""
        if self.proved or not self.max_volume:
            return 0.0
        return (self.max_volume - self.lower_bound) / self.max_volume


@dataclass(frozen=True, eq=False)
class PassPlan(ByContent):
    """One pass of a plan: how it was made, what it costs at least, and its program."""

    strategy: str
    head_groups: int
    bounds: Bounds
    notes: tuple[str, ...]
    """What a reader should know: a cap that had to be raised, a candidate that was left out."""
    program: Program
    predicted_ns: int | None = None
    """Simulated nanoseconds on the plan's cluster, where its costs are known."""

    @property
    def predicted_s(self) -> float | None:
        """Simulated seconds."""
        return None if self.predicted_ns is None else self.predicted_ns / 1e9


@dataclass(frozen=True)
class Place:
    """The cluster a plan was made for, as far as a program depends on it."""

    cluster: str
    nodes: int
    gpus_per_node: int

    @property
    def ranks(self) -> int:
        """Ranks in all."""
        return self.nodes * self.gpus_per_node

    @property
    def node_of(self) -> tuple[int, ...]:
        """The node of each rank."""
        return tuple(rank // self.gpus_per_node for rank in range(self.ranks))


@dataclass(frozen=True, eq=False)
class RankPlan(ByContent):
    """What one rank loads of a plan."""

    rank: int
    problem: Problem
    place: Place
    q_layout: Layout
    kv_layout: Layout
    forward: RankProgram
    backward: RankProgram
    kept: Kept
    digest: str


@dataclass(frozen=True, eq=False)
class Plan(ByContent):
    """A distributed attention, forward and backward, as data."""

    problem: Problem
    place: Place
    q_layout: Layout
    kv_layout: Layout
    forward: PassPlan
    backward: PassPlan
    versions: tuple[tuple[str, str], ...]

    @property
    def ranks(self) -> int:
        """Ranks that take part."""
        return self.place.ranks

    @property
    def layout(self) -> Layout:
        """The layout of queries (and of keys, where both have one length)."""
        return self.q_layout

    @cached_property
    def digest(self) -> str:
        """SHA-256 over the digests of the sections of the saved plan."""
        from ultraattn.plans.storage import plan_digest

        return plan_digest(self)

    @cached_property
    def forward_account(self) -> Account:
        """Work, traffic and memory of the forward pass."""
        return account(self.problem, self.forward.program, self.place.node_of)

    @cached_property
    def backward_account(self) -> Account:
        """Work, traffic and memory of the backward pass."""
        return account(self.problem, self.backward.program, self.place.node_of)

    @cached_property
    def kept_bytes(self) -> Ints:
        """Bytes that each rank keeps from forward to backward, for one batch entry: (ranks,)."""
        sizes = value_bytes(self.problem, self.backward.program)
        total = np.zeros(self.ranks, dtype=np.int64)
        kept = self._kept >= 0
        np.add.at(total, self.backward.program.values.rank[kept], sizes[kept])
        return total

    @cached_property
    def _kept(self) -> Ints:
        programs = self.forward.program, self.backward.program
        return kept_values(*programs, self.q_layout, self.kv_layout)

    def account(self, pass_: Pass) -> Account:
        """Work, traffic and memory of a pass."""
        return self.forward_account if pass_ is Pass.FORWARD else self.backward_account

    def pass_plan(self, pass_: Pass) -> PassPlan:
        """The forward or the backward pass."""
        return self.forward if pass_ is Pass.FORWARD else self.backward

    def check(self) -> None:
        """Proves both passes sound without running them.

        The blocks are compared with the mask where the plan could save it; `check_mask` does so
        for one that is handed over.

        Raises:
            PlanError: names the rule that is broken, and the task, value or block.
        """
        _ = self._sound

    @cached_property
    def _sound(self) -> bool:
        """True; worked out once, since a plan does not change."""
        for layout in (self.q_layout, self.kv_layout):
            if layout.ranks != self.ranks:
                raise InputError(
                    f"layout for {layout.ranks} ranks in a plan for {self.ranks}; make one for each"
                )
        for pass_ in Pass:
            check_program(
                pass_,
                self.problem,
                self.q_layout,
                self.kv_layout,
                self.place.node_of,
                self.pass_plan(pass_).program,
                self.forward.program if pass_ is Pass.BACKWARD else None,
            )
        if self.problem.mask:
            self.check_mask(from_spec(json.loads(self.problem.mask)))
        return True

    def check_mask(self, mask: Mask) -> None:
        """Proves that the blocks of both passes are those of `mask`.

        Raises:
            PlanError: names the first block that is not.
        """
        chunks = self.q_layout.chunks, self.kv_layout.chunks
        grid = mask.grid(*chunks, heads=self.problem.heads)
        for pass_ in Pass:
            check_mask(pass_, self.problem, self.pass_plan(pass_).program, grid)

    def for_rank(self, rank: int) -> RankPlan:
        """What `rank` loads: its tasks in order, and the values and blocks they name."""
        self._check_rank(rank)
        return RankPlan(
            rank,
            self.problem,
            self.place,
            self.q_layout,
            self.kv_layout,
            rank_program(self.forward.program, rank),
            rank_program(self.backward.program, rank),
            kept_of(rank, self._kept, self.backward.program),
            self.digest,
        )

    def positions(self, rank: int, *, keys: bool = False) -> Ints:
        """Token positions of `rank`'s local tensors, in order: int64, shape (local tokens,)."""
        self._check_rank(rank)
        return self._layout(keys).positions(rank)

    def shard(self, x: Any, rank: int, dim: int = 1, *, keys: bool = False) -> Any:
        """The part of a full array or tensor that `rank` owns.

        Args:
            x: numpy array or torch tensor whose axis `dim` holds the whole sequence.
            rank: whose part.
            dim: the sequence axis.
            keys: take the layout of keys and values, where it differs from the queries'.

        Raises:
            InputError: the axis has another length than the plan's sequence.
        """
        layout = self._layout(keys)
        if x.shape[dim] != layout.length:
            raise InputError(
                f"shard: axis {dim} of shape {tuple(x.shape)} has {x.shape[dim]} entries, the "
                f"plan's {'keys' if keys else 'queries'} have {layout.length} tokens; pass the "
                "whole sequence, and dim= its axis"
            )
        return _take(x, self.positions(rank, keys=keys), dim)

    def unshard(self, parts: Sequence[Any], dim: int = 1, *, keys: bool = False) -> Any:
        """The exact inverse of `shard`: the full array from every rank's part, in order of rank."""
        layout = self._layout(keys)
        if len(parts) != self.ranks:
            raise InputError(f"unshard: {len(parts)} parts for {self.ranks} ranks; give every part")
        for rank, part in enumerate(parts):
            expected = layout.local_tokens(rank)
            if part.shape[dim] != expected:
                raise InputError(
                    f"unshard: part {rank} has {part.shape[dim]} entries on axis {dim}, rank "
                    f"{rank} owns {expected} tokens; pass the parts in order of rank"
                )
        order = np.concatenate([layout.positions(rank) for rank in range(self.ranks)])
        return _take(_join(parts, dim), np.argsort(order, kind="stable"), dim)

    def save(self, path: str | Path) -> None:
        """Writes one canonical JSON file; checks the plan first."""
        from ultraattn.plans.storage import save_plan

        save_plan(self, Path(path))

    @staticmethod
    def load(path: str | Path) -> Plan:
        """Reads a file that `save` wrote.

        Raises:
            PlanError: truncated, edited, from a newer version, or unsound; says where.
        """
        from ultraattn.plans.storage import load_plan

        return load_plan(Path(path))

    def facts(self) -> dict[str, Any]:
        """What `plan` and `show` print: forward volumes, and the same keys for `backward`."""
        both = {pass_: self._pass_facts(pass_) for pass_ in Pass}
        return {
            "mask": self.problem.mask_label,
            "strategy": self.forward.strategy,
            "ranks": self.ranks,
            "nodes": self.place.nodes,
            "seqlen": self.problem.q_len,
            "kv_seqlen": self.problem.kv_len,
            "heads": self.problem.heads,
            "kv_heads": self.problem.kv_heads,
            "head_dim": self.problem.head_dim,
            "dtype": self.problem.dtype,
            "layout": self.q_layout.name,
            "chunks": len(self.q_layout.chunks),
            **both[Pass.FORWARD],
            "digest": self.digest,
            "kept_bytes": int(self.kept_bytes.max(initial=0)),
            "backward": both[Pass.BACKWARD],
        }

    def _pass_facts(self, pass_: Pass) -> dict[str, Any]:
        part, costs = self.pass_plan(pass_), self.account(pass_)
        return {
            "strategy": part.strategy,
            "head_groups": part.head_groups,
            "max_volume": part.bounds.max_volume,
            "lower_bound": part.bounds.lower_bound,
            "gap": part.bounds.gap,
            "proved": part.bounds.proved,
            "units": part.bounds.units,
            "load_over_mean": costs.load_over_mean,
            "max_bytes": costs.max_volume,
            "total_bytes": int(costs.sent.sum()),
            "memory_bytes": int(costs.memory.max(initial=0)),
            "predicted_s": part.predicted_s,
            "notes": list(part.notes),
        }

    def summary(self) -> str:
        """A few lines for a person."""
        p = self.problem
        lines = [
            f"{p.mask_label}: {p.q_len:,} x {p.kv_len:,} tokens, {p.heads} heads "
            f"({p.kv_heads} key/value), head_dim {p.head_dim}, {p.dtype}",
            f"{self.ranks} ranks on {self.place.nodes} nodes ({self.place.cluster}), "
            f"{len(self.q_layout.chunks)} chunks, layout {self.q_layout.name}, "
            f"digest {self.digest[:12]}",
        ]
        for pass_ in Pass:
            part, costs = self.pass_plan(pass_), self.account(pass_)
            b = part.bounds
            known = "proved least" if b.proved else f"bound {b.lower_bound:,.6g}"
            time = part.predicted_s
            lines.append(
                f"{pass_}: {part.strategy}, busiest rank {b.max_volume:,.6g} {b.units} ({known}), "
                f"load {costs.load_over_mean:.3f} x mean, "
                f"buffers {int(costs.memory.max(initial=0)):,} bytes"
                + ("" if time is None else f", {time * 1e3:.3f} ms simulated")
            )
            lines += [f"  {note}" for note in part.notes]
        kept = int(self.kept_bytes.max(initial=0))
        if kept:
            lines.append(f"kept from forward to backward: {kept:,} bytes on the fullest rank")
        return "\n".join(lines)

    def _layout(self, keys: bool) -> Layout:
        return self.kv_layout if keys else self.q_layout

    def _check_rank(self, rank: int) -> None:
        if not 0 <= rank < self.ranks:
            raise InputError(f"rank {rank}: the plan has ranks 0 to {self.ranks - 1}")


def _take(x: Any, index: Ints, dim: int) -> Any:
    if isinstance(x, np.ndarray):
        return np.take(x, index, axis=dim)
    import torch

    return x.index_select(dim, torch.from_numpy(index).to(x.device))


def _join(parts: Sequence[Any], dim: int) -> Any:
    if isinstance(parts[0], np.ndarray):
        return np.concatenate(parts, axis=dim)
    import torch

    return torch.cat(list(parts), dim)
