"""Hostile files: small ones that request long work or much memory.

Each is refused or done within seconds, and every error is one of optdnn's. SECURITY.md names these tests.
"""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import ModelProto, TensorProto, helper
from support.attacks import BOOL, I64, SECONDS, F, constant, model, node, soon
from support.cli import Cli
from support.hostile import program_of, write
from support.processor import assert_quick, seconds
from support.sweep import sweep

import optdnn
from optdnn import limits
from optdnn.dim import DimTooLarge, bounds, dim_max, floordiv, symbol
from optdnn.errors import EngineError, InputError, ModelError, RunError, ShapeError, UnsupportedError, UsageError
from optdnn.importers.onnx import import_model
from optdnn.kernels.launch import Parameters
from optdnn.passes.base import NAMED
from optdnn.passes.fold_constants import FoldConstants
from optdnn.runtime.program import Program
from optdnn.types import FP32, TensorSpec

# ---------------------------------------------------------------- small files, long work


def calling_twice(deep: int) -> bytes:
    """Functions that each call the next one twice."""
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("f", 1)]
    bodies = [[node(f"f{k + 1}", "a", "t", "f"), node(f"f{k + 1}", "t", "b", "f")] for k in range(deep - 1)]
    bodies.append([node("Neg", "a", "b")])
    functions = [helper.make_function("f", f"f{k}", ["a"], ["b"], body, opsets) for k, body in enumerate(bodies)]
    return model([node("f0", "x", "y", "f")], functions=functions)


def test_functions_that_call_one_another_twice_are_counted_before_they_are_inlined(tmp_path: Path, cli: Cli) -> None:
    path = tmp_path / "m.onnx"
    path.write_bytes(calling_twice(19))
    assert path.stat().st_size < 2500
    with soon():
        code, _, err = cli("check", path)
    assert code == ModelError.exit_code
    assert "786430 nodes once its functions are inlined" in err
    assert "OPTDNN_MAX_INLINED_NODES=N" in err
    assert len(import_model(calling_twice(6))) == 1 << 5


def powers(times: int) -> list[onnx.NodeProto]:
    """(A + B + C) ** (2 ** times), as sizes."""
    sizes = [node("Shape", "x", f"d{k}", start=k, end=k + 1) for k in range(3)]
    total = [node("Add", "d0,d1", "t"), node("Add", "t,d2", "p0")]
    return [*sizes, *total, *(node("Mul", f"p{k},p{k}", f"p{k + 1}") for k in range(times))]


def test_the_arithmetic_of_sizes_has_a_largest_expression(monkeypatch: pytest.MonkeyPatch) -> None:
    with soon():
        graph = import_model(model([*powers(7), node("ConstantOfShape", "p7", "y")], shape=("A", "B", "C")))
        a, b, c = (symbol(n) for n in "ABC")
        with pytest.raises(DimTooLarge, match=r"OPTDNN_MAX_DIM_PARTS=N"):
            _repeated(lambda d: d * d, a + b + c, 7)
        with pytest.raises(DimTooLarge):  # a single term, of 2 ** 30 factors
            _repeated(lambda d: d * d, a, 30)
        with pytest.raises(DimTooLarge):
            _repeated(lambda d: floordiv(d, d + 1), a, 60)
        with pytest.raises(DimTooLarge, match="128 bits"):
            _repeated(lambda d: d * (1 << 62), a, 3)
        deep = _repeated(lambda d: dim_max(d + b, c) + 1, a, 60)
        assert bounds(deep)[0] == 60
    (made,) = graph.of_kind("ConstantOfShape")
    assert made.outputs[0].type.rank == 1  # with a new symbol as its size: the value was not followed
    monkeypatch.setenv("OPTDNN_MAX_DIM_PARTS", "100000")
    assert _repeated(lambda d: d * d, a + b + c, 4) is not None


def _repeated(step: Callable[[Any], Any], value: Any, times: int) -> Any:
    for _ in range(times):
        value = step(value)
    return value


@pytest.mark.parametrize(("kind", "length"), sweep([("Neg", 2200), ("Mul", 1000)], ("Neg", 2200)))
def test_long_chains_of_one_operator(kind: str, length: int) -> None:
    """They once took a minute: patterns tried all ways to read eight operators as one product, and rewrites named all earlier
    ones."""

    def built(n: int) -> None:
        nodes = [node(kind, f"v{k}" if kind == "Neg" else f"v{k},v{k}", f"v{k + 1}") for k in range(n)]
        for name in range(len(nodes[0].input)):
            nodes[0].input[name] = "x"
        nodes[-1].output[0] = "y"
        passes = optdnn.build(model(nodes), target="reference").meta["passes"]
        assert max((len(f["nodes"]) for p in passes for f in p["fired"]), default=0) <= NAMED

    built(2)
    assert_quick(lambda: seconds(lambda: built(length)), SECONDS / 2, tries=2)


def looping(trips: int | None, body_kind: str = "Identity") -> bytes:
    ports = [helper.make_tensor_value_info("i", I64, []), helper.make_tensor_value_info("go", BOOL, [])]
    results = [helper.make_tensor_value_info("on", BOOL, []), helper.make_tensor_value_info("d", F, [1, 4])]
    carried = helper.make_tensor_value_info("c", F, [1, 4])
    body = helper.make_graph([node("Add", "c,c", "d"), node(body_kind, "go", "on")], "b", [*ports, carried], results)
    weights = [constant("yes", np.array(True)), *([] if trips is None else [constant("n", np.array(trips))])]
    return model([node("Loop", f"{'' if trips is None else 'n'},yes,x", "y", body=body)], *weights)


def test_endless_loops_end_in_every_library() -> None:
    pytest.importorskip("openvino")
    for target, tactics in (("reference", "auto"), ("cpu", "openvino")):
        with soon(), pytest.raises(optdnn.OptdnnError, match=r"would run (1000000000 times|for ever)"):
            optdnn.build(looping(10**9), target=target, tactics=tactics).run(np.ones((1, 4), np.float32))
    with soon(), pytest.raises(RunError, match="would run for ever"):
        optdnn.build(looping(None), target="reference").run(np.ones((1, 4), np.float32))


def nested_loops() -> Program:
    """An engine in the form of its author: a Loop of 10 ** 6 iterations in another one, for ONNX Runtime."""
    most = constant("most", np.array(limits.LOOP_TRIPS.default))
    ports = [helper.make_tensor_value_info("j", I64, []), helper.make_tensor_value_info("e", BOOL, [])]
    inner = helper.make_graph(
        [helper.make_node("Neg", ["a"], ["a2"], name="neg"), helper.make_node("Identity", ["e"], ["e2"], name="same")],
        "inner",
        [*ports, helper.make_tensor_value_info("a", F, [1, 4])],
        [helper.make_tensor_value_info("e2", BOOL, []), helper.make_tensor_value_info("a2", F, [1, 4])],
    )
    outer = helper.make_graph(
        [helper.make_node("Identity", ["c"], ["c2"], name="go"),
         helper.make_node("Loop", ["again", "c", "v"], ["w"], name="within", body=inner)],
        "outer",
        [helper.make_tensor_value_info("i", I64, []), helper.make_tensor_value_info("c", BOOL, []),
         helper.make_tensor_value_info("v", F, [1, 4])],
        [helper.make_tensor_value_info("c2", BOOL, []), helper.make_tensor_value_info("w", F, [1, 4])],
        [constant("again", np.array(limits.LOOP_TRIPS.default))],
    )  # fmt: skip
    proto = ModelProto(ir_version=10, producer_name="optdnn", opset_import=[helper.make_opsetid("", 21)])
    x, y = helper.make_tensor_value_info("x", F, [1, 4]), helper.make_tensor_value_info("y", F, [1, 4])
    loop = helper.make_node("Loop", ["most", "yes", "x"], ["y"], name="loop", body=outer)
    proto.graph.CopyFrom(helper.make_graph([loop], "g", [x], [y], [most, constant("yes", np.array(True))]))
    return program_of("onnxruntime", proto, [("x", F, (1, 4))], [("y", F, (1, 4))])


def test_nested_loops_of_an_engine_count_together(tmp_path: Path) -> None:
    path = write(nested_loops(), tmp_path / "e")
    with soon(), pytest.raises(EngineError, match="its loops could run more than 1000000 times together"):
        optdnn.load(path)


NUMBERS: dict[str, tuple[Callable[[], bytes], str]] = {
    "parts": (lambda: model([node("Split", "x", "y,z", num_outputs=2**63 - 1)]), "gives 9223372036854775807 parts"),
    "a window": (
        lambda: model([node("AveragePool", "x", "y", kernel_shape=[2, 1 << 33], auto_pad="SAME_LOWER")], shape=(1, 1, 4, 4)),
        "OPTDNN_MAX_WINDOW=N",
    ),
    "a norm": (lambda: model([node("LpPool", "x", "y", kernel_shape=[2], p=0)], shape=(1, 1, 4)), "has the norm 0"),
    "a rank": (lambda: model([node("Expand", "c,x", "y")], constant("c", np.ones(1, np.float32)), shape=(1 << 33,), element=I64),
               "needs at most 64 sizes"),
}  # fmt: skip
"""Small models that hold a large number."""


@pytest.mark.parametrize("name", NUMBERS)
def test_large_numbers_are_no_long_loops(name: str) -> None:
    make, why = NUMBERS[name]
    with soon(), pytest.raises(ModelError, match=why):
        import_model(make())


@pytest.mark.slow
def test_many_sizes_that_are_not_known() -> None:
    """The search for the name of a new symbol does not start from the first one each time."""
    ports = [helper.make_tensor_value_info("x", F, ["n"]), helper.make_tensor_value_info("c", BOOL, ["n"])]
    nodes = [node("Compress", "x,c", f"y{k}") for k in range(6000)]
    graph = helper.make_graph(nodes, "g", ports, [helper.make_tensor_value_info("y0", F, None)])
    opsets = [helper.make_opsetid("", 21)]
    proto = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    assert_quick(lambda: seconds(lambda: import_model(proto)), SECONDS, tries=2)


def test_a_shape_that_a_model_declares_and_does_not_compute() -> None:
    axes, data = helper.make_tensor_value_info("axes", I64, [0]), helper.make_tensor_value_info("x", F, [3, 2, 2])
    out = helper.make_tensor_value_info("y", F, [1, 1, 1])
    graph = helper.make_graph(
        [node("ReduceSum", "x,axes", "s", keepdims=0), node("Identity", "s", "y")], "g", [data, axes], [out]
    )
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
    engine = optdnn.build(proto, target="reference")
    with pytest.raises(RunError, match=r"output y: .* was computed as float32\[\]"):
        engine.run({"x": np.ones((3, 2, 2), np.float32), "axes": np.zeros(0, np.int64)})


def test_shapes_that_contradict_their_tensors() -> None:
    x, axes = helper.make_tensor_value_info("x", F, [3, 4]), helper.make_tensor_value_info("axes", I64, [1])
    for shape in ([1, 3, 5], [1, 3, 64]):
        y = helper.make_tensor_value_info("y", F, shape)
        graph = helper.make_graph([node("Unsqueeze", "x,axes", "y")], "g", [x, axes], [y])
        proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
        with pytest.raises(ShapeError, match="another number of elements"):
            optdnn.build(proto, target="simulate")


def test_the_largest_element_of_a_scalar() -> None:
    x, y = helper.make_tensor_value_info("x", F, []), helper.make_tensor_value_info("y", I64, [])
    graph = helper.make_graph([node("ArgMax", "x", "y", keepdims=0)], "g", [x], [y])
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    engine = optdnn.build(proto, target="simulate")
    assert engine(np.float32(3)) == 0


# ---------------------------------------------------------------- much memory


def test_sizes_that_no_kernel_addresses() -> None:
    engine = optdnn.build(model([node("ReduceProd", "x", "y")], shape=(3, 1 << 31, 2)), target="simulate")
    assert [step.executor for step in engine.program.steps] == ["host"]
    with pytest.raises(UnsupportedError, match="a kernel's parameter would be 4294967296, which does not fit 4 bytes"):
        Parameters().u32(1, 1 << 32)


def test_the_import_makes_no_mask() -> None:
    tracemalloc.start()
    try:
        import_model(model([node("Dropout", "x", "y,mask")], shape=(3, 4, 1 << 31)))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 1 << 24


def convolution(dilation: int) -> bytes:
    pads = [dilation] * 4
    weight = constant("w", np.ones((1, 1, 3, 3), np.float32))
    return model([node("Conv", "x,w", "y", dilations=[dilation] * 2, pads=pads)], weight, shape=(1, 1, 8, 8))


ONE = (1, 1)
LARGE: dict[str, Callable[[], bytes]] = {
    "OneHot": lambda: model(
        [node("OneHot", "x,depth,values", "y")], constant("depth", 1 << 37),
        constant("values", np.array([0, 1], np.float32)), element=I64,
    ),
    "HannWindow": lambda: model([node("HannWindow", "n", "h"), node("Add", "x,h", "y")], constant("n", 1 << 37), shape=ONE),
    "a filled tensor": lambda: model(
        [node("ConstantOfShape", "s", "h"), node("Add", "x,h", "y")], constant("s", [1 << 18, 1 << 19]), shape=ONE
    ),
    "a tensor beyond the limit": lambda: model(
        [node("ConstantOfShape", "s", "h"), node("Add", "x,h", "y")], constant("s", [1 << 22, 1 << 19]), shape=ONE
    ),
    "dilation": lambda: convolution(1 << 40),
}  # fmt: skip
"""Networks with a value that does not fit into the memory of a test machine."""


@pytest.mark.parametrize("name", LARGE)
@pytest.mark.parametrize("target", ["reference", "cpu"])
def test_values_that_do_not_fit_in_memory(name: str, target: str) -> None:
    if target == "cpu":
        pytest.importorskip("onnxruntime")
    data = LARGE[name]()
    with soon(60):
        try:
            engine = optdnn.build(data, target=target)
            engine.run({s.name: np.ones(s.shape, s.dtype) for s in engine.inputs})
        except optdnn.OptdnnError as error:
            said = str(error)
        else:
            said = "it ran"
    assert "memory" in said or "limit" in said or "too big" in said or name == "dilation", said


def test_sparse_tensors_are_made_dense_within_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    def sparse(*dims: int) -> bytes:
        proto = onnx.load_from_string(model([node("Add", "x,w", "y")]))
        values, indices = constant("w", np.ones(1, np.float32)), constant("", np.zeros(1, np.int64))
        proto.graph.sparse_initializer.append(helper.make_sparse_tensor(values, indices, dims))
        return bytes(proto.SerializeToString())

    with soon(), pytest.raises(ModelError, match=r"takes 1 GiB\n  hint: the limit is 268435456 bytes of a sparse"):
        import_model(sparse(1 << 28))
    monkeypatch.setenv("OPTDNN_MAX_SPARSE_BYTES", "15")
    with pytest.raises(ModelError, match="the limit is 15 bytes"):
        import_model(sparse(1, 4))
    monkeypatch.setenv("OPTDNN_MAX_SPARSE_BYTES", "16")
    import_model(sparse(1, 4))


def test_an_arena_that_does_not_fit_is_ours(tmp_path: Path) -> None:
    engine = optdnn.build(model([node("Relu", "x", "y")]), target="simulate")
    engine.program.arena_bytes = 1 << 50
    with soon(), pytest.raises(RunError, match="there is no memory for the arena"):
        optdnn.load(write(engine.program, tmp_path / "e"), simulate=True)


def test_archives_pictures_and_caches_have_a_largest_size(
    tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("PIL")
    from PIL import Image

    from optdnn.calibration.data import open_data
    from optdnn.calibration.images import ImageSpec, read_image
    from optdnn.tuning.timing_cache import TimingCache

    spec = TensorSpec("x", FP32, (1, 1 << 16))
    np.savez_compressed(tmp_path / "bomb.npz", x=np.zeros((4, 1 << 16), np.float32))
    Image.new("1", (300, 300)).save(tmp_path / "large.png")
    (tmp_path / "cache").write_text("[" * 5000)
    open_data(tmp_path / "bomb.npz", [spec])
    read_image(tmp_path / "large.png", ImageSpec())
    with pytest.raises(UsageError, match="nested too deeply"):
        TimingCache.open(tmp_path / "cache")
    for name, value in (("UNPACKED_BYTES", 1 << 19), ("PICTURE_PIXELS", 89_999), ("CACHE_BYTES", 4999)):
        monkeypatch.setenv(f"OPTDNN_MAX_{name}", str(value))
    with pytest.raises(InputError, match=r"'x.npy' would unpack to 1048704 bytes .*\n.*OPTDNN_MAX_UNPACKED_BYTES=N"):
        open_data(tmp_path / "bomb.npz", [spec])
    optdnn.build(model([node("Relu", "x", "y")]), target="reference").save(tmp_path / "e")
    code, _, err = cli("run", tmp_path / "e", "--input", tmp_path / "bomb.npz")
    assert code == InputError.exit_code
    assert "would unpack to" in err
    with pytest.raises(InputError, match=r"has 300x300 pixels\n.*OPTDNN_MAX_PICTURE_PIXELS=N"):
        read_image(tmp_path / "large.png", ImageSpec())
    with pytest.raises(UsageError, match=r"more than 4999 bytes; .*OPTDNN_MAX_CACHE_BYTES=N"):
        TimingCache.open(tmp_path / "cache")


def kept(*nodes: onnx.NodeProto, weights: list[TensorProto]) -> str:
    """The reason for which constant nodes were not folded."""
    graph = import_model(model([*nodes, node("Add", "x,c", "y")], *weights, shape=("n", 1)))
    report = FoldConstants()(graph)
    assert len(report.fired) + len(report.refused) == len(nodes)
    return "".join(r.reason for r in report.refused)


def test_folding_has_a_budget_of_bytes_and_of_work(monkeypatch: pytest.MonkeyPatch) -> None:
    square = constant("w", np.ones((64, 64), np.float32))
    product, grown = node("MatMul", "w,w", "c"), node("Tile", "w,s", "c")
    times = constant("s", [1, 2])
    assert kept(product, weights=[square]) == ""
    assert kept(grown, weights=[square, times]) == ""
    monkeypatch.setenv("OPTDNN_MAX_FOLDED_WORK", "0")
    assert kept(product, weights=[square]) == ""  # as long as the weights are large
    wide = constant("w", np.ones((1024, 1024), np.float32))
    assert "OPTDNN_MAX_FOLDED_WORK=N" in kept(product, weights=[wide])
    monkeypatch.setenv("OPTDNN_MAX_FOLDED_BYTES", "1000")
    assert "OPTDNN_MAX_FOLDED_BYTES=N" in kept(grown, weights=[square, times])
    monkeypatch.setenv("OPTDNN_MAX_FOLDED_BYTES", "20000")
    assert kept(grown, weights=[square, times]) == ""
