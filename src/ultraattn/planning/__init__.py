"""Turns a mask, a shape and a cluster into a plan; several masks into plans over one layout."""

from ultraattn.planning.many import Many, Share, plan_many
from ultraattn.planning.plan import plan

__all__ = ["Many", "Share", "plan", "plan_many"]
