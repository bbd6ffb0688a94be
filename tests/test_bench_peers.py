"""Other libraries in the benchmark suite: those that are installed, as `make test-peers` has them, and stand-ins of all
of them, which show what adapters ask for."""

from __future__ import annotations

import dataclasses
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from bertfast import BertConfig, DistilBertConfig, RobertaConfig
from bertfast.benchmarks import bench_model, cases, peers, suite
from bertfast.benchmarks.harness import Refused
from bertfast.benchmarks.peers import ctranslate2, onnxruntime, openvino
from bertfast.benchmarks.records import Cell, Results, Row, Skipped
from bertfast.benchmarks.roofline import Ceilings
from bertfast.benchmarks.timer import Timer
from helpers import fake_peers
from helpers.project import run_python

CEILINGS = Ceilings(1e10, {"float32": 1e11, "bfloat16": 1e11})
TIMER = Timer(rounds=1, min_seconds=0.0)
# More words than positions, or ONNX Runtime's optimizer warns.
TINY = {
    "hidden_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 96,
    "vocab_size": 600,
}
CONFIGS = {"bert-base": BertConfig, "roberta-base": RobertaConfig, "distilbert-base": DistilBertConfig}
LIBRARIES = {"onnxruntime": ("onnxruntime", "onnx"), "openvino": ("openvino",), "ctranslate2": ("ctranslate2",)}
OP_PEERS = ("flash-attn", "liger", "transformer-engine")


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(cases, "ROTATED_BYTES", 1)
    for name, config in CONFIGS.items():
        model = bench_model.Model(name, partial(config, **TINY, max_position_embeddings=514))
        monkeypatch.setitem(bench_model.MODELS, name, model)
    bench_model._models.cache_clear()
    yield
    bench_model._models.cache_clear()


@pytest.fixture
def installed(monkeypatch):
    """Decides what is."""

    def only(*modules: str) -> None:
        monkeypatch.setattr(peers, "_is_installed", lambda module: module in modules)

    only()
    return only


@pytest.fixture
def fakes(monkeypatch, installed):
    """The three libraries of models, and who computes in their place."""
    found = {
        "onnxruntime": fake_peers.OnnxRuntime(),
        "openvino": fake_peers.OpenVino(),
        "ctranslate2": fake_peers.CTranslate2(),
    }
    installed("onnx", *found)
    for name, fake in found.items():
        monkeypatch.setitem(sys.modules, name, fake.module)

    def fused(stock, folder, dtype, device):
        found["onnxruntime"].stock = stock
        return folder / "fused.onnx"

    def specification(stock):
        found["ctranslate2"].stock = stock
        return SimpleNamespace(save=lambda folder: None)

    monkeypatch.setattr(onnxruntime, "_fused", fused)
    monkeypatch.setattr(ctranslate2, "_specification", specification)
    return found


def measured(cell: Cell) -> dict[str, Row | Skipped]:
    return {e.contestant: e for e in suite.measured(cell, suite.Plan(), CEILINGS, TIMER, set())}


def cell_of(subject="bert-base", pass_="inference", batch=3, length=9, fill="half", dtype="float32", device="cpu"):
    return Cell(subject, pass_, batch, length, fill, dtype, device)


def test_a_conversion_that_fails_is_tried_once(fakes, monkeypatch):
    calls = []
    monkeypatch.setattr(openvino, "convert", lambda stock: calls.append(1) or 1 / 0)
    for fill in ("dense", "half"):
        assert measured(cell_of(fill=fill))["openvino"].reason.startswith("ZeroDivisionError")
    assert len(calls) == 1


def test_a_library_that_has_arrived_is_measured_when_a_run_is_resumed(installed):
    cells = [cell_of(fill=fill) for fill in ("dense", "half")]
    lines = peers.skipped(cells)
    results = Results(skipped=lines)
    assert {line.contestant for line in lines} > set(LIBRARIES) and suite.done_in(results) == results.keys
    installed("openvino")
    assert results.keys - suite.done_in(results) == {line.key for line in lines if line.contestant == "openvino"}


def test_replays_have_no_peer_of_models(fakes):
    contestants = suite.subject_of("bert-base").contestants(cell_of(), replayed=True)
    for name in fakes:
        with pytest.raises(Refused, match="which a CUDA graph does not record"):
            contestants[name]()


@pytest.mark.parametrize("subject", CONFIGS)
@pytest.mark.parametrize("name", LIBRARIES)
def test_a_library_that_is_installed_is_right(name, subject, installed):
    for module in LIBRARIES[name]:
        pytest.importorskip(module)
    installed(*LIBRARIES[name])
    for batch, length in ((1, 1), (1, 5), (3, 9), (3, 64)):
        for fill in ("dense", "half", "mixed")[: 3 if batch > 1 else 2]:
            row = measured(cell_of(subject, batch=batch, length=length, fill=fill))[name]
            assert isinstance(row, Row), row
            assert row.peak_bytes is None and 0 < row.error <= 1


def test_openvino_in_bfloat16(installed):
    pytest.importorskip("openvino")
    installed("openvino")
    entry = measured(cell_of(dtype="bfloat16"))["openvino"]
    assert isinstance(entry, Row) or entry.reason == "does not compute in bfloat16 on this processor"


@pytest.mark.parametrize("name", ["onnxruntime", "ctranslate2"])
def test_int8(name):
    for module in LIBRARIES[name]:
        pytest.importorskip(module)
    batch = bench_model.MODELS["bert-base"].contest(cell_of()).inputs[0]
    stock = bench_model.MODELS["bert-base"].stock(cell_of())
    found, exact = (
        c.tensor(c.call(batch.tensors["input_ids"], batch.tensors["attention_mask"]))[batch.real]
        for c in (peers.adapter(name).convert_int8(stock), peers.adapter(name).convert(stock))
    )
    assert not torch.equal(found, exact)
    assert torch.nn.functional.cosine_similarity(found.float(), exact.float(), dim=-1).min() > 0.99


def test_onnx_runtime_makes_one_op_of_an_attention(tmp_path):
    onnx = pytest.importorskip("onnx")
    pytest.importorskip("onnxruntime")
    for model in ("bert-base", "roberta-base", "distilbert-base"):
        stock = bench_model._Models(bench_model.MODELS[model], "cpu", torch.float32, False).stock
        for dtype, element in ((torch.float32, onnx.TensorProto.FLOAT), (torch.float16, onnx.TensorProto.FLOAT16)):
            graph = onnx.load(onnxruntime._fused(stock, tmp_path, dtype, "cpu")).graph
            kinds = [node.op_type for node in graph.node]
            assert (kinds.count("Attention"), kinds.count("SkipLayerNormalization")) == (2, 4)
            assert graph.output[0].type.tensor_type.elem_type == element
        assert not stock.training and stock.config._attn_implementation == "eager"


LIGER = """
import dataclasses
import liger_kernel.ops.layer_norm as ln
import triton.language as tl
from bertfast.benchmarks import peers, suite
from bertfast.benchmarks.peers import liger_kernel
from bertfast.benchmarks.records import Cell
from bertfast.benchmarks.roofline import Ceilings
from bertfast.benchmarks.timer import Timer

class Eps(float):
    def to(self, dtype):
        return self

# The interpreter leaves floats as they are, and knows no functions of libdevice.
liger_kernel.EPS, ln.rsqrt = Eps(liger_kernel.EPS), lambda x: tl.rsqrt(x)
peers.PEERS = tuple(dataclasses.replace(p, dtypes={"cpu": ("float32",)}) for p in peers.PEERS if p.name == "liger")
timer = Timer(rounds=1, min_seconds=0.0)
for pass_ in ("forward", "backward", "both"):
    cell = Cell("add_layer_norm", pass_, 2, 3, "dense", "float32", "cpu")
    for entry in suite.measured(cell, suite.Plan(), Ceilings(1e10, {"float32": 1e11}), timer, set()):
        if entry.contestant == "liger":
            print(pass_, getattr(entry, "reason", "right"))
"""


def test_liger_in_the_interpreter(tmp_path):
    library = pytest.importorskip("liger_kernel")
    folder = Path(library.__file__).parents[1]
    done = run_python("-c", LIGER, cwd=tmp_path, path=(folder,), TRITON_INTERPRET="1")
    assert done.stdout.split("\n")[:3] == ["forward right", "backward right", "both right"]


@pytest.mark.parametrize("subject", CONFIGS)
def test_stand_ins_take_part(subject, fakes):
    threads = torch.get_num_threads()
    for fill in ("dense", "half", "mixed"):
        found = measured(cell_of(subject, fill=fill))
        assert list(found)[-3:] == list(fakes)
        for name in fakes:
            assert isinstance(found[name], Row) and found[name].peak_bytes is None, found[name]
    session, compiled, encoder = (fake.seen for fake in fakes.values())
    assert (session["sessions"], compiled["conversions"], encoder["encoders"]) == (1, 1, 1), "each is converted once"
    assert session["intra_op_num_threads"] == compiled["INFERENCE_NUM_THREADS"] == encoder["intra_threads"] == threads
    assert (session["graph_optimization_level"], session["providers"]) == ("all", ["CPUExecutionProvider"])
    assert session["session.force_spinning_stop"] == "1"
    assert (compiled["PERFORMANCE_HINT"], compiled["INFERENCE_PRECISION_HINT"]) == ("LATENCY", "f32")
    assert (encoder["compute_type"], encoder["device"]) == ("float32", "cpu")


def test_bfloat16_is_what_is_asked_for(fakes):
    found = measured(cell_of(dtype="bfloat16"))
    assert not {"onnxruntime", "ctranslate2"} & found.keys()
    assert isinstance(found["openvino"], Row), found["openvino"]
    assert (fakes["openvino"].seen["INFERENCE_PRECISION_HINT"], fakes["openvino"].seen["output"]) == ("bf16", "bf16")


@pytest.mark.parametrize(
    ("openvino_is", "reason"),
    [
        ({"capabilities": ("FP32",)}, "does not compute in bfloat16 on this processor"),
        ({"precision": "f32"}, "computes in f32 where bfloat16 is asked for"),
    ],
)
def test_a_processor_without_bfloat16(fakes, monkeypatch, openvino_is, reason):
    monkeypatch.setitem(sys.modules, "openvino", fake_peers.OpenVino(**openvino_is).module)
    assert measured(cell_of(dtype="bfloat16"))["openvino"].reason == reason


def test_no_training(fakes):
    assert not fakes.keys() & measured(cell_of(pass_="training")).keys()


def test_a_peer_that_is_wrong_has_no_number(fakes, monkeypatch):
    right = fake_peers.hidden_states
    monkeypatch.setattr(fake_peers, "hidden_states", lambda *given: right(*given) + 1e-3)
    found = measured(cell_of())
    for name in ("onnxruntime", "ctranslate2"):
        assert found[name].reason.startswith("wrong result: last_hidden_state is off by"), found[name]
    assert isinstance(found["openvino"], Row)


def test_a_peer_that_fails_is_a_line(fakes, monkeypatch):
    def crash(*_arguments, **_options):
        raise RuntimeError("cannot convert\nthis")

    monkeypatch.setattr(openvino, "traceable", crash)
    monkeypatch.setattr(fakes["ctranslate2"].module.Encoder, "forward_batch", crash)
    monkeypatch.delitem(sys.modules, "onnxruntime")
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    found = measured(cell_of())
    assert found["openvino"].reason == found["ctranslate2"].reason == "RuntimeError: cannot convert this"
    assert found["onnxruntime"].reason.startswith("ModuleNotFoundError: ")
    assert all(isinstance(found[name], Row) for name in ("bertfast", "swapped", "eager", "sdpa"))
    assert suite.failures(list(found.values())) == []


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_libraries_without_a_gpu_refuse_one(fakes, dtype):
    weight = SimpleNamespace(dtype=dtype, device=torch.device("cuda", 0))
    stock = SimpleNamespace(parameters=lambda: iter([weight]))
    reasons = {
        onnxruntime: "this build of onnxruntime has no CUDAExecutionProvider",
        ctranslate2: f"does not compute in {str(dtype).removeprefix('torch.')} on this cuda device",
    }
    if dtype == torch.bfloat16:
        reasons[onnxruntime] = "no kernels for bfloat16"
    for adapter, reason in reasons.items():
        with pytest.raises(Refused) as refused:
            adapter.convert(stock)
        assert str(refused.value) == reason


@pytest.fixture
def ops_on_cpu(monkeypatch, installed):
    """Stand-ins of libraries of ops, as if they ran in float32 on a CPU."""
    libraries = fake_peers.op_libraries()
    installed(*libraries, "triton")
    for name, module in libraries.items():
        monkeypatch.setitem(sys.modules, name, module)
    moved = [dataclasses.replace(p, dtypes={"cpu": ("float32",)}) for p in peers.PEERS if p.name in OP_PEERS]
    monkeypatch.setattr(peers, "PEERS", tuple(moved))


@pytest.mark.parametrize("pass_", ["forward", "backward", "both"])
def test_ops_of_other_libraries(pass_, ops_on_cpu):
    with_kept_graphs = pass_ != "backward"
    expected = {
        ("add_layer_norm", "dense"): {"liger", "transformer-engine"},
        ("attention", "dense"): {"flash-attn", "transformer-engine"},
        ("attention", "half"): set(),
        ("varlen_attention", "half"): {"flash-attn", "transformer-engine"},
        ("varlen_attention", "dense"): {"flash-attn", "transformer-engine"},
        ("linear_gelu", "dense"): set(),
    }
    for (subject, fill), names in expected.items():
        found = measured(cell_of(subject, pass_, fill=fill))
        names = names if with_kept_graphs else names - {"transformer-engine"}
        assert found.keys() & set(OP_PEERS) == names
        for name in names:
            assert isinstance(found[name], Row), found[name]


def test_a_graph_that_is_freed_cannot_be_kept(ops_on_cpu, monkeypatch):
    """Why TransformerEngine takes no part in backward passes alone."""
    (te,) = (peer for peer in peers.PEERS if peer.name == "transformer-engine")
    monkeypatch.setattr(peers, "PEERS", (dataclasses.replace(te, passes=("backward",)),))
    entry = measured(cell_of("add_layer_norm", "backward", fill="dense"))["transformer-engine"]
    assert isinstance(entry, Skipped)


def test_a_line_for_each_peer_and_subject(installed):
    cells = suite.Plan.of("cpu", False, subjects=("add_layer_norm", "bert-base"), dtypes=("bfloat16",)).cells()
    installed("onnxruntime", "openvino")
    found = {(line.contestant, line.subject): line.reason for line in peers.skipped(cells)}
    assert found == {
        ("onnxruntime", "bert-base"): "not installed (onnx)",
        ("ctranslate2", "bert-base"): "not installed (ctranslate2)",
        ("flash-attn", "bert-base"): "runs on cuda only",
        ("liger", "add_layer_norm"): "runs on cuda only",
        ("transformer-engine", "add_layer_norm"): "runs on cuda only",
    }
    installed("onnxruntime", "onnx", "openvino", "ctranslate2")
    reasons = {line.contestant: line.reason for line in peers.skipped(cells)}
    assert reasons["onnxruntime"] == reasons["ctranslate2"] == "computes in float32 only on cpu"
    assert "openvino" not in reasons


def test_who_takes_part_on_a_gpu(installed):
    installed("onnxruntime", "onnx", "openvino", "ctranslate2", "flash_attn")
    for dtype, names in {
        "float32": ["onnxruntime", "ctranslate2"],
        "float16": ["onnxruntime", "ctranslate2"],
        "bfloat16": ["ctranslate2"],
    }.items():
        assert peers.taking_part(cell_of(dtype=dtype, device="cuda")) == names
    # In models it is a contestant of transformers.
    for subject, pass_ in (("bert-base", "training"), ("attention", "both")):
        cell = cell_of(subject, pass_, fill="dense", dtype="bfloat16", device="cuda")
        assert peers.taking_part(cell) == ([] if subject == "bert-base" else ["flash-attn"])
        assert not {"flash-attn"} & {line.contestant for line in peers.skipped([cell])}
    (line,) = peers.skipped([cell_of("attention", "both", fill="dense", device="cuda")])[:1]
    assert line.reason == "computes in float16 and bfloat16 only on cuda"


PROBE = """
import sys
from bertfast.benchmarks import peers, suite

cells = suite.Plan.of("cpu", True).cells()
peers.skipped(cells)
for cell in cells:
    suite.subject_of(cell.subject).contestants(cell)
names = {module for peer in peers.PEERS for module in peer.modules} - {"triton"}
print(sorted(names & sys.modules.keys()))
"""


def test_nothing_is_imported_before_it_takes_part(tmp_path):
    assert peers._is_installed("json") and not peers._is_installed("no_such_library.inner")
    assert run_python("-c", PROBE, cwd=tmp_path).stdout == "[]\n"
