"""Files that are hostile by their form: nesting, names, text with control codes for a terminal, and engines that contradict
themselves.

Every error is one of optdnn's. SECURITY.md names these tests.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import AttributeProto, ModelProto, helper
from support.attacks import F, constant, model, node, soon
from support.cli import Cli
from support.hostile import changed_header, mutate, places, program_of, write
from support.onnxnet import convnet

import optdnn
from optdnn import limits
from optdnn.cli import common
from optdnn.errors import EngineError, ModelError, RunError, UsageError
from optdnn.importers.onnx import import_model
from optdnn.runtime.file.format import read
from optdnn.runtime.program import Buffer, Program, Step
from optdnn.types import FP32, TensorSpec

# ---------------------------------------------------------------- nesting, names, numbers


def nested_attributes(deep: int) -> Program:
    """An engine whose only step has attributes of nested lists."""
    value: Any = 1
    for _ in range(deep):
        value = [value]
    x, y = (Buffer(n, FP32, (1, 4)) for n in "xy")
    spec = [TensorSpec(b.name, b.dtype, (1, 4)) for b in (x, y)]
    step = Step("reference", {"kind": "Relu", "attrs": {"a": value}}, (0,), (1,))
    return Program("reference", "fp32", ((spec[0], 0),), ((spec[1], 1),), (x, y), (step,), [])


def test_nested_parts_have_a_depth(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(nested_attributes(400), tmp_path / "e")
    with pytest.raises(EngineError, match=r"nested too deeply\n  hint: .*OPTDNN_MAX_HEADER_NESTING=N"):
        optdnn.load(path)
    monkeypatch.setenv("OPTDNN_MAX_HEADER_NESTING", "410")
    optdnn.load(path)


def nested_branches(deep: int) -> ModelProto:
    """If nested in If; a ModelProto in memory, since protobuf's parser has its own limit."""
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
    with pytest.raises(EngineError, match="precision 'fp12' is not offered by a CPU library"):
        optdnn.load(write(program, tmp_path / "e"))
    for threads in (20_000, 10**30):
        with pytest.raises(UsageError, match="threads must be 1 to 1024"):
            optdnn.load(tmp_path / "e", threads=threads)


ODD = ["", " ", "?", "-1", "7", "1..3", "a*", "N+", "a,b", "N//0", "9" * 30, "é\n", "x" * 3000, "N", "floor(N/0)", "{}"]


@pytest.mark.parametrize("library", ["openvino", "onnxruntime"])
def test_odd_names_of_dimensions(library: str, tmp_path: Path) -> None:
    """One network with all of these names, each for an axis of a separate input."""
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
"""Control codes of both sets, marks that change the direction of text, and rich's markup."""


@pytest.fixture(scope="module")
def named(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model and an engine. Names of nodes and tensors have control codes for terminals."""
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


@pytest.mark.slow
@pytest.mark.parametrize("target", ["simulate", "cpu"])
def test_malformed_accounts_are_reported_or_refused(target: str, tmp_path: Path, cli: Cli) -> None:
    """Seeded changes of ``meta``: every error of a command is one of ours."""
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
    """Seeded changes outside of ``meta``: a typed error of ours, or a run that ends."""
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
    assert np.array_equal(engine(feed), before)  # touched, but not changed
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
