"""Turns an assignment of blocks to ranks into its ledger: what each rank computes, receives, sends.

For rank g: A remote rows and B remote columns it needs, C pairs (own row, other rank) and D pairs
(own column, other rank) that need it (design, Ledger):

    recv = A row_in + B col_in + C row_out + D col_out
    send = C row_in + D col_in + A row_out + B col_out

A row is (head range, query chunk); a column is (kv segment, key chunk).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt

from ultraattn.errors import InputError

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

NO_RANK = -1

# (largest send or receive, total traffic, largest load): smaller is better, compared in this order.
Value = tuple[int, int, int]


@dataclass(frozen=True, eq=False)
class TilingProblem:
    """Blocks to place on ranks, and what it costs to bring rows and columns to them.

    Attributes:
        ranks: number of ranks N.
        weight: work of block (head range, query chunk, key chunk); int64 (G, Pq, Pk), 0: no block.
        q_owner: rank that owns each query chunk; int64 (Pq,).
        kv_owner: rank that owns each key chunk; int64 (Pk,).
        row_in, row_out: size moved to / from a rank that needs row (g, i); int64 (G, Pq).
        col_in, col_out: size moved to / from a rank that needs column (s, j); int64 (S, Pk).
        segments: for each head range the kv segments it reads; ranges may share a segment, which a
            rank then fetches once.
        cap: largest load of a rank, in units of `weight`.
        node: node of each rank, int64 (ranks,), or None for one node.
    """

    ranks: int
    weight: Ints
    q_owner: Ints
    kv_owner: Ints
    row_in: Ints
    row_out: Ints
    col_in: Ints
    col_out: Ints
    segments: tuple[tuple[int, ...], ...]
    cap: int
    node: Ints | None = field(default=None)

    def __post_init__(self) -> None:
        if self.ranks < 1:
            raise InputError(f"ranks={self.ranks}: expected at least 1")
        if self.weight.ndim != 3:
            raise InputError(
                f"weight has shape {self.weight.shape}: expected (head ranges, query chunks, "
                "key chunks)"
            )
        ranges, rows, columns = self.weight.shape
        count = self.col_in.shape[0] if self.col_in.ndim == 2 else -1
        for name, array, shape in (
            ("q_owner", self.q_owner, (rows,)),
            ("kv_owner", self.kv_owner, (columns,)),
            ("row_in", self.row_in, (ranges, rows)),
            ("row_out", self.row_out, (ranges, rows)),
            ("col_in", self.col_in, (count, columns)),
            ("col_out", self.col_out, (count, columns)),
        ):
            if array.shape != shape:
                raise InputError(f"{name} has shape {array.shape}: expected {shape}")
            if array.size and int(array.min()) < 0:
                raise InputError(f"{name} holds {int(array.min())}: expected 0 or more")
            if name.endswith("owner") and array.size and int(array.max()) >= self.ranks:
                raise InputError(
                    f"{name} holds rank {int(array.max())}: expected 0 to {self.ranks - 1}"
                )
        if self.weight.size and int(self.weight.min()) < 0:
            raise InputError(f"weight holds {int(self.weight.min())}: expected 0 or more")
        if len(self.segments) != ranges:
            raise InputError(
                f"segments of {len(self.segments)} head ranges given for {ranges}: expected one "
                "tuple a head range"
            )
        if any(not 0 <= s < count for read in self.segments for s in read):
            raise InputError(f"segments {self.segments}: expected numbers 0 to {count - 1}")
        if self.node is not None and self.node.shape != (self.ranks,):
            raise InputError(f"node has shape {self.node.shape}: expected ({self.ranks},)")

    def with_cap(self, cap: int) -> TilingProblem:
        """The same problem under another load cap."""
        return replace(self, cap=cap)

    @cached_property
    def total_weight(self) -> int:
        """Sum of all block weights."""
        return int(self.weight.sum())

    @cached_property
    def blocks(self) -> Ints:
        """(head range, query chunk, key chunk) of every block: int64 (blocks, 3), in that order."""
        return np.argwhere(self.weight > 0).astype(np.int64)

    @cached_property
    def block_weight(self) -> Ints:
        """Weight of every block, in the order of `blocks`: int64 (blocks,)."""
        return self.weight[self.weight > 0]

    @cached_property
    def reads(self) -> Bools:
        """Which kv segments a head range reads: bool (G, S)."""
        read = np.zeros((len(self.segments), self.col_in.shape[0]), dtype=np.bool_)
        for index, segments in enumerate(self.segments):
            read[index, list(segments)] = True
        return read

    @cached_property
    def size_unit(self) -> int:
        """Greatest common divisor of all sizes: every volume is a multiple of it (1 if none)."""
        sizes = [self.row_in, self.row_out, self.col_in, self.col_out]
        return math.gcd(*(int(v) for a in sizes for v in np.unique(a))) or 1

    def spread(self, ranks: Ints) -> Ints:
        """Ranks in the order of `blocks`, as an assignment: int64 (G, Pq, Pk), -1: no block."""
        assignment = np.full(self.weight.shape, NO_RANK, dtype=np.int64)
        assignment[self.weight > 0] = ranks
        return assignment


@dataclass(frozen=True, eq=False)
class Ledger:
    """What each rank needs, serves, moves and computes: every field int64 (ranks,)."""

    remote_rows: Ints
    remote_columns: Ints
    row_requests: Ints
    column_requests: Ints
    recv: Ints
    send: Ints
    load: Ints

    @property
    def max_volume(self) -> int:
        """The largest send or receive of a rank."""
        return int(max(self.recv.max(), self.send.max()))

    @property
    def total(self) -> int:
        """All traffic, each transfer counted once."""
        return int(self.recv.sum())

    @property
    def max_load(self) -> int:
        """The largest load of a rank."""
        return int(self.load.max())

    @property
    def value(self) -> Value:
        """The lexicographic objective: (max_volume, total, max_load)."""
        return self.max_volume, self.total, self.max_load

    def table(self) -> list[tuple[int, int, int, int, int, int]]:
        """Rows (A, B, C, D, recv, send), one a rank."""
        columns = (
            self.remote_rows,
            self.remote_columns,
            self.row_requests,
            self.column_requests,
            self.recv,
            self.send,
        )
        return [tuple(int(c[g]) for c in columns) for g in range(self.load.size)]  # type: ignore[misc]


def check_assignment(problem: TilingProblem, assignment: Ints) -> None:
    """Raises InputError unless every block, and nothing else, is on exactly one rank."""
    if assignment.shape != problem.weight.shape:
        raise InputError(
            f"assignment has shape {assignment.shape}: expected {problem.weight.shape}"
        )
    wrong = (problem.weight > 0) != (assignment >= 0)
    if wrong.any() or int(assignment.max(initial=NO_RANK)) >= problem.ranks:
        where = np.argwhere(wrong | (assignment >= problem.ranks))[0].tolist()
        raise InputError(
            f"block {tuple(where)} has weight {int(problem.weight[tuple(where)])} and rank "
            f"{int(assignment[tuple(where)])}: expected a rank 0 to {problem.ranks - 1} for every "
            f"block of positive weight and {NO_RANK} elsewhere"
        )


def needs(problem: TilingProblem, assignment: Ints) -> tuple[Bools, Bools]:
    """Who needs what: bool (ranks, G, Pq) for rows, bool (ranks, S, Pk) for columns."""
    ranges, rows, columns = problem.weight.shape
    block, rank = problem.blocks, assignment[problem.weight > 0]
    row = np.zeros((problem.ranks, ranges, rows), dtype=np.bool_)
    row[rank, block[:, 0], block[:, 1]] = True
    reader = np.zeros((problem.ranks, ranges, columns), dtype=np.bool_)
    reader[rank, block[:, 0], block[:, 2]] = True
    column = np.zeros((problem.ranks, problem.col_in.shape[0], columns), dtype=np.bool_)
    for index, segments in enumerate(problem.segments):
        for segment in segments:
            column[:, segment] |= reader[:, index]
    return row, column


def evaluate(problem: TilingProblem, assignment: Ints) -> Ledger:
    """The ledger of `assignment`, int64 (G, Pq, Pk), -1 where there is no block (design, Ledger).

    Raises:
        InputError: a block without a rank, a rank out of range, or a rank where no block is.
    """
    check_assignment(problem, assignment)
    row, column = needs(problem, assignment)
    every = np.arange(problem.ranks)
    row_remote = row & (problem.q_owner[None, None, :] != every[:, None, None])
    column_remote = column & (problem.kv_owner[None, None, :] != every[:, None, None])

    def take(remote: Bools, size: Ints) -> Ints:
        return np.asarray((remote * size[None]).sum(axis=(1, 2)), dtype=np.int64)

    def serve(remote: Bools, size: Ints, owner: Ints) -> Ints:
        served = np.zeros(problem.ranks, dtype=np.int64)
        np.add.at(served, owner, (remote.sum(axis=0) * size).sum(axis=0))
        return served

    ones_row, ones_column = np.ones_like(problem.row_in), np.ones_like(problem.col_in)
    load = np.zeros(problem.ranks, dtype=np.int64)
    np.add.at(load, assignment[problem.weight > 0], problem.block_weight)
    return Ledger(
        remote_rows=take(row_remote, ones_row),
        remote_columns=take(column_remote, ones_column),
        row_requests=serve(row_remote, ones_row, problem.q_owner),
        column_requests=serve(column_remote, ones_column, problem.kv_owner),
        recv=take(row_remote, problem.row_in)
        + take(column_remote, problem.col_in)
        + serve(row_remote, problem.row_out, problem.q_owner)
        + serve(column_remote, problem.col_out, problem.kv_owner),
        send=serve(row_remote, problem.row_in, problem.q_owner)
        + serve(column_remote, problem.col_in, problem.kv_owner)
        + take(row_remote, problem.row_out)
        + take(column_remote, problem.col_out),
        load=load,
    )
