"""Ops and models as cases: everybody who takes part is right, and what is wrong is seen through."""

from __future__ import annotations

import dataclasses
from functools import partial

import pytest
import torch
import torch.nn.functional as F

from bertfast import BertConfig, DistilBertConfig, RobertaConfig, ops
from bertfast.benchmarks import bench_embed_layer_norm, bench_model, cases, harness, peers, suite
from bertfast.benchmarks.harness import Timer
from bertfast.benchmarks.records import Cell, Row, Skipped
from bertfast.benchmarks.roofline import Ceilings

CEILINGS = Ceilings(1e10, {"float32": 1e11, "bfloat16": 1e11})
TIMER = Timer(rounds=1, min_seconds=0.0)
TINY = {
    "hidden_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 96,
    "vocab_size": 300,
}
CONFIGS = {"bert-base": BertConfig, "roberta-base": RobertaConfig, "distilbert-base": DistilBertConfig}


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(cases, "ROTATED_BYTES", 1)
    monkeypatch.setattr(peers, "_is_installed", lambda module: False)
    monkeypatch.setattr(bench_embed_layer_norm, "VOCAB", 300)
    for name, config in CONFIGS.items():
        model = bench_model.Model(name, partial(config, **TINY, max_position_embeddings=514))
        monkeypatch.setitem(bench_model.MODELS, name, model)
    yield
    bench_model._models.cache_clear()


def measured(cell: Cell, **options) -> dict[str, Row | Skipped]:
    plan = suite.Plan(**options)
    return {entry.contestant: entry for entry in suite.measured(cell, plan, CEILINGS, TIMER, set())}


def cell_of(subject: str, pass_: str, fill: str = "dense", dtype: str = "float32", batch: int = 3, length: int = 8):
    return Cell(subject, pass_, batch, length, fill, dtype, "cpu")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", suite.MODULES)
def test_every_contestant_of_an_op_is_right(name, dtype):
    subject = suite.subject_of(name)
    assert subject.name == name
    for pass_ in subject.passes:
        for fill in subject.fills:
            found = measured(cell_of(name, pass_, fill, dtype))
            assert {"bertfast", "eager"} <= set(found)
            for entry in found.values():
                assert isinstance(entry, Row), entry
                assert entry.median > 0 and 0 <= entry.error <= 1 and entry.bytes > 0
            assert found["eager"].speedup is None and found["bertfast"].speedup["over"] == "eager"


@pytest.mark.parametrize(("name", "dtype"), [*((name, "float32") for name in CONFIGS), ("bert-base", "bfloat16")])
@pytest.mark.parametrize("pass_", ["inference", "training"])
def test_every_contestant_of_a_model_is_right(name, pass_, dtype):
    for fill in ("dense", "half", "mixed"):
        found = measured(cell_of(name, pass_, fill, dtype))
        assert list(found) == ["bertfast", "bertfast torch", "swapped", "eager", "sdpa"]
        for entry in found.values():
            assert isinstance(entry, Row), entry


def test_only_what_is_compared_has_gradients(monkeypatch):
    monkeypatch.setattr(bench_model, "GATE_TOKENS", 16)
    cell = cell_of("bert-base", "training", batch=4)
    assert bench_model._compared_rows(cell).tolist() == [0, 3]
    for entry in measured(cell).values():
        assert isinstance(entry, Row), entry


def test_a_swapped_model_in_the_wrong_mode_has_no_number(monkeypatch):
    build = bench_model._Models._build

    def in_eval_mode_for_ever(self, name):
        model = build(self, name)
        if name == "sdpa":
            model.encoder.layer[1].train = lambda mode=True: None
            model.encoder.layer[1].eval()
        return model

    monkeypatch.setattr(bench_model._Models, "_build", in_eval_mode_for_ever)
    found = measured(cell_of("bert-base", "training"))
    assert "is in eval mode, this cell is measured in train mode" in found["sdpa"].reason
    assert isinstance(found["eager"], Row)


def test_a_model_with_other_weights_has_no_number(monkeypatch):
    build = bench_model._Models._build

    def other(self, name):
        model = build(self, name)
        if name == "bertfast":
            model.encoder.layer[1].output.dense.bias = torch.nn.Parameter(torch.linspace(-1, 1, 48))
        return model

    monkeypatch.setattr(bench_model._Models, "_build", other)
    for pass_ in ("inference", "training"):
        bench_model._models.cache_clear()
        found = measured(cell_of("bert-base", pass_))
        assert found["bertfast"].reason.startswith("wrong result"), found["bertfast"]
        assert isinstance(found["swapped"], Row)


def test_ours_without_the_mask_has_no_number(monkeypatch):
    monkeypatch.setattr(ops, "attention", lambda q, k, v, mask, backend: F.scaled_dot_product_attention(q, k, v))
    for pass_ in ("forward", "backward", "both"):
        found = measured(cell_of("attention", pass_, "half"))
        assert found["bertfast"].reason.startswith("wrong result"), found["bertfast"]
        assert suite.failures(list(found.values())) == [found["bertfast"], found["bertfast torch"]]
    assert suite.failures(list(measured(cell_of("attention", "both")).values())) == []


def test_a_baseline_without_the_mask_is_no_yardstick(monkeypatch):
    attention = suite.subject_of("attention")
    monkeypatch.setattr(
        suite.importlib.import_module("bertfast.benchmarks.bench_attention"),
        "SUBJECT",
        dataclasses.replace(
            attention, others={"sdpa": lambda inputs: attention.others["sdpa"]({**inputs, "mask": None})}
        ),
    )
    (entry,) = measured(cell_of("attention", "forward", "half")).values()
    assert entry.contestant == suite.ALL and "nothing to compare with: out of plain PyTorch" in entry.reason


def test_a_cell_that_cannot_be_is_one_line():
    (entry,) = measured(cell_of("bert-base", "inference", length=600)).values()
    assert entry.reason == "rows of 600 tokens are longer than the model's 514"


def test_cells_that_are_done_are_left_out():
    cell = cell_of("add_layer_norm", "forward")
    keys = {entry.key for entry in measured(cell).values()}
    assert suite.measured(cell, suite.Plan(), CEILINGS, TIMER, keys) == []
    keys.remove(f"{cell}/eager")
    assert len(suite.measured(cell, suite.Plan(), CEILINGS, TIMER, keys)) == len(keys) + 1


@pytest.mark.parametrize(("batch", "length"), [(1, 16), (8, 128), (32, 512)])
def test_lengths(batch, length):
    dense, half, mixed = (
        cases.lengths_of(cell_of("attention", "forward", fill, batch=batch, length=length))
        for fill in ("dense", "half", "mixed")
    )
    assert dense == [length] * batch
    assert sum(half) == pytest.approx(batch * length / 2, rel=0.07) and max(half) == (
        length if batch > 1 else length // 2
    )
    assert max(mixed) == mixed[0] == length and min(mixed) >= 1 and len(mixed) == batch
    if batch == 32:
        assert 0.2 < sum(mixed) / sum(dense) < 0.45


def test_inputs_rotate_and_are_the_same_in_every_run():
    first, second = (suite.subject_of("linear_gelu").contest(cell_of("linear_gelu", "both")).inputs for _ in range(2))
    assert len(first) == cases.LEAST_SETS
    for name, leaf in first[0].leaves.items():
        assert torch.equal(leaf, second[0].leaves[name]) and not torch.equal(leaf, first[1].leaves[name])


def test_plans():
    plan = suite.Plan.of("cpu", True, subjects=("attention", "bert-base"), passes=("both", "training"), batches=(1, 4))
    cells = plan.cells()
    assert [(c.subject, c.pass_, c.batch, c.fill) for c in cells if c.subject == "attention"] == [
        ("attention", "both", batch, fill)
        for batch, fill in ((1, "dense"), (1, "half"), (4, "dense"), (4, "half"), (4, "mixed"))
    ]
    assert {c.pass_ for c in cells if c.subject == "bert-base"} == {"training"}
    everything = suite.Plan.of("cuda", False).cells()
    assert {c.subject for c in everything} == set(suite.SUBJECTS) and len(set(everything)) == len(everything)
    assert {c.dtype for c in everything} == {"bfloat16", "float16"}


def test_failures_are_ours_and_whole_cells_but_what_is_excused():
    cell = cell_of("attention", "forward")
    lines = [harness.skip(cell, name, ValueError("bad"), excused=False) for name in ("bertfast cpu", "swapped", "all")]
    others = [
        harness.skip(cell, name, ValueError("bad"), excused=name != "eager") for name in ("eager", "all", "bertfast")
    ]
    assert suite.failures([*lines, *others]) == lines


def test_a_device_that_is_neither_is_refused():
    assert suite.use(torch.device("cpu")) == "cpu"
    with pytest.raises(ValueError, match="expected a device of type cpu or cuda, got meta"):
        suite.use(torch.device("meta"))


def test_rows_too_long_for_a_model_are_no_failure():
    found = measured(cell_of("bert-base", "inference", length=4096))
    assert "longer than the model" in found["all"].reason and suite.failures(list(found.values())) == []
