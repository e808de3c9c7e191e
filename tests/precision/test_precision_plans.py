"""Plans: the greedy descent compared with all possible plans, its order, casts, pins."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from optdnn.config import PRECISIONS
from optdnn.errors import UsageError
from optdnn.ir.graph import Graph
from optdnn.passes.support.precision import PrecisionPlan
from optdnn.passes.support.precision_choices import PrecisionChoice
from optdnn.precision.pins import pinned
from optdnn.precision.plans import Node, Problem, descent
from optdnn.types import FP32, TensorType


def cast(a: str, b: str, nbytes: int) -> float:
    return 0.0 if a == b else 1.0 + nbytes / 100


def chain(seed: int, n: int, precisions: tuple[str, ...]) -> Problem:
    """A chain with a skip connection, with random times and damages."""
    rng = np.random.default_rng(seed)
    nodes = []
    for k in range(n):
        times = {p: float(rng.uniform(1, 10)) for p in precisions}
        damage = {p: 0.0 if p == "fp32" else float(rng.uniform(0, 1)) for p in precisions}
        nodes.append(Node(f"n{k}", times, damage))
    edges: list[tuple[str | None, str | None, int]] = [(None, "n0", 50), (f"n{n - 1}", None, 50)]
    edges += [(f"n{k}", f"n{k + 1}", int(rng.integers(10, 400))) for k in range(n - 1)]
    edges.append(("n0", f"n{n - 2}", 120))
    return Problem(nodes, edges, cast)


def test_of_equally_fast_plans_the_descent_takes_the_more_accurate() -> None:
    """Predicted times are often equal."""
    times, damage = {"fp32": 4.5, "bf16": 2.0, "fp16": 2.0}, {"fp32": 0.0, "bf16": 0.8, "fp16": 0.1}
    nodes = [Node("a", times, damage), Node("b", times, damage), Node("c", {**times, "fp32": 0.1}, damage)]
    problem = Problem(nodes, [(None, "a", 200), ("a", "b", 400), ("b", None, 4)], cast)
    assert descent(problem)[0] == {"a": "fp16", "b": "fp16", "c": "fp32"}


def all_plans(problem: Problem) -> list[dict[str, str]]:
    options = [tuple(n.times) for n in problem.nodes.values()]
    return [dict(zip(problem.nodes, p, strict=True)) for p in itertools.product(*options)]


@pytest.mark.parametrize("precisions", [("fp32", "bf16"), ("fp32", "bf16", "int8")])
@pytest.mark.parametrize("seed", range(4))
def test_the_descent_comes_close_to_the_fastest_plan_within_any_damage(seed: int, precisions: tuple[str, ...]) -> None:
    problem = chain(seed, 6, precisions)
    every, plans = all_plans(problem), descent(problem)
    ratios = []
    for bound in np.linspace(0, 1, 12) * problem.damage(plans[0]):
        want = min(problem.time(p) for p in every if problem.damage(p) <= bound)
        ratios.append(min(problem.time(p) for p in plans if problem.damage(p) <= bound) / want)
    assert np.mean(ratios) < 1.05
    assert ratios[-1] == pytest.approx(1.0, abs=0.02)


def test_a_cast_that_costs_more_than_it_gains_is_not_made() -> None:
    nodes = [Node(k, {"fp32": 5.0, "bf16": 4.5}, {"fp32": 0.0, "bf16": 0.0}) for k in "abc"]
    alone = Problem(nodes, [(None, "a", 0), ("a", "b", 0), ("b", "c", 0), ("c", None, 0)], cast)
    assert set(descent(alone)[0].values()) == {"fp32"}  # three gains of 0.5 do not pay for two casts of 1
    longer = [*nodes, Node("d", {"fp32": 5.0, "bf16": 3.0}, {"fp32": 0.0, "bf16": 0.0})]
    edges = [(None, "a", 0), ("a", "b", 0), ("b", "c", 0), ("c", "d", 0), ("d", None, 0)]
    assert set(descent(Problem(longer, edges, cast))[0].values()) == {"bf16"}


def test_the_descent_goes_from_fast_to_accurate() -> None:
    problem = chain(1, 9, ("fp32", "bf16", "int8"))
    plans = descent(problem)
    times, damages = [problem.time(p) for p in plans], [problem.damage(p) for p in plans]
    assert len(plans) > 3
    assert times == sorted(times)
    assert damages == sorted(damages, reverse=True)
    assert damages[-1] == 0.0
    assert times[0] <= min(problem.time(problem.uniform(p)) for p in ("fp32", "bf16", "int8"))


def test_nodes_leave_their_fast_precision_by_gain_per_damage() -> None:
    """Without casts, the op with the least gain for its damage is the first to change back."""
    nodes = [
        Node("cheap", {"fp32": 10.0, "int8": 9.0}, {"fp32": 0.0, "int8": 1.0}),
        Node("dear", {"fp32": 10.0, "int8": 1.0}, {"fp32": 0.0, "int8": 1.0}),
    ]
    assert descent(Problem(nodes, [], cast)) == [
        {"cheap": "int8", "dear": "int8"},
        {"cheap": "fp32", "dear": "int8"},
        {"cheap": "fp32", "dear": "fp32"},
    ]


def test_a_node_of_one_precision_stays() -> None:
    nodes = [
        Node("pinned", {"int8": 9.0}, {"int8": 5.0}),
        Node("free", {"fp32": 9.0, "int8": 2.0}, {"fp32": 0.0, "int8": 1.0}),
    ]
    problem = Problem(nodes, [("pinned", "free", 10)], cast)
    assert [p["free"] for p in descent(problem)] == ["int8", "fp32"]
    assert all(p["pinned"] == "int8" for p in descent(problem))
    assert problem.uniform("fp32") == {"pinned": "int8", "free": "fp32"}


def test_a_problem_without_nodes_has_one_plan() -> None:
    assert descent(Problem([], [], cast)) == [{}]


CHOICES = [
    PrecisionChoice("a_out", "Conv", ("layer1/conv", "layer1/bn"), ("fp32", "bf16", "int8")),
    PrecisionChoice("b_out", "Conv", ("layer2/conv",), ("fp32", "bf16", "int8")),
    PrecisionChoice("c_out", "Softmax", ("layer2/softmax",), ("fp32", "bf16"), {"int8": "Softmax has no int8 form"}),
]


def test_pins_the_last_pattern_counts_and_the_most_accurate_of_fused_nodes() -> None:
    assert pinned({"*": "bf16", "layer2/*": "fp32"}, CHOICES) == {
        "a_out": ("bf16", "*"),
        "b_out": ("fp32", "layer2/*"),
        "c_out": ("fp32", "layer2/*"),
    }
    both = pinned({"layer1/conv": "int8", "layer1/bn": "fp32"}, CHOICES)
    assert both == {"a_out": ("fp32", "layer1/bn")}


def test_a_full_name_counts_before_patterns_in_any_order() -> None:
    for pins in ({"*": "bf16", "layer1/conv": "int8"}, {"layer1/conv": "int8", "*": "bf16"}):
        assert pinned(pins, CHOICES)["a_out"] == ("int8", "layer1/conv")  # its other node, layer1/bn, fits "*" alone


@pytest.mark.parametrize(
    ("pins", "precision"),
    [
        ({"*": "fp16", "net/conv[1]": "fp32"}, "fp32"),
        ({"net/conv[1]": "fp32", "*": "fp16"}, "fp32"),
        ({"*": "fp32", "net/*": "fp16"}, "fp16"),
        ({"net/*": "fp16", "*": "fp32"}, "fp32"),
        ({"net/relu": "fp16", "net/conv[1]": "fp32"}, "fp32"),
        ({"net/conv[1]": "int8", "net/relu": "fp16", "*": "fp32"}, "fp16"),
        ({"other*": "fp32"}, "bf16"),
        ({"*": "fp32", "y": "fp16"}, "fp16"),  # by the op's key
    ],
)
def test_a_plan_reads_pins_as_the_search_does(pins: dict[str, str], precision: str) -> None:
    graph = Graph("g")
    x = graph.add_input("x", TensorType(FP32, (2, 4)))
    op = graph.add("Relu", [x], names=["y"], src=["net/conv[1]", "net/relu"])
    plan = PrecisionPlan("bf16", pins)
    assert plan.of(op) == precision
    assert plan.named(op) == (precision != "bf16")
    found = pinned(pins, [PrecisionChoice("y", "Relu", tuple(sorted(op.src)), PRECISIONS)])
    assert found.get("y", ("bf16", ""))[0] == precision


def test_a_pattern_skips_nodes_that_lack_the_precision_but_a_name_must_have_it() -> None:
    assert set(pinned({"layer2*": "int8"}, CHOICES)) == {"b_out"}
    with pytest.raises(UsageError, match="Softmax cannot run in int8: Softmax has no int8 form"):
        pinned({"layer2/softmax": "int8"}, CHOICES)
