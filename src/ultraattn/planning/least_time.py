"""Turns a mask over two layouts into a time that no plan there beats, however it splits heads.

`simulate.bound_s` knows what a plan's own search has proved of its traffic, for the head ranges and
the load cap of that plan. Here traffic is bounded for every plan that could be as fast as a known
one: such a plan takes at most its time T, so none of its ranks computes more than T times the peak
rate. That is a load cap, and under a load cap blocks must travel.

A note on the proof. Let f(c) be the most work that a rank can do on remote rows and columns of size
c, with what it owns for free (the rectangle bound of `ultraattn.planning.bounds`, without a cap),
and F the least concave function above f.

    heads    Cut into H heads, a rank that moves c_h for head h does at most f(H c_h) / H there. The
             sum over heads is at most F(c), since F is concave: splitting heads gains nothing on F.
             (Query heads that share a kv head each pay their part of it here, which is the least.)
    cover    All ranks together do all work W, each at most min(cap, F(c)). The cheapest way takes
             the steepest pieces of all F first, down to W.
    busiest  All traffic is received by someone, so the busiest of N ranks receives an N-th of it.

Nodes obey the same with a node in place of a rank: what is remote to a node enters it through its
NICs at least once, whatever is relayed or added up inside. Backward passes that keep inputs of
forward (`ultraattn.planning.keeping`) move less, and are no plans of this kind.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from ultraattn.chunks import Ints
from ultraattn.cluster.costs import Costs
from ultraattn.cluster.tables import Floats, Link
from ultraattn.planning.blocks import head_ranges
from ultraattn.planning.bounds import collected, flattened
from ultraattn.planning.ledger import TilingProblem
from ultraattn.planning.passes import Where
from ultraattn.planning.setting import Setting
from ultraattn.planning.sizes import sized_problem
from ultraattn.plans.check import Pass
from ultraattn.simulation.simulate import bound_s

LEVELS = 1024
"""Costs are rounded down to so many levels before the concave functions are drawn."""


def least_seconds(pass_: Pass, made: Setting, where: Where, known_s: float) -> float:
    """Seconds that no plan of a pass over these layouts beats; at most `known_s`.

    Args:
        pass_: forward or backward.
        made: the mask over its layouts.
        where: with costs.
        known_s: what some plan over these layouts takes.
    """
    assert where.costs is not None
    costs, ranks = where.costs, made.q_layout.ranks
    problem = made.problem
    least = bound_s(str(pass_), problem, ranks, costs)
    if made.grid.heads > 1 or not problem.visible_pairs or ranks == 1:
        return min(known_s, least)
    ranges, blocks = head_ranges(problem.heads, 1), made.blocks(1)
    tiling = sized_problem(pass_, problem, made.q_layout, made.kv_layout, blocks, ranges).tiling
    factor = costs.width_factor(problem.head_dim, problem.value_dim, problem.dtype)
    cap = int(known_s * costs.peak(str(pass_)) / factor) + 1
    bytes_ = traffic_bound(replace(tiling, cap=cap)) / ranks
    node = np.asarray(where.place.node_of, dtype=np.int64)
    nodes = int(node.max()) + 1
    links = [costs.inside] if nodes == 1 else [costs.inside, costs.between]
    # A rank may receive over links of both classes at once.
    least = max(least, 1 / sum(1 / _seconds(link, bytes_) for link in links) if bytes_ else 0.0)
    if bytes_:
        least = max(least, bound_s(str(pass_), problem, ranks, costs, bytes_ * 1e-9))
    if nodes > 1:
        least = max(least, _between_s(tiling, node, cap, costs))
    return min(known_s, least)


def _between_s(tiling: TilingProblem, node: Ints, cap: int, costs: Costs) -> float:
    """Seconds until the busiest node has received what it must, over all of its NICs."""
    nodes, per_node = int(node.max()) + 1, int(np.bincount(node).max())
    by_node = replace(
        tiling,
        ranks=nodes,
        q_owner=node[tiling.q_owner],
        kv_owner=node[tiling.kv_owner],
        cap=cap * per_node,
        node=None,
    )
    entering = traffic_bound(by_node) / nodes
    return _seconds(costs.between, entering / min(per_node, costs.nics_per_node))


def _seconds(link: Link, bytes_: float) -> float:
    """Seconds until messages of any size have brought so many bytes, one after another.

    The best rate of messages up to that size; between entries of the table the rate lies between
    theirs, and larger messages take longer than all of these bytes.
    """
    if bytes_ <= 0:
        return 0.0
    sizes = np.array([bytes_, *(size for size, _ in link.rows if size < bytes_)])
    return float((link.seconds(sizes) / sizes).min() * bytes_)


@dataclass(frozen=True)
class _Pieces:
    """Straight pieces of concave functions: size moved, and work gained by it."""

    cost: Floats
    gain: Floats


def traffic_bound(problem: TilingProblem) -> int:
    """The least size that all ranks together receive, whatever way heads are cut (module text).

    Args:
        problem: with one head range, and the load cap of all plans that count.
    """
    lines = flattened(problem)
    total, cap = problem.total_weight, problem.cap
    if not total or problem.ranks * cap <= total:
        cap = max(cap, -(-total // problem.ranks))
    row, column = lines.row_in + lines.row_out, lines.col_in + lines.col_out
    free, pieces = 0.0, []
    for rank in range(problem.ranks):
        gain = collected(lines, rank, total)
        a, b = np.ogrid[: gain.shape[0], : gain.shape[1]]
        points = _hull(a * row + b * column, gain)
        free += min(cap, float(points.gain[0]))
        pieces.append(_capped(points, cap))
    left = total - free
    if left <= 0:
        return 0
    cost, gain = (np.concatenate([getattr(p, n) for p in pieces]) for n in ("cost", "gain"))
    order = np.argsort(-gain / np.maximum(cost, 1e-9), kind="stable")
    filled = np.cumsum(gain[order])
    last = int(np.searchsorted(filled, left * (1 - 1e-12)))
    if last == len(order):
        return int(cost.sum())
    before = float(cost[order[:last]].sum())
    done = float(filled[last - 1]) if last else 0.0
    return int(before + float(cost[order[last]]) * (left - done) / float(gain[order[last]]))


def _hull(cost: Ints, gain: Ints) -> _Pieces:
    """The corners of the least concave function above points, from cost 0 on."""
    step = max(1, int(cost.max()) // LEVELS)
    best = np.zeros(int(cost.max()) // step + 1, dtype=np.int64)
    np.maximum.at(best, (cost // step).ravel(), gain.ravel())
    best = np.maximum.accumulate(best)
    corners = np.flatnonzero(np.diff(best, prepend=-1)).tolist()
    kept: list[int] = []
    for at in corners:
        while len(kept) > 1:
            p, q = kept[-2], kept[-1]
            if (best[q] - best[p]) * (at - q) > (best[at] - best[q]) * (q - p):
                break
            kept.pop()
        kept.append(at)
    index = np.array(kept, dtype=np.int64)
    return _Pieces((index * step).astype(np.float64), best[index].astype(np.float64))


def _capped(points: _Pieces, cap: int) -> _Pieces:
    """The pieces of a function between its corners, up to `cap`."""
    gain = np.minimum(points.gain, cap)
    rise, run = np.diff(points.gain), np.diff(points.cost)
    kept = np.diff(gain)
    share = np.divide(kept, rise, out=np.zeros_like(rise), where=rise > 0)
    return _Pieces(run * share, kept)
