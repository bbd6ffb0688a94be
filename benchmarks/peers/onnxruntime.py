"""ONNX Runtime: the stock model exported with its formula of attention, then fused by ONNX Runtime's own optimizer of
BERT models. The exporter is PyTorch's older one: of its graphs alone the optimizer (of 1.32) makes an attention one op.

Inputs and outputs are bound, not copied. On a GPU it computes in a stream of its own and a call waits for it; that has
not been run on a GPU yet.
"""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from bertfast.benchmarks.harness import Refused
from bertfast.benchmarks.peers import Converted
from bertfast.benchmarks.peers.tracing import example, quiet, traceable

ELEMENTS = {torch.float32: np.float32, torch.float16: np.float16}
OPSET = 17


def convert(stock: nn.Module) -> Converted:
    """A session with the weights of a stock model, on its device and in its dtype.

    Raises:
        Refused: the installed build has no GPU provider, or the dtype is another.
        ImportError: onnxruntime or onnx is missing.
    """
    return _session(stock, quantized=False)


def convert_int8(stock: nn.Module) -> Converted:
    """The same of an fp32 model on a CPU with weights in int8, a scale for each output channel, and activations that
    are quantised as they come: `quantize_dynamic`. Its output is fp32.

    Raises:
        As `convert`.
    """
    return _session(stock, quantized=True)


def _session(stock: nn.Module, *, quantized: bool) -> Converted:
    import onnxruntime

    weight = next(stock.parameters())
    if weight.dtype not in ELEMENTS:
        raise Refused(f"no kernels for {weight.dtype}".replace("torch.", ""))
    providers: list = ["CPUExecutionProvider"]
    if weight.device.type == "cuda":
        if "CUDAExecutionProvider" not in onnxruntime.get_available_providers():
            raise Refused("this build of onnxruntime has no CUDAExecutionProvider")
        # TF32 is on unless it is told otherwise.
        providers = [("CUDAExecutionProvider", {"device_id": _index(weight.device), "use_tf32": "0"})]
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_ALL
    options.intra_op_num_threads = torch.get_num_threads()
    # Its threads would spin into the next contestant's turn.
    options.add_session_config_entry("session.force_spinning_stop", "1")
    with tempfile.TemporaryDirectory() as folder:
        path = _fused(stock, Path(folder), weight.dtype, weight.device.type)
        if quantized:
            path = _quantized(path)
        session = onnxruntime.InferenceSession(str(path), options, providers=providers)
    return Converted(functools.partial(_call, session, stock.config.hidden_size, weight.dtype))


def _fused(stock: nn.Module, folder: Path, dtype: torch.dtype, device: str) -> Path:
    """The file of the optimized graph."""
    from onnxruntime.transformers import optimizer

    exported, fused = folder / "exported.onnx", folder / "fused.onnx"
    inputs = example(stock)
    with quiet():
        torch.onnx.export(
            traceable(stock, "eager"),
            tuple(inputs.values()),
            str(exported),
            input_names=list(inputs),
            output_names=["last_hidden_state"],
            dynamic_axes={name: {0: "batch", 1: "length"} for name in (*inputs, "last_hidden_state")},
            opset_version=OPSET,
            dynamo=False,
        )
        model = optimizer.optimize_model(
            str(exported),
            model_type="bert",
            num_heads=stock.config.num_attention_heads,
            hidden_size=stock.config.hidden_size,
            use_gpu=device == "cuda",
        )
        if dtype == torch.float16:
            model.convert_float_to_float16(keep_io_types=False)
    model.save_model_to_file(str(fused))
    return fused


def _quantized(path: Path) -> Path:
    import onnx
    from onnxruntime.quantization import QuantType, quantize_dynamic

    target = path.with_name("quantized.onnx")
    # The types behind the optimizer's own operators are inferred by nobody.
    options = {"DefaultTensorType": onnx.TensorProto.FLOAT}
    quantize_dynamic(str(path), str(target), per_channel=True, weight_type=QuantType.QInt8, extra_options=options)
    return target


def _call(session, width: int, dtype: torch.dtype, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
    device = input_ids.device
    out = torch.empty(*input_ids.shape, width, dtype=dtype, device=device)
    where = device.type, _index(device)
    # Names, or what is bound would be freed before the run.
    inputs = {"input_ids": input_ids.contiguous(), "attention_mask": attention_mask.contiguous()}
    binding = session.io_binding()
    for name, tensor in inputs.items():
        binding.bind_input(name, *where, np.int64, tuple(tensor.shape), tensor.data_ptr())
    binding.bind_output("last_hidden_state", *where, ELEMENTS[dtype], tuple(out.shape), out.data_ptr())
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
    session.run_with_iobinding(binding)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return out


def _index(device: torch.device) -> int:
    return device.index or 0
