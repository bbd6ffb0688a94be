"""Reading text line by line in bounded memory, whatever the file holds."""

from __future__ import annotations

import codecs
import os
import stat
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import BinaryIO

# Only this much of a line is kept: 2,000 bytes for each token of a 512-token limit. The rest is read and checked only.
LONGEST_LINE = 2**20


@contextmanager
def opened(path: str) -> Iterator[BinaryIO]:
    """The file in binary, standard input for `-`.

    Raises:
        OSError: no such file, or a directory.
        ValueError: the file is empty.
    """
    if path == "-":
        yield sys.stdin.buffer
        return
    with open(path, "rb") as file:
        found = os.fstat(file.fileno())
        if stat.S_ISREG(found.st_mode) and found.st_size == 0:
            raise ValueError(f"{path} is empty")
        yield file


def size_of(file: BinaryIO) -> int | None:
    """Bytes of a regular file, None for a pipe."""
    found = os.fstat(file.fileno())
    return found.st_size if stat.S_ISREG(found.st_mode) else None


def read_lines(file: BinaryIO, name: str, on_bytes: Callable[[int], None] = lambda count: None) -> Iterator[str]:
    r"""Yields every line without its `\n` or `\r\n`; an empty line is an empty string.

    A byte order mark at the start is dropped. Of a line longer than `LONGEST_LINE` bytes only the start is kept.

    Args:
        file: opened in binary.
        name: of the file, for errors.
        on_bytes: told of every byte count read.

    Raises:
        ValueError: names the line that is not UTF-8.
    """
    number = 0
    while chunk := file.readline(LONGEST_LINE):
        number += 1
        decoder = codecs.getincrementaldecoder("utf-8")()
        on_bytes(len(chunk))
        try:
            text = decoder.decode(chunk, final=chunk.endswith(b"\n"))
            while not chunk.endswith(b"\n"):
                chunk = file.readline(LONGEST_LINE)
                on_bytes(len(chunk))
                decoder.decode(chunk, final=not chunk or chunk.endswith(b"\n"))
                if not chunk:
                    break
        except UnicodeDecodeError as error:
            raise ValueError(f"{name}, line {number}: not UTF-8 text ({error.reason})") from error
        if number == 1:
            text = text.removeprefix("\ufeff")
        yield text.removesuffix("\n").removesuffix("\r")
