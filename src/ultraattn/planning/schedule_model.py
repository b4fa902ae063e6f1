"""States a schedule's jobs and its outcome: what takes how long, on which streams, after what.

A note on streams. A job occupies all its streams at once, from its start to its end, and a stream
does one job at a time (the worked example of the article's figure 5(c), 50 units long):

    receive    |KV3.|Q3........|
    compute    |A0..|A1........|A2..|
    send                            |O3..|

Durations are integers, so that comparisons are exact and "proved" has a meaning: it speaks of the
integers, a quantum of 1/256 of the shortest task each (`to_integer_durations`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ultraattn.chunks import Ints
from ultraattn.errors import InputError
from ultraattn.plans.columns import Ragged, column

HORIZON = 2**31 - 1
"""Every start and end of a schedule is below it."""

STEPS_OF_SHORTEST = 256
"""Quanta that the shortest task lasts."""


@dataclass(frozen=True, eq=False)
class Jobs:
    """What is to be scheduled.

    Raises:
        InputError: a job without a stream, a duration below 1, a sum of durations beyond the
            horizon, a dependency on no job, or a cycle, whose jobs are named.
    """

    duration: Ints
    """(jobs,), at least 1."""
    streams: Ragged
    """For each job, the streams that it occupies at once."""
    depends_on: Ragged
    """For each job, the jobs that must have ended."""
    names: tuple[str, ...] = ()
    """For messages; one a job, or none."""

    def __post_init__(self) -> None:
        count = len(self.duration)
        if len(self.streams) != count or len(self.depends_on) != count:
            raise InputError(
                f"{count} durations, streams of {len(self.streams)} jobs, dependencies of "
                f"{len(self.depends_on)}: give each job all three"
            )
        if self.names and len(self.names) != count:
            raise InputError(
                f"{len(self.names)} names for {count} jobs: give each job one, or none"
            )
        for job in np.flatnonzero(self.duration < 1).tolist():
            raise InputError(
                f"{self.name(job)} lasts {int(self.duration[job])}: expected at least 1 (see "
                "to_integer_durations)"
            )
        if int(self.duration.sum()) > HORIZON:
            raise InputError(
                f"durations add up to {int(self.duration.sum())}, beyond the horizon {HORIZON}; "
                "use a coarser quantum (see to_integer_durations)"
            )
        for job in np.flatnonzero(np.diff(self.streams.offsets) == 0).tolist():
            raise InputError(
                f"{self.name(job)} has no stream: every job occupies at least one, so name the "
                "stream of its rank and link"
            )
        if len(self.streams.items) and int(self.streams.items.min()) < 0:
            raise InputError("streams are numbered from 0")
        wrong = (self.depends_on.items < 0) | (self.depends_on.items >= count)
        if wrong.any():
            given = int(self.depends_on.items[wrong][0])
            raise InputError(f"a job depends on job {given}; jobs are 0 to {count - 1}")
        if len(self.order) < count:
            cycle = " waits for ".join(self.name(job) for job in self._cycle())
            raise InputError(f"the graph has a cycle: {cycle}; remove one of these dependencies")

    @staticmethod
    def of(
        durations: Sequence[int],
        streams: Sequence[Sequence[int]],
        depends_on: Sequence[Sequence[int]],
        names: Sequence[str] = (),
    ) -> Jobs:
        """From plain lists, one entry a job."""
        return Jobs(column(durations), Ragged.of(streams), Ragged.of(depends_on), tuple(names))

    def __len__(self) -> int:
        return len(self.duration)

    @property
    def stream_count(self) -> int:
        """Streams, used or not."""
        return int(self.streams.items.max(initial=-1)) + 1

    def name(self, job: int) -> str:
        """A job, for messages."""
        return self.names[job] if self.names else f"job {job}"

    @cached_property
    def followers(self) -> Ragged:
        """For each job, the jobs that depend on it, ascending."""
        rows: list[list[int]] = [[] for _ in range(len(self))]
        for job, before in enumerate(self.depends_on.rows()):
            for other in before:
                rows[other].append(job)
        return Ragged.of(rows)

    @cached_property
    def order(self) -> tuple[int, ...]:
        """Jobs breadth first, each after what it depends on; those of a cycle are left out."""
        waiting = np.diff(self.depends_on.offsets).tolist()
        followers = self.followers.rows()
        queue = [job for job, count in enumerate(waiting) if not count]
        for job in queue:
            for later in followers[job]:
                waiting[later] -= 1
                if not waiting[later]:
                    queue.append(later)
        return tuple(queue)

    def _cycle(self) -> list[int]:
        """A cycle, each job followed by one that it waits for; the first comes again at the end."""
        stuck = set(range(len(self))) - set(self.order)
        before = self.depends_on.rows()
        path: list[int] = [min(stuck)]
        while True:
            following = next(job for job in before[path[-1]] if job in stuck)
            if following in path:
                return [*path[path.index(following) :], following]
            path.append(following)

    def reversed(self) -> Jobs:
        """The same jobs with time running backwards."""
        return Jobs(self.duration, self.streams, self.followers, self.names)


@dataclass(frozen=True, eq=False)
class Schedule:
    """When each job starts, and how good that is."""

    start: Ints
    """(jobs,)."""
    makespan: int
    """The end of the last job."""
    lower_bound: int
    """No schedule of these jobs is shorter."""
    proved: bool
    """Whether the makespan is the least possible, for these integer durations."""
    origin: str
    """What found it."""

    @property
    def gap(self) -> float:
        """``(makespan - lower_bound) / makespan``; 0 where proved or nothing runs."""
        if self.proved or not self.makespan:
            return 0.0
        return (self.makespan - self.lower_bound) / self.makespan


def to_integer_durations(seconds: Sequence[float]) -> tuple[Ints, float]:
    """Durations as integers, and the quantum in seconds that they count.

    The quantum is 1/256 of the shortest task, or coarser where the sum of all would otherwise pass
    the horizon. A task of no length lasts one quantum.

    >>> to_integer_durations([1.0, 2.5])
    (array([256, 640]), 0.00390625)
    """
    given = np.asarray(seconds, dtype=np.float64)
    if not np.isfinite(given).all() or (given < 0).any():
        raise InputError(
            f"durations {seconds!r}: expected finite numbers of seconds, at least 0; check the "
            "costs of the cluster"
        )
    positive = given[given > 0]
    if not positive.size:
        return np.ones(len(given), dtype=np.int64), 1.0
    quantum = float(positive.min()) / STEPS_OF_SHORTEST
    room = HORIZON - 2 * len(given)  # each duration rounds up by less than one
    quantum = max(quantum, math.fsum(given.tolist()) / room)
    counted: Ints = np.maximum(1, np.rint(given / quantum)).astype(np.int64)
    return counted, quantum


def check_schedule(jobs: Jobs, schedule: Schedule) -> None:
    """Raises InputError where a schedule breaks a dependency, a stream or its own numbers."""
    start, end = schedule.start, schedule.start + jobs.duration
    if len(start) != len(jobs):
        raise InputError(f"a schedule of {len(start)} jobs for {len(jobs)}: schedule these jobs")
    if len(jobs) and int(start.min()) < 0:
        raise InputError(f"{jobs.name(int(start.argmin()))} starts before time 0")
    for job, before in enumerate(jobs.depends_on.rows()):
        for other in before:
            if start[job] < end[other]:
                raise InputError(
                    f"{jobs.name(job)} starts at {int(start[job])}, before {jobs.name(other)}, on "
                    f"which it depends, ends at {int(end[other])}"
                )
    last: dict[int, int] = {}
    streams = jobs.streams.rows()
    for job in np.argsort(start, kind="stable").tolist():
        for stream in streams[job]:
            other = last.get(stream, job)
            if other != job and start[job] < end[other]:
                raise InputError(
                    f"stream {stream} runs {jobs.name(other)} and {jobs.name(job)} at once, at "
                    f"{int(start[job])}"
                )
            last[stream] = job
    makespan = int(end.max(initial=0))
    if makespan != schedule.makespan or schedule.lower_bound > makespan:
        raise InputError(
            f"makespan {schedule.makespan} and bound {schedule.lower_bound} of a schedule that "
            f"ends at {makespan}"
        )
    if schedule.proved != (schedule.lower_bound == makespan):
        raise InputError(
            f"proved is {schedule.proved} with bound {schedule.lower_bound} and makespan {makespan}"
        )
