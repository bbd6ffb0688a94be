"""bertfast: an accelerated BERT backend for PyTorch.

Four ways in: load a model (`bertfast.BertModel.from_pretrained(path)`), swap the fused parts into one that exists
(`bertfast.accelerate(model)`), build with the fused modules (`bertfast.nn`) and ops (`bertfast.ops`), or use the
command line (`bertfast --help`).
"""

from bertfast import models, nn, ops, packing
from bertfast.backends import BackendError, use_backend
from bertfast.configuration import PRESETS, BertConfig, DistilBertConfig, PretrainedConfig, RobertaConfig
from bertfast.errors import CheckpointError
from bertfast.freezing import freeze, unfreeze
from bertfast.models import *  # noqa: F403
from bertfast.quantization import dequantize, quantize
from bertfast.swap import SwapError, SwapReport, accelerate, register_attention, restore
from bertfast.tokenization import Tokenizer
from bertfast.weight_cache import refresh

__version__ = "0.1.0"

__all__ = [
    "PRESETS",
    "BackendError",
    "BertConfig",
    "CheckpointError",
    "DistilBertConfig",
    "PretrainedConfig",
    "RobertaConfig",
    "SwapError",
    "SwapReport",
    "Tokenizer",
    "accelerate",
    "dequantize",
    "freeze",
    "models",
    "nn",
    "ops",
    "packing",
    "quantize",
    "refresh",
    "register_attention",
    "restore",
    "unfreeze",
    "use_backend",
    *models.__all__,
]
