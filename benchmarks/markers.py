"""What a file has between two markers, kept up to date."""

from __future__ import annotations


def replaced(text: str, begin: str, end: str, between: str) -> str:
    """`text` with `between` between the markers.

    Raises:
        ValueError: there is not one pair of them.
    """
    before, found, rest = text.partition(begin)
    _, found_end, after = rest.partition(end)
    if not found or not found_end or begin in after or end in after:
        raise ValueError(f"expected one {begin} and behind it one {end}")
    return f"{before}{begin}\n{between}\n{end}{after}"
