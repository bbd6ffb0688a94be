"""What the heads of all families share: one forward and one loss per task.

A family's class adds the modules and says how hidden states become logits.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from bertfast.models.base import PreTrainedModel
from bertfast.models.outputs import BaseModelOutputWithPooling, LogitsOutput, ModelOutput, QuestionAnsweringOutput
from bertfast.plan import IGNORED_LABEL, REAL_ROWS, RowUse


class TaskModel(PreTrainedModel):
    """A base model under `base_model_prefix` with a head."""

    reads_first_token = False

    @property
    def unpad(self) -> bool:
        """The base model's `unpad`: whether padding is removed around embeddings and encoder."""
        return self.base_model.unpad

    @unpad.setter
    def unpad(self, value: bool) -> None:
        self.base_model.unpad = value

    def encode(self, use: RowUse, **inputs: object) -> BaseModelOutputWithPooling:
        """Runs the base model on the inputs that were given."""
        if self.reads_first_token:
            use = use._replace(first_token=True, nothing_else=self.reads_nothing_else())
        given = {name: value for name, value in inputs.items() if value is not None}
        return self.base_model(**given, return_dict=True, _use=use)

    def reads_nothing_else(self) -> bool:
        """Whether the head is known to read no token but the first: a user's own may read anything."""
        return type(self).__module__.startswith("bertfast.")

    def finish(self, output: ModelOutput, return_dict: bool | None) -> ModelOutput | tuple[Tensor, ...]:
        """The output, or its tuple for `return_dict=False`."""
        return_dict = self.config.use_return_dict if return_dict is None else return_dict
        return output if return_dict else output.to_tuple()


class MaskedLMTask(TaskModel):
    """Logits over the vocabulary for every token; a family provides `vocabulary_logits`."""

    def vocabulary_logits(self, hidden_states: Tensor) -> Tensor:
        raise NotImplementedError

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
    ) -> LogitsOutput | tuple[Tensor, ...]:
        """`logits` (B, S, V); `labels` (B, S), -100 where there is nothing to predict. Inputs as the base model."""
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
        logits = self.vocabulary_logits(outputs.last_hidden_state)
        loss = None if labels is None else token_loss(logits, labels)
        return self.finish(LogitsOutput(loss, logits, outputs.hidden_states, outputs.attentions), return_dict)


class SequenceClassificationTask(TaskModel):
    """Logits for each sequence; a family provides `sequence_logits`."""

    reads_first_token = True

    def sequence_logits(self, outputs: BaseModelOutputWithPooling) -> Tensor:
        raise NotImplementedError

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
    ) -> LogitsOutput | tuple[Tensor, ...]:
        """`logits` (B, num_labels). `labels`: (B,) integers for one label each, (B, num_labels) floating point for
        several, (B,) or (B, num_labels) floating point for regression, as `config.problem_type` says or, without
        it, as `num_labels` and the labels' dtype suggest. Inputs as the base model."""
        outputs = self.encode(
            REAL_ROWS,
            input_ids=input_ids,
            attention_mask=attention_mask,
            token_type_ids=token_type_ids,
            position_ids=position_ids,
            inputs_embeds=inputs_embeds,
            output_attentions=output_attentions,
            output_hidden_states=output_hidden_states,
        )
        logits = self.sequence_logits(outputs)
        loss = None if labels is None else self.loss(logits, labels)
        return self.finish(LogitsOutput(loss, logits, outputs.hidden_states, outputs.attentions), return_dict)

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        return sequence_loss(logits, labels, self.config.problem_type)


class MultipleChoiceTask(TaskModel):
    """One logit for each choice of each question; a family provides `sequence_logits` with one column."""

    reads_first_token = True

    def sequence_logits(self, outputs: BaseModelOutputWithPooling) -> Tensor:
        raise NotImplementedError

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
    ) -> LogitsOutput | tuple[Tensor, ...]:
        """`logits` (B, choices) from inputs (B, choices, S); `labels` (B,), the right choice."""
        given = input_ids if inputs_embeds is None else inputs_embeds
        if given is None:
            raise ValueError("exactly one of input_ids and inputs_embeds must be given")
        outputs = self.encode(
            REAL_ROWS,
            **{
                name: None if tensor is None else tensor.flatten(0, 1)
                for name, tensor in (
                    ("input_ids", input_ids),
                    ("attention_mask", attention_mask),
                    ("token_type_ids", token_type_ids),
                    ("position_ids", position_ids),
                    ("inputs_embeds", inputs_embeds),
                )
            },
            output_attentions=output_attentions,
            output_hidden_states=output_hidden_states,
        )
        logits = self.sequence_logits(outputs).view(-1, given.shape[1])
        loss = None if labels is None else F.cross_entropy(logits, labels)
        return self.finish(LogitsOutput(loss, logits, outputs.hidden_states, outputs.attentions), return_dict)


class TokenClassificationTask(TaskModel):
    """Logits for each token through `dropout` and `classifier`."""

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
    ) -> LogitsOutput | tuple[Tensor, ...]:
        """`logits` (B, S, num_labels); `labels` (B, S), -100 where ignored. Inputs as the base model."""
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
        logits = self.classifier(self.dropout(outputs.last_hidden_state))
        loss = None if labels is None else token_loss(logits, labels)
        return self.finish(LogitsOutput(loss, logits, outputs.hidden_states, outputs.attentions), return_dict)


class QuestionAnsweringTask(TaskModel):
    """Logits of an answer's first and last token through `qa_outputs`."""

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        start_positions: Tensor | None = None,
        end_positions: Tensor | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
    ) -> QuestionAnsweringOutput | tuple[Tensor, ...]:
        """`start_logits` and `end_logits` (B, S); positions (B,), clamped to [0, S], where S means no answer here.
        Inputs as the base model."""
        trains = start_positions is not None and end_positions is not None
        outputs = self.encode(
            RowUse(padded_rows=trains),
            input_ids=input_ids,
            attention_mask=attention_mask,
            token_type_ids=token_type_ids,
            position_ids=position_ids,
            inputs_embeds=inputs_embeds,
            output_attentions=output_attentions,
            output_hidden_states=output_hidden_states,
        )
        start_logits, end_logits = self.answer_logits(outputs.last_hidden_state).unbind(-1)
        start_logits, end_logits = start_logits.contiguous(), end_logits.contiguous()
        loss = None
        if trains:
            loss = (span_loss(start_logits, start_positions) + span_loss(end_logits, end_positions)) / 2
        output = QuestionAnsweringOutput(loss, start_logits, end_logits, outputs.hidden_states, outputs.attentions)
        return self.finish(output, return_dict)

    def answer_logits(self, hidden_states: Tensor) -> Tensor:
        """(B, S, N) to (B, S, 2)."""
        return self.qa_outputs(hidden_states)


def token_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean cross entropy of (..., V) logits over the (...) labels that are not -100."""
    labels = labels.to(logits.device)
    return F.cross_entropy(logits.view(-1, logits.shape[-1]), labels.view(-1), ignore_index=IGNORED_LABEL)


def sequence_loss(logits: Tensor, labels: Tensor, problem_type: str | None) -> Tensor:
    """Mean squared error, cross entropy or binary cross entropy of (B, num_labels) logits."""
    if problem_type is None:
        if logits.shape[-1] == 1:
            problem_type = "regression"
        elif labels.dtype in (torch.int64, torch.int32):
            problem_type = "single_label_classification"
        else:
            problem_type = "multi_label_classification"
    labels = labels.to(logits.device)
    if problem_type == "regression":
        if logits.shape[-1] == 1:
            return F.mse_loss(logits.squeeze(), labels.squeeze())
        return F.mse_loss(logits, labels)
    if problem_type == "single_label_classification":
        return token_loss(logits, labels)
    return F.binary_cross_entropy_with_logits(logits, labels)


def span_loss(logits: Tensor, positions: Tensor) -> Tensor:
    """Cross entropy of (B, S) logits; a position beyond the sequence is clamped to S and ignored."""
    positions = positions.to(logits.device)
    if positions.dim() > 1:
        positions = positions.squeeze(-1)
    length = logits.shape[1]
    return F.cross_entropy(logits, positions.clamp(0, length), ignore_index=length)
