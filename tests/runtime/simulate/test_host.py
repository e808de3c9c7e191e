"""Steps on the CPU in a GPU's program: right values, explicit copies, few cuts, no value copied back and forth; strict forbids
such steps."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx.parser
import pytest
from support import fallback
from support.fallback import I64, NETWORKS, F, feeds, model, node

import optdnn
from optdnn.errors import EngineError, InputError, RunError, UnsupportedError, UsageError
from optdnn.report.markdown import _build
from optdnn.runtime.engine import Engine
from optdnn.runtime.program import Program, Step
from optdnn.runtime.simulate.runner import SimulateContext, SimulateRunner
from optdnn.runtime.steps.host import host_buffers
from optdnn.types import is_float


def operators(program: Program) -> list[str]:
    """Host steps by kind, copies by direction, kernels as "cuda"."""
    return [str(s.params.get("kind") or s.params.get("to") or "cuda") for s in program.steps]


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize("name", NETWORKS)
def test_agrees_with_the_reference_on_a_poisoned_arena(name: str, precision: str) -> None:
    made = NETWORKS[name]()
    engine = optdnn.build(made, target="simulate", precision=precision)
    reference = optdnn.build(made, target="reference")
    assert engine.meta["host"]["operators"], "nothing runs on the CPU: the test has lost its object"
    context = SimulateContext(SimulateRunner(engine.program), poison=True)
    results = []
    for seed in (0, 1):
        got, want = context.run(feeds(made, seed)), reference.run(feeds(made, seed))
        assert list(got) == list(want)
        results.append(got)
        for key, w in want.items():
            if precision == "fp16" and w.shape != got[key].shape:
                continue  # rounding may change the selection, but nothing else
            assert got[key].dtype == w.dtype
            assert got[key].shape == w.shape
            if not is_float(w.dtype):
                np.testing.assert_array_equal(got[key], w)
                continue
            bound = {"fp32": 1e-5, "fp16": 1e-2}[precision] * float(np.abs(w).max(initial=1e-30))
            np.testing.assert_allclose(got[key], w, rtol=0, atol=bound)
    first, second = (next(iter(r.values())) for r in results)
    assert first.shape != second.shape or np.abs(first - second).max() > 0.05, "the result hardly depends on the input"


def test_three_operators_are_three_steps_and_few_copies() -> None:
    engine = optdnn.build(fallback.three(), target="simulate")
    found = operators(engine.program)
    assert sorted(k for k in found if k not in ("cuda", "host", "device")) == ["Compress", "Det", "ReduceMax", "Unique"]
    assert found.count("host") == 1, "x's Relu goes to the CPU once, for both that read it"
    assert found.count("device") == 2  # the determinant and the maximum
    assert engine.meta["host"]["cuts"] == 2, "kernels, everything on the CPU, kernels"
    assert engine.meta["host"]["coverage"] == {"operators": 6, "device": 2, "host": 4}
    assert [c["bytes"] for c in engine.meta["host"]["copies"] if c["to"] == "host"] == [4 * 9 * 4]
    inputs = {s.name: i for s, i in engine.program.inputs}
    on_host = host_buffers(engine.program)
    assert {n for n, i in inputs.items() if i in on_host} == {"square", "keep"}, "inputs that no kernel reads stay here"


def test_small_arithmetic_on_the_host_does_not_bounce() -> None:
    nodes = [
        node("Unique", "x", "u"),
        node("Shape", "u", "n"),
        node("Cast", "n", "f", to=F),
        node("Mul", "f f", "g"),
        node("Add", "g one", "h"),
        node("Squeeze", "h", "k"),
        node("MatMul", "x w", "m"),
        node("Mul", "m k", "y"),
    ]
    rng = np.random.default_rng(0)
    made = model(
        nodes, [("x", F, [8, 16])], [("y", F, [8, 4])], one=np.float32(1), w=rng.standard_normal((16, 4)) * 0.2
    )
    found = operators(optdnn.build(made, target="simulate").program)
    assert found.count("host") == 1, "x alone, which a kernel reads as well"
    assert found.count("device") == 1, "the factor alone"
    assert found[-1] == "cuda"


def test_small_work_between_host_steps_stays_there() -> None:
    nodes = [node("Det", "x", "d"), node("Exp", "d", "e"), node("Softmax", "e", "f"), node("Unique", "f", "u"),
             node("MatMul", "x w", "y")]  # fmt: skip
    made = model(nodes, [("x", F, [5, 4, 4]), ("w", F, [4, 6])], [("u", F, ["n"]), ("y", F, [5, 4, 6])])
    engine = optdnn.build(made, target="simulate")
    assert operators(engine.program).count("device") == 0
    assert [(o["kind"], o["forced"]) for o in engine.meta["host"]["operators"]] == [
        ("Det", True), ("Exp", False), ("Softmax", False), ("Unique", True),
    ]  # fmt: skip


def test_large_work_between_host_steps_goes_to_the_gpu() -> None:
    nodes = [node("Det", "x", "d"), node("MatMul", "wide d", "p"), node("Relu", "p", "q"), node("Det", "q", "y")]
    made = model(nodes, [("x", F, [64, 64, 4, 4]), ("wide", F, [64, 64, 64])], [("y", F, [64])])
    found = operators(optdnn.build(made, target="simulate").program)
    assert found.count("device") == 1
    assert found.count("host") == 1


def test_results_may_go_to_the_callers_arrays() -> None:
    made = fallback.sizes_from_data()
    engine, given = optdnn.build(made, target="simulate"), feeds(made)
    want = engine.run(given)
    out = {k: np.empty_like(v) for k, v in want.items()}
    got = engine.context().run(given, out=out)
    for k, v in want.items():
        assert got[k] is out[k]
        np.testing.assert_array_equal(got[k], v)
    with pytest.raises(InputError, match=r"the buffer for output 'rows' has shape \[99, 2\], the result"):
        engine.context().run(given, out={"rows": np.empty((99, 2), np.int64)})


def test_results_are_the_callers_to_keep() -> None:
    made = model(
        [node("Unique", "x", "u"), node("Identity", "u", "v")], [("x", F, [6])], [("v", F, ["n"]), ("u", F, ["n"])]
    )
    engine = optdnn.build(made, target="simulate")
    x = np.arange(6, dtype=np.float32)
    first = engine.run({"x": x})
    first["v"][:] = -1
    np.testing.assert_array_equal(first["u"], x)
    np.testing.assert_array_equal(engine.run({"x": x})["v"], x)


def test_shapes_within_ranges() -> None:
    nodes = [
        node("Relu", "x", "r"),
        node("NonZero", "r", "at"),
        node("ReduceSum", "r", "t", keepdims=0),
        node("Div", "r t", "y"),
    ]
    made = model(nodes, [("x", F, ["N", 7])], [("y", F, ["N", 7]), ("at", I64, [2, "n"])])
    engine, reference = (
        optdnn.build(made, target="simulate", shapes={"x": "1..4..8x7"}),
        optdnn.build(made, target="reference"),
    )
    for n in (4, 2, 8):
        x = np.random.default_rng(n).standard_normal((n, 7)).astype(np.float32)
        got, want = engine.run({"x": x}), reference.run({"x": x})
        np.testing.assert_allclose(got["y"], want["y"], rtol=1e-6)
        np.testing.assert_array_equal(got["at"], want["at"])


def test_detections_within_ranges() -> None:
    """The number of boxes is a size of the input. The number of kept boxes depends on data."""
    made = onnx.parser.parse_model(
        """<ir_version: 8, opset_import: ["": 17]>
        g (float[1, n, 4] boxes, float[1, 2, n] scores) => (int64[k, 3] kept, float[k, 4] y)
        <int64 most = {4}, float overlap = {0.3}, float least = {0.4}, int64 column = {2}, int64[1] batch = {0}> {
          sure = Sigmoid(scores)  kept = NonMaxSuppression(boxes, sure, most, overlap, least)
          at = Gather<axis = 1>(kept, column)  flat = Squeeze(boxes, batch)  chosen = Gather(flat, at)  y = Neg(chosen)
        }"""
    )
    shapes = {"boxes": "1x1..16..40x4", "scores": "1x2x1..16..40"}
    engine, reference = optdnn.build(made, target="simulate", shapes=shapes), optdnn.build(made, target="reference")
    seen = set()
    for n in (16, 40, 1, 5):
        rng = np.random.default_rng(n)
        low = rng.random((1, n, 2), np.float32)
        boxes = np.concatenate([low, low + rng.random((1, n, 2), np.float32)], axis=2)
        feeds = {"boxes": boxes, "scores": rng.standard_normal((1, 2, n)).astype(np.float32)}
        got, want = engine.run(feeds), reference.run(feeds)
        np.testing.assert_array_equal(got["kept"], want["kept"])
        np.testing.assert_allclose(got["y"], want["y"], rtol=1e-6)
        seen.add(len(want["kept"]))
    assert len(seen) > 2


def test_engine_files_hold_host_steps(tmp_path: Path) -> None:
    for name in ("detector", "loop"):
        made = NETWORKS[name]()
        engine = optdnn.build(made, target="cuda:sm_90a", no_cubins=True, precision="fp16")
        engine.save(tmp_path / "e.engine")
        again = optdnn.load(tmp_path / "e.engine", simulate=True)
        assert [dict(f) for f in again.facts if f["executor"] == "host"]
        want = Engine(engine.program, options=optdnn.runtime.steps.executor.LoadOptions(simulate=True)).run(feeds(made))
        for k, v in again.run(feeds(made)).items():  # a loaded engine may have a plan for the number of iterations
            np.testing.assert_allclose(v, want[k], atol=2e-3 * np.abs(want[k]).max())


def test_faults_on_the_host_name_the_node() -> None:
    made = model(
        [node("Unique", "x", "u"), node("Gather", "u at", "y")], [("x", F, [6]), ("at", I64, [1])], [("y", F, [1])]
    )
    engine = optdnn.build(made, target="simulate")
    with pytest.raises(RunError, match=r"y: Gather of .*"):
        engine.run({"x": np.ones(6, np.float32), "at": np.array([5], np.int64)})


def test_profile_times_every_step() -> None:
    made = fallback.three()
    engine = optdnn.build(made, target="simulate")
    _, times = engine.context().profile(feeds(made))
    assert len(times) == len(engine.program.steps)
    assert min(times) > 0


def test_reports_show_what_runs_on_the_cpu() -> None:
    engine = optdnn.build(fallback.three(), target="simulate")
    assert engine.report is not None
    reported = engine.report["fallbacks"]["simulate"]
    assert {"operator": "Det", "node": "det", "reason": "there is no kernel for Det"} in reported
    text = "\n".join(_build({"fallbacks": engine.report["fallbacks"]}))
    assert "| simulate | NumPy, on the CPU | Det | det | there is no kernel for Det |" in text
    assert _build({"fallbacks": {"simulate": []}}) == []


@pytest.mark.parametrize(
    ("kind", "because"),
    [
        ("ReduceL2", "it does not add squares of int32: they overflow"),
        ("ReduceLogSumExp", "it does not compute exponentials of int32"),
    ],
)
def test_reductions_of_integers_that_would_overflow(kind: str, because: str) -> None:
    made = model(
        [node(kind, "x", "y", keepdims=0)], [("x", onnx.TensorProto.INT32, [2])], [("y", onnx.TensorProto.INT32, [])]
    )
    engine = optdnn.build(made, target="simulate")
    (op,) = engine.meta["host"]["operators"]
    assert op["why"].startswith("no kernel runs it (")
    assert op["why"].endswith(f"reduce_parts: {because}; reduce: {because})")
    x = np.array([3 * 10**5, 4 * 10**5], np.int32)
    assert engine.run({"x": x})["y"] == (5 * 10**5 if kind == "ReduceL2" else 4 * 10**5)


# ---------------------------------------------------------------- refusals


@pytest.mark.parametrize("target", ["simulate", "cuda:sm_90a"])
def test_strict_names_every_operator(target: str) -> None:
    with pytest.raises(UnsupportedError) as caught:
        optdnn.build(fallback.three(), target=target, strict=True)
    assert {(n.node, n.op_type) for n in caught.value.nodes} == {
        ("det", "Det"), ("unique", "Unique"), ("kept", "Compress"), ("top", "ReduceMax"),
    }  # fmt: skip
    assert "there is no kernel for Det" in caught.value.message
    assert "the size of 'kept' depends on data" in caught.value.message


def test_strict_accepts_networks_that_the_gpu_runs_and_is_for_gpus() -> None:
    made = model([node("Relu", "x", "y")], [("x", F, [4])], [("y", F, [4])])
    engine = optdnn.build(made, target="simulate", strict=True)
    assert engine.meta["host"]["operators"] == []
    with pytest.raises(UsageError, match="strict is for GPUs, not for target 'cpu'"):
        optdnn.build(made, target="cpu", strict=True)


def _changed(change: Any, which: str) -> Program:
    """The program of the three operators, with a changed first step of an executor."""
    program = optdnn.build(fallback.three(), target="simulate").program
    k = next(k for k, s in enumerate(program.steps) if s.executor == which)
    steps = list(program.steps)
    steps[k] = change(steps[k], program)
    return replace(program, steps=tuple(steps))


def _params(**changes: Any) -> Any:
    return lambda step, program: replace(step, params={**step.params, **changes})


def _reads_the_gpu(step: Step, program: Program) -> Step:
    return replace(step, inputs=(next(s.outputs[0] for s in program.steps if s.executor == "cuda"),))


@pytest.mark.parametrize(
    ("which", "change", "message"),
    [
        ("copy", _params(to="moon"), "other params than a direction"),
        ("copy", _params(offset=-1), "begins at -1"),
        ("copy", _params(offset=10**6), "goes beyond its buffer"),
        ("copy", lambda s, p: replace(s, inputs=s.outputs), "does not go from one memory to the other"),
        ("host", _params(kind="Nothing"), "has no NumPy kernel for"),
        ("host", _params(more=1), "holds other params"),
        ("host", _reads_the_gpu, "reads the GPU's memory"),
    ],
)
def test_malformed_steps_are_refused(which: str, change: Any, message: str) -> None:
    with pytest.raises(EngineError, match=message):
        SimulateRunner(_changed(change, which))
