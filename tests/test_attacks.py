"""Files that attack: small ones that ask for long work or much memory, and text that commands a terminal.

Each is refused, or done, within seconds, and every error is one of optdnn's. SECURITY.md names these tests.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import AttributeProto, ModelProto, TensorProto, helper, numpy_helper
from support.cli import Cli, Result
from support.hostile import changed_header, mutate, places, program_of, write
from support.onnxnet import convnet
from support.sweep import sweep

import optdnn
from optdnn import limits
from optdnn.cli import common
from optdnn.cli.main import run
from optdnn.dim import DimTooLarge, bounds, dim_max, floordiv, symbol
from optdnn.errors import EngineError, InputError, ModelError, RunError, UsageError
from optdnn.importers.onnx import import_model
from optdnn.passes.base import NAMED
from optdnn.passes.fold_constants import FoldConstants
from optdnn.runtime.file.format import read
from optdnn.runtime.program import Buffer, Program, Step
from optdnn.types import FP32, TensorSpec

F, I64, BOOL = TensorProto.FLOAT, TensorProto.INT64, TensorProto.BOOL
SECONDS = 20


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]) -> Cli:
    def call(*argv: object) -> Result:
        capsys.readouterr()
        code = run([str(a) for a in argv])
        return Result(code, *capsys.readouterr())

    return call


@contextmanager
def soon(seconds: float = SECONDS) -> Iterator[None]:
    start = time.perf_counter()
    yield
    assert time.perf_counter() - start < seconds


def node(kind: str, inputs: str, outputs: str, domain: str = "", **attrs: Any) -> onnx.NodeProto:
    return helper.make_node(kind, inputs.split(","), outputs.split(","), domain=domain, **attrs)


def model(
    nodes: list[onnx.NodeProto],
    *weights: TensorProto,
    shape: tuple[int | str, ...] = (1, 4),
    element: int = F,
    functions: list[onnx.FunctionProto] | None = None,
) -> bytes:
    """Input "x", output "y"."""
    x, y = helper.make_tensor_value_info("x", element, shape), helper.make_tensor_value_info("y", F, None)
    graph = helper.make_graph(nodes, "attack", [x], [y], list(weights))
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("f", 1)]
    made = helper.make_model(graph, opset_imports=opsets, ir_version=10, functions=functions or [])
    return bytes(made.SerializeToString())


def constant(name: str, value: Any) -> TensorProto:
    return numpy_helper.from_array(np.asarray(value), name)


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
        with pytest.raises(DimTooLarge):  # one term alone, of 2 ** 30 factors
            _repeated(lambda d: d * d, a, 30)
        with pytest.raises(DimTooLarge):
            _repeated(lambda d: floordiv(d, d + 1), a, 60)
        with pytest.raises(DimTooLarge, match="128 bits"):
            _repeated(lambda d: d * (1 << 62), a, 3)
        deep = _repeated(lambda d: dim_max(d + b, c) + 1, a, 60)
        assert bounds(deep)[0] == 60
    (made,) = graph.of_kind("ConstantOfShape")
    assert made.outputs[0].type.rank == 1  # of a size of its own: the value was not followed
    monkeypatch.setenv("OPTDNN_MAX_DIM_PARTS", "100000")
    assert _repeated(lambda d: d * d, a + b + c, 4) is not None


def _repeated(step: Callable[[Any], Any], value: Any, times: int) -> Any:
    for _ in range(times):
        value = step(value)
    return value


@pytest.mark.parametrize(("kind", "length"), sweep([("Neg", 2200), ("Mul", 1000)], ("Neg", 2200)))
def test_long_chains_of_one_operator(kind: str, length: int) -> None:
    """They took a minute: patterns looked at all ways to read eight operators as one product, and rewrites named all before."""

    def seconds(n: int) -> float:
        nodes = [node(kind, f"v{k}" if kind == "Neg" else f"v{k},v{k}", f"v{k + 1}") for k in range(n)]
        for name in range(len(nodes[0].input)):
            nodes[0].input[name] = "x"
        nodes[-1].output[0] = "y"
        start = time.process_time()
        passes = optdnn.build(model(nodes), target="reference").meta["passes"]
        assert max((len(f["nodes"]) for p in passes for f in p["fired"]), default=0) <= NAMED
        return time.process_time() - start

    seconds(2)
    assert seconds(length) < SECONDS / 2


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
    """An engine, as its author writes it: a Loop of 10 ** 6 trips in one of as many, for ONNX Runtime."""
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


def test_many_sizes_that_are_not_known() -> None:
    """Names of new symbols are not looked for from the first one on each time."""
    ports = [helper.make_tensor_value_info("x", F, ["n"]), helper.make_tensor_value_info("c", BOOL, ["n"])]
    nodes = [node("Compress", "x,c", f"y{k}") for k in range(6000)]
    graph = helper.make_graph(nodes, "g", ports, [helper.make_tensor_value_info("y0", F, None)])
    opsets = [helper.make_opsetid("", 21)]
    start = time.process_time()
    import_model(helper.make_model(graph, opset_imports=opsets, ir_version=10))
    assert time.process_time() - start < SECONDS


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


# ---------------------------------------------------------------- much memory


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
    with soon(), pytest.raises(RunError, match="the memory of a run does not fit in memory"):
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
    """Why constant nodes were not folded."""
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


# ---------------------------------------------------------------- nesting, names, numbers


def nested_attributes(deep: int) -> Program:
    """An engine whose one step has attributes of lists in lists."""
    value: Any = 1
    for _ in range(deep):
        value = [value]
    x, y = (Buffer(n, FP32, (1, 4)) for n in "xy")
    spec = [TensorSpec(b.name, b.dtype, (1, 4)) for b in (x, y)]
    step = Step("reference", {"kind": "Relu", "attrs": {"a": value}}, (0,), (1,))
    return Program("reference", "fp32", ((spec[0], 0),), ((spec[1], 1),), (x, y), (step,), [])


def test_what_is_nested_has_a_depth(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(nested_attributes(400), tmp_path / "e")
    with pytest.raises(EngineError, match=r"nested too deeply\n  hint: .*OPTDNN_MAX_HEADER_NESTING=N"):
        optdnn.load(path)
    monkeypatch.setenv("OPTDNN_MAX_HEADER_NESTING", "410")
    optdnn.load(path)


def nested_branches(deep: int) -> ModelProto:
    """If in If; a ModelProto in memory, since protobuf's parser has a limit of its own."""
    out = helper.make_tensor_value_info("o", F, None)
    other = helper.make_graph([node("Identity", "x", "o")], "other", [], [out])
    proto = onnx.load_from_string(model([node("If", "c", "y")], constant("c", np.array(True))))
    at = proto.graph.node[0]
    for _ in range(deep):
        at.attribute.append(AttributeProto(name="else_branch", type=AttributeProto.GRAPH, g=other))
        at.attribute.append(AttributeProto(name="then_branch", type=AttributeProto.GRAPH))
        inner = at.attribute[-1].g
        inner.name, at_output = "then", "o"
        inner.output.append(out)
        inner.node.append(helper.make_node("If", ["c"], [at_output]))
        at = inner.node[0]
    at.op_type, at.input[0] = "Identity", "x"
    return proto


def test_subgraphs_are_nested_to_a_depth() -> None:
    import_model(nested_branches(limits.SUBGRAPH_NESTING.default))
    for deep in (limits.SUBGRAPH_NESTING.default + 1, 3000):
        with soon(), pytest.raises(ModelError, match=r"subgraphs are more than 16 deep|nested too deeply"):
            import_model(nested_branches(deep))


def test_threads_and_precisions_that_are_none(tmp_path: Path) -> None:
    network = model([node("Relu", "x", "y")])
    for threads in (20_000, 10**30):
        with pytest.raises(UsageError, match="threads must be at most 1024"):
            optdnn.build(network, target="cpu", threads=threads)
    program = program_of("onnxruntime", ModelProto.FromString(network), [("x", F, (1, 4))], [("y", F, (1, 4))],
                         params={"precision": "fp12"})  # fmt: skip
    with pytest.raises(EngineError, match="precision 'fp12' is none of a CPU library"):
        optdnn.load(write(program, tmp_path / "e"))
    for threads in (20_000, 10**30):
        with pytest.raises(UsageError, match="threads must be 1 to 1024"):
            optdnn.load(tmp_path / "e", threads=threads)


ODD = ["", " ", "?", "-1", "7", "1..3", "a*", "N+", "a,b", "N//0", "9" * 30, "é\n", "x" * 3000, "N", "floor(N/0)", "{}"]


@pytest.mark.parametrize("library", ["openvino", "onnxruntime"])
def test_odd_names_of_dimensions(library: str, tmp_path: Path) -> None:
    """One network has them all, each on an axis of its own input."""
    pytest.importorskip(library)
    ports = [helper.make_tensor_value_info(f"x{k}", F, [name, 2]) for k, name in enumerate(ODD)]
    ends = [helper.make_tensor_value_info(f"y{k}", F, None) for k in range(len(ODD))]
    graph = helper.make_graph([node("Relu", f"x{k}", f"y{k}") for k in range(len(ODD))], "g", ports, ends)
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    optdnn.build(proto, target="cpu", tactics=library, threads=1).save(tmp_path / "e")
    found = optdnn.load(tmp_path / "e").run({f"x{k}": np.ones((3, 2), np.float32) for k in range(len(ODD))})
    assert all((a == 1).all() and a.shape == (3, 2) for a in found.values())


def test_a_limit_that_is_no_number(monkeypatch: pytest.MonkeyPatch) -> None:
    for text in ("many", "-1", "", "1e9", "9" * 20):
        monkeypatch.setenv("OPTDNN_MAX_NODES", text)
        with pytest.raises(UsageError, match="OPTDNN_MAX_NODES must be a whole number"):
            import_model(model([node("Relu", "x", "y")]))
    monkeypatch.setenv("OPTDNN_MAX_NODES", "1")
    import_model(model([node("Relu", "x", "y")]))
    with pytest.raises(ModelError, match=r"has more than 1 nodes\n  hint: .*OPTDNN_MAX_NODES=N"):
        import_model(model([node("Relu", "x", "z"), node("Relu", "z", "y")]))


# ---------------------------------------------------------------- the terminal


COMMANDS = "\x1b[2J \x9b31m \u202eevil\u2066 \x85 [/red] \u200f"
"""Controls of both sets, marks that turn the direction of text, and rich's markup."""


@pytest.fixture(scope="module")
def named(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model and an engine whose names of nodes and tensors command terminals."""
    folder = tmp_path_factory.mktemp("named")
    proto = convnet(names={"conv1": f"conv {COMMANDS}"})
    x = proto.graph.input[0].name
    for n in proto.graph.node:
        for k, name in enumerate(n.input):
            n.input[k] = f"x {COMMANDS}" if name == x else name
    proto.graph.input[0].name = f"x {COMMANDS}"
    proto.graph.name = COMMANDS
    (folder / "m.onnx").write_bytes(proto.SerializeToString())
    optdnn.build(folder / "m.onnx", target="reference").save(folder / "m.engine")
    return folder


def test_no_name_commands_a_terminal(named: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    for argv in (
        ["check", named / "m.onnx"],
        ["inspect", named / "m.onnx", "--nodes"],
        ["inspect", named / "m.engine"],
        ["explain", named / "m.engine", "conv*"],
        ["run", named / "m.engine"],
    ):
        for form in ([], ["--json"]):
            code, out, err = cli(*argv, *form)
            assert code == 0, err
            assert all(c == "\n" or c.isprintable() for c in out + err), argv
            if form:
                assert COMMANDS in json.dumps(json.loads(out), ensure_ascii=False).replace("\\u001b", "\x1b")


def test_a_status_line_is_no_markup(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(common.stderr, "_force_terminal", True)
    monkeypatch.setattr(common.stderr, "quiet", False)
    with common.progress(f"build {COMMANDS}") as say:
        say(COMMANDS)


# ---------------------------------------------------------------- what a build wrote into an engine


@pytest.mark.parametrize("target", ["simulate", "cpu"])
def test_malformed_accounts_are_told_or_refused(target: str, tmp_path: Path, cli: Cli) -> None:
    """Seeded changes of ``meta``: no command meets an error that is not ours."""
    if target == "cpu":
        pytest.importorskip("onnxruntime")
    built = optdnn.build(convnet(), target=target, precision="fp16" if target == "simulate" else "fp32").program
    rng = np.random.default_rng(0)
    codes = set()
    for _ in range(25):
        meta = json.loads(json.dumps(built.meta))
        every = [p for p in places(meta) if p and len(p) < 6]
        for at in [every[int(k)] for k in rng.integers(0, len(every), 2)]:
            mutate(meta, at, rng)
        changed, built.meta = built.meta, meta
        path = write(built, tmp_path / "e")
        built.meta = changed
        for argv in (["inspect", path], ["explain", path, "*"], ["inspect", path, "--json"]):
            code, _, err = cli(*argv)
            codes.add(code)
            assert code in (0, EngineError.exit_code), err
    assert codes == {0, EngineError.exit_code}


# ---------------------------------------------------------------- engines with right digests


@pytest.mark.parametrize("target", ["simulate", "reference", "onnxruntime"])
def test_mutated_engines_run_or_are_refused(target: str, tmp_path: Path) -> None:
    """Seeded changes of everything but the account: a typed error of ours, or a run that ends."""
    library = None if target in ("simulate", "reference") else pytest.importorskip(target)
    options: Any = {"target": target} if library is None else {"target": "cpu", "tactics": target, "threads": 1}
    path = tmp_path / "e"
    optdnn.build(convnet(), **options).save(path)
    data, rng = path.read_bytes(), np.random.default_rng(7)
    met: set[str] = set()
    for _ in range(100):

        def change(plain: Any) -> None:
            every = [p for p in places(plain) if p and p[0] != "meta"]
            for k in rng.integers(0, len(every), int(rng.integers(1, 3))):
                mutate(plain, every[int(k)], rng)

        path.write_bytes(changed_header(data, change))
        with soon():
            try:
                engine = optdnn.load(path, simulate=target == "simulate")
                engine.run(
                    {s.name: np.ones([d if isinstance(d, int) else 2 for d in s.shape], s.dtype) for s in engine.inputs}
                )
                met.add("none")
            except optdnn.OptdnnError as error:
                met.add(type(error).__name__)
    assert "InternalError" not in met
    assert {"none", "EngineError"} <= met


def test_an_engine_that_contradicts_itself_is_no_defect(tmp_path: Path) -> None:
    """A convolution that computes fewer rows than its result has."""
    path = tmp_path / "e"
    optdnn.build(convnet(), target="simulate").save(path)

    def change(plain: Any) -> None:
        plain["steps"][0]["params"]["op"]["attrs"]["dilations"][0] = 2

    path.write_bytes(changed_header(path.read_bytes(), change))
    engine = optdnn.load(path, simulate=True)
    with pytest.raises(RunError, match="the engine contradicts itself: a step computes"):
        engine(np.ones(engine.inputs[0].shape, np.float32))


# ---------------------------------------------------------------- files


def test_a_mapped_engine_that_is_changed_in_place_does_not_run_on(tmp_path: Path) -> None:
    path = tmp_path / "e"
    optdnn.build(convnet(), target="reference").save(path)
    engine, copied = optdnn.load(path), optdnn.load(path, mmap=False)
    feed = np.ones(engine.inputs[0].shape, np.float32)
    before = engine(feed)
    path.touch()
    assert np.array_equal(engine(feed), before)  # touched, not changed
    data = bytearray(path.read_bytes())
    with path.open("r+b") as file:
        file.seek(len(data) - 1)
        file.write(bytes([data[-1] ^ 1]))
    for call in (engine, engine.context().run):
        with pytest.raises(RunError, match="was changed while its engine was in use"):
            call(feed)
    assert np.array_equal(copied(feed), before)
    with pytest.raises(EngineError, match="checksum differs"):
        read(path)
