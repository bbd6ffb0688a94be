"""Exceptions that callers may want to catch by name, and warnings that point at the caller's line."""

from __future__ import annotations

import sys
import warnings


class CheckpointError(OSError, ValueError):
    """A checkpoint that is absent, damaged, foreign or unsafe.

    It is both an `OSError` and a `ValueError`, the two that code written for transformers catches around loading.
    """


def warn_caller(message: str, category: type[Warning] = UserWarning) -> None:
    """Warns as the innermost line outside this package."""
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] == "bertfast":
        level, frame = level + 1, frame.f_back
    warnings.warn(message, category, stacklevel=level)
