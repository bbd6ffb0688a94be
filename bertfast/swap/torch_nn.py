"""The modules of torch.nn that can be swapped: TransformerEncoder and TransformerEncoderLayer.

The encoder removes padding once, around all its layers, where `src_key_padding_mask` has any and `mask` is none or
causal. Whatever is not served, for good or in one forward, runs stock's forward.

Padded rows of the encoder's output are what torch's fast path in evaluation gives, also in training: 0, or `norm` of 0
where there is a final norm. With `unpad=False`, in a layer by itself and where stock's forward runs they are stock's.
Batches of up to 16384 numbers in fp32 on the CPU are computed with their padding, which is faster, and give the same.

`torch.jit.script` takes no swapped module: `restore` first.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from bertfast.nn.plain import has_hooks
from bertfast.swap.core import ClassSwapper, Swapper, pinned
from bertfast.swap.torch_nn_layer import Layout, layer_forward, reason_not_fused
from bertfast.swap.torch_nn_masks import joint_mask, masks_fit, plan


class TransformerEncoderLayer(nn.TransformerEncoderLayer):
    """torch.nn's layer with a fused forward."""

    _bertfast_stock = nn.TransformerEncoderLayer

    def forward(
        self,
        src: Tensor,
        src_mask: Tensor | None = None,
        src_key_padding_mask: Tensor | None = None,
        is_causal: bool = False,
        *,
        _layout: Layout | None = None,
    ) -> Tensor:
        """As torch.nn's; `_layout` comes from a swapped encoder, which has looked at everything for all its layers."""
        if _layout is not None:
            return layer_forward(self, src, _layout)
        masks = (src_mask, src_key_padding_mask)
        if reason_not_fused(self) is not None or not _serves(self, src, *masks, is_causal):
            return super().forward(src, *masks, is_causal)
        x, key_padding_mask = _batch_first(self, src, src_key_padding_mask)
        causal = is_causal and key_padding_mask is None
        attn_mask = None if causal else joint_mask(src_mask, key_padding_mask, x.shape[0])
        with pinned(self._bertfast_options):
            return _as_given(layer_forward(self, x, Layout(attn_mask, causal)), self, src)


class TransformerEncoder(nn.TransformerEncoder):
    """torch.nn's encoder, with padding removed around its fused layers."""

    _bertfast_stock = nn.TransformerEncoder

    def forward(
        self,
        src: Tensor,
        mask: Tensor | None = None,
        src_key_padding_mask: Tensor | None = None,
        is_causal: bool | None = None,
    ) -> Tensor:
        """As torch.nn's."""
        masks = (mask, src_key_padding_mask)
        if not _layers_are_fused(self) or not _serves(self.layers[0], src, *masks, is_causal):
            return super().forward(src, *masks, is_causal)
        x, key_padding_mask = _batch_first(self.layers[0], src, src_key_padding_mask)
        options = self._bertfast_options
        with pinned(options):
            layout, padding = plan(x, mask, key_padding_mask, is_causal, options.unpad)
            if padding.packing is not None:
                x = padding.packing.unpad(x).unsqueeze(0)
            for layer in self.layers:
                x = layer(x, _layout=layout)
        x = padding.keep_rows(x) if padding.packing is None else padding.packing.repad(x[0])
        x = _as_given(x, self.layers[0], src)
        return x if self.norm is None else self.norm(x)


def _serves(
    layer: nn.TransformerEncoderLayer,
    src: Tensor,
    src_mask: Tensor | None,
    key_padding_mask: Tensor | None,
    is_causal: bool | None,
) -> bool:
    """Whether the inputs are what the fused forward takes; stock's takes more, warns and raises."""
    attention = layer.self_attn
    if src.is_nested or is_traceable_wrapper_subclass(src) or src.dim() not in (2, 3):
        return False
    if src.shape[-1] != attention.embed_dim or (is_causal and src_mask is None):
        return False
    batched = src.dim() == 3
    length_at = 1 if batched and attention.batch_first else 0
    batch = src.shape[1 - length_at] if batched else 1
    return masks_fit(src_mask, key_padding_mask, batch, attention.num_heads, src.shape[length_at], batched)


def _batch_first(
    layer: nn.TransformerEncoderLayer, src: Tensor, key_padding_mask: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """(B, S, N) of `src`, and the (B, S) mask. One copy: queries and keys of one sequence are then close together."""
    if src.dim() == 3:
        return src if layer.self_attn.batch_first else src.transpose(0, 1).contiguous(), key_padding_mask
    return src.unsqueeze(0), None if key_padding_mask is None else key_padding_mask.unsqueeze(0)


def _as_given(x: Tensor, layer: nn.TransformerEncoderLayer, src: Tensor) -> Tensor:
    """(B, S, N) in the form of `src`."""
    if src.dim() == 2:
        return x.squeeze(0)
    return x if layer.self_attn.batch_first else x.transpose(0, 1).contiguous()


def _layers_are_fused(encoder: nn.TransformerEncoder) -> bool:
    """Whether all layers take a layout now: they are swapped, of one form, and nobody looks at what goes in and out."""
    layers = encoder.layers._modules.values()
    if not layers:
        return False
    first = encoder.layers[0]
    return all(
        type(layer) is TransformerEncoderLayer
        and not has_hooks(layer)
        and "forward" not in layer.__dict__
        and layer.self_attn.batch_first == first.self_attn.batch_first
        and reason_not_fused(layer) is None
        for layer in layers
    )


def _reason_of_encoder(encoder: nn.Module) -> str | None:
    kinds = (nn.TransformerEncoderLayer, TransformerEncoderLayer)
    other = next((layer for layer in encoder.layers if type(layer) not in kinds), None)
    if other is not None:
        return f"a layer is {type(other).__module__}.{type(other).__qualname__}, not torch.nn's own"
    return None if len(encoder.layers) else "it has no layers"


_LAYER = ClassSwapper(TransformerEncoderLayer, "fused layer", reason_not_fused)
_ENCODER = ClassSwapper(TransformerEncoder, "fused layers, can run without padding", _reason_of_encoder)
_SWAPPERS = {nn.TransformerEncoderLayer: _LAYER, nn.TransformerEncoder: _ENCODER}
_DECODERS = {nn.TransformerDecoder, nn.TransformerDecoderLayer}


def swapper_for(module: nn.Module) -> Swapper | None:
    """The swapper of an encoder or an encoder layer; None for what is neither, subclasses included."""
    return _SWAPPERS.get(type(module))


def reason_left(module: nn.Module) -> str | None:
    """Why a decoder, or a subclass of an encoder or of a layer, stays as it is."""
    kind = type(module)
    if kind in _DECODERS:
        return "decoders are not fused"
    if isinstance(module, (*_SWAPPERS, *_DECODERS)):
        stock = next(base for base in kind.__mro__ if base in _SWAPPERS or base in _DECODERS)
        return f"a subclass of torch.nn's {stock.__name__}"
    return None
