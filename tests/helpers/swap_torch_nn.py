"""Encoders of torch.nn, their masks, and how swapped ones are compared with them."""

from __future__ import annotations

import copy
import warnings
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import nn

import bertfast.swap
from helpers.models import assert_close, assert_same_gradients

WIDTH, BATCH, LENGTH = 24, 3, 7


def shifted(x):
    return F.softplus(x) - 0.5


FORMS = {
    "post": {},
    "pre": {"norm_first": True},
    "sequence first": {"batch_first": False},
    "pre, sequence first": {"norm_first": True, "batch_first": False},
    "no bias": {"bias": False},
    "pre, no bias": {"norm_first": True, "bias": False},
    "odd heads": {"nhead": 3, "dim_feedforward": 17},
}
ACTIVATIONS = {
    "relu": "relu",
    "gelu": "gelu",
    "silu": F.silu,
    "tanh gelu": nn.GELU(approximate="tanh"),
    "exact gelu": nn.GELU(),
    "module": nn.ReLU(inplace=True),
    "elu module": nn.ELU(0.5),
    "function": shifted,
    "lambda": lambda x: x.clamp(-0.5, 1.0),
}


def layer_of(activation="gelu", seed=0, **form):
    form = {"nhead": 4, "dim_feedforward": 32, "dropout": 0.0, "batch_first": True, **form}
    layer = nn.TransformerEncoderLayer(WIDTH, activation=activation, **form)
    return randomised(layer, seed)


def randomised(module, seed=0):
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3 + 0.1)
    return module.double()


def encoder_of(activation="gelu", layers=2, norm=True, **form):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # enable_nested_tensor without batch_first, and the like
        encoder = nn.TransformerEncoder(layer_of(activation, **form), layers, nn.LayerNorm(WIDTH) if norm else None)
    return randomised(encoder)


def swapped(stock, **options):
    model = copy.deepcopy(stock)
    assert bertfast.swap.accelerate(model, **options)
    return model


@contextmanager
def slow_path():
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(True)


def source(batch_first=True, seed=1, batch=BATCH, length=LENGTH, dtype=torch.float64):
    x = torch.randn(batch, length, WIDTH, generator=torch.Generator().manual_seed(seed), dtype=dtype)
    return x if batch_first else x.transpose(0, 1).contiguous()


PADDING = {
    "right": [[0, 0, 0, 0, 0, 0, 0], [0, 0, 0, 0, 1, 1, 1], [0, 1, 1, 1, 1, 1, 1]],
    "left": [[0, 0, 0, 0, 0, 0, 0], [1, 1, 1, 0, 0, 0, 0], [1, 1, 1, 1, 1, 1, 0]],
    "holes": [[0, 1, 0, 0, 1, 1, 0], [0, 0, 1, 0, 1, 0, 1], [0, 0, 0, 0, 0, 0, 0]],
    "none": [[0] * LENGTH] * BATCH,
}


def padding(kind, form="bool"):
    mask = torch.tensor(PADDING[kind]).bool()
    if form == "bool":
        return mask
    floats = torch.zeros(mask.shape, dtype=torch.float64).masked_fill(mask, float("-inf"))
    return floats if form == "float" else floats + torch.linspace(-1, 1, LENGTH, dtype=torch.float64)


def pair_mask(kind, heads=4):
    generator = torch.Generator().manual_seed(3)
    if kind.startswith("causal"):
        causal = nn.Transformer.generate_square_subsequent_mask(LENGTH, dtype=torch.float64)
        return causal if kind == "causal" else causal < 0
    shape = (BATCH * heads, LENGTH, LENGTH) if "3-D" in kind else (LENGTH, LENGTH)
    if "bool" in kind:
        return (torch.rand(shape, generator=generator) > 0.6) & ~torch.eye(LENGTH, dtype=torch.bool)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


PAIRS = ["causal", "causal bool", "bias", "bool", "3-D bias", "3-D bool"]


def kept(output, mask, batch_first=True):
    """`output` with 0 where `mask`, a key padding mask, has padding."""
    if mask is None:
        return output
    rows = mask if mask.dtype == torch.bool else mask == float("-inf")
    return output.masked_fill((rows if batch_first else rows.t()).unsqueeze(-1), 0.0)


def assert_stock(model, stock, x, padded=None, *, batch_first=True, **masks):
    """In evaluation with and without gradients and in training without dropout: outputs and gradients."""
    masks = {**masks, "src_key_padding_mask": padded}
    with slow_path():
        wanted = stock(x, **masks)
    for one in (model, stock):
        one.zero_grad()
        one.eval()
    with torch.no_grad():
        plain = model(x, **masks)
    assert plain.shape == wanted.shape
    assert plain.is_contiguous()
    assert_close(kept(plain, padded, batch_first), kept(wanted, padded, batch_first), "evaluation")
    model.train()
    leaves = [x.clone().requires_grad_() for _ in range(2)]
    got = model(leaves[0], **masks)
    assert_close(got, plain, "training and evaluation")
    with slow_path():
        wanted = stock(leaves[1], **masks)
    cotangent = kept(torch.randn(x.shape, generator=torch.Generator().manual_seed(5)).double(), padded, batch_first)
    for output in (got, wanted):
        output.backward(cotangent)
    assert_close(leaves[0].grad, leaves[1].grad, "gradient of the input")
    assert_same_gradients(model, stock)
    return plain
