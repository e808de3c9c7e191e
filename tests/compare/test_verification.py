"""The checks of ``optdnn.verify``: each one passes and fails, and says when it cannot decide."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
import pytest
from support import faults, small_models
from support.faults import damage
from support.small_models import save, small_model
from verified import statuses, text

import optdnn
from optdnn.compare import checks, verification
from optdnn.compare.checks import FAILED, NOT_CHECKED, PASSED, judge
from optdnn.compare.verification import _batches
from optdnn.errors import EngineError, InputError, UsageError
from optdnn.runtime.program import Program
from optdnn.types import Array

# ---------------------------------------------------------------- distances

ONE = {"y": np.array([1.0, 2.0, 4.0])}
OTHER = {"y": np.array([3.0, 2.0, 0.0])}


@pytest.mark.parametrize(
    ("got", "status"),
    [(ONE["y"], PASSED), (ONE["y"] + 2e-4, PASSED), (ONE["y"] + 2e-3, FAILED), (ONE["y"][:2], FAILED), (ONE["y"] * np.nan, FAILED)],
)  # fmt: skip
def test_results_are_judged_by_the_effect_of_another_input(got: Array, status: str) -> None:
    assert judge({"y": got}, ONE, OTHER, [], "fp32").status == status
    near = {"y": ONE["y"] + 1e-6}  # the effect of another input is far smaller here, and so is the allowed error
    assert judge({"y": ONE["y"] + 1e-5}, ONE, {"y": ONE["y"] + 2e-4}, [], "fp32").status == FAILED
    assert judge(near, ONE, {"y": ONE["y"] + 2e-4}, [], "fp32").status == PASSED


def test_errors_that_rounding_of_the_inputs_explains_are_allowed() -> None:
    off = {"y": ONE["y"] + 2e-3}
    assert judge(off, ONE, OTHER, [ONE, {"y": ONE["y"] + 1e-3}], "fp32").status == PASSED


MASKED = """
<ir_version: 10, opset_import: ["": 21]>
net (float[1, 1, 2, 8] q, float[1, 1, 2, 8] k, float[1, 1, 2, 8] v, bool[1, 1, 2, 2] mask) => (float[1, 1, 2, 8] y) {
    turned = Transpose<perm = [0, 1, 3, 2]>(k)
    scores = MatMul(q, turned)
    hidden = Constant<value = float {-inf}>()
    seen = Where(mask, scores, hidden)
    weights = Softmax<axis = -1>(seen)
    y = MatMul(weights, v)
}
"""


def test_the_model_is_given_as_to_a_build(tmp_path: Path) -> None:
    model = onnx.parser.parse_model(MASKED)
    other = onnx.parser.parse_model(MASKED.replace("y = MatMul", "z = MatMul").replace("8] y)", "8] z)"))
    onnx.save(model, tmp_path / "m.onnx")
    engine = optdnn.build(model, target="reference")
    for given in (model, model.SerializeToString(), tmp_path / "m.onnx"):
        assert statuses(optdnn.verify(engine, given))["model"] != FAILED
    with pytest.raises(UsageError, match=r"^net is not what the engine was built from"):
        optdnn.verify(engine, other)


def test_where_the_model_gives_nan_random_inputs_say_nothing(tmp_path: Path) -> None:
    onnx.save(onnx.parser.parse_model(MASKED), tmp_path / "m.onnx")
    engine = optdnn.build(tmp_path / "m.onnx", target="simulate", precision="fp16")
    feeds = dict(verification.case_of(engine, {}).feeds)
    feeds["mask"] = np.array([[[[False, False], [True, False]]]])  # the first query sees no key
    found = optdnn.verify(engine, tmp_path / "m.onnx", feeds)
    assert statuses(found)["model"] == FAILED
    reported = "the model gives NaN in y at positions where the engine gives numbers"
    assert reported in text(found, "model")
    seed = next(s for s in range(99) if not verification.case_of(engine, {}, seed=s).feeds["mask"].any(-1).all())
    found = optdnn.verify(engine, tmp_path / "m.onnx", seed=seed)
    assert statuses(found)["model"] == NOT_CHECKED
    assert text(found, "model") == f"{reported}, for these random inputs: give --input"
    case = verification._CaseChecks(engine, verification.case_of(engine, {}, seed=seed), None, None, lambda text: None)
    case.original = verification.original_of(engine, tmp_path / "m.onnx")
    case.want = {"y": engine.run(case.feeds)["y"] + 1}  # also wrong in places where the model has numbers
    assert case.model().status == FAILED


def test_a_comparison_that_every_result_would_pass_says_nothing() -> None:
    found = judge(ONE, ONE, {"y": ONE["y"] + 0.01}, [], "bf16")
    assert found.status == NOT_CHECKED
    assert "too close to decide: y (another input changes it by 0.0025" in found.text
    assert judge({"y": ONE["y"] + 1}, ONE, {"y": ONE["y"] + 0.01}, [], "bf16").status == FAILED


def test_a_constant_output_is_near_the_exact_one() -> None:
    assert judge(ONE, ONE, ONE, [ONE], "fp32").status == PASSED
    assert judge({"y": ONE["y"] + 1e-2}, ONE, ONE, [ONE], "fp32").status == FAILED


def test_the_tolerance_can_be_given() -> None:
    off = {"y": ONE["y"] + 2e-3}
    assert judge(off, ONE, OTHER, [], "fp32", 1e-2).status == PASSED
    assert judge(off, ONE, OTHER, [], "fp16", 1e-9).limit == 16 * 2.0**-11


# ---------------------------------------------------------------- memory


def unwritten(program: Program) -> Program:
    """A step reads a part of its operand's buffer that no step writes."""
    k, step = next((k, s) for k, s in enumerate(program.steps) if program.buffers[s.inputs[0]].offset is not None)
    i = step.inputs[0]
    b = program.buffers[i]
    shape = b.shape or ()
    assert b.nbytes is not None
    first = int(shape[0])
    buffer = replace(b, shape=(2 * first, *shape[1:]), offset=-(-program.arena_bytes // 256) * 256)
    operand, offset, view, strides = step.params["reads"][0]
    reads = [[operand, offset + b.nbytes // b.dtype.itemsize, view, strides], *step.params["reads"][1:]]
    steps = list(program.steps)
    steps[k] = replace(step, params={**step.params, "reads": reads})
    buffers = tuple(buffer if n == i else other for n, other in enumerate(program.buffers))
    return replace(
        program, steps=tuple(steps), buffers=buffers, arena_bytes=(buffer.offset or 0) + (buffer.nbytes or 0)
    )


def test_memory_that_is_read_unwritten_shows(tmp_path: Path) -> None:
    good = tmp_path / "good.engine"
    optdnn.build(small_models.branches(), target="simulate", streams="1").save(good)
    found = optdnn.verify(damage(good, unwritten, tmp_path / "bad.engine"))
    assert "memory" in {c.name for c in found.failed}
    assert text(found, "memory") == "y depend on the arena's earlier contents, or on the order of lanes"


def test_a_buffer_that_is_overwritten_before_its_last_reader_shows(tmp_path: Path) -> None:
    program = optdnn.build(small_models.branches(), target="cuda:sm_90a", streams="1", no_cubins=True).program
    assert checks.overwritten(program) == []
    found = checks.overwritten(faults.overlaid(program))
    assert found == [f"{a!r} is overwritten by {b!r} before it is read" for a, b in (("b", "c"), ("c", "f.nhwc"))]


def test_lanes_run_in_several_orders(tmp_path: Path) -> None:
    engine = optdnn.build(small_models.branches(), target="simulate", streams="2")
    found = optdnn.verify(engine)
    assert found.ok
    assert engine.program.lanes == () or "in 5 orders" in text(found, "memory")


# ---------------------------------------------------------------- rows


def rows(run: Callable[[Array], Array], x: Array | None = None, exact: Any = None, **more: Any) -> checks.Found:
    feeds = {"x": np.arange(12.0).reshape(4, 3) ** 1.5 if x is None else x}
    of = lambda feeds: {"y": run(feeds["x"])}  # noqa: E731
    return checks.rows(of, feeds, of(feeds), more.get("sizes", (1, 2)), exact, 1e-4)


def test_rows_in_other_places_are_the_same_bits() -> None:
    assert rows(np.sqrt).status == PASSED
    place = 1 + 1e-7 * np.arange(4)[:, None]
    found = rows(lambda x: np.sqrt(x) * place[: len(x)])
    assert found.status == FAILED
    assert "change with their place or the size of the batch" in found.text
    assert rows(lambda x: np.sqrt(x) * (1 + 1e-7 * len(x))).status == FAILED
    assert rows(lambda x: np.sqrt(x) * (1 + 1e-7 * len(x)), sizes=()).status == PASSED


def test_outputs_that_are_no_batch_of_rows_are_reported() -> None:
    def mixed(x: Array) -> Array:
        return x * np.arange(1.0, 1 + len(x))[:, None]

    assert rows(np.sqrt, np.ones((1, 3))).status == NOT_CHECKED
    assert rows(lambda x: x.sum(axis=0)).status == NOT_CHECKED
    assert "(--model shows it)" in rows(mixed).text
    model = lambda feeds: {"y": mixed(feeds["x"])}  # noqa: E731
    assert rows(mixed, exact=model).text == "axis 0 of the model's inputs is not a batch of rows"
    assert rows(mixed, exact=lambda feeds: {"y": feeds["x"]}).status == FAILED


def test_rows_are_checked_where_the_build_promised_them(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = optdnn.build(small_models.mlp(), target="simulate", row_invariant=True)
    assert "simulate sums in NumPy's order" in text(optdnn.verify(engine), "rows")
    plain = optdnn.build(small_models.mlp(), target="simulate")
    assert text(optdnn.verify(plain), "rows") == "the build did not promise it (--row-invariant)"


def test_other_batches_are_those_that_some_profile_takes() -> None:
    model = small_model("(float[n,s] x) => (float[n,s] y) { y = Relu(x) }")
    engine = optdnn.build(model, target="simulate", shapes=[{"x": "1..2..3x4..5..6"}, {"x": "2..4..5x8"}])
    assert _batches(engine, {"n": 3, "s": 6}) == [1, 2]
    assert _batches(engine, {"n": 5, "s": 8}) == [2, 4]
    assert _batches(optdnn.build(small_models.mlp(), target="simulate"), {}) == []


# ---------------------------------------------------------------- inputs and models


def test_an_engine_for_ranges_is_checked_at_their_ends(tmp_path: Path) -> None:
    model = save(small_models.mlp("n"), tmp_path)
    engine = optdnn.build(model, target="simulate", shapes={"x": "1..3..5x24"})
    found = optdnn.verify(engine, model)
    assert [c.case for c in found.checks if c.name == "model"] == ["min", "opt", "max"]
    assert found.ok
    assert statuses(found, "max")["model"] == PASSED
    assert "[5, 10]" in next(c.text for c in found.checks if c.case == "max")
    assert [c.case for c in optdnn.verify(engine, sizes={"n": 2}).checks if c.name == "runs"] == [""]


def test_given_inputs_are_used_and_must_fit(tmp_path: Path) -> None:
    model = save(small_models.mlp("n"), tmp_path)
    engine = optdnn.build(model, target="reference")
    found = optdnn.verify(engine, model, {"x": np.ones((7, 24), np.float32)})
    assert found.inputs_from == "given"
    assert "y float32[7, 10]" in text(found, "runs")
    assert statuses(found)["model"] == PASSED
    with pytest.raises(InputError, match="axis 1 is 3 instead of 24"):
        optdnn.verify(engine, model, {"x": np.ones((7, 3), np.float32)})
    with pytest.raises(InputError, match="there is no input 'z'"):
        optdnn.verify(engine, model, {"z": np.ones((7, 3), np.float32)})


def test_made_up_integers_that_the_network_does_not_take_are_others(tmp_path: Path) -> None:
    engine = optdnn.build(
        small_model("(float[4,6] x, int64[2] s) => (float[a,b] y) { y = Reshape(x, s) }"), target="reference"
    )
    found = optdnn.verify(engine)
    assert found.ok
    assert "y float32[4, 6]" in text(found, "runs")  # 0 keeps a size


def test_an_engine_that_takes_no_made_up_input_fails(tmp_path: Path) -> None:
    engine = optdnn.build(
        small_model("(float[4,6] x, int64[1] s) => (float[a] y) { y = Reshape(x, s) }"), target="reference"
    )
    found = optdnn.verify(engine)
    assert statuses(found) == {"runs": FAILED} | dict.fromkeys(
        ("steps", "one by one", "repeats", "memory", "rows", "model"), NOT_CHECKED
    )
    assert optdnn.verify(engine, inputs={"s": np.array([24])}).ok


def test_inputs_of_another_type_and_inputs_with_values(tmp_path: Path) -> None:
    model = save(small_models.mlp(), tmp_path)
    half = optdnn.build(model, target="simulate", precision="fp16", io_dtype="fp16")
    assert half.inputs[0].dtype == np.float16
    assert statuses(optdnn.verify(half, model))["model"] == PASSED
    sized = small_model("(float[4,6] x, int64[2] s) => (float[a,b] y) { t = Reshape(x, s) y = Relu(t) }")
    fixed = optdnn.build(sized, target="simulate", values={"s": [6, 4]})
    found = optdnn.verify(fixed, save(sized, tmp_path))
    assert statuses(found)["model"] == PASSED
    by_value = optdnn.verify(optdnn.build(sized, target="simulate"), tmp_path / "model.onnx", {"s": np.array([12, 2])})
    assert by_value.ok
    assert "y float32[12, 2]" in text(by_value, "runs")


def test_detectors_choose_by_scores_that_are_nearly_tied(tmp_path: Path) -> None:
    model = small_model(
        "(float[1,64] x) => (float[1,8] v, int64[1,8] i) <int64[1] k = {8}> { a = Round(x) v, i = TopK(a, k) }"
    )
    found = optdnn.verify(optdnn.build(model, target="simulate", precision="fp16"), save(model, tmp_path))
    assert found.ok  # 64 numbers rounded to integers: which of the equal ones are kept is undefined


def test_operators_of_the_users_own(tmp_path: Path) -> None:
    shrink = optdnn.custom_op(
        "com.example.Shrink", infer=lambda types, attributes: types[0], reference=lambda x: np.maximum(x - 0.5, 0)
    )
    made = small_model("(float[2,8] x) => (float[2,8] y) { y = Relu(x) }")
    made.graph.node[0].op_type, made.graph.node[0].domain = "Shrink", "com.example"
    made.opset_import.add(domain="com.example", version=1)
    model = save(made, tmp_path)
    optdnn.build(model, target="reference", custom_ops=[shrink]).save(tmp_path / "own.engine")
    found = optdnn.verify(tmp_path / "own.engine", model, custom_ops=[shrink])
    assert found.ok
    assert statuses(found)["model"] == PASSED


# ---------------------------------------------------------------- refusals and reports


def test_files_that_cannot_be_loaded_and_models_of_other_engines(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="there is no engine file"):
        optdnn.verify(tmp_path / "none.engine")
    (tmp_path / "broken.engine").write_bytes(b"\x89OPTDNN\n" + bytes(100))
    with pytest.raises(EngineError, match=r"broken\.engine"):
        optdnn.verify(tmp_path / "broken.engine")
    engine = optdnn.build(small_models.two_heads(), target="reference")
    renamed = small_model("(float[4,16] z) => (float[4,16] y) { y = Relu(z) }")
    with pytest.raises(UsageError, match=r"is not what the engine was built from: its inputs are z and"):
        optdnn.verify(engine, save(renamed, tmp_path))
    other = small_model("(float[4,16] x) => (float[4,16] y) { y = Relu(x) }")
    with pytest.raises(
        UsageError, match=r"is not what the engine was built from: .* its outputs y, the engine has x and y, z"
    ):
        optdnn.verify(engine, save(other, tmp_path))
    flat = small_model("(float[64] x) => (float[64] y) { y = Relu(x) }")
    with pytest.raises(
        UsageError, match=r"is not what the engine was built from: at the engine's shapes, .* differ in rank"
    ):
        optdnn.verify(engine, save(flat, tmp_path))
    for tolerance in (-1.0, float("nan"), float("inf")):
        with pytest.raises(UsageError, match=f"tolerance must be a number from 0 on, not {tolerance}"):
            optdnn.verify(engine, tolerance=tolerance)
    with pytest.raises(UsageError, match="an engine is loaded from its file, not from int"):
        optdnn.verify(3)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="verify are options of loading a file"):
        optdnn.verify(engine, verify=False)


def test_the_report_is_strict_json(tmp_path: Path) -> None:
    model = save(small_models.mlp(), tmp_path)
    optdnn.build(model, target="simulate").save(tmp_path / "good.engine")

    def infinite(program: Program) -> Program:
        blobs = [np.full_like(b, np.inf) if b.dtype == np.float32 else b for b in program.blobs]
        return replace(program, blobs=blobs)

    found = optdnn.verify(damage(tmp_path / "good.engine", infinite, tmp_path / "bad.engine"), model)
    assert not found.ok
    plain: Mapping[str, Any] = json.loads(json.dumps(found.to_plain(), allow_nan=False))
    row = next(c for c in plain["checks"] if c["check"] == "model")
    assert (row["status"], row["error"]) == ("failed", None)
    assert row["limit"] > 0
    assert plain["target"] == "simulate"
    assert plain["simulated"]
    assert not plain["ok"]


def test_faults_are_faults(tmp_path: Path) -> None:
    """The tests' own faults leave an engine that can be loaded."""
    optdnn.build(small_models.residual(), target="simulate", precision="fp16").save(tmp_path / "good.engine")
    before = optdnn.load(tmp_path / "good.engine").run({"x": np.ones((2, 8, 12, 12), np.float32)})
    bad = damage(tmp_path / "good.engine", faults.weight, tmp_path / "bad.engine")
    after = optdnn.load(bad).run({"x": np.ones((2, 8, 12, 12), np.float32)})
    assert not np.array_equal(before["y"], after["y"])
