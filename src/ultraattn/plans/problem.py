"""States what is to be computed: the mask, the lengths, the heads, the numbers."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

from ultraattn.errors import InputError
from ultraattn.plans.tensors import Tensor, Widths


@dataclass(frozen=True)
class Problem:
    """One attention, as every reader of a plan sees it.

    `mask` is the mask's saved form (see `ultraattn.masks.from_spec`), or None for a mask that
    cannot be saved (a Python function): then `mask_digest` alone identifies it, and the mask is
    handed over again at run time. `visible_pairs` counts (query, key, query head) triples that the
    mask lets through, so that a lost block cannot go unnoticed.
    """

    mask: str
    """Canonical JSON of the mask's saved form; empty when it cannot be saved."""
    mask_label: str
    mask_digest: str
    """SHA-256 of the mask's block grid over the plan's chunks."""
    visible_pairs: int
    q_len: int
    kv_len: int
    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    dtype: str
    scale: float
    softcap: float | None = None
    sink: bool = False
    deterministic: bool = False

    def __post_init__(self) -> None:
        if min(self.q_len, self.kv_len) < 0 or min(self.heads, self.kv_heads) < 1:
            raise InputError(
                f"queries {self.q_len}, keys {self.kv_len}, heads {self.heads}, kv_heads "
                f"{self.kv_heads}: expected lengths of at least 0 and at least one head"
            )
        if self.heads % self.kv_heads:
            raise InputError(
                f"heads {self.heads} is not a multiple of kv_heads {self.kv_heads}: each key/value "
                "head serves the same number of query heads; pass kv_heads that divides heads"
            )
        if min(self.head_dim, self.value_dim) < 1:
            raise InputError(
                f"head_dim {self.head_dim}, value_dim {self.value_dim}: expected at least 1"
            )
        if not (math.isfinite(self.scale)):
            raise InputError(f"scale {self.scale}: expected a finite number")
        if self.softcap is not None or self.sink:
            raise InputError(
                "softcap and attention sinks are reserved in the plan format and not supported "
                "yet; leave softcap=None and sink=False"
            )
        _ = self.widths

    @cached_property
    def widths(self) -> Widths:
        """Row widths and element sizes of every tensor."""
        return Widths(self.head_dim, self.value_dim, self.dtype)

    @cached_property
    def group(self) -> int:
        """Query heads that share one key/value head."""
        return self.heads // self.kv_heads

    def kv_range(self, start: int, stop: int) -> tuple[int, int]:
        """The key/value heads that query heads [start, stop) read."""
        return start // self.group, -(-stop // self.group)

    def heads_of(self, tensor: Tensor) -> int:
        """Heads of a tensor: key/value heads for K, V and their gradients, else query heads."""
        return self.kv_heads if tensor.by_key else self.heads
