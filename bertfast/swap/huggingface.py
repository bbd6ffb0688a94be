"""The modules of transformers that can be swapped: BERT, RoBERTa, XLM-RoBERTa, CamemBERT, DistilBERT.

The swapped classes are attributes of this module under their stock names, made when one is first asked for, so that
importing bertfast imports no transformers. Only exact stock types are swapped: a subclass may do something else.
"""

from __future__ import annotations

import importlib
import sys
from typing import NamedTuple

from torch import nn

from bertfast.swap import hf_heads
from bertfast.swap.core import STOCK, ClassSwapper, HookSwapper, SwapHook, SwappedForward, Swapper, swapped_class
from bertfast.swap.eligibility import has_own_forward
from bertfast.swap.hf_embeddings import BertEmbeddingsForward, DistilBertEmbeddingsForward, RobertaEmbeddingsForward
from bertfast.swap.hf_encoder import BaseModelHook, DistilBertModelHook, FusedEncoder
from bertfast.swap.hf_layers import BertLayerForward, DistilBertLayerForward, FusedLayer


class Family(NamedTuple):
    """Names of a family's classes, without the prefix that most of them have.

    Attributes:
        folder: below `transformers.models`.
        prefix: of models and heads.
        parts: class of a part -> the forward to put in front of it.
        containers: classes of the modules inside a layer.
        hooks: class of a model or head that needs one -> its hook.
    """

    folder: str
    prefix: str
    parts: dict[str, type[SwappedForward]]
    containers: tuple[str, ...]
    hooks: dict[str, type[SwapHook]]

    @property
    def module(self) -> str:
        """Where transformers has them."""
        return f"transformers.models.{self.folder}.modeling_{self.folder}"


def _bert_like(folder: str, prefix: str) -> Family:
    embeddings = BertEmbeddingsForward if prefix == "Bert" else RobertaEmbeddingsForward
    head = {"BertPredictionHeadTransform": hf_heads.FusedTransform}
    parts = {
        f"{prefix}Encoder": FusedEncoder,
        f"{prefix}Layer": BertLayerForward,
        f"{prefix}Embeddings": embeddings,
        **(head if prefix == "Bert" else {f"{prefix}LMHead": hf_heads.FusedLMHead}),
    }
    hooks = {
        "Model": BaseModelHook,
        "ForPreTraining": hf_heads.TokenHook,
        "ForMaskedLM": hf_heads.TokenHook,
        "LMHeadModel": hf_heads.HeadHook,
        "ForCausalLM": hf_heads.HeadHook,
        "ForTokenClassification": hf_heads.TokenHook,
        "ForQuestionAnswering": hf_heads.AnswerHook,
    }
    if prefix != "Bert":
        hooks["ForSequenceClassification"] = hf_heads.FirstTokenHook
    containers = tuple(prefix + name for name in ("Attention", "SelfAttention", "SelfOutput", "Intermediate", "Output"))
    return Family(folder, prefix, parts, containers, {prefix + name: hook for name, hook in hooks.items()})


FAMILIES = (
    _bert_like("bert", "Bert"),
    _bert_like("roberta", "Roberta"),
    _bert_like("xlm_roberta", "XLMRoberta"),
    _bert_like("camembert", "Camembert"),
    Family(
        "distilbert",
        "DistilBert",
        {
            "Transformer": FusedEncoder,
            "TransformerBlock": DistilBertLayerForward,
            "Embeddings": DistilBertEmbeddingsForward,
        },
        ("DistilBertSelfAttention", "FFN"),
        {
            "DistilBertModel": DistilBertModelHook,
            "DistilBertForMaskedLM": hf_heads.DistilBertTokenHook,
            "DistilBertForTokenClassification": hf_heads.DistilBertTokenHook,
            "DistilBertForQuestionAnswering": hf_heads.DistilBertAnswerHook,
            "DistilBertForSequenceClassification": hf_heads.FirstTokenHook,
            "DistilBertForMultipleChoice": hf_heads.FirstTokenHook,
        },
    ),
)
_BY_MODULE = {family.module: family for family in FAMILIES}
_BY_PART = {name: family for family in FAMILIES for name in family.parts}


def __getattr__(name: str) -> type[nn.Module]:
    family = _BY_PART.get(name)
    if family is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    modeling = importlib.import_module(family.module)
    mixin, attributes = family.parts[name], {}
    if issubclass(mixin, FusedLayer):
        attributes["_kinds"] = _containers(family)
    made = swapped_class(mixin, getattr(modeling, name), __name__, **attributes)
    return globals().setdefault(name, made)


def _containers(family: Family) -> frozenset[type[nn.Module]]:
    return frozenset(getattr(sys.modules[family.module], name) for name in family.containers)


def _family_of(kind: type) -> Family | None:
    """The family in which `kind` is a stock class."""
    family = _BY_MODULE.get(kind.__module__)
    return family if family and getattr(sys.modules[family.module], kind.__name__, None) is kind else None


def swapper_for(module: nn.Module) -> Swapper | None:
    """The swapper of a stock module; None for what is none, or needs none."""
    kind = type(module)
    family = _family_of(kind)
    if family is None:
        return None
    if (mixin := family.parts.get(kind.__name__)) is not None:
        swapped = getattr(sys.modules[__name__], kind.__name__)
        return ClassSwapper(swapped, mixin.becomes, lambda part: _reason_of_part(family, mixin, part))
    hook = family.hooks.get(kind.__name__)
    return None if hook is None else HookSwapper(hook, _reason_of_model)


def _reason_of_part(family: Family, mixin: type[SwappedForward], part: nn.Module) -> str | None:
    if has_own_forward(part):
        return "its forward was replaced on the instance"
    if issubclass(mixin, FusedLayer):
        return mixin.obstacle(part, _containers(family))
    return _reason_of_encoder(family, part) if mixin is FusedEncoder else None


def _reason_of_encoder(family: Family, encoder: nn.Module) -> str | None:
    (layer_class, mixin), *_ = ((n, m) for n, m in family.parts.items() if issubclass(m, FusedLayer))
    layer_class, kinds = getattr(sys.modules[family.module], layer_class), _containers(family)
    for number, layer in enumerate(encoder.layer):
        stock = vars(type(layer)).get(STOCK, type(layer))
        if stock is not layer_class:
            return f"layer {number} is a {type(layer).__name__}, not a {layer_class.__name__}"
        reason = mixin.obstacle(layer, kinds)
        if reason is not None:
            return f"layer {number} stays as it is"
    return None


def _reason_of_model(model: nn.Module) -> str | None:
    if getattr(model.config, "is_decoder", False):
        return "it is a decoder: causal and cross-attention and caches stay stock"
    return None


def reason_left(module: nn.Module) -> str | None:
    """Why a module that one might expect swapped is not: a subclass of one that would be, or another model."""
    kind = type(module)
    if _family_of(kind) is not None:
        return None
    for stock in kind.__mro__:
        family = _family_of(stock)
        if family is not None and (stock.__name__ in family.parts or stock.__name__ in family.hooks):
            return f"it is a subclass of {stock.__name__}, which may do something else"
        if family is not None:
            return None
    modeling_utils = sys.modules.get("transformers.modeling_utils")
    if modeling_utils is not None and isinstance(module, modeling_utils.PreTrainedModel):
        return "not one of the supported models: " + ", ".join(family.prefix for family in FAMILIES)
    return None
