"""The command line: makes plans, runs them over local processes, and draws them."""

from ultraattn.cli.app import main

__all__ = ["main"]
