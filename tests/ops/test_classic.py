"""Classical machine learning: scikit-learn models through skl2onnx, single nodes against ONNX Runtime, refusals."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onenode import onnxruntime_run
from onnx import TensorProto, helper

import optdnn
from optdnn.errors import ModelError, OptdnnError, RunError, ShapeError, UnsupportedError
from optdnn.importers.onnx import MapsAsMatrix, UncheckedValues, import_model
from optdnn.ir.evaluate import evaluate
from optdnn.ir.export_onnx import export_model
from optdnn.runtime.reference.trees import tree_ensemble

RNG = np.random.default_rng(0)
X = RNG.standard_normal((12, 4)).astype(np.float32)
CENTERS = RNG.standard_normal((3, 4))


def node(op: str, x: Any, outputs: int = 1, version: int = 3, **attrs: Any) -> onnx.ModelProto:
    n = helper.make_node(op, ["x"], [f"y{i}" for i in range(outputs)], name="n", domain="ai.onnx.ml", **attrs)
    given = [helper.make_tensor_value_info("x", helper.np_dtype_to_tensor_dtype(x.dtype), ["n", *x.shape[1:]])]
    graph = helper.make_graph([n], "g", given, [onnx.ValueInfoProto(name=f"y{i}") for i in range(outputs)])
    imports = [helper.make_opsetid("", 17), helper.make_opsetid("ai.onnx.ml", version)]
    return helper.make_model(graph, opset_imports=imports, ir_version=8)


def same(model: onnx.ModelProto, x: Any, tol: float = 1e-5) -> Any:
    pytest.importorskip("onnxruntime")
    graph = import_model(model)
    for a, b in zip(evaluate(graph, {"x": x}).values(), onnxruntime_run(model, {"x": x}), strict=True):
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        np.testing.assert_allclose(a, b, rtol=tol, atol=tol)
    return graph


# ---------------------------------------------------------------- trees

NODES: dict[str, Any] = {
    "nodes_treeids": [0, 0, 0, 0, 0, 1, 1, 1],
    "nodes_nodeids": [0, 1, 2, 3, 4, 0, 1, 2],
    "nodes_featureids": [0, 1, 0, 0, 0, 3, 0, 0],
    "nodes_modes": ["BRANCH_LEQ", "BRANCH_LEQ", "LEAF", "LEAF", "LEAF", "BRANCH_LEQ", "LEAF", "LEAF"],
    "nodes_values": [0.0, 0.5, 0, 0, 0, -0.2, 0, 0],
    "nodes_truenodeids": [1, 2, 0, 0, 0, 1, 0, 0],
    "nodes_falsenodeids": [4, 3, 0, 0, 0, 2, 0, 0],
    "nodes_missing_value_tracks_true": [1, 0, 0, 0, 0, 0, 0, 0],
}
LEAVES = {"treeids": [0, 0, 0, 1, 1], "nodeids": [2, 3, 4, 1, 2]}


def forest(prefix: str, ids: list[int], weights: list[float], **more: Any) -> dict[str, Any]:
    own = {f"{prefix}_{k}": v for k, v in LEAVES.items()}
    return {**NODES, **own, f"{prefix}_ids": ids, f"{prefix}_weights": weights, **more}


@pytest.mark.parametrize("aggregate", ["SUM", "AVERAGE", "MIN", "MAX"])
def test_tree_regressors(aggregate: str) -> None:
    attrs = forest("target", [0, 0, 0, 0, 0], [1.0, -2.0, 0.5, 3.0, 4.0], aggregate_function=aggregate, n_targets=1)
    x = X.copy()
    x[0, 0] = np.nan
    same(node("TreeEnsembleRegressor", x, base_values=[0.75], **attrs), x)
    graph = same(node("TreeEnsembleRegressor", x, **attrs), x)
    assert graph.kinds() == {"TreeEnsemble": 1}
    again = import_model(onnx.load_from_string(export_model(graph).to_bytes()))  # as ai.onnx.ml writes it
    np.testing.assert_array_equal(evaluate(again, {"x": x})["y0"], evaluate(graph, {"x": x})["y0"])


@pytest.mark.parametrize("mode", ["BRANCH_LT", "BRANCH_GTE", "BRANCH_GT", "BRANCH_EQ", "BRANCH_NEQ"])
def test_every_comparison(mode: str) -> None:
    x = np.round(X)
    attrs = forest("target", [0, 1, 1, 0, 1], [1.0, -2.0, 0.5, 3.0, 4.0], n_targets=2)
    attrs["nodes_modes"] = [m.replace("BRANCH_LEQ", mode) for m in NODES["nodes_modes"]]
    same(node("TreeEnsembleRegressor", x, **attrs), x)


@pytest.mark.parametrize("transform", ["NONE", "SOFTMAX", "LOGISTIC", "SOFTMAX_ZERO"])
def test_tree_classifiers(transform: str) -> None:
    attrs = forest("class", [0, 1, 2, 0, 1], [0.3, 0.9, 0.5, 0.2, 0.4], classlabels_int64s=[5, 7, 9])
    same(node("TreeEnsembleClassifier", X, 2, post_transform=transform, **attrs), X)


@pytest.mark.parametrize("labels", [[0, 1, 2], [5, 7, 9]])
@pytest.mark.parametrize(
    "weights", [[0.3, 0.9, 0.5, 0.2, 0.4], [-0.3, -0.9, -0.5, -0.2, -0.4], [0.5, 0.5, 0.5, 0.5, 0.5]]
)
def test_classifiers_are_written_as_such(labels: list[int], weights: list[float], tmp_path: Path) -> None:
    """For three classes, one node gives scores and positions. CPU builds, files and the examination of files accept it."""
    attrs = forest("class", [0, 1, 2, 0, 1], weights, classlabels_int64s=labels)
    model = node("TreeEnsembleClassifier", X, 2, **attrs)
    graph = import_model(model)
    proto = export_model(graph).proto
    onnx.checker.check_model(proto)
    kinds = [n.op_type for n in proto.graph.node]
    assert kinds == ["TreeEnsembleClassifier"] + ["Gather"] * (labels[0] != 0)
    optdnn.build(model, target="cpu", tactics="onnxruntime", shapes={"x": X.shape}).save(tmp_path / "e")
    engine = optdnn.load(tmp_path / "e")
    (step,), outputs = engine.program.steps, tuple(i for _, i in engine.program.outputs)
    if labels[0] == 0:  # the fast path of a context accepts results in any order
        assert step.outputs == outputs[::-1]
        assert engine.context()._whole is not None
    got, want = engine.run({"x": X}), evaluate(graph, {"x": X})
    assert list(got) == list(want) == ["y0", "y1"]
    for name, a in got.items():
        np.testing.assert_array_equal(a, want[name])


def test_two_classes_and_maxima_stay_regressors() -> None:
    """ONNX Runtime's classifier of two columns compares with a threshold, and supports only sums."""
    for ids, labels in (([0, 1, 0, 1, 0], [0, 1]), ([0, 0, 0, 0, 0], [0, 1])):
        attrs = forest("class", ids, [0.3, 0.9, 0.5, 0.2, 0.4], classlabels_int64s=labels)
        graph = import_model(node("TreeEnsembleClassifier", X, 2, **attrs))
        assert "TreeEnsembleRegressor" in {n.op_type for n in export_model(graph).proto.graph.node}
    attrs = forest("target", [0, 1, 2, 0, 1], [0.3, 0.9, 0.5, 0.2, 0.4], aggregate_function="MAX", n_targets=3)
    model = node("TreeEnsembleRegressor", X, **attrs)
    model.graph.node.append(helper.make_node("ArgMax", ["y0"], ["best"], axis=1, keepdims=0))
    model.graph.output[0].name = "best"
    graph = same(model, X)
    assert [n.op_type for n in export_model(graph).proto.graph.node] == ["TreeEnsembleRegressor", "ArgMax"]


@pytest.mark.parametrize("transform", ["NONE", "LOGISTIC"])
@pytest.mark.parametrize("weights", [[0.1, 0.6, 0.2, 0.3, 0.05], [0.1, -0.6, 0.2, 0.3, -0.5]])
def test_classifiers_of_one_score(transform: str, weights: list[float]) -> None:
    attrs = forest("class", [0, 0, 0, 0, 0], weights, classlabels_int64s=[3, 4])
    same(node("TreeEnsembleClassifier", X, 2, post_transform=transform, **attrs), X)


def test_trees_of_version_5() -> None:
    def tensor(name: str, values: list[float], kind: int) -> onnx.TensorProto:
        return helper.make_tensor(name, kind, [len(values)], values)

    model = node(
        "TreeEnsemble", X, version=5, n_targets=2, aggregate_function=1, post_transform=0, tree_roots=[0, 2],
        nodes_featureids=[0, 1, 3], nodes_modes=tensor("m", [0, 0, 1], TensorProto.UINT8),
        nodes_splits=tensor("s", [0.0, 0.5, -0.2], TensorProto.FLOAT),
        nodes_truenodeids=[1, 0, 3], nodes_trueleafs=[0, 1, 1], nodes_falsenodeids=[2, 1, 4], nodes_falseleafs=[1, 1, 1],
        leaf_targetids=[0, 1, 0, 1, 0], leaf_weights=tensor("w", [1.0, 2.0, 3.0, 4.0, 5.0], TensorProto.FLOAT),
    )  # fmt: skip
    x = X.astype(np.float64)
    first = np.where(x[:, 0] <= 0, np.where(x[:, 1] <= 0.5, 1.0, 0.0), 3.0)
    second = np.where((x[:, 0] <= 0) & (x[:, 1] > 0.5), 2.0, 0.0)
    went = x[:, 3] < np.float32(-0.2)
    want = np.stack([first + np.where(went, 0, 5.0), second + np.where(went, 4.0, 0)], axis=1)
    np.testing.assert_allclose(evaluate(import_model(model), {"x": X})["y0"], want)


@pytest.mark.parametrize(
    ("change", "because"),
    [
        ({"nodes_truenodeids": [1, 0, 0, 0, 0, 1, 0, 0]}, "the first node of a tree has a parent"),
        ({"nodes_truenodeids": [1, 1, 0, 0, 0, 1, 0, 0]}, "the nodes of a tree form a loop"),
        ({"nodes_truenodeids": [1, 9, 0, 0, 0, 1, 0, 0]}, "a child that does not exist"),
        ({"nodes_featureids": [0, 4, 0, 0, 0, 3, 0, 0]}, "read feature 4, the input has 4"),
        ({"target_nodeids": [2, 3, 9, 1, 2]}, "a weight belongs to node 9 of tree 0"),
        ({"nodes_nodeids": [0, 1, 2, 3, 3, 0, 1, 2]}, "two nodes of a tree have one number"),
        ({"nodes_values": [0.0]}, "different lengths"),
    ],
)
def test_malformed_trees_are_refused(change: dict[str, Any], because: str) -> None:
    attrs = {**forest("target", [0] * 5, [1.0] * 5, n_targets=1), **change}
    with pytest.raises(ModelError, match=because):
        import_model(node("TreeEnsembleRegressor", X, **attrs))


def test_a_tree_without_end_stops() -> None:
    one, zero = np.array([0]), np.array([0.0], np.float32)
    with pytest.raises(RunError, match="never reaches a leaf"):
        tree_ensemble(X, one, zero, one.astype(np.uint8), one, one, one.astype(bool), one, one, zero[None])


# ---------------------------------------------------------------- single nodes


@pytest.mark.parametrize("norm", ["MAX", "L1", "L2"])
def test_normalizer(norm: str) -> None:
    x = np.abs(X) if norm == "MAX" else X  # ONNX Runtime takes the largest magnitude, ONNX the largest number
    same(node("Normalizer", x, norm=norm), x)


def test_others_against_onnxruntime() -> None:
    same(node("Scaler", X, offset=[0.1, 0.2, 0.3, 0.4], scale=[1.0, 2.0, 3.0, 4.0]), X)
    same(node("Binarizer", X, threshold=0.25), X)
    gaps = X.copy()
    gaps[::3, 1] = np.nan
    same(node("Imputer", gaps, imputed_value_floats=[1.0, 2.0, 3.0, 4.0], replaced_value_float=float("nan")), gaps)
    same(node("LinearRegressor", X, coefficients=[1.0, 2, 3, 4, 5, 6, 7, 8], intercepts=[0.5, -0.5], targets=2), X)
    classes = {"coefficients": [float(v) for v in range(12)], "intercepts": [0.5, -0.5, 0.0]}
    same(node("LinearClassifier", X, 2, classlabels_ints=[2, 4, 6], post_transform="SOFTMAX", **classes), X)
    ids = np.array([[1], [5], [9]], np.int64)
    same(node("OneHotEncoder", ids, cats_int64s=[1, 9]), ids)
    same(node("LabelEncoder", ids, keys_int64s=[1, 5], values_floats=[0.5, 2.5], default_float=-1.0), ids)
    same(node("LabelEncoder", X[:, :1], keys_floats=[float(X[3, 0])], values_int64s=[7], default_int64=-3), X[:, :1])


def test_unknown_categories_are_zeros_where_the_model_would_end_a_run() -> None:
    """The form of scikit-learn's OneHotEncoder, unless it ignores unknown categories."""
    known, unknown = np.array([[1], [9]], np.int64), np.array([[5]], np.int64)
    with pytest.warns(UncheckedValues, match="g: n would end a run with an error for unknown categories"):
        graph = same(node("OneHotEncoder", known, cats_int64s=[1, 9], zeros=0), known)
    np.testing.assert_array_equal(evaluate(graph, {"x": unknown})["y0"], [[[0, 0]]])


@pytest.mark.parametrize(
    ("op", "attrs", "because"),
    [
        ("LinearClassifier", {"coefficients": [1.0] * 4, "classlabels_strings": ["a"]}, "labels that are text: train"),
        ("LabelEncoder", {"keys_strings": ["a"], "values_int64s": [1]}, "labels that are text: encode them"),
        ("DictVectorizer", {"int64_vocabulary": [0]}, "give the features as a matrix"),
        ("SVMRegressor", {"kernel_type": "LINEAR", "coefficients": [1.0] * 4, "rho": [0.0], "post_transform": "PROBIT"}, "PROBIT"),
    ],
)  # fmt: skip
def test_refusals(op: str, attrs: dict[str, Any], because: str) -> None:
    with pytest.raises(UnsupportedError, match=because):
        import_model(node(op, X, 2 if "Classifier" in op else 1, **attrs))


@pytest.mark.parametrize(
    "labels", [{"classlabels_int64s": [0, 1, 2, 3]}, {"classlabels_strings": ["a", "b", "c", "d"]}]
)
def test_maps_are_given_as_the_matrix_of_their_values(labels: dict[str, Any]) -> None:
    model = node("ZipMap", X, **labels)
    (names,) = labels.values()
    text = f"output 'y0' is a matrix with a column for each of the 4 classes {', '.join(map(str, names))}; ZipMap makes maps"
    with pytest.warns(MapsAsMatrix, match=text) as told:
        got = evaluate(import_model(model), {"x": X})["y0"]
    (rows,) = onnxruntime_run(model, {"x": X})
    np.testing.assert_array_equal(got, [[row[name] for name in names] for row in rows])
    assert [w.filename for w in told] == [__file__], "the caller's line, not ours"
    with pytest.warns(MapsAsMatrix) as told:
        optdnn.build(model, target="reference")
    assert {w.filename for w in told} == {__file__}, "nor that of contextlib"
    with pytest.raises(ShapeError, match="ZipMap has 2 classes for 4 columns"):
        import_model(node("ZipMap", X, classlabels_int64s=[0, 1]))


# ---------------------------------------------------------------- scikit-learn


def _models() -> dict[str, Any]:
    from sklearn import decomposition, ensemble, linear_model, naive_bayes, pipeline, preprocessing, svm

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return {
            "logistic": pipeline.make_pipeline(preprocessing.StandardScaler(), linear_model.LogisticRegression()),
            "forest": ensemble.RandomForestClassifier(5, random_state=0),
            "boosting": ensemble.GradientBoostingClassifier(n_estimators=4, random_state=0),
            "svc": svm.SVC(),
            "pca": pipeline.make_pipeline(decomposition.PCA(2), naive_bayes.GaussianNB()),
            "forest regressor": ensemble.RandomForestRegressor(5, random_state=0),
            "svr": svm.SVR(),
            "nu": svm.NuSVR(kernel="poly"),
        }


@pytest.mark.parametrize("classes", [2, 3])
@pytest.mark.parametrize("name", ["logistic", "forest", "boosting", "svc", "pca", "forest regressor", "svr", "nu"])
def test_scikit_learn(name: str, classes: int) -> None:
    pytest.importorskip("sklearn")
    skl2onnx = pytest.importorskip("skl2onnx")
    rng = np.random.default_rng(classes)
    y = rng.integers(0, classes, 60)
    x = (CENTERS[y] + 0.7 * rng.standard_normal((60, 4))).astype(np.float32)
    fitted = _models()[name].fit(x, y)
    options = {id(fitted): {"zipmap": False}} if hasattr(fitted, "classes_") else None
    model = skl2onnx.to_onnx(fitted, x[:1], options=options)
    first, *more = optdnn.build(model, target="reference").run({"X": x}).values()
    np.testing.assert_allclose(first.reshape(-1), fitted.predict(x), rtol=1e-4, atol=1e-4)
    if hasattr(fitted, "predict_proba"):
        np.testing.assert_allclose(more[0], fitted.predict_proba(x), rtol=1e-3, atol=1e-5)


def test_probabilities_of_support_vectors() -> None:
    """Coupled as in libsvm. ONNX Runtime does the same. scikit-learn no longer computes them without a warning."""
    pytest.importorskip("onnxruntime")
    vectors, per_class = RNG.standard_normal((6, 4)).astype(np.float32), [2, 2, 2]
    attrs: dict[str, Any] = {
        "coefficients": [float(v) for v in RNG.standard_normal(12)],
        "support_vectors": [float(v) for v in vectors.reshape(-1)],
        "vectors_per_class": per_class,
        "rho": [0.1, -0.2, 0.3],
        "prob_a": [-1.0, -2.0, -0.5],
        "prob_b": [0.1, 0.0, -0.1],
        "kernel_type": "RBF",
        "kernel_params": [0.5, 0.0, 3.0],
        "classlabels_ints": [1, 2, 4],
    }
    model = node("SVMClassifier", X, 2, **attrs)
    got = evaluate(import_model(model), {"x": X})
    np.testing.assert_allclose(got["y1"], onnxruntime_run(model, {"x": X})[1], rtol=1e-4, atol=1e-5)
    with pytest.raises(OptdnnError, match="do not fit"):
        import_model(node("SVMClassifier", X, 2, **{**attrs, "rho": [0.1]}))
