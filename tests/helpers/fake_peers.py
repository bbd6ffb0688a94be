"""Stand-ins for libraries of `benchmarks/peers`: their signatures as far as adapters use them, computed by PyTorch."""

from __future__ import annotations

import ctypes
import math
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

POISON = math.nan


def module(name: str, **content) -> ModuleType:
    made = ModuleType(name)
    # find_spec, by which other libraries look for it, refuses a module without one.
    made.__spec__ = ModuleSpec(name, None)
    vars(made).update(content)
    return made


def hidden_states(stock: nn.Module, ids: Tensor, mask: Tensor) -> Tensor:
    """The model's, NaN where padding is."""
    with torch.no_grad():
        out = stock(input_ids=ids, attention_mask=mask).last_hidden_state
    return out.masked_fill(mask.unsqueeze(-1) == 0, POISON)


class OnnxRuntime:
    """onnxruntime: sessions that compute with `stock`, set by who replaces the export."""

    def __init__(self, providers: tuple[str, ...] = ("CPUExecutionProvider",)):
        self.stock: nn.Module | None = None
        self.seen: dict = {"sessions": 0}
        fake = self

        class SessionOptions:
            def add_session_config_entry(self, name: str, value: str) -> None:
                fake.seen[name] = value

        class Session:
            def __init__(self, path: str, options: SessionOptions, providers: list):
                fake.seen |= {**vars(options), "path": path, "providers": providers}
                fake.seen["sessions"] += 1

            def io_binding(self) -> SimpleNamespace:
                bound: dict = {}

                def bind(name, device, index, element, shape, pointer):
                    assert (device, index) == ("cpu", 0)
                    bound[name] = _memory(pointer, shape, element)

                return SimpleNamespace(bind_input=bind, bind_output=bind, bound=bound)

            def run_with_iobinding(self, binding: SimpleNamespace) -> None:
                ids, mask = (torch.from_numpy(binding.bound[name]) for name in ("input_ids", "attention_mask"))
                binding.bound["last_hidden_state"][:] = hidden_states(fake.stock, ids, mask).numpy()

        self.module = module(
            "onnxruntime",
            SessionOptions=SessionOptions,
            InferenceSession=Session,
            GraphOptimizationLevel=SimpleNamespace(ORT_ENABLE_ALL="all"),
            get_available_providers=lambda: list(providers),
        )


def _memory(pointer: int, shape: tuple[int, ...], element: type) -> np.ndarray:
    count = math.prod(shape) * np.dtype(element).itemsize
    return np.frombuffer((ctypes.c_char * count).from_address(pointer), element).reshape(shape)


class OpenVino:
    """openvino: what `convert_model` is given computes; `capabilities` and `precision` are the processor's."""

    class Type(str):
        def get_type_name(self) -> str:
            return str(self)

    for _name in ("f32", "bf16", "i64"):
        setattr(Type, _name, Type(_name))

    def __init__(self, capabilities: tuple[str, ...] = ("FP32", "BF16"), precision: str | None = None):
        self.seen: dict = {"conversions": 0}
        fake, element = self, self.Type

        class Core:
            def get_property(self, device: str, name: str) -> list[str]:
                assert (device, name) == ("CPU", "OPTIMIZATION_CAPABILITIES")
                return list(capabilities)

            def compile_model(self, model, device: str, settings: dict) -> SimpleNamespace:
                fake.seen |= settings
                taken = precision or settings["INFERENCE_PRECISION_HINT"]
                return SimpleNamespace(
                    get_property=lambda name: element(taken), create_infer_request=lambda: Request(model)
                )

        class Request:
            def __init__(self, model):
                self.model = model

            def set_output_tensor(self, index: int, tensor) -> None:
                assert index == 0
                self.out = tensor

            def infer(self, inputs: dict, *, share_inputs: bool, share_outputs: bool) -> None:
                assert share_inputs and share_outputs
                memory, shape, kind = self.out
                tensors = [torch.from_numpy(inputs[name]) for name in ("input_ids", "attention_mask")]
                out = self.model(*tensors)
                assert list(out.shape) == shape and kind == fake.seen["output"]
                target = torch.from_numpy(memory)
                (target if kind == "f32" else target.view(torch.bfloat16)).copy_(out)

        def convert_model(model: nn.Module, *, example_input: dict, input: list):
            fake.seen["conversions"] += 1
            assert [name for name, *_ in input] == list(example_input)
            return model

        class PrePostProcessor:
            def __init__(self, model):
                self.build = lambda: model

            def output(self) -> SimpleNamespace:
                said = SimpleNamespace(set_element_type=lambda kind: fake.seen.update(output=kind))
                return SimpleNamespace(tensor=lambda: said)

        self.module = module(
            "openvino",
            Core=Core,
            Type=element,
            Tensor=lambda memory, shape, kind: (memory, shape, kind),
            convert_model=convert_model,
            preprocess=SimpleNamespace(PrePostProcessor=PrePostProcessor),
        )


class CTranslate2:
    """ctranslate2: encoders that compute with `stock`, set by who replaces the specification."""

    def __init__(self, types: tuple[str, ...] = ("float32", "int8")):
        self.stock: nn.Module | None = None
        self.seen: dict = {"encoders": 0}
        fake = self

        class View:
            device, dtype = "cpu", "float32"

            def __init__(self, array: np.ndarray):
                self.array = array
                self.__array_interface__ = array.__array_interface__

            from_array = classmethod(lambda cls, array: cls(array))

        class Encoder:
            def __init__(self, folder: str, **options):
                fake.seen |= options
                fake.seen["encoders"] += 1

            def forward_batch(self, ids: View, lengths: View) -> SimpleNamespace:
                assert ids.array.dtype == lengths.array.dtype == np.int32
                mask = torch.arange(ids.array.shape[1]) < torch.from_numpy(lengths.array)[:, None]
                out = hidden_states(fake.stock, torch.from_numpy(ids.array).long(), mask.long())
                return SimpleNamespace(last_hidden_state=View(out.numpy()))

        self.module = module(
            "ctranslate2",
            Encoder=Encoder,
            StorageView=View,
            DataType=SimpleNamespace(bfloat16="bfloat16", float32="float32"),
            get_supported_compute_types=lambda device, index: set(types),
        )


def flash_attn_func(
    q,
    k,
    v,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    alibi_slopes=None,
    deterministic=False,
    return_attn_probs=False,
):
    """(B, S, H, D) all."""
    assert dropout_p == 0.0 and not causal and q.dim() == 4
    heads_first = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(*heads_first, scale=softmax_scale).transpose(1, 2)


def flash_attn_varlen_func(
    q,
    k,
    v,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q,
    max_seqlen_k,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    alibi_slopes=None,
    deterministic=False,
    return_attn_probs=False,
    block_table=None,
):
    """(T, H, D) all."""
    assert dropout_p == 0.0 and not causal and q.dim() == 3
    for ends, longest in ((cu_seqlens_q, max_seqlen_q), (cu_seqlens_k, max_seqlen_k)):
        assert ends.dtype == torch.int32 and longest == int(ends.diff().max())
    ends = cu_seqlens_q.tolist()
    rows = [tuple(x[a:b].unsqueeze(0) for x in (q, k, v)) for a, b in zip(ends, ends[1:], strict=False)]
    return torch.cat([flash_attn_func(*row, softmax_scale=softmax_scale).squeeze(0) for row in rows])


class TransformerEngineLayerNorm(nn.Module):
    """As the real one's, its backward pass reads the weight of the module, and frees what forward saved."""

    def __init__(self, normalized_shape, *, eps=1e-5, device=None, dtype=None):
        super().__init__()
        self.shape, self.eps = (normalized_shape,), eps
        self.weight = nn.Parameter(torch.ones(normalized_shape, dtype=dtype))
        self.bias = nn.Parameter(torch.zeros(normalized_shape, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        return _Norm.apply(x, self.weight, self.bias, self)


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, norm):
        ctx.x, ctx.norm = x, norm
        return F.layer_norm(x, norm.shape, weight, bias, norm.eps)

    @staticmethod
    def backward(ctx, gradient):
        x = ctx.x.detach().requires_grad_()
        del ctx.x
        with torch.enable_grad():
            out = F.layer_norm(x, ctx.norm.shape, ctx.norm.weight, ctx.norm.bias, ctx.norm.eps)
        return *torch.autograd.grad(out, (x, ctx.norm.weight, ctx.norm.bias), gradient), None


class DotProductAttention(nn.Module):
    """(B, S, H, D) or (T, H, D) in, heads joined in the last dimension out."""

    def __init__(
        self,
        num_attention_heads,
        kv_channels,
        num_gqa_groups=None,
        attention_dropout=0.1,
        qkv_format="sbhd",
        attn_mask_type="causal",
    ):
        super().__init__()
        assert attention_dropout == 0.0
        self.sizes, self.format, self.mask = (num_attention_heads, kv_channels), qkv_format, attn_mask_type

    def forward(
        self,
        query_layer,
        key_layer,
        value_layer,
        attention_mask=None,
        qkv_format=None,
        cu_seqlens_q=None,
        cu_seqlens_kv=None,
        cu_seqlens_q_padded=None,
        cu_seqlens_kv_padded=None,
        max_seqlen_q=None,
        max_seqlen_kv=None,
    ):
        qkv = query_layer, key_layer, value_layer
        assert all(x.shape[-2:] == self.sizes for x in qkv) and self.training == torch.is_grad_enabled()
        if self.format == "thd":
            assert self.mask == "padding"
            out = flash_attn_varlen_func(*qkv, cu_seqlens_q, cu_seqlens_kv, max_seqlen_q, max_seqlen_kv)
        else:
            assert (self.format, self.mask) == ("bshd", "no_mask")
            out = flash_attn_func(*qkv)
        return out.flatten(-2)


def liger_layer_norm(X, W, B, eps):
    return F.layer_norm(X, W.shape, W, B, eps)


def op_libraries() -> dict[str, ModuleType]:
    """What `sys.modules` gets."""
    te = module(
        "transformer_engine.pytorch", LayerNorm=TransformerEngineLayerNorm, DotProductAttention=DotProductAttention
    )
    functional = module("liger_kernel.transformers.functional", liger_layer_norm=liger_layer_norm)
    return {
        "flash_attn": module(
            "flash_attn", flash_attn_func=flash_attn_func, flash_attn_varlen_func=flash_attn_varlen_func
        ),
        "transformer_engine": module("transformer_engine", pytorch=te),
        "transformer_engine.pytorch": te,
        "liger_kernel": module("liger_kernel"),
        "liger_kernel.transformers": module("liger_kernel.transformers", functional=functional),
        "liger_kernel.transformers.functional": functional,
    }
