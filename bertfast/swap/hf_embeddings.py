"""Embedding layers of transformers as one op."""

from __future__ import annotations

from torch import Tensor

from bertfast.nn.embeddings import embed, is_plain_table
from bertfast.nn.plain import has_global_hooks
from bertfast.swap.core import SwappedForward
from bertfast.swap.eligibility import dropout_of, is_readable_norm, may_skip_call
from bertfast.swap.hf_layers import DROPOUT


class FusedEmbeddings(SwappedForward):
    """Gathers, sum, LayerNorm and dropout."""

    becomes = "fused embeddings"

    def can_fuse(self) -> bool:
        """Whether nothing is attached to the modules that the op takes the place of."""
        children = self._modules
        tables = (children["word_embeddings"], children["position_embeddings"], children.get("token_type_embeddings"))
        return (
            not has_global_hooks()
            and all(table is None or is_plain_table(table) for table in tables)
            and (tables[2] is None or tables[2].padding_idx is None)
            and is_readable_norm(children["LayerNorm"])
            and may_skip_call(children["dropout"], DROPOUT)
        )

    def _run(
        self,
        input_ids: Tensor | None,
        token_type_ids: Tensor | None,
        position_ids: Tensor | None,
        inputs_embeds: Tensor | None,
    ) -> Tensor:
        """(B, S, N) by `ops.embed_layer_norm`."""
        children = self._modules
        return embed(
            input_ids,
            token_type_ids,
            position_ids,
            inputs_embeds,
            children["word_embeddings"],
            children["position_embeddings"],
            children.get("token_type_embeddings"),
            children["LayerNorm"],
            dropout_of(children["dropout"]),
        )


class BertEmbeddingsForward(FusedEmbeddings):
    """BERT: positions in a row."""

    def fused_forward(
        self,
        input_ids: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        *past: object,
        **kwargs: object,
    ) -> Tensor:
        """Stock's arguments and result: ids (B, S) or `inputs_embeds` (B, S, N) to (B, S, N)."""
        if not _are_zero(*past, *kwargs.values()) or not self.can_fuse():
            return self.stock_forward(input_ids, token_type_ids, position_ids, inputs_embeds, *past, **kwargs)
        if position_ids is None:
            position_ids = self.default_positions(input_ids, inputs_embeds)
        if token_type_ids is None and "token_type_ids" in self._buffers:
            token_type_ids = self.token_type_ids.expand(position_ids.shape[0], -1).gather(1, position_ids)
        return self._run(input_ids, token_type_ids, position_ids, None if input_ids is not None else inputs_embeds)

    def default_positions(self, input_ids: Tensor | None, inputs_embeds: Tensor | None) -> Tensor:
        """(1, S) or (B, S) int64."""
        given = input_ids if inputs_embeds is None else inputs_embeds
        return self.position_ids[:, : given.shape[1]]


class RobertaEmbeddingsForward(BertEmbeddingsForward):
    """RoBERTa, XLM-RoBERTa and CamemBERT: positions count the tokens that are no padding."""

    def default_positions(self, input_ids: Tensor | None, inputs_embeds: Tensor | None) -> Tensor:
        if input_ids is None:
            return self.create_position_ids_from_inputs_embeds(inputs_embeds, self.padding_idx)
        return self.create_position_ids_from_input_ids(input_ids, self.padding_idx)


class DistilBertEmbeddingsForward(FusedEmbeddings):
    """DistilBERT: no token types."""

    def fused_forward(
        self, input_ids: Tensor | None, inputs_embeds: Tensor | None = None, position_ids: Tensor | None = None
    ) -> Tensor:
        """Stock's arguments and result: ids (B, S) or `inputs_embeds` (B, S, N) to (B, S, N)."""
        if not self.can_fuse():
            return self.stock_forward(input_ids, inputs_embeds, position_ids)
        if position_ids is None:
            length = (inputs_embeds if input_ids is None else input_ids).shape[1]
            position_ids = self.position_ids[:, :length] if "position_ids" in self._buffers else None
        return self._run(input_ids, None, position_ids, None if input_ids is not None else inputs_embeds)


def _are_zero(*lengths: object) -> bool:
    """Whether there is no cache; its length may be a tensor."""
    return all(isinstance(length, int) and length == 0 for length in lengths)
