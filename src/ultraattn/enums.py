"""`StrEnum` on every supported Python (the standard one begins with 3.11)."""

from __future__ import annotations

import sys

if sys.version_info >= (3, 11):
    from enum import StrEnum as StrEnum
else:
    from enum import Enum

    class StrEnum(str, Enum):
        """Members are strings and print as their value."""

        __str__ = str.__str__
