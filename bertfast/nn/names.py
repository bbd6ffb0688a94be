"""How each family names the children of an encoder layer: the only thing in which their layers differ."""

from __future__ import annotations

from typing import NamedTuple

from torch import nn


class LayerNames(NamedTuple):
    """Dotted paths, from the layer, of the eight children that hold its parameters."""

    query: str
    key: str
    value: str
    attention_out: str
    attention_norm: str
    ffn_in: str
    ffn_out: str
    ffn_norm: str


BERT_LAYER = LayerNames(
    query="attention.self.query",
    key="attention.self.key",
    value="attention.self.value",
    attention_out="attention.output.dense",
    attention_norm="attention.output.LayerNorm",
    ffn_in="intermediate.dense",
    ffn_out="output.dense",
    ffn_norm="output.LayerNorm",
)
DISTILBERT_LAYER = LayerNames(
    query="attention.q_lin",
    key="attention.k_lin",
    value="attention.v_lin",
    attention_out="attention.out_lin",
    attention_norm="sa_layer_norm",
    ffn_in="ffn.lin1",
    ffn_out="ffn.lin2",
    ffn_norm="output_layer_norm",
)


class ParameterGroup(nn.Module):
    """A level of a checkpoint's names, such as `attention.output`. It holds children and is never called, so a hook
    on it would never run: registering one is an error that says where to put it."""

    def forward(self, *args, **kwargs):
        raise RuntimeError("a ParameterGroup only holds parameters; call the encoder layer")

    def _refuse_hook(self, *args, **kwargs):
        children = ", ".join(name for name, _ in self.named_children())
        raise RuntimeError(
            f"this module only holds parameters and is never called, so the hook would never run; "
            f"put it on the encoder layer or on one of: {children}"
        )

    register_forward_hook = register_forward_pre_hook = _refuse_hook
    register_full_backward_hook = register_full_backward_pre_hook = _refuse_hook


def place(root: nn.Module, path: str, child: nn.Module) -> None:
    """Registers `child` under the dotted `path`, making the groups on the way."""
    *groups, name = path.split(".")
    for group in groups:
        if group not in root._modules:
            root.add_module(group, ParameterGroup())
        root = root._modules[group]
    root.add_module(name, child)
