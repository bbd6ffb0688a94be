"""Writing a .npy file row by row, atomically."""

from __future__ import annotations

import errno
import os
import secrets
import shutil
from contextlib import suppress
from pathlib import Path

import numpy as np
from numpy.lib import format as npy_format


class NpyWriter:
    """A two-dimensional fp32 array whose number of rows is known only at the end.

    Rows go to a hidden file beside the target, which takes the target's name when the block ends well and is removed
    when it does not: whoever looks at the target sees the old file or the whole new one. As a context manager:
    `with NpyWriter(path, dimension) as out: out.write(rows)`.

    Args:
        path: the target.
        dimension: width of a row.

    Raises:
        OSError: the target's folder is missing or cannot be written, or the target is no regular file.
    """

    def __init__(self, path: str | Path, dimension: int):
        self._target = check_target(path)
        self._part = self._target.with_name(f".{self._target.name}.{secrets.token_hex(4)}.part")
        self._dimension = dimension
        self.rows = 0

    def __enter__(self) -> NpyWriter:
        self._file = open(self._part, "xb")
        try:
            self._write_header()
        except BaseException:
            self._discard()
            raise
        return self

    def write(self, rows: np.ndarray) -> None:
        """Appends rows (n, dimension).

        Raises:
            ValueError: rows of another shape.
        """
        if rows.ndim != 2 or rows.shape[1] != self._dimension:
            raise ValueError(f"expected rows of shape (n, {self._dimension}), got {rows.shape}")
        self._file.write(np.ascontiguousarray(rows, dtype="<f4").data)
        self.rows += len(rows)

    def __exit__(self, kind, _error, _traceback) -> None:
        if kind is not None:
            self._discard()
            return
        try:
            self._file.seek(0)
            self._write_header()
            self._file.flush()
            os.fsync(self._file.fileno())  # some file systems report a full disk only here
            self._file.close()
            if self._target.exists():
                shutil.copymode(self._target, self._part)
            os.replace(self._part, self._target)
        except BaseException:
            self._discard()
            raise

    def _write_header(self) -> None:
        # NumPy pads the header for growth of the first axis, so its length is the same for any number of rows.
        header = {"descr": "<f4", "fortran_order": False, "shape": (self.rows, self._dimension)}
        npy_format.write_array_header_1_0(self._file, header)

    def _discard(self) -> None:
        self._part.unlink(missing_ok=True)
        with suppress(OSError):  # closing flushes what did not fit on the disk
            self._file.close()


def check_target(path: str | Path) -> Path:
    """The file to replace, links followed.

    Raises:
        OSError: no file of that name can be written.
    """
    target = Path(os.path.realpath(path))
    if target.is_dir():
        raise IsADirectoryError(errno.EISDIR, "is a directory", str(path))
    if target.exists() and not target.is_file():
        raise OSError(f"{path}: not a regular file")
    if not target.parent.is_dir():
        raise FileNotFoundError(errno.ENOENT, "no such folder", str(target.parent))
    if not os.access(target.parent, os.W_OK):
        raise PermissionError(errno.EACCES, "folder cannot be written", str(target.parent))
    return target
