"""Functions of a decision tree's result become the numbers in its leaves, and sums of trees become one ensemble.

Scikit-learn's exporter writes each tree of an isolation forest (Liu, Ting and Zhou, 2008), of bagging and of AdaBoost as an
ensemble of its own. About twenty operators after each tree look up the number and the depth of its leaf, and compute with them.

A tree chooses one row of a constant table, the weights of its leaves. A function that computes each row by itself can be
computed for all rows of the table when the network is built. Then the sum of all trees is one ensemble, and one launch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from optdnn.dim import DimLike
from optdnn.errors import RunError
from optdnn.ir.graph import STRUCTURAL, Graph, Op, Value
from optdnn.ir.patch import Patch
from optdnn.ops.binary import CastAttrs
from optdnn.ops.fused import plain_attrs
from optdnn.ops.reduce import reduced_axes
from optdnn.ops.trees import Forest, TreeEnsembleAttrs
from optdnn.passes.base import Match, Miss, RulePass, rule
from optdnn.passes.support.facts import RESHAPES, ints, operand, producer, reshaped
from optdnn.passes.support.sum_terms import sum_terms
from optdnn.runtime.reference.run import run_kernel
from optdnn.types import FP32, Array, is_float, normalize_axis

MOST_ELEMENTS = 1 << 24
"""Most elements of a result for all leaves."""


def forest_of(graph: Graph, op: Op) -> Forest | None:
    """The nodes and weights of an ensemble; None if they are not constants."""
    arrays = [graph.constant_value(v) for v in op.inputs[1:]]
    return None if any(a is None for a in arrays) else Forest(*arrays)  # type: ignore[arg-type]


def ensemble(patch: Patch, x: Value, forest: Forest, name: str) -> Value:
    """Add an ensemble that sums the weights of its trees."""
    constants = [patch.constant(a, f"{name}.trees") for a in forest.operands()]
    return patch.add("TreeEnsemble", [x, *constants], TreeEnsembleAttrs())


# ---------------------------------------------------------------- functions of one tree


@rule("functions_of_leaves", {"TreeEnsemble"})
def functions_of_leaves(graph: Graph, op: Op) -> Match | Miss | None:
    """``f(weights[leaf])`` is ``f(weights)[leaf]`` for a tree, where f computes each row by itself from it and from constants."""
    forest = forest_of(graph, op)
    if forest is None or forest.roots.size != 1:
        return None
    tables = {op.value: forest.weights}
    inside = _computed(graph, op, tables)
    if isinstance(inside, Miss):
        return inside
    if all(one.kind in ("Cast", *RESHAPES) for one in inside):
        return None  # the result itself, in another dtype or shape
    members = {op.id, *(one.id for one in inside)}
    read = [v for v in tables if any(u.id not in members for u in graph.users(v))]
    if len(read) != 1 or op.value in read:
        return Miss("several functions of its leaf are read")
    result, table = read[0], tables[read[0]]
    flat = table.reshape(len(table), -1).astype(FP32) if table.dtype != np.float64 else table.reshape(len(table), -1)
    if not is_float(table.dtype) and (flat != table.reshape(flat.shape)).any():
        return Miss("the integers of its leaves are too large for floats")

    def build(patch: Patch) -> Value:
        name, before = graph.output(result).name, graph.type(result)
        y = ensemble(patch, operand(op), replace(forest, weights=flat), name)
        if before.dtype != flat.dtype:
            y = patch.add("Cast", [y], CastAttrs(before.dtype))
        return y if before.rank == 2 else reshaped(patch, y, (0, *table.shape[1:]))

    return Match((op, *inside), build, result)


_NODES = ("features", "thresholds", "modes", "yes", "no", "missing", "roots", "rows")


def _computed(graph: Graph, op: Op, tables: dict[Value, Array]) -> list[Op] | Miss:
    """The operators that compute each row from the tree's row and constants. ``tables`` gets their results for all leaves."""
    rows, inside, left = op.outputs[0].type.dims[0], list[Op](), [op]
    while left:
        for user in graph.users(left.pop().value):
            if user.id in {one.id for one in inside} or not _by_rows(graph, user, tables, rows):
                continue
            table = _table(graph, user, tables)
            if isinstance(table, Miss):
                return table
            if table is not None:
                tables[user.value] = table
                inside.append(user)
                left.append(user)
    return inside


def _table(graph: Graph, op: Op, tables: Mapping[Value, Array]) -> Array | Miss | None:
    """The result of a row-wise operator for all leaves; None if it rejects a leaf's numbers."""
    leaves = len(next(iter(tables.values())))
    shape = (leaves, *(d for d in op.outputs[0].type.dims[1:] if isinstance(d, int)))
    if np.prod(shape, dtype=np.int64) > MOST_ELEMENTS:
        return Miss(f"the result of {op.name} for all leaves would be too large")
    if op.kind in RESHAPES:
        return tables[operand(op)].reshape(shape)
    given = [None if v is None else tables[v] if v in tables else graph.constant_value(v) for v in op.inputs]
    try:
        (made,) = run_kernel(op.kind, given, plain_attrs(op.definition, op.attrs), [op.outputs[0].type.dtype])
    except RunError:
        return None
    return made


# ---------------------------------------------------------------- whether an operator computes each row by itself


def _by_rows(graph: Graph, op: Op, tables: Mapping[Value, Array], rows: DimLike) -> bool:
    """Whether ``op`` computes row i along axis 0 of its only result from row i of tables, and from constants."""
    dims = op.outputs[0].type.shape if len(op.outputs) == 1 and op.kind not in STRUCTURAL else None
    varying = [k for k, v in enumerate(op.inputs) if v in tables]
    constant = all(v is None or v in tables or graph.constant_value(v) is not None for v in op.inputs)
    if not dims or dims[0] != rows or not constant or any(not isinstance(d, int) for d in dims[1:]):
        return False
    if op.definition.traits.pointwise:
        return all(_aligned(graph, v, tables, len(dims)) for v in op.inputs if v is not None)
    check = _CHECKS.get(op.kind)
    return check is not None and check(graph, op, varying)


def _aligned(graph: Graph, value: Value, tables: Mapping[Value, Array], rank: int) -> bool:
    dims = graph.type(value).dims
    return len(dims) == rank if value in tables else len(dims) < rank or dims[0] == 1


def _reduction(graph: Graph, op: Op, varying: Sequence[int]) -> bool:
    axes = None if op.input(1) is None else ints(graph, op.input(1))
    unknown = op.input(1) is not None and axes is None
    return not unknown and 0 not in reduced_axes(op.attrs, axes, len(graph.type(operand(op)).dims))


def _other_axis(graph: Graph, op: Op, varying: Sequence[int]) -> bool:
    return varying == [0] and normalize_axis(op.attrs.axis, len(graph.type(operand(op)).dims)) != 0


def _gather(graph: Graph, op: Op, varying: Sequence[int]) -> bool:
    axis = normalize_axis(op.attrs.axis, len(graph.type(operand(op)).dims))
    return (varying == [1] and axis == 0) or (varying == [0] and axis != 0)


def _matmul(graph: Graph, op: Op, varying: Sequence[int]) -> bool:
    return varying == [0] and all(graph.type(operand(op, k)).rank == 2 for k in (0, 1))


_CHECKS: dict[str, Callable[[Graph, Op, Sequence[int]], bool]] = {
    **dict.fromkeys(RESHAPES, lambda graph, op, varying: varying == [0]),
    **dict.fromkeys((f"Reduce{name}" for name in ("Sum", "Mean", "Max", "Min", "Prod", "L1", "L2", "SumSquare")), _reduction),
    **dict.fromkeys(("ArgMax", "ArgMin", "Softmax", "Hardmax"), _other_axis),
    "Gather": _gather,
    "MatMul": _matmul,
}  # fmt: skip
"""Kind -> the check whether an operator of this kind computes each row by itself. Pointwise kinds need no entry."""


# ---------------------------------------------------------------- several trees


@rule("sums_of_trees", {"Add"})
def sums_of_trees(graph: Graph, op: Op) -> Match | Miss | None:
    """A sum of ensembles that read one matrix of features becomes one ensemble with all trees."""
    found = sum_terms(graph, op)
    if found is None:
        return None
    sums, terms = found
    trees = [t for t in terms if producer(graph, t, {"TreeEnsemble"}) is not None]
    if len(trees) < 2:
        return None
    first = graph.op(trees[0])
    group, forests = list[Op](), list[Forest]()
    for one in map(graph.op, trees):
        forest = forest_of(graph, one)
        added = forest is not None and (one.attrs.aggregate == "SUM" or forest.roots.size == 1)
        if forest is None or not added or one.inputs[0] != first.inputs[0] or graph.sole_user(one.value) is None:
            continue
        if not forests or _dtypes(forest) == _dtypes(forests[0]):
            group.append(one)
            forests.append(forest)
    if len(group) < 2:
        return Miss("its ensembles read different features, are read elsewhere, or do not add their trees")

    def build(patch: Patch) -> Value:
        total = ensemble(patch, operand(first), joined(forests), op.outputs[0].name)
        for term in terms:
            if graph.op(term) not in group:
                total = patch.add("Add", [total, term])
        return total

    return Match((*sums, *group), build)


def _dtypes(forest: Forest) -> tuple[object, ...]:
    return forest.thresholds.dtype, forest.weights.dtype, forest.weights.shape[1:]


def joined(forests: Sequence[Forest]) -> Forest:
    """The trees of all forests, over one numbering of nodes and leaves."""
    nodes = np.cumsum([0, *(f.features.size for f in forests)])
    leaves = np.cumsum([0, *(len(f.weights) for f in forests)])
    moved = {"yes": nodes, "no": nodes, "roots": nodes, "rows": leaves}

    def side_by_side(name: str) -> Array:
        parts = [getattr(f, name) for f in forests]
        return np.concatenate([p + moved[name][k] if name in moved else p for k, p in enumerate(parts)])

    return Forest(*(side_by_side(name) for name in (*_NODES, "weights")))


@rule("selected_features", {"TreeEnsemble"})
def selected_features(graph: Graph, op: Op) -> Match | None:
    """Trees that read constant columns of a matrix read them from the matrix itself (bagging over features)."""
    gather, forest = producer(graph, op.inputs[0], {"Gather"}), forest_of(graph, op)
    if gather is None or forest is None:
        return None
    x, columns = graph.type(operand(gather)), graph.constant_value(gather.input(1))
    if x.rank != 2 or normalize_axis(gather.attrs.axis, 2) != 1 or columns is None or not isinstance(x.dims[1], int):
        return None
    width = x.dims[1]

    def build(patch: Patch) -> Value:
        features = patch.constant((columns % width)[forest.features], f"{op.outputs[0].name}.features")
        return patch.add("TreeEnsemble", [operand(gather), features, *op.inputs[2:]], op.attrs)

    return Match((op,), build)


class TreeLeaves(RulePass):
    name = "tree_leaves"
    rules = (selected_features, functions_of_leaves, sums_of_trees)
