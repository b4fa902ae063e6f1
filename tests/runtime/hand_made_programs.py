"""Programs written by hand, each around a kind of task that a plan may hold."""

from __future__ import annotations

from collections.abc import Sequence

from tests.plans.samples import with_number
from tests.runtime.hand_made import Hand, Parts
from ultraattn.plans import CollectiveOp, LocalOp, Pass, Plan, Program, Tensor


def row_launch(hand: Hand, rank: int, cols: dict[int, list[int]]) -> list[Parts]:
    """One launch a key chunk that is there, over the rank's own row."""
    return [
        hand.launch(rank, hand.blocks[rank, chunk], hand.rows(rank) + values)
        for chunk, values in cols.items()
        if hand.blocks[rank, chunk]
    ]


def send_home(hand: Hand, parts: Sequence[Parts], owners: Sequence[int]) -> list[Parts]:
    """Moves partial results that are another rank's to it, tensor by tensor."""
    home = []
    for part in parts:
        for key, number in part.items():
            rank = hand.value(number).rank
            one = {key: number}
            home.append(one if owners[key[1]] == rank else hand.move(one, owners[key[1]]))
    return home


def relay(plan: Plan, pass_: Pass) -> Program:
    """A ring: each rank passes on the keys and values that it received from the rank before."""
    hand, ranks = Hand(plan, pass_), plan.ranks
    held = {rank: {rank: hand.cols(rank)} for rank in range(ranks)}
    passing = {rank: hand.cols(rank) for rank in range(ranks)}
    for step in range(1, ranks):
        arrived = {}
        for rank in range(ranks):
            target = (rank + 1) % ranks
            (arrived[target],) = hand.send(passing[rank], target)
            held[target][(target - step) % ranks] = arrived[target]
        passing = arrived
    parts = [part for rank in range(ranks) for part in row_launch(hand, rank, held[rank])]
    hand.finish_rows(send_home(hand, parts, plan.kv_layout.owners))
    return hand.program()


def early_merge(plan: Plan, pass_: Pass) -> Program:
    """The last row is computed by the others; rank 1 merges for all and sends one partial on.

    Queries go out in one transfer with three targets.
    """
    hand, last = Hand(plan, pass_), plan.ranks - 1
    others = list(range(last))
    rows = hand.send(hand.rows(last), *others)
    row = {}
    for rank in others:
        row[rank] = hand.launch(rank, hand.blocks[last, rank], rows[rank] + hand.cols(rank))
    kept: list[Parts] = []
    collected: list[Parts] = []
    for rank in others:
        mine = {key: n for key, n in row[rank].items() if not key[0].by_key}
        kept.append({key: n for key, n in row[rank].items() if key[0].by_key})
        collected.append(mine if rank == 1 else hand.move(mine, 1))
    kept.append(hand.move(hand.merge(collected, 1), last))
    for rank in range(plan.ranks):
        for chunk in range(plan.ranks):
            if rank == last and chunk != last:
                continue
            cols = hand.cols(chunk)
            if chunk != rank:
                (cols,) = hand.send(cols, rank)
            kept += row_launch(hand, rank, {chunk: cols})
    hand.finish_rows(send_home(hand, kept, plan.q_layout.owners))
    return hand.program()


def stripes(plan: Plan, pass_: Pass, join: LocalOp | None) -> Program:
    """Keys of rank 0 reach rank 2 in two row ranges: straight, and by way of rank 1."""
    hand = Hand(plan, pass_)
    whole = len(plan.kv_layout.chunks[0])
    cut = whole // 3
    held = {rank: {rank: hand.cols(rank)} for rank in range(3)}
    (through,) = hand.send(hand.cols(0), 1)
    held[1][0] = through
    (top,) = hand.send(hand.cols(0), 2, row_start=0, row_stop=cut)
    (bottom,) = hand.send(through, 2, row_start=cut, row_stop=whole)
    if join is None:
        held[2][0] = top + bottom
    else:
        held[2][0] = [
            hand.local(join, 2, pair, hand.builder.copy(source, 2))
            for *pair, source in zip(top, bottom, hand.cols(0), strict=True)
        ]
    for rank in range(3):
        for chunk in range(3):
            if chunk not in held[rank]:
                (held[rank][chunk],) = hand.send(hand.cols(chunk), rank)
    parts = [part for rank in range(3) for part in row_launch(hand, rank, held[rank])]
    hand.finish_rows(send_home(hand, parts, plan.kv_layout.owners))
    return hand.program()


def partial_stripes(plan: Plan, pass_: Pass) -> Program:
    """Partial results travel in row ranges, and are merged piece by piece as they are."""
    hand = Hand(plan, pass_)
    parts: list[Parts] = []
    for rank in range(3):
        for chunk in range(3):
            if rank == chunk:
                parts += row_launch(hand, rank, {rank: hand.cols(rank)})
                continue
            (rows,) = hand.send(hand.rows(rank), chunk)
            made = hand.launch(chunk, hand.blocks[rank, chunk], rows + hand.cols(chunk))
            cut = len(plan.q_layout.chunks[rank]) // 2
            mine = [n for key, n in made.items() if not key[0].by_key]
            parts.append({key: n for key, n in made.items() if key[0].by_key})
            for part in ({"row_stop": cut}, {"row_start": cut}):
                (arrived,) = hand.send(mine, rank, **part)
                keys = [key for key in made if not key[0].by_key]
                parts.append(dict(zip(keys, arrived, strict=True)))
    covers: dict[tuple[Tensor, int], set[int]] = {key: set() for part in parts for key in part}
    for part in parts:
        for key, number in part.items():
            covers[key] |= set(hand.value(number).cover)
    finish_with(hand, parts, covers)
    return hand.program()


def finish_with(
    hand: Hand, parts: Sequence[Parts], covers: dict[tuple[Tensor, int], set[int]]
) -> None:
    """As `Hand.finish_rows`, for parts that share a cover in different rows."""
    groups = [("o", "lse")] if hand.pass_ is Pass.FORWARD else [("dq",), ("dk",), ("dv",)]
    for group in groups:
        for chunk, rank in enumerate(hand.plan.q_layout.owners):
            keys = [(Tensor(name), chunk) for name in group]
            reads = [part[key] for key in keys for part in parts if key in part]
            writes = [hand.output(*key, covers[key]) for key in keys]
            hand.builder.merge(rank, reads, writes, hand.key())


def all_gather(plan: Plan, pass_: Pass) -> Program:
    """Keys and values to all; in the backward pass their gradients back, summed on the way."""
    hand, ranks = Hand(plan, pass_), plan.ranks
    held = {rank: {rank: hand.cols(rank)} for rank in range(ranks)}
    writes = []
    for chunk in range(ranks):
        for rank in range(ranks):
            if rank != chunk:
                held[rank][chunk] = [hand.builder.copy(n, rank) for n in hand.cols(chunk)]
                writes += held[rank][chunk]
    reads = [n for chunk in range(ranks) for n in hand.cols(chunk)]
    hand.collective(CollectiveOp.ALL_GATHER, reads, writes)
    parts = [part for rank in range(ranks) for part in row_launch(hand, rank, held[rank])]
    if pass_ is Pass.FORWARD:
        hand.finish_rows(parts)
        return hand.program()
    scattered = [n for part in parts for key, n in part.items() if key[0].by_key]
    outputs = []
    for tensor in (Tensor.DK, Tensor.DV):
        for chunk in range(ranks):
            same = [part[tensor, chunk] for part in parts if (tensor, chunk) in part]
            outputs.append(hand.output(tensor, chunk, hand.cover(same)))
    hand.collective(CollectiveOp.REDUCE_SCATTER, scattered, outputs)
    for chunk, rank in enumerate(plan.q_layout.owners):
        mine = [part[Tensor.DQ, chunk] for part in parts if (Tensor.DQ, chunk) in part]
        output = hand.output(Tensor.DQ, chunk, hand.cover(mine))
        hand.builder.merge(rank, mine, [output], hand.key())
    return hand.program()


def columns(plan: Plan) -> Program:
    """Each rank computes its key chunk's column; O and LSE merge on their way to the owners."""
    hand, ranks = Hand(plan, Pass.FORWARD), plan.ranks
    rows = {rank: {rank: hand.rows(rank)} for rank in range(ranks)}
    for chunk in range(ranks):
        others = [rank for rank in range(ranks) if rank != chunk]
        for rank, arrived in zip(others, hand.send(hand.rows(chunk), *others), strict=True):
            rows[rank][chunk] = arrived
    parts = []
    for rank in range(ranks):
        blocks = [b for chunk in range(ranks) for b in hand.blocks[chunk, rank]]
        reads = [n for chunk in range(ranks) for n in rows[rank][chunk]]
        parts.append(hand.launch(rank, blocks, reads + hand.cols(rank)))
    outputs = [
        hand.output(tensor, chunk, hand.cover(part[tensor, chunk] for part in parts))
        for tensor in (Tensor.O, Tensor.LSE)
        for chunk in range(ranks)
    ]
    hand.collective(
        CollectiveOp.REDUCE_SCATTER, [n for part in parts for n in part.values()], outputs
    )
    return hand.program()


def broadcast(plan: Plan, pass_: Pass) -> Program:
    hand, ranks = Hand(plan, pass_), plan.ranks
    held = {rank: {rank: hand.cols(rank)} for rank in range(ranks)}
    for chunk in range(ranks):
        writes = []
        for rank in range(ranks):
            if rank != chunk:
                held[rank][chunk] = [hand.builder.copy(n, rank) for n in hand.cols(chunk)]
                writes += held[rank][chunk]
        hand.collective(CollectiveOp.BROADCAST, hand.cols(chunk), writes)
    parts = [part for rank in range(ranks) for part in row_launch(hand, rank, held[rank])]
    hand.finish_rows(send_home(hand, parts, plan.kv_layout.owners))
    return hand.program()


def head_parallel(plan: Plan, pass_: Pass) -> Program:
    """Sequence shards to head shards and back: rank r computes head range r of every block."""
    hand, ranks, p = Hand(plan, pass_), plan.ranks, plan.problem
    per = p.heads // ranks

    def spans(tensor: Tensor, rank: int) -> dict[str, int]:
        start, stop = rank * per, (rank + 1) * per
        if tensor.by_key:
            start, stop = p.kv_range(start, stop)
        return {"head_start": start, "head_stop": stop}

    reads = [n for chunk in range(ranks) for n in hand.rows(chunk) + hand.cols(chunk)]
    held = {
        rank: [hand.builder.copy(n, rank, **spans(hand.value(n).tensor, rank)) for n in reads]
        for rank in range(ranks)
    }
    hand.collective(CollectiveOp.ALL_TO_ALL, reads, [n for some in held.values() for n in some])
    partial, outputs = [], []
    for rank in range(ranks):
        blocks = [some[rank] for some in hand.blocks.values()]
        for (tensor, chunk), number in hand.launch(rank, blocks, held[rank]).items():
            partial.append(number)
            outputs.append(hand.output(tensor, chunk, hand.value(number).cover))
    hand.collective(CollectiveOp.ALL_TO_ALL, partial, outputs)
    return hand.program()


def cast(plan: Plan, *, wide: bool) -> Program:
    """Partial results of rank 1's row computed by rank 0; in the accumulation dtype where wide."""
    hand = Hand(plan, Pass.FORWARD)
    (rows,) = hand.send(hand.rows(1), 0)
    away = hand.launch(0, hand.blocks[1, 0], rows + hand.cols(0))
    if wide:
        for key in list(away):
            made = hand.builder.copy(away[key], 0, wide=True)
            away[key] = hand.local(LocalOp.CAST, 0, [away[key]], made)
    parts = [hand.move(away, 1)]
    (cols,) = hand.send(hand.cols(1), 0)
    parts += row_launch(hand, 0, {0: hand.cols(0), 1: cols})
    parts += row_launch(hand, 1, {1: hand.cols(1)})
    hand.finish_rows(parts)
    return hand.program()


def filled_elsewhere(plan: Plan, pass_: Pass) -> Program:
    """An empty partial result, made by a rank that has nothing to add, changes nothing."""
    hand = Hand(plan, pass_)
    held = {rank: {rank: hand.cols(rank)} for rank in range(2)}
    (held[0][1],), (held[1][0],) = hand.send(hand.cols(1), 0), hand.send(hand.cols(0), 1)
    parts = [part for rank in range(2) for part in row_launch(hand, rank, held[rank])]
    nothing: Parts = {}
    for tensor in pass_.results:
        nothing[tensor, 0] = hand.result(tensor, 0, 1, ())
    hand.builder.local(LocalOp.FILL, 1, [], nothing.values(), hand.key())
    hand.finish_rows(send_home(hand, [*parts, nothing], plan.kv_layout.owners))
    return hand.program()


def double_buffered(plan: Plan) -> Program:
    """The ring with two buffers a rank: a chunk comes in where the one before the last stood."""
    hand, ranks = Hand(plan, Pass.FORWARD), plan.ranks
    parts = {rank: row_launch(hand, rank, {rank: hand.cols(rank)}) for rank in range(ranks)}
    passing = {rank: hand.cols(rank) for rank in range(ranks)}
    arrivals: dict[int, list[list[int]]] = {rank: [] for rank in range(ranks)}
    used: dict[tuple[int, int], list[int]] = {}
    for step in range(1, ranks):
        arrived = {}
        for rank in range(ranks):
            target = (rank + 1) % ranks
            free = used.get((target, step - 2), [])
            (arrived[target],) = hand.send(passing[rank], target, after=free)
            used.setdefault((rank, step - 1), []).append(hand.last)
        for rank in range(ranks):
            arrivals[rank].append(arrived[rank])
            parts[rank] += row_launch(hand, rank, {(rank - step) % ranks: arrived[rank]})
            used.setdefault((rank, step), []).append(hand.last)
        passing = arrived
    hand.finish_rows([part for some in parts.values() for part in some])
    program = hand.program()
    for some in arrivals.values():
        for earlier, later in zip(some[:-2], some[2:], strict=True):
            for a, b in zip(earlier, later, strict=True):
                buffer = int(program.values.buffer[a])
                size = max(
                    int(program.buffers.bytes[int(program.values.buffer[n])]) for n in (a, b)
                )
                program = with_number(program, "buffers", "bytes", buffer, size)
                program = with_number(program, "values", "buffer", b, buffer)
    return program
