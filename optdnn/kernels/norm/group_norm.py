"""Tactic of GroupNorm and InstanceNorm on channels-last images, with the activation behind them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np

from optdnn.ir.graph import Op, Value
from optdnn.kernels.builder import Builder, TensorView, channels_last, map_dtype, row_major
from optdnn.kernels.launch import Launch
from optdnn.kernels.norm import group_norm_kernel as clustered
from optdnn.kernels.norm import group_norm_tiles as tiled
from optdnn.kernels.norm.activation import NormOutput, output_of
from optdnn.kernels.tactic import MANY, DryRunConfigs, Offer, Region
from optdnn.runtime.cuda.gpu_facts import GpuFacts, no_kernels
from optdnn.types import BF16, FP16, FP32

Config = clustered.Config | tiled.Config
"""Of one of the two kernels: a cluster keeps an image in shared memory, or two launches read tiles of it."""


def _kernel(config: Config) -> Any:
    """The module of the kernel that a configuration is of."""
    return tiled if isinstance(config, tiled.Config) else clustered


def _ranked(problem: clustered.Problem, gpu: GpuFacts) -> list[tuple[float, Config]]:
    """Both kernels' configurations with their predicted seconds, the best first."""
    configs: list[Config] = [*clustered.candidates(problem, gpu), *tiled.candidates(problem, gpu)]
    return sorted(((_kernel(c).estimate(problem, c, gpu), c) for c in configs), key=lambda item: item[0])


@lru_cache(maxsize=1024)
def group_norm_offers(problem: clustered.Problem, gpu: GpuFacts) -> tuple[Offer, ...]:
    """Both kernels' configurations, the best predicted first. The order of an image's sums follows from the configuration."""
    many = _ranked(replace(problem, batch=MANY), gpu)[0][1]
    found = _ranked(problem, gpu)
    if all(c != many for _, c in found):
        found = sorted([*found, (_kernel(many).estimate(problem, many, gpu), many)], key=lambda item: item[0])
    return tuple(Offer(c, seconds, c == many) for seconds, c in found)


class GroupNorm(DryRunConfigs):
    """Statistics in fp32. A cluster (before Hopper, a block) keeps a slab of channels in shared memory; images of any size, and of
    fp32, are read twice."""

    name = "group_norm"

    def refuse(self, b: Builder, op: Op) -> str | None:
        t = op.outputs[0].type
        shape = t.static_shape
        if (why := no_kernels(b.arch) or no_plain_norm(b, op)) is not None:
            return why
        if len(shape) < 3 or 0 in shape:
            return "it has no positions"
        result = output_of(b, op).value
        places = [b.operand(op.inputs[0]), *([b.reserved[result]] if result in b.reserved else [])]  # type: ignore[arg-type]
        if result not in b.reserved and not t.layout:
            return "its result is not channels-last"
        if any(not p.is_like(channels_last(p.shape, p.shape[1])) or p.offset % 8 for p in places) or shape[1] % 8:
            return "its images have gaps or another order"
        return None

    def region(self, b: Builder, op: Op) -> Region:
        """The normalization, and the activation behind it."""
        return output_of(b, op).region

    def place(self, b: Builder, op: Op) -> None:
        """The result of the activation; without one, that of the normalization."""
        b.target(output_of(b, op).value)

    @staticmethod
    def _problem(op: Op, to: NormOutput) -> clustered.Problem:
        n, c, *spatial = op.outputs[0].type.static_shape
        dtype = map_dtype(op.outputs[0].type.dtype)
        stages = tuple(to.epilogue.rendered)
        return clustered.Problem(n, math.prod(spatial), c, groups_of(op), stages, dtype, op.attrs.epsilon)

    def emit(self, b: Builder, op: Op, config: Any = None) -> str:
        to = output_of(b, op)
        problem = self._problem(op, to)
        offers = group_norm_offers(problem, b.gpu)
        b.offer(offers)
        config = config or offers[0].config
        operands = norm_operands(b, op, to, problem.channels)
        if isinstance(config, tiled.Config):
            made = tiled.launches(problem, config, b.gpu)
            emit_two_reads(b, to, made, operands, (operands["input"], problem.groups, config.tiles), problem.pixels)
        else:
            emit_one_launch(b, to, clustered.launch(problem, config, b.gpu), operands)
        return str(config)


def no_plain_norm(b: Builder, op: Op) -> str | None:
    """Why the kernels of group norms have no form of the operator, wherever its operands lie; None where they have one."""
    t = op.outputs[0].type
    if t.dtype not in (FP16, BF16, FP32):
        return "it is for 16-bit floats and fp32"
    if any(b.graph.uses(Value(op.id, port)) for port in range(1, len(op.outputs))):
        return "it does not keep the statistics"
    if any(v is not None and b.graph.constant_value(v) is None for v in op.inputs[1:3]):
        return "its scale and bias are not constant"
    if op.kind != "LayerNormalization":
        channels = t.static_shape[1:2]
        if any(v is not None and b.graph.type(v).static_shape != channels for v in op.inputs[1:3]):
            return "its scale and bias are not those of channels"
    return None


def groups_of(op: Op) -> int:
    """The groups of a GroupNormalization or InstanceNormalization."""
    return int(op.attrs.num_groups) if op.kind == "GroupNormalization" else op.outputs[0].type.static_shape[1]


def norm_operands(b: Builder, op: Op, to: NormOutput, size: int) -> dict[str, TensorView]:
    """The launches' operands: input, output, and scale and bias as fp32 constants of ``size`` numbers."""
    operands = {"input": b.operand(op.inputs[0]), "output": b.target(to.value)}  # type: ignore[arg-type]
    for name, slot, default in (("scale", 1, 1.0), ("bias", 2, 0.0)):
        array = None if op.input(slot) is None else b.graph.constant_value(op.inputs[slot])
        row = np.full(size, default, np.float32) if array is None else array.astype(np.float32).reshape(size)
        operands[name] = b.constant(row, f"{op.outputs[0].name}.{name}")
    return operands


def emit_one_launch(
    b: Builder, to: NormOutput, made: Launch, operands: dict[str, TensorView], shape: Sequence[int] | None = None
) -> None:
    """The launch of a norm. ``shape``: that of scale and bias in its meaning (None: as they lie)."""
    kind, attrs = to.meaning()
    parameters = [
        p if shape is None else p.view(shape, row_major(shape)) for p in (operands["scale"], operands["bias"])
    ]
    reads = [operands["input"], *parameters, *to.operands(b)]
    b.emit(to.covers, made, operands, kind, attrs, reads, [operands["output"]])


def emit_two_reads(
    b: Builder, to: NormOutput, made: Sequence[Launch], operands: dict[str, TensorView], source: tuple[TensorView, int, int],
    items: int, whole: Sequence[TensorView] | None = None,
) -> None:  # fmt: skip
    """Both launches of a norm in tiles. ``source``: the view whose groups' moments are taken, their number, and that of tiles, which
    share out ``items``. ``whole``: input and output as the second launch's meaning sees them (None: as they are)."""
    x, groups, tiles = source
    name = to.norm.outputs[0].name
    moments = b.new(f"{name}.moments", FP32, (x.shape[0], groups, tiles, 2))
    first, second = made
    attrs: dict[str, Any] = {"groups": groups, "tiles": tiles}
    b.emit(to.norm, first, {"input": x, "moments": moments}, "GroupMoments", attrs, [x], [moments])
    given, out = whole or (operands["input"], operands["output"])
    shape = (given.shape[0], moments.size // (given.shape[0] * tiles * 2), tiles, 2)
    seen = moments.view(shape, row_major(shape))
    attrs = {"items": items, "epsilon": to.norm.attrs.epsilon, "epilogue": to.plain_stages(), "arity": 4}
    reads = [given, operands["scale"], operands["bias"], *to.operands(b, seen)]
    b.emit(to.covers, second, {**operands, "moments": moments}, "GroupApply", attrs, reads, [out])
