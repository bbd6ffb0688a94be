"""Where the files of a checkpoint come from: a local folder, or a repository of the Hugging Face Hub."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from bertfast.errors import CheckpointError


@dataclass(frozen=True)
class HubOptions:
    """The keywords that say which version of a repository to read, and how to reach it."""

    revision: str | None = None
    token: str | bool | None = None
    subfolder: str = ""
    cache_dir: str | os.PathLike | None = None
    local_files_only: bool = False
    force_download: bool = False

    @classmethod
    def take(cls, kwargs: dict[str, Any]) -> HubOptions:
        """Removes the hub keywords from `kwargs` and returns them as options."""
        taken = {field.name: kwargs.pop(field.name) for field in fields(cls) if field.name in kwargs}
        return cls(**{**taken, "subfolder": taken.get("subfolder") or ""})


class Repository:
    """The files of one checkpoint, fetched by name when they are asked for.

    Args:
        source: a local folder, or a hub id such as `"google-bert/bert-base-uncased"`.
        options: the hub keywords; `subfolder` also applies to local folders.

    Raises:
        CheckpointError: `source` is a file, a folder that does not exist, or nothing that names a repository.
    """

    def __init__(self, source: str | os.PathLike, options: HubOptions | None = None):
        self.source = os.fspath(source)
        self.options = options or HubOptions()
        self.offline = False
        if not self.source:
            raise CheckpointError("the path or id of the checkpoint is empty")
        path = Path(self.source).expanduser()
        self.folder = path / self.options.subfolder if path.is_dir() else None
        if self.folder is not None:
            if not self.folder.is_dir():
                raise CheckpointError(f"{self.source} has no folder {self.options.subfolder!r}")
        elif path.exists():
            raise CheckpointError(f"{self.source} is a file; expected the folder of a checkpoint, or a hub id")
        elif path.is_absolute() or self.source[0] in ".~" or self.source.count("/") > 1:
            raise CheckpointError(f"{self.source!r} is no folder on this machine, and no id of a hub repository")

    def fetch(self, name: str) -> Path | None:
        """Path of the file `name`, downloaded if need be; None where the checkpoint has no such file.

        Raises:
            CheckpointError: the hub refuses it or cannot be reached.
        """
        if self.folder is not None:
            path = self.folder / name
            return path if path.is_file() else None
        return self._download(name)

    def json(self, name: str) -> dict[str, Any] | None:
        """The JSON object in the file `name`; None where the checkpoint has no such file.

        Raises:
            CheckpointError: as `fetch`, or the file holds no JSON object.
        """
        path = self.fetch(name)
        return None if path is None else read_json(path)

    def _download(self, name: str) -> Path | None:
        from huggingface_hub import errors, hf_hub_download

        options = self.options
        try:
            return Path(
                hf_hub_download(
                    self.source,
                    name,
                    subfolder=options.subfolder or None,
                    revision=options.revision,
                    token=options.token,
                    cache_dir=options.cache_dir,
                    local_files_only=options.local_files_only,
                    force_download=options.force_download,
                )
            )
        except errors.LocalEntryNotFoundError:
            self.offline = True
            return None
        except errors.EntryNotFoundError:
            return None
        except (errors.HfHubHTTPError, errors.HFValidationError, OSError) as error:
            first_line = str(error).strip().partition("\n")[0]
            raise CheckpointError(f"cannot get {name} of {self.source} from the hub: {first_line}") from error

    def __str__(self) -> str:
        if self.folder is not None:
            return str(self.folder)
        where = f"{self.source}/{self.options.subfolder}" if self.options.subfolder else self.source
        return f"{where} (the hub was not reached, only its cache was read)" if self.offline else where


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file.

    Raises:
        CheckpointError: the file cannot be read, is no JSON, or holds something other than an object.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} must hold a JSON object, it holds a {type(content).__name__}")
    return content
