"""The base model of every family: embeddings, encoder, pooler, with padding removed once around all of them."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from bertfast.configuration import PretrainedConfig
from bertfast.models.base import PreTrainedModel
from bertfast.models.outputs import BaseModelOutputWithPooling
from bertfast.nn import BertEncoder, BertEncoderLayer, FusedBertEmbeddings
from bertfast.nn.names import BERT_LAYER, LayerNames
from bertfast.nn.plain import any_hooks, has_hooks
from bertfast.ops._checks import check_broadcast
from bertfast.packing import Packing
from bertfast.plan import REAL_ROWS, Plan, RowUse, plan_rows


class Pooler(nn.Module):
    """tanh(dense(first token))."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.dense = nn.Linear(hidden_size, hidden_size)

    def forward(self, hidden_states: Tensor) -> Tensor:
        """(B, S, N) to (B, N)."""
        return torch.tanh(self.dense(hidden_states[:, 0]))


class EncoderModel(PreTrainedModel):
    """Embeddings, encoder and, where the family has one, pooler.

    The attribute `unpad` (True) decides whether padding is removed around the embeddings and the encoder; with
    `unpad = False` padded rows hold what stock models compute for them.
    """

    encoder_name = "encoder"
    layer_names: LayerNames = BERT_LAYER
    positions_follow_padding = False

    def __init__(self, config: PretrainedConfig, add_pooling_layer: bool = True) -> None:
        super().__init__(config)
        config = self.config
        eps = getattr(config, "layer_norm_eps", 1e-12)
        self.embeddings = FusedBertEmbeddings(
            config.vocab_size,
            config.max_position_embeddings,
            config.hidden_size,
            getattr(config, "type_vocab_size", 0),
            pad_token_id=config.pad_token_id,
            eps=eps,
            dropout=config.hidden_dropout_prob,
            positions_follow_padding=self.positions_follow_padding,
        )
        layers = [
            BertEncoderLayer(
                config.hidden_size,
                config.num_attention_heads,
                config.intermediate_size,
                config.hidden_act,
                eps=eps,
                dropout=config.hidden_dropout_prob,
                attention_dropout=config.attention_probs_dropout_prob,
                names=self.layer_names,
            )
            for _ in range(config.num_hidden_layers)
        ]
        self.add_module(self.encoder_name, BertEncoder(layers))
        self.pooler = Pooler(config.hidden_size) if add_pooling_layer else None
        self.unpad = True
        self.post_init()

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        encoder_hidden_states: Tensor | None = None,
        encoder_attention_mask: Tensor | None = None,
        past_key_values: object | None = None,
        use_cache: bool | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        *,
        first_token_only: bool = False,
        _use: RowUse = REAL_ROWS,
    ) -> BaseModelOutputWithPooling | tuple[Tensor, ...]:
        """Runs the encoder.

        Args:
            input_ids: (B, S) int64; or `inputs_embeds` (B, S, N).
            attention_mask: (B, S), nonzero where a token is real, of any dtype and pattern; or (B, S, S) or
                (B, 1 or H, S or 1, S): bool or integer (nonzero takes part) or floating point (added to the scores).
            token_type_ids, position_ids: (B, S), by default 0 and the family's own positions.
            encoder_hidden_states, encoder_attention_mask, past_key_values, use_cache: refused; encoders only.
            output_attentions: also return the attention probabilities of every layer, (B, H, S, S).
            output_hidden_states: also return the embeddings' and every layer's output, (B, S, N).
            return_dict: False gives a tuple.
            first_token_only: only the first token's hidden states are wanted, real or not: `last_hidden_state` is
                (B, 1, N). The last layer then computes keys and values for the other tokens and nothing else; heads
                that read the pooled output or the first token do so by themselves.

        Returns:
            `last_hidden_state` (B, S, N) with zeros in padded rows (see `bertfast.packing`), `pooler_output`
            (B, N), and what was asked for.

        Raises:
            ValueError: arguments that do not fit or are refused, a mask of another rank.
            IndexError: ids or positions outside their tables.
        """
        _refuse(
            encoder_hidden_states=encoder_hidden_states,
            encoder_attention_mask=encoder_attention_mask,
            past_key_values=past_key_values,
            use_cache=use_cache or None,
        )
        batch, seqlen, device = _check_inputs(input_ids, inputs_embeds, token_type_ids, position_ids)
        config = self.config
        output_attentions = config.output_attentions if output_attentions is None else output_attentions
        output_hidden_states = config.output_hidden_states if output_hidden_states is None else output_hidden_states
        return_dict = config.use_return_dict if return_dict is None else return_dict

        if position_ids is None:
            position_ids = self.embeddings.position_ids_of(input_ids, inputs_embeds)
        shown = bool(output_attentions or output_hidden_states)
        use = _use._replace(
            padded_rows=_use.padded_rows or shown,
            first_token=_use.first_token or first_token_only or self.pooler is not None,
            nothing_else=_use.nothing_else or first_token_only,
        )
        skips = use.nothing_else and not shown and self._can_skip_rows()
        plan = self._plan(attention_mask, batch, seqlen, device, use)
        inputs = (input_ids, token_type_ids, position_ids, inputs_embeds)
        if plan.packing is None:
            hidden_states, all_hidden_states, weights = getattr(self, self.encoder_name)(
                self.embeddings(*inputs),
                plan.attn_mask,
                output_hidden_states=output_hidden_states,
                output_attentions=output_attentions,
                first_token_only=skips,
            )
            if not skips:
                hidden_states = plan.keep_rows(hidden_states)
        else:
            hidden_states = self._run_packed(inputs, plan.packing, skips)
            all_hidden_states, weights = None, None
        output = BaseModelOutputWithPooling(
            last_hidden_state=hidden_states[:, :1] if first_token_only else hidden_states,
            pooler_output=None if self.pooler is None else self.pooler(hidden_states),
            hidden_states=all_hidden_states,
            attentions=weights,
        )
        return output if return_dict else output.to_tuple()

    def _plan(self, mask: Tensor | None, batch: int, seqlen: int, device: torch.device, use: RowUse) -> Plan:
        if mask is None:
            return Plan()
        if mask.device != device:
            raise ValueError(f"attention_mask is on {mask.device}, expected {device}, the device of the input")
        if mask.dim() != 2:
            return Plan(attn_mask=_mask_of_pairs(mask, batch, seqlen))
        if tuple(mask.shape) != (batch, seqlen):
            raise ValueError(f"attention_mask must have shape {(batch, seqlen)}, got {tuple(mask.shape)}")
        return plan_rows(mask, use, lambda: not self.unpad or self._has_hooks())

    def _run_packed(self, inputs: tuple[Tensor | None, ...], packing: Packing, first_token_only: bool) -> Tensor:
        """Embeddings and encoder on the real tokens alone: (B, S, N) with zeros in padded rows, or (B, 1, N)."""
        rows = (packing.batch, packing.seqlen)
        embedded = self.embeddings(
            *(None if t is None else packing.unpad(t.expand(*rows, *t.shape[2:])).unsqueeze(0) for t in inputs)
        )
        encoder = getattr(self, self.encoder_name)
        hidden_states, _, _ = encoder(
            embedded,
            cu_seqlens=packing.cu_seqlens,
            max_seqlen=packing.max_seqlen,
            first_token_only=first_token_only,
        )
        return hidden_states.transpose(0, 1) if first_token_only else packing.repad(hidden_states[0])

    def _can_skip_rows(self) -> bool:
        """Whether nobody sees the last layer's other rows: a hook may, and so may a module that is not ours."""
        encoder = getattr(self, self.encoder_name)
        if type(encoder) is not BertEncoder or has_hooks(encoder) or len(encoder.layer) == 0:
            return False
        last = encoder.layer[-1]
        if type(last) is not BertEncoderLayer or any_hooks(last):
            return False
        return self.pooler is None or (type(self.pooler) is Pooler and not has_hooks(self.pooler))

    def _has_hooks(self) -> bool:
        return any_hooks(self.embeddings) or any_hooks(getattr(self, self.encoder_name))


def _refuse(**arguments: object) -> None:
    for name, value in arguments.items():
        if value is not None:
            raise ValueError(f"{name} is not supported: there is no cross-attention and no cache in an encoder")


def _check_inputs(
    input_ids: Tensor | None, inputs_embeds: Tensor | None, token_type_ids: Tensor | None, position_ids: Tensor | None
) -> tuple[int, int, torch.device]:
    """B, S and the device of the inputs. Raises ValueError where they do not fit each other."""
    if (input_ids is None) == (inputs_embeds is None):
        raise ValueError("exactly one of input_ids and inputs_embeds must be given")
    given = input_ids if inputs_embeds is None else inputs_embeds
    if given.dim() != (2 if inputs_embeds is None else 3):
        raise ValueError(f"input_ids must be (B, S) or inputs_embeds (B, S, N), got {tuple(given.shape)}")
    batch, seqlen = given.shape[:2]
    for name, ids in (("token_type_ids", token_type_ids), ("position_ids", position_ids)):
        if ids is not None:
            check_broadcast(name, ids, (batch, seqlen))
    return batch, seqlen, given.device


def _mask_of_pairs(mask: Tensor, batch: int, seqlen: int) -> Tensor:
    """A mask over (query, key) pairs for attention: (B, S, S) or four-dimensional, integers as bool."""
    shape = (batch, 1, *mask.shape[1:]) if mask.dim() == 3 and mask.shape[0] == batch else tuple(mask.shape)
    heads_fit = len(shape) == 4 and shape[0] in (1, batch) and shape[2] in (1, seqlen) and shape[3] == seqlen
    if not heads_fit:
        raise ValueError(
            f"attention_mask must have shape (B, S), (B, S, S) or (B, 1 or H, S or 1, S) with B={batch}, S={seqlen}; "
            f"got {tuple(mask.shape)}"
        )
    mask = mask.view(shape) if mask.is_contiguous() else mask.reshape(shape)
    return mask if mask.dtype.is_floating_point or mask.dtype == torch.bool else mask != 0
