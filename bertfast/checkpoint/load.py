"""`from_pretrained`: from a folder or a hub id to a model in eval mode and a report."""

from __future__ import annotations

import inspect
import logging
import os
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from bertfast.checkpoint.files import read_weights
from bertfast.checkpoint.keys import is_silent, match_names
from bertfast.checkpoint.report import LoadReport
from bertfast.configuration import PretrainedConfig, config_for, dtype_from, read_config
from bertfast.errors import CheckpointError, warn_caller
from bertfast.hub import HubOptions, Repository

if TYPE_CHECKING:
    from bertfast.models.base import PreTrainedModel

logger = logging.getLogger("bertfast")


def load_pretrained(
    model_class: type[PreTrainedModel],
    path_or_id: str | os.PathLike,
    *,
    config: PretrainedConfig | dict | str | os.PathLike | Any = None,
    dtype: torch.dtype | str | None = "auto",
    device_map: str | int | torch.device | dict | None = None,
    ignore_mismatched_sizes: bool = False,
    allow_missing: bool = False,
    use_safetensors: bool | None = None,
    return_report: bool = False,
    output_loading_info: bool = False,
    **kwargs: Any,
) -> Any:
    """Loads a model.

    Args:
        model_class: the class to make.
        path_or_id: a local folder, or the id of a hub repository, of which only the files needed are fetched.
        config: a configuration to use instead of the checkpoint's, or where to read one.
        dtype: "auto" is the configuration's, else that of the first floating tensor; None is torch's default dtype.
            Also called `torch_dtype`.
        device_map: the one device to load onto; "auto" is the accelerator where there is one.
        ignore_mismatched_sizes: newly initialise tensors of another shape instead of raising.
        allow_missing: accept a checkpoint that leaves more than half of the model newly initialised.
        use_safetensors: True or False reads only that kind of file; by default safetensors come first.
        return_report: return `(model, report)`; also called `output_loading_info`.
        **kwargs: the hub's (`revision`, `token`, `subfolder`, `cache_dir`, `local_files_only`, `force_download`),
            `attn_implementation` (noted only: bertfast has its own), arguments of the model class, and any field of the
            configuration, `num_labels`, `id2label`, `label2id` and `problem_type` among them.

    Returns:
        The model in eval mode, or the model and its `LoadReport`.

    Raises:
        CheckpointError: no such checkpoint, a damaged or unsafe file, shapes that do not fit, or a checkpoint that
            covers less than half of the model.
        ValueError: a `dtype` or `device_map` that is none, a field of the configuration that is not supported.
        TypeError: unknown keywords.
    """
    if "torch_dtype" in kwargs:
        legacy = kwargs.pop("torch_dtype")
        dtype = legacy if dtype == "auto" else dtype
    options = HubOptions.take(kwargs)
    repository = Repository(path_or_id, options)
    config, model_kwargs, notes = _configure(model_class, path_or_id, config, options, kwargs)
    device = _device(device_map)

    weights = read_weights(repository, use_safetensors)
    config.dtype = _dtype(dtype, config, weights)

    from bertfast.models.base import no_init_weights

    with no_init_weights(), torch.device("cpu"):
        model = model_class(config, **model_kwargs)
    report = LoadReport(model_class.__name__, str(repository), notes=notes)
    _fill(model, weights, report, config.dtype, device, ignore_mismatched_sizes, allow_missing)
    if report:
        logger.warning("%s", report)
    return (model, report) if return_report or output_loading_info else model


def _configure(
    model_class: type[PreTrainedModel],
    path_or_id: str | os.PathLike,
    config: Any,
    options: HubOptions,
    kwargs: dict[str, Any],
) -> tuple[PretrainedConfig, dict[str, Any], list[str]]:
    """The configuration with the keywords applied, the keywords of the model's constructor, and notes."""
    if config is None or isinstance(config, (str, os.PathLike)):
        fields, _ = read_config(path_or_id if config is None else config, options)
        config = model_class.config_class.from_dict(fields)
    else:
        config = config_for(config)
    notes = []
    if kwargs.get("attn_implementation") is not None:
        notes.append(
            f"attn_implementation={kwargs['attn_implementation']!r} has no effect: bertfast chooses among its own "
            "backends (see bertfast.use_backend)"
        )
    constructor = set(list(inspect.signature(model_class.__init__).parameters)[2:]) - {"args", "kwargs"}
    model_kwargs = {name: kwargs.pop(name) for name in list(kwargs) if name in constructor}
    known = {"attn_implementation", *vars(config)}
    unknown = [name for name in kwargs if name not in known and not config.accepts(name)]
    if unknown:
        raise TypeError(
            f"{model_class.__name__}.from_pretrained got unexpected keyword arguments: {', '.join(sorted(unknown))}"
        )
    # A copy even without overrides: the caller's configuration must not change with the model's.
    return config.replaced(**kwargs, name_or_path=os.fspath(path_or_id)), model_kwargs, notes


def _device(device_map: Any) -> torch.device:
    if isinstance(device_map, dict):
        if set(device_map) != {""}:
            raise ValueError(f"device_map must be one device, got a map of {len(device_map)} entries")
        device_map = device_map[""]
    if device_map is None:
        return torch.get_default_device()
    if device_map == "auto":
        return torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    try:
        return torch.device(device_map)
    except (RuntimeError, TypeError) as error:
        raise ValueError(f"device_map must be a device, got {device_map!r}") from error


def _dtype(dtype: Any, config: PretrainedConfig, weights: dict[str, Tensor]) -> torch.dtype:
    if dtype == "auto":
        floating = (tensor.dtype for tensor in weights.values() if tensor.is_floating_point())
        dtype = config.dtype or next(floating, torch.get_default_dtype())
    dtype = dtype_from(dtype) or torch.get_default_dtype()
    if not dtype.is_floating_point:
        raise ValueError(f"dtype must be a floating one, got {dtype}")
    return dtype


def _fill(
    model: PreTrainedModel,
    weights: dict[str, Tensor],
    report: LoadReport,
    dtype: torch.dtype,
    device: torch.device,
    ignore_mismatched_sizes: bool,
    allow_missing: bool,
) -> None:
    """Puts the file's tensors into the model, initialises the others, ties, and completes the report."""
    places = model.state_dict(keep_vars=True)
    matched, unexpected, duplicates = match_names(weights, places, model.base_model_prefix)
    report.unexpected = [name for name in unexpected if not is_silent(name)]
    if duplicates:
        report.notes.append(f"ignored, as the file has them under another name too: {', '.join(duplicates)}")
    for name, file_name in matched.items():
        found, wanted = tuple(weights[file_name].shape), tuple(places[name].shape)
        if found != wanted:
            report.mismatched[name] = (found, wanted)
    loaded = {name: weights[file_name] for name, file_name in matched.items() if name not in report.mismatched}
    for name, tensor in loaded.items():
        if not tensor.is_floating_point() or tensor.dtype.itemsize < 2:
            raise CheckpointError(f"{name} in {report.source} is {tensor.dtype}: quantised weights are not supported")
        if tensor.is_meta or tensor.layout != torch.strided:
            kind = "meta" if tensor.is_meta else tensor.layout
            raise CheckpointError(f"{name} in {report.source} is a {kind} tensor, not one of dense values")

    missing = set(places) - set(matched)
    tied = model.tied_weights
    for copy, source in tied.items():
        if copy in loaded and source not in loaded:
            loaded[source] = loaded.pop(copy)
            missing.discard(source)
        elif source in loaded and copy not in loaded:
            missing.discard(copy)
    report.missing = sorted(missing)
    new = {*missing, *report.mismatched} - set(loaded) - {copy for copy, source in tied.items() if source in loaded}
    _refuse_misfit(report, places, new, ignore_mismatched_sizes, allow_missing)

    with torch.no_grad():
        _initialise(model, new)
        for name, tensor in loaded.items():
            # Copied, as the tensor is a view of a file that may be mapped, shared or read-only.
            own = torch.empty(tensor.shape, dtype=dtype, device=device).copy_(tensor)
            _set_parameter(model, name, own)
        for copy, source in tied.items():
            if copy in loaded and not torch.equal(model.get_parameter(copy), model.get_parameter(source)):
                model._untied.add(copy)
                note = (
                    f"{copy} differs from {source}, to which the configuration ties it; they are loaded as two "
                    "parameters (tie_word_embeddings=False says so without a warning)"
                )
                report.notes.append(note)
                warn_caller(note)
    model.tie_weights()
    model.to(device=device, dtype=dtype)
    model.eval()


def _refuse_misfit(
    report: LoadReport, places: dict[str, Tensor], new: set[str], ignore_mismatched_sizes: bool, allow_missing: bool
) -> None:
    """Raises where the checkpoint is not one for this model."""
    # By identity, so that a tied parameter counts once.
    sizes = {id(tensor): tensor.numel() for tensor in places.values()}
    new_elements = sum({id(places[name]): places[name].numel() for name in new}.values())
    if 2 * new_elements > sum(sizes.values()) and not allow_missing:
        raise CheckpointError(
            f"{report.source} does not look like a checkpoint for {report.model}: {new_elements:,} of the model's "
            f"{sum(sizes.values()):,} elements would be newly initialised (allow_missing=True accepts that).\n{report}"
        )
    if report.mismatched and not ignore_mismatched_sizes:
        shapes = "; ".join(
            f"{name} is {list(found)} in the file and {list(wanted)} in the model"
            for name, (found, wanted) in report.mismatched.items()
        )
        raise CheckpointError(
            f"shapes in {report.source} do not fit {report.model}: {shapes}. "
            "ignore_mismatched_sizes=True newly initialises them."
        )


def _initialise(model: PreTrainedModel, names: Iterable[str]) -> None:
    """Initialises the modules that own the named parameters, and those around them, innermost first."""
    paths = set()
    for name in names:
        parts = name.split(".")[:-1]
        paths.update(".".join(parts[:depth]) for depth in range(len(parts) + 1))
    for path, module in reversed(list(model.named_modules())):
        if path in paths:
            model._init_weights(module)


def _set_parameter(model: nn.Module, name: str, tensor: Tensor) -> None:
    path, _, attribute = name.rpartition(".")
    setattr(model.get_submodule(path), attribute, nn.Parameter(tensor))
