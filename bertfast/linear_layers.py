"""The linear layers of encoders, and how others take their place: what `freeze` and `quantize` share."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from torch import nn

from bertfast import prepacked
from bertfast.nn import BertEncoderLayer, FusedFeedForward, FusedSelfAttention
from bertfast.swap.hf_layers import FusedLayer


def substitute(
    model: nn.Module,
    kind: type[nn.Module],
    make: Callable[[nn.Linear], nn.Module],
    reason_against: Callable[[nn.Module], str | None],
    done: str,
) -> None:
    """Puts what `make` makes of a linear layer in its place, for all that the encoder layers in `model` compute with.
    Those that are of `kind` already stay.

    Args:
        reason_against: why a layer cannot be replaced, None where it can.
        done: what it would have been, in an error.

    Raises:
        TypeError: `model` is no module.
        ValueError: there is no such layer in it, or one that cannot be replaced. The model is as it was.
    """
    check_module(model)
    wanted = {id(leaf) for module in model.modules() for leaf in _linear_layers(module)}
    if not wanted:
        raise ValueError(
            f"there is no encoder layer of bertfast in this {type(model).__name__}; "
            "a model of transformers has them after bertfast.accelerate(model)"
        )
    found = [place for place in places(model) if id(place[2]) in wanted and not isinstance(place[2], kind)]
    refused = {id(leaf): f"  {name}: {why}" for name, _, leaf in found if (why := reason_against(leaf)) is not None}
    if refused:
        raise ValueError("\n".join([f"these layers cannot be {done}:", *refused.values()]))
    replace(found, make)


def check_module(model: nn.Module) -> None:
    """Raises TypeError unless it is one."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")


def places(model: nn.Module) -> Iterator[tuple[str, tuple[nn.Module, str], nn.Module]]:
    """Full name, parent with the child's name, and child, of all children inside; of shared ones each place."""
    for path, parent in model.named_modules():
        for name, child in parent._modules.items():
            if child is not None:
                yield f"{path}.{name}" if path else name, (parent, name), child


def replace(found: list, make: Callable[[nn.Module], nn.Module]) -> None:
    """One substitute for each module, in every place where it is; the modules' reordered weights are dropped."""
    prepacked.forget({id(p) for _, _, leaf in found for p in leaf.parameters()})
    substitutes = {key: make(leaf) for key, leaf in {id(leaf): leaf for _, _, leaf in found}.items()}
    for _, (parent, name), leaf in found:
        parent._modules[name] = substitutes[id(leaf)]


def _linear_layers(module: nn.Module) -> tuple[nn.Module, ...]:
    """The linear layers that `module` computes with itself."""
    if isinstance(module, BertEncoderLayer):
        query, key, value, attention_out, _, ffn_in, ffn_out, _ = module.leaves()
        return query, key, value, attention_out, ffn_in, ffn_out
    if isinstance(module, FusedLayer):
        parts = module.parts(module)
        return parts.query, parts.key, parts.value, parts.attention_out, parts.ffn_in, parts.ffn_out
    if isinstance(module, FusedSelfAttention):
        return module.query, module.key, module.value
    if isinstance(module, FusedFeedForward):
        return module.dense_in, module.dense_out
    return ()
