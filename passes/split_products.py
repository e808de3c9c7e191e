"""A product whose halves are multiplied by one another becomes two products: gated linear units with one joint weight matrix.

``a, b = split(x @ W); y = a * gelu(b)`` has a launch for the product and one for the rest. With two products, the activation and
the multiplication become stages of their epilogues. The same holds for the channels of a convolution, or of a sum of two
(WaveNet: van den Oord et al., 2016): ``tanh(a) * sigmoid(b)``. If the halves are added to two tensors, the residual and the skip
of a layer (WaveGlow: Prenger et al., 2019), they become two convolutions with these additions. A depthwise convolution becomes two
depthwise convolutions, one per half of the image's channels (NAFNet, Restormer: Chen, Zamir et al., 2022).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from optdnn.ir.graph import Graph, Op, Value
from optdnn.ir.patch import Patch
from optdnn.passes.base import Match, Miss, PassContext, Rule, RulePass, rule
from optdnn.passes.support.facts import is_depthwise, operand, sliced
from optdnn.passes.support.parts import PARTS, is_axis, span, whole
from optdnn.passes.support.paths import value_before
from optdnn.passes.support.products import multiplied, plain_product
from optdnn.passes.support.stages import ACTIVATIONS
from optdnn.target_name import HOPPER, TargetName

PAIRED = ("fp32", "tf32", "fp16", "bf16")
"""Precisions with a kernel that computes both convolutions of a gate in one launch."""
VECTOR = 4
"""Channels that a thread of the depthwise kernel reads at once."""


@rule("split_product", {"Mul"})
def split_product(graph: Graph, op: Op) -> Match | Miss | None:
    """``f(first) * g(second)``, the parts of ``x @ W + b``, is ``f(x @ W0 + b0) * g(x @ W1 + b1)``."""
    a, b = (_before_activations(graph, operand(op, i)) for i in (0, 1))
    parts = None if a == b else _parts(graph, a, b)
    found = None if parts is None else plain_product(graph, parts.joined)
    if parts is None or found is None:
        return None
    first, second = parts.first, parts.second
    if parts.read_elsewhere(graph):
        return Miss(f"a part of {found.ops[-1].name} has another reader")
    cut = graph.type(first).dims[-1]
    assert isinstance(cut, int)

    def build(patch: Patch) -> None:
        for part, columns in ((first, slice(None, cut)), (second, slice(cut, None))):
            name = graph.output(part).name
            weight = np.ascontiguousarray(found.weight[:, columns])
            bias = None if found.bias is None else found.bias[columns]
            patch.replace(part, multiplied(patch, found.x, weight, bias, name=f"{name}.weight"))

    return Match((*parts.splitting(graph), *found.ops), build)


@dataclass(frozen=True)
class _Parts:
    """A tensor and its two parts, in order."""

    joined: Value
    first: Value
    second: Value

    def splitting(self, graph: Graph) -> tuple[Op, ...]:
        """The operators that split it: one, or one per part."""
        return tuple({v.op: graph.op(v) for v in (self.first, self.second)}.values())

    def read_elsewhere(self, graph: Graph) -> bool:
        """Whether the tensor has further readers, or a part more than one."""
        own = {op.id for op in self.splitting(graph)}
        readers = [u for v in (self.joined, self.first, self.second) for u in graph.users(v) if u.id not in own]
        return len(readers) > 2 or any(len(graph.uses(v)) > 1 for v in (self.first, self.second))


def _parts(graph: Graph, a: Value, b: Value, *, even: bool = False, axis: int = -1) -> _Parts | None:
    """The tensor that consists of ``a`` and ``b``, in either order; None if there is none."""
    for first, second in ((a, b), (b, a)):
        if (joined := whole(graph, first, second, even=even, axis=axis)) is not None:
            return _Parts(joined, first, second)
    return None


def _before_activations(graph: Graph, value: Value) -> Value:
    """The value before the activations that lead to ``value``. Each activation has one reader."""
    return value_before(graph, value, ACTIVATIONS, alone=True)


def _gate(graph: Graph, op: Op) -> _Parts | None:
    """The halves of the channels that ``op`` multiplies, after their activations."""
    a, b = (_before_activations(graph, operand(op, i)) for i in (0, 1))
    rank = graph.type(a).rank
    return None if a == b or rank not in (3, 4) else _parts(graph, a, b, even=True, axis=1 - rank)


@rule("split_depthwise", {"Mul"})
def split_depthwise(graph: Graph, op: Op) -> Match | Miss | None:
    """``f(first) * g(second)`` of the halves of a depthwise convolution becomes one convolution per half of the channels."""
    parts = _gate(graph, op)
    if parts is None or not is_depthwise(graph, conv := graph.op(parts.joined)):
        return None
    if parts.read_elsewhere(graph):
        return Miss(f"a part of {conv.name} has another reader")
    if conv.input(2) is not None and graph.constant_value(conv.input(2)) is None:
        return Miss(f"the bias of {conv.name} is not constant")
    half = conv.attrs.group // 2
    if half % VECTOR:
        return Miss(f"each half has {half} channels, not a multiple of {VECTOR}")

    def build(patch: Patch) -> None:
        for part, begin in ((parts.first, 0), (parts.second, half)):
            channels = slice(begin, begin + half)
            image = sliced(patch, operand(conv), channels.start, channels.stop, 1)
            patch.replace(part, _some(graph, patch, conv, channels, graph.output(part).name, image))

    return Match((*parts.splitting(graph), conv), build)


@rule("split_convolution", {"Mul"})
def split_convolution(graph: Graph, op: Op) -> Match | Miss | None:
    """``f(first) * g(second)`` of the halves of a convolution, or of a sum of two, becomes one convolution per half."""
    parts = _gate(graph, op)
    terms = None if parts is None else _terms(graph, parts.joined)
    if parts is None or terms is None or is_depthwise(graph, graph.op(parts.joined)):
        return None
    joined, first, second = parts.joined, parts.first, parts.second
    if parts.read_elsewhere(graph):
        return Miss(f"a part of {graph.op(joined).name} has another reader")
    for term in terms:
        if (why := _whole_convolution(graph, term.conv)) is not None:
            return Miss(why)
        if any(graph.sole_user(op.value) is None for op in term.alone):
            return Miss(f"a term of {graph.op(joined).name} has another reader")
    half = graph.type(first).dims[1]
    assert isinstance(half, int)

    def build(patch: Patch) -> None:
        for part, begin in ((first, 0), (second, half)):
            name = graph.output(part).name
            values = [_some(graph, patch, t.conv, slice(t.begin + begin, t.begin + begin + half), name) for t in terms]
            patch.replace(part, values[0] if len(values) == 1 else patch.add("Add", values))

    covered = {op.id: op for op in (graph.op(joined), *(op for t in terms for op in t.alone))}
    return Match((*parts.splitting(graph), *covered.values()), build)


@rule("split_sums", {"Conv"})
def split_sums(graph: Graph, op: Op) -> Match | Miss | None:
    """A convolution whose halves are each added to a tensor of the half's size becomes one convolution per half."""
    rank = graph.type(op.value).rank
    readers = graph.users(op.value)
    if rank not in (3, 4) or not readers or any(u.kind not in PARTS for u in readers):
        return None
    halves = [v for u in readers for v in u.values]
    if len(halves) != 2 or any(len(graph.uses(v)) != 1 for v in halves):
        return None
    parts = _parts(graph, *halves, even=True, axis=1 - rank)
    if parts is None or parts.joined != op.value:
        return None
    first, second = parts.first, parts.second
    sums = [graph.users(v)[0] for v in halves]
    if any(s.kind != "Add" or len({graph.type(operand(s, i)).shape for i in (0, 1)}) > 1 for s in sums):
        return None
    others = [v for s, part in zip(sums, halves, strict=True) for v in s.inputs if v is not None and v != part]
    if any(graph.constant_value(v) is not None for v in others):
        return None
    if any(u.kind in PARTS for s in sums for u in graph.users(s.value)):
        return None  # the sums are conditions of gates: split_convolution splits them
    if sums[0].id == sums[1].id:
        return Miss(f"the halves of {op.name} are added to one another")
    if (why := _whole_convolution(graph, op)) is not None:
        return Miss(why)
    half = graph.type(first).dims[1]
    assert isinstance(half, int)

    def build(patch: Patch) -> None:
        for part, channels in ((first, slice(None, half)), (second, slice(half, None))):
            patch.replace(part, _some(graph, patch, op, channels, graph.output(part).name))

    return Match((*{u.id: u for u in readers}.values(), op), build)


@dataclass(frozen=True)
class _Term:
    """The channels of a convolution from ``begin`` on. ``alone``: operators that must have no other reader."""

    conv: Op
    begin: int
    alone: tuple[Op, ...]


def _terms(graph: Graph, value: Value) -> list[_Term] | None:
    """The convolution that computes a value, or the two convolutions that it adds; None for other values."""
    op = graph.op(value)
    if op.kind == "Conv":
        return [_Term(op, 0, ())]
    found = [_term(graph, operand(op, i)) for i in (0, 1)] if op.kind == "Add" else []
    terms = [t for t in found if t is not None]
    return (
        terms
        if len(terms) == 2 and not any(graph.type(operand(op, i)).dims != graph.type(value).dims for i in (0, 1))
        else None
    )


def _term(graph: Graph, value: Value) -> _Term | None:
    """A convolution, or some of its channels. Other layers may read the rest: WaveGlow has one convolution for all conditions."""
    op = graph.op(value)
    if op.kind == "Conv":
        return _Term(op, 0, (op,))
    rank = graph.type(value).rank
    if op.kind not in PARTS or rank is None or graph.op(operand(op)).kind != "Conv":
        return None
    conv, size = graph.op(operand(op)), graph.type(operand(op)).dims[1]
    if not isinstance(size, int) or any(u.kind not in PARTS for u in graph.users(conv.value)):
        return None
    if op.kind == "Slice":
        found = span(graph, op, size, 1 - rank)
        return _Term(conv, found[0], (op,)) if found is not None and found[2] == 1 else None
    if not is_axis(graph, conv.value, op.attrs.axis, 1 - rank):
        return None
    before = [graph.type(Value(op.id, port)).dims[1] for port in range(value.port)]
    widths = [n for n in before if isinstance(n, int)]
    return _Term(conv, sum(widths), ()) if len(widths) == len(before) and len(graph.uses(value)) == 1 else None


def _whole_convolution(graph: Graph, op: Op) -> str | None:
    """Why a convolution's channels cannot be halved, or None."""
    if op.kind != "Conv":
        return f"{op.name} is no convolution"
    if op.attrs.group != 1:
        return f"the convolution {op.name} has {op.attrs.group} groups"
    if any(v is not None and graph.constant_value(v) is None for v in op.inputs[1:3]):
        return f"the weights of {op.name} are not constant"
    return None


def _some(graph: Graph, patch: Patch, op: Op, channels: slice, name: str, image: Value | None = None) -> Value:
    """The convolution with only ``channels``. ``image``: the input channels of a depthwise convolution."""
    rows = [None if v is None else graph.constant_value(v) for v in op.inputs[1:3]]
    parts = [
        None if r is None else patch.constant(np.ascontiguousarray(r[channels]), f"{name}.{op.name}.{k}")
        for k, r in enumerate(rows)
    ]
    attrs = op.attrs if image is None else replace(op.attrs, group=channels.stop - channels.start)
    return patch.add("Conv", [op.inputs[0] if image is None else image, *parts], attrs)


class SplitProducts(RulePass):
    name = "split_products"
    rules = (split_product, split_convolution, split_sums, split_depthwise)

    def rules_for(self, graph: Graph, context: PassContext) -> Sequence[Rule]:
        """Only GPUs have a kernel for both convolutions of a gate; for other than depthwise convolutions, only Hopper has.

        Elsewhere the two convolutions would read the image twice."""
        machine = TargetName.parse(context.target)
        if context.precision not in PAIRED or not machine.on_gpu:
            return tuple(r for r in self.rules if r not in (split_convolution, split_depthwise))
        hopper = (machine.arch or HOPPER) == HOPPER
        return self.rules if hopper else tuple(r for r in self.rules if r is not split_convolution)
