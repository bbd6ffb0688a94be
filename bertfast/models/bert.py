"""BERT: the base model and every head."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from bertfast.configuration import BertConfig
from bertfast.models.base import PreTrainedModel
from bertfast.models.encoder_model import EncoderModel
from bertfast.models.outputs import BaseModelOutputWithPooling, PreTrainingOutput
from bertfast.models.tasks import (
    MaskedLMTask,
    MultipleChoiceTask,
    QuestionAnsweringTask,
    SequenceClassificationTask,
    TaskModel,
    TokenClassificationTask,
    token_loss,
)
from bertfast.nn import FusedAddLayerNorm
from bertfast.nn.feed_forward import dense_activation
from bertfast.plan import RowUse

_TIED_DECODER = {
    "cls.predictions.decoder.weight": "bert.embeddings.word_embeddings.weight",
    "cls.predictions.decoder.bias": "cls.predictions.bias",
}


def head_dropout(config: BertConfig) -> nn.Dropout:
    """The dropout in front of a classifier: `classifier_dropout`, by default `hidden_dropout_prob`."""
    p = config.hidden_dropout_prob if config.classifier_dropout is None else config.classifier_dropout
    return nn.Dropout(p)


class BertPreTrainedModel(PreTrainedModel):
    """Base of the BERT classes."""

    config_class = BertConfig
    base_model_prefix = "bert"


class BertModel(EncoderModel, BertPreTrainedModel):
    """BERT without a head. `add_pooling_layer=False` leaves out the pooler."""


class _Transform(nn.Module):
    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.activation = config.hidden_act
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)
        self.LayerNorm = FusedAddLayerNorm(config.hidden_size, config.layer_norm_eps)

    def forward(self, hidden_states: Tensor) -> Tensor:
        return self.LayerNorm(dense_activation(hidden_states, self.dense, self.activation))


class _Predictions(nn.Module):
    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.transform = _Transform(config)
        self.decoder = nn.Linear(config.hidden_size, config.vocab_size)
        self.bias = nn.Parameter(torch.zeros(config.vocab_size))

    def forward(self, hidden_states: Tensor) -> Tensor:
        return self.decoder(self.transform(hidden_states))


class _MaskedLMHead(nn.Module):
    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.predictions = _Predictions(config)

    def forward(self, hidden_states: Tensor) -> Tensor:
        return self.predictions(hidden_states)


class _NextSentenceHead(nn.Module):
    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.seq_relationship = nn.Linear(config.hidden_size, 2)

    def forward(self, pooled: Tensor) -> Tensor:
        return self.seq_relationship(pooled)


class _PreTrainingHeads(nn.Module):
    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.predictions = _Predictions(config)
        self.seq_relationship = nn.Linear(config.hidden_size, 2)

    def forward(self, hidden_states: Tensor, pooled: Tensor) -> tuple[Tensor, Tensor]:
        return self.predictions(hidden_states), self.seq_relationship(pooled)


class BertForPreTraining(TaskModel, BertPreTrainedModel):
    """BERT with the heads of its pre-training: masked LM and next sentence prediction."""

    _tied_weights_keys = _TIED_DECODER

    def __init__(self, config: BertConfig) -> None:
        super().__init__(config)
        self.bert = BertModel(self.config)
        self.cls = _PreTrainingHeads(self.config)
        self.post_init()

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        next_sentence_label: Tensor | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
    ) -> PreTrainingOutput | tuple[Tensor, ...]:
        """`labels` (B, S), -100 where ignored, and `next_sentence_label` (B,), 0 where the second sentence follows
        the first; the loss is their sum and needs both. Inputs as the base model."""
        outputs = self.encode(
            RowUse(labels=labels),
            input_ids=input_ids,
            attention_mask=attention_mask,
            token_type_ids=token_type_ids,
            position_ids=position_ids,
            inputs_embeds=inputs_embeds,
            output_attentions=output_attentions,
            output_hidden_states=output_hidden_states,
        )
        words, follows = self.cls(outputs.last_hidden_state, outputs.pooler_output)
        loss = None
        if labels is not None and next_sentence_label is not None:
            loss = token_loss(words, labels) + token_loss(follows, next_sentence_label)
        output = PreTrainingOutput(loss, words, follows, outputs.hidden_states, outputs.attentions)
        return self.finish(output, return_dict)


class BertForMaskedLM(MaskedLMTask, BertPreTrainedModel):
    """BERT with the masked LM head."""

    _tied_weights_keys = _TIED_DECODER

    def __init__(self, config: BertConfig) -> None:
        super().__init__(config)
        self.bert = BertModel(self.config, add_pooling_layer=False)
        self.cls = _MaskedLMHead(self.config)
        self.post_init()

    def vocabulary_logits(self, hidden_states: Tensor) -> Tensor:
        return self.cls(hidden_states)


class BertForNextSentencePrediction(SequenceClassificationTask, BertPreTrainedModel):
    """BERT with the next sentence head: `logits` (B, 2), `labels` (B,) 0 where the second sentence follows."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__(config)
        self.bert = BertModel(self.config)
        self.cls = _NextSentenceHead(self.config)
        self.post_init()

    def sequence_logits(self, outputs: BaseModelOutputWithPooling) -> Tensor:
        return self.cls(outputs.pooler_output)

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        return token_loss(logits, labels)


class BertForSequenceClassification(SequenceClassificationTask, BertPreTrainedModel):
    """BERT with a classifier or regressor on the pooled output."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__(config)
        self.bert = BertModel(self.config)
        self.dropout = head_dropout(self.config)
        self.classifier = nn.Linear(self.config.hidden_size, self.config.num_labels)
        self.post_init()

    def sequence_logits(self, outputs: BaseModelOutputWithPooling) -> Tensor:
        return self.classifier(self.dropout(outputs.pooler_output))


class BertForMultipleChoice(MultipleChoiceTask, BertPreTrainedModel):
    """BERT with one score for each choice."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__(config)
        self.bert = BertModel(self.config)
        self.dropout = head_dropout(self.config)
        self.classifier = nn.Linear(self.config.hidden_size, 1)
        self.post_init()

    def sequence_logits(self, outputs: BaseModelOutputWithPooling) -> Tensor:
        return self.classifier(self.dropout(outputs.pooler_output))


class BertForTokenClassification(TokenClassificationTask, BertPreTrainedModel):
    """BERT with a classifier on every token."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__(config)
        self.bert = BertModel(self.config, add_pooling_layer=False)
        self.dropout = head_dropout(self.config)
        self.classifier = nn.Linear(self.config.hidden_size, self.config.num_labels)
        self.post_init()


class BertForQuestionAnswering(QuestionAnsweringTask, BertPreTrainedModel):
    """BERT with start and end scores on every token."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__(config)
        self.bert = BertModel(self.config, add_pooling_layer=False)
        self.qa_outputs = nn.Linear(self.config.hidden_size, self.config.num_labels)
        self.post_init()
