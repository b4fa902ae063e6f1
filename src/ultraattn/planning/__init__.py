"""Turns a mask, a shape and a cluster into a plan."""

from ultraattn.planning.plan import plan

__all__ = ["plan"]
