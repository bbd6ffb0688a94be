"""What every model class shares: initialisation, tying, loading and saving, embeddings, gradient checkpointing."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from bertfast.configuration import PretrainedConfig, config_for, dtype_from
from bertfast.nn.frozen import FrozenLinear

_initialise: ContextVar[bool] = ContextVar("bertfast_initialise", default=True)


class _SkipFills(TorchFunctionMode):
    """Makes the in-place fills of module constructors do nothing, so that their memory is never touched."""

    fills = frozenset((Tensor.normal_, Tensor.uniform_, nn.init.normal_, nn.init.uniform_, nn.init.kaiming_uniform_))

    def __torch_function__(self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if func in self.fills:
            return args[0] if args else kwargs["tensor"]
        return func(*args, **kwargs)


@contextmanager
def no_init_weights() -> Iterator[None]:
    """Models made inside have uninitialised parameters, to be filled from a checkpoint."""
    token = _initialise.set(False)
    try:
        with _SkipFills():
            yield
    finally:
        _initialise.reset(token)


class PreTrainedModel(nn.Module):
    """Base of all models.

    A subclass sets `config_class`, `base_model_prefix` (the attribute that holds the base model in a headed class) and
    `_tied_weights_keys` (name of the tied copy -> name of its source), and ends its `__init__` with `self.post_init()`.

    Args:
        config: one of our configurations, one of transformers', or the content of a `config.json`.

    Raises:
        ValueError: the configuration asks for something that is not supported.
    """

    config_class: type[PretrainedConfig] = PretrainedConfig
    base_model_prefix: str = ""
    main_input_name: str = "input_ids"
    _tied_weights_keys: dict[str, str] = {}

    def __init__(self, config: PretrainedConfig | dict | Any):
        super().__init__()
        config = config_for(config)
        if config.model_type not in self.config_class.served_model_types:
            raise ValueError(
                f"{type(self).__name__} takes a {self.config_class.__name__}, got a {type(config).__name__}"
            )
        config.check_supported()
        self.config = config
        self.name_or_path = config.name_or_path
        # Tied names that a checkpoint holds with other values than their source; they stay apart.
        self._untied: set[str] = set()

    def post_init(self) -> None:
        """Initialises what this class added to its base model, and ties. The last step of every `__init__`."""
        if _initialise.get():
            with torch.no_grad():
                _apply_own(self, self._init_weights)
        self.tie_weights()

    def _init_weights(self, module: nn.Module) -> None:
        """Gives the parameters that `module` itself holds transformers' initial distribution."""
        std = self.config.initializer_range or 0.02
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=std)
            if getattr(module, "padding_idx", None) is not None:
                nn.init.zeros_(module.weight[module.padding_idx])
        elif "LayerNorm" in type(module).__name__:
            nn.init.ones_(module.weight)
        elif getattr(self.config, "sinusoidal_pos_embds", False) and hasattr(module, "position_embeddings"):
            table = module.position_embeddings.weight
            table.copy_(_sinusoids(*table.shape))
        if isinstance(getattr(module, "bias", None), nn.Parameter):
            nn.init.zeros_(module.bias)

    def _apply(self, fn, recurse=True):
        # Before anything is converted: a frozen layer that refuses would leave the model half done.
        for module in self.modules():
            if isinstance(module, FrozenLinear):
                module.check_apply(fn)
        return super()._apply(fn, recurse)

    @property
    def tied_weights(self) -> dict[str, str]:
        """The tied names in effect: name of the copy -> name of its source."""
        if not self.config.tie_word_embeddings:
            return {}
        return {copy: source for copy, source in self._tied_weights_keys.items() if copy not in self._untied}

    def tie_weights(self) -> None:
        """Makes each tied copy the very parameter that it copies."""
        for copy, source in self.tied_weights.items():
            module, _, name = copy.rpartition(".")
            setattr(self.get_submodule(module), name, self.get_parameter(source))

    @classmethod
    def from_pretrained(cls, path_or_id: str | os.PathLike, **kwargs: Any) -> Any:
        """Loads a model from a local folder or a hub repository; see `bertfast.checkpoint.load_pretrained`."""
        from bertfast.checkpoint import load_pretrained

        return load_pretrained(cls, path_or_id, **kwargs)

    @classmethod
    def from_config(
        cls, config: PretrainedConfig | dict | Any, *, dtype: torch.dtype | str | None = None, **fields: Any
    ) -> PreTrainedModel:
        """A freshly initialised model; `fields` override the configuration's."""
        config = config_for(config)
        model = cls(config.replaced(**fields) if fields else config)
        return model if dtype is None else model.to(dtype_from(dtype))

    def save_pretrained(self, directory: str | os.PathLike, **kwargs: Any) -> None:
        """Writes configuration and weights; see `bertfast.checkpoint.save_pretrained`."""
        from bertfast.checkpoint import save_pretrained

        save_pretrained(self, directory, **kwargs)

    @property
    def base_model(self) -> nn.Module:
        """The model without its head."""
        return getattr(self, self.base_model_prefix, self)

    @property
    def dtype(self) -> torch.dtype:
        """dtype of the first floating parameter."""
        return next(p.dtype for p in self.parameters() if p.is_floating_point())

    @property
    def device(self) -> torch.device:
        """Device of the first parameter."""
        return next(self.parameters()).device

    def num_parameters(self, only_trainable: bool = False, exclude_embeddings: bool = False) -> int:
        """Number of elements of the parameters, tied ones counted once."""
        skipped = set()
        if exclude_embeddings:
            skipped = {id(m.weight) for m in self.modules() if isinstance(m, nn.Embedding)}
        return sum(
            p.numel() for p in self.parameters() if id(p) not in skipped and (p.requires_grad or not only_trainable)
        )

    @classmethod
    def can_generate(cls) -> bool:
        """Encoders do not generate."""
        return False

    def get_input_embeddings(self) -> nn.Embedding:
        """The module that holds the word embeddings."""
        return self.base_model.embeddings.word_embeddings

    def set_input_embeddings(self, value: nn.Embedding) -> None:
        """Replaces the word embeddings; a tied decoder follows at the next `tie_weights()`."""
        self.base_model.embeddings.word_embeddings = value

    def _output_embeddings_name(self) -> str | None:
        names = (name for name in self._tied_weights_keys if name.endswith(".weight"))
        return next((name.removesuffix(".weight") for name in names), None)

    def get_output_embeddings(self) -> nn.Linear | None:
        """The linear layer that maps to the vocabulary; None where the head has none."""
        name = self._output_embeddings_name()
        return None if name is None else self.get_submodule(name)

    def set_output_embeddings(self, value: nn.Linear) -> None:
        """Replaces the linear layer that maps to the vocabulary, and the bias that is tied to its bias.

        Raises:
            ValueError: the head has no such layer.
        """
        name = self._output_embeddings_name()
        if name is None:
            raise ValueError(f"{type(self).__name__} has no output embeddings")
        parent, _, attribute = name.rpartition(".")
        setattr(self.get_submodule(parent), attribute, value)
        source = self.tied_weights.get(f"{name}.bias")
        if source is not None and value.bias is not None:
            parent, _, attribute = source.rpartition(".")
            setattr(self.get_submodule(parent), attribute, value.bias)

    def resize_token_embeddings(
        self,
        new_num_tokens: int | None = None,
        pad_to_multiple_of: int | None = None,
        mean_resizing: bool = True,
    ) -> nn.Embedding:
        """Changes the size of the vocabulary, keeping the rows (and decoder biases) that both sizes have.

        The parameters stay the same objects, so tied ones stay tied and an optimizer keeps its references.

        Args:
            new_num_tokens: rows wanted; None keeps the number (and still pads it).
            pad_to_multiple_of: round the number up to a multiple of this.
            mean_resizing: new rows are the mean of the old ones with a tiny noise of their covariance; False draws them
                from the model's initial distribution.

        Returns:
            The module that holds the word embeddings.

        Raises:
            ValueError: a number of tokens or a multiple below 1.
        """
        embeddings = self.get_input_embeddings()
        if new_num_tokens is None and pad_to_multiple_of is None:
            return embeddings
        rows = embeddings.weight.shape[0] if new_num_tokens is None else new_num_tokens
        if pad_to_multiple_of is not None:
            if not isinstance(pad_to_multiple_of, int) or pad_to_multiple_of < 1:
                raise ValueError(f"pad_to_multiple_of must be a positive integer, got {pad_to_multiple_of!r}")
            rows = -(-rows // pad_to_multiple_of) * pad_to_multiple_of
        if rows < 1:
            raise ValueError(f"new_num_tokens must be 1 or more, got {new_num_tokens!r}")

        decoder = self.get_output_embeddings()
        parameters = [embeddings.weight]
        if decoder is not None:
            parameters += [decoder.weight, decoder.bias, *map(self.get_parameter, self._tied_weights_keys.values())]
        for parameter in {id(p): p for p in parameters if p is not None}.values():
            _resize_rows(parameter, rows, self.config.initializer_range or 0.02, mean_resizing)
        embeddings.num_embeddings = rows
        if embeddings.padding_idx is not None and embeddings.padding_idx >= rows:
            embeddings.padding_idx = None
        if decoder is not None:
            decoder.out_features = rows
        self.config.vocab_size = rows
        return embeddings

    def gradient_checkpointing_enable(
        self,
        gradient_checkpointing_kwargs: dict[str, Any] | None = None,
        every_n_layers: int = 1,
        offload: bool = False,
    ) -> None:
        """Recomputes the encoder layers' activations in backward instead of keeping them.

        Args:
            gradient_checkpointing_kwargs: for `torch.utils.checkpoint.checkpoint`; `use_reentrant` is False by default.
            every_n_layers, offload: of transformers, whose Trainer passes them always; not supported.

        Raises:
            ValueError: nothing in the model supports it, or an option that is not supported.
        """
        if every_n_layers != 1 or offload:
            raise ValueError(f"every_n_layers={every_n_layers} and offload={offload}: only 1 and False are supported")
        arguments = {"use_reentrant": False, **(gradient_checkpointing_kwargs or {})}
        self._set_gradient_checkpointing(True, partial(checkpoint, **arguments))

    def gradient_checkpointing_disable(self) -> None:
        """Keeps activations again."""
        self._set_gradient_checkpointing(False, None)

    def _set_gradient_checkpointing(self, enabled: bool, function: Callable | None) -> None:
        modules = [module for module in self.modules() if hasattr(module, "gradient_checkpointing")]
        if not modules:
            raise ValueError(f"{type(self).__name__} does not support gradient checkpointing")
        for module in modules:
            module.gradient_checkpointing = enabled
            module._checkpoint = function

    @property
    def is_gradient_checkpointing(self) -> bool:
        """Whether gradient checkpointing is on."""
        return any(getattr(module, "gradient_checkpointing", False) for module in self.modules())


def _apply_own(module: nn.Module, function: Callable[[nn.Module], None]) -> None:
    """Calls `function` on the modules below and on `module`, except on models that have had their own `post_init`."""
    for child in module.children():
        if not isinstance(child, PreTrainedModel):
            _apply_own(child, function)
    function(module)


def _sinusoids(positions: int, width: int) -> Tensor:
    """Position table of shape (positions, width): sines in the even columns, cosines in the odd ones."""
    column = torch.arange(width, dtype=torch.float64)
    rates = torch.pow(10000.0, -(column // 2) * 2 / width)
    angles = torch.arange(positions, dtype=torch.float64)[:, None] * rates
    return torch.where(column % 2 == 0, angles.sin(), angles.cos()).float()


@torch.no_grad()
def _resize_rows(parameter: nn.Parameter, rows: int, std: float, mean_resizing: bool) -> None:
    """Gives a (vocabulary, width) or (vocabulary,) parameter `rows` rows, in place."""
    old = parameter.data
    kept = min(rows, old.shape[0])
    if rows == old.shape[0]:
        return
    new = old.new_empty(rows, *old.shape[1:])
    new[:kept] = old[:kept]
    added = rows - kept
    if added:
        if mean_resizing:
            new[kept:] = _mean_rows(old, added)
        elif old.dim() == 1:
            new[kept:] = 0
        else:
            new[kept:].normal_(std=std)
    parameter.data = new
    parameter.grad = None


def _mean_rows(old: Tensor, added: int) -> Tensor:
    """`added` rows around the mean of the old ones, with 1e-9 times their covariance as transformers draws them."""
    wide = old.float().reshape(old.shape[0], -1)
    mean = wide.mean(0)
    # wide - mean = Q R, so R^T R / n is the covariance, and it needs no Cholesky factor of a singular matrix.
    factor = torch.linalg.qr(wide - mean, mode="r").R * (1e-9 / wide.shape[0]) ** 0.5
    noise = torch.randn(added, factor.shape[0], device=old.device) @ factor
    return (mean + noise).to(old.dtype).reshape(added, *old.shape[1:])
