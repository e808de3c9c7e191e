"""Plans for values of inputs that are only sizes: made when first seen, bounded, with the engine's own program for all others."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
import pytest

import optdnn
from optdnn import loading
from optdnn.config import BuildOptions
from optdnn.errors import EngineError, InputError, RunError
from optdnn.runtime.file.format import decode, encode
from optdnn.runtime.file.validate import validate
from optdnn.runtime.measuring.bench import profile
from optdnn.runtime.plans import by_value
from optdnn.runtime.program import ByValue, Program
from optdnn.shapes.plans import plain_options

RESHAPE = """
<ir_version: 10, opset_import: ["" : 21]>
g (float[2, 6] x, int64[2] sizes) => (float[m, n] y) <float[1] one = {1}> {
    more = Add(x, one)
    y = Reshape(more, sizes)
}
"""
X = np.arange(12, dtype=np.float32).reshape(2, 6)


def model(text: str = RESHAPE) -> onnx.ModelProto:
    return onnx.parser.parse_model(text)


def feeds(*sizes: int) -> dict[str, Any]:
    return {"x": X, "sizes": np.array(sizes, np.int64)}


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The values for which plans were made."""
    seen: list[Any] = []
    real = loading.plan_on_demand

    def counted(program: Program, shapes: Any, compiled: bool, values: Any) -> Program:
        seen.append(tuple(values["sizes"]))
        return real(program, shapes, compiled, values)

    monkeypatch.setattr(loading, "plan_on_demand", counted)
    return seen


@pytest.fixture
def engine(tmp_path: Path, made: list[Any]) -> optdnn.Engine:
    optdnn.build(model(), target="simulate").save(tmp_path / "e")
    return optdnn.load(tmp_path / "e")


def on_host(program: Program) -> list[str]:
    return [o["kind"] for o in program.meta["host"]["operators"]]


def test_a_plan_for_a_value_leaves_nothing_to_the_cpu(engine: optdnn.Engine, made: list[Any]) -> None:
    assert [str(s) for s in engine.inputs] == ["x: fp32[2, 6]", "sizes: int64[2]"]
    assert on_host(engine.program) == ["Reshape"]
    assert on_host(engine.program_for(feeds(3, 4))) == []
    context = engine.context()
    for _ in range(2):
        np.testing.assert_array_equal(context.run(feeds(3, 4))["y"], (X + 1).reshape(3, 4))
    assert made == [(3, 4)]
    blobs = {id(a) for a in engine.program.blobs}
    plan = engine.program_for(feeds(3, 4))
    assert blobs <= {id(a) for a in plan.blobs}  # equal blobs are one array


def test_values_after_the_first_get_a_plan_when_they_are_repeated(engine: optdnn.Engine, made: list[Any]) -> None:
    for sizes in ((3, 4), (4, 3), (6, 2), (4, 3), (4, 3)):
        np.testing.assert_array_equal(engine.run(feeds(*sizes))["y"], (X + 1).reshape(sizes))
    assert made == [(3, 4), (4, 3)]


def test_plans_by_value_are_bounded(engine: optdnn.Engine, made: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(by_value, "PLANS", 2)
    monkeypatch.setattr(by_value, "SEEN", 1)
    for sizes in ((3, 4), (4, 3), (6, 2), (4, 3), (6, 2), (6, 2), (1, 12), (1, 12)):
        np.testing.assert_array_equal(engine.run(feeds(*sizes))["y"], (X + 1).reshape(sizes))
    assert made == [(3, 4), (6, 2)]  # (4, 3) was forgotten, and then there were two plans


def test_a_value_without_a_plan_is_refused_by_the_operator(engine: optdnn.Engine) -> None:
    for _ in range(3):
        with pytest.raises(RunError, match="Reshape"):
            engine.run(feeds(5, 5))
    runner: Any = engine._runner
    assert len(runner.refused) == 1
    assert not runner.plans
    assert "5" in next(iter(runner.refused.values()))
    with pytest.raises(InputError, match="'sizes' is int32; the engine takes int64"):
        engine.run({"x": X, "sizes": np.array([3, 4], np.int32)})
    with pytest.raises(InputError, match="'sizes' is missing"):
        engine.run({"x": X})


def test_without_the_compiler_the_own_program_runs(tmp_path: Path) -> None:
    optdnn.build(model(), target="simulate").save(tmp_path / "e")
    engine = optdnn.load(tmp_path / "e", planner=None)
    assert engine.program_for(feeds(3, 4)) is engine.program
    np.testing.assert_array_equal(engine.run(feeds(3, 4))["y"], (X + 1).reshape(3, 4))


def test_a_binding_follows_the_value(engine: optdnn.Engine) -> None:
    given = feeds(3, 4)
    bound = engine.context().bind(given)  # type: ignore[attr-defined]
    assert bound.run()["y"].shape == (3, 4)
    given["sizes"][:] = (2, 6)
    assert bound.run()["y"].shape == (2, 6)


def test_ranges_of_shapes_and_values(tmp_path: Path) -> None:
    text = RESHAPE.replace("float[2, 6] x", "float[b, 6] x")
    optdnn.build(model(text), target="simulate", shapes={"x": "1..2..4x6"}).save(tmp_path / "e")
    engine = optdnn.load(tmp_path / "e")
    for n in (2, 3, 3):
        x = np.ones((n, 6), np.float32)
        given = {"x": x, "sizes": np.array([6, n], np.int64)}
        assert engine.run(given)["y"].shape == (6, n)
    assert on_host(engine.program_for(given)) == []
    with pytest.raises(InputError, match="b is 5 on axis 0"):
        engine.run({"x": np.ones((5, 6), np.float32), "sizes": np.array([6, 5], np.int64)})


def test_branches_and_loops_are_planned_by_value() -> None:
    text = """
    <ir_version: 10, opset_import: ["" : 21]>
    g (float[2, 3] x, bool c, int64 trips) => (float[2, 3] y)
    {
        a = If(c) <then_branch = t () => (float[2, 3] u) {u = Relu(x)}, else_branch = e () => (float[2, 3] v) {v = Neg(x)}>
        y = Loop(trips, , a) <body = b (int64 i, bool going, float[2, 3] s) => (bool on, float[2, 3] r)
            {on = Identity(going) r = Add(s, s)}>
    }
    """
    engine = optdnn.build(model(text), target="simulate")
    x = np.array([[1, -2, 3], [-4, 5, -6]], np.float32)
    assert {"If", "Loop"} <= set(on_host(engine.program))
    for c, trips in ((True, 2), (False, 3), (False, 3)):
        given = {"x": x, "c": np.array(c), "trips": np.array(trips)}
        want = (np.maximum(x, 0) if c else -x) * 2**trips
        np.testing.assert_array_equal(engine.run(given)["y"], want)
    assert on_host(engine.program_for(given)) == []


def test_networks_without_steps_on_the_cpu_have_one_program() -> None:
    text = RESHAPE.replace("int64[2] sizes", "float[2, 6] z").replace("Reshape(more, sizes)", "Mul(more, z)")
    assert optdnn.build(model(text.replace("[m, n]", "[2, 6]")), target="simulate").program.by_value is None


def test_the_file_holds_plans_by_value_and_is_checked() -> None:
    program = optdnn.build(model(), target="simulate").program
    again = decode(memoryview(b"".join(encode(program))))
    assert again.by_value == program.by_value
    assert again.by_value is not None
    assert again.by_value.inputs == ("sizes",)
    source = again.by_value.source
    for broken, why in (
        (ByValue(("x", "nothing"), source), r"plans by the value of \['nothing'\]"),
        (ByValue((), source), "plans by the value of"),
        (ByValue(("sizes",), replace(source, model=99)), "names a missing blob"),
    ):
        program.by_value = broken
        with pytest.raises(EngineError, match=why):
            validate(program)


def test_options_that_hold_arrays_are_not_kept() -> None:
    """Calibration data can neither be compared with a default nor be written to an engine."""
    assert plain_options(BuildOptions(target="simulate", calib=np.zeros((2, 3), np.float32))) is None
    assert plain_options(BuildOptions(target="simulate", precision="fp16")) == {
        "target": "simulate",
        "precision": "fp16",
    }


def test_steps_are_timed_in_the_plan_that_runs(engine: optdnn.Engine) -> None:
    given = feeds(3, 4)
    plan = engine.program_for(given)
    assert len(plan.steps) != len(engine.program.steps)
    assert [s.src for s in profile(engine, given, warmup=1, iterations=1)] == [s.src for s in plan.steps]
    context: Any = engine.context()
    plan_context, inputs = context.innermost(given)
    assert list(inputs) == ["x"]
    assert plan_context.run({"x": X})["y"].shape == (3, 4)
