"""Attention of quantized networks in one launch: weights are rounded to 8 bits after the softmax, and scores before it.

The two products compute on floats. Their roundings are operators of their own (``FakeQuantize``), or stages of the products. Where
ONNX Runtime quantized all operators, scores are rounded as well; elsewhere a mask may be added to them. The launch may also
quantize the result.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from optdnn.ir.graph import Graph, Op, Value
from optdnn.kernels.attention import hopper_kernel as attention
from optdnn.kernels.attention.hopper import HopperAttention, Tensors, head_view, mask_strides
from optdnn.kernels.attention.operands import fits_tma, for_tma, order_wanted, with_four_axes
from optdnn.kernels.attention.problem import Problem
from optdnn.kernels.builder import Builder, TensorView, map_dtype
from optdnn.kernels.pointwise.pointwise import copy
from optdnn.kernels.quantized.quantized_store import QuantizedStore, no_conversion
from optdnn.kernels.quantized.quantizer import Quantizer, meaning, quantizer_of
from optdnn.kernels.tactic import Region
from optdnn.ops.base import Stage
from optdnn.ops.unary import FakeQuantizeAttrs
from optdnn.types import BF16, FP16, normalize_axis


@dataclass(frozen=True)
class _Parts:
    """``scores``: the product of queries and keys. ``before``: it, the addition of the ``mask``, the softmax and the rounding of its
    result."""

    scores: Op
    before: tuple[Op, ...]
    scale: float
    grids: tuple[FakeQuantizeAttrs | None, FakeQuantizeAttrs]
    mask: Value | None


@dataclass(frozen=True)
class _Stored:
    """The quantization of the result, and the Transpose between, if there is one."""

    to: Quantizer
    turn: Op | None

    @property
    def ops(self) -> tuple[Op, ...]:
        return (self.to.op,) if self.turn is None else (self.turn, self.to.op)


class RoundedAttention(HopperAttention):
    """Two products of computed 16-bit tensors around a softmax, with both roundings, emitted at the second product."""

    name = "attention_rounded_sm90"

    def refuse(self, b: Builder, op: Op) -> str | None:
        if not b.arch.startswith("sm_90"):
            return f"it needs Hopper's wgmma and TMA (sm_90a), not {b.arch}"
        found = _parts(b.graph, op)
        if isinstance(found, str):
            return found
        shapes = [b.graph.type(v).static_shape for v in (*found.scores.inputs[:2], op.inputs[1]) if v is not None]
        if len({len(s) for s in shapes}) > 1 or len({s[:-2] for s in shapes}) > 1 or len(shapes[0]) not in (3, 4):
            return "its operands are not matrices of the same heads"
        problem = self.problem(b, op)
        reason = attention.refuse(problem, attention.Config(1, 16, 1))
        return reason or (None if self.offers(problem, b.gpu) else "no tile of the kernel fits it")

    def neighbors(self, graph: Graph, op: Op) -> Sequence[Op]:
        """The operators before the second product, and those after it."""
        found = _parts(graph, op)
        after: list[Op] = []
        while (user := graph.sole_user(after[-1].value if after else op.value)) is not None and len(after) < 2:
            after.append(user)
        return [*(() if isinstance(found, str) else found.before), *after]

    def region(self, b: Builder, op: Op) -> Region:
        """Both products, the softmax, the rounding of its result, and the quantization of the launch's result."""
        stored = self._stored(b, op)
        return Region(op, before=self._found(b, op).before, after=() if stored is None else stored.ops)

    def place(self, b: Builder, op: Op) -> None:
        """Place the result in the order that its reader wants."""
        b.target(*self._result(b, op))

    def problem(self, b: Builder, op: Op) -> Problem:
        return self._tensors(b, op).problem

    @staticmethod
    def _found(b: Builder, op: Op) -> _Parts:
        found = _parts(b.graph, op)
        assert isinstance(found, _Parts)
        return found

    @staticmethod
    def _stored(b: Builder, op: Op) -> _Stored | None:
        """The quantization of the result to integers; None if the launch cannot store it."""
        turn = b.graph.sole_user(op.value)
        if turn is None or op.outputs[0].type.static_shape[-1] % 16:
            return None
        if turn.kind != "Transpose" or (turn.attrs.perm or (0,))[-1] != len(op.outputs[0].type.dims) - 1:
            turn = None  # features stay the last axis
        value = op.value if turn is None else turn.value
        to = quantizer_of(b, value) if b.graph.sole_user(value) is not None else None
        return None if to is None or no_conversion(to.to.dtype, b.arch) is not None else _Stored(to, turn)

    def _result(self, b: Builder, op: Op) -> tuple[Value, Sequence[int] | None]:
        """The value that the launch stores, and the strides that its reader wants."""
        stored = self._stored(b, op)
        last = op if stored is None else stored.to.op
        four = len(op.outputs[0].type.dims) == 4 and (stored is None or stored.turn is None)
        return last.value, order_wanted(b, last) if four else None

    def _tensors(self, b: Builder, op: Op) -> Tensors:
        parts, stored = self._found(b, op), self._stored(b, op)
        last = with_four_axes(b.source(parts.scores.inputs[1]))
        q = for_tma(b, op, with_four_axes(b.source(parts.scores.inputs[0])), "queries")
        k = for_tma(b, op, last.permuted((0, 1, 3, 2)), "keys")
        v = for_tma(b, op, with_four_axes(b.source(op.inputs[1])), "values")
        target = b.result(*self._result(b, op))
        if stored is not None and stored.turn is not None:
            target = target.permuted(np.argsort(stored.turn.attrs.perm).tolist())
        target = with_four_axes(target)
        out = target if fits_tma(target) else b.later(f"{op.outputs[0].name}.heads", target.dtype, target.shape)
        batch, heads, rows, size = q.shape
        mask = None if parts.mask is None else self._mask(b, replace(op, inputs=(None, None, None, parts.mask)), q)
        strides, period = mask_strides(mask, batch)
        views = (head_view(q), head_view(k), head_view(v), head_view(out))
        problem = Problem(
            batch, heads, rows, k.shape[2], size, parts.scale, q=views[0], k=views[1], v=views[2], out=views[3],
            dtype=map_dtype(op.outputs[0].type.dtype), value_features=v.shape[3], grids=parts.grids, mask=strides,
            mask_period=period, narrow="" if stored is None else stored.to.to.dtype,
        )  # fmt: skip
        return Tensors(problem, q, k, v, 0, mask, out, target)

    def emit(self, b: Builder, op: Op, config: Any) -> None:
        t, parts, stored = self._tensors(b, op), self._found(b, op), self._stored(b, op)
        operands = {"q": b.made(t.q), "k": b.made(t.k), "v": b.made(t.v)}
        operands |= {} if t.mask is None else {"mask": b.made(t.mask)}
        reads: list[TensorView | None] = list(operands.values())
        out = operands["out"] = b.made(t.out)
        scores, weights = ((g.scale, g.low, g.high) if g is not None else () for g in parts.grids)
        kind, attrs = "RoundedAttention", {"scale": parts.scale, "scores": scores, "weights": weights}
        if stored is not None:
            kind, attrs = "Quantized", meaning(op, stored.to, False, attrs, kind)
        store = None if stored is None else QuantizedStore.of(stored.to.to)
        covers = replace(op, src=self.region(b, op).src)
        b.emit(covers, attention.launch(t.problem, config, b.gpu, store), operands, kind, attrs, reads, [out])
        if t.out is not t.target:
            copy(b, op, out, t.target)


def _parts(graph: Graph, op: Op) -> _Parts | str:
    """The operators before the product of rounded weights and values, or the reason why ``op`` is none."""
    rounding = _before(graph, op.inputs[0])
    if rounding is None or rounding.kind != "FakeQuantize":
        return "its rows are no rounded weights that only it reads"
    softmax = _before(graph, rounding.inputs[0])
    if softmax is None or softmax.kind != "Softmax":
        return "its weights are not the result of a softmax"
    added = _before(graph, softmax.inputs[0])
    added, mask = (None, None) if added is None or added.kind != "Add" else _mask_of(graph, added)
    scores = _before(graph, softmax.inputs[0] if added is None else next(v for v in added.inputs if v != mask))
    if scores is None or scores.kind != "MatMul":
        return "the softmax does not read a product alone"
    if op.attrs.prologue or op.attrs.epilogue or scores.attrs.prologue:
        return "its products have other stages"
    if normalize_axis(softmax.attrs.axis, len(softmax.outputs[0].type.dims)) != len(softmax.outputs[0].type.dims) - 1:
        return "the softmax is not along the keys"
    if any(graph.constant_value(v) is not None for v in (op.inputs[1], *scores.inputs[:2])):
        return "one of its operands is constant"
    read = (op.value, op.inputs[1], *scores.inputs[:2], *([] if mask is None else [mask]))
    types = {graph.type(v).dtype for v in read if v is not None}
    if len(types) > 1 or not types <= {FP16, BF16}:
        return "it is for 16-bit floats"
    stages = scores.attrs.epilogue
    rounds = stages[-1:] and stages[-1].kind == "FakeQuantize"
    scale = _scale(graph, scores, stages[:-1] if rounds else stages)
    if scale is None:
        return "other stages come before the softmax"
    before = (scores, *([] if added is None else [added]), softmax, rounding)
    return _Parts(scores, before, scale, (stages[-1].attrs if rounds else None, rounding.attrs), mask)


def _mask_of(graph: Graph, added: Op) -> tuple[Op, Value] | tuple[None, None]:
    """An addition to scores and the tensor that it adds, which has an element for each key; nothing for other additions."""
    shape = added.outputs[0].type.static_shape
    for value, other in (added.inputs, added.inputs[::-1]):
        product = value is not None and graph.op(value).kind == "MatMul" and graph.type(value).static_shape == shape
        if product and other is not None and graph.type(other).static_shape[-1:] == shape[-1:]:
            return added, other
    return None, None


def _scale(graph: Graph, scores: Op, stages: Sequence[Stage]) -> float | None:
    """The product of the factors of a product's stages; None if it has other stages."""
    scale = 1.0
    for stage in stages:
        factor = graph.constant_value(scores.inputs[stage.args[1]]) if stage.kind == "Mul" and stage.args[1] else None
        if factor is None or factor.size != 1:
            return None
        scale *= float(factor.reshape(-1)[0])
    return scale


def _before(graph: Graph, value: Value | None) -> Op | None:
    """The operator that computes a value that has one reader."""
    return None if value is None or graph.sole_user(value) is None else graph.op(value)
