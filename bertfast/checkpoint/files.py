"""Weight files: safetensors or pickled state dicts, whole or sharded. Nothing here runs code from a file."""

from __future__ import annotations

import pickle
import zipfile
from pathlib import Path, PurePosixPath

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from bertfast.errors import CheckpointError
from bertfast.hub import Repository, read_json

SAFETENSORS_NAME = "model.safetensors"
PICKLE_NAME = "pytorch_model.bin"
INDEX_SUFFIX = ".index.json"


def read_weights(repository: Repository, use_safetensors: bool | None = None) -> dict[str, Tensor]:
    """The tensors of a checkpoint by name, in the file's order, on the CPU.

    They may be views of mapped files: copy what is kept.

    Args:
        repository: where to look.
        use_safetensors: True looks for safetensors only, False for pickled files only; by default for both, in this
            order.

    Raises:
        CheckpointError: there are no weights, a shard is absent, or a file is damaged or holds more than tensors.
    """
    formats = {True: [SAFETENSORS_NAME], False: [PICKLE_NAME], None: [SAFETENSORS_NAME, PICKLE_NAME]}[use_safetensors]
    names = [name for whole in formats for name in (whole, whole + INDEX_SUFFIX)]
    for name in names:
        path = repository.fetch(name)
        if path is not None:
            return _read_shards(repository, path) if name.endswith(INDEX_SUFFIX) else read_file(path)
    raise CheckpointError(f"no weights in {repository}; looked for {', '.join(names)}")


def read_file(path: Path) -> dict[str, Tensor]:
    """The tensors of one weight file.

    Raises:
        CheckpointError: the file is damaged, or holds more than tensors.
    """
    try:
        with path.open("rb") as file:
            start = file.read(24)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from error
    if start.startswith(b"version https://git-lfs"):
        raise CheckpointError(f"{path} is a Git LFS pointer; fetch the file that it stands for")
    return _read_safetensors(path) if path.suffix == ".safetensors" else _read_pickle(path)


def _read_shards(repository: Repository, index: Path) -> dict[str, Tensor]:
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(shard, str) for shard in weight_map.values()):
        raise CheckpointError(f"{index} has no 'weight_map' from names of tensors to names of files")
    tensors: dict[str, Tensor] = {}
    for shard in dict.fromkeys(weight_map.values()):
        if PurePosixPath(shard).is_absolute() or ".." in PurePosixPath(shard).parts:
            raise CheckpointError(f"{index} names a shard outside its folder: {shard!r}")
        path = repository.fetch(shard)
        if path is None:
            raise CheckpointError(f"{repository} lacks the shard {shard}, which {index.name} lists")
        tensors.update(read_file(path))
    absent = [name for name in weight_map if name not in tensors]
    if absent:
        raise CheckpointError(
            f"{index.name} of {repository} lists {len(absent)} tensors that its shards lack, such as {absent[0]} "
            f"in {weight_map[absent[0]]}"
        )
    return tensors


def _read_safetensors(path: Path) -> dict[str, Tensor]:
    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - the handle is no mapping
    except (SafetensorError, OSError, ValueError, RuntimeError) as error:
        raise CheckpointError(f"{path} is damaged or no safetensors file: {_first_line(error)}") from error


def _read_pickle(path: Path) -> dict[str, Tensor]:
    try:
        # The format before torch 1.6 is no zip archive and cannot be mapped.
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"{path} is refused: it is damaged, or holds Python objects, which bertfast never unpickles "
            f"({_refused_object(error)})"
        ) from error
    except Exception as error:
        # The unpickler meets arbitrary bytes here and raises whatever they lead to.
        raise CheckpointError(f"{path} is damaged or no state dict: {_first_line(error)}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} must hold a state dict, it holds a {type(content).__name__}")
    for name, value in content.items():
        if not isinstance(name, str) or not isinstance(value, Tensor):
            raise CheckpointError(f"{path} must hold tensors by name, {name!r} is a {type(value).__name__}")
    return dict(content)


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__


def _refused_object(error: Exception) -> str:
    """The line of torch's long message that says what was refused."""
    lines = [line.strip() for line in str(error).splitlines()]
    return next((line for line in lines if line.startswith("WeightsUnpickler error")), _first_line(error))[:200]
