"""RoBERTa, and XLM-RoBERTa and CamemBERT, which are the same graph: the base model and every head."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from bertfast.configuration import RobertaConfig
from bertfast.models.base import PreTrainedModel
from bertfast.models.bert import head_dropout
from bertfast.models.encoder_model import EncoderModel
from bertfast.models.outputs import BaseModelOutputWithPooling
from bertfast.models.tasks import (
    MaskedLMTask,
    MultipleChoiceTask,
    QuestionAnsweringTask,
    SequenceClassificationTask,
    TokenClassificationTask,
)
from bertfast.nn import FusedAddLayerNorm
from bertfast.nn.feed_forward import dense_activation
from bertfast.nn.plain import has_hooks


class RobertaPreTrainedModel(PreTrainedModel):
    """Base of the RoBERTa classes."""

    config_class = RobertaConfig
    base_model_prefix = "roberta"


class RobertaModel(EncoderModel, RobertaPreTrainedModel):
    """RoBERTa without a head. `add_pooling_layer=False` leaves out the pooler."""

    positions_follow_padding = True


class _LMHead(nn.Module):
    def __init__(self, config: RobertaConfig) -> None:
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)
        self.layer_norm = FusedAddLayerNorm(config.hidden_size, config.layer_norm_eps)
        self.decoder = nn.Linear(config.hidden_size, config.vocab_size)
        self.bias = nn.Parameter(torch.zeros(config.vocab_size))

    def forward(self, hidden_states: Tensor) -> Tensor:
        return self.decoder(self.layer_norm(dense_activation(hidden_states, self.dense, "gelu")))


class _ClassificationHead(nn.Module):
    def __init__(self, config: RobertaConfig) -> None:
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)
        self.dropout = head_dropout(config)
        self.out_proj = nn.Linear(config.hidden_size, config.num_labels)

    def forward(self, hidden_states: Tensor) -> Tensor:
        pooled = torch.tanh(self.dense(self.dropout(hidden_states[:, 0])))
        return self.out_proj(self.dropout(pooled))


def _is_ours(head: nn.Module) -> bool:
    return type(head) is _ClassificationHead and not has_hooks(head)


class RobertaForMaskedLM(MaskedLMTask, RobertaPreTrainedModel):
    """RoBERTa with the masked LM head."""

    _tied_weights_keys = {
        "lm_head.decoder.weight": "roberta.embeddings.word_embeddings.weight",
        "lm_head.decoder.bias": "lm_head.bias",
    }

    def __init__(self, config: RobertaConfig) -> None:
        super().__init__(config)
        self.roberta = RobertaModel(self.config, add_pooling_layer=False)
        self.lm_head = _LMHead(self.config)
        self.post_init()

    def vocabulary_logits(self, hidden_states: Tensor) -> Tensor:
        return self.lm_head(hidden_states)


class RobertaForSequenceClassification(SequenceClassificationTask, RobertaPreTrainedModel):
    """RoBERTa with a classifier or regressor on the first token."""

    def __init__(self, config: RobertaConfig) -> None:
        super().__init__(config)
        self.roberta = RobertaModel(self.config, add_pooling_layer=False)
        self.classifier = _ClassificationHead(self.config)
        self.post_init()

    def sequence_logits(self, outputs: BaseModelOutputWithPooling) -> Tensor:
        return self.classifier(outputs.last_hidden_state)

    def reads_nothing_else(self) -> bool:
        return super().reads_nothing_else() and _is_ours(self.classifier)


class RobertaForMultipleChoice(MultipleChoiceTask, RobertaPreTrainedModel):
    """RoBERTa with one score for each choice."""

    def __init__(self, config: RobertaConfig) -> None:
        super().__init__(config)
        self.roberta = RobertaModel(self.config)
        self.dropout = nn.Dropout(self.config.hidden_dropout_prob)
        self.classifier = nn.Linear(self.config.hidden_size, 1)
        self.post_init()

    def sequence_logits(self, outputs: BaseModelOutputWithPooling) -> Tensor:
        return self.classifier(self.dropout(outputs.pooler_output))


class RobertaForTokenClassification(TokenClassificationTask, RobertaPreTrainedModel):
    """RoBERTa with a classifier on every token."""

    def __init__(self, config: RobertaConfig) -> None:
        super().__init__(config)
        self.roberta = RobertaModel(self.config, add_pooling_layer=False)
        self.dropout = head_dropout(self.config)
        self.classifier = nn.Linear(self.config.hidden_size, self.config.num_labels)
        self.post_init()


class RobertaForQuestionAnswering(QuestionAnsweringTask, RobertaPreTrainedModel):
    """RoBERTa with start and end scores on every token."""

    def __init__(self, config: RobertaConfig) -> None:
        super().__init__(config)
        self.roberta = RobertaModel(self.config, add_pooling_layer=False)
        self.qa_outputs = nn.Linear(self.config.hidden_size, self.config.num_labels)
        self.post_init()
