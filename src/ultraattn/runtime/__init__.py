"""Runs a plan with torch: knows nothing of how it was made."""

from ultraattn.runtime.attention import Attention
from ultraattn.runtime.share import share

__all__ = ["Attention", "share"]
