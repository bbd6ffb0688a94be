"""Packing and unpacking: every form of a mask, gradients, transfers, errors."""

import dataclasses

import pytest
import torch

from bertfast.packing import Packing, mask_sizes, repad, unpad
from helpers.poison import LAYOUTS, poisoned_memory  # noqa: F401

pytestmark = pytest.mark.usefixtures("poisoned_memory")

MASKS = {
    "right": [[1, 1, 1, 0], [1, 0, 0, 0], [1, 1, 1, 1]],
    "left": [[0, 1, 1, 1], [0, 0, 0, 1], [1, 1, 1, 1]],
    "holes": [[1, 0, 1, 1], [0, 1, 0, 1], [1, 0, 0, 1]],
    "empty row": [[1, 1, 0, 0], [0, 0, 0, 0], [0, 1, 1, 1]],
    "first and last empty": [[0, 0, 0, 0], [1, 1, 1, 1], [0, 0, 0, 0]],
    "all": [[1, 1, 1, 1]] * 3,
    "none": [[0, 0, 0, 0]] * 3,
    "one": [[0, 0, 1, 0]],
}
DTYPES = [torch.bool, torch.int64, torch.int32, torch.uint8, torch.float32, torch.bfloat16]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", MASKS)
def test_round_trip(name, dtype):
    mask = torch.tensor(MASKS[name]).to(dtype)
    x = torch.randn(*mask.shape, 5)
    packed, packing = unpad(x, mask)
    real = mask != 0
    assert torch.equal(packed, x[real])
    assert torch.equal(repad(packed, packing), x * real.unsqueeze(-1))
    lengths = real.sum(1)
    assert packing.cu_seqlens.dtype == torch.int32 and packing.indices.dtype == torch.int64
    assert packing.cu_seqlens.tolist() == [0, *lengths.cumsum(0).tolist()]
    assert packing.indices.tolist() == real.flatten().nonzero().flatten().tolist()
    sizes = (packing.max_seqlen, packing.batch, packing.seqlen)
    assert sizes == (int(lengths.max()), *mask.shape) and all(type(size) is int for size in sizes)


@pytest.mark.parametrize("value", [2, -1, 255])
def test_any_nonzero_counts(value):
    mask = torch.tensor([[value, 0, value]])
    assert unpad(torch.arange(3.0).view(1, 3, 1), mask)[0].flatten().tolist() == [0.0, 2.0]


@pytest.mark.parametrize("trailing", [(), (1,), (2, 3), (0,)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_trailing_dimensions_and_dtypes(trailing, dtype):
    mask = torch.tensor(MASKS["holes"])
    x = torch.randint(0, 2, (*mask.shape, *trailing)).to(dtype)
    packed, packing = unpad(x, mask)
    assert torch.equal(packed, x[mask != 0]) and packed.dtype == dtype
    back = packing.repad(packed)
    assert torch.equal(back[mask != 0], packed) and not back[mask == 0].any()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(layout):
    mask = torch.tensor(MASKS["left"])
    x = LAYOUTS[layout](torch.randn(3, 4, 5))
    packed, packing = unpad(x, mask)
    assert torch.equal(packed, x[mask != 0])
    assert torch.equal(packing.repad(LAYOUTS[layout](packed)), x * mask.unsqueeze(-1))


@pytest.mark.parametrize("shape", [(0, 4), (3, 0), (0, 0)])
def test_empty_batches(shape):
    packed, packing = unpad(torch.randn(*shape, 5), torch.ones(shape))
    assert packed.shape == (0, 5) and packing.max_seqlen == 0
    assert packing.cu_seqlens.tolist() == [0] * (shape[0] + 1)
    assert packing.repad(packed).shape == (*shape, 5)


@pytest.mark.parametrize("lengths", [[3, 1, 4], [0, 4], [0, 0], [4], []], ids=str)
def test_from_lengths(lengths):
    packing = Packing.from_lengths(lengths, 4)
    mask = torch.arange(4) < torch.tensor(lengths, dtype=torch.int64)[:, None]
    expected = Packing.from_mask(mask)
    for field in dataclasses.fields(Packing):
        ours, theirs = getattr(packing, field.name), getattr(expected, field.name)
        assert torch.equal(ours, theirs) and ours.dtype == theirs.dtype if torch.is_tensor(ours) else ours == theirs


def test_gradients_go_where_the_values_came_from():
    mask = torch.tensor(MASKS["empty row"])
    x = torch.randn(3, 4, 5, requires_grad=True)
    packed, packing = unpad(x, mask)
    upstream = torch.randn(packed.shape)
    packed.backward(upstream)
    assert torch.equal(x.grad[mask != 0], upstream) and not x.grad[mask == 0].any()
    short = packed.detach().requires_grad_()
    wide = torch.randn(3, 4, 5)
    packing.repad(short).backward(wide)
    assert torch.equal(short.grad, wide[mask != 0])


@pytest.mark.parametrize("name", MASKS)
def test_twice_differentiable(name):
    mask = torch.tensor(MASKS[name])
    packing = Packing.from_mask(mask)
    x = torch.randn(*mask.shape, 2, dtype=torch.float64, requires_grad=True)
    short = torch.randn(packing.indices.numel(), 2, dtype=torch.float64, requires_grad=True)
    for function, argument in ((packing.unpad, x), (packing.repad, short)):
        assert torch.autograd.gradcheck(function, argument)
        assert torch.autograd.gradgradcheck(lambda t, function=function: function(t).square(), argument)


def test_expanded_gradients():
    x = torch.randn(3, 4, 5, requires_grad=True)
    mask = torch.tensor(MASKS["holes"])
    unpad(x, mask)[0].sum().backward()
    assert torch.equal(x.grad, mask.unsqueeze(-1).expand(3, 4, 5).float())


def test_inputs_are_not_written_and_outputs_are_new():
    x, mask = torch.randn(3, 4, 5), torch.tensor(MASKS["all"])
    before = x.clone()
    packed, packing = unpad(x, mask)
    packed.zero_()
    packing.repad(packed).fill_(1.0)
    assert torch.equal(x, before) and not packed.any() and torch.equal(mask, torch.tensor(MASKS["all"]))


def test_one_transfer(monkeypatch):
    reads = []
    for name in ("item", "tolist", "__bool__", "__int__", "__index__", "__float__"):
        original = getattr(torch.Tensor, name)

        def spy(self, *args, _name=name, _original=original, **kwargs):
            reads.append(_name)
            return _original(self, *args, **kwargs)

        monkeypatch.setattr(torch.Tensor, name, spy)
    mask, x = torch.tensor(MASKS["holes"]), torch.randn(3, 4, 5)
    packed, packing = unpad(x, mask)
    assert reads == ["tolist"]
    repad(packed, packing)
    assert mask_sizes(mask != 0, torch.tensor(True), torch.tensor(0)) == [7, 3, 1, 0]
    assert reads == ["tolist"] * 2
    del reads[:]
    Packing.from_lengths([3, 1, 2], 4)
    assert reads == []


@pytest.mark.parametrize("shape", [(4,), (3, 1, 4), (3, 1, 1, 4), ()])
def test_masks_of_another_rank(shape):
    with pytest.raises(ValueError, match=rf"mask must have shape \(B, S\), got \({', '.join(map(str, shape))}"):
        unpad(torch.randn(3, 4, 5), torch.ones(shape))


def test_wrong_shapes():
    mask = torch.tensor(MASKS["right"])
    with pytest.raises(ValueError, match=r"x must have shape \(3, 4, ...\), got \(4, 3, 5\)"):
        unpad(torch.randn(4, 3, 5), mask)
    packed, packing = unpad(torch.randn(3, 4, 5), mask)
    with pytest.raises(ValueError, match=r"packed must have shape \(8, ...\), got \(7, 5\)"):
        repad(packed[:7], packing)
    for lengths in ([5], [-1, 2]):
        with pytest.raises(ValueError, match=f"lengths must be between 0 and seqlen=4, got {lengths[0]}"):
            Packing.from_lengths(lengths, 4)


@pytest.mark.slow
def test_many_random_masks():
    generator = torch.Generator().manual_seed(0)
    for _ in range(500):
        batch, seqlen = torch.randint(0, 12, (2,), generator=generator).tolist()
        mask = torch.rand(batch, seqlen, generator=generator) < torch.rand((), generator=generator)
        x = torch.randn(batch, seqlen, 3, generator=generator)
        packed, packing = unpad(x, mask)
        assert torch.equal(packed, x[mask]) and torch.equal(packing.repad(packed), x * mask.unsqueeze(-1))
