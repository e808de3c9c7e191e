"""Tensor parallel: each rank computes a part of the heads, columns and rows, and collectives put the parts together.

A *block* ends in a product whose rows are split: each rank multiplies a part of the features by its rows of the weights, and an
AllReduce adds the ranks' partial sums. The operators that compute these features are split as well, backwards to products with
split columns: queries, keys and values by heads, gated units by columns. So a block needs one AllReduce (Shoeybi et al.,
"Megatron-LM", 2019). A product outside of all blocks with large weights, such as the head of a language model, is split only by
columns, and an AllGather follows. A block that cannot be split is refused with the reason, and computed whole on every rank.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field, replace
from itertools import pairwise

import networkx as nx
import numpy as np

from optdnn.errors import InternalError
from optdnn.ir.graph import STRUCTURAL, Graph, Op, Value
from optdnn.ops.collective import AllGatherAttrs, AllReduceAttrs
from optdnn.passes.base import Fired, Pass, PassContext, PassReport, Refused, node_names
from optdnn.passes.support.facts import ints, operand
from optdnn.passes.support.partition import matrix_of, needed, rows_of
from optdnn.passes.support.tensor_parts import Needed, Part, Whole
from optdnn.types import Array

LEAST_WEIGHTS = 1 << 12
"""Fewest weight elements of a block that is split: an AllReduce costs some microseconds."""
LEAST_GATHERED = 1 << 24
"""Fewest weight elements of a split product outside of all blocks: an AllGather moves its whole result."""


@dataclass
class Ports:
    """Name -> split axis of the network's inputs and outputs. Names without an entry are whole on every rank."""

    inputs: dict[str, int] = field(default_factory=dict)
    outputs: dict[str, int] = field(default_factory=dict)


@dataclass
class Block:
    """The split of one product: parts of values, requirements of operators, and the number of products with split columns."""

    root: Op | None
    parts: dict[Value, Part] = field(default_factory=dict)
    ops: dict[int, Needed] = field(default_factory=dict)
    weights: int = 0
    columns: int = 0


def _in_a_row(graph: Graph) -> bool:
    """Whether each collective depends on the previous one: then all ranks run them in the same order."""
    collectives = [op.id for op in graph.of_kind("AllReduce", "AllGather")]
    return all(a in nx.ancestors(graph.nx, b) for a, b in pairwise(collectives))


def _only_addition(graph: Graph, total: Value) -> Op | None:
    """The Add that is the only reader of ``total`` and keeps its shape, or None."""
    add = graph.sole_user(total)
    return add if add is not None and add.kind == "Add" and add.outputs[0].type == graph.type(total) else None


class TensorParallel(Pass):
    """Reduces the graph to the part of rank ``rank`` of ``world``. Afterward ``ports`` tells how inputs and outputs are split."""

    name = "tensor_parallel"
    axis_kind = "features"
    """The kind of axis that is split, for reports: features, or the batch."""

    def __init__(
        self, rank: int, world: int, *, least_weights: int = LEAST_WEIGHTS, least_gathered: int = LEAST_GATHERED
    ):
        self.rank, self.world, self.ports = rank, world, Ports()
        self._least_weights, self._least_gathered = least_weights, least_gathered
        self._biases: dict[int, tuple[float, Value]] = {}

    def run(self, graph: Graph, context: PassContext, report: PassReport) -> None:
        place = {op.id: k for k, op in enumerate(graph.order())}
        blocks: list[Block] = []
        taken: dict[Value, Part] = {}
        used: set[int] = set()
        refused: dict[int, Refused] = {}
        for op in graph.order():
            if matrix_of(graph, op) is None:
                continue
            try:
                block = self._block(graph, op, place, taken, used)
            except Whole as why:
                refused[op.id] = Refused("split_rows", node_names([op]), str(why))
                continue
            blocks.append(block)
            taken |= block.parts
            used |= block.ops.keys() | {op.id}
            report.fired.append(Fired("split_rows", node_names([op])))
        gathered = [op for op in graph.order() if op.id not in used and self._is_gathered(graph, op)]
        report.fired += [Fired("split_columns", node_names([op])) for op in gathered]
        used |= {op.id for op in gathered}
        report.refused += [why for op_id, why in refused.items() if op_id not in used]
        self._apply(graph, blocks, gathered, place)

    # ---------------------------------------------------------------- what is split

    def _chunk(self, size: int) -> Array:
        """The indices of this rank, out of ``size``. Raises Whole if the size does not divide evenly."""
        if size % self.world:
            raise Whole(f"{size} {self.axis_kind} do not divide into {self.world} equal parts")
        count = size // self.world
        return np.arange(self.rank * count, (self.rank + 1) * count)

    def _block(self, graph: Graph, root: Op, place: dict[int, int], taken: dict[Value, Part], used: set[int]) -> Block:
        """The block that ends in ``root``. Raises Whole with the reason why it cannot be split."""
        if root.id in used:
            raise Whole("its columns are split: it is the first product of a block")
        matrix = matrix_of(graph, root)
        assert matrix is not None
        block = Block(root, weights=matrix[0] * matrix[1])
        rows = block.ops[root.id] = rows_of(graph, root, self._chunk(matrix[0]))
        pending: list[tuple[int, int]] = []
        self._want(graph, block, root, rows, pending, place, taken)
        self._follow(graph, block, pending, place, taken, used)
        while readers := self._readers(graph, block):
            self._absorb(graph, block, readers[0], pending, place, taken)
            self._follow(graph, block, pending, place, taken, used)
        if not block.columns:
            raise Whole("no product of weights makes its features")
        if block.weights < self._least_weights:
            raise Whole(f"its block's {block.weights} weights are too few to pay for an all-reduce")
        return block

    def _follow(
        self, graph: Graph, block: Block, pending: list[tuple[int, int]], place: dict[int, int], taken: dict[Value, Part],
        used: set[int],
    ) -> None:  # fmt: skip
        """Split the producers of the required parts, going backwards."""
        while pending:
            op = graph.op(heapq.heappop(pending)[1])
            if op.id in used:
                raise Whole(f"its features are made of {op.name!r}, which another block adds up")
            wanted = {k: block.parts[v] for k, v in enumerate(op.values) if v in block.parts}
            found = needed(graph, op, wanted)
            for port, part in found.outputs.items():
                if port < len(op.outputs) and block.parts.setdefault(Value(op.id, port), part) != part:
                    raise Whole(f"the results of {op.kind} {op.name!r} would be split in two ways")
            block.ops[op.id] = found
            if 1 in found.operands and (matrix := matrix_of(graph, op)) is not None:
                block.weights += matrix[0] * matrix[1]
                block.columns += 1
            self._want(graph, block, op, found, pending, place, taken)

    def _readers(self, graph: Graph, block: Block) -> list[tuple[Op, int, Part]]:
        """Operators outside of the block that read one of its split values, with the operand's slot and part. Raises Whole for an
        output of the network that cannot be split in this way."""
        found = []
        for value, part in block.parts.items():
            for use in graph.uses(value):
                reader = graph.op(use.op)
                if reader.kind == "Output":
                    if part.run is None or part.run[0] != self.rank * part.size:
                        raise Whole(
                            f"output {reader.name!r} would not be split into equal parts that follow one another"
                        )
                    continue
                if reader.kind == "Shape" and self._is_elsewhere(graph, reader, part, len(graph.type(value).dims)):
                    continue
                if reader.id not in block.ops or use.slot not in block.ops[reader.id].operands:
                    found.append((reader, use.slot, part))
        return found

    def _absorb(
        self, graph: Graph, block: Block, reader: tuple[Op, int, Part], pending: list[tuple[int, int]], place: dict[int, int],
        taken: dict[Value, Part],
    ) -> None:  # fmt: skip
        """Split an operator that keeps the axes of its operand, such as a Slice of a cache that is an output. Raises Whole for
        others."""
        op, slot, part = reader
        why = Whole(f"{op.kind} {op.name!r} reads {graph.output(operand(op, slot)).name!r} whole")
        if op.id in block.ops:
            raise why
        try:
            found = needed(graph, op, {0: part})
        except Whole:
            raise why from None
        if len(op.outputs) != 1 or found.operands.get(slot) != part or len(op.outputs[0].type.dims) <= part.axis:
            raise why
        block.parts[op.value] = part
        block.ops[op.id] = found
        self._want(graph, block, op, found, pending, place, taken)

    def _want(
        self, graph: Graph, block: Block, op: Op, found: Needed, pending: list[tuple[int, int]], place: dict[int, int],
        taken: dict[Value, Part],
    ) -> None:  # fmt: skip
        """Record the parts of operands that ``op`` needs, and queue the operators that compute them."""
        for slot, part in found.operands.items():
            value = operand(op, slot)
            producer = graph.op(value)
            if producer.kind == "Constant":
                continue
            known = block.parts.get(value, taken.get(value))
            if known is not None and known != part:
                raise Whole(f"{graph.output(value).name!r} would be split in two ways")
            if value in taken and producer.kind not in STRUCTURAL:
                raise Whole(f"{graph.output(value).name!r} is part of another block")
            if value not in block.parts:
                block.parts[value] = part
                if producer.kind == "Input" and (part.run is None or part.run[0] != self.rank * part.size):
                    raise Whole(f"input {producer.name!r} would not be split into equal parts that follow one another")
                entry = (-place[producer.id], producer.id)
                if producer.kind not in STRUCTURAL and entry not in pending:
                    heapq.heappush(pending, entry)

    @staticmethod
    def _is_elsewhere(graph: Graph, shape: Op, part: Part, rank: int) -> bool:
        """Whether no reader of a Shape uses the size of the split axis."""
        sizes = range(rank)[shape.attrs.start : shape.attrs.end]
        if part.axis not in sizes:
            return True
        for reader in graph.users(shape.value):
            which = ints(graph, reader.input(1)) if reader.kind == "Gather" else None
            if which is None or any(sizes[i] == part.axis for i in which):
                return False
        return True

    def _is_gathered(self, graph: Graph, op: Op) -> bool:
        matrix = matrix_of(graph, op)
        return matrix is not None and matrix[1] % self.world == 0 and matrix[0] * matrix[1] >= self._least_gathered

    # ---------------------------------------------------------------- the rewrite

    def _apply(self, graph: Graph, blocks: list[Block], gathered: list[Op], place: dict[int, int]) -> None:
        parts: dict[Value, Part] = {}
        plans: dict[int, Needed] = {}
        for block in blocks:
            parts |= block.parts
            plans |= block.ops
        roots = {block.root.id for block in blocks if block.root is not None}
        columns: dict[int, int] = {}
        for op in gathered:
            rank = len(op.outputs[0].type.dims)
            take = self._chunk(int(op.outputs[0].type.dims[-1]))  # type: ignore[arg-type]
            plans[op.id] = needed(graph, op, {0: Part(rank - 1, take)})
            columns[op.id] = rank - 1
            for slot, part in plans[op.id].operands.items():
                self._plan_weights(graph, operand(op, slot), part, plans)
        made: dict[tuple[Value, int, bytes], Value] = {}
        for value, part in parts.items():
            op = graph.op(value)
            if op.kind == "Input":
                self._set_type(graph, op, part)
                self.ports.inputs[op.name] = part.axis
            for use in graph.uses(value):
                if graph.op(use.op).kind == "Output":
                    self.ports.outputs[graph.op(use.op).name] = part.axis
        sums: list[tuple[int, Value]] = []
        for op_id in sorted(plans, key=lambda i: place[i]):
            self._rewrite(graph, graph.op(op_id), plans[op_id], made, reduced=op_id in roots)
            if op_id in roots:
                sums.append((op_id, self._collect(graph, graph.op(op_id), None)))
            elif op_id in columns:
                self._collect(graph, graph.op(op_id), columns[op_id])
        self._infer_again(graph, set(plans))
        if _in_a_row(graph):
            for product, total in sums:
                self._add_before(graph, product, total)

    def _plan_weights(self, graph: Graph, value: Value, part: Part, plans: dict[int, Needed]) -> None:
        """Split weights that are computed from constants."""
        pending = [(value, part)]
        while pending:
            value, part = pending.pop()
            op = graph.op(value)
            if op.kind == "Constant":
                continue
            plans[op.id] = needed(graph, op, {value.port: part})
            pending += [(operand(op, slot), p) for slot, p in plans[op.id].operands.items()]

    def _set_type(self, graph: Graph, op: Op, part: Part) -> None:
        (out,) = op.outputs
        graph.set_op(replace(op, outputs=(replace(out, type=out.type.with_shape(part.of(out.type.dims))),)))

    def _rewrite(
        self, graph: Graph, op: Op, found: Needed, made: dict[tuple[Value, int, bytes], Value], *, reduced: bool
    ) -> None:
        """Give the operator its parts of constants. A product with an AllReduce after it loses its bias: it is added later."""
        inputs = list(op.inputs)
        for slot, part in found.operands.items():
            value = operand(op, slot)
            array = graph.constant_value(value)
            if array is None:
                continue
            key = (value, part.axis, part.take.tobytes())
            if key not in made:
                piece = np.ascontiguousarray(array.take(part.take, axis=part.axis))
                made[key] = graph.add_constant(piece, graph.output(value).name, graph.op(value).src)
            inputs[slot] = made[key]
        for slot, array in found.constants.items():
            inputs[slot] = graph.add_constant(array.astype(np.int64), f"{op.name}.part", op.src)
        for slot, array in found.divided.items():
            by = graph.add_constant(array, f"{op.name}.ranks", op.src)
            inputs[slot] = graph.add("Div", [inputs[slot], by], src=op.src).value
        if reduced and op.kind == "Gemm" and op.input(2) is not None:
            self._biases[op.id] = (op.attrs.beta, operand(op, 2))
            inputs = inputs[:2]
        graph.set_op(replace(op, inputs=tuple(inputs), attrs=op.attrs if found.attrs is None else found.attrs))
        for value in {v for v in op.inputs if v is not None and v not in inputs}:
            kept = op.id in self._biases and value == self._biases[op.id][1]
            if graph.op(value).kind == "Constant" and not kept and not graph.use_count(value):
                graph.remove(value.op)

    def _collect(self, graph: Graph, op: Op, axis: int | None) -> Value:
        """Put a collective after a product: an AllGather along ``axis``, or without an axis an AllReduce and then the bias.
        Returns the collective's result."""
        value, name = op.value, op.outputs[0].name
        readers = [use.op for use in graph.uses(value)]
        before = graph.type(value)
        if axis is None:
            last = graph.add(
                "AllReduce", [value], AllReduceAttrs(self.world), names=[f"{name}.reduced"], src=op.src
            ).value
        else:
            part = before.with_shape((*before.dims[:axis], int(before.dims[axis]) // self.world))  # type: ignore[arg-type]
            graph.set_op(replace(op, outputs=(replace(op.outputs[0], type=part),)))
            attrs = AllGatherAttrs(self.world, axis)
            last = graph.add("AllGather", [value], attrs, names=[f"{name}.gathered"], src=op.src).value
        collected, last = last, self._bias(graph, op, last)
        if graph.type(last) != before:
            raise InternalError(f"{op.kind} {op.name!r} has another type when it is split")
        for reader in dict.fromkeys(readers):
            old = graph.op(reader)
            graph.set_op(replace(old, inputs=tuple(last if v == value else v for v in old.inputs)))
        return collected

    def _add_before(self, graph: Graph, product: int, total: Value) -> None:
        """Let only rank 0 add biases and a residual, before the AllReduce. The addition then fits the product's epilogue, and the
        next norm reads the AllReduce's result. All other ranks leave it out. The added value must be known before the product, so
        that the collectives keep their order."""
        known = nx.ancestors(graph.nx, product)
        while (add := _only_addition(graph, total)) is not None:
            (other,) = (v for v in add.inputs if v != total)
            if other is None or (other.op not in known and graph.op(other).kind not in STRUCTURAL):
                return
            collective, name = graph.op(total), add.outputs[0].name
            before = collective.inputs[0]
            graph.replace_uses(add.value, total)
            if self.rank == 0:
                inputs = tuple(before if v == total else v for v in add.inputs)
                graph.set_op(replace(add, inputs=inputs, outputs=(replace(add.outputs[0], name=f"{name}.part"),)))
                before = add.value
            else:
                graph.remove(add.id)
            outputs = (replace(collective.outputs[0], name=name),)
            graph.set_op(replace(collective, inputs=(before,), outputs=outputs, src=collective.src | add.src))

    def _bias(self, graph: Graph, op: Op, last: Value) -> Value:
        bias = self._biases.pop(op.id, None)
        if bias is None:
            return last
        beta, value = bias
        if beta != 1:
            scale = graph.add_constant(np.asarray(beta, graph.type(value).dtype), f"{op.name}.beta", op.src)
            value = graph.add("Mul", [value, scale], src=op.src).value
        return graph.add("Add", [last, value], names=[f"{op.outputs[0].name}.biased"], src=op.src).value

    def _infer_again(self, graph: Graph, changed: set[int]) -> None:
        """Infer the types of these operators again, and of all operators after them with changed operands."""
        for op in list(graph.order()):
            fed = any(v is not None and v.op in changed for v in op.inputs)
            if op.kind in ("Input", "Constant") or (op.id not in changed and not fed):
                continue
            outs = tuple(replace(o, type=t, known=None) for o, t in zip(op.outputs, graph.infer(op).types, strict=True))
            if any(a.type != b.type for a, b in zip(outs, op.outputs, strict=True)):
                graph.set_op(replace(op, outputs=outs))
                changed.add(op.id)
            else:
                changed.discard(op.id)
