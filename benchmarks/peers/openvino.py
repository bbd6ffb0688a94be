"""OpenVINO on a CPU: the stock SDPA model converted from PyTorch, with as many threads as torch has.

Weights and activations are in the cell's dtype where the processor has it, and so is the output, by a conversion inside
OpenVINO's graph; the output is written to a tensor of torch's.
"""

from __future__ import annotations

import functools
from unittest import mock

import torch
from torch import Tensor, nn

from bertfast.benchmarks.harness import Refused
from bertfast.benchmarks.peers import Converted
from bertfast.benchmarks.peers.tracing import example, quiet, traceable


def convert(stock: nn.Module) -> Converted:
    """A compiled model with the weights of a stock model, in its dtype.

    Raises:
        Refused: this processor does not compute in that dtype.
        ImportError: openvino is missing.
    """
    import openvino

    dtype = next(stock.parameters()).dtype
    elements = {torch.float32: openvino.Type.f32, torch.bfloat16: openvino.Type.bf16}
    core = openvino.Core()
    if dtype not in elements or (
        dtype == torch.bfloat16 and "BF16" not in core.get_property("CPU", "OPTIMIZATION_CAPABILITIES")
    ):
        raise Refused(f"does not compute in {dtype} on this processor".replace("torch.", ""))
    # The converter reports its use to the maker, except in what it takes for continuous integration.
    with quiet(), mock.patch.dict("os.environ", CI="true"):
        inputs = example(stock)
        sizes = [(name, [-1, -1], openvino.Type.i64) for name in inputs]
        model = openvino.convert_model(traceable(stock, "sdpa"), example_input=inputs, input=sizes)
    steps = openvino.preprocess.PrePostProcessor(model)
    steps.output().tensor().set_element_type(elements[dtype])
    settings = {
        "PERFORMANCE_HINT": "LATENCY",
        "INFERENCE_NUM_THREADS": torch.get_num_threads(),
        "INFERENCE_PRECISION_HINT": elements[dtype],
    }
    compiled = core.compile_model(steps.build(), "CPU", settings)
    taken = compiled.get_property("INFERENCE_PRECISION_HINT")
    if taken != elements[dtype]:
        raise Refused(f"computes in {taken.get_type_name()} where {dtype} is asked for".replace("torch.", ""))
    return Converted(functools.partial(_call, compiled.create_infer_request(), stock.config.hidden_size, dtype))


def _call(request, width: int, dtype: torch.dtype, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
    import openvino

    out = torch.empty(*input_ids.shape, width, dtype=dtype)
    # NumPy has no bfloat16: the same memory under another name.
    if dtype == torch.bfloat16:
        memory, element = out.view(torch.int16).numpy(), openvino.Type.bf16
    else:
        memory, element = out.numpy(), openvino.Type.f32
    request.set_output_tensor(0, openvino.Tensor(memory, list(out.shape), element))
    request.infer(
        {"input_ids": input_ids.numpy(), "attention_mask": attention_mask.numpy()},
        share_inputs=True,
        share_outputs=True,
    )
    return out
