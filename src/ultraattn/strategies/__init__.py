"""Ways to give blocks to ranks: this system's rows, and every rival as a whole program."""

from ultraattn.strategies.registry import NAMES, Strategy, build_pass, by_name
from ultraattn.strategies.rows import rows
from ultraattn.strategies.waste import Receives, key_receives

__all__ = ["NAMES", "Receives", "Strategy", "build_pass", "by_name", "key_receives", "rows"]
