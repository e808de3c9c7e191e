"""A decoder with a cache, as exporters write it: its mask is as long as the past and the new positions."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnx.parser

HEADS, SIZE, TOKENS = 2, 4, 11
TOTAL = "past_length + length"
RANGES = {"ids": "1x1..2..6", "past": "1x2x0..3..8x4"}
"""Sizes of the symbols. The mask has none of its own."""


def decoder(total: str = TOTAL, first: bool = True) -> onnx.ModelProto:
    """A layer of a decoder with a cache: ids [batch, length], mask [batch, total], past [batch, heads, past_length, size].

    ``first``: the mask is the first input, before those with the symbols of its length.
    """
    model = onnx.parser.parse_model(
        """<ir_version: 8, opset_import: ["": 17]>
        g (int64[batch, total] mask, int64[batch, length] ids, float[batch, 2, past_length, 4] past)
          => (float[batch, length, 8] y, float[batch, 2, total, 4] present)
        <int64[4] split = {0, 0, 2, 4}, int64[3] merge = {0, 0, 8}, int64[2] middle = {1, 2}, float scale = {0.5},
         float one = {1.0}, float far = {-10000.0}> {
          e = Gather(table, ids)
          q_ = Reshape(e, split)  q = Transpose<perm = [0, 2, 1, 3]>(q_)
          k_ = MatMul(e, w)  k4 = Reshape(k_, split)  k = Transpose<perm = [0, 2, 1, 3]>(k4)
          present = Concat<axis = 2>(past, k)
          kt = Transpose<perm = [0, 1, 3, 2]>(present)
          s_ = MatMul(q, kt)  s = Mul(s_, scale)
          m_ = Unsqueeze(mask, middle)  mf = Cast<to = 1>(m_)  off = Sub(one, mf)  bias = Mul(off, far)
          sm = Add(s, bias)  p = Softmax<axis = -1>(sm)
          c = MatMul(p, present)  ct = Transpose<perm = [0, 2, 1, 3]>(c)  y = Reshape(ct, merge)
        }"""
    )
    rng = np.random.default_rng(0)
    for name, shape in (("table", (TOKENS, HEADS * SIZE)), ("w", (HEADS * SIZE, HEADS * SIZE))):
        array = rng.standard_normal(shape).astype(np.float32)
        model.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    for value in (*model.graph.input, *model.graph.output):
        for d in value.type.tensor_type.shape.dim:
            if d.dim_param == "total":
                d.dim_param = total
    if not first:
        inputs = list(model.graph.input)
        del model.graph.input[:]
        model.graph.input.extend([*inputs[1:], inputs[0]])
    return model


def feeds(past: int, length: int, total: int | None = None) -> dict[str, Any]:
    rng = np.random.default_rng([past, length])
    mask = np.ones((1, past + length if total is None else total), np.int64)
    mask[:, : past // 2] = 0
    return {
        "mask": mask,
        "ids": rng.integers(0, TOKENS, (1, length)),
        "past": rng.standard_normal((1, HEADS, past, SIZE)).astype(np.float32),
    }
