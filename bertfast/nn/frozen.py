"""FrozenLinear: a linear layer whose weight exists in oneDNN's layout alone."""

from __future__ import annotations

import functools

import torch
from torch import Tensor, nn

from bertfast import prepacked
from bertfast.nn.plain import are_alike, are_untouched, check_inference, uncompiled

_WEIGHT = "weight"


class _Joint:
    """Reordered weights that lie one below the other."""

    def __init__(self, parts: tuple[FrozenLinear, ...]) -> None:
        self.copy = prepacked.reordered(torch.cat([part.weight for part in parts]))

    def rows(self, start: int, stop: int) -> Tensor:
        return self.copy.to_dense()[start:stop]


class FrozenLinear(nn.Module):
    """Takes the place of an `nn.Linear` in inference on the CPU; see `bertfast.freeze`.

    `weight` is a property: (N, K), a copy made anew from the reordered weight, bit by bit what the linear layer had;
    edits of it are lost. State dicts, `load_state_dict`, `.to(dtype)`, copies and pickles go by it. `bias` is that of
    the linear layer.
    """

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self._requires_grad = linear.weight.requires_grad
        self.register_parameter("bias", linear.bias)
        self._joint: tuple[_Joint, int] | None = None  # and the first of its rows that is ours
        self._own: Tensor | None = None
        self._set_weight(linear.weight)
        self.train(linear.training)

    @property
    def weight(self) -> Tensor:
        own = self._own
        if own is not None:
            return own.to_dense()
        joint, start = self._joint
        return joint.rows(start, start + self.out_features).clone()

    @torch.inference_mode(False)
    @torch.no_grad()
    def _set_weight(self, weight: Tensor) -> None:
        self._own, self._joint = prepacked.reordered(weight.detach().contiguous()), None
        self._dtype = weight.dtype

    def forward(self, x: Tensor) -> Tensor:
        """(..., K) to (..., N).

        Raises:
            RuntimeError: a gradient is needed, or the call is recorded (`torch.export`, `torch.jit.trace`).
            ValueError: `x` is not on the CPU, of another dtype than the weight or of another width.
        """
        return product(x, self)

    @torch.inference_mode(False)
    def to_linear(self) -> nn.Linear:
        """An `nn.Linear` with the same weight and the very same bias."""
        linear = nn.Linear(self.in_features, self.out_features, bias=False, device="meta")
        linear.weight, linear.bias = nn.Parameter(self.weight, self._requires_grad), self.bias
        return linear.train(self.training)

    @torch.inference_mode(False)
    @torch.no_grad()
    def _separate(self) -> Tensor:
        self._own = own = prepacked.reordered(self.weight)
        return own

    def reordered_weight(self) -> Tensor:
        """The weight of this layer alone; one that is a part of a joint weight gets a copy beside it."""
        own = self._own
        return self._separate() if own is None else own

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        # In front of the bias, as in nn.Linear.
        destination[prefix + _WEIGHT] = self.weight
        super()._save_to_state_dict(destination, prefix, keep_vars)

    def _load_from_state_dict(self, state_dict, prefix, metadata, strict, missing, unexpected, errors):
        super()._load_from_state_dict(state_dict, prefix, metadata, strict, missing, unexpected, errors)
        key, weight = prefix + _WEIGHT, state_dict.get(prefix + _WEIGHT)
        if key in unexpected:
            unexpected.remove(key)
        if not isinstance(weight, Tensor):
            missing.extend([key] if strict else [])
        elif tuple(weight.shape) != (self.out_features, self.in_features):
            wanted = (self.out_features, self.in_features)
            errors.append(f"size mismatch for {key}: copying {tuple(weight.shape)}, the shape of the layer is {wanted}")
        else:
            self._set_weight(weight.to(device="cpu", dtype=self._dtype))

    def register_parameter(self, name, param):
        if name == _WEIGHT:
            raise AttributeError("the weight of a frozen layer cannot be replaced: bertfast.unfreeze(model) first")
        super().register_parameter(name, param)

    def check_apply(self, fn) -> None:
        """Raises RuntimeError where `_apply(fn)` would make of the weight what cannot be frozen."""
        probe = fn(torch.empty(0, dtype=self._dtype))
        if probe.device.type != "cpu" or probe.dtype not in prepacked.DTYPES:
            raise RuntimeError(
                f"a frozen layer cannot become {probe.dtype} on {probe.device}: bertfast.unfreeze(model) first"
            )

    def _apply(self, fn, recurse=True):
        self.check_apply(fn)
        self._set_weight(fn(self.weight))
        return super()._apply(fn, recurse)

    def __getstate__(self):
        # By value: multiprocessing would share the memory of a tensor that is gone when the child looks for it.
        return {**self.__dict__, "_own": None, "_joint": None, _WEIGHT: self.weight.view(torch.uint8).numpy()}

    def __setstate__(self, state):
        weight = state.pop(_WEIGHT)
        super().__setstate__(state)
        self._set_weight(torch.from_numpy(weight).view(self._dtype))

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"


may_fuse = functools.partial(are_untouched, FrozenLinear)


@uncompiled
def product(x: Tensor, dense: FrozenLinear, activation: str | None = None) -> Tensor:
    """activation(dense(x)) for the activations of `prepacked.linear`."""
    x = _checked(x, (dense,))
    return prepacked.product(x, dense.reordered_weight(), dense.bias, activation)


def qkv_projection(x: Tensor, query: nn.Module, key: nn.Module, value: nn.Module) -> tuple[Tensor, ...] | None:
    """query(x), key(x) and value(x) as views of one product; None where they are not alike."""
    parts = query, key, value
    return _joint_product(x, parts) if may_fuse(*parts) and are_alike(*parts) else None


@uncompiled
def _joint_product(x: Tensor, parts: tuple[FrozenLinear, ...]) -> tuple[Tensor, ...]:
    x, biases = _checked(x, parts), [part.bias for part in parts]
    joint = parts[0]._joint[0] if parts[0]._joint else None
    if joint is None or any(part._joint is None or part._joint[0] is not joint for part in parts):
        joint = _join(parts)
    out = prepacked.product(x, joint.copy, None if biases[0] is None else torch.cat(biases))
    return out.split([part.out_features for part in parts], -1)


@torch.inference_mode(False)
@torch.no_grad()
def _join(parts: tuple[FrozenLinear, ...]) -> _Joint:
    joint, start = _Joint(parts), 0
    for part in parts:
        # In this order: another thread may read the weight meanwhile.
        part._joint = joint, start
        part._own = None
        start += part.out_features
    return joint


def _checked(x: Tensor, parts: tuple[FrozenLinear, ...]) -> Tensor:
    """`x` in the dtype of the weights, which autocast does not change."""
    dtype, width = parts[0]._dtype, parts[0].in_features
    if torch.is_autocast_enabled("cpu"):
        x = x.to(dtype)
    if x.device.type != "cpu" or x.dtype != dtype:
        raise ValueError(f"this layer is frozen in {dtype} on the CPU, got x in {x.dtype} on {x.device}")
    if x.dim() == 0 or x.shape[-1] != width:
        raise ValueError(f"x must have shape (..., {width}), got {tuple(x.shape)}")
    for part in parts:
        if not prepacked.is_bias(part.bias, part.out_features, dtype):
            raise ValueError(f"bias must be contiguous, of shape ({part.out_features},) and {dtype} on the CPU")
    check_inference(x, [part.bias for part in parts], "frozen", "unfreeze")
    return x
