"""Reading lines and writing .npy files in bounded memory."""

from __future__ import annotations

import errno
import io
import os

import numpy as np
import pytest

from bertfast.cli import lines
from bertfast.cli.npy import NpyWriter


def read(content: bytes) -> list[str]:
    return list(lines.read_lines(io.BytesIO(content), "f"))


def test_lines_end_at_line_feeds_only():
    assert read("a\nb\r\n\n c \x0bd\x85e\u2028".encode()) == ["a", "b", "", " c \x0bd\x85e\u2028"]
    assert read(b"") == []
    assert read(b"\n") == [""]
    assert read("\ufeffa\n\ufeffb".encode()) == ["a", "\ufeffb"]


def test_long_lines_keep_their_start_only(monkeypatch):
    monkeypatch.setattr(lines, "LONGEST_LINE", 8)
    assert read(b"12345678\n1234567\n" + b"x" * 100 + b"\nend") == ["12345678", "1234567", "xxxxxxxx", "end"]
    # The cut falls inside a character.
    assert read("aaaaaaa€uro\nnext\n".encode()) == ["aaaaaaa", "next"]
    with pytest.raises(ValueError, match="line 2"):
        read(b"fine\n" + b"x" * 100 + b"\xff\n")
    with pytest.raises(ValueError, match="line 1"):
        read("aaaaaaa€".encode()[:-1])


def test_every_byte_is_counted(monkeypatch):
    monkeypatch.setattr(lines, "LONGEST_LINE", 8)
    counts = []
    content = b"one\n" + b"x" * 50 + b"\nlast"
    assert len(list(lines.read_lines(io.BytesIO(content), "f", counts.append))) == 3
    assert sum(counts) == len(content)


@pytest.mark.parametrize("chunks", [[], [3], [1, 0, 4]])
def test_npy_is_what_numpy_reads(tmp_path, chunks):
    rows = np.random.default_rng(0).standard_normal((sum(chunks), 5))
    with NpyWriter(tmp_path / "a.npy", 5) as out:
        for part in np.split(rows, np.cumsum(chunks)[:-1]) if chunks else []:
            out.write(part)
    found = np.load(tmp_path / "a.npy")
    assert found.dtype == np.float32 and np.array_equal(found, rows.astype(np.float32))
    assert os.listdir(tmp_path) == ["a.npy"]


def test_npy_refuses_rows_of_another_width(tmp_path):
    with pytest.raises(ValueError, match=r"\(n, 5\), got \(2, 4\)"), NpyWriter(tmp_path / "a.npy", 5) as out:
        out.write(np.zeros((2, 4)))
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("where", ["write", "fsync", "replace"])
def test_npy_removes_its_part_when_the_disk_is_full(tmp_path, monkeypatch, where):
    (tmp_path / "a.npy").write_bytes(b"old")

    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.raises(OSError, match="No space left"), NpyWriter(tmp_path / "a.npy", 5) as out:
        out.write(np.zeros((2, 5)))
        if where == "write":
            full()
        monkeypatch.setattr(os, where, full)
    assert os.listdir(tmp_path) == ["a.npy"]
    assert (tmp_path / "a.npy").read_bytes() == b"old"


def test_npy_honours_the_umask(tmp_path):
    before = os.umask(0o027)
    try:
        with NpyWriter(tmp_path / "a.npy", 5):
            pass
    finally:
        os.umask(before)
    assert (tmp_path / "a.npy").stat().st_mode & 0o777 == 0o640
