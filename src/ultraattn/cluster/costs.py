"""Says what kernels, links, merges and launches cost on one kind of machine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from ultraattn.cluster.tables import Floats, KernelTable, Link
from ultraattn.errors import InputError

HOW_TO_MEASURE = "measure it with `ultraattn profile` and pass the file it writes as the cluster"


@dataclass(frozen=True)
class Kernel:
    """A kernel: its tables, and what one launch of it can hold."""

    name: str
    block_sets: bool
    """Whether one launch takes any set of blocks; else a rectangle, causal at its end or not."""
    partial_over_full: float | None
    """Time of a visible pair in a PARTIAL block over one in a FULL block, where no table of kind
    partial says it; None where the kernel takes no such blocks."""
    tables: tuple[KernelTable, ...]

    def table(self, pass_: str, kind: str) -> KernelTable | None:
        """The table of a pass and kind, where there is one."""
        return next((t for t in self.tables if (t.pass_, t.kind) == (pass_, kind)), None)

    def start_s(self, pass_: str) -> float:
        """The start-up of a launch."""
        table = self.table(pass_, "full")
        return 0.0 if table is None else table.start_s


@dataclass(frozen=True)
class Costs:
    """Measured costs of one kind of machine. Times are seconds, sizes bytes."""

    head_dim: int
    """Of the kernel tables."""
    dtype: str
    """Of the kernel tables."""
    dtype_factors: tuple[tuple[str, float], ...]
    """Time of a kernel in a dtype over that in `dtype`, start-up aside."""
    kernels: tuple[Kernel, ...]
    inside: Link
    """Between two ranks of a node."""
    between: Link
    """Between ranks of two nodes, each through its NIC."""
    nics_per_node: int
    memory_bytes_per_s: float
    """What merges and copies read and write."""
    local_start_s: float
    """Start-up of a merge or copy."""
    launch_s: float
    """Host time to launch a kernel; counts where nothing replays a captured graph."""
    compute_rate: tuple[tuple[str, float], ...]
    """By transport: how fast kernels of a rank run while it sends or receives, 1 where unharmed."""
    host_serial: bool
    """Whether the host itself computes, and packs messages, one thing after another (CPUs)."""
    cores_per_node: int
    """Ranks of a node that can compute at once at full rate; 0 where each has its own device."""
    measured: bool
    notes: tuple[str, ...]
    """Where the numbers come from, and which are assumed."""

    def kernel(self, name: str | None = None) -> Kernel:
        """A kernel by name; the first unless given."""
        found = next((k for k in self.kernels if name in (None, k.name)), None)
        if found is None:
            known = ", ".join(k.name for k in self.kernels) or "none"
            raise InputError(f"no costs of kernel {name!r} (there are: {known}); {HOW_TO_MEASURE}")
        return found

    def width_factor(self, head_dim: int, value_dim: int, dtype: str) -> float:
        """Work of a pair over that in the tables: by widths of the products, and by dtype.

        Raises:
            InputError: the costs know no factor for the dtype.
        """
        factor = 1.0 if dtype == self.dtype else dict(self.dtype_factors).get(dtype)
        if factor is None:
            raise InputError(
                f"no costs of kernels in {dtype} (there are: {self.dtype}, "
                f"{', '.join(d for d, _ in self.dtype_factors)}); {HOW_TO_MEASURE}"
            )
        return factor * (head_dim + value_dim) / (2 * self.head_dim)

    def bodies(
        self,
        kernel: Kernel,
        pass_: str,
        q_tokens: Any,
        kv_tokens: Any,
        heads: Any,
        visible: Any,
        partial: Any = False,
        factor: float = 1.0,
    ) -> Floats:
        """Seconds of blocks past the start-up of their launch.

        Args:
            kernel: which.
            pass_: forward or backward.
            q_tokens: queries of each block; numbers or arrays that broadcast, as below.
            kv_tokens: keys.
            heads: query heads.
            visible: the visible share of the pairs, 0 to 1. Half costs what the causal table says
                of a square with the same shorter side, other shares lie on the lines between.
            partial: whether the block is neither full nor a band.
            factor: `width_factor`.

        Raises:
            InputError: a table that is needed is missing; names it.
        """
        q, kv, h, share, odd = np.broadcast_arrays(
            *(np.asarray(x, dtype=np.float64) for x in (q_tokens, kv_tokens, heads, visible)),
            np.asarray(partial, dtype=bool),
        )
        full = self._table(kernel, pass_, "full")
        body = np.maximum(full.seconds(q, kv, h) - full.start_s, 0.0)
        masked = share < 1
        out = body
        if masked.any():
            causal = self._table(kernel, pass_, "causal")
            side = np.minimum(q, kv)
            square = np.maximum(full.seconds(side, side, h) - full.start_s, 1e-12)
            half = np.maximum(causal.seconds(side, side, h) - causal.start_s, 0.0) / square
            half = np.clip(half, 0.45, 1.0)
            over = np.where(share >= 0.5, half + (1 - half) * (2 * share - 1), half * 2 * share)
            out = np.where(masked, body * over, body)
        if odd.any():
            table = kernel.table(pass_, "partial")
            if table is not None:
                whole = np.maximum(table.seconds(q, kv, h) - full.start_s, 0.0)
                out = np.where(odd, whole, out)
            elif kernel.partial_over_full is not None:
                out = np.where(odd, out * kernel.partial_over_full, out)
            else:
                self._table(kernel, pass_, "partial")
        scaled: Floats = out * factor
        return scaled

    def seconds(
        self,
        q_tokens: int,
        kv_tokens: int,
        heads: int,
        kind: str = "full",
        pass_: str = "forward",
        kernel: str | None = None,
    ) -> float:
        """Seconds of one launch over one block: full, causal or partial (all of it visible)."""
        which = self.kernel(kernel)
        self._table(which, pass_, "full")
        share = 0.5 if kind == "causal" else 1.0
        body = self.bodies(which, pass_, q_tokens, kv_tokens, heads, share, kind == "partial")
        return which.start_s(pass_) + float(body)

    def copy_seconds(self, bytes_: Any) -> Floats:
        """Seconds of a merge or copy that reads and writes so many bytes."""
        size = np.asarray(bytes_, dtype=np.float64)
        return self.local_start_s + size / self.memory_bytes_per_s

    def peak(self, pass_: str) -> float:
        """The best rate of any kernel, in visible (query, key) pairs times heads a second."""
        tables = [t for k in self.kernels for t in k.tables if t.pass_ == pass_]
        if not tables:
            raise InputError(f"no costs of the {pass_} pass; {HOW_TO_MEASURE}")
        return max(t.peak * (0.5 if t.kind == "causal" else 1.0) for t in tables)

    def rate_beside(self, transport: str) -> float:
        """How fast kernels run beside a transfer; 1 where nothing is known to slow them."""
        return dict(self.compute_rate).get(transport, 1.0)

    def _table(self, kernel: Kernel, pass_: str, kind: str) -> KernelTable:
        found = kernel.table(pass_, kind)
        if found is None:
            raise InputError(
                f"no costs of kernel {kernel.name!r} for {kind} blocks in the {pass_} pass; "
                f"{HOW_TO_MEASURE}"
            )
        return found
