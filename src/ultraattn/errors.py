"""The errors that a user of UltraAttn can meet, all of one family."""

from __future__ import annotations


class UltraAttnError(Exception):
    """Base of every error raised on purpose; the text says what was given, expected, and to do."""


class InputError(UltraAttnError, ValueError):
    """An argument cannot be served: shapes, masks, layouts, options."""


class PlanError(UltraAttnError, ValueError):
    """A plan is unsound, or a plan file is damaged, edited, or of another schema version."""


class RunError(UltraAttnError, RuntimeError):
    """A distributed run failed; the text names the rank, its task, and the cause."""


class MissingExtraError(UltraAttnError, ImportError):
    """An optional dependency is missing; the text names the extra that installs it."""
