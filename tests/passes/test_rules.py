"""Rules, the worklist, reports and pipelines; check_pass fails if a pass is wrong."""

from __future__ import annotations

import json
from collections.abc import Callable

import numpy as np
import pytest
from support.check import check_pass, check_refused, check_untouched
from support.net import Net

from optdnn.errors import InternalError, ShapeError, UsageError
from optdnn.ir.graph import Graph, Op, Value
from optdnn.ir.patch import Patch
from optdnn.ops.shape import ReshapeAttrs
from optdnn.passes.base import Match, Miss, Pass, PassContext, PassReport, Rule, RulePass, rule, run_pipeline
from optdnn.passes.dce import DeadCode
from optdnn.passes.fold_constants import FoldConstants
from optdnn.passes.pipelines import O1, O2, O3, O3_GPU, PIPELINE


class Swap(Rule):
    """Replaces one kind by another."""

    def __init__(self, old: str, new: str, build: Callable[[Patch, Op], Value] | None = None):
        self.name, self.kinds, self.new, self.build = f"{old}_to_{new}", frozenset({old}), new, build

    def match(self, graph: Graph, op: Op, context: PassContext) -> Match | Miss | None:
        build = self.build or (lambda patch, op: patch.add(self.new, op.inputs))
        return Match((op,), lambda patch: build(patch, op))


def rule_pass(*rules: Rule) -> RulePass:
    one = RulePass()
    one.name, one.rules = "test", rules
    return one


def relu_and_tanh() -> Graph:
    n = Net()
    return n.done(n.op("Tanh", n.op("Relu", n.input(2, 3))))


ABS = Swap("Relu", "Abs")


def scaled(factor: float) -> Swap:
    """A pass that is wrong by a factor."""

    def build(patch: Patch, op: Op) -> Value:
        x = op.inputs[0]
        assert x is not None
        k = patch.constant(np.asarray(factor, patch.type(x).dtype))
        return patch.add("Max", [patch.add("Mul", [x, k]), patch.constant(np.asarray(0.0, patch.type(x).dtype))])

    return Swap("Relu", "Max", build)


# ---------------------------------------------------------------- check_pass


def test_a_right_pass_is_accepted() -> None:
    check_pass(rule_pass(scaled(1.0)), relu_and_tanh(), changes=1, kinds={"Max": 1, "Mul": 1, "Tanh": 1})


@pytest.mark.parametrize("factor", [1 + 1e-8, 1 + 1e-3])
def test_a_wrong_value_is_caught(factor: float) -> None:
    with pytest.raises(AssertionError, match="off by"):
        check_pass(rule_pass(scaled(factor)), relu_and_tanh(), changes=1)


def test_another_function_is_caught() -> None:
    with pytest.raises(AssertionError, match="off by"):
        check_pass(rule_pass(ABS), relu_and_tanh(), changes=1)


def test_a_wrong_count_is_caught() -> None:
    with pytest.raises(AssertionError, match="1 rewrites, not 2"):
        check_pass(rule_pass(scaled(1.0)), relu_and_tanh(), changes=2)
    with pytest.raises(AssertionError, match=r"not \{'other': 1\}"):
        check_pass(rule_pass(scaled(1.0)), relu_and_tanh(), changes=1, rules={"other": 1})


def test_a_wrong_structure_is_caught() -> None:
    with pytest.raises(AssertionError, match="Max"):
        check_pass(rule_pass(scaled(1.0)), relu_and_tanh(), changes=1, kinds={"Relu": 1, "Tanh": 1})
    n = Net()
    check_pass(DeadCode(), relu_and_tanh(), changes=0, after=n.done(n.op("Tanh", n.op("Relu", n.input(2, 3)))))
    n = Net()
    with pytest.raises(AssertionError):
        check_pass(DeadCode(), relu_and_tanh(), changes=0, after=n.done(n.op("Relu", n.op("Tanh", n.input(2, 3)))))


def test_a_pass_that_is_not_idempotent_is_caught() -> None:
    class Once(Pass):
        name = "once"

        def run(self, graph: Graph, context: PassContext, report: PassReport) -> None:
            one = rule_pass(
                Swap("Relu", "Clip", lambda p, op: p.add("Clip", [op.inputs[0], p.constant(np.float32(0))]))
            )
            other = rule_pass(Swap("Clip", "Relu", lambda p, op: p.add("Relu", [op.inputs[0]])))
            report.fired.extend((one if graph.of_kind("Relu") else other)(graph, context).fired)

    with pytest.raises(AssertionError, match="not idempotent"):
        check_pass(Once(), relu_and_tanh(), changes=1)


def test_lost_provenance_is_caught() -> None:
    forget = Swap("Relu", "Clip", lambda p, op: p.add("Clip", [op.inputs[0], p.constant(np.float32(0))], src=()))
    with pytest.raises(AssertionError, match=r"provenance lost: \['Relu_1'\]"):
        check_pass(rule_pass(forget), relu_and_tanh(), changes=1)


def test_a_network_that_ignores_its_input_is_caught() -> None:
    n = Net()
    x = n.input(2, 3)
    graph = n.done(n.op("Add", n.op("Mul", x, 1e-9), 1.0))
    with pytest.raises(AssertionError, match="hardly depends"):
        check_pass(DeadCode(), graph, changes=0)
    check_pass(DeadCode(), graph, changes=0, depends_on_input=False)


def test_check_refused_wants_the_reason_and_no_change() -> None:
    class Never(Swap):
        def match(self, graph: Graph, op: Op, context: PassContext) -> Match | Miss | None:
            return Miss("it is Tuesday")

    never = rule_pass(Never("Relu", "Relu"))
    check_refused(never, relu_and_tanh(), because="is Tues", rule="Relu_to_Relu")
    with pytest.raises(AssertionError, match="no refusal matches"):
        check_refused(never, relu_and_tanh(), because="Monday")
    with pytest.raises(AssertionError, match="fired"):
        check_refused(rule_pass(scaled(1.0)), relu_and_tanh(), because="")
    with pytest.raises(AssertionError, match="refused"):
        check_untouched(never, relu_and_tanh())
    check_untouched(DeadCode(), relu_and_tanh())


# ---------------------------------------------------------------- the worklist


def test_rules_that_undo_each_other_are_stopped() -> None:
    endless = rule_pass(Swap("Relu", "Abs"), Swap("Abs", "Relu"))
    with pytest.raises(InternalError, match="does not come to an end"):
        endless(relu_and_tanh())


def test_new_ops_are_looked_at_again() -> None:
    graph = relu_and_tanh()
    report = rule_pass(Swap("Relu", "Abs"), Swap("Abs", "Neg"))(graph)
    assert [f.rule for f in report.fired] == ["Relu_to_Abs", "Abs_to_Neg"]
    assert graph.kinds() == {"Neg": 1, "Tanh": 1}


@pytest.mark.parametrize("far", [False, True])
def test_rules_that_look_far_are_tried_again(far: bool) -> None:
    """Tanh becomes Sigmoid once no op of the network is a Relu. The last Relu is no neighbor, and is tried after it."""

    @rule("bounded", {"Tanh"}, looks_far=far)
    def bounded(graph: Graph, op: Op) -> Match | Miss:
        if "Relu" in graph.kinds():
            return Miss("there is a Relu")
        return Match((op,), lambda patch: patch.add("Sigmoid", op.inputs))

    n = Net()
    x = n.input(2, 3)
    y = n.op("Exp", n.op("Neg", n.op("Tanh", x)))
    graph = n.done(n.op("Add", y, n.op("Relu", n.op("Neg", n.op("Exp", x)))))
    report = rule_pass(bounded, ABS)(graph)
    assert graph.kinds()["Abs"] == 1
    assert ("Sigmoid" in graph.kinds()) == far
    assert bool(report.refused) != far


def test_refusals_of_ops_that_are_gone_are_forgotten() -> None:
    class Hesitant(Swap):
        def match(self, graph: Graph, op: Op, context: PassContext) -> Match | Miss | None:
            return Miss("not this one")

    report = rule_pass(Hesitant("Relu", "Neg"), Swap("Tanh", "Neg", lambda p, op: p.graph.op(op.inputs[0]).inputs[0]))(
        relu_and_tanh()
    )
    assert report.refused == []
    report = rule_pass(Hesitant("Relu", "Neg"))(relu_and_tanh())
    assert [(r.rule, r.nodes, r.reason) for r in report.refused] == [("Relu_to_Neg", ("Relu_1",), "not this one")]


def test_a_patch_that_changes_a_type_is_refused() -> None:
    wrong = Swap("Tanh", "Shape", lambda p, op: p.add("IsNaN", op.inputs))
    with pytest.raises(InternalError, match="would change the type of 'Tanh_2' from fp32\\[2, 3\\] to bool"):
        rule_pass(wrong)(relu_and_tanh())


def test_a_contradiction_found_by_a_pass_names_the_op() -> None:
    """A target shape that turns out not to fit, where inference could not know it before."""
    n = Net()
    x = n.input(2, 6)
    target = n.op("Gather", n.const(np.arange(300), np.int64), n.ints(5, 5))
    graph = n.done(n.op("Reshape", x, target, attrs=ReshapeAttrs()))
    with pytest.raises(ShapeError, match=r"Reshape 'Reshape_2': .*cannot be reshaped"):
        FoldConstants()(graph)


# ---------------------------------------------------------------- reports and pipelines


def test_reports_are_plain_and_without_times() -> None:
    (report,) = run_pipeline(relu_and_tanh(), [rule_pass(scaled(1.0))])
    data = json.loads(json.dumps(report.to_json()))
    assert data["fired"] == [{"rule": "Relu_to_Max", "nodes": ["Relu_1"]}]
    assert (data["nodes_before"], data["nodes_after"]) == (2, 3)
    assert data["kinds_after"] == {"Max": 1, "Mul": 1, "Tanh": 1}
    assert "seconds" not in data
    assert report.seconds > 0


def test_a_pipeline_stops_and_reports_after_each_pass() -> None:
    seen: list[tuple[int, str]] = []
    passes = [DeadCode(), rule_pass(scaled(1.0)), DeadCode()]
    reports = run_pipeline(
        relu_and_tanh(), passes, stop_after="test", after=lambda i, p, g, r: seen.append((i, p.name))
    )
    assert seen == [(0, "dce"), (1, "test")]
    assert len(reports) == 2


def test_verification_names_the_pass_that_broke_the_graph() -> None:
    class Vandal(Pass):
        name = "vandal"

        def run(self, graph: Graph, context: PassContext, report: PassReport) -> None:
            (op,) = graph.of_kind("Tanh")
            graph.nx.remove_edge(op.inputs[0].op, op.id)

    with pytest.raises(InternalError, match="after pass vandal: edges of Tanh"):
        run_pipeline(relu_and_tanh(), [Vandal()], verify=True)


def test_the_pipelines_by_level() -> None:
    assert PIPELINE(1, "cpu")[:-2] == O1
    for target in ("cpu", "cuda:sm_90a"):
        assert all("assign_precision" in {p.name for p in PIPELINE(level, target)} for level in range(4))
    assert PIPELINE(2, "reference")[:-1] == O2
    assert PIPELINE(3, "reference")[:-1] == O3
    assert PIPELINE(3, "reference")[-1].name == "assign_precision"  # weights in 4 and 8 bits
    assert PIPELINE(3, "reference")[: len(O2)] == O2
    gpu = PIPELINE(3, "cuda:sm_90a")
    assert gpu[: len(O3_GPU)] == O3_GPU
    assert [p.name for p in gpu[-2:]] == ["assign_layout", "flatten_last"]
    assert "fuse_prologue" not in {p.name for p in PIPELINE(2, "cpu")}
    assert "scale_shift_to_bn" in {p.name for p in PIPELINE(3, "cpu")}
    for level in (-1, 4):
        with pytest.raises(UsageError, match=f"opt-level {level}"):
            PIPELINE(level, "cpu")
