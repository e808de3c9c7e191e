"""Convolutions of spectra of images have the real and the imaginary parts as blocks of channels.

A Fourier convolution (Chi et al., "Fast Fourier Convolution", 2020; LaMa: Suvorov et al., 2022) transforms an image, and convolves
its spectrum with the parts of each number as two neighboring channels. So neighbors in memory would come from two distant places.
These rules order the weights of the convolution by part, and all channels of a part move together.
"""

from __future__ import annotations

import numpy as np

from optdnn.ir.graph import Graph, Op, Value
from optdnn.ir.patch import Patch
from optdnn.ops.shape import TransposeAttrs
from optdnn.passes.base import Match, Miss, RulePass, rule
from optdnn.passes.rules.widths import has_stages_or_factors
from optdnn.passes.support.facts import RESHAPES, ints, operand, producer, reshape_target, reshaped, shape_of
from optdnn.passes.support.paths import path_to, repeated
from optdnn.types import normalize_axis

PARTS = 2
"""A complex number has a real and an imaginary part."""


@rule("joined_parts", {"Concat"})
def joined_parts(graph: Graph, op: Op) -> Match | None:
    """The parts of each number, taken by Gathers and joined again, are the numbers: PyTorch's ``stack((z.real, z.imag), -1)``."""
    shape = op.outputs[0].type.shape
    if shape is None or len(op.inputs) != PARTS or normalize_axis(op.attrs.axis, len(shape)) != len(shape) - 1:
        return None
    values = [_taken(graph, operand(op, part), part) for part in range(PARTS)]
    if values[0] is None or values[0] != values[1] or shape_of(graph, values[0]) != shape:
        return None
    return Match((op,), lambda patch: values[0])


def _taken(graph: Graph, x: Value, part: int) -> Value | None:
    """The value whose part ``x`` is, with a last axis of 1."""
    flat = producer(graph, x, RESHAPES)
    gather = producer(graph, operand(flat), {"Gather"}) if flat is not None else None
    if gather is None or flat is None or ints(graph, gather.input(1)) != (part,):
        return None
    dims, taken = graph.type(operand(gather)).dims, gather.outputs[0].type.dims
    last = normalize_axis(gather.attrs.axis, len(dims)) == len(dims) - 1 and dims[-1] == PARTS
    one = flat.outputs[0].type.dims
    return operand(gather) if last and one == (*dims[:-1], 1) and taken in (dims[:-1], one) else None


@rule("joined_halves", {"Concat"})
def joined_halves(graph: Graph, op: Op) -> Match | Miss | None:
    """Two halves of the channels become the parts of numbers: PyTorch's ``complex(*x.chunk(2, 1))``. A Transpose orders them."""
    dims = op.outputs[0].type.dims
    flats = [producer(graph, v, RESHAPES) for v in op.inputs]
    halves = [operand(f) for f in flats if f is not None]
    split = producer(graph, halves[0], {"Split"}) if len(halves) == PARTS == len(op.inputs) and len(dims) > 2 else None
    if split is None or halves != split.values:
        return None
    if any(graph.type(v).dims != dims[:-1] for v in halves):
        return None
    if (
        normalize_axis(op.attrs.axis, len(dims)) != len(dims) - 1
        or normalize_axis(split.attrs.axis, len(dims) - 1) != 1
    ):
        return None
    target = reshape_target(graph.type(operand(split)).dims, (dims[0], PARTS, *dims[1:-1]))
    if target is None:
        return Miss("more than one of its sizes is not known")
    back = TransposeAttrs((0, *range(2, len(dims)), 1))
    return Match((op,), lambda patch: patch.add("Transpose", [reshaped(patch, operand(split), target)], back))


@rule("convolved_parts", {"Conv"})
def convolved_parts(graph: Graph, op: Op) -> Match | Miss | None:
    """A convolution of a spectrum (B, C, positions, 2) with channels (C, 2): its weights are ordered as channels (2, C)."""
    merge = producer(graph, op.inputs[0], RESHAPES)
    turn = producer(graph, operand(merge), {"Transpose"}) if merge is not None else None
    if merge is None or turn is None or producer(graph, operand(turn), {"DFT"}) is None:
        return None
    dims = graph.type(operand(turn)).dims
    rank, image = len(dims), merge.outputs[0].type.dims
    if turn.attrs.perm != (0, 1, rank - 1, *range(2, rank - 1)) or not _is_image_of_parts(dims, image):
        return None
    weight, target = graph.constant_value(op.input(1)), reshape_target(dims, image)
    if weight is None or op.attrs.group > 1 or has_stages_or_factors(op):
        return Miss("its weights are computed, or it has groups or stages")
    if target is None:
        return Miss("more than one of its sizes is not known")
    by_part = np.ascontiguousarray(weight.reshape(len(weight), -1, PARTS, *weight.shape[2:]).swapaxes(1, 2))

    def build(patch: Patch) -> Value:
        parts = patch.add(
            "Transpose", [operand(turn)], TransposeAttrs((0, rank - 1, *range(1, rank - 1))), src=turn.src
        )
        constant = patch.constant(by_part.reshape(weight.shape), "by_part")
        x = reshaped(patch, parts, target, merge.src)
        return patch.add("Conv", [x, constant, *op.inputs[2:]], op.attrs, src=op.src)

    return Match((op,), build)


@rule("parts_of_convolution", {"Transpose"})
def parts_of_convolution(graph: Graph, op: Op) -> Match | Miss | None:
    """A convolution, and pointwise operators, whose channels (C, 2) become a spectrum (B, C, positions, 2) that a DFT reads: its
    filters are ordered as channels (2, C)."""
    reader, split = graph.sole_user(op.value), producer(graph, operand(op), RESHAPES, alone=True)
    if reader is None or reader.kind != "DFT" or split is None:
        return None
    dims, image = op.outputs[0].type.dims, graph.type(operand(split)).dims
    rank = len(dims)
    if op.attrs.perm != (0, 1, *range(3, rank), 2) or not _is_image_of_parts(dims, image):
        return None
    between = path_to(graph, operand(split), lambda o: o.pointwise and len(o.inputs) == 1)
    conv = graph.op(operand(between[-1] if between else split))
    if conv.kind != "Conv" or any(graph.sole_user(o.value) is None for o in (conv, *between)):
        return None
    known = [graph.constant_value(v) for v in conv.inputs[1:] if v is not None]
    filters = [v for v in known if v is not None]
    if len(filters) < len(known) or conv.attrs.group > 1 or has_stages_or_factors(conv):
        return Miss("the convolution before it has computed weights, groups or stages")
    target = reshape_target(image, (dims[0], PARTS, *dims[1:-1]))
    if target is None:
        return Miss("more than one of its sizes is not known")

    def build(patch: Patch) -> Value:
        inputs = [operand(conv)]
        for v in filters:
            by_part = np.ascontiguousarray(v.reshape(-1, PARTS, *v.shape[1:]).swapaxes(0, 1))
            inputs.append(patch.constant(by_part.reshape(v.shape), "by_part"))
        value = repeated(patch, patch.add("Conv", inputs, conv.attrs, src=conv.src), between)
        value = reshaped(patch, value, target, split.src)
        return patch.add("Transpose", [value], TransposeAttrs((0, *range(2, rank), 1)), src=op.src)

    return Match((op, split, *between, conv), build)


def _is_image_of_parts(dims: tuple[object, ...], image: tuple[object, ...]) -> bool:
    """Whether an image (B, C * 2, positions) holds a spectrum (B, C, positions, 2). One channel has no order."""
    channels = dims[1]
    joined = PARTS * channels if isinstance(channels, int) and channels > 1 else None
    return len(dims) > 3 and dims[-1] == PARTS and image == (dims[0], joined, *dims[2:-1])


class SpectralConvolutions(RulePass):
    """Runs while transforms are still operators, before `transform_products`."""

    name = "spectral_convolutions"
    rules = (joined_parts, joined_halves, convolved_parts, parts_of_convolution)
