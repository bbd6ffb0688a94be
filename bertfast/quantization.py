"""`quantize` and `dequantize`: the linear layers of an encoder by int8 products, for inference on the CPU, and back.

What is quantised are the projections of attention and the feed-forward of every encoder layer: nearly all of a BERT's
arithmetic on short texts. Embeddings, attention itself, LayerNorms, poolers and heads stay as they are. The formulas
are those of `bertfast.ops.quantized_linear`.
"""

from __future__ import annotations

from functools import partial
from typing import TypeVar

from torch import nn

from bertfast import linear_layers
from bertfast.backends import FLOAT, BackendError
from bertfast.nn.plain import is_plain
from bertfast.nn.quantized import QuantizedLinear
from bertfast.ops import quantized_linear

Model = TypeVar("Model", bound=nn.Module)


def quantize(model: Model, *, keep_weights: bool = True) -> Model:
    """Puts a `bertfast.nn.QuantizedLinear` in the place of each linear layer of the encoder, in place.

    The weights are rounded to int8 with a scale for each output, the inputs in each call with a scale for each token.
    A quantised model is for inference: a call that needs a gradient is an error, so call it under
    `torch.inference_mode()`. `torch.compile` breaks its graph at int8 layers, and `use_backend` has no say in them.
    What is quantised already stays as it is.

    Args:
        model: one of our models, a model of transformers after `bertfast.accelerate`, or any module that holds layers
            of `bertfast.nn`; on the CPU, in fp32, bf16 or fp16.
        keep_weights: keep the weights, so that `dequantize` brings them back bit by bit, and `state_dict()` and
            `save_pretrained` are those of the float model. An int8 copy, a byte for each weight, is made with the first
            call and again when a weight changes, be it by `load_state_dict` or `.to(dtype)`. False keeps the int8
            weights only, two bytes for each weight with the copy that oneDNN reads: there is no way back, the state
            dict holds the buffers of `bertfast.nn.QuantizedLinear`, and `save_pretrained` of our models refuses.

    Returns:
        `model`.

    Raises:
        BackendError: this machine or this PyTorch has no int8 products.
        TypeError: `model` is no module.
        ValueError: there is no such layer in it, or one that cannot be quantised: on another device, of another dtype,
            hooked, parametrised or wrapped (merge adapters first). The model is as it was.
    """
    reason = quantized_linear.unavailable()
    if reason is not None:
        raise BackendError(f"no int8 on this machine: {reason}")
    make = partial(QuantizedLinear, keep_weight=keep_weights)
    linear_layers.substitute(model, QuantizedLinear, make, _reason_against, "quantised")
    return model


def dequantize(model: Model) -> Model:
    """Undoes `quantize`, in place: each `nn.Linear` is back with the very same parameters.

    Raises:
        TypeError: `model` is no module.
        ValueError: the weights were dropped. The model is as it was.

    Returns:
        `model`; one that is not quantised stays as it is.
    """
    linear_layers.check_module(model)
    found = [place for place in linear_layers.places(model) if isinstance(place[2], QuantizedLinear)]
    check_weights(model, "cannot be restored")
    linear_layers.replace(found, QuantizedLinear.to_linear)
    return model


def check_weights(model: nn.Module, consequence: str) -> None:
    """Raises the ValueError of a model whose weights were dropped."""
    for name, module in model.named_modules():
        if isinstance(module, QuantizedLinear) and module.weight is None:
            raise ValueError(f"{name} {consequence}: quantize(keep_weights=False) dropped its weight; load it again")


def _reason_against(leaf: nn.Module) -> str | None:
    if not is_plain(leaf, nn.Linear):
        return f"a {type(leaf).__name__} that is no plain nn.Linear"
    if leaf.weight.device.type != "cpu":
        return f"on {leaf.weight.device}, int8 layers run on the CPU"
    if leaf.weight.dtype not in FLOAT:
        return f"{leaf.weight.dtype}, int8 layers are for fp32, bf16 and fp16".replace("torch.", "")
    if leaf.in_features > quantized_linear.MAX_K:
        return f"{leaf.in_features} inputs, whose sums need more than 32 bits"
    if not leaf.weight.is_contiguous():
        return "a weight that is not contiguous"
    return None
