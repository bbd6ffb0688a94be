"""The floors: the numbers that the kernels are designed for, and PyTorch's own count of FLOPs."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

from bertfast import reference
from bertfast.benchmarks import roofline
from bertfast.benchmarks.roofline import BACKWARD, BOTH, FORWARD, Ceilings, Cost, Sizes

BASE = Sizes()
# Microseconds of 12 layers, by (B, S): the whole as one, and the sum over seven kernels a layer.
FLOORS = {
    "H200": (
        Ceilings(4.3e12, {"bfloat16": 790e12}),
        {
            (1, 128): (40, 54),
            (8, 128): (226, 264),
            (32, 128): (905, 1056),
            (8, 512): (979, 1084),
            (32, 512): (3914, 4336),
        },
    ),
    "A100": (
        Ceilings(2.0e12, {"bfloat16": 312e12}),
        {
            (1, 128): (85, 116),
            (8, 128): (573, 652),
            (32, 128): (2292, 2608),
            (8, 512): (2478, 2704),
            (32, 512): (9912, 10817),
        },
    ),
}


@pytest.mark.parametrize("length", [1, 128, 512])
def test_flops_of_a_bert_base_layer(length):
    assert roofline.layer_flops([length] * 3, BASE) == 3 * length * (14_155_776 + 3_072 * length)


def test_bytes_of_a_bert_base_layer():
    assert 2 * roofline.layer_weights(BASE) == pytest.approx(14.2e6, rel=0.004)
    one, two = (sum(cost.bytes for cost in roofline.layer_kernels([tokens], BASE, 2)) for tokens in (1, 2))
    assert two - one == 39_936


@pytest.mark.parametrize("card", FLOORS)
def test_floors_of_the_design(card):
    ceilings, floors = FLOORS[card]
    for (batch, length), (ideal, by_kernel) in floors.items():
        lengths = [length] * batch
        whole = roofline.model("inference", lengths, BASE, 2)
        kernels = roofline.layer_kernels(lengths, BASE, 2)
        summed = 12 * sum(ceilings.floor_seconds(cost, "bfloat16") for cost in kernels)
        assert 1e6 * ceilings.floor_seconds(whole, "bfloat16") == pytest.approx(ideal, rel=0.01, abs=0.6)
        assert 1e6 * summed == pytest.approx(by_kernel, rel=0.01, abs=0.6)


def test_a_layers_kernels_do_its_flops():
    lengths = [7, 128, 1]
    assert sum(cost.flops for cost in roofline.layer_kernels(lengths, BASE, 2)) == roofline.layer_flops(lengths, BASE)
    assert roofline.model("inference", lengths, BASE, 2).flops == 12 * roofline.layer_flops(lengths, BASE)


def counted(call, *leaves):
    """PyTorch's count of FLOPs, forward and backward."""
    with FlopCounterMode(display=False) as forward:
        out = call(*leaves)
    with FlopCounterMode(display=False) as backward:
        torch.autograd.grad(out, leaves, out.detach())
    return forward.get_total_flops(), backward.get_total_flops()


def leaves(*shapes):
    return [torch.randn(shape, requires_grad=True) for shape in shapes]


def test_flops_as_pytorch_counts_them():
    t, n, f = 5, 12, 20
    linear = roofline.linear(FORWARD, t, n, f, 4), roofline.linear(BACKWARD, t, n, f, 4)
    assert counted(F.linear, *leaves((t, n), (f, n))) == tuple(cost.flops for cost in linear)
    qkv = roofline.qkv_projection(FORWARD, t, n, 4), roofline.qkv_projection(BACKWARD, t, n, 4)
    assert counted(F.linear, *leaves((t, n), (3 * n, n))) == tuple(cost.flops for cost in qkv)

    def feed_forward(x, w_in, w_out):
        return reference.feed_forward(x, w_in, None, w_out, None)

    both = roofline.feed_forward(FORWARD, t, n, f, 4), roofline.feed_forward(BACKWARD, t, n, f, 4)
    assert counted(feed_forward, *leaves((t, n), (f, n), (n, f))) == tuple(cost.flops for cost in both)


def test_attention_flops_as_pytorch_counts_them():
    batch, heads, length, d = 2, 3, 8, 4
    shapes = [(batch, heads, length, d)] * 3
    forward, backward = counted(lambda q, k, v: reference.attention(q, k, v)[0], *leaves(*shapes))
    lengths = [length] * batch
    assert roofline.attention(FORWARD, lengths, heads * d, 4).flops == forward
    # Eager keeps the scores; what keeps nothing of S^2 computes them again, one product of five.
    assert roofline.attention(BACKWARD, lengths, heads * d, 4).flops == backward * 5 // 4


def test_training_does_the_products_three_times():
    lengths, n, f = [9, 3], BASE.n, BASE.f
    products = 2 * sum(lengths) * (4 * n * n + 2 * n * f)
    scores = roofline.attention(FORWARD, lengths, n, 4).flops
    assert roofline.model("training", lengths, BASE, 4).flops == 12 * (3 * products + 7 * scores // 2)


@pytest.mark.parametrize(
    ("cost", "tensors"),
    [
        (lambda p: roofline.attention(p, [16], 8, 2), {FORWARD: 4 * 16 * 8, BACKWARD: 8 * 16 * 8}),
        (
            lambda p: roofline.attention(p, [6, 2], 8, 2, rows=8),
            {FORWARD: 8 * (2 * 16 + 2 * 8), BACKWARD: 8 * (6 * 16 + 2 * 8)},
        ),
        (lambda p: roofline.add_layer_norm(p, 16, 8, 2), {FORWARD: 8 * (3 * 16 + 2), BACKWARD: 8 * (3 * 16 + 4)}),
        (
            lambda p: roofline.linear(p, 16, 8, 32, 2),
            {FORWARD: 16 * 8 + 16 * 32 + 9 * 32, BACKWARD: 2 * 16 * 8 + 16 * 32 + 2 * 9 * 32},
        ),
        (lambda p: roofline.feed_forward(p, 16, 8, 32, 2), {FORWARD: 2 * 16 * 8 + 552, BACKWARD: 3 * 16 * 8 + 2 * 552}),
    ],
)
def test_bytes_are_the_tensors_read_and_written(cost, tensors):
    for pass_, elements in tensors.items():
        assert cost(pass_).bytes == 2 * elements
    assert cost(BOTH) == cost(FORWARD) + cost(BACKWARD)


def test_padding_costs_nothing_of_the_floor():
    packed, padded = (roofline.model("inference", lengths, BASE, 2) for lengths in ([64, 64], [64, 64, 0]))
    assert packed == padded
    assert roofline.model("inference", [128, 128], BASE, 2).flops > 2 * packed.flops


def test_the_slower_of_memory_and_arithmetic_is_the_floor():
    ceilings = Ceilings(100.0, {"float32": 10.0, "float16": 1000.0})
    assert ceilings.floor_seconds(Cost(30, 200), "float32") == 3.0
    assert ceilings.floor_seconds(Cost(30, 200), "float16") == 2.0
    assert Cost(1, 2) * 3 + Cost(1, 1) == Cost(4, 7)


def test_ceilings_are_measured_by_dtype():
    found = roofline.measure_ceilings(
        torch.device("cpu"), ["float32", "bfloat16"], copy_bytes=2**20, shapes=[(64,) * 3]
    )
    assert set(found.flops_per_second) == {"float32", "bfloat16"}
    assert all(rate > 1e6 for rate in (found.bytes_per_second, *found.flops_per_second.values()))


def test_the_fastest_round_of_the_fastest_shape_is_the_ceiling(monkeypatch):
    """A copy reads and writes, a product multiplies and adds."""
    monkeypatch.setattr(roofline.prepacked, "linear", lambda *arguments: None)
    rounds = iter([(0.5, 0.25, 1.0), (0.5, 0.75, 0.5), (2.0, 4.0, 1.0)])
    monkeypatch.setattr(roofline.measure, "interleave", lambda calls, **_: {"": roofline.measure.Timing(next(rounds))})
    shapes = [(10, 20, 30), (10, 20, 70)]
    found = roofline.measure_ceilings(torch.device("cpu"), ["float32"], copy_bytes=4000, shapes=shapes)
    assert found == Ceilings(2 * 4000 / 0.25, {"float32": 2 * 10 * 20 * 70 / 1.0})


def test_the_product_of_a_reordered_weight_counts(monkeypatch):
    monkeypatch.setattr(roofline.prepacked, "linear", lambda *arguments: torch.empty(1))
    rounds = iter([(1.0,), (4.0,), (2.0,)])
    monkeypatch.setattr(roofline.measure, "interleave", lambda calls, **_: {"": roofline.measure.Timing(next(rounds))})
    found = roofline.measure_ceilings(torch.device("cpu"), ["float32"], copy_bytes=4000, shapes=[(10, 20, 30)])
    assert found.flops_per_second == {"float32": 2 * 10 * 20 * 30 / 2.0}
