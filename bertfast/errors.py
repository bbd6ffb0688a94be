"""Exceptions of the package that callers may want to catch by name."""

from __future__ import annotations


class CheckpointError(OSError, ValueError):
    """A checkpoint that is absent, damaged, foreign or unsafe.

    It is both an `OSError` and a `ValueError`, the two that code written for transformers catches around loading.
    """
