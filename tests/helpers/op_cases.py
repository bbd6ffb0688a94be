"""Per op: how to call ours, stock and the exact formula on one dict of inputs, and how much rounding to allow.

A case is one call. `helpers.tolerance.assert_parity(case, backend)` holds a backend to it, forward and backward; a new
backend needs no new case. Names of results are those of the arguments: `dquery` is the gradient of `query`.

In the noise formulas `u` is the unit roundoff of the dtype under test, which values are rounded to when they are
stored, and `acc` that of fp32 (fp64 for fp64), which sums, statistics and activations are computed in. `err_x` is the
rounding that x may carry; sums of many terms carry it as `_sum_of` says.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from bertfast import backends, ops, reference
from bertfast.activations import get_activation
from bertfast.dropout import keep_scale
from helpers.tolerance import ORDERS, Inputs, Order, Results, accumulation_roundoff, unit_roundoff

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ALL_DTYPES = (*DTYPES, torch.float64)


def backends_for(
    op: str, dtypes: Iterable[torch.dtype] = DTYPES, *, grad: bool = False
) -> list[tuple[str, torch.dtype]]:
    """(backend, dtype) of every registered backend that serves `op` on the CPU here, at least forward; with `grad`,
    backward too."""
    return [
        (capability.backend, dtype)
        for capability in backends.candidates()
        for dtype in dtypes
        if capability.op == op
        and not capability.not_supported_reasons(backends.Call(op, "cpu", None, (dtype,), grad=grad))
    ]


def each_backend_for(op: str) -> list[tuple[str, torch.dtype]]:
    """The backends of `backends_for`, each in the first dtype that it serves, for tests that need only one."""
    first: dict[str, torch.dtype] = {}
    for backend, dtype in backends_for(op):
        first.setdefault(backend, dtype)
    return list(first.items())


def random(*shape: int, dtype: torch.dtype, seed: int, grad: bool = True, scale: float = 1.0, shift: float = 0.0):
    """Normal numbers, the same whatever was drawn before."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator, dtype=torch.float64) * scale + shift
    return x.to(dtype).requires_grad_(grad)


def seed_tensor(value: int = 0x5EED_1234_5678) -> Tensor:
    return torch.tensor([value], dtype=torch.int64)


def _dims(x: Tensor) -> tuple[int, ...]:
    """Rows and columns, the dimensions that linear layers and LayerNorm sum over, forward or backward."""
    return (-1,) if x.dim() == 1 else (0, -1)


def _rows(x: Tensor) -> Tensor:
    return x.reshape(math.prod(x.shape[:-1]), x.shape[-1])


def _sum_of(err: Tensor, dims: int | tuple[int, ...]) -> Tensor:
    """The rounding of a sum whose terms carry `err`: twice the root of the sum of squares, 3.5 standard deviations."""
    return 2 * err.square().sum(dims, keepdim=isinstance(dims, int)).sqrt()


def _through(err: Tensor, factor: Tensor) -> Tensor:
    """The same for the sums of `x @ factor` when x carries `err`."""
    return 2 * (err.square() @ factor.square()).sqrt()


@dataclass(frozen=True)
class OpCase:
    """`inputs` by argument name, differentiated where they require gradients; `settings` are the other arguments."""

    inputs: Inputs
    settings: dict[str, Any] = field(default_factory=dict)
    op: ClassVar[str]

    def __str__(self) -> str:
        shapes = [
            f"{name}{tuple(t.shape)}" + ("" if t.is_contiguous() else f" strides {t.stride()}")
            for name, t in self.inputs.items()
            if t is not None
        ]
        return f"({', '.join([*shapes, *(f'{k}={v}' for k, v in self.settings.items() if k != 'seed')])})"

    @property
    def dropout_p(self) -> float:
        return self.settings.get("dropout_p", 0.0)

    def facts(self) -> dict[str, Any]:
        """What the choice of a backend depends on, apart from device, dtypes, dropout and gradients."""
        return {}

    def dtypes(self) -> tuple[torch.dtype, ...]:
        return tuple({t.dtype for t in self.inputs.values() if t is not None and t.dtype.is_floating_point})

    def served(self, backend: str, grad: bool) -> bool:
        """Whether `backend` declares that it serves this case."""
        found = [c for c in backends.candidates() if (c.op, c.backend) == (self.op, backend)]
        device = next(t.device for t in self.inputs.values() if t is not None)
        compute = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
        call = backends.Call(self.op, device.type, compute, self.dtypes(), grad, self.dropout_p > 0.0, **self.facts())
        return bool(found) and not found[0].not_supported_reasons(call)

    def wants_grad(self) -> bool:
        return any(t is not None and t.requires_grad for t in self.inputs.values())

    def keep(self, shape: Iterable[int], stream: str | None = None) -> Tensor | None:
        if self.dropout_p == 0.0:
            return None
        return ops.dropout_mask(self.settings["seed"], tuple(shape), self.dropout_p, stream or self.op)

    def public_settings(self) -> dict[str, Any]:
        """The settings as the public op takes them."""
        settings = dict(self.settings)
        if "seed" in settings:
            settings["_seed"] = settings.pop("seed")
        return settings

    def stocks(self) -> list[Callable[[Inputs], Results]]:
        return [lambda inputs, order=order: self.stock(inputs, order) for order in ORDERS]


def _drop(x: Tensor, keep: Tensor | None, dropout_p: float) -> Tensor:
    return x if keep is None else torch.where(keep, x * keep_scale(dropout_p), 0.0)


# ---- attention


def _explicit_mask(mask: Tensor | None, is_causal: bool, query: Tensor, s_k: int, bottom_right: bool):
    """Mask and causality as one mask that stock takes: bool, or of the query's dtype with finite values kept finite."""
    if mask is not None and mask.dtype != torch.bool:
        limits = torch.finfo(query.dtype)
        if torch.finfo(mask.dtype).max > limits.max:
            mask = torch.where(mask.isinf(), mask, mask.clamp(limits.min, limits.max))
        mask = mask.to(query.dtype)
    if not is_causal:
        return mask
    s_q = query.shape[-2]
    visible = torch.ones(s_q, s_k, dtype=torch.bool, device=query.device).tril(s_k - s_q if bottom_right else 0)
    if mask is None:
        return visible
    return mask & visible if mask.dtype == torch.bool else mask.masked_fill(~visible, -math.inf)


def _rearranged_mask(mask: Tensor | None, order: Order) -> Tensor | None:
    if mask is None:
        return None
    return order(mask, *(dim for dim in (-2, -1) if mask.shape[dim] > 1))


def _eager_attention(q, k, v, mask, keep, dropout_p, scale):
    return reference.attention(q, k, v, mask, keep=keep, dropout_p=dropout_p, scale=scale)[0]


def _sdpa(q, k, v, mask, keep, dropout_p, scale):
    assert keep is None
    return F.scaled_dot_product_attention(q, k, v, mask, scale=scale)


def _stock_attention(attend, order, q, k, v, mask, keep, dropout_p, scale):
    """Sums over keys, queries (in the backward pass) and the head dim in another order."""
    mask, keep = _rearranged_mask(mask, order), None if keep is None else order(keep, -2, -1)
    out = attend(order(q, -2, -1), order(k, -2, -1), order(v, -2, -1), mask, keep, dropout_p, scale)
    return order.undo(out, -2, -1)


@dataclass(frozen=True)
class _AttentionNoise:
    out: Tensor
    dquery: Tensor
    dkey: Tensor
    dvalue: Tensor
    dscores: Tensor


def _attention_noise(q, k, v, mask, keep, dropout_p, scale, dout, u, acc) -> _AttentionNoise:
    """P and dS = P (dP - delta) are rounded where they meet V and K, and O where it makes delta."""
    scale = 1.0 / math.sqrt(q.shape[-1]) if scale is None else scale
    probabilities = reference.softmax(reference.attention_scores(q, k, mask, False, scale))
    err_scores = acc * abs(scale) * _through(q, k.mT)
    dropped = _drop(probabilities, keep, dropout_p)
    err = dropped * (u + err_scores)
    out = dropped @ v
    delta = (dout * out).sum(-1, keepdim=True)
    err_delta = u * _sum_of(dout * out, -1)
    dp = _drop(dout @ v.mT, keep, dropout_p)
    err_dp = acc * _drop(_through(dout, v.mT), keep, dropout_p)
    difference = (dp - delta).abs()
    err_dscores = probabilities * (err_dp + err_delta + (u + err_scores) * difference)
    return _AttentionNoise(
        _through(err, v) + u * out.abs(),
        abs(scale) * _through(err_dscores, k),
        abs(scale) * _through(err_dscores.mT, q),
        _through(err.mT, dout),
        err_dscores,
    )


def _reduced(err: Tensor, shape: torch.Size) -> Tensor:
    """The rounding of a gradient that is summed over broadcast dimensions."""
    return 2 * err.square().sum_to_size(shape).sqrt() if err.shape != shape else err


def _plus_rounding(noise: dict[str, Tensor], exact: Results, results: Results) -> dict[str, Tensor]:
    """Every result is rounded to its own dtype at the end."""
    return {name: noise[name] + unit_roundoff(results[name].dtype) * value.abs() for name, value in exact.items()}


class Attention(OpCase):
    op = "attention"

    def facts(self) -> dict[str, Any]:
        mask = self.inputs["attn_mask"]
        kind = "none" if mask is None else "bool" if mask.dtype == torch.bool else "float"
        return {"head_dim": self.inputs["query"].shape[-1], "mask": kind}

    def dtypes(self) -> tuple[torch.dtype, ...]:
        return (self.inputs["query"].dtype,)

    def ours(self, inputs: Inputs, backend: str | None) -> Results:
        return {"out": ops.attention(**inputs, **self.public_settings(), backend=backend)}

    def stocks(self) -> list[Callable[[Inputs], Results]]:
        ways = (_eager_attention,) if self.dropout_p else (_eager_attention, _sdpa)
        stocks = [
            lambda inputs, way=way, order=order: {"out": self._stock(way, order, inputs)}
            for way in ways
            for order in ORDERS
        ]
        return [*stocks, self._causal_sdpa] if self._is_plain_causal() else stocks

    def _is_plain_causal(self) -> bool:
        return self.settings.get("is_causal", False) and self.inputs["attn_mask"] is None and not self.dropout_p

    def _causal_sdpa(self, inputs: Inputs) -> Results:
        q, k, v = (inputs[name] for name in ("query", "key", "value"))
        return {"out": F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.settings.get("scale"))}

    def _arguments(self, inputs: Inputs):
        q, k, v = (inputs[name] for name in ("query", "key", "value"))
        s_k = k.shape[-2]
        mask = _explicit_mask(inputs["attn_mask"], self.settings.get("is_causal", False), q, s_k, False)
        return q, k, v, mask, self.keep((*q.shape[:3], s_k)), self.dropout_p, self.settings.get("scale")

    def _stock(self, way, order: Order, inputs: Inputs) -> Tensor:
        return _stock_attention(way, order, *self._arguments(inputs))

    def exact(self, inputs: Inputs) -> Results:
        keep = self.keep((*inputs["query"].shape[:3], inputs["key"].shape[-2]))
        settings = {name: value for name, value in self.settings.items() if name != "seed"}
        return {"out": reference.attention(**inputs, keep=keep, **settings)[0]}

    def noise(self, inputs: Inputs, cotangents: Results, exact: Results, results: Results) -> dict[str, Tensor]:
        dtype = results["out"].dtype
        arguments = self._arguments({name: None if t is None else t.detach() for name, t in inputs.items()})
        dout = cotangents.get("out", torch.zeros_like(exact["out"])).detach()
        found = _attention_noise(*arguments, dout, unit_roundoff(dtype), accumulation_roundoff(dtype))
        noise = {"out": found.out, "dquery": found.dquery, "dkey": found.dkey, "dvalue": found.dvalue}
        if "dattn_mask" in exact:
            noise["dattn_mask"] = _reduced(found.dscores, exact["dattn_mask"].shape)
        return _plus_rounding(noise, exact, results)


class VarlenAttention(OpCase):
    op = "varlen_attention"

    def facts(self) -> dict[str, Any]:
        return {"head_dim": self.inputs["query"].shape[-1]}

    def ours(self, inputs: Inputs, backend: str | None) -> Results:
        longest = {name: int(inputs[f"cu_seqlens_{name}"].diff().max()) if self._count(inputs) else 0 for name in "qk"}
        out = ops.varlen_attention(
            **inputs,
            max_seqlen_q=longest["q"],
            max_seqlen_k=longest["k"],
            **self.public_settings(),
            backend=backend,
        )
        return {"out": out}

    def _count(self, inputs: Inputs) -> int:
        return inputs["cu_seqlens_q"].numel() - 1

    def _sequences(self, inputs: Inputs, *like_query: Tensor):
        """Per sequence: the arguments of attention with heads in front, and the rows of `like_query`."""
        ends_q, ends_k = inputs["cu_seqlens_q"].tolist(), inputs["cu_seqlens_k"].tolist()
        lengths = [torch.tensor(ends).diff().max().item() if len(ends) > 1 else 0 for ends in (ends_q, ends_k)]
        count = self._count(inputs)
        keep = self.keep((count, inputs["query"].shape[1], *lengths), "attention")
        for i in range(count):
            rows_q, rows_k = slice(ends_q[i], ends_q[i + 1]), slice(ends_k[i], ends_k[i + 1])
            q, *others = (t[rows_q].transpose(0, 1) for t in (inputs["query"], *like_query))
            k, v = (inputs[name][rows_k].transpose(0, 1) for name in ("key", "value"))
            s_q, s_k = q.shape[1], k.shape[1]
            mask = _explicit_mask(None, self.settings.get("is_causal", False), q, s_k, True)
            kept = None if keep is None else keep[i, :, :s_q, :s_k]
            yield (q, k, v, mask, kept, self.dropout_p, self.settings.get("scale")), others

    def stocks(self) -> list[Callable[[Inputs], Results]]:
        ways = (_eager_attention,) if self.dropout_p else (_eager_attention, _sdpa)
        return [
            lambda inputs, way=way, order=order: {"out": self._stock(way, order, inputs)}
            for way in ways
            for order in ORDERS
        ]

    def _stock(self, way, order: Order, inputs: Inputs) -> Tensor:
        outs = [_stock_attention(way, order, *arguments).transpose(0, 1) for arguments, _ in self._sequences(inputs)]
        return torch.cat(outs) if outs else torch.zeros_like(inputs["query"])

    def exact(self, inputs: Inputs) -> Results:
        ends = [inputs[f"cu_seqlens_{name}"].diff() for name in "qk"]
        longest = [int(e.max()) if e.numel() else 0 for e in ends]
        keep = self.keep((self._count(inputs), inputs["query"].shape[1], *longest), "attention")
        settings = {name: value for name, value in self.settings.items() if name != "seed"}
        return {"out": reference.varlen_attention(**inputs, keep=keep, **settings)}

    def noise(self, inputs: Inputs, cotangents: Results, exact: Results, results: Results) -> dict[str, Tensor]:
        dtype = results["out"].dtype
        plain = {name: t.detach() for name, t in inputs.items()}
        dout = cotangents.get("out", torch.zeros_like(exact["out"])).detach()
        noise = {name: [] for name in ("out", "dquery", "dkey", "dvalue")}
        for arguments, (rows,) in self._sequences(plain, dout):
            found = _attention_noise(*arguments, rows, unit_roundoff(dtype), accumulation_roundoff(dtype))
            for name, parts in noise.items():
                parts.append(getattr(found, name).transpose(0, 1))
        joined = {
            name: torch.cat(parts) if parts else torch.zeros_like(exact[name])
            for name, parts in noise.items()
            if name in exact
        }
        return _plus_rounding(joined, exact, results)


# ---- LayerNorm


def _layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """Stock LayerNorm with statistics in fp32, as on a GPU: on the CPU it keeps them in half precision, which gives NaN
    for constant rows, and refuses some mixes of dtypes."""
    wide = torch.promote_types(
        torch.promote_types(torch.promote_types(x.dtype, weight.dtype), bias.dtype), torch.float32
    )
    return F.layer_norm(x.to(wide), weight.shape, weight.to(wide), bias.to(wide), eps).to(x.dtype)


@dataclass(frozen=True)
class _LayerNormNoise:
    out: Tensor
    dx: Tensor
    size_of_dx: Tensor
    dweight: Tensor
    dbias: Tensor


def _layer_norm_noise(z, err_z, weight, bias, eps_value, dout, u, acc) -> _LayerNormNoise:
    """LayerNorm of z that carries the rounding err_z of its sum; internals in fp32, `dout` already through dropout."""
    rows, width = tuple(range(z.dim() - 1)), max(z.shape[-1], 1)
    mean = z.mean(-1, keepdim=True)
    rstd = torch.rsqrt((z - mean).square().mean(-1, keepdim=True) + eps_value)
    xhat = (z - mean) * rstd
    err_centred = err_z + acc * (mean.abs() + (z - mean).abs())
    relative = acc + rstd * _sum_of(xhat * err_centred, -1) / width
    err_xhat = rstd * err_centred + xhat.abs() * relative
    g = dout * weight

    def err_mean(x: Tensor, err: Tensor | float) -> Tensor:
        return acc * x.mean(-1, keepdim=True).abs() + _sum_of(acc * x.abs() + err, -1) / width

    mean_gx = (g * xhat).mean(-1, keepdim=True).abs()
    dx = rstd * (g - g.mean(-1, keepdim=True) - xhat * (g * xhat).mean(-1, keepdim=True))
    err_dx = dx.abs() * relative + rstd * (
        acc * g.abs() + err_mean(g, 0.0) + err_xhat * mean_gx + xhat.abs() * err_mean(g * xhat, g.abs() * err_xhat)
    )
    return _LayerNormNoise(
        err_xhat * weight.abs() + acc * (xhat * weight).abs() + acc * bias.abs(),
        err_dx,
        dx.abs(),
        _sum_of(dout * (err_xhat + acc * xhat.abs()), rows),
        acc * _sum_of(dout, rows),
    )


class AddLayerNorm(OpCase):
    op = "add_layer_norm"

    def facts(self) -> dict[str, Any]:
        return {"width": self.inputs["weight"].shape[0]}

    def ours(self, inputs: Inputs, backend: str | None) -> Results:
        out = ops.add_layer_norm(**inputs, **self.public_settings(), backend=backend)
        return dict(zip(("out", "sum"), out, strict=True)) if self.settings.get("return_sum") else {"out": out}

    @property
    def eps(self) -> float:
        return self.settings.get("eps", 1e-12)

    def _results(self, out: Tensor, total: Tensor) -> Results:
        return {"out": out, "sum": total} if self.settings.get("return_sum") else {"out": out}

    def stock(self, inputs: Inputs, order: Order) -> Results:
        x, residual, x_bias = (inputs[name] for name in ("x", "residual", "x_bias"))
        dims = _dims(x)
        dtype = x.dtype if residual is None else torch.promote_types(x.dtype, residual.dtype)
        keep = self.keep(x.shape)
        total = order(x, *dims)
        if x_bias is not None:
            total = total + order(x_bias, 0)
        total = _drop(total, None if keep is None else order(keep, *dims), self.dropout_p)
        if residual is not None:
            total = order(residual, *dims) + total
        total = total.to(dtype)
        out = _layer_norm(total, order(inputs["weight"], 0), order(inputs["bias"], 0), self.eps)
        return self._results(order.undo(out, *dims), order.undo(total, *dims))

    def exact(self, inputs: Inputs) -> Results:
        out, total = reference.add_layer_norm(
            **inputs, eps=self.eps, keep=self.keep(inputs["x"].shape), dropout_p=self.dropout_p
        )
        return self._results(out, total)

    def noise(self, inputs: Inputs, cotangents: Results, exact: Results, results: Results) -> dict[str, Tensor]:
        x, residual, weight, bias, x_bias = (
            None if inputs[name] is None else inputs[name].detach()
            for name in ("x", "residual", "weight", "bias", "x_bias")
        )
        u, acc = unit_roundoff(results["out"].dtype), accumulation_roundoff(results["out"].dtype)
        keep = self.keep(x.shape)
        terms = [_drop(t.expand_as(x), keep, self.dropout_p) for t in (x, x_bias) if t is not None]
        terms += [] if residual is None else [residual]
        z = sum(terms)
        err_z = u * (len(terms) - 1) * sum(t.abs() for t in terms)
        dout, dsum = (cotangents.get(name, torch.zeros_like(z)) for name in ("out", "sum"))
        found = _layer_norm_noise(z, err_z, weight, bias, self.eps, dout, u, acc)
        err_dz = found.dx + acc * dsum.abs()
        err_dx = _drop(err_dz, keep, self.dropout_p)
        noise = {
            "out": found.out,
            "sum": err_z,
            "dx": err_dx,
            "dresidual": err_dz,
            "dweight": found.dweight,
            "dbias": found.dbias,
        }
        if "dx_bias" in exact:
            # dx is stored before stock sums it over the rows.
            size = _drop(found.size_of_dx + dsum.abs(), keep, self.dropout_p)
            noise["dx_bias"] = _reduced(err_dx + u * size, x_bias.shape)
        return _plus_rounding(noise, exact, results)


class EmbedLayerNorm(OpCase):
    op = "embed_layer_norm"

    def facts(self) -> dict[str, Any]:
        return {"width": self.inputs["weight"].shape[0]}

    def ours(self, inputs: Inputs, backend: str | None) -> Results:
        return {"out": ops.embed_layer_norm(**inputs, **self.public_settings(), backend=backend)}

    @property
    def eps(self) -> float:
        return self.settings.get("eps", 1e-12)

    def _ids(self, inputs: Inputs) -> dict[str, Tensor]:
        shape = (inputs["input_ids"] if inputs["inputs_embeds"] is None else inputs["inputs_embeds"][..., 0]).shape
        positions, device = inputs["position_ids"], inputs["weight"].device
        if positions is None:
            positions = torch.arange(shape[-1], device=device)
        ids = {"position": positions.long().expand(shape)}
        if inputs["inputs_embeds"] is None:
            ids["word"] = inputs["input_ids"].long()
        if inputs["token_type"] is not None:
            types = inputs["token_type_ids"]
            types = torch.zeros((), dtype=torch.long, device=device) if types is None else types.long()
            ids["token_type"] = types.expand(shape)
        return ids

    def _without_padding(self, name: str, table: Tensor) -> Tensor:
        """The table, whose padding row passes no gradient."""
        row = self.settings.get({"word": "padding_idx", "position": "position_padding_idx"}.get(name, ""))
        if row is None:
            return table
        is_padding = (torch.arange(table.shape[0], device=table.device) == row).unsqueeze(1)
        return torch.where(is_padding, table.detach(), table)

    def _terms(self, inputs: Inputs) -> list[Tensor]:
        ids = self._ids(inputs)
        terms = [] if inputs["inputs_embeds"] is None else [inputs["inputs_embeds"]]
        names = [name for name in ("word", "token_type", "position") if name in ids]
        return terms + [self._without_padding(name, inputs[name])[ids[name]] for name in names]

    def stock(self, inputs: Inputs, order: Order) -> Results:
        total, *others = (order(t, 0, -1) for t in self._terms(inputs))
        for term in others:
            total = total + term
        out = _layer_norm(total, order(inputs["weight"], 0), order(inputs["bias"], 0), self.eps)
        out = order.undo(out, 0, -1)
        return {"out": _drop(out, self.keep(out.shape), self.dropout_p)}

    def exact(self, inputs: Inputs) -> Results:
        ids = self._ids(inputs)
        words = inputs["inputs_embeds"]
        if words is None:
            words = self._without_padding("word", inputs["word"])[ids["word"]]
        position = self._without_padding("position", inputs["position"])
        arguments = (ids.get("token_type"), ids["position"], position, inputs["token_type"])
        keep = self.keep(words.shape)
        out = reference.embed_layer_norm(
            words, *arguments, inputs["weight"], inputs["bias"], self.eps, keep=keep, dropout_p=self.dropout_p
        )
        return {"out": out}

    def noise(self, inputs: Inputs, cotangents: Results, exact: Results, results: Results) -> dict[str, Tensor]:
        plain = {name: None if t is None else t.detach() for name, t in inputs.items()}
        u, acc = unit_roundoff(results["out"].dtype), accumulation_roundoff(results["out"].dtype)
        terms = self._terms(plain)
        z = sum(terms)
        err_z = u * (len(terms) - 1) * sum(t.abs() for t in terms)
        keep = self.keep(z.shape)
        # The output is stored before it is dropped, and its gradient after.
        dout = _drop(cotangents.get("out", torch.zeros_like(z)), keep, self.dropout_p)
        rows = tuple(range(z.dim() - 1))
        found = _layer_norm_noise(z, err_z, plain["weight"], plain["bias"], self.eps, dout, u, acc)
        noise = {
            "out": _drop(found.out, keep, self.dropout_p),
            "dinputs_embeds": found.dx,
            "dweight": found.dweight + u * _sum_of(dout, rows),
            "dbias": found.dbias + u * _sum_of(dout, rows),
        }
        # dz is stored, and a table's gradient is summed in the dtype of the table.
        err_row = found.dx + u * found.size_of_dx
        for name, ids in self._ids(plain).items():
            squares = torch.zeros_like(plain[name]).index_add(0, ids.flatten(), err_row.square().flatten(0, -2))
            noise[f"d{name}"] = 2 * squares.sqrt()
        return _plus_rounding({name: noise.get(name, torch.zeros_like(exact[name])) for name in exact}, exact, results)


# ---- linear layers


def _derivatives(function: Callable[[Tensor], Tensor], h: Tensor) -> tuple[Tensor, Tensor]:
    h = h.detach().requires_grad_()
    first = torch.autograd.grad(function(h).sum(), h, create_graph=True)[0]
    if not first.requires_grad:
        return first, torch.zeros_like(first)
    second = torch.autograd.grad(first.sum(), h, allow_unused=True)[0]
    return first.detach(), torch.zeros_like(first) if second is None else second


def _linear_error(x: Tensor, weight: Tensor, bias: Tensor | None, u: float, acc: float) -> tuple[Tensor, Tensor]:
    """x weight^T + bias and its rounding: summed in fp32, then stored."""
    h = F.linear(x, weight, bias)
    squares = F.linear(x.square(), weight.square(), None if bias is None else bias.square())
    return h, 2 * acc * squares.sqrt() + u * h.abs()


def _linear_gradients(x, weight, dh, err_dh, acc):
    """The roundings of dx, dweight and dbias of a linear layer whose output gradient dh carries err_dh."""
    err = _rows(err_dh + acc * dh.abs())
    return (
        _through(err, weight).reshape(x.shape),
        _through(err.mT, _rows(x)),
        _sum_of(err, (0,)),
    )


class LinearGelu(OpCase):
    op = "linear_gelu"

    def ours(self, inputs: Inputs, backend: str | None) -> Results:
        return {"out": ops.linear_gelu(**inputs, **self.public_settings(), backend=backend)}

    def _gelu(self, h: Tensor) -> Tensor:
        return F.gelu(h, approximate=self.settings.get("approximate", "none"))

    def stock(self, inputs: Inputs, order: Order) -> Results:
        x, weight, bias = (inputs[name] for name in ("x", "weight", "bias"))
        h = F.linear(order(x, *_dims(x)), order(weight, 0, 1), None if bias is None else order(bias, 0))
        return {"out": order.undo(self._gelu(h), *_dims(x))}

    def exact(self, inputs: Inputs) -> Results:
        return {"out": reference.linear_gelu(**inputs, approximate=self.settings.get("approximate", "none"))}

    def noise(self, inputs: Inputs, cotangents: Results, exact: Results, results: Results) -> dict[str, Tensor]:
        x, weight, bias = (None if inputs[n] is None else inputs[n].detach() for n in ("x", "weight", "bias"))
        u, acc = unit_roundoff(results["out"].dtype), accumulation_roundoff(results["out"].dtype)
        h, err_h = _linear_error(x, weight, bias, u, acc)
        slope, curvature = _derivatives(self._gelu, h)
        dout = cotangents.get("out", torch.zeros_like(h))
        err_dh = dout.abs() * (curvature.abs() * err_h + acc) + u * (dout * slope).abs()
        dx, dweight, dbias = _linear_gradients(x, weight, dout * slope, err_dh, acc)
        noise = {"out": slope.abs() * err_h + acc * h.abs(), "dx": dx, "dweight": dweight, "dbias": dbias}
        return _plus_rounding(noise, exact, results)


class FeedForward(OpCase):
    op = "feed_forward"

    def facts(self) -> dict[str, Any]:
        return {"features": (self.activation if isinstance(self.activation, str) else "callable activation",)}

    def ours(self, inputs: Inputs, backend: str | None) -> Results:
        return {"out": ops.feed_forward(**inputs, **self.public_settings(), backend=backend)}

    @property
    def activation(self):
        return self.settings.get("activation", "gelu")

    def stock(self, inputs: Inputs, order: Order) -> Results:
        x, w_in, b_in, w_out, b_out = (inputs[name] for name in ("x", "w_in", "b_in", "w_out", "b_out"))
        dims = _dims(x)
        h = F.linear(order(x, *dims), order(w_in, 0, 1), None if b_in is None else order(b_in, 0))
        keep = self.keep((*x.shape[:-1], w_in.shape[0]))
        hidden = get_activation(self.activation)(h)
        hidden = _drop(hidden, None if keep is None else order(keep, *dims), self.dropout_p)
        out = F.linear(hidden, order(w_out, 0, 1), None if b_out is None else order(b_out, 0))
        return {"out": order.undo(out, *dims)}

    def exact(self, inputs: Inputs) -> Results:
        keep = self.keep((*inputs["x"].shape[:-1], inputs["w_in"].shape[0]))
        out = reference.feed_forward(**inputs, activation=self.activation, keep=keep, dropout_p=self.dropout_p)
        return {"out": out}

    def noise(self, inputs: Inputs, cotangents: Results, exact: Results, results: Results) -> dict[str, Tensor]:
        x, w_in, b_in, w_out, b_out = (
            None if inputs[name] is None else inputs[name].detach() for name in ("x", "w_in", "b_in", "w_out", "b_out")
        )
        u, acc = unit_roundoff(results["out"].dtype), accumulation_roundoff(results["out"].dtype)
        activate = get_activation(self.activation)
        h, err_h = _linear_error(x, w_in, b_in, u, acc)
        slope, curvature = _derivatives(activate, h)
        keep = self.keep(h.shape)
        hidden = _drop(activate(h), keep, self.dropout_p)
        err_hidden = _drop(slope.abs() * err_h + acc * h.abs(), keep, self.dropout_p) + u * hidden.abs()
        out, err_sum = _linear_error(hidden, w_out, b_out, u, acc)
        dout = cotangents.get("out", torch.zeros_like(out))
        dhidden = dout @ w_out
        err_dhidden = acc * _through(dout, w_out) + u * dhidden.abs()
        dhidden, err_dhidden = (_drop(t, keep, self.dropout_p) for t in (dhidden, err_dhidden))
        dh = dhidden * slope
        err_dh = err_dhidden * slope.abs() + dhidden.abs() * (curvature.abs() * err_h + acc) + u * dh.abs()
        dx, dw_in, db_in = _linear_gradients(x, w_in, dh, err_dh, acc)
        rows = _rows(dout)
        noise = {
            "out": _through(err_hidden, w_out.mT) + err_sum,
            "dx": dx,
            "dw_in": dw_in,
            "db_in": db_in,
            "dw_out": _through(rows.mT, _rows(err_hidden)) + acc * _through(rows.mT, _rows(hidden)),
            "db_out": acc * _sum_of(rows, (0,)),
        }
        return _plus_rounding(noise, exact, results)


class QkvProjection(OpCase):
    op = "qkv_projection"

    def _layers(self, inputs: Inputs) -> Iterable[tuple[str, Tensor, Tensor | None]]:
        return ((name, inputs[f"w{name}"], inputs[f"b{name}"]) for name in "qkv")

    def ours(self, inputs: Inputs, backend: str | None) -> Results:
        _, weights, biases = zip(*self._layers(inputs), strict=True)
        biases = None if biases[0] is None else biases
        return dict(zip("qkv", ops.qkv_projection(inputs["x"], weights, biases, backend=backend), strict=True))

    def stock(self, inputs: Inputs, order: Order) -> Results:
        dims = _dims(inputs["x"])
        x = order(inputs["x"], *dims)
        outputs = {
            name: F.linear(x, order(weight, 0, 1), None if bias is None else order(bias, 0))
            for name, weight, bias in self._layers(inputs)
        }
        return {name: order.undo(out, *dims) for name, out in outputs.items()}

    def exact(self, inputs: Inputs) -> Results:
        _, weights, biases = zip(*self._layers(inputs), strict=True)
        return dict(zip("qkv", reference.qkv_projection(inputs["x"], weights, biases), strict=True))

    def noise(self, inputs: Inputs, cotangents: Results, exact: Results, results: Results) -> dict[str, Tensor]:
        plain = {name: None if t is None else t.detach() for name, t in inputs.items()}
        x = plain["x"]
        u, acc = unit_roundoff(results["q"].dtype), accumulation_roundoff(results["q"].dtype)
        noise = {"dx": torch.zeros_like(x)}
        for name, weight, bias in self._layers(plain):
            out, noise[name] = _linear_error(x, weight, bias, 0.0, acc)
            dout = cotangents.get(name, torch.zeros_like(out))
            dx, noise[f"dw{name}"], noise[f"db{name}"] = _linear_gradients(x, weight, dout, torch.zeros_like(dout), acc)
            # Three products are stored before they are added.
            noise["dx"] += dx + u * (dout @ weight).abs()
        return _plus_rounding(noise, exact, results)
