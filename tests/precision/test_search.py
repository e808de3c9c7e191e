"""The driver of automatic precision, on engines of NumPy kernels with given times; once also on the real libraries."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
from precision.nets import perceptron
from precision.numpy_driver import DATA, TIMES, Numpy, another_network, find, node
from support.needs import needs_libraries

from optdnn.calibration import calibrate
from optdnn.config import BuildOptions
from optdnn.errors import RunError, UsageError
from optdnn.ir.evaluate import evaluate
from optdnn.ir.graph import Graph
from optdnn.passes.base import PassContext, PassReport
from optdnn.passes.equalize import Equalize
from optdnn.passes.support import quantize
from optdnn.passes.support.precision import PrecisionPlan
from optdnn.precision.auto import not_met
from optdnn.precision.targets import assigned
from optdnn.report.precision import columns, declined, rows, sentences
from optdnn.runtime.engine import Engine

needs_libraries()


@pytest.fixture(autouse=True)
def exact_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights have eight bits on every processor."""
    monkeypatch.setattr(quantize, "bytes_saturate", lambda: False)


def test_the_fastest_mixture_within_the_bound_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    found = find(perceptron(), Numpy(), monkeypatch, metric="cosine", max_drop=0.05)
    assert found.met
    assert {k: found.plan.nodes[k] for k in TIMES} == {"first.out": "int8", "second.out": "int8", "head.out": "bf16"}
    assert found.label == "int8+bf16"
    chosen = found.report.candidate()
    assert chosen.verified is not None
    assert chosen.worst <= 0.05
    assert chosen.ms == min(c.ms for c in found.report.candidates if c.ms is not None)
    reason = node(found.report, "head.out").reason
    assert "bf16 is faster than fp32 here: 6.0 µs against 10.0 µs" in reason
    assert "int8 is slower than bf16 here: 14.0 µs against 6.0 µs" in reason


class Predicted(Numpy):
    """A target that cannot run its engines here."""

    def race(self, engines: Mapping[str, Engine], say: Any) -> dict[str, float]:
        return {}

    def predicted(self, engine: Engine) -> float | None:
        return 1e3 * self.milliseconds(self.plans[id(engine)])


@pytest.mark.parametrize(
    ("first", "driver", "single"), [(5.8, Numpy, False), (5.8, Predicted, True), (5.0, Predicted, False)]
)
def test_a_mixture_has_to_gain_more_if_times_are_predicted(
    monkeypatch: pytest.MonkeyPatch, first: float, driver: type[Numpy], single: bool
) -> None:
    times = {**{k: {"fp32": 10.0, "bf16": 6.0} for k in TIMES}, "first.out": {"fp32": first, "bf16": 6.0}}
    found = find(perceptron(), driver(("fp32", "bf16"), times=times), monkeypatch, metric="cosine", max_drop=0.1)
    chosen = found.report.candidate()
    assert found.report.measured == (driver is Numpy)
    assert chosen.single == single
    assert chosen.name == "bf16" or not single
    assert chosen.predicted_us == pytest.approx(19.0 if single else first + 13.0)


def test_a_tight_bound_takes_less_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    found = find(perceptron(), Numpy(), monkeypatch, metric="cosine", max_drop=1e-5)
    assert found.met
    assert "int8" not in set(found.plan.nodes.values())
    assert found.report.candidate().worst <= 1e-5
    assert "bf16" in found.label
    assert "int8 would save 3.0 µs, but" in node(found.report, "first.out").reason


def test_a_bound_of_nothing_gives_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    found = find(perceptron(), Numpy(offers=("fp32", "int8")), monkeypatch, metric="mse", max_drop=0.0)
    assert found.met
    assert found.report.chosen == "fp32"


def test_losses_of_pins_count_against_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"metric": "mse", "precision_map": {"first": "int8"}}
    found = find(perceptron(), Numpy(offers=("fp32", "int8")), monkeypatch, max_drop=1.0, **options)
    assert found.met
    assert found.report.candidate().worst > 0, "held against fp32, not against fp32 with the pins"
    found = find(perceptron(), Numpy(offers=("fp32", "int8")), monkeypatch, max_drop=0.0, **options)
    assert not found.met
    assert found.report.candidate().worst > 0


def test_a_single_precision_that_is_as_fast_is_preferred(monkeypatch: pytest.MonkeyPatch) -> None:
    times = {k: {"fp32": 10.0, "bf16": 5.0, "int8": 9.0} for k in TIMES}
    found = find(perceptron(), Numpy(times=times), monkeypatch, metric="cosine", max_drop=0.05)
    assert found.report.chosen == "bf16"
    assert found.label == "bf16"
    assert "int8 is slower than bf16 here: 9.0 µs against 5.0 µs" in node(found.report, "first.out").reason


def test_pins_hold_in_every_plan_and_are_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    found = find(
        perceptron(), Numpy(), monkeypatch, metric="cosine", max_drop=0.05, precision_map={"*": "fp32", "sec*": "bf16"}
    )
    assert all(
        c.plan.nodes["first.out"] == "fp32" and c.plan.nodes["second.out"] == "bf16" for c in found.report.candidates
    )
    assert node(found.report, "second.out").reason == "pinned by --pin sec*=bf16"


@pytest.mark.slow
def test_a_bound_that_nothing_meets_gives_the_closest(monkeypatch: pytest.MonkeyPatch) -> None:
    spoiled = find(perceptron(), Numpy(), monkeypatch, metric=_worse_unseen(), max_drop=0.5)
    assert not spoiled.met
    assert spoiled.report.candidate().worst == min(c.worst for c in spoiled.report.candidates if c.verified is not None)


def _worse_unseen() -> Callable[[Any, Any], float]:
    """A metric that gets worse with each call for every engine, including fp32's own."""
    calls = [0.0]

    def metric(outputs: Any, labels: Any) -> float:
        calls[0] -= 1.0
        return calls[0]

    return metric


def test_a_mixture_that_fails_on_unseen_data_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """The metric shows no loss on the samples of the search, and a large one on the others for every plan with int8."""
    n_seen = []

    def metric(outputs: Mapping[str, np.ndarray], labels: Any) -> float:
        y = outputs["y"]
        reference = evaluate(perceptron(), {"x": lookup(labels)})["y"]
        off = float(np.abs(y - reference).max() / np.abs(reference).max())
        seen = set(map(int, labels)) <= first
        n_seen.append(seen)
        return -(0.0 if seen else 100.0 * (off > 0.005))

    ids = np.arange(len(DATA["x"]))

    def lookup(labels: Any) -> np.ndarray:
        found: np.ndarray = DATA["x"][np.asarray(labels)]
        return found

    from optdnn.precision.samples import split

    first = set(map(int, split(len(ids), ids)[0]))
    found = find(perceptron(), Numpy(), monkeypatch, metric=metric, max_drop=1.0, calib={"x": DATA["x"], "labels": ids})
    assert found.met
    assert True in n_seen
    assert False in n_seen
    assert "int8" not in found.label
    tried = [c for c in found.report.candidates if not c.single and c.verified is not None and "int8" in c.counts]
    assert tried  # a mixture was built, and verification refused it
    assert all(c.drop <= 1.0 < c.worst for c in tried)


@pytest.mark.slow
def test_batches_of_an_iterable_give_the_results_of_arrays(monkeypatch: pytest.MonkeyPatch) -> None:
    """The search over data in temporary files, batch by batch, gives the same report."""
    options: dict[str, Any] = {"metric": "cosine", "max_drop": 0.05}
    held = find(perceptron(), Numpy(), monkeypatch, calib={"x": DATA["x"]}, **options)
    for module in ("samples", "accuracy"):
        monkeypatch.setattr(f"optdnn.precision.{module}.HELD_BYTES", 1)
    monkeypatch.setattr("optdnn.precision.accuracy.RUN_BATCH", 5)
    batches = [{"x": part} for part in np.array_split(DATA["x"], 9)]
    streamed = find(perceptron(), Numpy(), monkeypatch, calib=iter(batches), **options)
    assert streamed.plan.nodes == held.plan.nodes
    for a, b in zip(streamed.report.candidates, held.report.candidates, strict=True):
        assert a.name == b.name
        assert a.drop == pytest.approx(b.drop, rel=1e-4, abs=1e-9)
        assert (a.verified is None) == (b.verified is None)
        assert (a.verified or 0.0) == pytest.approx(b.verified or 0.0, rel=1e-4, abs=1e-9)


def test_an_engine_that_fails_is_out_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    class Refusing(Numpy):
        def quick(self, graph: Graph, plan: PrecisionPlan, library: str) -> Engine:
            if plan.quantizes:
                raise RunError("no integers today")
            return super().quick(graph, plan, library)

    found = find(perceptron(), Refusing(), monkeypatch, metric="cosine", max_drop=0.05)
    assert found.report.chosen == "bf16"
    assert next(c for c in found.report.candidates if c.name == "int8").error == "no integers today"


def test_a_metric_that_raises_stops_the_build(monkeypatch: pytest.MonkeyPatch) -> None:
    def bad(outputs: Any, labels: Any) -> float:
        raise ZeroDivisionError("mAP")

    with pytest.raises(RunError, match="raised ZeroDivisionError: mAP"):
        find(perceptron(), Numpy(), monkeypatch, metric=bad, max_drop=1.0)


def test_the_budget_ends_the_search(monkeypatch: pytest.MonkeyPatch) -> None:
    start = time.perf_counter()
    found = find(perceptron(), Numpy(), monkeypatch, metric="cosine", max_drop=0.05, budget=1e-3)
    assert time.perf_counter() - start < 10
    assert found.met


def test_the_account_is_plain_and_has_a_front(monkeypatch: pytest.MonkeyPatch) -> None:
    import json

    report = find(perceptron(), Numpy(), monkeypatch, metric="cosine", max_drop=0.05).report
    front = report.front()
    times = [c.ms for c in front]
    assert times == sorted(times)  # type: ignore[type-var]
    drops = [c.worst for c in front]
    assert drops == sorted(drops, reverse=True)
    assert len(front) >= 2
    plain = report.to_plain()
    assert json.loads(json.dumps(plain, allow_nan=False)) == plain
    assert [c["name"] for c in plain["candidates"] if c["front"]]


def test_declined_plans_are_reported_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    found = find(perceptron(), Numpy(), monkeypatch, metric="cosine", max_drop=1e-5)
    lines = declined(found.report.to_plain())
    (lost,) = [text for text in lines if text.startswith("int8 declined")]
    assert "of cosine distance, the bound is 1e-05; most of int8's noise at the outputs is from " in lost
    assert lost.count("%") == 3
    slow = {k: {"fp32": 10.0, "bf16": 20.0} for k in TIMES}
    found = find(perceptron(), Numpy(offers=("fp32", "bf16"), times=slow), monkeypatch, metric="cosine", max_drop=0.05)
    assert declined(found.report.to_plain()) == ["bf16 declined: it is slower here, 0.061 ms against 0.03 ms of fp32"]


def test_a_bound_that_the_samples_are_too_few_for_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    report = find(perceptron(), Numpy(), monkeypatch, max_drop=1.0).report.to_plain()
    (reported,) = [text for text in sentences(report) if "so small a loss" in text]
    assert reported.startswith(
        "32 samples cannot show so small a loss: an engine that loses none may lose up to 9.4 points elsewhere"
    )
    assert "; 300 samples that training has not seen suffice" in reported
    few = sentences({**report, "samples": {**report["samples"], "verification": 1}})
    assert [t for t in few if t.startswith("1 sample cannot") and "may lose up to 100 points" in t]
    assert "1 other to verify by; one sample counts 100 points" in few[0]
    for changed in ({"bound": 10.0}, {"name": "mse"}):
        assert not [
            t for t in sentences({**report, "metric": {**report["metric"], **changed}}) if "so small a loss" in t
        ]


@pytest.mark.slow
def test_the_expectation_from_margins_declines_a_plan_that_lost_no_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    """int8 loses none of 64 samples, and brings some near the border: half a point is expected, one sample would be three."""
    loose = find(perceptron(), Numpy(), monkeypatch, max_drop=1.0).report
    assert "int8" in loose.candidate().counts
    report = find(perceptron(), Numpy(), monkeypatch, max_drop=0.5).report
    assert report.met
    assert "int8" not in report.candidate().counts
    single = next(c for c in report.candidates if c.name == "int8")
    assert single.drop == single.verified == 0.0
    assert single.expected is not None
    assert 0.5 < single.expected == single.worst < 1.0
    # The search applied the bound before it built plans: the plan that the loose bound allowed was not built.
    same = next(c for c in report.candidates if c.assignment == loose.candidate().assignment)
    assert same.drop == 0.0
    assert same.searched > 0.5
    assert same.verified is None
    plain = report.to_plain()
    (reported,) = [text for text in declined(plain) if text.startswith("int8 declined")]
    assert f"0 points of top-1 accuracy lost of 64 samples, {single.expected:.3g} expected from margins" in reported
    assert "the bound is 0.5" in reported
    (cells,) = [row for row in rows(plain) if row[0] == "int8"]
    assert dict(zip(columns(plain), cells, strict=True))["expected from margins"] == f"{single.expected:.3g}"
    assert (
        cells[-1] == "on the front, expected to be beyond the bound" or cells[-1] == "expected to be beyond the bound"
    )
    assert any("fp32 has 100 % of these samples right: if it was trained on them" in text for text in sentences(plain))


def test_other_metrics_expect_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    report = find(perceptron(), Numpy(), monkeypatch, metric="cosine", max_drop=0.05).report
    assert all(c.expected is None for c in report.candidates)
    plain = report.to_plain()
    assert "expected from margins" not in columns(plain)
    assert not any("margins" in text for text in sentences(plain))


def test_a_bound_that_no_engine_is_expected_to_keep_is_not_met(monkeypatch: pytest.MonkeyPatch) -> None:
    """The built engine is always another network's int8: no sample is lost, but every plan is expected to lose too much."""

    class Narrow(Numpy):
        def built(self, graph: Graph, plan: PrecisionPlan, label: str, say: Any) -> Engine:
            return super().built(narrow, plan, label, say)

    narrow, _ = assigned(
        perceptron(), PrecisionPlan.of_option("int8"), "cpu", calibrate(perceptron(), {"x": DATA["x"]}, "mse")
    )
    found = find(perceptron(), Narrow(offers=("fp32",)), monkeypatch, max_drop=0.2, candidates=())
    assert not found.met
    closest = found.report.candidate()
    assert closest.drop == closest.verified == 0.0
    error = not_met(found.report)
    assert f"{closest.expected:.3g} expected from margins" in str(error)
    assert f"--max-drop {closest.worst:.3g}" in (error.hint or "")


def test_close_ones_are_tuned_and_raced_once_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """Untuned, a mixture is 20 % ahead of int8; tuned, int8 is faster."""
    times = {k: {"fp32": 10.0, "bf16": 5.0, "int8": 6.0 if k != "head.out" else 4.0} for k in TIMES}

    tunings: list[int] = []
    after: dict[int, int] = {}

    class Tunable(Numpy):
        def tuned(self, graph: Graph, shares: int, say: Any) -> Engine | None:
            tunings.append(shares)
            engine = self.quick(graph, PrecisionPlan(), "")
            after[id(engine)] = graph.kinds().get("QuantizeLinear", 0)
            return engine

        def race(self, engines: Mapping[str, Engine], say: Any) -> dict[str, float]:
            if all(id(e) in after for e in engines.values()):
                return {n: 0.001 if n == "int8" else 0.002 for n in engines}
            return super().race(engines, say)

    driver = Tunable(times=times)
    found = find(perceptron(), driver, monkeypatch, metric="cosine", max_drop=0.05)
    assert found.report.chosen == "int8"
    assert found.report.candidate().ms == 0.001
    assert set(tunings) == {len(tunings)}
    assert 2 <= len(tunings) <= 4
    rows = {c["name"]: c for c in found.report.to_plain()["candidates"]}
    assert sum(c.get("tuned", False) for c in rows.values()) == len(tunings)


def test_a_tuned_plan_beyond_the_bound_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    class Worse(Numpy):
        def tuned(self, graph: Graph, shares: int, say: Any) -> Engine | None:
            return self.quick(another_network(), PrecisionPlan(), "")

    found = find(perceptron(), Worse(), monkeypatch, metric="mse", max_drop=0.01)
    assert found.met
    chosen = found.report.candidate()
    assert not chosen.tuned
    assert chosen.ms == min(
        c.ms for c in found.report.candidates if c.ms is not None and not c.tuned and c.worst <= 0.01
    )
    assert any(c.tuned and c.worst > 0.01 for c in found.report.candidates)


@pytest.mark.slow
def test_integers_are_searched_on_the_equalized_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[PassContext] = []

    def run(self: Equalize, graph: Graph, context: PassContext, report: PassReport) -> None:
        seen.append(context)

    monkeypatch.setattr(Equalize, "run", run)
    found = find(perceptron(), Numpy(), monkeypatch, metric="cosine", max_drop=0.05, precision_map={"head": "fp32"})
    (context,) = seen
    assert context.plan is not None
    assert context.plan.default == "int8"
    assert dict(context.plan.nodes) == {"head.out": "fp32"}
    assert [p.name for p in found.passes] == ["equalize"]
    find(
        perceptron(), Numpy(offers=("fp32", "bf16")), monkeypatch, metric="cosine", max_drop=0.05, candidates=("bf16",)
    )
    assert len(seen) == 1, "and only where integers are a choice"


def test_without_data_there_is_nothing_to_judge_by() -> None:
    with pytest.raises(UsageError, match="needs data"):
        BuildOptions(target="cpu", precision="auto")


@pytest.mark.parametrize("option", [{"max_drop": 1.0}, {"metric": "mse"}, {"labels": [1]}])
def test_options_of_auto_want_auto(option: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="is for precision auto"):
        BuildOptions(target="cpu", precision="int8", calib=DATA, **option)
