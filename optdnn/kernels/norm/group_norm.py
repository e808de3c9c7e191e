"""Tactic of GroupNorm and InstanceNorm on channels-last images, with the activation after them."""

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
from optdnn.kernels.norm import group_norm_grid as gridded
from optdnn.kernels.norm import group_norm_kernel as clustered
from optdnn.kernels.norm import group_norm_tiles as tiled
from optdnn.kernels.norm.activation import ActivatedNorm, NormOutput, output_of
from optdnn.kernels.tactic import MANY, Offer
from optdnn.ops.base import Stage
from optdnn.ops.fused import plain_stages
from optdnn.runtime.cuda.gpu_facts import GpuFacts, no_kernels
from optdnn.types import BF16, FP16, FP32, INT32, normalize_axis

Config = clustered.Config | gridded.Config | tiled.Config
"""A configuration of one of three kernels: a cluster keeps an image in shared memory, the whole grid keeps a part of the images, or
two launches read tiles."""


def _kernel(config: Config) -> Any:
    """The module with the kernel of a configuration."""
    return tiled if isinstance(config, tiled.Config) else gridded if isinstance(config, gridded.Config) else clustered


def _ranked(problem: clustered.Problem, gpu: GpuFacts) -> list[tuple[float, Config]]:
    """The kernels' configurations with their predicted seconds, the best first."""
    configs: list[Config] = [c for kernel in (clustered, gridded, tiled) for c in kernel.candidates(problem, gpu)]
    return sorted(((_kernel(c).estimate(problem, c, gpu), c) for c in configs), key=lambda item: item[0])


@lru_cache(maxsize=1024)
def group_norm_offers(problem: clustered.Problem, gpu: GpuFacts) -> tuple[Offer, ...]:
    """The kernels' configurations, best predicted first. A configuration sets the order of an image's sums. The best one for many images
    serves every batch size; it is not a cooperative grid, since its number of tiles depends on the batch size."""
    ranked = _ranked(replace(problem, batch=MANY), gpu)
    many = next(c for _, c in ranked if not isinstance(c, gridded.Config))
    found = _ranked(problem, gpu)
    if all(c != many for _, c in found):
        found = sorted([*found, (_kernel(many).estimate(problem, many, gpu), many)], key=lambda item: item[0])
    return tuple(Offer(c, seconds, c == many) for seconds, c in found)


class GroupNorm(ActivatedNorm):
    """GroupNorm and InstanceNorm with statistics in fp32. A cluster (before Hopper, a block) keeps a slab of channels in shared memory;
    larger images are read twice."""

    name = "group_norm"

    def refuse(self, b: Builder, op: Op) -> str | None:
        return refuse_images(b, op, op.inputs[0])

    def problem(self, b: Builder, op: Op) -> clustered.Problem:
        return image_problem(b, op, op.inputs[0])

    def offers(self, problem: clustered.Problem, gpu: GpuFacts) -> Sequence[Offer]:
        return group_norm_offers(problem, gpu)

    def emit(self, b: Builder, op: Op, config: Any) -> None:
        emit_images(b, output_of(b, op), self.problem(b, op), config, {"input": b.operand(op.inputs[0])})


def refuse_images(b: Builder, norm: Op, source: Value | None) -> str | None:
    """Why the kernels cannot compute ``norm`` of the images ``source``, or None."""
    t = norm.outputs[0].type
    shape = t.static_shape
    if (why := no_kernels(b.arch) or no_plain_norm(b, norm)) is not None:
        return why
    if len(shape) < 3:
        return "it has no positions"
    result = output_of(b, norm).value
    places = [b.operand(source), *b.fixed(result)]
    if result not in b.reserved and not t.layout:
        return "its result is not channels-last"
    if shape[1] % 8 or any(pitch_of_images(p) is None for p in places):
        return "its images do not consist of aligned vectors of channels"
    return None


def pitch_of_images(x: TensorView) -> int | None:
    """Elements from a pixel to the next of channels-last images (or of parts of wider ones) with pixels at multiples of 8 elements;
    None for any other tensor."""
    pixels = [(n, stride) for n, stride in zip(x.shape, x.strides, strict=True) if n > 1]
    pitch = min((stride for n, stride in pixels if stride > 1), default=x.shape[1])
    return pitch if x.is_like(channels_last(x.shape, pitch)) and x.offset % 8 == pitch % 8 == 0 else None


def image_problem(b: Builder, norm: Op, source: Value | None) -> clustered.Problem:
    """The kernels' problem, for images that they do not refuse."""
    to = output_of(b, norm)
    n, c, *spatial = norm.outputs[0].type.static_shape
    written = 0 if to.value not in b.reserved else pitch_of_images(b.reserved[to.value]) or 0
    read = pitch_of_images(b.operand(source)) or 0
    apart = (0 if read == c else read, 0 if written == c else written)
    return clustered.Problem(
        n, math.prod(spatial), c, groups_of(norm), tuple(to.epilogue.rendered), map_dtype(norm.outputs[0].type.dtype),
        norm.attrs.epsilon, *apart,
    )  # fmt: skip


def emit_images(
    b: Builder, to: NormOutput, problem: clustered.Problem, config: Any, sources: dict[str, TensorView]
) -> None:
    """Emits the launches of a problem in a configuration. ``sources``: the images ("input"), and their addend ("added"), if there is one."""
    operands = {**sources, **norm_operands(b, to.norm, to, problem.channels)}
    if isinstance(config, tiled.Config):
        made = tiled.launches(problem, config, b.gpu)
        emit_two_reads(b, to, made, operands, (operands["input"], problem.groups, config.tiles), problem.pixels)
    elif isinstance(config, gridded.Config):
        name = to.norm.outputs[0].name
        moments = b.new(f"{name}.moments", FP32, (problem.batch, problem.groups, config.tiles, 2))
        rounds = b.new(f"{name}.rounds", INT32, (2,))
        operands |= {"moments": moments, "rounds": rounds}
        emit_one_launch(b, to, gridded.launch(problem, config, b.gpu), operands, scratch=[moments], kept=[rounds])
    else:
        emit_one_launch(b, to, clustered.launch(problem, config, b.gpu), operands)


def no_plain_norm(b: Builder, op: Op) -> str | None:
    """Why the group norm kernels cannot compute the operator for any place of its operands, or None."""
    t = op.outputs[0].type
    if t.dtype not in (FP16, BF16, FP32):
        return "it is for 16-bit floats and fp32"
    if any(b.graph.uses(v) for v in op.values[1:]):
        return "it does not keep the statistics"
    if any(v is not None and b.graph.constant_value(v) is None for v in op.inputs[1:3]):
        return "its scale and bias are not constant"
    return None


def unlike_rows(b: Builder, op: Op) -> str | None:
    """Why the scale and bias of a LayerNormalization are not those of a whole row (all its axes), or None."""
    shape = op.outputs[0].type.static_shape
    own = shape[normalize_axis(op.attrs.axis, len(shape)) :]
    if any(v is not None and b.graph.type(v).static_shape != own for v in op.inputs[1:3]):
        return "its scale and bias do not have the shape of a row"
    return None


def groups_of(op: Op) -> int:
    """The groups of a GroupNormalization or InstanceNormalization."""
    return int(op.attrs.num_groups) if op.kind == "GroupNormalization" else op.outputs[0].type.static_shape[1]


def norm_operands(b: Builder, op: Op, to: NormOutput, size: int) -> dict[str, TensorView]:
    """The launches' operands besides the input: the output, and scale and bias as fp32 constants of ``size`` elements."""
    operands = {"output": b.target(to.value)}
    for name, slot, default in (("scale", 1, 1.0), ("bias", 2, 0.0)):
        array = None if op.input(slot) is None else b.graph.constant_value(op.inputs[slot])
        row = np.full(size, default, np.float32) if array is None else array.astype(np.float32).reshape(size)
        operands[name] = b.constant(row, f"{op.outputs[0].name}.{name}")
    return operands


def emit_one_launch(
    b: Builder, to: NormOutput, made: Launch, operands: dict[str, TensorView], shape: Sequence[int] | None = None,
    scratch: Sequence[TensorView] = (), kept: Sequence[TensorView] = (),
) -> None:  # fmt: skip
    """Emits the launch of a norm. ``shape``: shape of scale and bias in its meaning (None: their own). ``scratch``, ``kept``: the
    operands that only this launch uses, as for :meth:`Builder.emit`."""
    parameters = [
        p if shape is None else p.view(shape, row_major(shape)) for p in (operands["scale"], operands["bias"])
    ]
    reads = [operands["input"], *parameters, *to.operands(b)]
    prologue = _with_added(operands, reads, 3)
    kind, attrs = to.meaning(prologue)
    b.emit(to.covers, made, operands, kind, attrs, reads, [operands["output"]], scratch=scratch, kept=kept)


def _with_added(operands: dict[str, TensorView], reads: list[TensorView | None], arity: int) -> Sequence[Stage]:
    """The prologue of a meaning: the launch's addend is added to its input. The addend is appended to ``reads``, after the operator's own
    ``arity`` operands and any others."""
    if "added" not in operands:
        return ()
    reads.extend([None] * (arity - len(reads)))
    reads.append(operands["added"])
    return (Stage("Add", (-1, len(reads) - 1)),)


def emit_two_reads(
    b: Builder, to: NormOutput, made: Sequence[Launch], operands: dict[str, TensorView], source: tuple[TensorView, int, int],
    items: int, whole: Sequence[TensorView] | None = None,
) -> None:  # fmt: skip
    """Emits both launches of a norm in tiles. ``source``: the view of the input for the moments, the number of groups and the number of
    tiles. The tiles share out ``items``. ``whole``: views of input and output in the second launch's meaning (None: the operands)."""
    x, groups, tiles = source
    name = to.norm.outputs[0].name
    moments = b.new(f"{name}.moments", FP32, (x.shape[0], groups, tiles, 2))
    first, second = made
    attrs: dict[str, Any] = {"groups": groups, "tiles": tiles}
    seen: list[TensorView | None] = [x]
    if prologue := _with_added(operands, seen, 1):
        attrs |= {"prologue": plain_stages(prologue), "arity": 1}
    sources = {name: operands[name] for name in ("added",) if name in operands}
    b.emit(to.norm, first, {"input": x, **sources, "moments": moments}, "GroupMoments", attrs, seen, [moments])
    given, out = whole or (operands["input"], operands["output"])
    shape = (given.shape[0], moments.size // (given.shape[0] * tiles * 2), tiles, 2)
    attrs = {"items": items, "epsilon": to.norm.attrs.epsilon, "epilogue": to.plain_stages(), "arity": 4}
    reads = [given, operands["scale"], operands["bias"], *to.operands(b, moments.view(shape, row_major(shape)))]
    if prologue := _with_added(operands, reads, 4):
        attrs["prologue"] = plain_stages(prologue)
    b.emit(to.covers, second, {**operands, "moments": moments}, "GroupApply", attrs, reads, [out])
