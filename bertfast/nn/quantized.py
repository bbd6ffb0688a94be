"""QuantizedLinear: a linear layer by an int8 product, and what several of them compute as one."""

from __future__ import annotations

import functools

import torch
from torch import Tensor, nn

from bertfast import prepacked
from bertfast.backends import FLOAT
from bertfast.nn.plain import are_alike, are_untouched, check_inference, uncompiled
from bertfast.ops import quantized_linear as int8
from bertfast.ops._autocast import to_autocast

_BUFFERS = ("weight_int8", "weight_scale", "weight_sum")


class QuantizedLinear(nn.Module):
    """Takes the place of an `nn.Linear` in inference on the CPU; see `bertfast.quantize`.

    With `keep_weight` it holds the very same `weight` and `bias` as the linear layer, so that a state dict is that of
    the float model. The int8 copy of the weight lives outside the module, and is made with the first call and again
    after any change that `bertfast.prepacked` sees; `bertfast.refresh` is for others.

    Without `keep_weight`, `weight` is None, and in its place are the buffers `weight_int8` (N, K) and, in fp32 whatever
    the module is cast to, `weight_scale` and `weight_sum` (N,).
    """

    @torch.inference_mode(False)
    def __init__(self, linear: nn.Linear, keep_weight: bool = True) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.register_parameter("weight", linear.weight if keep_weight else None)
        self.register_parameter("bias", linear.bias)
        quantized = (None, None, None) if keep_weight else int8.quantize_weight(linear.weight)
        for name, buffer in zip(_BUFFERS, quantized, strict=True):
            self.register_buffer(name, buffer)
        self.train(linear.training)

    def forward(self, x: Tensor) -> Tensor:
        """(..., K) to (..., N) in the dtype of `x`.

        Raises:
            RuntimeError: a gradient is needed, or the call is recorded (`torch.export`, `torch.jit.trace`).
            ValueError: `x` is not on the CPU, or of another width.
        """
        return joint(x, (self,))

    def to_linear(self) -> nn.Linear:
        """An `nn.Linear` with the very same parameters; only with `keep_weight`."""
        linear = nn.Linear(self.in_features, self.out_features, bias=False, device="meta")
        linear.weight, linear.bias = self.weight, self.bias
        return linear.train(self.training)

    def _apply(self, fn, recurse=True):
        kept = {name: buffer for name in _BUFFERS if (buffer := getattr(self, name)) is not None}
        super()._apply(fn, recurse)
        for name, buffer in kept.items():
            setattr(self, name, buffer.to(getattr(self, name).device))
        return self

    def extra_repr(self) -> str:
        kept = "" if self.weight is not None else ", weight dropped"
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}{kept}"


may_fuse = functools.partial(are_untouched, QuantizedLinear)


def _packed(parts: tuple[QuantizedLinear, ...]) -> int8.QuantizedWeight:
    """The weights one below the other, as oneDNN lays them out."""
    if parts[0].weight is not None:
        return prepacked.copy_of(tuple(part.weight for part in parts), _quantized)
    values = prepacked.copy_of(tuple(part.weight_int8 for part in parts), int8.prepack)
    if len(parts) == 1:
        return int8.QuantizedWeight(values, parts[0].weight_scale, parts[0].weight_sum)
    scale, total = (torch.cat([getattr(part, name) for part in parts]) for name in _BUFFERS[1:])
    return int8.QuantizedWeight(values, scale, total)


def _quantized(weight: Tensor) -> int8.QuantizedWeight:
    quantized = int8.quantize_weight(weight)
    return quantized._replace(values=int8.prepack(quantized.values))


def _bias(parts: tuple[QuantizedLinear, ...]) -> Tensor | None:
    return parts[0].bias if len(parts) == 1 or parts[0].bias is None else torch.cat([part.bias for part in parts])


def _check(x: Tensor, parts: tuple[QuantizedLinear, ...]) -> None:
    if x.device.type != "cpu":
        raise ValueError(f"int8 layers run on the CPU, got x on {x.device}: bertfast.dequantize(model) first")
    if x.dtype not in FLOAT:
        raise ValueError(f"int8 layers take fp32, bf16 and fp16, got x in {x.dtype}: bertfast.dequantize(model) first")
    if x.dim() == 0 or x.shape[-1] != parts[0].in_features:
        raise ValueError(f"x must have shape (..., {parts[0].in_features}), got {tuple(x.shape)}")
    check_inference(x, [tensor for part in parts for tensor in (part.weight, part.bias)], "int8", "dequantize")


@uncompiled
def joint(x: Tensor, parts: tuple[QuantizedLinear, ...]) -> Tensor:
    """The outputs of `parts` side by side, by one product: x (..., K) to (..., N_1 + N_2 + ...). The parts either all
    have a bias or none, and all a weight or none."""
    _check(x, parts)
    (x,) = to_autocast(x)
    return int8.linear(x, _packed(parts), _bias(parts))


@uncompiled
def feed_forward(x: Tensor, dense_in: QuantizedLinear, dense_out: QuantizedLinear, activation: str) -> Tensor:
    """dense_out(activation(dense_in(x))) with an intermediate that goes from fp32 to int8.

    Args:
        activation: a value of `bertfast.activations.FORMULAS`.
    """
    _check(x, (dense_in, dense_out))
    (x,) = to_autocast(x)
    return int8.feed_forward(x, _packed((dense_in,)), dense_in.bias, _packed((dense_out,)), dense_out.bias, activation)


def qkv_projection(x: Tensor, query: nn.Module, key: nn.Module, value: nn.Module) -> tuple[Tensor, ...] | None:
    """query(x), key(x) and value(x) as views of one product; None where they are not alike."""
    parts = query, key, value
    if not may_fuse(*parts) or not are_alike(*parts) or len({part.weight is None for part in parts}) > 1:
        return None
    return joint(x, parts).split([part.out_features for part in parts], -1)
