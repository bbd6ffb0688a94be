"""The one tolerance: how far a result may be from the exact one.

    |ours - exact| <= 2 * max over stock variants of max|stock - exact| + noise             for every element

`exact` is the float64 reference, `stock` is plain PyTorch in the dtype under test (eager and SDPA, in three orders of
summation), and `noise` is the rounding that any implementation may show: half of eps for a value that is rounded once,
and for a sum eps times the root of the sum of its squared terms. That is 3.5 standard deviations of terms that are
rounded independently, and never more than eps times the sum of absolute values. The latter would hide a kernel that is
five times worse than stock: for a bf16 GEMM over K = 768 it is 15 times stock's error, because roundings average out.

So a tolerance scales with shape, dtype and data, and no test has a number of its own. It has a floor where the exact
value is 0, as the gradient of a key bias.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import pytest
import torch
from torch import Tensor, nn

from bertfast import BackendError

STOCK_FACTOR = 2.0
# Under one gradient of the outputs our error in the gradients of a tiny model may be 6 times stock's by luck: they come
# from few numbers. Against the largest of four it stays below 2.2.
COTANGENT_SEEDS = range(4)
# Sampled before a model fails: one tensor in some thousands is above twice the largest of 4, none was seen above 16's.
MORE_COTANGENT_SEEDS = range(4, 16)
GRADIENT = "gradients."


def eps_of(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps


def unit_roundoff(dtype: torch.dtype) -> float:
    """The largest relative error of one rounding."""
    return eps_of(dtype) / 2


def accumulation_roundoff(dtype: torch.dtype) -> float:
    """The unit roundoff of what sums, statistics and activations are computed in: fp32 below fp64."""
    return unit_roundoff(torch.promote_types(dtype, torch.float32))


def assert_within(ours: Tensor, stocks: Iterable[Tensor], exact: Tensor, noise: Tensor | float, what: str) -> None:
    """Asserts the rule above for one tensor.

    Args:
        ours: the result under test.
        stocks: stock results, in the dtype that ours must have.
        exact: float64.
        noise: scalar, or broadcasting to `exact`.
        what: named in the message.
    """
    stocks = list(stocks)
    for stock in stocks:
        assert ours.dtype == stock.dtype, f"{what}: dtype is {ours.dtype}, stock gives {stock.dtype}"
    assert_error_within(ours, exact, stock_error(stocks, exact, what), noise, what)


def stock_error(stocks: Iterable[Tensor], exact: Tensor, what: str) -> float:
    """The largest error of any stock variant. One that is not finite where `exact` is allows nothing: left out."""
    errors = []
    for stock in stocks:
        assert stock.shape == exact.shape, f"{what}: stock has shape {tuple(stock.shape)}, not {tuple(exact.shape)}"
        difference = (stock.detach().double() - exact)[exact.isfinite()]
        errors.append(difference.abs().max().item() if difference.numel() else 0.0)
    finite = [error for error in errors if error < float("inf")]
    assert finite or not errors, f"{what}: no stock variant is finite, there is nothing to compare with"
    return max(finite, default=0.0)


def assert_error_within(ours: Tensor, exact: Tensor, stock_error: float, noise: Tensor | float, what: str) -> None:
    """`assert_within` where the stock error is known. Refuses NaN and infinity where `exact` is finite."""
    assert exact.dtype == torch.float64, f"{what}: exact must be float64, got {exact.dtype}"
    assert ours.shape == exact.shape, f"{what}: shape is {tuple(ours.shape)}, expected {tuple(exact.shape)}"
    what = f"{what} ({ours.dtype}, shape {tuple(ours.shape)})"
    value = ours.detach().double()
    defined = exact.isfinite()
    assert torch.equal(value[~defined].nan_to_num(), exact[~defined].nan_to_num()), (
        f"{what}: differs from the exact result where that is not finite"
    )
    broken = defined & ~value.isfinite()
    assert not broken.any(), (
        f"{what}: {int(broken.sum())} elements are not finite where the exact result is, the first at {_first(broken)}"
    )
    floor = torch.as_tensor(noise, dtype=torch.float64, device=exact.device).expand_as(exact)
    assert bool(floor[defined].isfinite().all()), f"{what}: the noise floor is not finite"
    error = torch.where(defined, value - exact, 0.0).abs()
    allowed = STOCK_FACTOR * stock_error + floor
    wrong = (error > allowed) & defined
    if wrong.any():
        excess = torch.where(wrong, error - allowed, -1.0)
        at = tuple(int(i) for i in torch.unravel_index(excess.argmax(), excess.shape))
        raise AssertionError(
            f"{what}: {int(wrong.sum())} elements are too far off; worst at {at}: got {value[at]:.9g}, exact "
            f"{exact[at]:.9g}, error {error[at]:.3g}, allowed {allowed[at]:.3g} (2 x stock's {stock_error:.3g} + noise "
            f"{floor[at]:.3g})"
        )


def _first(mask: Tensor) -> tuple[int, ...]:
    return tuple(mask.nonzero()[0].tolist())


@dataclass(frozen=True)
class Order:
    """A rearrangement of the dimensions that an op sums over: 0 as they are, 1 reversed, else shuffled by that seed."""

    seed: int

    def __call__(self, x: Tensor, *dims: int) -> Tensor:
        return self._select(x, dims, lambda order: order)

    def undo(self, x: Tensor, *dims: int) -> Tensor:
        return self._select(x, dims, torch.argsort)

    def indices(self, size: int) -> Tensor:
        if self.seed == 1:
            return torch.arange(size).flip(0)
        return torch.randperm(size, generator=torch.Generator().manual_seed(self.seed))

    def _select(self, x, dims, of):
        if self.seed == 0:
            return x
        for dim in dims:
            x = x.index_select(dim, of(self.indices(x.shape[dim])).to(x.device))
        return x


ORDERS = (Order(0), Order(1), Order(2))

Inputs = dict[str, Tensor | None]
Results = dict[str, Tensor]


class Case(Protocol):
    """One call of one op: everything that a backend is held to. See `helpers.op_cases`."""

    op: str
    inputs: Inputs

    def served(self, backend: str, grad: bool) -> bool: ...

    def wants_grad(self) -> bool: ...

    def ours(self, inputs: Inputs, backend: str | None) -> Results: ...

    def stocks(self) -> Sequence[Callable[[Inputs], Results]]: ...

    def exact(self, inputs: Inputs) -> Results: ...

    def noise(self, inputs: Inputs, cotangents: Results, exact: Results, results: Results) -> dict[str, Tensor]: ...


def run(function: Callable[[Inputs], Results], inputs: Inputs, cotangents: Results | None) -> Results:
    """The outputs of `function`, and as `d<input>` the gradients of the inputs that require them."""
    leaves = {name: None if t is None else t.detach().requires_grad_(t.requires_grad) for name, t in inputs.items()}
    outputs = function(leaves)
    results = {name: out.detach() for name, out in outputs.items()}
    wanted = {name: leaf for name, leaf in leaves.items() if leaf is not None and leaf.requires_grad}
    if not wanted or cotangents is None:
        return results
    roots = {name: out for name, out in outputs.items() if name in cotangents and out.requires_grad}
    grads = torch.autograd.grad(
        list(roots.values()), list(wanted.values()), [cotangents[name] for name in roots], allow_unused=True
    )
    for (name, leaf), grad in zip(wanted.items(), grads, strict=True):
        assert grad is None or grad.dtype == leaf.dtype, f"d{name} is {grad.dtype}, {name} is {leaf.dtype}"
        results[f"d{name}"] = torch.zeros_like(leaf) if grad is None else grad.detach()
    return results


def random_cotangents(outputs: Results, seed: int = 0) -> Results:
    """Random gradients of the outputs, in their dtypes. Never all ones: LayerNorm's input gradient is then 0."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(out.shape, generator=generator, dtype=torch.float32).to(out)
        for name, out in outputs.items()
        if out.dtype.is_floating_point
    }


def to_double(tensors: Mapping[str, Tensor | None]) -> dict[str, Tensor | None]:
    """Copies in float64; integers, bools and None stay."""
    return {
        name: t.detach().double().requires_grad_(t.requires_grad) if t is not None and t.dtype.is_floating_point else t
        for name, t in tensors.items()
    }


def assert_parity(
    case: Case, backend: str, *, cotangents: Callable[[Results], Results] = random_cotangents
) -> Results | None:
    """Runs a case on `backend`, and backward if it declares that, and holds every output and gradient to the rule.

    Also asserts that inputs are not written, that outputs share no memory with them, and that a backend which declares
    that it cannot serve the case, or not its gradients, refuses it.

    Returns:
        our results; None if the backend refused.
    """
    inputs, backward = case.inputs, case.wants_grad()
    if backward and not case.served(backend, grad=True):
        with pytest.raises(BackendError):
            case.ours(inputs, backend)
        inputs, backward = {name: None if t is None else t.detach() for name, t in inputs.items()}, False
    if not case.served(backend, grad=False):
        with pytest.raises(BackendError):
            case.ours(inputs, backend)
        return None
    before = {name: None if t is None else t.detach().clone() for name, t in inputs.items()}
    with torch.no_grad():
        outputs = case.ours(inputs, backend)
    for name, out in outputs.items():
        for input_name, t in inputs.items():
            assert t is None or not _share_memory(out, t), f"{case.op}: {name} aliases {input_name}"
    upstream = cotangents(outputs) if backward else None
    ours = run(lambda leaves: case.ours(leaves, backend), inputs, upstream)
    for name, out in outputs.items():
        assert torch.equal(_bits(out), _bits(ours[name])), f"{case.op}: {name} differs with gradients enabled"
    for name, t in inputs.items():
        assert t is None or torch.equal(_bits(t), _bits(before[name])), f"{case.op} wrote to its input {name}"
    stocks = [run(stock, inputs, upstream) for stock in case.stocks()]
    exact_upstream = None if upstream is None else to_double(upstream)
    exact_inputs = to_double(inputs)
    exact = run(case.exact, exact_inputs, exact_upstream)
    assert ours.keys() == exact.keys(), f"{case.op}: got {sorted(ours)}, expected {sorted(exact)}"
    noise = case.noise(exact_inputs, exact_upstream or {}, exact, ours)
    for name, value in exact.items():
        what = f"{case.op} {name} on {backend} of {case}"
        assert_within(ours[name], [stock[name] for stock in stocks], value, noise[name], what)
    return ours


def _share_memory(a: Tensor, b: Tensor) -> bool:
    return a.numel() > 0 and b.numel() > 0 and a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()


def _bits(t: Tensor) -> Tensor:
    t = t.detach().reshape(-1)
    return t.new_empty(t.shape).copy_(t).view(torch.uint8)


def assert_models_within(
    ours: nn.Module,
    stock: nn.Module,
    inputs: Mapping[str, Any],
    *,
    dtype: torch.dtype = torch.float32,
    real: Tensor | None = None,
    backward: bool = True,
    what: str | None = None,
) -> dict[str, Tensor]:
    """Holds a whole model to the rule: all floating point outputs and the gradients of all parameters.

    exact is `stock` in float64 with eager attention, and stock variants are eager and sdpa in `dtype`, all from the
    weights of `stock` rounded to `dtype`. The noise of a tensor is eps times its largest exact value, plus what the
    exact value moves by when every weight changes by one eps up or down: gradients of queries and keys are differences
    of larger numbers. For a parameter's gradient the largest of its module counts, and where the exact gradient is 0,
    as that of a key bias, the largest of the block around the module (queries, keys and values).

    Args:
        ours: has the parameters of `stock`, names and values, in any dtype. Copied, like `stock`; both keep their mode.
        stock: a transformers model (`set_attn_implementation`).
        inputs: keyword arguments of both; floating point tensors are cast to the dtype.
        real: (B, S), nonzero where a token counts. Outputs (B, S, ...) are compared, and get a gradient, there only.
        backward: also compare the gradients, under random gradients of all outputs.

    Returns:
        our results by name: outputs (`hidden_states.0` for members of tuples), and `gradients.<parameter>`.
    """
    what = what or type(ours).__name__
    stocks = [_with_attention(stock, name).to(dtype) for name in ("eager", "sdpa")]
    exact_model = _with_attention(stocks[0], "eager").double()
    ours = copy.deepcopy(ours).to(dtype)
    names = {name for name, _ in ours.named_parameters()}
    expected = {name for name, _ in exact_model.named_parameters()}
    assert names == expected, f"{what}: parameters differ from stock's: {sorted(names ^ expected)}"
    errors: dict[str, float] = {}

    def sample(seeds: Sequence[int]) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Tensor] | None]:
        for seed in reversed(seeds):
            cotangents = _model_cotangents(exact_model, inputs, dtype, real, seed) if backward else None
            exact = _run_model(exact_model, inputs, cotangents, real)
            for theirs in (_run_model(model, inputs, cotangents, real) for model in stocks):
                for name, value in exact.items():
                    error = stock_error([theirs[name]], value, f"{what} {name}")
                    errors[name] = max(errors.get(name, 0.0), error)
        return exact, theirs, cotangents

    exact, theirs, cotangents = sample(COTANGENT_SEEDS if backward else COTANGENT_SEEDS[:1])
    mine = _run_model(ours, inputs, cotangents, real)
    moved = _run_model(_nudged(exact_model, eps_of(dtype)), inputs, cotangents, real)
    assert mine.keys() == exact.keys(), f"{what}: results differ from stock's: {sorted(mine.keys() ^ exact.keys())}"
    largest = {name: value.abs().max().item() if value.numel() else 0.0 for name, value in exact.items()}

    def hold() -> None:
        for name, value in exact.items():
            assert mine[name].dtype == theirs[name].dtype, (
                f"{what} {name} is {mine[name].dtype}, not {theirs[name].dtype}"
            )
            noise = eps_of(dtype) * _scale(name, largest)
            noise += (moved[name] - value).abs().max().item() if value.numel() else 0.0
            assert_error_within(mine[name], value, errors[name], noise, f"{what} {name}")

    try:
        hold()
    except AssertionError:
        if not backward:
            raise
        sample(MORE_COTANGENT_SEEDS)
        hold()
    return mine


def _with_attention(model: nn.Module, implementation: str) -> nn.Module:
    model = copy.deepcopy(model)
    model.set_attn_implementation(implementation)
    return model


def _nudged(model: nn.Module, eps: float) -> nn.Module:
    model = copy.deepcopy(model)
    model.zero_grad()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            signs = 2 * torch.randint(2, parameter.shape, generator=generator) - 1
            parameter *= 1 + eps * signs.to(parameter.device)
    return model


def _scale(name: str, largest: Mapping[str, float]) -> float:
    if not name.startswith(GRADIENT):
        return largest[name]
    module = name.rpartition(".")[0]
    block = module.rpartition(".")[0]
    of_module, of_block = (
        max(size for other, size in largest.items() if other.startswith(f"{prefix}.")) for prefix in (module, block)
    )
    return of_block if largest[name] < eps_of(torch.float32) ** 2 * of_block else of_module


def _outputs(model: nn.Module, inputs: Mapping[str, Any]) -> dict[str, Tensor]:
    dtype = next(model.parameters()).dtype
    cast = {
        name: t.to(dtype) if isinstance(t, Tensor) and t.dtype.is_floating_point else t for name, t in inputs.items()
    }
    found: dict[str, Tensor] = {}
    for name, value in dict(model(**cast)).items():
        if isinstance(value, Tensor):
            found[name] = value
        elif value is not None:
            found.update({f"{name}.{i}": t for i, t in enumerate(value)})
    return found


def _mask_rows(t: Tensor, real: Tensor | None) -> Tensor:
    if real is None or t.shape[:2] != real.shape:
        return t
    return t.masked_fill((real == 0).view(*real.shape, *(1,) * (t.dim() - 2)), 0.0)


def _model_cotangents(model, inputs, dtype, real, seed) -> dict[str, Tensor]:
    with torch.no_grad():
        outputs = {name: out.to(dtype) for name, out in _outputs(model, inputs).items() if out.dtype.is_floating_point}
    return {name: _mask_rows(t, real) for name, t in random_cotangents(outputs, seed).items()}


def _run_model(model, inputs, cotangents, real) -> dict[str, Tensor]:
    model.zero_grad()
    outputs = _outputs(model, inputs)
    results = {name: _mask_rows(out.detach(), real) for name, out in outputs.items()}
    if cotangents is None:
        return results
    roots = {name: out for name, out in outputs.items() if out.requires_grad}
    torch.autograd.backward(list(roots.values()), [cotangents[name].to(out.dtype) for name, out in roots.items()])
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            results[f"{GRADIENT}{name}"] = parameter.grad
    return results
