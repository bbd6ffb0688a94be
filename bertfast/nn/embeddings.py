"""FusedBertEmbeddings: word, position and token type embeddings with LayerNorm and dropout."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from bertfast import ops
from bertfast.nn.layer_norm import FusedAddLayerNorm
from bertfast.nn.plain import is_plain


def is_plain_table(table: nn.Module) -> bool:
    """Whether `table` is plain, and looking up its rows is all that it does."""
    if not is_plain(table, nn.Embedding):
        return False
    return table.max_norm is None and not table.scale_grad_by_freq and not table.sparse


def embed(
    input_ids: Tensor | None,
    token_type_ids: Tensor | None,
    position_ids: Tensor | None,
    inputs_embeds: Tensor | None,
    word: nn.Embedding,
    position: nn.Embedding,
    token_type: nn.Embedding | None,
    norm: nn.Module,
    dropout_p: float,
) -> Tensor:
    """`ops.embed_layer_norm` over plain tables and the weight, bias and eps of a LayerNorm."""
    return ops.embed_layer_norm(
        input_ids,
        token_type_ids,
        position_ids,
        word.weight,
        position.weight,
        None if token_type is None else token_type.weight,
        norm.weight,
        norm.bias,
        norm.eps,
        dropout_p=dropout_p,
        padding_idx=word.padding_idx,
        position_padding_idx=position.padding_idx,
        inputs_embeds=inputs_embeds,
    )


class FusedBertEmbeddings(nn.Module):
    """The embedding layer of the BERT family; children are named as Hugging Face names them.

    Args:
        vocab_size, max_position_embeddings, hidden_size: sizes of the tables.
        type_vocab_size: rows of the token type table; 0 for a model without token types (DistilBERT).
        pad_token_id: the row of the word table that gets no gradient; None for none.
        eps: of the LayerNorm.
        dropout: of the output, in training only.
        positions_follow_padding: RoBERTa's positions count the tokens that are not padding, from `pad_token_id` + 1.
    """

    def __init__(
        self,
        vocab_size: int,
        max_position_embeddings: int,
        hidden_size: int,
        type_vocab_size: int = 2,
        *,
        pad_token_id: int | None = 0,
        eps: float = 1e-12,
        dropout: float = 0.0,
        positions_follow_padding: bool = False,
    ) -> None:
        super().__init__()
        in_table = pad_token_id is not None and pad_token_id < vocab_size
        self.word_embeddings = nn.Embedding(vocab_size, hidden_size, padding_idx=pad_token_id if in_table else None)
        self.position_embeddings = nn.Embedding(
            max_position_embeddings, hidden_size, padding_idx=pad_token_id if positions_follow_padding else None
        )
        self.token_type_embeddings = nn.Embedding(type_vocab_size, hidden_size) if type_vocab_size else None
        self.LayerNorm = FusedAddLayerNorm(hidden_size, eps)
        self.dropout = dropout
        self.positions_follow_padding = positions_follow_padding
        # Of its own: the word table loses its padding_idx when the vocabulary shrinks below it.
        self.pad_token_id = pad_token_id

    def position_ids_of(self, input_ids: Tensor | None, inputs_embeds: Tensor | None) -> Tensor:
        """Default positions, (B, S) or (1, S) int64; RoBERTa's are counted over the ids of the padded batch.

        Raises:
            IndexError: the sequence is longer than the position table.
            ValueError: positions that follow the padding, and no `pad_token_id`.
        """
        given = input_ids if inputs_embeds is None else inputs_embeds
        length, offset = given.shape[1], 0
        if self.positions_follow_padding:
            if self.pad_token_id is None:
                raise ValueError("positions are counted from pad_token_id, which is None; pass position_ids")
            offset = self.pad_token_id + 1
        longest = self.position_embeddings.num_embeddings - offset
        if length > longest:
            raise IndexError(f"sequences have {length} tokens, but the position table has room for {longest}")
        if self.positions_follow_padding and input_ids is not None:
            real = input_ids != offset - 1
            return real.cumsum(1) * real + (offset - 1)
        return torch.arange(offset, length + offset, device=given.device).unsqueeze(0)

    def forward(
        self,
        input_ids: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
    ) -> Tensor:
        """ids (B, S), or packed (1, T) with their `position_ids`, to (B, S, N); see `ops.embed_layer_norm`."""
        if position_ids is None:
            position_ids = self.position_ids_of(input_ids, inputs_embeds)
        dropout_p = self.dropout if self.training else 0.0
        if self._is_plain():
            return embed(
                input_ids,
                token_type_ids,
                position_ids,
                inputs_embeds,
                self.word_embeddings,
                self.position_embeddings,
                self.token_type_embeddings,
                self.LayerNorm,
                dropout_p,
            )
        total = self.word_embeddings(input_ids) if inputs_embeds is None else inputs_embeds
        if self.token_type_embeddings is not None:
            if token_type_ids is None:
                token_type_ids = torch.zeros_like(position_ids)
            total = total + self.token_type_embeddings(token_type_ids)
        total = self.LayerNorm(total + self.position_embeddings(position_ids))
        return nn.functional.dropout(total, dropout_p)

    def _is_plain(self) -> bool:
        tables = (self.word_embeddings, self.position_embeddings, self.token_type_embeddings)
        return is_plain(self.LayerNorm, FusedAddLayerNorm) and all(t is None or is_plain_table(t) for t in tables)
