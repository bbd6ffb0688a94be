"""DistilBERT: the base model and every head. No token types, no pooler, other parameter names, the same forward."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from bertfast.configuration import DistilBertConfig
from bertfast.models.base import PreTrainedModel
from bertfast.models.encoder_model import EncoderModel
from bertfast.models.outputs import BaseModelOutputWithPooling, ModelOutput
from bertfast.models.tasks import (
    MaskedLMTask,
    MultipleChoiceTask,
    QuestionAnsweringTask,
    SequenceClassificationTask,
    TaskModel,
    TokenClassificationTask,
)
from bertfast.nn import FusedAddLayerNorm
from bertfast.nn.feed_forward import dense_activation
from bertfast.nn.names import DISTILBERT_LAYER
from bertfast.plan import REAL_ROWS, RowUse


class DistilBertPreTrainedModel(PreTrainedModel):
    """Base of the DistilBERT classes."""

    config_class = DistilBertConfig
    base_model_prefix = "distilbert"


class DistilBertModel(EncoderModel, DistilBertPreTrainedModel):
    """DistilBERT without a head."""

    encoder_name = "transformer"
    layer_names = DISTILBERT_LAYER

    def __init__(self, config: DistilBertConfig) -> None:
        super().__init__(config, add_pooling_layer=False)

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        position_ids: Tensor | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        *,
        first_token_only: bool = False,
        _use: RowUse = REAL_ROWS,
    ) -> BaseModelOutputWithPooling | tuple[Tensor, ...]:
        """As the other families' base models, without token types."""
        return super().forward(
            input_ids,
            attention_mask,
            None,
            position_ids,
            inputs_embeds,
            output_attentions=output_attentions,
            output_hidden_states=output_hidden_states,
            return_dict=return_dict,
            first_token_only=first_token_only,
            _use=_use,
        )


class _DistilBertTask(TaskModel, DistilBertPreTrainedModel):
    """Gives a task's forward the arguments of DistilBERT: no token types, `inputs_embeds` third."""

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        position_ids: Tensor | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
    ) -> ModelOutput | tuple[Tensor, ...]:
        """As the other families' heads, without token types."""
        return super().forward(
            input_ids,
            attention_mask,
            None,
            position_ids,
            inputs_embeds,
            labels,
            output_attentions,
            output_hidden_states,
            return_dict,
        )


class DistilBertForMaskedLM(_DistilBertTask, MaskedLMTask):
    """DistilBERT with the masked LM head."""

    _tied_weights_keys = {"vocab_projector.weight": "distilbert.embeddings.word_embeddings.weight"}

    def __init__(self, config: DistilBertConfig) -> None:
        super().__init__(config)
        width = self.config.dim
        self.distilbert = DistilBertModel(self.config)
        self.vocab_transform = nn.Linear(width, width)
        self.vocab_layer_norm = FusedAddLayerNorm(width, 1e-12)
        self.vocab_projector = nn.Linear(width, self.config.vocab_size)
        self.post_init()

    def vocabulary_logits(self, hidden_states: Tensor) -> Tensor:
        transformed = dense_activation(hidden_states, self.vocab_transform, self.config.activation)
        return self.vocab_projector(self.vocab_layer_norm(transformed))


class _FirstTokenHead(_DistilBertTask):
    """classifier(dropout(relu(pre_classifier(first token))))."""

    def __init__(self, config: DistilBertConfig) -> None:
        super().__init__(config)
        width = self.config.dim
        self.distilbert = DistilBertModel(self.config)
        self.pre_classifier = nn.Linear(width, width)
        self.classifier = nn.Linear(width, self.head_size())
        self.dropout = nn.Dropout(self.config.seq_classif_dropout)
        self.post_init()

    def head_size(self) -> int:
        """Columns of the classifier."""
        return self.config.num_labels

    def sequence_logits(self, outputs: BaseModelOutputWithPooling) -> Tensor:
        pooled = torch.relu(self.pre_classifier(outputs.last_hidden_state[:, 0]))
        return self.classifier(self.dropout(pooled))


class DistilBertForSequenceClassification(_FirstTokenHead, SequenceClassificationTask):
    """DistilBERT with a classifier or regressor on the first token."""


class DistilBertForMultipleChoice(_FirstTokenHead, MultipleChoiceTask):
    """DistilBERT with one score for each choice."""

    def head_size(self) -> int:
        return 1


class DistilBertForTokenClassification(_DistilBertTask, TokenClassificationTask):
    """DistilBERT with a classifier on every token."""

    def __init__(self, config: DistilBertConfig) -> None:
        super().__init__(config)
        self.distilbert = DistilBertModel(self.config)
        self.dropout = nn.Dropout(self.config.dropout)
        self.classifier = nn.Linear(self.config.dim, self.config.num_labels)
        self.post_init()


class DistilBertForQuestionAnswering(DistilBertPreTrainedModel, QuestionAnsweringTask):
    """DistilBERT with start and end scores on every token.

    Raises:
        ValueError: `config.num_labels` is not 2.
    """

    def __init__(self, config: DistilBertConfig) -> None:
        super().__init__(config)
        if self.config.num_labels != 2:
            raise ValueError(f"num_labels must be 2 for question answering, got {self.config.num_labels}")
        self.distilbert = DistilBertModel(self.config)
        self.qa_outputs = nn.Linear(self.config.dim, 2)
        self.dropout = nn.Dropout(self.config.qa_dropout)
        self.post_init()

    def answer_logits(self, hidden_states: Tensor) -> Tensor:
        return self.qa_outputs(self.dropout(hidden_states))

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        start_positions: Tensor | None = None,
        end_positions: Tensor | None = None,
        position_ids: Tensor | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
    ) -> ModelOutput | tuple[Tensor, ...]:
        """As the other families' question answering heads, without token types."""
        return super().forward(
            input_ids,
            attention_mask,
            None,
            position_ids,
            inputs_embeds,
            start_positions,
            end_positions,
            output_attentions,
            output_hidden_states,
            return_dict,
        )
