"""out = dropout(act(x weight^T + bias)), in the form that `tiles.linear_gelu_fwd` names.

FLOPs for x (M, K) and weight (N, K): 2 M N K. Bytes, with e-byte elements: (M K + N K + M N) e, and M N e more where
backward is to have pre = x weight^T + bias. That is the floor, and what "tile" and "persistent" move: bias and
activation are applied to fp32 accumulators.

    tile         one program a tile, operands by pointer
    persistent   one program a multiprocessor walks over tiles, operands and outputs by tensor descriptors; the loads of
                 the next tile start while the epilogue of this one runs
    split        where tiles are few: S programs a tile sum S parts of K into a workspace, 8 S M N bytes there and
                 back, and `bias_activation` adds them up, always in the same order
    separate     torch's GEMM with bias, whose result is pre, and `bias_activation`: 2 M N e bytes more

Backward is `bias_activation`'s, and two plain GEMMs, which stay torch's.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from bertfast.kernels import tiles
from bertfast.kernels.activations import activate
from bertfast.kernels.bias_activation import bias_activation_fwd
from bertfast.kernels.common import dot, store_cast
from bertfast.kernels.gemm import accumulate, input_precision, is_aligned, tile_of
from bertfast.kernels.launch import Launcher, as_rows, device_of


@triton.jit(do_not_specialize=["M"])
def linear_gelu_fwd_kernel(
    x_ptr,  # (M, K)
    weight_ptr,  # (N, K)
    bias_ptr,  # (N,) or None
    out_ptr,  # (M, N) contiguous
    pre_ptr,  # (M, N) contiguous, or None
    M,
    stride_x_m,
    stride_weight_n,
    N: tl.constexpr,
    K: tl.constexpr,
    FORMULA: tl.constexpr,
    INPUT_PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
):
    i_m, i_n = tile_of(tl.program_id(0), (M - 1) // BLOCK_M + 1, tl.cdiv(N, BLOCK_N), GROUP_M)
    o_m = i_m.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    o_n = i_n.to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    m_n = o_n < N
    # [BLOCK_M, BLOCK_N]
    b_pre = accumulate(
        x_ptr,
        weight_ptr,
        tl.minimum(o_m, M - 1),
        tl.minimum(o_n, N - 1),
        stride_x_m,
        stride_weight_n,
        0,
        K,
        K,
        BLOCK_M,
        BLOCK_N,
        BLOCK_K,
        INPUT_PRECISION,
    )
    if bias_ptr is not None:
        b_pre += tl.load(bias_ptr + o_n, mask=m_n, other=0.0).to(tl.float32)[None, :]
    o_out = o_m[:, None] * N + o_n[None, :]
    mask = (o_m < M)[:, None] & m_n[None, :]
    if pre_ptr is not None:
        tl.store(pre_ptr + o_out, store_cast(b_pre, pre_ptr.dtype.element_ty), mask=mask)
    tl.store(out_ptr + o_out, store_cast(activate(b_pre, FORMULA), out_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["M"])
def linear_gelu_fwd_kernel_split(
    x_ptr,  # (M, K)
    weight_ptr,  # (N, K)
    partial_ptr,  # (S, M, N) fp32
    M,
    stride_x_m,
    stride_weight_n,
    N: tl.constexpr,
    K: tl.constexpr,
    K_PART: tl.constexpr,
    INPUT_PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
):
    i_m, i_n = tile_of(tl.program_id(0), (M - 1) // BLOCK_M + 1, tl.cdiv(N, BLOCK_N), GROUP_M)
    i_part = tl.program_id(1)
    o_m = i_m.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    o_n = i_n.to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    # [BLOCK_M, BLOCK_N]
    b_part = accumulate(
        x_ptr,
        weight_ptr,
        tl.minimum(o_m, M - 1),
        tl.minimum(o_n, N - 1),
        stride_x_m,
        stride_weight_n,
        i_part * K_PART,
        tl.minimum(i_part * K_PART + K_PART, K),
        K,
        BLOCK_M,
        BLOCK_N,
        BLOCK_K,
        INPUT_PRECISION,
    )
    p_partial = partial_ptr + i_part.to(tl.int64) * M * N + o_m[:, None] * N + o_n[None, :]
    tl.store(p_partial, b_part, mask=(o_m < M)[:, None] & (o_n < N)[None, :])


@triton.jit(do_not_specialize=["M"])
def linear_gelu_fwd_kernel_persistent(
    x_desc,  # (M, K) in blocks [BLOCK_M, BLOCK_K]
    weight_desc,  # (N, K) in blocks [BLOCK_N, BLOCK_K]
    bias_ptr,  # (N,) or None
    out_desc,  # (M, N) in blocks [BLOCK_M, BLOCK_N / 2]
    pre_desc,  # the same, or None
    M,
    N: tl.constexpr,
    K: tl.constexpr,
    FORMULA: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
):
    tiles_m, tiles_n = (M - 1) // BLOCK_M + 1, tl.cdiv(N, BLOCK_N)
    # Flattened, the loop over tiles and the one over K are one pipeline.
    for i_tile in tl.range(tl.program_id(0), tiles_m * tiles_n, tl.num_programs(0), flatten=True):
        i_m, i_n = tile_of(i_tile, tiles_m, tiles_n, GROUP_M)
        # [BLOCK_M, BLOCK_N]
        b_acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for k in range(0, K, BLOCK_K):
            b_x = x_desc.load([i_m * BLOCK_M, k])
            b_weight = weight_desc.load([i_n * BLOCK_N, k])
            b_acc = dot(b_x, b_weight.T, b_acc, "ieee")
        # In two halves, so that half as much shared memory stages the outputs: [BLOCK_M, BLOCK_N / 2]
        halves = b_acc.reshape(BLOCK_M, 2, BLOCK_N // 2).permute(0, 2, 1).split()
        for i_half in tl.static_range(2):
            b_pre = halves[i_half]
            column = i_n * BLOCK_N + i_half * (BLOCK_N // 2)
            if bias_ptr is not None:
                o_n = column + tl.arange(0, BLOCK_N // 2)
                b_pre += tl.load(bias_ptr + o_n, mask=o_n < N, other=0.0).to(tl.float32)[None, :]
            if pre_desc is not None:
                pre_desc.store([i_m * BLOCK_M, column], store_cast(b_pre, pre_desc.dtype))
            out_desc.store([i_m * BLOCK_M, column], store_cast(activate(b_pre, FORMULA), out_desc.dtype))


_fwd = Launcher(linear_gelu_fwd_kernel)
_fwd_split = Launcher(linear_gelu_fwd_kernel_split)
_fwd_persistent = Launcher(linear_gelu_fwd_kernel_persistent)


def linear_gelu_fwd(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str,
    seed: Tensor | None,
    dropout_p: float,
    need_pre: bool,
) -> tuple[Tensor, Tensor]:
    """out, and pre (empty unless wanted); `activation` is a value of `bertfast.activations.FORMULAS`."""
    out = x.new_empty((*x.shape[:-1], weight.shape[0]))
    nothing = x.new_empty(0)
    if out.numel() == 0:
        return out, x.new_empty(out.shape) if need_pre else nothing
    x, weight = as_rows(x), as_rows(weight)
    bias = None if bias is None else bias.contiguous()
    (rows, width_in), width = x.shape, weight.shape[0]
    precision = input_precision(x.dtype)
    capability, multiprocessors = device_of(x)
    form, tile, splits = tiles.linear_gelu_fwd(
        rows,
        width,
        width_in,
        x.element_size(),
        x.element_size() == 2 or precision == "tf32",
        seed is not None,
        is_aligned(x, weight),
        _fits_descriptor(x) and _fits_descriptor(weight) and width * x.element_size() % 16 == 0,
        capability,
        multiprocessors,
    )
    if form == "separate":
        # With the bias: it may cancel the product, which is rounded once, and with it.
        product = F.linear(x, weight, bias)
        bias_activation_fwd(product[None], None, activation, seed, dropout_p, out, nothing)
        return out, product.view(out.shape) if need_pre else nothing
    pre = x.new_empty(out.shape) if need_pre else nothing
    blocks = tile.block_m, tile.block_n, tile.block_k, tile.group_m
    options = {"num_warps": tile.num_warps, "num_stages": tile.num_stages}
    programs = tiles.cdiv(rows, tile.block_m) * tiles.cdiv(width, tile.block_n)
    strides = x.stride(0), weight.stride(0)
    if form == "split":
        partial = x.new_empty((splits, rows, width), dtype=torch.float32)
        part = tiles.cdiv(tiles.cdiv(width_in, tile.block_k), splits) * tile.block_k
        _fwd_split(
            (programs, splits), x, weight, partial, rows, *strides, width, width_in, part, precision, *blocks, **options
        )
        bias_activation_fwd(partial, bias, activation, None, 0.0, out, pre)
    elif form == "persistent":
        outputs = [
            TensorDescriptor.from_tensor(t.view(rows, width), [tile.block_m, tile.block_n // 2])
            for t in ((out, pre) if need_pre else (out,))
        ]
        _fwd_persistent(
            (min(programs, multiprocessors),),
            TensorDescriptor.from_tensor(x, [tile.block_m, tile.block_k]),
            TensorDescriptor.from_tensor(weight, [tile.block_n, tile.block_k]),
            bias,
            outputs[0],
            outputs[1] if need_pre else None,
            rows,
            width,
            width_in,
            activation,
            *blocks,
            **options,
        )
    else:
        kept = pre if need_pre else None
        _fwd(
            (programs,), x, weight, bias, out, kept, rows, *strides, width, width_in, activation, precision, *blocks,
            **options,
        )  # fmt: skip
    return out, pre


def _fits_descriptor(x: Tensor) -> bool:
    begins_at_16_bytes = x.data_ptr() % 16 == 0 and x.stride(0) * x.element_size() % 16 == 0
    return begins_at_16_bytes and x.stride(1) == 1 and x.stride(0) >= x.shape[1] > 0
