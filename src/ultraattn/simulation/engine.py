"""Runs jobs in simulated time: precedence, shared NICs, kernels slowed by transfers, shared cores.

Time moves from event to event. A job starts when all jobs before it have stopped and its host has
launched it. A kernel's rate falls while its rank sends or receives, and where more ranks compute
than there are cores. A message first takes its start-up, then its bytes at the rate
1 / (messages that share the fuller of its two NICs).
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ultraattn.cluster.costs import Costs
from ultraattn.cluster.tables import Floats
from ultraattn.simulation.messages import INSIDE, Messages
from ultraattn.simulation.work import Jobs

READY, JOIN, STOP = range(3)


@dataclass
class _Running:
    """A job that runs: what is left of it, in seconds alone, and how fast it goes."""

    left_s: float
    since_s: float
    rate: float
    version: int = 0


class Engine:
    """One run. `run` gives when each job starts and stops.

    Args:
        jobs: what to run.
        costs: rates beside transfers, NICs, cores.
        nodes: the node of each rank.
    """

    def __init__(self, jobs: Jobs, costs: Costs, nodes: Sequence[int]) -> None:
        self._jobs = jobs
        self._nodes = list(nodes)
        count = len(jobs.seconds)
        self._seconds: list[float] = jobs.seconds.tolist()
        self._rank: list[int] = jobs.rank.tolist()
        self._start = [0.0] * count
        self._stop = [0.0] * count
        self._running: dict[int, _Running] = {}
        self._events: list[tuple[float, int, int, int]] = []
        self._beside = (
            costs.rate_beside(costs.inside.transport),
            costs.rate_beside(costs.between.transport),
        )
        self._cores = costs.cores_per_node
        ranks = len(self._nodes)
        per_node = max((self._nodes.count(n) for n in set(self._nodes)), default=0)
        self._slows = min(self._beside) < 1
        self._shares_nics = per_node > costs.nics_per_node
        self._shares_cores = 0 < self._cores < per_node
        # By rank: messages that touch it, by class of link; the kernel it runs, or -1.
        self._touching = [[0, 0] for _ in range(ranks)]
        self._kernel = [-1] * ranks
        self._computing: list[dict[int, None]] = [
            {} for _ in range(max(self._nodes, default=0) + 1)
        ]
        self._ends = _ends(jobs.messages) if self._slows or self._shares_nics else {}
        self._nics = _nics(jobs.messages, self._nodes, costs) if self._shares_nics else {}
        self._on_nic: dict[int, dict[int, None]] = {}

    def run(self) -> tuple[Floats, Floats]:
        """Start and stop of every job, in seconds: (jobs,) each."""
        jobs, count = self._jobs, len(self._seconds)
        order = np.argsort(jobs.before, kind="stable")
        later: list[int] = jobs.after[order].tolist()
        cuts: list[int] = np.searchsorted(jobs.before[order], np.arange(count + 1)).tolist()
        waiting: list[int] = np.bincount(jobs.after, minlength=count).tolist()
        release: list[float] = jobs.release_s.tolist()
        events, start, stop = self._events, self._start, self._stop
        simple = [not self._watched(job) for job in range(count)]
        for job in range(count):
            if not waiting[job]:
                heapq.heappush(events, (release[job], READY, job, 0))
        while events:
            now, kind, job, version = heapq.heappop(events)
            if kind == READY:
                start[job] = now
                if simple[job]:
                    heapq.heappush(events, (now + self._seconds[job], STOP, job, 0))
                else:
                    self._begin(job, now)
                continue
            if kind == JOIN:
                self._join(job, now)
                continue
            if not simple[job]:
                running = self._running.get(job)
                if running is None or running.version != version:
                    continue
                self._end(job, now)
            stop[job] = now
            for at in range(cuts[job], cuts[job + 1]):
                other = later[at]
                waiting[other] -= 1
                if not waiting[other]:
                    ready = release[other] if release[other] > now else now
                    heapq.heappush(events, (ready, READY, other, 0))
        return np.array(start), np.array(stop)

    def _watched(self, job: int) -> bool:
        """Whether its rate may change, or it changes the rate of others."""
        if self._rank[job] >= 0:
            return self._slows or self._shares_cores
        return job in self._ends

    def _begin(self, job: int, now: float) -> None:
        rank = self._rank[job]
        if rank >= 0:
            self._kernel[rank] = job
            self._running[job] = _Running(self._seconds[job], now, 0.0)
            if self._shares_cores:
                self._computing[self._nodes[rank]][rank] = None
                self._retime_node(self._nodes[rank], now)
            else:
                self._retime(rank, now)
            return
        if self._slows:
            self._touch(job, 1, now)
        if job in self._nics:
            start_up = float(self._jobs.start_up_s[job])
            self._running[job] = _Running(self._seconds[job] - start_up, now + start_up, 0.0)
            heapq.heappush(self._events, (now + start_up, JOIN, job, 0))
            return
        self._running[job] = _Running(self._seconds[job], now, 1.0)
        heapq.heappush(self._events, (now + self._seconds[job], STOP, job, 0))

    def _end(self, job: int, now: float) -> None:
        del self._running[job]
        rank = self._rank[job]
        if rank >= 0:
            self._kernel[rank] = -1
            if self._shares_cores:
                del self._computing[self._nodes[rank]][rank]
                self._retime_node(self._nodes[rank], now)
            return
        if self._slows:
            self._touch(job, -1, now)
        if job in self._nics:
            for nic in self._nics[job]:
                del self._on_nic[nic][job]
            self._share(job, now)

    # Kernels

    def _touch(self, job: int, change: int, now: float) -> None:
        for rank, far in self._ends[job]:
            self._touching[rank][far] += change
            if self._kernel[rank] >= 0:
                self._retime(rank, now)

    def _retime_node(self, node: int, now: float) -> None:
        for rank in self._computing[node]:
            self._retime(rank, now)

    def _retime(self, rank: int, now: float) -> None:
        inside, between = self._touching[rank]
        rate = min(self._beside[0] if inside else 1.0, self._beside[1] if between else 1.0)
        if self._shares_cores:
            rate *= min(1.0, self._cores / len(self._computing[self._nodes[rank]]))
        self._set_rate(self._kernel[rank], rate, now)

    def _set_rate(self, job: int, rate: float, now: float) -> None:
        running = self._running[job]
        if running.rate == rate:
            return
        running.left_s = max(0.0, running.left_s - (now - running.since_s) * running.rate)
        running.since_s, running.rate = now, rate
        running.version += 1
        event = (now + running.left_s / rate, STOP, job, running.version)
        heapq.heappush(self._events, event)

    # NICs

    def _join(self, job: int, now: float) -> None:
        for nic in self._nics[job]:
            self._on_nic.setdefault(nic, {})[job] = None
        self._share(job, now)

    def _share(self, job: int, now: float) -> None:
        """Gives every message that meets `job` on a NIC its share."""
        met: dict[int, None] = {}
        for nic in self._nics[job]:
            met.update(self._on_nic[nic])
        for other in met:
            crowd = max(len(self._on_nic[nic]) for nic in self._nics[other])
            self._set_rate(other, 1.0 / crowd, now)


def _ends(messages: Messages) -> dict[int, list[tuple[int, int]]]:
    """For each message task, the (rank, class of link) pairs that it touches, each once."""
    out: dict[int, dict[tuple[int, int], None]] = {}
    columns = (messages.task, messages.source, messages.target, messages.far)
    for task, source, target, far in zip(*(c.tolist() for c in columns), strict=True):
        found = out.setdefault(task, {})
        found[source, far] = found[target, far] = None
    return {task: list(found) for task, found in out.items()}


def _nics(messages: Messages, nodes: Sequence[int], costs: Costs) -> dict[int, tuple[int, ...]]:
    """For each message task between nodes, the NIC directions it uses: out even, in odd."""
    place: dict[int, int] = {}
    seen: dict[int, int] = {}
    for rank, node in enumerate(nodes):
        local = seen.get(node, 0)
        seen[node] = local + 1
        place[rank] = node * costs.nics_per_node + local % costs.nics_per_node
    out: dict[int, dict[int, None]] = {}
    columns = (messages.task, messages.source, messages.target, messages.far)
    for task, source, target, far in zip(*(c.tolist() for c in columns), strict=True):
        if far != INSIDE:
            found = out.setdefault(task, {})
            found[2 * place[source]] = found[2 * place[target] + 1] = None
    return {task: tuple(found) for task, found in out.items()}
