"""Backward passes that are differentiable once, and tensors that a trace must not see twice."""

import pytest
import torch

from bertfast.ops._once import distinct, once


def square_backward(dout, x):
    return 2 * x * dout, None


def test_without_gradients_the_backward_pass_itself_is_called():
    with torch.no_grad():
        assert once("op", square_backward) is square_backward


def test_gradients_of_gradients_say_which_op_it_was():
    x, dout = torch.randn(3, requires_grad=True), torch.randn(3)
    dx, nothing = once("some_op", square_backward)(dout, x)
    assert torch.equal(dx, 2 * x * dout) and nothing is None and dx.requires_grad
    with pytest.raises(RuntimeError, match="some_op is differentiable once on fused backends; backend='torch' is any"):
        torch.autograd.grad(dx.sum(), x)


def test_what_leads_nowhere_needs_no_gradient():
    dx, _ = once("op", square_backward)(torch.randn(3), torch.randn(3))
    assert not dx.requires_grad


def test_in_eager_mode_tensors_stay_what_they_are():
    x, y = torch.ones(2), torch.ones(2)
    assert all(a is b for a, b in zip(distinct(x, None, x, y), (x, None, x, y), strict=True))


def test_in_a_trace_a_view_stands_for_what_came_before():
    graphs = []

    def backend(graph, inputs):
        graphs.append([node.target for node in graph.graph.nodes if node.op == "call_method"])
        return graph

    def function(x, y):
        a, b, c, d = distinct(x, y, x, None)
        assert d is None
        return a + b, c

    x, y = torch.ones(2), torch.full((2,), 3.0)
    total, again = torch.compile(function, backend=backend, fullgraph=True)(x, y)
    torch._dynamo.reset()
    assert torch.equal(total, x + y) and torch.equal(again, x)
    assert graphs == [["view_as"]]
