"""Predicts a plan: turns its programs and a cluster's costs into makespans and timelines."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ultraattn.cluster.cluster import Cluster
from ultraattn.cluster.costs import Costs
from ultraattn.cluster.tables import Floats
from ultraattn.errors import InputError
from ultraattn.plans.check import Pass
from ultraattn.plans.layout import Layout
from ultraattn.plans.plan import Place, Plan
from ultraattn.plans.problem import Problem
from ultraattn.plans.program import Program
from ultraattn.simulation.engine import Engine
from ultraattn.simulation.result import Idle, PassSimulation, Simulation, Timeline
from ultraattn.simulation.work import Jobs, jobs_of


def simulate(
    plan: Plan, cluster: Cluster | None = None, *, graph: bool = True, kernel: str | None = None
) -> Simulation:
    """Predicts both passes of a plan.

    Args:
        plan: any plan, a rival's too.
        cluster: where it would run; the preset that the plan names unless given.
        graph: whether a captured graph is replayed, so that the host launches nothing. Of no
            effect on clusters whose host computes.
        kernel: the kernel of all tiles; the fastest for each unless given.

    Raises:
        InputError: the cluster is smaller than the plan, is no preset, or its costs lack an entry
            that the plan needs (names it, and how to measure it).
    """
    costs = _fitting(plan.place, cluster).known_costs
    passes = [
        simulate_pass(
            pass_,
            plan.problem,
            plan.q_layout,
            plan.kv_layout,
            plan.place.node_of,
            plan.pass_plan(pass_).program,
            costs,
            least_bytes=least_bytes(plan, pass_),
            graph=graph,
            kernel=kernel,
        )
        for pass_ in Pass
    ]
    return Simulation(cluster.name if cluster else plan.place.cluster, *passes)


def simulate_pass(
    pass_: Pass,
    problem: Problem,
    q_layout: Layout,
    kv_layout: Layout,
    nodes: Sequence[int],
    program: Program,
    costs: Costs,
    *,
    least_bytes: float = 0.0,
    graph: bool = True,
    kernel: str | None = None,
) -> PassSimulation:
    """Predicts one pass; for candidates that are no plan yet.

    Args:
        pass_: forward or backward.
        problem: shapes and dtype.
        q_layout: sizes of the query chunks.
        kv_layout: sizes of the key chunks.
        nodes: the node of each rank.
        program: what runs.
        costs: of the cluster.
        least_bytes: the least that the busiest rank of any plan moves, as far as it is known.
        graph: see `simulate`.
        kernel: see `simulate`.
    """
    jobs = jobs_of(
        str(pass_), problem, q_layout, kv_layout, nodes, program, costs, graph=graph, kernel=kernel
    )
    start, stop = Engine(jobs, costs, nodes).run()
    makespan = float(stop.max(initial=0.0))
    busy, slowed, idle = _by_rank(jobs, start, stop, makespan, len(nodes))
    streams = program.streams
    lengths = np.diff(streams.tasks.offsets)
    task = streams.tasks.items
    return PassSimulation(
        makespan_s=makespan,
        bound_s=bound_s(str(pass_), problem, len(nodes), costs, least_bytes),
        timeline=Timeline(
            task,
            np.repeat(streams.rank, lengths),
            np.repeat(streams.kind, lengths),
            start[task],
            stop[task],
        ),
        busy_s=busy,
        slowed_s=slowed,
        idle_s=idle,
    )


def bound_s(
    pass_: str, problem: Problem, ranks: int, costs: Costs, least_bytes: float = 0.0
) -> float:
    """max(work / peak, least traffic / bandwidth, one message + one launch), in seconds.

    Work is visible pairs times heads, spread evenly over the ranks at the best rate in the tables;
    traffic goes at the rate of the faster class of links. Work takes a launch of the shortest
    start at least; where anything must move, a message comes before the launch that reads it or
    after the one that makes it, so the shortest start of a message adds to that.
    """
    if not problem.visible_pairs:
        return 0.0
    factor = costs.width_factor(problem.head_dim, problem.value_dim, problem.dtype)
    work = problem.visible_pairs * factor / ranks / costs.peak(pass_)
    links = costs.inside, costs.between
    starts = min((kernel.start_s(pass_) for kernel in costs.kernels), default=0.0)
    if least_bytes > 0:
        starts += min(link.start_s for link in links)
    return max(work, least_bytes / max(link.bytes_per_s for link in links), starts)


def least_bytes(plan: Plan, pass_: Pass) -> float:
    """The bound on traffic that the plan knows, in bytes; 0 where it is in other units."""
    bounds = plan.pass_plan(pass_).bounds
    return bounds.lower_bound if bounds.units == "bytes" else 0.0


def _fitting(place: Place, cluster: Cluster | None) -> Cluster:
    if cluster is None:
        return Cluster.load(place.cluster).resize(place.nodes, place.gpus_per_node)
    if cluster.nodes < place.nodes or cluster.gpus_per_node < place.gpus_per_node:
        raise InputError(
            f"a plan for {place.nodes} nodes x {place.gpus_per_node} ranks on cluster "
            f"{cluster.name!r} of {cluster.nodes} x {cluster.gpus_per_node}: the cluster is "
            f"smaller; pass cluster.resize({place.nodes}, {place.gpus_per_node}), or plan for it"
        )
    return cluster


def _by_rank(
    jobs: Jobs, start: Floats, stop: Floats, makespan: float, ranks: int
) -> tuple[Floats, Floats, Floats]:
    """Busy seconds, what of them is lost to others, and idle seconds by cause."""
    on = np.flatnonzero(jobs.rank >= 0)
    on = on[np.lexsort((on, stop[on], start[on], jobs.rank[on]))]
    rank = jobs.rank[on]

    def total(seconds: Floats) -> Floats:
        return np.bincount(rank, weights=seconds, minlength=ranks).astype(np.float64)

    busy, alone = total(stop[on] - start[on]), total(jobs.seconds[on])
    first = np.concatenate(([True], rank[1:] != rank[:-1])) if len(on) else np.zeros(0, bool)
    before = np.where(first, 0.0, np.concatenate(([0.0], stop[on][:-1]))[: len(on)])
    gap = np.maximum(start[on] - before, 0.0)
    cause = _last_before(jobs, stop)[on]
    message = (cause >= 0) & (jobs.rank[cause] < 0)
    under_way = np.where(message, np.minimum(gap, np.maximum(start[on] - start[cause], 0.0)), 0.0)
    peer = np.where(message, gap - under_way, 0.0)

    idle = {
        Idle.PEER: total(peer),
        Idle.TRANSFER: total(under_way),
        Idle.HOST: total(np.where(message, 0.0, gap)),
    }
    idle[Idle.DONE] = np.maximum(makespan - busy - sum(idle.values()), 0.0)
    return busy, np.maximum(busy - alone, 0.0), np.stack([idle[cause] for cause in Idle])


def _last_before(jobs: Jobs, stop: Floats) -> np.typing.NDArray[np.int64]:
    """The job that stops last among those before each job; -1 where there is none."""
    out = np.full(len(stop), -1, dtype=np.int64)
    order = np.lexsort((jobs.before, stop[jobs.before]))
    out[jobs.after[order]] = jobs.before[order]
    return out
