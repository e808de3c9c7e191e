"""The check of a library's results: wrong results are refused; roundoff that the network amplifies is not an error."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest

from optdnn.errors import RunError
from optdnn.ir.evaluate import evaluate, random_feeds
from optdnn.ir.graph import Graph, Value
from optdnn.lowering.cpu import check as cpu_check
from optdnn.lowering.cpu.base import Measured
from optdnn.lowering.cpu.check import check
from optdnn.lowering.cpu.trials import TrialLost
from optdnn.ops.base import Attrs
from optdnn.ops.table import OPDEFS
from optdnn.types import FP32, INT64, Array, tensor

Spoil = Callable[[dict[str, Array], Mapping[str, Array]], dict[str, Array]]


class Fake:
    """An engine that computes ``graph`` on inputs with the relative error ``error``."""

    def __init__(self, graph: Graph, error: float):
        self.graph, self.error = graph, error

    def run(self, feeds: Mapping[str, Array], *, poison: bool = False) -> dict[str, Array]:
        return evaluate(self.graph, {k: (v * (1 + self.error)).astype(FP32) for k, v in feeds.items()})


def network(steep: bool) -> Graph:
    """The sine of x, or of a million times x."""
    graph = Graph()
    x = graph.add_input("x", tensor(FP32, 2, 50))
    if steep:
        x = graph.add("Mul", [x, graph.add_constant(np.array(1e6, np.float32))], Attrs()).value
    graph.add_output(graph.add("Sin", [x]).value, "y")
    return graph


def judge(steep: bool, error: float) -> tuple[Any, Any]:
    graph = network(steep)
    return check(graph, {"fake/1t": Fake(graph, error)}, random_feeds(graph, seed=1), "fp32")  # type: ignore[dict-item]


def test_right_results_pass_without_a_note() -> None:
    assert judge(steep=False, error=1e-6) == ({}, {})


def test_wrong_results_are_refused() -> None:
    wrong, doubts = judge(steep=False, error=0.1)
    assert doubts == {}
    assert "differs from the reference" in wrong["fake/1t"]


class Tokens(Fake):
    """An engine whose results have the relative error ``error``: its inputs are integers."""

    def run(self, feeds: Mapping[str, Array], *, poison: bool = False) -> dict[str, Array]:
        return {k: (v * (1 + self.error)).astype(FP32) for k, v in evaluate(self.graph, feeds).items()}


def tokens(steep: bool) -> Graph:
    """``exp(x) - 1`` of embeddings, which are almost zero (padding) if ``steep``, else one."""
    graph = Graph()
    x = graph.add_input("x", tensor(INT64, 4))
    table = graph.add_constant(np.full((9, 8), 1e-6 if steep else 1.0, np.float32))
    e = graph.add("Exp", [graph.add("Gather", [table, x], OPDEFS["Gather"].attrs(axis=0)).value]).value
    graph.add_output(graph.add("Sub", [e, graph.add_constant(np.array(1, np.float32))]).value, "y")
    return graph


@pytest.mark.parametrize(
    ("steep", "said"), [(True, "no made-up input can judge it"), (False, "differs from the reference")]
)
def test_roundoff_of_networks_that_read_tokens_is_no_error(steep: bool, said: str) -> None:
    graph = tokens(steep)
    wrong, doubts = check(graph, {"fake/1t": Tokens(graph, 0.01)}, {"x": np.zeros(4, np.int64)}, "fp32")  # type: ignore[dict-item]
    assert said in (doubts if steep else wrong)["fake/1t"]
    assert not (wrong if steep else doubts)


class Spoiled(Fake):
    """An engine with right results, which ``spoil(outputs, feeds)`` then changes."""

    def __init__(self, graph: Graph, spoil: Spoil):
        super().__init__(graph, 0.0)
        self.spoil = spoil

    def run(self, feeds: Mapping[str, Array], *, poison: bool = False) -> dict[str, Array]:
        assert poison
        return self.spoil(super().run(feeds), feeds)


def integers() -> Graph:
    """The position of the largest element of each of 400 rows, and the elements rounded down."""
    graph = Graph()
    x = graph.add_input("x", tensor(FP32, 400, 5))
    graph.add_output(graph.add("ArgMax", [x], OPDEFS["ArgMax"].attrs(axis=1)).value, "place")
    graph.add_output(graph.add("Floor", [x]).value, "floor")
    return graph


def judge_spoiled(graph: Graph, spoil: Spoil, feeds: Mapping[str, Array] | None = None) -> tuple[Any, Any]:
    engines = {"fake/1t": Spoiled(graph, spoil)}
    return check(graph, engines, feeds or random_feeds(graph, seed=1), "fp32")  # type: ignore[arg-type]


def test_integers_are_compared() -> None:
    wrong, _ = judge_spoiled(integers(), lambda y, _: {**y, "place": (y["place"] + 1) % 5})
    assert "its result 'place' differs from the reference in 100.0% of its integers" in wrong["fake/1t"]


def test_a_few_integers_may_fall_to_the_other_side() -> None:
    def few(outputs: dict[str, Array], _: object) -> dict[str, Array]:
        outputs["place"][:3] = (outputs["place"][:3] + 1) % 5
        return outputs

    assert judge_spoiled(integers(), few) == ({}, {})


def quantized() -> Graph:
    graph = Graph()
    x = graph.add_input("x", tensor(FP32, 50))
    scale, zero = graph.add_constant(np.array(0.02, np.float32)), graph.add_constant(np.array(3, np.uint8))
    attrs = OPDEFS["QuantizeLinear"].attrs(output_dtype=np.dtype(np.uint8))
    graph.add_output(graph.add("QuantizeLinear", [x, scale, zero], attrs).value, "q")
    return graph


def test_integers_of_quantized_networks_may_be_off_by_one() -> None:
    graph = quantized()
    assert judge_spoiled(graph, lambda y, _: {"q": y["q"] ^ 1}) == ({}, {})
    wrong, _ = judge_spoiled(graph, lambda y, _: {"q": y["q"] ^ 128})
    assert "differs from the reference in 100.0% of its integers" in wrong["fake/1t"]


def test_quantized_results_are_compared_to_a_few_steps() -> None:
    """The limit is about twelve steps of 255. Here, a small change of the inputs changes the results by less."""

    def lowered(steps: int) -> Spoil:
        return lambda y, _: {"q": np.where(y["q"] > 100, y["q"] - steps, y["q"]).astype(np.uint8)}

    feeds = {"x": np.linspace(-6, 6, 50, dtype=np.float32)}
    assert judge_spoiled(quantized(), lowered(7), feeds) == ({}, {})
    assert "differs from the reference" in judge_spoiled(quantized(), lowered(18), feeds)[0]["fake/1t"]


def test_quantized_results_of_smaller_inputs_are_compared_if_there_is_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine that is wrong only where nothing saturates."""

    def saturated_alone(outputs: dict[str, Array], _: object) -> dict[str, Array]:
        return outputs if (outputs["q"] > 100).any() else {"q": outputs["q"] // 2}

    feeds = {"x": np.linspace(-6, 6, 50, dtype=np.float32)}
    small = {"x": feeds["x"] / 2}  # integers up to 153, and up to 78 after halving
    assert judge_spoiled(quantized(), saturated_alone, feeds) == ({}, {})
    assert judge_spoiled(quantized(), saturated_alone, small)[0]["fake/1t"].endswith("on smaller inputs")
    monkeypatch.setattr(cpu_check, "ORACLE_SECONDS", 0.0)
    assert judge_spoiled(quantized(), saturated_alone, small) == ({}, {})


def test_shapes_and_types_are_compared() -> None:
    wrong, _ = judge_spoiled(network(False), lambda y, _: {"y": y["y"][:, :-1]})
    assert wrong["fake/1t"] == "its result 'y' is float32[2, 49], that of the reference float32[2, 50]"
    wrong, _ = judge_spoiled(network(False), lambda y, _: {"y": y["y"].astype(np.float64)})
    assert wrong["fake/1t"] == "its result 'y' is float64[2, 50], that of the reference float32[2, 50]"


def selecting() -> Graph:
    """The rows whose first element is positive."""
    graph = Graph()
    x = graph.add_input("x", tensor(FP32, 20, 2))
    first = graph.add("Gather", [x, graph.add_constant(np.array(0))], OPDEFS["Gather"].attrs(axis=1))
    chosen = graph.add("Greater", [first.value, graph.add_constant(np.array(0, np.float32))])
    graph.add_output(graph.add("Compress", [x, chosen.value], OPDEFS["Compress"].attrs(axis=0)).value, "y")
    return graph


def test_an_empty_result_with_wrong_elements_or_sizes_is_refused() -> None:
    last: dict[str, dict[str, Array]] = {}

    def keeps(outputs: dict[str, Array], _: object) -> dict[str, Array]:
        if outputs["y"].size:
            last["y"] = outputs
        return last["y"]

    def invents(outputs: dict[str, Array], _: object) -> dict[str, Array]:
        return outputs if outputs["y"].size else {"y": np.zeros((1, 2), np.float32)}

    def drops(outputs: dict[str, Array], feeds: Mapping[str, Array]) -> dict[str, Array]:
        return {"y": outputs["y"][:-1]} if (feeds["x"] > 0).all() else outputs

    for spoil, said in (
        (keeps, "that of the reference float32[0, 2], on inputs of zeros"),
        (invents, "float32[1, 2], that"),
    ):
        wrong, doubts = judge_spoiled(selecting(), spoil)
        assert said in wrong["fake/1t"]
        assert not doubts
    assert "that of the reference float32[20, 2], on positive inputs" in judge_spoiled(selecting(), drops)[0]["fake/1t"]
    assert judge_spoiled(selecting(), lambda y, _: y) == ({}, {})


def test_an_error_on_an_empty_selection_is_refused_and_a_lost_process_is() -> None:
    for error in (RunError("Batch size is zero."), TrialLost("its process was ended by SIGFPE when it ran")):

        def fails(outputs: dict[str, Array], _: object, error: RunError = error) -> dict[str, Array]:
            if not outputs["y"].size:
                raise error
            return outputs

        assert judge_spoiled(selecting(), fails)[0] == {"fake/1t": f"{error.message}, on inputs of zeros"}


def test_inputs_that_the_oracle_refuses_too_are_no_fault() -> None:
    """Only the made-up inputs select twenty rows. For other inputs, the Reshape to twenty rows rightly fails."""
    graph = selecting()
    (end,) = graph.outputs
    value = graph.op(end).inputs[0]
    shape = graph.add_constant(np.array([20, 2]))
    graph.add_output(graph.add("Reshape", [value, shape], OPDEFS["Reshape"].attrs()).value, "z")  # type: ignore[list-item]
    feeds = {"x": np.ones((20, 2), np.float32)}
    assert judge_spoiled(graph, lambda y, _: y, feeds) == ({}, {})


def test_without_an_oracle_a_result_is_noted_as_unjudged(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*args: object) -> None:
        raise RunError("no kernel")

    engine = Fake(network(False), 0.0)
    feeds = random_feeds(network(False), seed=1)
    result = engine.run(feeds)
    engine.run = lambda feeds, *, poison=False: result  # type: ignore[method-assign]
    monkeypatch.setattr(cpu_check, "evaluate", none)
    wrong, doubts = check(network(False), {"fake/1t": engine}, feeds, "fp32")  # type: ignore[dict-item]
    assert wrong == {}
    assert "the reference does not take the made-up inputs (no kernel)" in doubts["fake/1t"]


def test_a_network_that_amplifies_roundoff_is_noted() -> None:
    wrong, doubts = judge(steep=True, error=1e-6)
    assert wrong == {}
    assert "no made-up input can judge it" in doubts["fake/1t"]
    assert "note" in Measured("fake/1t", {}, 1.0, note=doubts["fake/1t"]).to_json()
    assert "note" not in Measured("fake/1t", {}, 1.0).to_json()


def ranking(tilt: float) -> Graph:
    """Rows of a table, selected by scores that saturate to equal numbers; ``tilt`` is the relative difference between
    consecutive scores."""
    graph = Graph()
    x = graph.add_input("x", tensor(FP32, 50))

    def constant(array: Any) -> Value:
        return graph.add_constant(np.asarray(array, np.float32))

    large = graph.add("Add", [x, constant(100)])
    scores = graph.add("Mul", [graph.add("Sigmoid", [large.value]).value, constant(1 + tilt * np.arange(50))])
    k = graph.add_constant(np.array([5]))
    best = graph.add("TopK", [scores.value, k], OPDEFS["TopK"].attrs(), outputs=2)
    table = graph.add_constant(np.random.default_rng(0).standard_normal((50, 3)).astype(np.float32))
    graph.add_output(graph.add("Gather", [table, Value(best.id, 1)], OPDEFS["Gather"].attrs()).value, "y")
    return graph


def judge_ranking(spoil: float = 1.0) -> tuple[Any, Any]:
    class Other(Fake):
        def run(self, feeds: Mapping[str, Array], *, poison: bool = False) -> dict[str, Array]:
            return {name: y * np.float32(spoil) for name, y in super().run(feeds, poison=poison).items()}

    graph = ranking(tilt=0.0)
    engines = {"fake/1t": Other(ranking(tilt=2.0**-23), 0.0)}
    return check(graph, engines, random_feeds(graph, seed=1), "fp32")  # type: ignore[arg-type]


def test_equal_scores_in_another_order_are_noted() -> None:
    wrong, doubts = judge_ranking()
    assert wrong == {}
    assert "or the values that it ranks" in doubts["fake/1t"]


def test_a_ranking_does_not_excuse_every_result() -> None:
    wrong, doubts = judge_ranking(spoil=1e3)
    assert doubts == {}
    assert "differs from the reference" in wrong["fake/1t"]


def canceled(order: int) -> Graph:
    """Rows of a table, selected by sums that cancel to roundoff. ``order`` (1 or -1), the order of the terms, changes them."""
    graph = Graph()
    x = graph.add_input("x", tensor(FP32, 1, 64))
    parts = np.random.default_rng(0).standard_normal((64, 50))
    ones = graph.add("Add", [x, graph.add_constant(np.ones(64, np.float32))]).value
    terms = graph.add_constant((parts - parts.mean(0)).astype(np.float32)[::order])
    sums = graph.add("MatMul", [ones, terms], OPDEFS["MatMul"].attrs()).value
    best = graph.add("TopK", [sums, graph.add_constant(np.array([5]))], OPDEFS["TopK"].attrs(), outputs=2)
    table = graph.add_constant(np.random.default_rng(1).standard_normal((50, 3)).astype(np.float32))
    graph.add_output(graph.add("Gather", [table, Value(best.id, 1)], OPDEFS["Gather"].attrs()).value, "y")
    return graph


@pytest.mark.parametrize("spoil", [1.0, 1e3])
def test_a_ranking_of_roundoff_on_inputs_of_zeros_is_noted(spoil: float) -> None:
    """The image is zero, so its proposals differ only by the roundoff of their convolutions."""
    graph = canceled(1)
    other = evaluate(canceled(-1), feeds := {"x": np.zeros((1, 64), np.float32)})
    wrong, doubts = judge_spoiled(graph, lambda _, __: {"y": other["y"] * np.float32(spoil)}, feeds)
    assert "no made-up input can judge it" in doubts["fake/1t"] if spoil == 1 else "differs" in wrong["fake/1t"]
    assert not (wrong if spoil == 1 else doubts)


def resized(order: int) -> Graph:
    """Like :func:`canceled`. The selected rows are an image, which is resized to twice its width and added to another one."""
    graph = canceled(order)
    rows = graph.op(graph.outputs[0]).inputs[0]
    assert rows is not None
    scales = graph.add_constant(np.array([1, 1, 2], np.float32))
    larger = graph.add("Resize", [rows, None, scales], OPDEFS["Resize"].attrs(mode="nearest")).value
    graph.add_output(graph.add("Add", [larger, graph.add_constant(np.ones(6, np.float32))]).value, "larger")
    return graph


def test_roundoff_does_not_change_the_scales_of_a_resize() -> None:
    graph = resized(1)
    other = evaluate(resized(-1), feeds := {"x": np.zeros((1, 64), np.float32)})
    wrong, doubts = judge_spoiled(graph, lambda _, __: other, feeds)
    assert "no made-up input can judge it" in doubts["fake/1t"]
    assert not wrong
