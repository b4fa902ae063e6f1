"""Ways to give blocks to ranks, each a pure function from blocks and layouts to ranks."""

from ultraattn.strategies.rows import rows

__all__ = ["rows"]
