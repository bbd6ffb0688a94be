"""The dropout stream: Philox itself, masks of seeds, keep rates."""

import math

import pytest
import torch

from bertfast import ops
from bertfast.dropout import STREAMS, apply_dropout, dropout_mask, keep_scale, new_seed, philox, seed_for


def _words(key, counter):
    seed = torch.tensor([key], dtype=torch.int64)
    return [int(word) for word in philox(seed, tuple(torch.tensor([c], dtype=torch.int64) for c in counter))]


@pytest.mark.parametrize(
    ("key", "counter", "words"),
    [
        (0, (0, 0, 0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        (-1, (0xFFFFFFFF,) * 4, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            0x299F31D0A4093822,
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_known_answers(key, counter, words):
    assert _words(key, counter) == list(words)


def _scalar_philox(key, counter):
    """The published algorithm on Python integers."""
    low = 0xFFFFFFFF
    k0, k1 = key & low, key >> 32 & low
    c = list(counter)
    for _ in range(10):
        p0, p1 = c[0] * 0xD2511F53, c[2] * 0xCD9E8D57
        c = [(p1 >> 32) ^ c[1] ^ k0, p1 & low, (p0 >> 32) ^ c[3] ^ k1, p0 & low]
        k0, k1 = (k0 + 0x9E3779B9) & low, (k1 + 0xBB67AE85) & low
    return c


@pytest.mark.parametrize("op", STREAMS)
@pytest.mark.parametrize("seed", [0, 1, -5, 2**62 + 12345, -(2**63)])
def test_masks_element_by_element(op, seed):
    shape, p = (2, 3, 4, 7), 0.37
    mask = dropout_mask(torch.tensor([seed]), shape, p, op)
    assert mask.dtype == torch.bool and mask.shape == shape
    for b in range(2):
        for h in range(3):
            for q in range(4):
                for k in range(7):
                    row = q if op == "attention" else (b * 3 + h) * 4 + q
                    group = b * 3 + h if op == "attention" else 0
                    word = _scalar_philox(seed, (k // 4, row, group, STREAMS[op]))[k % 4]
                    assert bool(mask[b, h, q, k]) == (word >= math.floor(p * 2**32))


def test_streams_are_distinct():
    seed = torch.tensor([7])
    masks = [dropout_mask(seed, (1, 1, 32, 32), 0.5, op) for op in STREAMS]
    assert len(set(STREAMS.values())) == len(STREAMS)
    assert all(not torch.equal(a, b) for i, a in enumerate(masks) for b in masks[:i])


@pytest.mark.parametrize("p", [0.05, 0.1, 0.3, 0.5, 0.9])
def test_keep_rate(p):
    shape = (64, 4096)
    kept = dropout_mask(torch.tensor([123]), shape, p).double()
    sigma = math.sqrt(p * (1 - p) / kept.numel())
    assert abs(kept.mean().item() - (1 - p)) < 4 * sigma
    neighbours = (kept[:, 1:] * kept[:, :-1]).mean().item() - (1 - p) ** 2
    assert abs(neighbours) < 6 * sigma


def test_the_ends_of_the_range():
    seed = torch.tensor([1])
    assert dropout_mask(seed, (8, 8), 0.0).all()
    assert not dropout_mask(seed, (8, 8), 1.0).any()
    assert keep_scale(1.0) == 0.0 and keep_scale(0.0) == 1.0 and keep_scale(0.75) == 4.0


@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (3, 1), (2, 129), (7,)])
def test_shapes(shape):
    assert dropout_mask(torch.tensor([1]), shape, 0.5).shape == shape


def test_a_mask_of_fewer_columns_is_a_corner_of_one_of_more():
    seed = torch.tensor([9])
    wide = dropout_mask(seed, (2, 3, 16, 33), 0.5, "attention")
    assert torch.equal(dropout_mask(seed, (2, 3, 9, 30), 0.5, "attention"), wide[:, :, :9, :30])


@pytest.mark.parametrize("p", [-0.001, 1.001, float("nan"), float("inf"), -1])
def test_probabilities_outside_0_1(p):
    with pytest.raises(ValueError, match="dropout_p must be between 0 and 1"):
        dropout_mask(torch.tensor([1]), (2, 2), p)


def test_wrong_arguments():
    with pytest.raises(ValueError, match=r"op must be one of \['add_layer_norm', .*\], got 'softmax'"):
        dropout_mask(torch.tensor([1]), (2, 2), 0.5, "softmax")
    with pytest.raises(ValueError, match=r"shape must be \(B, H, S_q, S_k\) for attention, got \(2, 2\)"):
        dropout_mask(torch.tensor([1]), (2, 2), 0.5, "attention")


def test_seeds_follow_the_generator():
    torch.manual_seed(5)
    first, second = new_seed(torch.device("cpu")), new_seed(torch.device("cpu"))
    torch.manual_seed(5)
    assert torch.equal(first, new_seed(torch.device("cpu"))) and not torch.equal(first, second)
    assert first.dtype == torch.int64 and first.shape == (1,)


def test_seeds_use_all_of_their_bits():
    torch.manual_seed(0)
    seeds = torch.cat([new_seed(torch.device("cpu")) for _ in range(64)])
    for bit in range(64):
        ones = ((seeds >> bit) & 1).sum().item()
        assert 8 < ones < 56


def test_apply_dropout():
    x = torch.arange(1.0, 33.0).view(2, 16).requires_grad_()
    seed = torch.tensor([3])
    assert apply_dropout(x, 0.0, "feed_forward", seed) is x
    dropped = apply_dropout(x, 0.25, "feed_forward", seed)
    keep = dropout_mask(seed, (2, 16), 0.25, "feed_forward")
    torch.testing.assert_close(dropped, torch.where(keep, x / 0.75, 0.0))
    dropped.sum().backward()
    torch.testing.assert_close(x.grad, keep / 0.75)


def test_it_is_public():
    assert ops.dropout_mask is dropout_mask


@pytest.mark.parametrize(
    "seed",
    [torch.tensor([3], dtype=torch.int32), torch.tensor([3.0]), torch.tensor([3, 4]), torch.ones(1, device="meta")],
)
def test_a_seed_of_another_form_is_no_seed(seed):
    assert seed_for(0.0, seed, torch.device("cpu")) is None
    with pytest.raises(ValueError, match="_seed must be an int64 tensor of one element on cpu, got"):
        seed_for(0.5, seed, torch.device("cpu"))
