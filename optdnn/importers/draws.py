"""Random operators as draws that are the same in every run: converts an ONNX model to one without random operators.

Each random node becomes a call of a local function of ordinary operators, with its own opset. The numbers drawn depend on the
build's seed, the node's ``seed`` attribute, the name of its output (inside of functions also on the outputs of the calls), and
the position of the element. So neither passes nor other nodes change them, and no two nodes draw the same numbers.

Nodes in the bodies of loops stay, and the import refuses them, because each iteration would draw the same numbers.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import onnx
from onnx import helper

from optdnn.errors import ModelError
from optdnn.importers.draw_nodes import DRAWS, Nodes
from optdnn.importers.functions import check_calls, default_attributes, too_deep
from optdnn.importers.model import FunctionKey, Model, Source, domain_of, open_model
from optdnn.importers.nodes import Schema, attributes, check_node, describe, schema
from optdnn.importers.tensors import sparse_to_array, to_array
from optdnn.limits import FUNCTION_NESTING
from optdnn.ops.base import Unsupported

DOMAIN = "optdnn.draws"
OPSET = 19
REFUSED = "it draws random numbers; a build with --random-seed N (random_seed=N) takes it, except in loops"
"""The reason for random operators that are left when a model is imported."""

Bound = Mapping[str, tuple[int, Any]]
"""The attributes of a function's call: name -> (AttributeProto type, value)."""


def with_draws(source: Source | Model, seed: int) -> Model:
    """The model with draws from ``seed`` in place of random operators; the same object if it has none.

    Raises ModelError for a random node that breaks its operator's schema.
    """
    model = source if isinstance(source, Model) else open_model(source)
    if not draws(model):
        return model
    check_calls(model)
    proto = onnx.ModelProto()
    proto.CopyFrom(model.proto)
    drawing = _Drawing(model, seed)
    drawing.replace(proto.graph.node, "", {}, ())
    proto.functions.extend(drawing.functions.values())
    opsets = dict(model.opsets)
    if DOMAIN not in opsets:
        proto.opset_import.append(helper.make_opsetid(DOMAIN, 1))
        opsets[DOMAIN] = 1
    return replace(model, proto=proto, opsets=opsets, functions={**model.functions, **drawing.functions})


def draws(model: Model) -> bool:
    """Whether a model has random operators that a build may replace."""
    return _Drawing(model, 0).found(model.proto.graph.node)


def is_random(node: onnx.NodeProto) -> bool:
    """Whether a node draws random numbers; a Dropout does only if it has the operand training_mode."""
    if domain_of(node.domain) != "" or node.op_type not in DRAWS:
        return False
    return node.op_type != "Dropout" or (len(node.input) > 2 and node.input[2] != "")


@dataclass
class _Drawing:
    """Replaces the random nodes of one model."""

    model: Model
    seed: int
    functions: dict[FunctionKey, onnx.FunctionProto] = field(default_factory=dict)
    """The functions that draw, and, for each call, copies of the model's functions that contain random nodes."""

    def found(self, nodes: Iterable[onnx.NodeProto]) -> bool:
        """Whether one of these nodes draws, also in a branch or in a function."""
        return any(is_random(node) or _key(node) in self._holding for node in _with_branches(nodes))

    @cached_property
    def _holding(self) -> set[FunctionKey]:
        """The model's functions that contain random nodes, directly or in functions that they call."""
        callers: dict[FunctionKey, list[FunctionKey]] = {}
        left = []
        for key, function in self.model.functions.items():
            for node in _with_branches(function.node):
                callers.setdefault(_key(node), []).append(key)
                if is_random(node):
                    left.append(key)
        holding: set[FunctionKey] = set()
        while left:
            key = left.pop()
            if key not in holding:
                holding.add(key)
                left += callers.get(key, ())
        return holding

    def replace(
        self, nodes: Sequence[onnx.NodeProto], path: str, bound: Bound, within: tuple[FunctionKey, ...]
    ) -> None:
        """Replace the random nodes among ``nodes`` in place. ``path`` distinguishes the names of their outputs, ``within``
        are the functions around them."""
        for i, node in enumerate(nodes):
            place = path + next((name for name in node.output if name), "")
            name = node.name or f"{node.op_type}_{i}"
            key = _key(node)
            if key in self._holding and (key in within or len(within) >= FUNCTION_NESTING.value):
                raise ModelError(f"{self.model.name}: {too_deep()}", hint=FUNCTION_NESTING.hint)
            with suppress(Unsupported):  # an attribute is unsupported: the import refuses the node
                if key in self._holding:
                    self._call(node, key, place, bound, within)
                    node.name = name
                elif is_random(node) and self._draw(node, name, place, bound, within):
                    node.name = name
            for branch in _branches(node):
                self.replace(branch.node, path, bound, within)

    def _call(
        self, node: onnx.NodeProto, key: FunctionKey, place: str, bound: Bound, within: tuple[FunctionKey, ...]
    ) -> None:
        """Make a node call a copy of its function that draws for this call only."""
        copy = onnx.FunctionProto()
        copy.CopyFrom(self.model.functions[key])
        defaults = attributes(default_attributes(copy), {}, *self._readers())
        self.replace(copy.node, f"{place}/", {**defaults, **self._attributes(node, bound)}, (*within, key))
        copy.opset_import.append(helper.make_opsetid(DOMAIN, 1))
        self._add(copy, f"{node.op_type}.{self._digest(place).hex()[:16]}", node)

    def _draw(self, node: onnx.NodeProto, name: str, place: str, bound: Bound, within: tuple[FunctionKey, ...]) -> bool:
        """Make a random node call a function that draws; False for an operator that its opset does not have."""
        version = self._opset(within)
        rules = schema(node.op_type, "", version)
        if not isinstance(rules, Schema):
            return False  # the import reports it
        given = self._attributes(node, bound)
        try:
            check_node(node, given, rules)
            attrs = {k: value for k, (_, value) in given.items()}
            digest = self._digest(place, attrs.get("seed"))
            made = Nodes([int.from_bytes(digest[k : k + 4], "little") for k in range(0, 12, 4)])
            operands = [f"x{k}" for k in range(len(node.input))]
            results = DRAWS[node.op_type](
                made, [o if name else "" for o, name in zip(operands, node.input, strict=True)], attrs
            )
        except ModelError as error:
            raise ModelError(f"{self.model.name}: {describe(node, name)}: {error.message}") from error
        opsets = [helper.make_opsetid("", OPSET)]
        function = helper.make_function(DOMAIN, node.op_type, operands, results[: len(node.output)], made.made, opsets)
        self._add(function, f"{node.op_type}.{digest.hex()[:16]}", node)
        del node.attribute[:]
        return True

    def _add(self, function: onnx.FunctionProto, name: str, node: onnx.NodeProto) -> None:
        """Add a function under its own name, and make ``node`` call it."""
        function.domain, function.name, function.overload = DOMAIN, name, ""
        node.domain, node.op_type, node.overload = DOMAIN, name, ""
        self.functions[(DOMAIN, name, "")] = function

    def _opset(self, within: tuple[FunctionKey, ...]) -> int:
        imported = self.model.functions[within[-1]].opset_import if within else ()
        own = {domain_of(entry.domain): int(entry.version) for entry in imported}
        return own.get("", self.model.opsets.get("", 0))

    def _attributes(self, node: onnx.NodeProto, bound: Bound) -> dict[str, tuple[int, Any]]:
        return attributes(node, bound, *self._readers())

    def _readers(self) -> tuple[Any, Any]:
        place = (self.model.external, self.model.name)
        return (lambda t: to_array(t, *place)), (lambda t: sparse_to_array(t, *place))

    def _digest(self, place: str, own: float | None = None) -> bytes:
        return hashlib.sha256(repr((self.seed, own, place)).encode()).digest()


def _key(node: onnx.NodeProto) -> FunctionKey:
    return domain_of(node.domain), node.op_type, node.overload


def _with_branches(nodes: Iterable[onnx.NodeProto]) -> Iterator[onnx.NodeProto]:
    """These nodes and the nodes in their branches."""
    for node in nodes:
        yield node
        for branch in _branches(node):
            yield from _with_branches(branch.node)


def _branches(node: onnx.NodeProto) -> list[onnx.GraphProto]:
    """The subgraphs of a node that run at most once."""
    once = node.op_type == "If" and domain_of(node.domain) == ""
    return [a.g for a in node.attribute if a.HasField("g")] if once else []
