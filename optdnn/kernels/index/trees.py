"""Ensembles of decision trees in one launch: a warp for each row, whose lanes walk different trees.

The nodes of all trees are one table: 8 integers of a node are a sector of memory. A lane adds the weights of its leaves, and the
lanes' sums are added by shuffles, in the same order for any number of rows.
"""

from __future__ import annotations

import math

import numpy as np

from optdnn.ir.graph import Op
from optdnn.kernels.builder import Builder, TensorView
from optdnn.kernels.index.index_kernel import IndexKernel, emit_index_kernel, needed, shape_at
from optdnn.kernels.pointwise.expressions import CPP, literal
from optdnn.runtime.reference.trees import LEAF
from optdnn.types import FP64, Array

LANES, COLUMNS = 32, 8
"""Lanes of a row, and most columns of weights that a warp adds."""
FIELDS = ("features", "modes", "yes", "no", "missing", "rows")
"""The integers of a node, in this order."""
NODE = 8
"""Integers from a node to the next."""
COMPARISONS = ("<=", "<", ">=", ">", "==", "!=")
"""The comparison of each mode."""
LAUNCH_S, LEVEL_S = 1.5e-6, 0.6e-6
"""Seconds of a launch, and of a step from a node to the next (two loads that depend on each other), on an H200."""
WARPS_AT_ONCE = 132 * 32
"""Warps that run side by side."""


def _table(b: Builder, op: Op) -> tuple[TensorView, dict[str, TensorView]]:
    """The table of nodes, and the operands that it holds as views of it. Nodes have the order of the operands."""
    of = dict(
        zip(("features", "thresholds", "modes", "yes", "no", "missing", "roots", "rows"), op.inputs[1:], strict=False)
    )
    arrays = [array for name in FIELDS if (array := b.graph.constant_value(of[name])) is not None]
    table: Array = np.zeros((arrays[0].size, NODE), np.int32)
    for k, array in enumerate(arrays):
        table[:, k] = array
    placed = b.constant(table, f"{op.outputs[0].name}.nodes")
    return placed, {name: placed.view(table.shape[:1], (NODE,), k) for k, name in enumerate(FIELDS)}


def _goes(modes: set[int]) -> str:
    """C++ of whether a comparison of ``value`` and ``threshold`` holds. ``modes``: those that nodes have."""
    *others, last = sorted(modes)
    chosen = f"value {COMPARISONS[last]} threshold"
    for mode in reversed(others):
        chosen = f"(mode == {mode} ? value {COMPARISONS[mode]} threshold : {chosen})"
    return chosen


def _tree_ensemble(b: Builder, op: Op) -> None:
    x, out = needed(b, op, 0), b.target(op.value)
    thresholds, roots, weights = (needed(b, op, k) for k in (2, 7, 9))
    nodes, views = _table(b, op)
    modes = b.graph.constant_value(op.inputs[3])
    assert modes is not None
    inner = {int(m) for m in np.unique(modes)} - {LEAF}
    t = "double" if FP64 in (x.dtype, thresholds.dtype) else "float"
    start, combine = {
        "MIN": (literal(math.inf, "double"), "w < sum ? w : sum"),
        "MAX": (literal(-math.inf, "double"), "w > sum ? w : sum"),
    }.get(op.attrs.aggregate, ("0.0", "sum + w"))
    walk = f"""for (int level = 1; level < {_depth(b, op)} && p.nodes[at + 1] != {LEAF}; level++) {{
                const {t} value = {t}(widen(p.x[at_x(o0, p.nodes[at])])), threshold = {t}(p.thresholds[at / {NODE}]);
                {"const int mode = p.nodes[at + 1];" if len(inner) > 1 else ""}
                const bool goes = {_goes(inner)} || (value != value && p.nodes[at + 4]);
                at = i64(goes ? p.nodes[at + 2] : p.nodes[at + 3]) * {NODE};
            }}""" if inner else ""  # fmt: skip
    columns = out.shape[1]
    width = min(columns, COLUMNS)
    divided = f" / {roots.shape[0]}" if op.attrs.aggregate == "AVERAGE" else ""
    lines = f"""double sums[{width}];
        #pragma unroll
        for (int c = 0; c < {width}; c++) sums[c] = {start};
        for (i64 tree = o2; tree < p.n_roots[0]; tree += {LANES}) {{
            i64 at = i64(p.roots[tree]) * {NODE};
            {walk}
            #pragma unroll
            for (int c = 0; c < {width}; c++) {{
                const i64 column = o1 * {width} + c;
                const double w = column < {columns} ? double(p.weights[at_weights(p.nodes[at + 5], column)]) : 0.0, sum = sums[c];
                sums[c] = {combine};
            }}
        }}
        #pragma unroll
        for (int c = 0; c < {width}; c++) {{
            #pragma unroll
            for (int step = 1; step < {LANES}; step *= 2) {{
                const double w = __shfl_xor_sync(0xffffffffu, sums[c], step), sum = sums[c];
                sums[c] = {combine};
            }}
            const i64 column = o1 * {width} + c;
            if (o2 == c && column < {columns}) p.y[at_y(o0, column)] = narrow<{CPP[out.dtype]}>({"double" if out.dtype == FP64 else "float"}(sums[c]{divided}));
        }}"""  # fmt: skip
    tensors = {"x": x, "nodes": nodes, "thresholds": thresholds, "roots": roots, "weights": weights}
    names = ("features", "", "modes", "yes", "no", "missing", "", "rows")
    held = [views.get(name) for name in names]
    reads = [x, held[0], thresholds, *held[2:6], roots, held[7], weights]
    emit_index_kernel(b, op, (out.shape[0], -(-columns // width), LANES), tensors, {"y": out}, lines, reads=reads)


def _limits(b: Builder, op: Op) -> str | None:
    arrays = [b.graph.constant_value(v) for v in op.inputs[1:]]
    if any(a is None for a in arrays):
        return "its trees are not constants"
    features, roots = arrays[0], arrays[6]
    assert features is not None
    assert roots is not None
    if not roots.size:
        return "it has no trees"
    return "its trees have more nodes than a kernel can count" if features.size * NODE >= 1 << 31 else None


def _depth(b: Builder, op: Op) -> int:
    """Most nodes from a root to a leaf."""
    modes, yes, no, roots = (b.graph.constant_value(op.inputs[k]) for k in (3, 4, 5, 7))
    assert modes is not None
    assert yes is not None
    assert no is not None
    assert roots is not None
    level, depth = np.unique(roots), 0
    while level.size:
        depth += 1
        level = level[modes[level] != LEAF]
        level = np.unique(np.concatenate([yes[level], no[level]]))
    return depth


class TreesKernel(IndexKernel):
    """One launch for all trees."""

    def seconds(self, b: Builder, op: Op) -> float | None:
        rows, columns = shape_at(b, op, 0)[0], shape_at(b, op, 9)[1]
        waves = -(-rows * -(-columns // COLUMNS) // WARPS_AT_ONCE)
        trees = -(-shape_at(b, op, 7)[0] // LANES)
        return LAUNCH_S + waves * trees * _depth(b, op) * LEVEL_S


TACTIC = TreesKernel({"TreeEnsemble": _tree_ensemble}, _limits)
