"""The packed weights of the Hopper convolution kernels, as operands of a launch and in its meaning."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np

from optdnn.ir.graph import Op
from optdnn.kernels.builder import Builder, TensorView, up
from optdnn.kernels.conv import parameters as conv_params
from optdnn.kernels.conv import parts_kernel
from optdnn.kernels.conv.maps import Feed
from optdnn.kernels.conv.problem import Problem
from optdnn.types import Array, to_tf32

Meaning = tuple[str, dict[str, Any], Sequence[TensorView | None]]
"""Meaning of a launch: the kind of the operator that it computes, its attributes, and the tensors that it reads."""


def _input_scales(b: Builder, feed: Feed) -> Array | None:
    """The scales of a source's input channels for fp32 in parts, powers of two: [bands, channels]; None: all are 1."""

    def make() -> Array:
        shifts = parts_kernel.input_shifts(feed.weight, feed.bands, feed.together)
        return np.ones(0, np.float32) if shifts is None else np.ldexp(np.float32(1), shifts)

    found = b.kept.once(("input scales", feed.bands, feed.together), [feed.weight], make)
    return found if found.size else None


def with_ranges(b: Builder, problem: Problem, feeds: Sequence[Feed]) -> Problem:
    """The problem with what the sizes of its weights require, if it multiplies fp32 in parts."""
    if not problem.parts:
        return problem
    scales = [_input_scales(b, f) for f in feeds]

    def selective() -> Array:
        scaled = [_scaled(f, c) for f, c in zip(feeds, scales, strict=True)]
        return np.array([parts_kernel.selective(np.concatenate([w.reshape(len(w), -1) for w in scaled], axis=1))])

    # A channel ignores the other groups of its band, and the next band's channels in the last K step of each tap.
    partial = problem.bands > 1 and problem.sources[0].channels % problem.block != 0
    ignores = partial or any(f.together > 1 for f in feeds)
    if not ignores:
        (ignores,) = map(bool, b.kept.once(("selective", problem.bands), [f.weight for f in feeds], selective))
    return replace(problem, equalized=any(c is not None for c in scales), selective=ignores)


def _scaled(feed: Feed, scales: Array | None) -> Array:
    """The weights of a source, divided by the scales of its input channels."""
    return feed.weight if scales is None else feed.weight / _for_weights(feed, scales)


def _for_weights(feed: Feed, scales: Array) -> Array:
    """The scales of a source's input channels, in a shape that broadcasts with its weights."""
    of_groups = scales.reshape(feed.bands * feed.together, -1, *(1,) * (feed.weight.ndim - 2))
    return of_groups if len(of_groups) == 1 else np.repeat(of_groups, len(feed.weight) // len(of_groups), axis=0)


def weight_operands(b: Builder, op: Op, problem: Problem, feeds: Sequence[Feed]) -> dict[str, TensorView]:
    """The packed weights of all sources, by their operand name in the launch. fp32 in parts: with the factors of its channels."""
    rounded = to_tf32 if problem.dtype == "tfloat32" else np.asarray
    key = ("conv_sm90", problem.block, problem.out_item, problem.dtype, problem.bands, *_together(problem))

    def pack() -> Array:
        return conv_params.pack_weights(problem, [rounded(f.weight) for f in feeds])

    @cache
    def parts() -> tuple[Array, Array]:
        whole = np.zeros((problem.channels, problem.k_steps * problem.block), np.float32)
        packed = conv_params.pack_weights(problem, [_scaled(f, _input_scales(b, f)) for f in feeds])
        whole[: len(packed)] = packed
        return parts_kernel.divided(whole, problem.block)

    def scales() -> Array:  # along K, in the order of the packed weights
        rows = [np.ones((problem.bands, *f.weight.shape[1:]), np.float32) for f in feeds]
        for feed, row in zip(feeds, rows, strict=True):
            if (found := _input_scales(b, feed)) is not None:
                row *= found.reshape(*found.shape, *(1,) * (row.ndim - 2))
        packed = conv_params.pack_weights(problem, rows).reshape(-1)
        return np.where(packed == 0, np.float32(1), packed)  # the padding of blocks

    def constant(name: str, make: Callable[[], Array], *more: object) -> TensorView:
        array = b.kept.once((*key, *more), [f.weight for f in feeds], make, final=True)
        return b.constant(array, f"{op.outputs[0].name}.{name}")

    if not problem.parts:
        return {"weights": constant("weights", pack)}
    halves = constant("weights", lambda: parts()[0], problem.channels, "halves")
    made = {"weights": halves, "factors": constant("factors", lambda: parts()[1], problem.channels, "factors")}
    return {**made, "input_scales": constant("input_scales", scales, "scales")} if problem.equalized else made


def packed_weights(b: Builder, op: Op, problem: Problem, feeds: Sequence[Feed]) -> TensorView:
    """The packed weights of all sources, if the launch has no other operands for them."""
    (weights,) = weight_operands(b, op, problem, feeds).values()
    return weights


def with_parts(meaning: Meaning, problem: Problem, operands: Mapping[str, TensorView]) -> Meaning:
    """The meaning of a launch whose weights are the sums of two parts, times a factor per channel, and a scale per input channel."""
    (kind, attrs, (*reads,)), weights, factors = meaning, operands["weights"], operands["factors"]
    channels = list[int]()
    at = tuple(k for k, x in enumerate(reads) if x is not None and x.buffer == weights.buffer)
    depth, more = weights.shape[1], list[TensorView]()
    for k in at:
        x = reads[k]
        assert x is not None
        rows = x.strides.index(1)  # the axes before the input channels
        channels.append(x.shape[rows])
        whole = replace(x, shape=(*x.shape[:rows], up(x.shape[rows], problem.block), *x.shape[rows + 1 :]))
        reads[k] = whole
        more.append(replace(whole, offset=x.offset + problem.channels * depth))
        more.append(factors.view(x.shape[:rows], tuple(n // depth for n in x.strides[:rows]), x.offset // depth))
        if problem.equalized:
            scales = operands["input_scales"].view(x.shape[rows:], x.strides[rows:], x.offset % depth)
            if problem.bands > 1:
                scales = scales.view((problem.bands, *scales.shape), (depth, *scales.strides))
            more.append(scales)
    own = {
        "of": kind,
        "own": tuple(sorted(attrs)),
        "at": at,
        "counts": tuple(channels),
        "order": parts_kernel.kernel_order(problem.block),
        "scaled": problem.equalized,
    }
    assert not own.keys() & attrs.keys(), "the launch's own attributes have these names"
    return "WeightsInParts", {**own, **attrs}, [*reads, *more]


def _together(problem: Problem) -> tuple[object, ...]:
    """Further keys of packed weights if several frames of a volume form one image."""
    return (problem.sources[0].depth,) if problem.together > 1 else ()
