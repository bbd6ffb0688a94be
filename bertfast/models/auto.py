"""Classes that pick the model of the family that a configuration names."""

from __future__ import annotations

import importlib
import os
from typing import Any

from bertfast.configuration import (
    BertConfig,
    DistilBertConfig,
    PretrainedConfig,
    RobertaConfig,
    config_for,
    read_config,
)
from bertfast.hub import HubOptions
from bertfast.models.base import PreTrainedModel

_FAMILIES: dict[type[PretrainedConfig], str] = {
    BertConfig: "bert",
    RobertaConfig: "roberta",
    DistilBertConfig: "distilbert",
}


class _AutoModel:
    """Base of the automatic classes; they make instances of other classes, never of their own.

    A subclass lists the name of the model class of each family that has one.
    """

    _classes: dict[str, str] = {}

    def __init__(self) -> None:
        name = type(self).__name__
        raise TypeError(f"{name} is made by {name}.from_pretrained(...) or {name}.from_config(...)")

    @classmethod
    def model_class(cls, config: PretrainedConfig | dict | Any) -> type[PreTrainedModel]:
        """The model class for a configuration.

        Raises:
            CheckpointError: the family is not supported.
            ValueError: it has no such model.
        """
        family = _FAMILIES[type(config_for(config))]
        name = cls._classes.get(family)
        if name is None:
            raise ValueError(f"{cls.__name__} has no model for {family}; it has {', '.join(cls._classes.values())}")
        return getattr(importlib.import_module(f"bertfast.models.{family}"), name)

    @classmethod
    def from_config(cls, config: PretrainedConfig | dict | Any, **kwargs: Any) -> PreTrainedModel:
        """A freshly initialised model; see `PreTrainedModel.from_config`."""
        return cls.model_class(config).from_config(config, **kwargs)

    @classmethod
    def from_pretrained(cls, path_or_id: str | os.PathLike, *, config: Any = None, **kwargs: Any) -> Any:
        """Loads a model; see `bertfast.checkpoint.load_pretrained` for the keywords."""
        if config is None or isinstance(config, (str, os.PathLike)):
            options = HubOptions.take(dict(kwargs))
            fields, repository = read_config(path_or_id if config is None else config, options)
            config = config_for(fields, origin=str(repository))
        return cls.model_class(config).from_pretrained(path_or_id, config=config, **kwargs)


def _classes(suffix: str, **other: str) -> dict[str, str]:
    names = {"bert": f"Bert{suffix}", "roberta": f"Roberta{suffix}", "distilbert": f"DistilBert{suffix}"}
    return {**names, **other}


class AutoModel(_AutoModel):
    """The encoder without a head."""

    _classes = _classes("Model")


class AutoModelForPreTraining(_AutoModel):
    """The model with the heads of its pre-training."""

    _classes = _classes("ForMaskedLM", bert="BertForPreTraining")


class AutoModelForMaskedLM(_AutoModel):
    """The model with a masked language modelling head."""

    _classes = _classes("ForMaskedLM")


class AutoModelForSequenceClassification(_AutoModel):
    """The model with a classification or regression head on the whole sequence."""

    _classes = _classes("ForSequenceClassification")


class AutoModelForTokenClassification(_AutoModel):
    """The model with a classification head on every token."""

    _classes = _classes("ForTokenClassification")


class AutoModelForQuestionAnswering(_AutoModel):
    """The model with a head for the start and end of a span."""

    _classes = _classes("ForQuestionAnswering")


class AutoModelForMultipleChoice(_AutoModel):
    """The model with a head that scores each of several sequences."""

    _classes = _classes("ForMultipleChoice")


class AutoModelForNextSentencePrediction(_AutoModel):
    """The model with a next sentence head, which BERT alone has."""

    _classes = {"bert": "BertForNextSentencePrediction"}
