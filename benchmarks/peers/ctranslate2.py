"""CTranslate2: an encoder built from its public specification of Transformer encoders.

Its converter of transformers models asks for a pooler, a tokenizer and an attribute that configurations no longer have
(read in 4.8), so the weights are named here. It computes tokens only, which it is told the number of in each row. On a
GPU it computes in a stream of its own and a call waits for it; that has not been run on a GPU yet.
"""

from __future__ import annotations

import functools
import tempfile

import numpy as np
import torch
from torch import Tensor, nn

from bertfast.benchmarks.harness import Refused
from bertfast.benchmarks.peers import Converted

BERT = {
    "layers": "encoder.layer",
    "qkv": ("attention.self.query", "attention.self.key", "attention.self.value"),
    "attention": ("attention.output.dense",),
    "attention_norm": "attention.output.LayerNorm",
    "inner": ("intermediate.dense",),
    "outer": ("output.dense",),
    "norm": "output.LayerNorm",
}
DISTILBERT = {
    "layers": "transformer.layer",
    "qkv": ("attention.q_lin", "attention.k_lin", "attention.v_lin"),
    "attention": ("attention.out_lin",),
    "attention_norm": "sa_layer_norm",
    "inner": ("ffn.lin1",),
    "outer": ("ffn.lin2",),
    "norm": "output_layer_norm",
}


def convert(stock: nn.Module) -> Converted:
    """An encoder with the weights of a stock model, on its device and in its dtype.

    Raises:
        Refused: the library does not compute in that dtype on this device.
        ImportError: ctranslate2 is missing.
    """
    return _encoder(stock, str(next(stock.parameters()).dtype).removeprefix("torch."))


def convert_int8(stock: nn.Module) -> Converted:
    """The same of an fp32 model with weights in int8 and activations that are quantised as they come; its output is
    fp32.

    Raises:
        As `convert`.
    """
    return _encoder(stock, "int8_float32")


def _encoder(stock: nn.Module, compute_type: str) -> Converted:
    import ctranslate2

    weight = next(stock.parameters())
    device = weight.device.type
    index = weight.device.index or 0
    if compute_type not in ctranslate2.get_supported_compute_types(device, index):
        raise Refused(f"does not compute in {compute_type} on this {device} device")
    with tempfile.TemporaryDirectory() as folder:
        _specification(stock).save(folder)
        encoder = ctranslate2.Encoder(
            folder, device=device, device_index=index, compute_type=compute_type, intra_threads=torch.get_num_threads()
        )
    return Converted(functools.partial(_call, encoder), _tensor)


def _specification(stock: nn.Module):
    from ctranslate2 import specs

    config, embeddings = stock.config, stock.embeddings
    names = DISTILBERT if config.model_type == "distilbert" else BERT
    tables = [embeddings.word_embeddings.weight]
    if hasattr(embeddings, "token_type_embeddings"):
        tables.append(embeddings.token_type_embeddings.weight)
    encoder = specs.TransformerEncoderSpec(
        config.num_hidden_layers,
        config.num_attention_heads,
        pre_norm=False,
        activation=specs.Activation.GELU,
        num_source_embeddings=len(tables),
        embeddings_merge=specs.EmbeddingsMerge.ADD,
        layernorm_embedding=True,
    )
    encoder.scale_embeddings = False
    for table, weight in zip(encoder.embeddings, tables, strict=True):
        table.weight = _values(weight)
    # RoBERTa's positions begin behind that of padding.
    padding = embeddings.position_embeddings.padding_idx
    encoder.position_encodings.encodings = _values(
        embeddings.position_embeddings.weight[0 if padding is None else padding + 1 :]
    )
    _set_norm(encoder.layernorm_embedding, embeddings.LayerNorm)
    for layer, module in zip(encoder.layer, stock.get_submodule(names["layers"]), strict=True):
        for linear, parts in (
            (layer.self_attention.linear[0], names["qkv"]),
            (layer.self_attention.linear[1], names["attention"]),
            (layer.ffn.linear_0, names["inner"]),
            (layer.ffn.linear_1, names["outer"]),
        ):
            modules = [module.get_submodule(name) for name in parts]
            linear.weight = _values(torch.cat([part.weight for part in modules]))
            linear.bias = _values(torch.cat([part.bias for part in modules]))
        _set_norm(layer.self_attention.layer_norm, module.get_submodule(names["attention_norm"]))
        _set_norm(layer.ffn.layer_norm, module.get_submodule(names["norm"]))
    specification = specs.TransformerEncoderModelSpec(encoder)
    # A model needs a vocabulary, though it is given ids.
    specification.register_vocabulary([str(i) for i in range(config.vocab_size)])
    specification.config.unk_token = "0"
    specification.config.layer_norm_epsilon = embeddings.LayerNorm.eps
    specification.validate()
    specification.optimize()
    return specification


def _set_norm(norm, module: nn.LayerNorm) -> None:
    norm.gamma, norm.beta = _values(module.weight), _values(module.bias)


def _values(weight: Tensor) -> np.ndarray:
    return weight.detach().to("cpu", torch.float32).numpy()


def _call(encoder, input_ids: Tensor, attention_mask: Tensor):
    """A view of the library's memory, (B, S, N)."""
    from ctranslate2 import StorageView

    on_gpu = input_ids.is_cuda
    ids, lengths = input_ids.int(), attention_mask.sum(1, dtype=torch.int32)
    if on_gpu:
        torch.cuda.current_stream(ids.device).synchronize()
    views = [StorageView.from_array(tensor if on_gpu else tensor.numpy()) for tensor in (ids, lengths)]
    out = encoder.forward_batch(*views).last_hidden_state
    if on_gpu:
        torch.cuda.synchronize(ids.device)
    return out


def _tensor(view) -> Tensor:
    from ctranslate2 import DataType

    # The interface of arrays has no bfloat16, float32 holds its values.
    array = view.to(DataType.float32) if view.dtype == DataType.bfloat16 else view
    if view.device == "cuda":
        tensor = torch.as_tensor(array, device="cuda")
    else:
        tensor = torch.from_numpy(np.array(array, copy=False))
    return tensor.bfloat16() if view.dtype == DataType.bfloat16 else tensor
