"""Products of two stacks of computed matrices on Hopper's kernel: the implicit GEMM whose weights are another tensor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from optdnn.ir.epilogue import plan_epilogue
from optdnn.ir.graph import Op
from optdnn.kernels.builder import Builder, TensorView, map_dtype, up
from optdnn.kernels.conv import hopper_launch
from optdnn.kernels.conv import implicit_gemm as hopper
from optdnn.kernels.conv.fused import bias_row
from optdnn.kernels.conv.hopper import finish
from optdnn.kernels.conv.problem import Problem, Source
from optdnn.kernels.gemm.hopper import padded_rows
from optdnn.kernels.launch import tensor_map
from optdnn.kernels.pointwise.pointwise import broadcast, copied, merge
from optdnn.kernels.tactic import DryRunConfigs
from optdnn.ops.base import Stage
from optdnn.ops.fused import plain_stages
from optdnn.runtime.cuda.launches.plan import TensorMap
from optdnn.types import BF16, FP16

UNIT = 8
"""Elements in 16 bytes, which TMA addresses."""


@dataclass(frozen=True)
class Stack:
    """A stack of matrices, as TMA walks it: ``columns`` follow one another, then rows at a pitch, then two axes of the stack.

    ``shape`` and ``strides`` (of all but the columns) count elements: (columns, rows, inner, outer)."""

    placed: TensorView
    shape: tuple[int, int, int, int]
    strides: tuple[int, int, int]

    def map(self, name: str, box: tuple[int, int], span: int) -> TensorMap[str]:
        """The tensor map of the operand of this name."""
        item, dtype = self.placed.dtype.itemsize, map_dtype(self.placed.dtype)
        return tensor_map(name, dtype, self.shape, [s * item for s in self.strides], (*box, 1, 1), span)


def walkable(x: TensorView) -> bool:
    """Whether TMA can walk these matrices: columns without gaps, all else in steps of 16 bytes, none of them zero."""
    steps = [s for n, s in zip(x.shape[:-1], x.strides[:-1], strict=True) if n > 1]
    return (
        (x.shape[-1] == 1 or x.strides[-1] == 1)
        and x.offset % UNIT == 0
        and all(s > 0 and s % UNIT == 0 for s in steps)
    )


def swapped(x: TensorView) -> TensorView:
    """The matrices transposed."""
    return x.view((*x.shape[:-2], x.shape[-1], x.shape[-2]), (*x.strides[:-2], x.strides[-1], x.strides[-2]))


def stacked(x: TensorView, sizes: tuple[int, int], strides: Sequence[int]) -> Stack:
    """Matrices by the (inner, outer) axes of their stack."""
    rows, columns = x.shape[-2:]
    pitch = x.strides[-2] if rows > 1 else up(columns, UNIT)
    inner, outer = sizes
    step = strides[0] if inner > 1 else pitch * rows
    return Stack(x, (columns, rows, inner, outer), (pitch, step, strides[1] if outer > 1 else step * inner))


class HopperMatMul(DryRunConfigs):
    """MatMul of two computed stacks of 16-bit matrices: tiles of one product each, with the epilogue in the kernel."""

    name = "matmul_sm90"

    def read(self, name: str) -> Any:
        """The configuration of this name."""
        return hopper.Config.read(name)

    def refuse(self, b: Builder, op: Op) -> str | None:
        if op.kind != "MatMul" or None in op.inputs[:2]:
            return "it is no plain product"
        out = op.outputs[0].type
        types = [b.graph.type(v) for v in op.inputs[:2] if v is not None]
        if out.dtype not in (FP16, BF16) or any(t.dtype != out.dtype for t in types):
            return "its matrices are not all of fp16 or all of bf16"
        if any(len(t.static_shape) < 2 or 0 in t.static_shape for t in types):
            return "it is not a product of matrices"
        if any(t.static_shape[:-2] != out.static_shape[:-2] for t in types):
            return "one of its stacks is broadcast"
        if op.attrs.prologue:
            return "it has a prologue"
        return hopper_launch.refuse(b.arch, map_dtype(out.dtype), [((1, 1), (1, 1), (0, 0, 0, 0), (1, 1))])

    def emit(self, b: Builder, op: Op, config: Any = None) -> str:
        ep = plan_epilogue(b.graph, op, channel_axis=-1)
        left, right = (b.operand(v) for v in op.inputs[:2] if v is not None)
        target = b.target(op.value)
        name, shape = op.outputs[0].name, target.shape
        out = target
        if ep.rest or not walkable(target):
            out = b.new(f"{name}.product", target.dtype, shape, padded_rows(shape))
        left = left if walkable(left) else _copied(b, op, left, "left")
        across = walkable(right)
        if not across and not walkable(swapped(right)):
            right, across = _copied(b, op, right, "right"), True
        residual = b.operand(ep.residual) if ep.residual is not None else None
        if residual is not None and not walkable(residual):
            residual = _copied(b, op, residual, "residual")
        placed = [out, left, right, *([residual] if residual is not None else [])]
        dims, strides = merge(shape[:-2], [broadcast(_leading(p), shape[:-2]) for p in placed])
        if len(dims) > 2:  # in rows that follow one another, a stack has one axis
            placed[0] = out = b.new(f"{name}.product", target.dtype, shape, padded_rows(shape))
            for i, p in enumerate(placed[1:], 1):
                placed[i] = _copied(b, op, p, f"{i}")
            across = True
            dims, strides = merge(shape[:-2], [p.strides[:-2] for p in placed])
        sizes = (dims[-1], dims[0] if len(dims) == 2 else 1)
        axes = [(s[-1], s[0]) for s in strides]
        first, second = placed[1], placed[2]
        (m, k), n = first.shape[-2:], shape[-1]
        wide = up(n, UNIT)
        problem = Problem(
            m, wide, (Source(1, 1, up(k, UNIT)),), (("bias",), *ep.rendered), map_dtype(target.dtype), stack=sizes,
            across=across,
        )  # fmt: skip
        chosen = hopper_launch.choose(b, problem, False, config)
        assert isinstance(chosen, hopper.Config)
        weights = stacked(second if across else swapped(second), sizes, axes[2])
        pixels = stacked(first, sizes, axes[1]).map("pixels0", (problem.block, chosen.bn), problem.span)
        result = stacked(out, sizes, axes[0]).map("output", (64, chosen.bn), problem.out_span)
        added = result
        if residual is not None:
            residual = placed[-1]
            added = stacked(residual, sizes, axes[-1]).map("residual", (64, chosen.bn), problem.out_span)
        maps = [
            weights.map("weights", (64, 64 if across else chosen.tile[0]), problem.span), pixels, pixels, result, added,
        ]  # fmt: skip
        bias = bias_row(b, op, ep.bias, wide)
        constants = [b.constant(c, "scalar") for c in ep.constants]
        stages = [Stage("Add", (-1, 2))]
        for s in ep.stages:  # registers count from the product; operands keep their places behind the bias
            stages.append(Stage(s.kind, tuple(a if a is None or a >= 0 else a - 1 for a in s.args), s.attrs))
        reads = [first, second, bias.view((n,), (1,)), residual, *constants]
        attrs = {"prologue": (), "epilogue": plain_stages(stages), "arity": 2}
        operands = {"pixels0": first, "weights": second, "channel": bias, "output": out}
        if residual is not None:
            operands["residual"] = residual
        made = hopper_launch.launch_on(problem, chosen, b.gpu, maps, operands)
        hopper_launch.emit(b, op, made, problem, chosen, operands, ("MatMul", attrs, reads))
        finish(b, op, ep, out, target)
        return str(chosen)


def _leading(x: TensorView) -> TensorView:
    """The stack, as a tensor of first elements."""
    return x.view(x.shape[:-2], x.strides[:-2])


def _copied(b: Builder, op: Op, x: TensorView, name: str) -> TensorView:
    """A copy in rows that start at multiples of 16 bytes."""
    return copied(b, op, x, name, padded_rows(x.shape))
