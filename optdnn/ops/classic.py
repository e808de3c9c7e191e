"""Classical machine learning (ONNX domain ai.onnx.ml), as scikit-learn pipelines export it: compositions of other kinds.

Numbers only: operators on text and on maps are refused, with a hint. ZipMap returns its operand, the matrix.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from optdnn.errors import ShapeError, UnsupportedError
from optdnn.ops.base import Attrs, Call, Result, Unsupported
from optdnn.ops.checks import emit, required
from optdnn.ops.definition import OpDef
from optdnn.ops.exchange import Emit, Export, FromOnnx, NodeSpec, Ref
from optdnn.ops.restate import typed_as
from optdnn.ops.trees import binary_outcome, class_labels, labeled, post_transform
from optdnn.types import BOOL, FP32, INT64, Array, TensorType, is_float


def _to_fp32(e: Emit, x: Ref) -> Ref:
    return x if e.type(x).dtype == FP32 else emit(e, "Cast", x, to=FP32)


def _features(node: NodeSpec, e: Emit) -> Ref:
    """Operand 0 as a matrix: a vector is one row."""
    x = node.inputs[0]
    rank = len(e.type(x).dims)
    if rank == 1:
        return emit(e, "Unsqueeze", x, np.array([0], np.int64))
    if rank != 2:
        raise ShapeError(f"{node.op_type} takes rows of features, not {e.type(x)}")
    return x


def _linear(node: NodeSpec, e: Emit, outputs: int) -> Ref:
    """x @ coefficients.T + intercepts, float32 [n, outputs]."""
    x = _to_fp32(e, _features(node, e))
    coefficients = np.asarray(required(node, "coefficients"), np.float32)
    if outputs < 1 or coefficients.size % outputs:
        raise ShapeError(f"{coefficients.size} coefficients do not fit {outputs} outputs")
    y = emit(e, "MatMul", x, np.ascontiguousarray(coefficients.reshape(outputs, -1).T))
    intercepts = np.asarray(node.get("intercepts") or [], np.float32)
    return emit(e, "Add", y, intercepts) if intercepts.size else y


def _linear_regressor(node: NodeSpec, e: Emit) -> Sequence[Ref]:
    y = _linear(node, e, int(node.get("targets", 1)))
    return (post_transform(e, y, str(node.get("post_transform", "NONE"))),)


def _linear_classifier(node: NodeSpec, e: Emit) -> Sequence[Ref]:
    labels = class_labels(node)
    n_scores = len(node.get("intercepts") or []) or max(labels.size, 1)
    scores = _linear(node, e, n_scores)
    transform = str(node.get("post_transform", "NONE"))
    if n_scores == 1 and labels.size == 2:
        return binary_outcome(e, scores, labels, transform, probability=False)
    if labels.size != n_scores:
        raise ShapeError(f"{n_scores} scores for {labels.size} labels")
    return labeled(e, scores, labels), post_transform(e, scores, transform)


def _scaler(node: NodeSpec, e: Emit) -> Sequence[Ref]:
    x = _to_fp32(e, node.inputs[0])
    offset, scale = (
        np.asarray(node.get(n) or [default], np.float32) for n, default in (("offset", 0.0), ("scale", 1.0))
    )
    return (emit(e, "Mul", emit(e, "Sub", x, offset), scale),)


def _normalizer(node: NodeSpec, e: Emit) -> Sequence[Ref]:
    x = _to_fp32(e, _features(node, e))
    axes = np.array([1], np.int64)
    norm = str(node.get("norm", "MAX"))
    kinds = {"MAX": "ReduceMax", "L1": "ReduceL1", "L2": "ReduceL2"}
    if norm not in kinds:
        raise Unsupported(f"norm={norm}")
    size = emit(e, kinds[norm], x, axes, keepdims=True)
    empty = emit(e, "Equal", size, typed_as(e, x, 0))  # a row of zeros stays one
    return (emit(e, "Div", x, emit(e, "Where", empty, typed_as(e, x, 1), size)),)


def _binarizer(node: NodeSpec, e: Emit) -> Sequence[Ref]:
    (x,) = node.inputs[:1]
    above = emit(e, "Greater", x, typed_as(e, x, node.get("threshold", 0.0)))
    return (emit(e, "Cast", above, to=e.type(x).dtype),)


def _imputer(node: NodeSpec, e: Emit) -> Sequence[Ref]:
    x = node.inputs[0]
    floating = is_float(e.type(x).dtype)
    values = node.get("imputed_value_floats" if floating else "imputed_value_int64s")
    if not values:
        raise ShapeError(f"Imputer has no values for {e.type(x)}")
    replaced = node.get("replaced_value_float" if floating else "replaced_value_int64", 0)
    absent = emit(e, "IsNaN", x) if replaced != replaced else emit(e, "Equal", x, typed_as(e, x, replaced))
    return (emit(e, "Where", absent, typed_as(e, x, values), x),)


def _feature_vectorizer(node: NodeSpec, e: Emit) -> Sequence[Ref]:
    parts = []
    for i, x in enumerate(node.inputs):
        t = e.type(x)
        rows = x if len(t.dims) == 2 else emit(e, "Unsqueeze", x, np.array([1], np.int64))
        width = (node.get("inputdimensions") or [])[i : i + 1]
        if width and e.type(rows).dims[1] != width[0]:
            raise ShapeError(f"operand {i} is {t}, inputdimensions says {width[0]} columns")
        parts.append(_to_fp32(e, rows))
    return (emit(e, "Concat", *parts, axis=1),)


def _array_feature_extractor(node: NodeSpec, e: Emit) -> Sequence[Ref]:
    x, y = node.inputs[:2]
    rank = len(e.type(x).dims)
    flat = emit(e, "Reshape", y, np.array([-1], np.int64))
    picked = emit(e, "Gather", x, flat, axis=rank - 1)
    return (picked if rank > 1 else emit(e, "Unsqueeze", picked, np.array([0], np.int64)),)


def _label_encoder(node: NodeSpec, e: Emit) -> Sequence[Ref]:
    def table(side: str) -> Array:
        if node.get(f"{side}_strings"):
            raise Unsupported("labels that are text: encode them before the network")
        tensor = node.get(f"{side}_tensor")
        if tensor is not None:
            return np.asarray(tensor).reshape(-1)
        for name, dtype in (("int64s", np.int64), ("floats", np.float32)):
            if node.get(f"{side}_{name}"):
                return np.asarray(node.get(f"{side}_{name}"), dtype)
        raise Unsupported("labels that are text: encode them before the network")

    keys, values = table("keys"), table("values")
    if keys.size != values.size or not keys.size:
        raise ShapeError(f"{keys.size} keys for {values.size} values")
    given = node.get("default_tensor")
    fallback = np.asarray(given).reshape(()) if given is not None else np.asarray(
        node.get("default_int64", -1) if values.dtype == np.int64 else node.get("default_float", -0.0)
    )  # fmt: skip
    x = emit(e, "Unsqueeze", node.inputs[0], np.array([-1], np.int64))
    if e.type(x).dtype != keys.dtype:
        raise ShapeError(f"its keys are {keys.dtype}, its operand {e.type(x)}")
    same = emit(e, "Equal", x, keys)
    if is_float(keys.dtype) and np.isnan(keys).any():  # a key NaN is the key of every NaN
        both = emit(e, "And", emit(e, "IsNaN", x), np.isnan(keys))
        same = emit(e, "Or", same, both)
    # the first matching key; a key that always matches comes last
    hits = emit(e, "Cast", same, to=INT64)
    found = emit(e, "ReduceMax", hits, np.array([-1], np.int64), keepdims=False)
    at = emit(e, "ArgMax", hits, axis=-1, keepdims=False)
    y = emit(e, "Gather", values, at)
    return (emit(e, "Where", emit(e, "Cast", found, to=BOOL), y, fallback.astype(values.dtype)),)


def _one_hot_encoder(node: NodeSpec, e: Emit) -> Sequence[Ref]:
    if node.get("cats_strings"):
        raise Unsupported("categories that are text: encode them before the network")
    cats = np.asarray(required(node, "cats_int64s"), np.int64)
    x = node.inputs[0]
    if not int(node.get("zeros", 1)):
        e.unchecked("would end a run with an error for unknown categories (zeros=0); an engine gives them zeros")
    x = x if e.type(x).dtype == INT64 else emit(e, "Cast", x, to=INT64)
    same = emit(e, "Equal", emit(e, "Unsqueeze", x, np.array([-1], np.int64)), cats)
    return (emit(e, "Cast", same, to=FP32),)


# ---------------------------------------------------------------- support vectors


def _kernel(node: NodeSpec, e: Emit, x: Ref, vectors: Array) -> Ref:
    """[n, m]: the kernel function of each row with each support vector."""
    gamma, coef0, degree = (float(v) for v in (*(node.get("kernel_params") or (0.0, 0.0, 0.0)), 0.0, 0.0, 0.0)[:3])
    name = str(node.get("kernel_type", "LINEAR"))
    dot = emit(e, "MatMul", x, np.ascontiguousarray(vectors.T))
    if name == "LINEAR":
        return dot
    if name == "RBF":
        axes = np.array([1], np.int64)
        own = emit(e, "ReduceSumSquare", x, axes, keepdims=True)
        square = emit(e, "Add", emit(e, "Sub", own, emit(e, "Mul", dot, np.float32(2))), (vectors**2).sum(1))
        return emit(e, "Exp", emit(e, "Mul", square, np.float32(-gamma)))
    scaled = emit(e, "Add", emit(e, "Mul", dot, np.float32(gamma)), np.float32(coef0))
    if name == "POLY":
        return emit(e, "Pow", scaled, np.float32(degree))
    if name == "SIGMOID":
        return emit(e, "Tanh", scaled)
    raise Unsupported(f"kernel_type={name}")


def _svm_regressor(node: NodeSpec, e: Emit) -> Sequence[Ref]:
    x = _to_fp32(e, _features(node, e))
    coefficients, rho = (np.asarray(required(node, n), np.float32) for n in ("coefficients", "rho"))
    count = int(node.get("n_supports", 0))
    if count:
        vectors = np.asarray(required(node, "support_vectors"), np.float32).reshape(count, -1)
        y = emit(e, "MatMul", _kernel(node, e, x, vectors), coefficients.reshape(count, 1))
    else:
        y = emit(e, "MatMul", x, coefficients.reshape(-1, 1))
    y = emit(e, "Add", y, rho[:1])
    if int(node.get("one_class", 0)):
        inside = emit(e, "Greater", y, np.float32(0))
        y = emit(e, "Where", inside, np.float32(1), np.float32(-1))
    return (post_transform(e, y, str(node.get("post_transform", "NONE"))),)


@dataclass(frozen=True)
class SVMDecisionAttrs(Attrs):
    """The number of support vectors of each class."""

    vectors_per_class: tuple[int, ...]


def _infer_decision(call: Call) -> Result:
    k, n = call.type(0), len(call.attrs.vectors_per_class)
    rows = k.dims[0]
    return Result(
        (TensorType(INT64, (rows,)), TensorType(k.dtype, (rows, n * (n - 1) // 2)), TensorType(k.dtype, (rows, n)))
    )


def _no_onnx(attrs: Any, inputs: Sequence[str], outputs: int, e: Export) -> Sequence[str]:
    raise UnsupportedError("SVMDecision: ai.onnx.ml has it only together with its kernel function")


def _svm_classifier(node: NodeSpec, e: Emit) -> Sequence[Ref]:
    """Label and, with ``prob_a``, probabilities; otherwise the pairs' decision values (both signs, for two classes)."""
    labels = class_labels(node)
    x = _to_fp32(e, _features(node, e))
    per_class = tuple(int(n) for n in node.get("vectors_per_class") or [])
    count = len(per_class)
    if not per_class:  # liblinear's: one row of coefficients per class
        rows = np.asarray(required(node, "coefficients"), np.float32).reshape(max(labels.size, 1), -1)
        scores = emit(e, "Add", emit(e, "MatMul", x, rows.T.copy()), np.asarray(required(node, "rho"), np.float32)[:1])
        return labeled(e, scores, labels), post_transform(e, scores, str(node.get("post_transform", "NONE")))
    total, pairs = sum(per_class), count * (count - 1) // 2
    coefficients, rho, vectors = (
        np.asarray(required(node, n), np.float32) for n in ("coefficients", "rho", "support_vectors")
    )
    wanted = (labels.size, coefficients.size, rho.size, vectors.size % total)
    if count < 2 or wanted != (count, (count - 1) * total, pairs, 0):
        raise ShapeError(f"{total} support vectors of {count} classes do not fit its coefficients, rho and labels")
    prob = [np.asarray(node.get(n) or [], np.float32) for n in ("prob_a", "prob_b")]
    given = prob if prob[0].size else []
    if any(p.size != pairs for p in given):
        raise ShapeError(f"prob_a and prob_b must have {pairs} entries")
    k = _kernel(node, e, x, vectors.reshape(total, -1))
    operands = [k, coefficients.reshape(count - 1, total), rho, *given]
    winner, decisions, shares = e.op("SVMDecision", operands, SVMDecisionAttrs(per_class), outputs=3)
    label = emit(e, "Gather", labels, winner)
    if given:
        return label, shares
    if count == 2:
        return label, emit(e, "Concat", emit(e, "Neg", decisions), decisions, axis=1)
    return label, decisions


def _zip_map(node: NodeSpec, e: Emit) -> Sequence[Ref]:
    """The rows of a matrix as maps by class: returns the matrix itself. The importer warns the user."""
    x = _features(node, e)
    names = node.get("classlabels_int64s") or node.get("classlabels_strings") or []
    columns = e.type(x).dims[1]
    if isinstance(columns, int) and columns != len(names):
        raise ShapeError(f"ZipMap has {len(names)} classes for {columns} columns")
    return (x,)


def _refused(why: str) -> FromOnnx:
    def from_onnx(node: NodeSpec, e: Emit) -> Sequence[Ref]:
        raise Unsupported(why)

    return from_onnx


_TEXT = "text is not computed: encode it before the network"
_OWN: dict[str, Callable[[NodeSpec, Emit], Sequence[Ref]]] = {
    "ArrayFeatureExtractor": _array_feature_extractor,
    "Binarizer": _binarizer,
    "FeatureVectorizer": _feature_vectorizer,
    "Imputer": _imputer,
    "LabelEncoder": _label_encoder,
    "LinearClassifier": _linear_classifier,
    "LinearRegressor": _linear_regressor,
    "Normalizer": _normalizer,
    "OneHotEncoder": _one_hot_encoder,
    "SVMClassifier": _svm_classifier,
    "SVMRegressor": _svm_regressor,
    "Scaler": _scaler,
    "ZipMap": _zip_map,
}
IMPORTERS: dict[str, FromOnnx] = {f"ai.onnx.ml.{name}": fn for name, fn in _OWN.items()}
"""Operator -> import function."""
REFUSED: dict[str, str] = {
    "ai.onnx.ml.CastMap": "maps are not tensors: give the features as a matrix",
    "ai.onnx.ml.DictVectorizer": "maps are not tensors: give the features as a matrix",
    "ai.onnx.ml.CategoryMapper": _TEXT,
}
"""Operators that are deliberately not supported -> what to do instead."""
REFUSALS: dict[str, FromOnnx] = {name: _refused(why) for name, why in REFUSED.items()}
DEFS = (OpDef("SVMDecision", _infer_decision, SVMDecisionAttrs, {}, _no_onnx),)
