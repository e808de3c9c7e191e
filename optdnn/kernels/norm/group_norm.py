"""Tactic of GroupNorm and InstanceNorm on channels-last images of 16-bit floats: one launch, the input read once."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np

from optdnn.ir.graph import Op, Value
from optdnn.kernels.builder import Builder, channels_last, map_dtype
from optdnn.kernels.norm import group_norm_kernel as group_norm
from optdnn.kernels.tactic import MANY, Offer, OwnTactic
from optdnn.ops.base import attrs_dict
from optdnn.runtime.cuda.gpu_facts import GpuFacts, no_kernels
from optdnn.types import BF16, FP16


@lru_cache(maxsize=1024)
def _offers(problem: group_norm.Problem, gpu: GpuFacts) -> tuple[Offer, ...]:
    """The order of an image's sums follows from the configuration."""
    many = group_norm.candidates(replace(problem, batch=MANY), gpu, limit=1)
    found = dict.fromkeys((*group_norm.candidates(problem, gpu), *many))
    offers = [Offer(c, group_norm.estimate(problem, c, gpu), c in many) for c in found]
    return tuple(sorted(offers, key=lambda o: o.seconds or 0.0))


class HalfGroupNorm(OwnTactic):
    """Statistics in fp32 over a cluster (before Hopper, a block) that keeps a slab of channels in shared memory."""

    name = "group_norm_half"

    def refuse(self, b: Builder, op: Op) -> str | None:
        t = op.outputs[0].type
        shape = t.static_shape
        if (why := no_kernels(b.arch)) is not None:
            return why
        if t.dtype not in (FP16, BF16):
            return "it is for 16-bit floats"
        if len(shape) < 3 or 0 in shape:
            return "it has no positions"
        if any(b.graph.uses(Value(op.id, port)) for port in range(1, len(op.outputs))):
            return "it does not keep the statistics"
        if any(v is None or b.graph.constant_value(v) is None for v in op.inputs[1:3]):
            return "its scale and bias are not constant"
        if any(b.graph.type(v).static_shape != (shape[1],) for v in op.inputs[1:3] if v is not None):
            return "its scale and bias are not those of channels"
        places = [b.operand(op.inputs[0]), *([b.reserved[op.value]] if op.value in b.reserved else [])]
        if op.value not in b.reserved and not t.layout:
            return "its result is not channels-last"
        if any(not p.is_like(channels_last(p.shape, p.shape[1])) or p.offset % 8 for p in places) or shape[1] % 8:
            return "its images have gaps or another order"
        if _offers(self._problem(op), b.gpu):
            return None
        where = "a cluster" if b.arch.startswith("sm_90") else f"a block on {b.arch}"
        return f"an image does not fit the shared memory of {where}"

    @staticmethod
    def _problem(op: Op) -> group_norm.Problem:
        n, c, *spatial = op.outputs[0].type.static_shape
        groups = op.attrs.num_groups if op.kind == "GroupNormalization" else c
        dtype = map_dtype(op.outputs[0].type.dtype)
        return group_norm.Problem(n, math.prod(spatial), c, groups, (), dtype, op.attrs.epsilon)

    def configs(self, b: Builder, op: Op) -> Sequence[Offer]:
        return _offers(self._problem(op), b.gpu)

    def emit(self, b: Builder, op: Op, config: Any) -> None:
        problem = self._problem(op)
        operands = {"input": b.operand(op.inputs[0]), "output": b.target(op.value)}
        for name, value in zip(("scale", "bias"), op.inputs[1:3], strict=True):
            array = b.graph.constant_value(value)
            assert array is not None
            operands[name] = b.constant(array.astype(np.float32), f"{op.outputs[0].name}.{name}")
        reads = [operands[k] for k in ("input", "scale", "bias")]
        made = group_norm.launch(problem, config, b.gpu)
        b.emit(op, made, operands, op.kind, attrs_dict(op.attrs), reads, [operands["output"]])
