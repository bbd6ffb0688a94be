"""BertEncoderLayer and BertEncoder: post-LayerNorm transformer layers over padded or packed hidden states."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from bertfast.activations import Activation, get_activation
from bertfast.backends import in_force
from bertfast.nn.attention import self_attention
from bertfast.nn.feed_forward import feed_forward
from bertfast.nn.layer_norm import FusedAddLayerNorm
from bertfast.nn.linear import linear
from bertfast.nn.names import BERT_LAYER, LayerNames, place


class BertEncoderLayer(nn.Module):
    """Self-attention and feed-forward, each followed by LN(residual + dropout(.)).

    Args:
        hidden_size, num_heads, intermediate_size: N, H and F.
        activation: of the feed-forward, a configuration name or a callable.
        eps: of both LayerNorms.
        dropout: of what is added to each residual, in training only.
        attention_dropout: of the attention probabilities, in training only.
        names: where the parameters sit, so that a checkpoint's keys are the state dict's keys.

    Raises:
        ValueError: `num_heads` does not divide `hidden_size`, or an unknown activation.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        intermediate_size: int,
        activation: str | Activation = "gelu",
        *,
        eps: float = 1e-12,
        dropout: float = 0.0,
        attention_dropout: float = 0.0,
        names: LayerNames = BERT_LAYER,
    ) -> None:
        super().__init__()
        if hidden_size % num_heads:
            raise ValueError(f"hidden_size must be a multiple of num_heads, got {hidden_size} and {num_heads}")
        get_activation(activation)
        self.num_heads, self.activation, self.attention_dropout = num_heads, activation, attention_dropout
        for path in (names.query, names.key, names.value, names.attention_out):
            place(self, path, nn.Linear(hidden_size, hidden_size))
        place(self, names.attention_norm, FusedAddLayerNorm(hidden_size, eps, dropout))
        place(self, names.ffn_in, nn.Linear(hidden_size, intermediate_size))
        place(self, names.ffn_out, nn.Linear(intermediate_size, hidden_size))
        place(self, names.ffn_norm, FusedAddLayerNorm(hidden_size, eps, dropout))
        self._paths = tuple(path.split(".") for path in names)

    def leaves(self) -> list[nn.Module]:
        """The children of `LayerNames`, looked up in every forward because adapters and quantisers replace them.
        Through `_modules`: `getattr` takes a detour over `Module.__getattr__` at each of some twenty steps."""
        leaves = []
        for path in self._paths:
            child = self
            for name in path:
                child = child._modules[name]
            leaves.append(child)
        return leaves

    def forward(
        self,
        hidden_states: Tensor,
        attn_mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        max_seqlen: int | None = None,
        need_weights: bool = False,
        first_token_only: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """One layer.

        Args:
            hidden_states: (B, S, N), or packed (1, T, N) with `cu_seqlens` (sequences + 1,) and `max_seqlen`.
            attn_mask: broadcasts to (B, H, S, S): bool (True takes part) or floating point (added).
            need_weights: also return the attention probabilities (B, H, S, S).
            first_token_only: compute the output of the first token of each sequence alone, for which keys and values
                are all that the others contribute. No sequence may be empty.

        Returns:
            The shape of `hidden_states`, with `first_token_only` (B, 1, N) or (1, sequences, N); a pair with the
            probabilities when they are asked for.
        """
        residual = hidden_states
        if first_token_only:
            packed = cu_seqlens is not None
            residual = hidden_states.index_select(1, cu_seqlens[:-1]) if packed else hidden_states[:, :1]
        query, key, value, attention_out, attention_norm, ffn_in, ffn_out, ffn_norm = self.leaves()
        context, weights = self_attention(
            hidden_states,
            query,
            key,
            value,
            hidden_states.shape[-1] // self.num_heads,
            dropout_p=self.attention_dropout if self.training else 0.0,
            attn_mask=attn_mask,
            cu_seqlens=cu_seqlens,
            max_seqlen=max_seqlen,
            need_weights=need_weights,
            first_tokens=residual if first_token_only else None,
        )
        attended = attention_norm(linear(context, attention_out), residual)
        output = ffn_norm(feed_forward(attended, ffn_in, ffn_out, self.activation), attended)
        return (output, weights) if need_weights else output


class BertEncoder(nn.Module):
    """A stack of encoder layers under the name `layer`."""

    def __init__(self, layers: list[nn.Module]) -> None:
        super().__init__()
        self.layer = nn.ModuleList(layers)
        self.gradient_checkpointing = False
        self._checkpoint: Callable | None = None

    def forward(
        self,
        hidden_states: Tensor,
        attn_mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        max_seqlen: int | None = None,
        *,
        output_hidden_states: bool = False,
        output_attentions: bool = False,
        first_token_only: bool = False,
    ) -> tuple[Tensor, tuple[Tensor, ...] | None, tuple[Tensor, ...] | None]:
        """All layers; see `BertEncoderLayer`. With `first_token_only` the last one gives first tokens alone.

        Returns:
            The last hidden states; the input and every layer's output, or None; every layer's attention
            probabilities (B, H, S, S), or None.
        """
        all_hidden_states, all_weights = [hidden_states], []
        last = len(self.layer) - 1
        for index, layer in enumerate(self.layer):
            arguments = (hidden_states, attn_mask, cu_seqlens, max_seqlen, output_attentions)
            if first_token_only and index == last:
                arguments = (*arguments, True)
            if self.gradient_checkpointing and self.training:
                hidden_states = self._checkpoint(in_force(layer), *arguments)
            else:
                hidden_states = layer(*arguments)
            if output_attentions:
                hidden_states, weights = hidden_states
                all_weights.append(weights)
            if output_hidden_states:
                all_hidden_states.append(hidden_states)
        return (
            hidden_states,
            tuple(all_hidden_states) if output_hidden_states else None,
            tuple(all_weights) if output_attentions else None,
        )
