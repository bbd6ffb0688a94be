"""fp32 GEMMs of oneDNN by weights as they lie in memory: for training on the CPU, where a reordered copy lasts one
step, and for inference by weights that have no copy.

PyTorch hands fp32 to MKL. On two cores of an AMD EPYC with AVX-512, oneDNN took 0.4 to 0.7 of its time for the sizes of
BERT-base with 128 to 4096 rows, for the product, for dx and for dweight. bf16 is oneDNN's in PyTorch already.

oneDNN adds up all of K in one chain, MKL in blocks: for K = 3072 and terms of one sign its error was three times as
large. So long sums are taken in parts, each added to the product of those before it.

The operator is private to PyTorch and has the same switches as in `prepacked`.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor, nn

from bertfast.backends import needs_grad
from bertfast.prepacked import takes_private_operators

# Multiplications from which on the product gains more than its call costs: 10 us, and those of a Function.
MIN_PRODUCTS = 1 << 21
MAX_TERMS = 1024
_CLASSES = (Tensor, nn.Parameter)


def _part(x: Tensor, weight: Tensor, bias: Tensor | None, rest: Tensor | None) -> Tensor:
    """x weight^T + bias, or + rest. oneDNN reads a weight and its transpose as they lie; with gaps between the rows it
    has slow code only."""
    if not (weight.is_contiguous() or weight.t().is_contiguous()):
        weight = weight.contiguous()
    if rest is None:
        return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return torch.ops.mkldnn._linear_pointwise.binary(x, rest, weight, None, "add")


def product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`linear` for a call that it serves."""
    # oneDNN reads a bias as it would lie in memory if it were contiguous.
    bias = None if bias is None else bias.contiguous()
    width = weight.shape[1]
    parts = -(-width // MAX_TERMS)
    terms = -(-width // (16 * parts)) * 16
    out = None
    for start in range(0, width, terms):
        out = _part(x[..., start : start + terms], weight[:, start : start + terms], bias, out)
    return out


@functools.cache
def _works() -> bool:
    """Whether this PyTorch on this machine has the operator."""
    try:
        x = torch.eye(16, device="cpu")
        with torch.inference_mode(False), torch.no_grad():
            out = _part(x, x, None, _part(x, x.t(), x[0].contiguous(), None))
        return torch.equal(out.diagonal(), torch.tensor([3.0] + [2.0] * 15))
    except (AttributeError, RuntimeError, TypeError):
        return False


def serves(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether oneDNN multiplies `x` (..., K) by `weight` (N, K): on the CPU, in fp32, tensors of no other class, large
    enough to gain, and not under autocast, a trace, a transform or a dispatch mode (a FLOP counter does not know the
    operator)."""
    return (
        _is_served(x)
        and _is_served(weight)
        and weight.dim() == 2
        and x.dim() > 0
        and x.shape[-1] == weight.shape[1]
        # oneDNN would read a bias of another size past its end.
        and (bias is None or (_is_served(bias) and bias.shape == weight.shape[:1]))
        and x.numel() * weight.shape[0] >= MIN_PRODUCTS
        and takes_private_operators(x)
        and _works()
    )


def _is_served(tensor: Tensor) -> bool:
    return type(tensor) in _CLASSES and tensor.device.type == "cpu" and tensor.dtype == torch.float32


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor | None:
    """x weight^T + bias, of which no gradient is recorded.

    Args:
        x: (..., K) fp32.
        weight: (N, K) fp32, of any strides.
        bias: (N,) fp32, or None.

    Returns:
        (..., N); None for a call that is PyTorch's (see `serves`), or that needs a gradient.
    """
    if needs_grad(x, weight, bias) or not serves(x, weight, bias):
        return None
    return product(x, weight, bias)


def mm(a: Tensor, b: Tensor) -> Tensor:
    """torch.mm(a, b), by oneDNN where `linear` would be."""
    out = linear(a, b.t(), None)
    return torch.mm(a, b) if out is None else out
