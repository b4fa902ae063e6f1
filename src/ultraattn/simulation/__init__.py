"""Predicts plans: an event simulation of kernels, copies, messages and hosts; see `simulate`."""

from ultraattn.simulation.result import Idle, PassSimulation, Simulation, Timeline
from ultraattn.simulation.simulate import bound_s, least_bytes, simulate, simulate_pass

__all__ = [
    "Idle",
    "PassSimulation",
    "Simulation",
    "Timeline",
    "bound_s",
    "least_bytes",
    "simulate",
    "simulate_pass",
]
