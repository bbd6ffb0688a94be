"""`save_pretrained`: a folder that stock transformers loads bit-equal."""

from __future__ import annotations

import json
import os
import re
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors.torch import save_file
from torch import Tensor

from bertfast.checkpoint.files import INDEX_SUFFIX, PICKLE_NAME, SAFETENSORS_NAME
from bertfast.configuration import CONFIG_NAME
from bertfast.errors import CheckpointError
from bertfast.quantization import check_weights

if TYPE_CHECKING:
    from bertfast.models.base import PreTrainedModel

_CLASS_PREFIX = {"xlm-roberta": "XLMRoberta", "camembert": "Camembert"}


def save_pretrained(
    model: PreTrainedModel,
    directory: str | os.PathLike,
    *,
    safe_serialization: bool = True,
    max_shard_size: int | str = "5GB",
    state_dict: dict[str, Tensor] | None = None,
) -> None:
    """Writes `config.json` and the weights, leaving out the tied copies.

    Every file is written under a temporary name and all are renamed at the end, so that a failure to write leaves what
    was there. Weights of an earlier save that would be read instead of these are removed.

    Args:
        model: the model.
        directory: the folder, made if need be.
        safe_serialization: safetensors; False writes pickled `.bin` files.
        max_shard_size: bytes, or a string such as "5GB"; larger models are split, with an index.
        state_dict: tensors to write instead of the model's own.

    Raises:
        CheckpointError: `directory` is a file.
        ValueError: the configuration holds something that JSON cannot, or `bertfast.quantize` dropped the weights.
    """
    if state_dict is None:
        check_weights(model, "cannot be saved")
    folder = Path(directory)
    if folder.exists() and not folder.is_dir():
        raise CheckpointError(f"{folder} is a file; expected a folder to save into")
    folder.mkdir(parents=True, exist_ok=True)
    tensors = _without_tied(model, model.state_dict() if state_dict is None else dict(state_dict))
    whole = SAFETENSORS_NAME if safe_serialization else PICKLE_NAME
    pattern = "{suffix}.".join(whole.rsplit(".", 1))
    split = split_torch_state_dict_into_shards(tensors, filename_pattern=pattern, max_shard_size=max_shard_size)

    writers: dict[str, Callable[[Path], object]] = {}
    for name, members in split.filename_to_tensors.items():
        shard = {member: tensors[member] for member in members}
        writers[name] = lambda path, shard=shard: _write(shard, path, safe_serialization)
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        text = json.dumps(index, indent=2, sort_keys=True) + "\n"
        writers[whole + INDEX_SUFFIX] = lambda path: path.write_text(text, encoding="utf-8")
    config_text = _config_text(model)
    writers[CONFIG_NAME] = lambda path: path.write_text(config_text, encoding="utf-8")

    token = secrets.token_hex(4)  # of this call: threads and machines that share the folder may save at once
    temporary = {name: folder / f".{name}.{token}.tmp" for name in writers}
    try:
        for name, write in writers.items():
            write(temporary[name])
        for name, path in temporary.items():
            path.replace(folder / name)
    finally:
        for path in temporary.values():
            path.unlink(missing_ok=True)
    _remove_stale(folder, set(writers), safe_serialization)


def _without_tied(model: PreTrainedModel, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    for copy, source in model.tied_weights.items():
        if copy in tensors and source in tensors and _same(tensors[copy], tensors[source]):
            del tensors[copy]
    storages: set[int] = set()
    for name, tensor in tensors.items():
        tensor = tensor.detach().contiguous()
        storage = tensor.untyped_storage().data_ptr()
        # Parameters that a user shares are written out each: a file cannot say that they are one.
        tensors[name] = tensor.clone() if storage in storages else tensor
        storages.add(storage)
    return tensors


def _same(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and (a.data_ptr() == b.data_ptr() or torch.equal(a, b))


def _write(tensors: dict[str, Tensor], path: Path, safe_serialization: bool) -> None:
    if safe_serialization:
        save_file(tensors, path, metadata={"format": "pt"})
    else:
        torch.save(tensors, path)


def _config_text(model: PreTrainedModel) -> str:
    name = type(model).__name__
    stock = _CLASS_PREFIX.get(model.config.model_type)
    if stock is not None:
        name = stock + name.removeprefix("Roberta")
    return model.config.replaced(architectures=[name], dtype=model.dtype).to_json_string()


def _remove_stale(folder: Path, written: set[str], safe_serialization: bool) -> None:
    # Safetensors are read first: beside new .bin files old ones would win, the other way round they do no harm.
    kinds = [SAFETENSORS_NAME] if safe_serialization else [SAFETENSORS_NAME, PICKLE_NAME]
    patterns = []
    for whole in kinds:
        stem, suffix = whole.rsplit(".", 1)
        patterns.append(rf"{re.escape(stem)}(-\d{{5}}-of-\d{{5}})?\.{suffix}|{re.escape(whole + INDEX_SUFFIX)}")
    stale = re.compile("|".join(patterns))
    for path in folder.iterdir():
        if path.name not in written and stale.fullmatch(path.name):
            path.unlink()
