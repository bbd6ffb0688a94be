"""Embeddings and their LayerNorm: bertfast, and PyTorch's three lookups, two sums and LayerNorm.

python -m bertfast.benchmarks.bench_embed_layer_norm [options of `bertfast bench`]
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from bertfast import ops, reference
from bertfast.benchmarks import roofline, suite
from bertfast.benchmarks.cases import POSITIONS, TYPES, VOCAB, WIDTH, Draw, Inputs, Op
from bertfast.benchmarks.records import Cell

EPS = 1e-12


def positions_of(cell: Cell) -> int:
    return max(POSITIONS, cell.length)


def draw_tables(draw: Draw, cell: Cell) -> Inputs:
    return {
        "word": draw(VOCAB, WIDTH),
        "position": draw(positions_of(cell), WIDTH),
        "token_type": draw(TYPES, WIDTH),
        "weight": draw(WIDTH, scale=0.1, shift=1.0),
        "bias": draw(WIDTH, scale=0.1),
    }


def draw_ids(draw: Draw, cell: Cell) -> Inputs:
    shape = cell.batch, cell.length
    return {"input_ids": draw.ids(VOCAB, *shape), "token_type_ids": draw.ids(TYPES, *shape)}


def eager(inputs: Inputs) -> Tensor:
    total = F.embedding(inputs["input_ids"], inputs["word"])
    total = total + F.embedding(inputs["token_type_ids"], inputs["token_type"])
    total = total + inputs["position"][: total.shape[1]]
    return F.layer_norm(total, (WIDTH,), inputs["weight"], inputs["bias"], EPS)


def exact(inputs: Inputs) -> Tensor:
    ids, types = inputs["input_ids"], inputs["token_type_ids"]
    positions = ids.new_ones(ids.shape).cumsum(1) - 1
    tables = inputs["position"], inputs["token_type"], inputs["weight"], inputs["bias"]
    return reference.embed_layer_norm(inputs["word"][ids], types, positions, *tables, EPS)


def cost(pass_: str, cell: Cell, lengths: list[int], e: int) -> roofline.Cost:
    tables = VOCAB + TYPES + positions_of(cell)
    return roofline.embed_layer_norm(pass_, sum(lengths), cell.length, WIDTH, e, tables)


SUBJECT = Op(
    "embed_layer_norm",
    draw=draw_ids,
    eager=eager,
    ours=lambda inputs, backend: ops.embed_layer_norm(**inputs, position_ids=None, eps=EPS, backend=backend),
    exact=exact,
    cost=cost,
    facts=lambda cell: {"width": WIDTH},
    shared=draw_tables,
)

if __name__ == "__main__":
    suite.script(SUBJECT.name)
