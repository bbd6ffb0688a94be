"""Configurations of the three families: Hugging Face's field names, defaults and `config.json`.

A field that a class does not know is kept as it came and written back, so that a round trip loses nothing.
"""

from __future__ import annotations

import copy
import json
import os
import secrets
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from bertfast.errors import CheckpointError, warn_caller
from bertfast.hub import HubOptions, Repository

CONFIG_NAME = "config.json"
PROBLEM_TYPES = ("regression", "single_label_classification", "multi_label_classification")


def dtype_from(value: str | torch.dtype | None) -> torch.dtype | None:
    """A `torch.dtype` from itself or from its name (`"bfloat16"`, `"torch.bfloat16"`); None stays None.

    Raises:
        ValueError: it is neither.
    """
    if value is None or isinstance(value, torch.dtype):
        return value
    dtype = getattr(torch, value.removeprefix("torch."), None) if isinstance(value, str) else None
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"dtype must be a torch.dtype or the name of one, got {value!r}")
    return dtype


class PretrainedConfig:
    """Fields that every family has, and reading and writing of `config.json`.

    A subclass lists its fields as annotated class attributes with their defaults; `attribute_map` gives further names
    under which a field can be read, set and passed.

    Args:
        **fields: values by name. Unknown names are kept as attributes and written back.

    Raises:
        ValueError: a `dtype`, `num_labels` or `problem_type` that is none, or the last two do not go together.
    """

    model_type: str = ""
    attribute_map: dict[str, str] = {}
    served_model_types: tuple[str, ...] = ()

    architectures: list[str] | None = None
    dtype: torch.dtype | None = None
    output_attentions: bool = False
    output_hidden_states: bool = False
    return_dict: bool = True
    chunk_size_feed_forward: int = 0
    is_decoder: bool = False
    add_cross_attention: bool = False
    tie_word_embeddings: bool = True
    problem_type: str | None = None
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    initializer_range: float = 0.02

    def __init__(self, **fields: Any):
        fields = {self.attribute_map.get(name, name): value for name, value in fields.items()}
        self._attn_implementation = fields.pop("attn_implementation", None)
        self.name_or_path = str(fields.pop("_name_or_path", None) or fields.pop("name_or_path", None) or "")
        dtype, torch_dtype = fields.pop("dtype", None), fields.pop("torch_dtype", None)
        self.dtype = dtype_from(dtype if dtype is not None else torch_dtype)
        model_type = fields.pop("model_type", None)
        if model_type in self.served_model_types and model_type != self.model_type:
            self.model_type = model_type
        labels = {name: fields.pop(name, None) for name in ("num_labels", "id2label", "label2id")}

        for name in self.field_names():
            if name != "dtype":
                setattr(self, name, fields.pop(name, copy.copy(getattr(type(self), name))))
        for name, value in fields.items():
            # Underscored names are the private state of whoever wrote the file; a property cannot be set.
            if not name.startswith("_") and not isinstance(getattr(type(self), name, None), property):
                setattr(self, name, value)
        self._set_labels(**labels)
        self._check_problem_type()

    @classmethod
    def field_names(cls) -> list[str]:
        """Names of the fields that the class knows, the common ones first."""
        names: dict[str, None] = {}
        for base in reversed(cls.__mro__):
            names.update(dict.fromkeys(base.__dict__.get("__annotations__", {})))
        return [
            name
            for name in names
            if name not in ("model_type", "attribute_map", "served_model_types") and not name.startswith("_")
        ]

    @classmethod
    def accepts(cls, name: str) -> bool:
        """Whether `name` is a field of the class, or another name of one."""
        return name in cls.attribute_map or name in cls.field_names() or name in ("num_labels", "id2label", "label2id")

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(self.attribute_map.get(name, name), value)

    def __getattr__(self, name: str) -> Any:
        target = type(self).attribute_map.get(name)
        if target is None:
            raise AttributeError(f"{type(self).__name__} has no field {name!r}")
        return getattr(self, target)

    @property
    def num_labels(self) -> int:
        """Number of labels: the length of `id2label`. Setting another number makes names `LABEL_0`, `LABEL_1`, …"""
        return len(self.id2label)

    @num_labels.setter
    def num_labels(self, number: int) -> None:
        if not isinstance(number, int) or isinstance(number, bool) or number < 1:
            raise ValueError(f"num_labels must be a positive integer, got {number!r}")
        if getattr(self, "id2label", None) is None or number != len(self.id2label):
            self.id2label = {i: f"LABEL_{i}" for i in range(number)}
            self.label2id = {label: i for i, label in self.id2label.items()}

    @property
    def use_return_dict(self) -> bool:
        """Older name of `return_dict`."""
        return self.return_dict

    @property
    def torch_dtype(self) -> torch.dtype | None:
        """Older name of `dtype`."""
        return self.dtype

    def _set_labels(self, num_labels: int | None, id2label: Mapping | None, label2id: Mapping | None) -> None:
        self.id2label = self.label2id = None
        for name, labels in (("id2label", id2label), ("label2id", label2id)):
            if not isinstance(labels, Mapping | None):
                raise ValueError(f"{name} must be a mapping, got {labels!r}")
        if id2label is None and label2id is not None and num_labels in (None, len(label2id)):
            id2label = {index: label for label, index in label2id.items()}
        if id2label is None:
            self.num_labels = 2 if num_labels is None else num_labels
            return
        if num_labels is not None and num_labels != len(id2label):
            warn_caller(f"num_labels={num_labels} differs from the {len(id2label)} entries of id2label, which is used")
        self.id2label = {int(index): label for index, label in id2label.items()}
        if label2id is None:
            label2id = {label: index for index, label in self.id2label.items()}
        self.label2id = dict(label2id)

    def _check_problem_type(self) -> None:
        if self.problem_type is not None and self.problem_type not in PROBLEM_TYPES:
            raise ValueError(f"problem_type must be one of {', '.join(PROBLEM_TYPES)}, got {self.problem_type!r}")
        if self.problem_type == "single_label_classification" and self.num_labels == 1:
            raise ValueError("problem_type='single_label_classification' needs num_labels > 1")

    def update(self, fields: Mapping[str, Any]) -> None:
        """Sets several fields."""
        for name, value in fields.items():
            setattr(self, name, value)

    def replaced(self, **fields: Any) -> PretrainedConfig:
        """A copy with other values for some fields; labels given by number, by name or by index follow one another.

        Raises:
            ValueError: `num_labels` and `id2label` contradict each other, or as the constructor.
        """
        fields = {self.attribute_map.get(name, name): value for name, value in fields.items()}
        number, names, indices = (fields.get(name) for name in ("num_labels", "id2label", "label2id"))
        if number is not None and names is not None and number != len(names):
            raise ValueError(f"num_labels={number}, but id2label has {len(names)} entries")
        values = {"name_or_path": self.name_or_path, **self.to_dict()}
        if number is not None or names is not None or indices is not None:
            kept = number is not None and names is None and indices is None and number == self.num_labels
            if not kept:
                del values["id2label"], values["label2id"]
        copied = type(self)(**{**values, **fields})
        copied._attn_implementation = fields.get("attn_implementation", self._attn_implementation)
        return copied

    def get_text_config(self, *_: Any, **__: Any) -> PretrainedConfig:
        """The configuration of the text model: this one. Libraries written for transformers ask for it."""
        return self

    def check_supported(self) -> None:
        """Refuses a configuration that the encoder would run as something else than it says.

        Raises:
            ValueError: decoder mode, cross-attention, position embeddings other than absolute ones, pruned heads,
                sizes that do not fit together, or a number out of its range.
        """
        for name in ("is_decoder", "add_cross_attention", "is_encoder_decoder"):
            if getattr(self, name, False):
                raise ValueError(f"{name}=True is not supported: bertfast runs encoders only")
        positions = getattr(self, "position_embedding_type", None)
        if positions not in (None, "absolute"):
            raise ValueError(f"position_embedding_type={positions!r} is not supported, only 'absolute' is")
        if getattr(self, "pruned_heads", None):
            raise ValueError(f"pruned_heads={self.pruned_heads!r} is not supported: every layer needs all of its heads")
        sizes = ("vocab_size", "hidden_size", "num_attention_heads", "intermediate_size", "max_position_embeddings")
        for name in sizes:
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} must be a positive integer, got {value!r}")
        if not isinstance(self.num_hidden_layers, int) or self.num_hidden_layers < 0:
            raise ValueError(f"num_hidden_layers must be an integer of 0 or more, got {self.num_hidden_layers!r}")
        types = getattr(self, "type_vocab_size", 0)
        if not isinstance(types, int) or types < 0:
            raise ValueError(f"type_vocab_size must be an integer of 0 or more, got {types!r}")
        if not isinstance(self.pad_token_id, int | None):
            raise ValueError(f"pad_token_id must be an integer or None, got {self.pad_token_id!r}")
        eps = getattr(self, "layer_norm_eps", 0.0)
        if not isinstance(eps, int | float) or not eps >= 0.0:
            raise ValueError(f"layer_norm_eps must be a number of 0 or more, got {eps!r}")
        for name in ("hidden_dropout_prob", "attention_probs_dropout_prob"):
            value = getattr(self, name)
            if not isinstance(value, int | float) or not 0.0 <= value <= 1.0:
                raise ValueError(f"{name} must be a number between 0 and 1, got {value!r}")
        if self.hidden_size % self.num_attention_heads:
            raise ValueError(
                f"hidden_size ({self.hidden_size}) is no multiple of num_attention_heads ({self.num_attention_heads})"
            )

    def to_dict(self) -> dict[str, Any]:
        """Every field as plain values; `dtype` as its name."""
        fields = {name: copy.deepcopy(value) for name, value in vars(self).items() if not name.startswith("_")}
        fields.pop("name_or_path")
        fields["model_type"] = self.model_type
        fields["dtype"] = None if self.dtype is None else str(self.dtype).removeprefix("torch.")
        return fields

    def to_json_string(self) -> str:
        """The text of `config.json`: the family's fields, and of the common ones those that are not the default.

        Raises:
            ValueError: a field holds something that JSON cannot, such as a callable activation.
        """
        common = {name: getattr(PretrainedConfig, name) for name in PretrainedConfig.field_names()}
        fields = {
            name: value
            for name, value in self.to_dict().items()
            if name not in common or value != common[name] or getattr(type(self), name) != common[name]
        }
        if self.id2label == {0: "LABEL_0", 1: "LABEL_1"}:
            del fields["id2label"], fields["label2id"]
        try:
            return json.dumps(fields, indent=2, sort_keys=True) + "\n"
        except TypeError as error:
            raise ValueError(f"the configuration cannot be written as JSON: {error}") from error

    def save_pretrained(self, directory: str | os.PathLike) -> None:
        """Writes `config.json` into a folder, which is made if need be; an older file is replaced in one step."""
        folder = Path(directory)
        folder.mkdir(parents=True, exist_ok=True)
        temporary = folder / f".{CONFIG_NAME}.{secrets.token_hex(4)}"
        try:
            temporary.write_text(self.to_json_string(), encoding="utf-8")
            temporary.replace(folder / CONFIG_NAME)
        finally:
            temporary.unlink(missing_ok=True)

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any], **overrides: Any) -> PretrainedConfig:
        """A configuration from the content of a `config.json`; `overrides` win over it.

        A file of another family is taken, with a warning.
        """
        model_type = fields.get("model_type")
        if cls.served_model_types and model_type not in (None, "", *cls.served_model_types):
            warn_caller(f"a configuration of type {model_type!r} is read as {cls.__name__}")
        config = cls(**fields)
        return config.replaced(**overrides) if overrides else config

    @classmethod
    def from_pretrained(cls, path_or_id: str | os.PathLike, **kwargs: Any) -> PretrainedConfig:
        """Reads `config.json` of a local folder or a hub repository.

        Called on `PretrainedConfig` it returns the class that the file's `model_type` names. Keywords are those of
        `HubOptions`; the others override fields.

        Raises:
            CheckpointError: there is no `config.json`, or it is damaged.
        """
        options = HubOptions.take(kwargs)
        fields, repository = read_config(path_or_id, options)
        overrides = {"name_or_path": os.fspath(path_or_id), **kwargs}
        if cls is PretrainedConfig:
            return config_for(fields, origin=str(repository)).replaced(**overrides)
        return cls.from_dict(fields, **overrides)

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and vars(other) == vars(self)

    def __repr__(self) -> str:
        return f"{type(self).__name__} {json.dumps(self.to_dict(), indent=2, sort_keys=True, default=repr)}"


class BertConfig(PretrainedConfig):
    """Configuration of BERT; the defaults are bert-base-uncased."""

    model_type = "bert"
    served_model_types = ("bert",)

    vocab_size: int = 30522
    hidden_size: int = 768
    num_hidden_layers: int = 12
    num_attention_heads: int = 12
    intermediate_size: int = 3072
    hidden_act: str | Callable = "gelu"
    hidden_dropout_prob: float = 0.1
    attention_probs_dropout_prob: float = 0.1
    max_position_embeddings: int = 512
    type_vocab_size: int = 2
    layer_norm_eps: float = 1e-12
    pad_token_id: int | None = 0
    classifier_dropout: float | None = None
    use_cache: bool = True


class RobertaConfig(BertConfig):
    """Configuration of RoBERTa, and of XLM-RoBERTa and CamemBERT, which are the same graph.

    `model_type` keeps which of the three a checkpoint is. The defaults are those of transformers; `PRESETS` has the
    sizes of roberta-base.
    """

    model_type = "roberta"
    served_model_types = ("roberta", "xlm-roberta", "camembert")

    vocab_size: int = 50265
    pad_token_id: int | None = 1
    bos_token_id: int | None = 0
    eos_token_id: int | list[int] | None = 2

    def __init__(self, **fields: Any):
        if fields.get("model_type") in ("xlm-roberta", "camembert"):
            fields.setdefault("vocab_size", 30522)
        super().__init__(**fields)


class DistilBertConfig(PretrainedConfig):
    """Configuration of DistilBERT; the defaults are distilbert-base-uncased. BERT's field names work as well."""

    model_type = "distilbert"
    served_model_types = ("distilbert",)
    attribute_map = {
        "hidden_size": "dim",
        "num_hidden_layers": "n_layers",
        "num_attention_heads": "n_heads",
        "intermediate_size": "hidden_dim",
        "hidden_act": "activation",
        "hidden_dropout_prob": "dropout",
        "attention_probs_dropout_prob": "attention_dropout",
    }

    vocab_size: int = 30522
    max_position_embeddings: int = 512
    sinusoidal_pos_embds: bool = False
    n_layers: int = 6
    n_heads: int = 12
    dim: int = 768
    hidden_dim: int = 3072
    dropout: float = 0.1
    attention_dropout: float = 0.1
    activation: str | Callable = "gelu"
    qa_dropout: float = 0.1
    seq_classif_dropout: float = 0.2
    pad_token_id: int | None = 0


CONFIGS: dict[str, type[PretrainedConfig]] = {
    model_type: config_class
    for config_class in (BertConfig, RobertaConfig, DistilBertConfig)
    for model_type in config_class.served_model_types
}

PRESETS: dict[str, Callable[..., PretrainedConfig]] = {
    "bert-base": BertConfig,
    "bert-large": partial(
        BertConfig, hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096
    ),
    "distilbert-base": DistilBertConfig,
    "roberta-base": partial(RobertaConfig, max_position_embeddings=514, type_vocab_size=1, layer_norm_eps=1e-5),
    "roberta-large": partial(
        RobertaConfig,
        max_position_embeddings=514,
        type_vocab_size=1,
        layer_norm_eps=1e-5,
        hidden_size=1024,
        num_hidden_layers=24,
        num_attention_heads=16,
        intermediate_size=4096,
    ),
}


def config_for(source: Any, *, origin: str = "the configuration") -> PretrainedConfig:
    """One of our configurations, from ours, from the content of a `config.json`, or from one of transformers.

    Args:
        source: a `PretrainedConfig` (returned as it is), a mapping with `model_type`, or an object with `to_dict()`.
        origin: what to call the source in an error.

    Raises:
        CheckpointError: its `model_type` is none of ours.
        TypeError: it is no configuration.
    """
    if isinstance(source, PretrainedConfig):
        return source
    if isinstance(source, Mapping):
        fields = dict(source)
    elif callable(getattr(source, "to_dict", None)):
        # transformers leaves what belongs to the running process out of to_dict().
        fields = {**source.to_dict(), "output_attentions": bool(getattr(source, "output_attentions", False))}
        fields["attn_implementation"] = getattr(source, "_attn_implementation", None)
    else:
        raise TypeError(f"expected a configuration or a dict, got {type(source).__name__}")
    model_type = fields.get("model_type")
    if not isinstance(model_type, str) or model_type not in CONFIGS:
        raise CheckpointError(f"model_type of {origin} is {model_type!r}; supported are {', '.join(sorted(CONFIGS))}")
    return CONFIGS[model_type].from_dict(fields)


def read_config(path_or_id: str | os.PathLike, options: HubOptions) -> tuple[dict[str, Any], Repository]:
    """The content of `config.json`, and the repository it came from.

    Raises:
        CheckpointError: there is no `config.json`, or it is damaged.
    """
    repository = Repository(path_or_id, options)
    fields = repository.json(CONFIG_NAME)
    if fields is None:
        raise CheckpointError(f"no {CONFIG_NAME} in {repository}")
    return fields, repository
