"""Tiny random checkpoints of stock models, and our classes by name."""

from __future__ import annotations

import importlib
from pathlib import Path

import safetensors.torch
import torch
import transformers

HEADS = {
    "bert": [
        "BertModel",
        "BertForPreTraining",
        "BertForMaskedLM",
        "BertForNextSentencePrediction",
        "BertForSequenceClassification",
        "BertForTokenClassification",
        "BertForQuestionAnswering",
        "BertForMultipleChoice",
    ],
    "roberta": [
        "RobertaModel",
        "RobertaForMaskedLM",
        "RobertaForSequenceClassification",
        "RobertaForTokenClassification",
        "RobertaForQuestionAnswering",
        "RobertaForMultipleChoice",
    ],
    "distilbert": [
        "DistilBertModel",
        "DistilBertForMaskedLM",
        "DistilBertForSequenceClassification",
        "DistilBertForTokenClassification",
        "DistilBertForQuestionAnswering",
        "DistilBertForMultipleChoice",
    ],
}
ALL_HEADS = [head for heads in HEADS.values() for head in heads]

_SIZES = {
    "vocab_size": 61,
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "intermediate_size": 40,
    "max_position_embeddings": 22,
}
_DISTILBERT = {
    "hidden_size": "dim",
    "num_hidden_layers": "n_layers",
    "num_attention_heads": "n_heads",
    "intermediate_size": "hidden_dim",
}


def family_of(name: str) -> str:
    """Family of a stock or own class name."""
    family = next(f for f in ("distilbert", "roberta", "bert") if f in name.lower())
    return family


def ours(name: str) -> type:
    """Our class of that name."""
    return getattr(importlib.import_module(f"bertfast.models.{family_of(name)}"), name)


def tiny_stock_config(name: str, **fields) -> transformers.PretrainedConfig:
    """Configuration of a tiny stock model for a class name; `fields` use BERT's names."""
    fields = {**_SIZES, **fields}
    if family_of(name) == "distilbert":
        fields = {_DISTILBERT.get(field, field): value for field, value in fields.items()}
    return getattr(transformers, name).config_class(**fields)


def tiny_stock(name: str, seed: int = 0, **fields) -> transformers.PreTrainedModel:
    """A stock model whose parameters all differ from their initial values, LayerNorms and biases included."""
    model = getattr(transformers, name)(tiny_stock_config(name, **fields))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2 + 0.05)
    return model.eval()


def saved_stock(folder: Path, name: str, seed: int = 0, **fields) -> Path:
    """A folder with a tiny stock model, as transformers saves it."""
    tiny_stock(name, seed, **fields).save_pretrained(folder)
    return folder


def read_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """The tensors of `model.safetensors`."""
    return safetensors.torch.load_file(folder / "model.safetensors")


def write_tensors(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Replaces `model.safetensors`."""
    own = {name: tensor.detach().clone().contiguous() for name, tensor in tensors.items()}
    safetensors.torch.save_file(own, folder / "model.safetensors", metadata={"format": "pt"})
