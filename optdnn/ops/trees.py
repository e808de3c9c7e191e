"""Ensembles of decision trees: ai.onnx.ml's TreeEnsembleRegressor, TreeEnsembleClassifier and (version 5) TreeEnsemble.

They are imported as one kind with the nodes as constant operands. Class labels, base values and post transforms become separate
operators around it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from optdnn.errors import ShapeError, UnsupportedError
from optdnn.ops.base import Attrs, Call, Cost, Result, Unsupported
from optdnn.ops.checks import elements, emit, required
from optdnn.ops.definition import OpDef
from optdnn.ops.exchange import Emit, Export, NodeSpec, Ref
from optdnn.runtime.reference.trees import LEAF, MODES
from optdnn.types import FP32, INT64, Array, TensorType

AGGREGATES = ("AVERAGE", "SUM", "MIN", "MAX")
"""Aggregate functions, in the order of TreeEnsemble-5's numbers."""
_NODE_OPERANDS = 9


@dataclass(frozen=True)
class TreeEnsembleAttrs(Attrs):
    """How the trees' weights are combined: SUM, AVERAGE, MIN or MAX."""

    aggregate: str = "SUM"


def _infer(call: Call) -> Result:
    x, weights = call.type(0), call.type(_NODE_OPERANDS)
    if len(x.dims) != 2 or len(weights.dims) != 2:
        raise ShapeError(f"TreeEnsemble takes a matrix of features, not {x}")
    return Result((TensorType(weights.dtype, (x.dims[0], weights.dims[1])),))


def _cost(call: Call, result: Result) -> Cost:
    """About ten comparisons per tree and row."""
    return Cost(10 * elements(call.type(7)) * elements(result.types[0]))


# ---------------------------------------------------------------- import


@dataclass(frozen=True)
class Forest:
    """The nodes of all trees as arrays over one numbering; see the kernel."""

    features: Array
    thresholds: Array
    modes: Array
    yes: Array
    no: Array
    missing: Array
    roots: Array
    rows: Array
    weights: Array

    def operands(self) -> list[Array]:
        """In the order of the kernel's parameters."""
        return [
            self.features, self.thresholds, self.modes, self.yes, self.no, self.missing, self.roots, self.rows, self.weights
        ]  # fmt: skip


def checked(forest: Forest, n_features: Any) -> Forest:
    """The forest. Raises ShapeError for nodes that do not exist, features beyond the input, and trees with cycles."""
    n = forest.features.size
    inner = forest.modes != LEAF
    for children in (forest.yes[inner], forest.no[inner]):
        if ((children < 0) | (children >= n)).any():
            raise ShapeError("a node of a tree has a child that does not exist")
    used = forest.features[inner]
    if used.size and isinstance(n_features, int) and (used.min() < 0 or used.max() >= n_features):
        raise ShapeError(f"the trees read feature {int(used.max())}, the input has {n_features}")
    level = forest.roots
    for _ in range(n + 1):
        level = level[inner[level]]
        if not level.size:
            return forest
        level = np.unique(np.concatenate([forest.yes[level], forest.no[level]]))
    raise ShapeError("the nodes of a tree form a loop")


def _from_lists(node: NodeSpec, weight_prefix: str, n_columns: int, single: bool) -> Forest:
    """The forest of a TreeEnsembleRegressor or -Classifier (versions 1 and 3). ``single``: all weights go to column 0."""
    trees, ids = (np.asarray(required(node, f"nodes_{n}"), np.int64) for n in ("treeids", "nodeids"))
    n = trees.size
    _check_size(n, n_columns)
    number = {key: k for k, key in enumerate(zip(trees.tolist(), ids.tolist(), strict=True))}
    if len(number) != n:
        raise ShapeError("two nodes of a tree have one number")
    names = required(node, "nodes_modes")
    if unknown := sorted(set(names) - set(MODES)):
        raise Unsupported(f"the mode {unknown[0]}")
    modes = np.array([MODES.index(m) for m in names], np.uint8)

    def child(name: str) -> Array:
        own = np.asarray(required(node, f"nodes_{name}nodeids"), np.int64)
        pairs = zip(trees.tolist(), own.tolist(), modes.tolist(), strict=True)
        return np.array([0 if m == LEAF else number.get((t, c), -1) for t, c, m in pairs], np.int64)

    yes, no = child("true"), child("false")
    missing = np.array(node.get("nodes_missing_value_tracks_true") or [0] * n, np.bool_)
    first: dict[int, int] = {}
    for k, t in enumerate(trees.tolist()):
        first.setdefault(t, k)  # every exporter lists the root first, and runtimes rely on it
    roots = list(first.values())
    inner = modes != LEAF
    if set(roots) & (set(yes[inner].tolist()) | set(no[inner].tolist())):
        raise ShapeError("the first node of a tree has a parent: its nodes form a loop")
    ids_of = [
        np.asarray(required(node, f"{weight_prefix}_{x}"), np.int64).tolist() for x in ("treeids", "nodeids", "ids")
    ]
    values = _numbers(node, f"{weight_prefix}_weights")
    rows = np.zeros(n, np.int64)
    table: dict[int, Array] = {}
    for t, k, column, value in zip(*ids_of, values.tolist(), strict=True):
        if (t, k) not in number or not 0 <= column < max(n_columns, 1):
            raise ShapeError(f"a weight belongs to node {k} of tree {t}, column {column}, which does not exist")
        table.setdefault(number[t, k], np.zeros(1 if single else n_columns, values.dtype))[0 if single else column] += (
            value
        )
    weights = np.zeros((len(table) + 1, 1 if single else n_columns), values.dtype)  # row 0: leaves without weights
    for row, (k, entry) in enumerate(sorted(table.items()), 1):
        rows[k], weights[row] = row, entry
    features = np.asarray(required(node, "nodes_featureids"), np.int64)
    thresholds = _numbers(node, "nodes_values")
    lists = (features, thresholds, modes, missing)
    if any(a.size != n for a in lists):
        raise ShapeError("the lists that describe the nodes have different lengths")
    return Forest(features, thresholds, modes, yes, no, missing, np.array(roots, np.int64), rows, weights.astype(FP32))


def _numbers(node: NodeSpec, name: str) -> Array:
    """An attribute that is a list of floats, or a tensor of doubles."""
    exact = node.get(f"{name}_as_tensor")
    if exact is not None:
        return np.asarray(exact).reshape(-1)
    return np.asarray(node.get(name) or [], np.float32)


def _ensemble(e: Emit, x: Ref, forest: Forest, aggregate: str) -> Ref:
    checked(forest, e.type(x).dims[-1])
    return emit(e, "TreeEnsemble", x, *forest.operands(), aggregate=aggregate)


WEIGHTS_LIMIT = 1 << 30
"""The most nodes times columns of a forest."""


def _check_size(nodes: int, columns: int) -> None:
    """Raise ShapeError before absurdly large weights are allocated: two numbers of a small file can ask for any amount of
    memory."""
    if columns < 0 or nodes * columns > WEIGHTS_LIMIT:
        raise ShapeError(f"{nodes} nodes with {columns} columns each are more than {WEIGHTS_LIMIT} weights")


def _aggregate(node: NodeSpec) -> str:
    name = str(node.get("aggregate_function", "SUM"))
    if name not in AGGREGATES:
        raise Unsupported(f"aggregate_function={name}")
    return name


def _regressor(node: NodeSpec, e: Emit) -> Sequence[Ref]:
    targets = int(node.get("n_targets", 1))
    y = _ensemble(e, node.inputs[0], _from_lists(node, "target", targets, False), _aggregate(node))
    base = _numbers(node, "base_values")
    if base.size:
        y = emit(e, "Add", y, base.astype(FP32))
    return (post_transform(e, y, str(node.get("post_transform", "NONE"))),)


def _classifier(node: NodeSpec, e: Emit) -> Sequence[Ref]:
    labels = class_labels(node)
    columns = set(node.get("class_ids") or [])
    single = labels.size == 2 and len(columns) == 1
    forest = _from_lists(node, "class", labels.size, single)
    scores = _ensemble(e, node.inputs[0], forest, "SUM")
    base = _numbers(node, "base_values").astype(FP32)
    transform = str(node.get("post_transform", "NONE"))
    if not single:
        if base.size:
            scores = emit(e, "Add", scores, base)
        return labeled(e, scores, labels), post_transform(e, scores, transform)
    if base.size:
        scores = emit(e, "Add", scores, base[-1:])
    positive = bool((forest.weights >= 0).all())
    return binary_outcome(e, scores, labels, transform, probability=positive)


def _version_5(node: NodeSpec, e: Emit) -> Sequence[Ref]:
    modes = np.asarray(required(node, "nodes_modes"), np.uint8).reshape(-1)
    if (modes >= LEAF).any():
        raise Unsupported("tests of membership (mode BRANCH_MEMBER)")
    n = modes.size
    targets = np.asarray(required(node, "leaf_targetids"), np.int64)
    leaf_weights = np.asarray(required(node, "leaf_weights")).reshape(-1)
    leaves, columns = targets.size, int(node.get("n_targets", 1))
    _check_size(leaves, columns)
    if leaf_weights.size != leaves or (targets < 0).any() or (targets >= columns).any():
        raise ShapeError("the leaves' weights and targets do not fit")

    def child(name: str) -> Array:
        ids = np.asarray(required(node, f"nodes_{name}nodeids"), np.int64)
        return ids + n * np.asarray(required(node, f"nodes_{name}leafs"), np.int64)

    splits = np.asarray(required(node, "nodes_splits")).reshape(-1)
    missing = np.array(node.get("nodes_missing_value_tracks_true") or [0] * n, np.bool_)
    weights = np.zeros((leaves, columns), leaf_weights.dtype)
    weights[np.arange(leaves), targets] = leaf_weights
    none = np.zeros(leaves, np.int64)
    forest = Forest(
        np.concatenate([np.asarray(required(node, "nodes_featureids"), np.int64), none]),
        np.concatenate([splits, np.zeros(leaves, splits.dtype)]),
        np.concatenate([modes, np.full(leaves, LEAF, np.uint8)]),
        np.concatenate([child("true"), none]),
        np.concatenate([child("false"), none]),
        np.concatenate([missing, np.zeros(leaves, np.bool_)]),
        np.asarray(required(node, "tree_roots"), np.int64),
        np.concatenate([np.zeros(n, np.int64), np.arange(leaves)]),
        weights,
    )
    y = _ensemble(e, node.inputs[0], forest, AGGREGATES[int(node.get("aggregate_function", 1))])
    names = ("NONE", "SOFTMAX", "LOGISTIC", "SOFTMAX_ZERO", "PROBIT")
    return (post_transform(e, y, names[int(node.get("post_transform", 0))]),)


# ---------------------------------------------------------------- classifiers' outputs (linear ones share them)


def class_labels(node: NodeSpec) -> Array:
    """The integer labels of a classifier. Raises Unsupported for labels that are text."""
    if node.get("classlabels_strings"):
        raise Unsupported("labels that are text: train the model with integer classes (sklearn's LabelEncoder)")
    return np.asarray(node.get("classlabels_int64s") or node.get("classlabels_ints") or [], np.int64)


def labeled(e: Emit, scores: Ref, labels: Array) -> Ref:
    """int64 [n]: the label of the largest score of each row."""
    return _named(e, emit(e, "ArgMax", scores, axis=1, keepdims=False), labels)


def _named(e: Emit, best: Ref, labels: Array) -> Ref:
    """The labels at the positions ``best``; these are the labels themselves if labels count from 0."""
    return best if np.array_equal(labels, np.arange(labels.size)) else emit(e, "Gather", labels, best)


def binary_outcome(e: Emit, score: Ref, labels: Array, transform: str, *, probability: bool) -> tuple[Ref, Ref]:
    """Label and both scores of a classifier with one score, [n, 1], for its second class.

    ``probability``: the score is a probability, so 0.5 decides and the first class has the rest; otherwise its sign decides.
    """
    both = emit(e, "Mul", score, np.array([[-1, 1]], np.float32))  # one pointwise operator, and no Concat
    if transform == "LOGISTIC":
        both = emit(e, "Sigmoid", both)
    elif transform == "NONE":
        if probability:
            both = emit(e, "Add", both, np.array([[1, 0]], np.float32))
        return labeled(e, both, labels), both  # the larger of 1 - s and s, or of -s and s, agrees with the threshold
    else:
        raise Unsupported(f"post_transform={transform} of a single score")
    threshold = np.float32(0.5 if probability else 0)
    chosen = emit(e, "Cast", emit(e, "Greater", score, threshold), to=INT64)
    return _named(e, emit(e, "Squeeze", chosen, np.array([1], np.int64)), labels), both


def post_transform(e: Emit, y: Ref, name: str) -> Ref:
    """ai.onnx.ml's post_transform of scores [n, c]."""
    if name == "NONE":
        return y
    if name == "LOGISTIC":
        return emit(e, "Sigmoid", y)
    if name == "SOFTMAX":
        return emit(e, "Softmax", y, axis=-1)
    if name == "SOFTMAX_ZERO":  # zeros stay zeros and do not count in the sum
        there = emit(e, "Not", emit(e, "Equal", y, np.float32(0)))
        low = emit(e, "Where", there, y, np.float32(-np.inf))
        return emit(e, "Where", there, emit(e, "Softmax", low, axis=-1), np.float32(0))
    raise Unsupported(f"post_transform={name}")


# ---------------------------------------------------------------- export


def _to_onnx(attrs: TreeEnsembleAttrs, inputs: Sequence[str], outputs: int, e: Export) -> Sequence[str]:
    """Write a TreeEnsembleRegressor: one tree per root, with node numbers that are unique across trees."""
    arrays = [e.value(name) for name in inputs[1:]]
    if any(a is None for a in arrays):
        raise UnsupportedError("TreeEnsemble: ai.onnx.ml has its nodes as attributes, and here they are computed")
    features, thresholds, modes, yes, no, missing, roots, rows, weights = (a for a in arrays if a is not None)
    tree, order = _trees(roots.tolist(), modes, yes, no)
    leaves = [k for k in order if modes[k] == LEAF]
    targets = weights.shape[1]
    exact = thresholds.dtype == np.float64 or weights.dtype == np.float64
    of = {"nodes_values": thresholds[order], "target_weights": weights[rows[leaves]].reshape(-1)}
    numbers: dict[str, Any] = (
        {f"{k}_as_tensor": v.astype(np.float64) for k, v in of.items()}
        if exact
        else {k: [float(x) for x in v] for k, v in of.items()}
    )
    (y,) = e.node(
        "TreeEnsembleRegressor", [inputs[0]], 1, domain="ai.onnx.ml",
        aggregate_function=attrs.aggregate, n_targets=targets, post_transform="NONE",
        nodes_treeids=[tree[k] for k in order], nodes_nodeids=list(order),
        nodes_featureids=[int(f) for f in features[order]], nodes_modes=[MODES[m] for m in modes[order]],
        nodes_truenodeids=[0 if modes[k] == LEAF else int(yes[k]) for k in order],
        nodes_falsenodeids=[0 if modes[k] == LEAF else int(no[k]) for k in order],
        nodes_missing_value_tracks_true=[int(m) for m in missing[order]],
        target_treeids=[tree[k] for k in leaves for _ in range(targets)],
        target_nodeids=[k for k in leaves for _ in range(targets)],
        target_ids=list(range(targets)) * len(leaves), **numbers,
    )  # fmt: skip
    wanted = e.type(inputs[-1]).dtype  # the regressor's results are float32
    return (y,) if wanted == FP32 else e.node("Cast", [y], to=wanted)


def _trees(roots: Sequence[int], modes: Array, yes: Array, no: Array) -> tuple[dict[int, int], list[int]]:
    """Node -> its tree, and the nodes in an order in which each tree begins with its root."""
    tree: dict[int, int] = {}
    order: list[int] = []
    for t, root in enumerate(roots):
        stack = [root]
        while stack:
            k = stack.pop()
            if k in tree:
                continue
            tree[k] = t
            order.append(k)
            if modes[k] != LEAF:
                stack += [int(no[k]), int(yes[k])]
    return tree, order


DEFS = (
    OpDef(
        "TreeEnsemble",
        _infer,
        TreeEnsembleAttrs,
        {
            "ai.onnx.ml.TreeEnsembleRegressor": _regressor,
            "ai.onnx.ml.TreeEnsembleClassifier": _classifier,
            "ai.onnx.ml.TreeEnsemble": _version_5,
        },
        _to_onnx,
        cost=_cost,
    ),
)
