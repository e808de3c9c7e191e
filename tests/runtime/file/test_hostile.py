"""Well-formed, hostile engine files for the CPU: each is refused before a library is called or another file is read."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from support.hostile import Port, load_in_child, model_of, program_of, write
from support.needs import needs_libraries
from support.parts import I32, I64, LIBRARIES, F, X, Y, changed, constant, node, relu, twice

import optdnn
from optdnn.config import THREADS_LIMIT
from optdnn.errors import EngineError, UsageError
from optdnn.runtime import engine as runtime_engine
from optdnn.runtime.cpu.library import Settings

needs_libraries()
pytestmark = pytest.mark.usefixtures("cache")


# ---------------------------------------------------------------- indices that OpenVINO does not check


def unchecked() -> dict[str, tuple[onnx.ModelProto, list[Port], list[Port], str]]:
    """Name -> network, inputs, outputs, and the text of the refusal."""
    one: list[Port] = [("y", F, (1,))]
    far = constant("i", 1_000_000, 2, shape=(1, 2))
    body = helper.make_graph(
        [
            helper.make_node("GatherND", ["x", "at"], ["part"], name="inner"),
            helper.make_node("Identity", ["more"], ["again"], name="go"),
        ],
        "body",
        [helper.make_tensor_value_info("k", I64, ()), helper.make_tensor_value_info("more", TensorProto.BOOL, ())],
        [helper.make_tensor_value_info("again", TensorProto.BOOL, ()), helper.make_tensor_value_info("part", F, (1,))],
    )
    branches = [
        helper.make_graph([helper.make_node(*made, name=name)], name, [], [helper.make_tensor_value_info(out, F, (1,))])
        for made, name, out in (
            (("GatherND", ["x", "i"], ["bad"]), "then", "bad"),
            (("GatherND", ["x", "fine"], ["good"]), "else", "good"),
        )
    ]
    at: Port = ("at", I64, (1, 2))
    return {
        "a constant": (model_of([node("GatherND", "x,i")], [X], one, [far]), [X], one, "out of range"),
        "an input": (model_of([node("GatherND", "x,at")], [X, at], one), [X, at], one, "does not check 'at'"),
        "computed": (
            model_of([node("Shape", "x", "s"), node("Mul", "s,far", "i"), node("GatherND", "x,i")], [X], one,
                     [constant("far", 1 << 40)]),
            [X], one, "out of range",
        ),
        "a size": (
            model_of([node("Shape", "x", "s"), node("GatherND", "x,s")], [("x", F, ("n", 4))], [("y", F, ())]),
            [("x", F, ("n", 4))], [("y", F, ())], "out of range",
        ),
        "sizes that are not static": (
            model_of([node("Shape", "x", "s", end=1), node("Unsqueeze", "s,zero", "i"), node("Gather", "r,i")],
                     [("x", F, ("n", 4)), ("r", I64, (6,))], [("y", I64, (1, 1))], [constant("zero", 0)]),
            [("x", F, ("n", 4)), ("r", I64, (6,))], [("y", I64, (1, 1))], "does not check",
        ),
        "writing": (
            model_of([node("ScatterElements", "x,i,u", axis=1)], [X, ("u", F, (1, 2))], [Y],
                     [constant("i", 3, -1_000_000, shape=(1, 2))]),
            [X, ("u", F, (1, 2))], [Y], "out of range",
        ),
        "writing more rows than there are": (
            model_of([node("ScatterElements", "x,i,u", axis=1)], [X, ("u", F, (5000, 4))], [Y],
                     [constant("i", *[0] * 20000, shape=(5000, 4), dtype=np.int32)]),
            [X, ("u", F, (5000, 4))], [Y], "5000 indices along axis 0",
        ),
        "a row of integers": (
            model_of([node("Gather", "x,at")], [("x", I32, (4,)), ("at", I64, (3,))], [("y", I32, (3,))]),
            [("x", I32, (4,)), ("at", I64, (3,))], [("y", I32, (3,))], "does not check 'at'",
        ),
        "pads that take more than there is": (
            model_of([node("Pad", "x,p")], [X], [("y", F, (1, 3))], [constant("p", 0, 5, 0, -6)]),
            [X], [("y", F, (1, 3))], "takes more than there is",
        ),
        "negative repeats": (
            model_of([node("Tile", "x,p")], [X], [Y], [constant("p", -1, -1)]), [X], [Y], "negative repeats",
        ),
        "in a loop": (
            model_of([helper.make_node("Loop", ["trips", "", ], ["y"], body=body)], [X, at], [("y", F, (2, 1))],
                     [constant("trips", 2, shape=())]),
            [X, at], [("y", F, (2, 1))], "in its body, openvino does not check",
        ),
        "in a branch that is not taken": (
            model_of([helper.make_node("If", ["no"], ["y"], then_branch=branches[0], else_branch=branches[1])], [X],
                     one, [far, constant("fine", 0, 0, shape=(1, 2)), numpy_helper.from_array(np.array(False), "no")]),
            [X], one, "does nothing, and cannot be judged",
        ),
    }  # fmt: skip


@pytest.mark.slow
def test_openvino_gets_no_index_that_is_not_checked(tmp_path: Path) -> None:
    cases = unchecked()
    files = [
        write(program_of("openvino", model, ins, outs), tmp_path / f"{k}.engine")
        for k, (model, ins, outs, _) in enumerate(cases.values())
    ]
    said = load_in_child(files, tmp_path)
    assert len(said) == len(files), f"the process died at {list(cases)[len(said)]!r}"
    for (name, (*_, why)), (error, message) in zip(cases.items(), said, strict=True):
        assert error == "EngineError", f"{name}: {error} {message}"
        assert why in message, name


@pytest.mark.slow
def test_constant_indices_in_weights_are_looked_at_too(tmp_path: Path) -> None:
    at = np.zeros((600, 2), np.int32)
    at[599] = 1_000_000
    declared: Port = ("i", I32, (600, 2))
    outs: list[Port] = [("y", F, (600,))]
    model = model_of([node("GatherND", "x,i")], [X, declared], outs)
    path = write(program_of("openvino", model, [X], outs, {"i": at}), tmp_path / "e")
    ((error, message),) = load_in_child([path], tmp_path)
    assert error == "EngineError"
    assert "index 1000000 is out of range" in message


@pytest.mark.parametrize("library", LIBRARIES)
def test_weights_inside_of_the_file_load(library: str, tmp_path: Path) -> None:
    """A harmless file of the same kind loads, so the tests above do not refuse for another reason."""
    outs: list[Port] = [("y", F, (2,))]
    model = model_of([node("GatherND", "x,i")], [X], outs, [constant("i", 0, 3, 0, -4, shape=(2, 2))])
    engine = optdnn.load(write(program_of(library, model, [X], outs), tmp_path / "e"))
    assert engine(np.arange(4, dtype=np.float32)[None]).tolist() == [3, 0]


TREE = {
    "n_targets": 1, "aggregate_function": "SUM", "post_transform": "NONE", "nodes_treeids": [0, 0, 0],
    "nodes_nodeids": [0, 1, 2], "nodes_featureids": [0, 0, 0], "nodes_modes": ["BRANCH_LEQ", "LEAF", "LEAF"],
    "nodes_truenodeids": [1, 0, 0], "nodes_falsenodeids": [2, 0, 0], "nodes_missing_value_tracks_true": [0, 0, 0],
    "nodes_values": [0.5, 0.0, 0.0], "target_treeids": [0, 0], "target_nodeids": [1, 2], "target_ids": [0, 0],
    "target_weights": [1.0, 2.0],
}  # fmt: skip
TREES: list[tuple[dict[str, Any], str]] = [
    ({"nodes_featureids": [1_000_000, 0, 0]}, "the trees read feature 1000000, the input has 4"),
    ({"nodes_truenodeids": [1000, 0, 0]}, "a child that does not exist"),
    ({"nodes_truenodeids": [0, 0, 0]}, "its nodes form a loop"),
    ({"target_ids": [0, 100_000]}, "column 100000, which does not exist"),
    ({"n_targets": 1 << 40}, "weights"),
    ({"n_targets": -1}, "weights"),
]


@pytest.mark.slow
def test_trees_that_onnxruntime_would_walk_out_of_are_refused(tmp_path: Path) -> None:
    outs: list[Port] = [("y", F, (1, 1))]
    files = []
    for k, (change, _) in enumerate([({}, ""), *TREES]):
        made = helper.make_node("TreeEnsembleRegressor", ["x"], ["y"], domain="ai.onnx.ml", **{**TREE, **change})
        model = model_of([made], [X], outs)
        model.opset_import.add(domain="ai.onnx.ml", version=3)
        files.append(write(program_of("onnxruntime", model, [X], outs), tmp_path / f"{k}.engine"))
    said = load_in_child(files, tmp_path)
    assert said[0] == ("none", "")
    assert len(said) == len(files)
    for (_, why), (error, message) in zip(TREES, said[1:], strict=True):
        assert error == "EngineError"
        assert why in message


# ---------------------------------------------------------------- the form of the ONNX


def outside(path: Path, place: str) -> tuple[onnx.ModelProto, list[Port]]:
    """A network that adds the contents of a file to its input."""
    path.write_bytes(np.arange(4, dtype=np.float32).tobytes())
    t = TensorProto(name="w", data_type=F, dims=(1, 4), data_location=TensorProto.EXTERNAL)
    for key, value in (("location", place), ("offset", "0"), ("length", "16")):
        t.external_data.add(key=key, value=value)
    return model_of([node("Add", "x,w")], [X], [Y], [t]), [X]


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("where", ["absolute", "relative", "weights", "a constant", "a body"])
def test_no_tensor_of_an_engine_lies_in_a_file(
    library: str, where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    name = "weights" if where == "weights" else "secret"
    model, ins = outside(tmp_path / name, str(tmp_path / name) if where == "absolute" else name)
    why = "is declared to be in a file"
    if where == "weights":  # the exporter's name for its own weights; the step has no weight of this name
        why = "its weights are"
    if where == "a constant":
        made = helper.make_node("Constant", [], ["w"], value=model.graph.initializer.pop())
        made.name = "constant"
        model.graph.node.insert(0, made)
    if where == "a body":
        inner = helper.make_graph([helper.make_node("Add", ["x", "w"], ["sum"], name="add")], "then", [],
                                  [helper.make_tensor_value_info("sum", F, (1, 4))], [model.graph.initializer.pop()])  # fmt: skip
        other = helper.make_graph([helper.make_node("Relu", ["x"], ["same"], name="relu")], "else", [],
                                  [helper.make_tensor_value_info("same", F, (1, 4))])  # fmt: skip
        ins = [X, ("c", I64, ())]
        model = model_of(
            [helper.make_node("Cast", ["c"], ["b"], to=TensorProto.BOOL),
             helper.make_node("If", ["b"], ["y"], then_branch=inner, else_branch=other)], ins, [Y],
        )  # fmt: skip
    path = write(program_of(library, model, ins, [Y]), tmp_path / "e")
    with pytest.raises(EngineError, match=why):
        optdnn.load(path)


FORMS: dict[str, tuple[Callable[[onnx.ModelProto], object], str]] = {
    "another opset": (lambda m: setattr(m.opset_import[0], "version", 11), r"imports the operators \[\('', 11\)\]"),
    "no opset": (lambda m: m.ClearField("opset_import"), "imports the operators"),
    "another domain": (lambda m: m.opset_import.add(domain="com.example", version=1), "'com.example' at version 1"),
    "an operator of another domain": (
        lambda m: m.graph.node[0].MergeFrom(onnx.NodeProto(op_type="Gelu", domain="com.microsoft")),
        "the operator 'com.microsoft.Gelu'",
    ),
    "an operator of no domain": (lambda m: setattr(m.graph.node[0], "op_type", "Evil"), "the operator 'Evil'"),
    "a name with a domain": (
        lambda m: setattr(m.graph.node[0], "op_type", "com.microsoft.FusedMatMul"),
        "com.microsoft.FusedMatMul",
    ),
    "a function": (lambda m: m.functions.add(name="f", domain="d"), "ModelProto.functions"),
    "declared types": (
        lambda m: m.graph.value_info.append(helper.make_tensor_value_info("z", F, (1,))),
        "GraphProto.value_info",
    ),
    "metadata": (lambda m: m.metadata_props.add(key="a", value="b"), "ModelProto.metadata_props"),
    "a sparse tensor": (lambda m: m.graph.sparse_initializer.add(), "GraphProto.sparse_initializer"),
    "numbers in fields": (
        lambda m: m.graph.initializer.append(helper.make_tensor("w", F, (1,), [1.0])),
        "TensorProto.float_data",
    ),
    "a name that is given twice": (twice, "the name 'w' is not defined exactly once"),
    "an attribute of two values": (
        lambda m: m.graph.node[0].attribute.add(name="a", type=onnx.AttributeProto.INT, i=1, f=2.0),
        "has several values",
    ),
    "an unknown attribute": (
        lambda m: m.graph.node[0].attribute.add(name="a", type=onnx.AttributeProto.INT, i=1),
        "unknown attribute 'a'",
    ),
    "another output": (lambda m: setattr(m.graph.output[0], "name", "z"), "its outputs are"),
    "another type": (
        lambda m: setattr(m.graph.output[0].type.tensor_type, "elem_type", I64),
        "'y' is declared otherwise than in the program",
    ),
    "another shape": (
        lambda m: setattr(m.graph.input[0].type.tensor_type.shape.dim[1], "dim_value", 1 << 20),
        "'x' is declared otherwise than in the program",
    ),
}


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("form", FORMS)
def test_a_form_that_optdnn_does_not_write_is_refused(library: str, form: str, tmp_path: Path) -> None:
    change, why = FORMS[form]
    path = write(program_of(library, changed(change), [X], [Y]), tmp_path / "e")
    with pytest.raises(EngineError, match="is not one that optdnn writes: .*" + why):
        optdnn.load(path)


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"\x99", "it is not ONNX"),
        (relu().SerializeToString(deterministic=True) + b"\xf8\x7f\x01", "not in canonical form"),
        (relu().SerializeToString(deterministic=True) * 2, "not in canonical form"),
    ],
    ids=["no protobuf", "an unknown field", "two models in one"],
)
def test_bytes_that_libraries_may_read_otherwise_are_refused(data: bytes, why: str, tmp_path: Path) -> None:
    path = write(program_of("onnxruntime", data, [X], [Y]), tmp_path / "e")
    with pytest.raises(EngineError, match=why):
        optdnn.load(path)


@pytest.mark.parametrize("trips", ["", "data", "too many"])
def test_a_loop_without_a_bound_is_refused(trips: str, tmp_path: Path) -> None:
    body = helper.make_graph(
        [
            helper.make_node("Identity", ["more"], ["again"], name="go"),
            helper.make_node("Relu", ["z"], ["w"], name="r"),
        ],
        "body",
        [helper.make_tensor_value_info(*p) for p in (("k", I64, ()), ("more", TensorProto.BOOL, ()), ("z", F, (1, 4)))],
        [helper.make_tensor_value_info(*p) for p in (("again", TensorProto.BOOL, ()), ("w", F, (1, 4)))],
    )
    ins = [X, ("n", I64, ())] if trips == "data" else [X]
    trip = {"": "", "data": "n", "too many": "many"}[trips]
    held = [numpy_helper.from_array(np.array(True), "yes")]
    if trip == "many":
        held.append(constant("many", 1 << 60, shape=()))
    made = model_of([helper.make_node("Loop", [trip, "yes", "x"], ["y"], body=body)], ins, [Y], held)
    path = write(program_of("onnxruntime", made, ins, [Y]), tmp_path / "e")
    with pytest.raises(EngineError, match="the loop 'node0' has no bound"):
        optdnn.load(path)


# ---------------------------------------------------------------- the step's parameters


@pytest.mark.parametrize(
    ("params", "why"),
    [
        ({"threads": 20_000}, f"threads must be 0 to {THREADS_LIMIT}, not 20000"),
        ({"threads": -1}, "threads must be 0 to"),
        ({"threads": True}, "threads must be 0 to"),
        ({"precision": "fp8"}, "precision 'fp8' is not offered by a CPU library"),
        ({"counters": "/tmp/profile"}, "its parameters are"),
        ({"model": -1}, "there is no blob -1"),
        ({"model": 7}, "there is no blob 7"),
        ({"weights": {"w": True}}, "there is no blob True"),
        ({"inputs": ["x", "z"]}, "has 1 buffers for inputs and 1 for outputs, and names 2 and 1"),
        ({"outputs": []}, "has 1 buffers for inputs and 1 for outputs, and names 1 and 0"),
    ],
    ids=str,
)
def test_parameters_of_a_step_are_bounded(params: dict[str, Any], why: str, tmp_path: Path) -> None:
    path = write(program_of("onnxruntime", relu(), [X], [Y], params=params), tmp_path / "e")
    with pytest.raises(EngineError, match=why):
        optdnn.load(path)


def test_no_one_asks_for_too_many_threads(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="threads must be 0 to"):
        Settings(20_000)
    path = write(program_of("onnxruntime", relu(), [X], [Y]), tmp_path / "e")
    with pytest.raises(UsageError, match="threads must be 1 to"):
        optdnn.load(path, threads=20_000)
    with pytest.raises(UsageError, match="threads must be at most"):
        optdnn.build(relu(), target="cpu", threads=20_000)


def test_without_an_examiner_nothing_goes_to_a_library(tmp_path: Path) -> None:
    path = write(program_of("onnxruntime", relu(), [X], [Y]), tmp_path / "e")
    assert optdnn.load(path)(np.ones((1, 4), np.float32)).tolist() == [[1, 1, 1, 1]]
    with pytest.raises(EngineError, match="nothing can examine it here"):
        runtime_engine.load(path)
