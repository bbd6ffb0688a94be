"""`freeze` and `unfreeze`: the linear layers of an encoder with reordered weights alone, for inference on the CPU."""

from __future__ import annotations

from typing import TypeVar

from torch import nn

from bertfast import linear_layers, prepacked
from bertfast.backends import BackendError
from bertfast.nn.frozen import FrozenLinear
from bertfast.nn.plain import is_plain

Model = TypeVar("Model", bound=nn.Module)


def freeze(model: Model) -> Model:
    """Puts a `bertfast.nn.FrozenLinear` in the place of each linear layer of the encoder, in place.

    Without it a model in inference on the CPU holds each of these weights twice: as a Parameter, and reordered for
    oneDNN. Frozen layers hold the reordered one alone, so memory is that of an ordinary model, and calls do not look
    whether the Parameter is still what it was, which matters for short texts. Results are bit by bit the same. State
    dicts, `load_state_dict`, `save_pretrained`, `.to(dtype)`, copies and pickles go on as before; gradients,
    `torch.export` and GPUs need `unfreeze`. Frozen layers compute in
    their own dtype under autocast too, and do not ask `use_backend`.

    Args:
        model: one of our models, a model of transformers after `bertfast.accelerate`, or any module that holds layers
            of `bertfast.nn`; on the CPU, in fp32 or (where the machine multiplies it) bf16.

    Returns:
        `model`.

    Raises:
        BackendError: this PyTorch or this machine does not multiply by reordered weights.
        TypeError: `model` is no module.
        ValueError: there is no such layer in it, or one that cannot be frozen: on another device, of another dtype,
            quantised, hooked, parametrised or wrapped (merge adapters first). The model is as it was.
    """
    linear_layers.substitute(model, FrozenLinear, FrozenLinear, _reason_against, "frozen")
    return model


def unfreeze(model: Model) -> Model:
    """Undoes `freeze`, in place: each `nn.Linear` is back with the same bits in a new Parameter (an optimizer that held
    the old one does not know it), as trainable as it was when it was frozen. Weights that were tied come apart.

    Returns:
        `model`; one that is not frozen stays as it is.

    Raises:
        TypeError: `model` is no module.
    """
    linear_layers.check_module(model)
    found = [place for place in linear_layers.places(model) if isinstance(place[2], FrozenLinear)]
    linear_layers.replace(found, FrozenLinear.to_linear)
    return model


def _reason_against(leaf: nn.Module) -> str | None:
    if not is_plain(leaf, nn.Linear):
        return f"a {type(leaf).__name__} that is no plain nn.Linear"
    if leaf.weight.device.type != "cpu":
        return f"on {leaf.weight.device}, frozen layers run on the CPU"
    if leaf.weight.dtype not in prepacked.DTYPES:
        return f"{leaf.weight.dtype}, frozen layers are for fp32 and bf16".replace("torch.", "")
    if not prepacked.works(leaf.weight.dtype):
        raise BackendError(f"this PyTorch has no reordered weights in {leaf.weight.dtype} on this machine")
    return None
