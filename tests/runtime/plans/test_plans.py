"""Engines for ranges of shapes on targets of fixed shapes: plans made by the build, plans made on demand, refusals."""

from __future__ import annotations

import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
import pytest
from support.onnxnet import convnet
from support.sweep import sweep

import optdnn
from optdnn import loading
from optdnn.config import BuildOptions
from optdnn.errors import EngineError, InputError, MissingDependency, RunError, ShapeError, UsageError
from optdnn.importers.onnx import import_model
from optdnn.importers.split_weights import put_together, split_weights
from optdnn.ir.evaluate import evaluate
from optdnn.lowering.choose import Selection, offers_of
from optdnn.lowering.cuda import lower_cuda
from optdnn.lowering.table import TACTICS
from optdnn.models import zoo
from optdnn.optimize import optimize
from optdnn.runtime.cuda.compile.nvrtc import KernelCache
from optdnn.runtime.cuda.gpu_facts import of_arch
from optdnn.runtime.file.format import decode, encode
from optdnn.runtime.file.validate import validate
from optdnn.runtime.plans import by_shape as plans
from optdnn.runtime.program import Program
from optdnn.shapes.plans import MEASURED, PLANNED
from optdnn.tuning.nearest import SCATTER

IMAGE = (3, 8, 8)
SECOND = "conv_sm90"
"""The tactic of the second convolution."""
RANGE = {"x": "1..2..5x3x8x8"}


def image(n: int, seed: int = 0) -> dict[str, Any]:
    return {"x": np.random.default_rng(seed + n).standard_normal((n, *IMAGE)).astype(np.float32)}


@pytest.fixture(scope="module")
def built() -> optdnn.Engine:
    return optdnn.build(convnet(batch="n"), target="simulate", shapes=RANGE)


@pytest.fixture(scope="module")
def oracle() -> optdnn.Engine:
    return optdnn.build(convnet(batch="n"), target="reference")


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The shapes for which plans were made on demand."""
    seen: list[Any] = []
    real = loading.plan_on_demand

    def counted(program: Program, shapes: Any, compiled: bool, values: Any) -> Program:
        seen.append(shapes["x"][0])
        return real(program, shapes, compiled, values)

    monkeypatch.setattr(loading, "plan_on_demand", counted)
    return seen


def test_plans_are_made_when_first_seen_and_kept(
    built: optdnn.Engine, oracle: optdnn.Engine, made: list[Any], tmp_path: Path
) -> None:
    built.save(tmp_path / "e")
    engine = optdnn.load(tmp_path / "e")
    assert [str(s) for s in (*engine.inputs, *engine.outputs)] == ["x: fp32[n, 3, 8, 8]", "y: fp32[n, 5]"]
    for n in (2, 5, 1, 5, 2, 1):
        got, want = engine.run(image(n))["y"], oracle.run(image(n))["y"]
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)
    assert made == [5, 1]  # the engine holds the plan for 2, the optimum
    own, made_later = engine.program, engine._runner._made  # type: ignore[attr-defined]
    assert len(own.blobs) == len(built.program.blobs)  # blobs of a later plan are freed with it
    for runner in made_later.values():
        held = {id(a) for a in runner.program.blobs}
        assert {id(a) for a in own.blobs} <= held  # equal blobs are one array


def test_sizes_outside_of_the_profiles_are_refused(built: optdnn.Engine, made: list[Any]) -> None:
    for n in (6, 0):
        with pytest.raises(InputError, match=rf"n is {n} on axis 0 of input 'x', outside of 1 to 5"):
            built.run(image(n))
    assert not made


def test_a_plan_equals_a_static_build(built: optdnn.Engine) -> None:
    static = optdnn.build(convnet(batch="n"), target="simulate", shapes={"x": (2, *IMAGE)})
    own = replace(built.program, dynamic=None, profiles=())
    assert [s.params for s in own.steps] == [s.params for s in static.program.steps]
    assert own.arena_bytes == static.program.arena_bytes
    dynamic = built.program.dynamic
    assert dynamic is not None
    assert dynamic.arena_bytes > own.arena_bytes  # the arena of the maximum


def test_precisions_are_reported_as_of_a_static_build() -> None:
    how: dict[str, Any] = {"target": "simulate", "precision": "fp16"}
    ranged = optdnn.build(convnet(batch="n"), shapes=RANGE, **how).program.meta["precision"]
    static = optdnn.build(convnet(batch="n"), shapes={"x": (2, *IMAGE)}, **how).program.meta["precision"]
    assert ranged == static
    assert sum(ranged["runs"].values()) > 3


@pytest.mark.parametrize(("name", "sizes"), sweep([("bert_base", (1, 40)), ("lstm", (1, 7))], ("lstm", (1, 7))))
def test_a_later_plan_equals_a_static_build(name: str, sizes: tuple[int, ...]) -> None:
    model = zoo.build(name, batch=1, sequence_length="seq", depth=0.1, width=0.5)
    ports = [(i.name, [d.dim_value or None for d in i.type.tensor_type.shape.dim]) for i in model.graph.input]

    def shapes(n: Any) -> dict[str, str]:
        return {port: "x".join(str(d or n) for d in dims) for port, dims in ports}

    how: dict[str, Any] = {"target": "simulate", "precision": "fp16"}
    program = optdnn.build(model, shapes=shapes("1..32..64"), nearest_tactics=False, **how).program
    for n in sizes:
        given = {port: tuple(d or n for d in dims) for port, dims in ports}
        plan = loading.plan_on_demand(program, given, False, {})
        static = optdnn.build(model, shapes=shapes(n), **how).program
        assert [s.params for s in plan.steps] == [s.params for s in static.steps]
        assert plan.arena_bytes == static.arena_bytes
        weights = {id(a) for a in program.blobs if a.nbytes > 1 << 14}
        used = [b.blob for b in plan.buffers if b.blob is not None and (b.nbytes or 0) > 1 << 14]
        assert sum(id(plan.blobs[i]) in weights for i in used) >= 0.9 * len(used) or n == 1, "shared"


def _offers(n: int) -> dict[str, float]:
    """The configurations of the second convolution at this size, with predicted seconds."""
    found: dict[str, float] = {}

    def visit(b: Any, op: Any, key: str) -> None:
        if "conv2" in op.src and op.kind == "Conv":
            (tactic,) = [t for t in TACTICS["Conv"] if t.name == SECOND]
            found.update({o.name: o.seconds for o in offers_of(b, op, tactic, Selection())[0] if o is not None})

    options = BuildOptions(target="simulate", precision="fp16", no_cubins=True)
    graph = import_model(convnet(batch="n", channels=64), shapes={"x": (n, *IMAGE)})
    optimize(graph, options, "simulate")
    lower_cuda(graph, options, of_arch("sm_90a"), {}, visit=visit)
    return found


@pytest.mark.slow
def test_later_plans_use_measurements_at_the_nearest_size() -> None:
    model, ranged = convnet(batch="n", channels=64), {"x": "1..2..64x3x8x8"}
    how: dict[str, Any] = {"target": "simulate", "precision": "fp16", "shapes": ranged}
    program = optdnn.build(model, **how, nearest_tactics=False).program
    program.meta[PLANNED] = {"by": MEASURED}
    assert loading.plan_on_demand(program, {"x": (4, *IMAGE)}, False, {}).meta[PLANNED] == {"by": "the cost model"}
    program = optdnn.build(model, **how).program
    assert program.meta[PLANNED] == {"by": "the cost model"}
    like = {"like": ["x: fp32[2, 3, 8, 8]"]}
    assert loading.plan_on_demand(program, {"x": (4, *IMAGE)}, False, {}).meta[PLANNED] == {
        "by": "the nearest plan",
        **like,
    }
    program.meta[PLANNED] = {"by": MEASURED}  # as after tuning, in which each configuration has won once
    (row,) = [r for r in program.meta["tactics"] if r["kind"] == "Conv" and "conv2" in r["nodes"]]
    assert row["tactic"] == SECOND
    offers = _offers(4)
    best, ranked = min(offers.values()), sorted(offers, key=lambda name: offers[name])
    near = [n for n in ranked[1:] if offers[n] <= best * (1 + SCATTER)][-1]
    far = ranked[-1]
    assert offers[far] > best * (1 + SCATTER)
    for winner, taken in ((near, near), (far, ranked[0]), ("no such tile", ranked[0])):
        row["config"] = winner
        plan = loading.plan_on_demand(program, {"x": (4, *IMAGE)}, False, {})
        assert plan.meta[PLANNED] == {"by": "the nearest tuned plan", **like}
        (own,) = [r for r in plan.meta["tactics"] if r["kind"] == "Conv" and "conv2" in r["nodes"]]
        assert own.get("config", own.get("variant")) == taken


@pytest.mark.nvrtc
def test_later_plans_take_the_kernels_of_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    program = optdnn.build(convnet(batch="n"), target="cuda:sm_90a", shapes=RANGE).program
    asked: list[Any] = []

    def get_many(self: KernelCache, recipes: Any, workers: int) -> list[bytes]:
        asked.extend(recipes)
        return [b"compiled"] * len(recipes)

    monkeypatch.setattr(KernelCache, "get_many", get_many)
    plan = loading.plan_on_demand(program, {"x": (2, *IMAGE)}, True, {})
    assert not asked
    assert plan.meta["nvrtc"] == program.meta["nvrtc"]
    assert plan.kernels
    for ours, theirs in zip(plan.kernels, program.kernels, strict=True):
        assert plan.blobs[ours.cubin or 0] is program.blobs[theirs.cubin or 0]
    first, *rest = program.kernels
    other = replace(program, kernels=(replace(first, source="0" * 64), *rest))  # from a template of another version
    plan = loading.plan_on_demand(other, {"x": (2, *IMAGE)}, True, {})
    assert len(asked) == 1
    assert plan.blobs[plan.kernels[0].cubin or 0].tobytes() == b"compiled"


def test_several_profiles_have_a_plan_each(oracle: optdnn.Engine) -> None:
    engine = optdnn.build(convnet(batch="n"), target="simulate", shapes=[{"x": "1x3x8x8"}, {"x": "3..4..4x3x8x8"}])
    dynamic = engine.program.dynamic
    assert dynamic is not None
    assert [p.inputs[0][0].shape[0] for p in (engine.program, *dynamic.plans)] == [1, 4]
    for n in (1, 3, 4):
        np.testing.assert_allclose(engine.run(image(n))["y"], oracle.run(image(n))["y"], rtol=1e-4, atol=1e-5)
    with pytest.raises(InputError, match=r"the profiles of the engine are n=1; n=3..4"):
        engine.run(image(2))


def test_without_the_compiler_only_the_given_plans_run(built: optdnn.Engine, tmp_path: Path) -> None:
    built.save(tmp_path / "e")
    engine = optdnn.load(tmp_path / "e", planner=None)
    assert engine.run(image(2))["y"].shape == (2, 5)
    with pytest.raises(RunError, match=r"no plan for x=3x3x8x8.*without the compiler\n.*--shape x=3x3x8x8"):
        engine.run(image(3))


def test_a_missing_compiler_is_named(built: optdnn.Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    built.save(tmp_path / "e")
    engine = optdnn.load(tmp_path / "e")
    monkeypatch.setitem(sys.modules, "optdnn.shapes.plans", None)
    with pytest.raises(MissingDependency, match="to make plans for shapes that the engine holds none for"):
        engine.run(image(3))


def test_contexts_and_plans_are_bounded(built: optdnn.Engine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(plans.Dispatching, "most", 2)
    monkeypatch.setattr(plans, "PLANS", 2)
    built.save(tmp_path / "e")
    engine = optdnn.load(tmp_path / "e")
    context: Any = engine.context()
    for n in (1, 3, 4, 5):
        context.run(image(n))
    assert [s[0][0] for s in context._contexts] == [4, 5]
    assert [s[0][0] for s in context._runner._made] == [4, 5]


def test_threads_plan_apart(built: optdnn.Engine, oracle: optdnn.Engine, made: list[Any], tmp_path: Path) -> None:
    built.save(tmp_path / "e")
    engine = optdnn.load(tmp_path / "e")
    wrong: list[Any] = []

    def work(seed: int) -> None:
        for n in (3, 4, 2, 5):
            got, want = engine.run(image(n, seed))["y"], oracle.run(image(n, seed))["y"]
            if not np.allclose(got, want, rtol=1e-4, atol=1e-5):
                wrong.append((n, seed))

    threads = [threading.Thread(target=work, args=(10 * k,)) for k in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong
    assert sorted(made) == [3, 4, 5]  # once each, by any of the threads


def test_out_buffers_and_profile(built: optdnn.Engine) -> None:
    context: Any = built.context()
    out = np.empty((4, 5), np.float32)
    results = context.run(image(4), out={"y": out})
    assert results["y"] is out
    _, times = context.profile(image(4))
    assert len(times) == len(built.program.steps)
    x = image(4)["x"].copy()
    bound = context.bind({"x": x}, {"y": out})
    want = built.run(image(4, 1))["y"]
    x[:] = image(4, 1)["x"]
    np.testing.assert_array_equal(bound.run()["y"], want)
    np.testing.assert_array_equal(out, want)


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_padding_that_follows_from_sizes_is_of_each_plan(precision: str) -> None:
    """A first layer as TensorFlow has it. Its kernels read explicit pads."""
    model = onnx.parser.parse_model(
        """<ir_version: 8, opset_import: ["": 17]> g (float[n, 3, h, w] x, float[8, 3, 3, 3] k) => (float[n, 8, a, b] y)
        { y = Conv<auto_pad = "SAME_UPPER", strides = [2, 2]>(x, k) }"""
    )
    weights = np.random.default_rng(7).standard_normal((8, 3, 3, 3)).astype(np.float32) / 5
    model.graph.input.pop()
    model.graph.initializer.append(onnx.numpy_helper.from_array(weights, "k"))
    engine = optdnn.build(model, target="simulate", precision=precision, shapes={"x": "1..2..4x3x8..16..24x8..16..24"})
    fixed = optdnn.build(model, target="simulate", precision=precision, shapes={"x": "2x3x16x16"})
    assert [s.params for s in engine.program.steps] == [s.params for s in fixed.program.steps]
    oracle = optdnn.build(model, target="reference")
    for size in ((2, 3, 16, 16), (1, 3, 9, 23), (3, 3, 8, 24)):
        x = np.random.default_rng(size[2]).standard_normal(size).astype(np.float32)
        np.testing.assert_allclose(engine.run({"x": x})["y"], oracle.run({"x": x})["y"], rtol=2e-2, atol=2e-2)


# ---------------------------------------------------------------- refusals of the build


def test_every_dimension_needs_a_range() -> None:
    with pytest.raises(UsageError, match=r"dimension h of input 'x' has no range.*\n.*--shape x=1..2..3x4x1..8..32"):
        optdnn.build(
            onnx.parser.parse_model(
                '<ir_version: 8, opset_import: ["": 17]> g (float[n, 4, h] x) => (float[n, 4, h] y) { y = Relu(x) }'
            ),
            target="simulate",
            shapes={"x": "1..2..3x4x?"},
        )


def test_the_range_to_give_agrees_with_those_given() -> None:
    """Each input has a batch of its own, as torch.onnx.export writes it, and the length is of both."""
    model = onnx.parser.parse_model(
        """<ir_version: 8, opset_import: ["": 17]> g (float[a, s] x, float[b, s] m) => (float[c, s] y) { y = Mul(x, m) }"""
    )
    with pytest.raises(UsageError, match="dimension b of input 'm' has no range") as caught:
        optdnn.build(model, target="simulate", shapes={"x": "1..2..4x1..16..40"})
    assert caught.value.hint == "plans for GPUs need one: --shape m=1..8..32x1..16..40"


def test_precision_auto_asks_for_the_optimum() -> None:
    model = onnx.parser.parse_model(
        """<ir_version: 8, opset_import: ["": 17]> g (float[n, s] x, float[n, t] m, float scale) => (float[n, k] y)
        { j = Concat<axis=1>(x, m) y = Mul(j, scale) }"""
    )
    data = {"x": np.zeros((4, 16), np.float32), "m": np.zeros((4, 3), np.float32)}
    shapes = {"x": "1..2..4x1..16..40", "m": "1..2..4x3"}
    with pytest.raises(UsageError, match="needs fixed shapes") as caught:
        optdnn.build(model, target="simulate", precision="auto", calib=data, shapes=shapes)
    assert caught.value.hint == "give one size for each: --shape x=2x16 --shape m=2x3 --shape scale=scalar"


def test_an_extreme_that_cannot_be_built_is_reported_by_the_build() -> None:
    model = onnx.parser.parse_model(
        """<ir_version: 8, opset_import: ["": 17]> g (float[n, 4] x) => (float[m, 4] y)
        <float[3, 1] c = {1, 2, 3}> { y = Add(x, c) }"""
    )
    with pytest.raises(ShapeError, match=r"profile 0, at x=4x4: .*do not broadcast"):
        optdnn.build(model, target="simulate", shapes={"x": "1..3..4x4"})


# ---------------------------------------------------------------- the model inside of an engine


def test_a_model_is_taken_apart_and_put_together(tmp_path: Path) -> None:
    model = convnet()
    onnx.save(model, tmp_path / "m.onnx", save_as_external_data=True, size_threshold=0, location="m.data")
    for source in (convnet(), tmp_path / "m.onnx"):
        data, weights = split_weights(source)
        assert set(weights) == {"w2"}  # 8 x 8 x 3 x 3 floats; the others are small
        graph = import_model(put_together(data, weights, "held"))
        feeds = image(1)
        np.testing.assert_array_equal(evaluate(graph, feeds)["y"], evaluate(import_model(convnet()), feeds)["y"])
    with pytest.raises(EngineError, match="lacks its weight 'w2'"):
        import_model(put_together(data, {}, "held"))
    with pytest.raises(EngineError, match="cannot be read"):
        put_together(b"\x99", weights, "held")


def test_options_of_another_version_are_refused(built: optdnn.Engine) -> None:
    program = decode(memoryview(b"".join(encode(built.program))))
    dynamic = program.dynamic
    assert dynamic is not None
    assert dynamic.source is not None
    source = replace(dynamic.source, options={**dynamic.source.options, "turbo": True})
    program.dynamic = replace(dynamic, source=source)
    with pytest.raises(EngineError, match="build option 'turbo', which no engine may set"):
        loading.plan_on_demand(program, {"x": (3, *IMAGE)}, False, {})


def test_engine_files_repeat_byte_for_byte(built: optdnn.Engine) -> None:
    again = optdnn.build(convnet(batch="n"), target="simulate", shapes=RANGE)
    assert b"".join(encode(again.program)) == b"".join(encode(built.program))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: {"inputs": (replace(d.inputs[0], name="z"),)}, "plan 0 has other inputs"),
        (lambda d: {"outputs": (replace(d.outputs[0], name="z"),)}, "plan 0 has other outputs"),
        (lambda d: {"inputs": (replace(d.inputs[0], shape=("n", 4, 8, 8)),)}, "does not fit"),
        (lambda d: {"source": replace(d.source, model=10_000)}, "names a missing blob"),
        (lambda d: {"source": replace(d.source, model=0)}, "is not a run of bytes"),
    ],
)
def test_malformed_plans_are_refused(built: optdnn.Engine, change: Any, message: str) -> None:
    dynamic = built.program.dynamic
    with pytest.raises(EngineError, match=message):
        validate(replace(built.program, dynamic=replace(dynamic, **change(dynamic))))


def test_plans_within_plans_are_refused(built: optdnn.Engine) -> None:
    dynamic = built.program.dynamic
    assert dynamic is not None
    with pytest.raises(EngineError, match="plan 1 is not one of this engine"):
        validate(replace(built.program, dynamic=replace(dynamic, plans=(built.program,))))
    with pytest.raises(EngineError, match="has no profiles"):
        validate(replace(built.program, profiles=()))
