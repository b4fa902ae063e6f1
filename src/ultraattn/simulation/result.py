"""What a simulation says: makespan, timeline, idle time by cause, efficiency."""

from __future__ import annotations

from dataclasses import dataclass

from ultraattn.chunks import Ints
from ultraattn.cluster.tables import Floats
from ultraattn.enums import StrEnum
from ultraattn.plans.check import Pass
from ultraattn.plans.columns import ByContent


class Idle(StrEnum):
    """Why a rank's compute stream stands still."""

    PEER = "waiting_for_peer"
    """What it waits for has not set out yet: the sender has not got it, or sends others first."""
    TRANSFER = "waiting_for_transfer"
    """What it waits for is on its way."""
    HOST = "waiting_for_host"
    """The host has not launched the kernel yet."""
    DONE = "no_work_left"
    """The rank has computed all it has, and others have not."""


@dataclass(frozen=True, eq=False)
class Timeline(ByContent):
    """When every task held each of its streams: columns of equal length."""

    task: Ints
    rank: Ints
    stream: Ints
    """Index in `plans.program.STREAM_ORDER`."""
    start_s: Floats
    stop_s: Floats


@dataclass(frozen=True, eq=False)
class PassSimulation(ByContent):
    """One pass in simulated time."""

    makespan_s: float
    bound_s: float
    """`ultraattn.simulation.simulate.bound_s`: no plan of the pass can be faster."""
    timeline: Timeline
    busy_s: Floats
    """Kernels and copies of each rank: (ranks,)."""
    slowed_s: Floats
    """Of `busy_s`, what transfers and shared cores cost: (ranks,)."""
    idle_s: Floats
    """Seconds by cause, in order of `Idle`, and rank: (causes, ranks). With `busy_s` they add up
    to the makespan."""

    @property
    def efficiency(self) -> float:
        """The bound over the makespan; 1 where nothing is to be done."""
        return self.bound_s / self.makespan_s if self.makespan_s else 1.0

    def idle(self, cause: Idle) -> Floats:
        """Idle seconds of each rank by one cause: (ranks,)."""
        seconds: Floats = self.idle_s[list(Idle).index(cause)]
        return seconds


@dataclass(frozen=True, eq=False)
class Simulation(ByContent):
    """Both passes of a plan in simulated time."""

    cluster: str
    forward: PassSimulation
    backward: PassSimulation

    @property
    def makespan_s(self) -> float:
        """Forward and backward, one after the other."""
        return self.forward.makespan_s + self.backward.makespan_s

    def pass_(self, pass_: Pass) -> PassSimulation:
        """The forward or the backward pass."""
        return self.forward if pass_ is Pass.FORWARD else self.backward

    def summary(self) -> str:
        """A few lines for a person."""
        lines = []
        for name, part in (("forward", self.forward), ("backward", self.backward)):
            share = 100 / part.makespan_s / max(1, len(part.busy_s)) if part.makespan_s else 0.0
            idle = ", ".join(
                f"{cause.replace('_', ' ')} {seconds.sum() * share:.1f} %"
                for cause, seconds in zip(Idle, part.idle_s, strict=True)
                if seconds.any()
            )
            lines.append(
                f"{name}: {part.makespan_s * 1e3:.3f} ms simulated on {self.cluster}, "
                f"{part.efficiency:.1%} of the bound; busy {part.busy_s.sum() * share:.1f} %"
                + (f", {idle}" if idle else "")
            )
        return "\n".join(lines)
