"""Choices of tactics and configurations: signatures, providers, limits, and choices that do not exist."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.conv_cases import excited
from support.net import Net, built
from support.quantized_nets import norm_network
from support.sequence_cases import heads, recurrent
from support.simulated import feeds_of, lowered, simulate

from optdnn.config import BuildOptions
from optdnn.errors import InternalError, UsageError
from optdnn.ir.graph import Graph, Value
from optdnn.kernels.builder import Builder
from optdnn.kernels.conv import hopper_launch
from optdnn.kernels.conv.hopper import HopperConv
from optdnn.kernels.tactic import Offer
from optdnn.lowering import table
from optdnn.lowering.choose import Selection, TacticChoice, alternatives, usable
from optdnn.lowering.cuda import Emitted, Prepared, emit_program, lower_cuda
from optdnn.ops.attention import AttentionAttrs
from optdnn.ops.norm import GroupNormAttrs
from optdnn.optimize import optimize
from optdnn.passes.base import PassContext
from optdnn.passes.fold_quantized import FoldQuantized
from optdnn.runtime.cuda.compile import nvrtc
from optdnn.runtime.cuda.gpu_facts import of_arch


def two_equal(channels: int = 32) -> Graph:
    """Two equal convolutions in sequence, and a different one."""
    n = Net()
    x = n.input(1, channels, 14, 14)
    for _ in range(2):
        x = n.op("Relu", n.conv(x, channels, 3))
    return n.done(n.conv(x, 16, 1, pads=0))


def emitted(graph: Graph, choices: dict[str, TacticChoice] | None = None, **options: Any) -> Emitted:
    chosen = BuildOptions(target="cuda:sm_90a", precision="fp16", **options)
    copy = graph.copy()
    optimize(copy, chosen, "cuda:sm_90a")
    return emit_program(copy, chosen, of_arch("sm_90a"), {}, choices)


def convolutions(found: Emitted) -> list[Any]:
    return [d for d in found.decisions if d.op.kind == "Conv"]


def test_equal_operators_have_one_signature_and_others_have_another() -> None:
    a, b, c = convolutions(emitted(two_equal()))
    assert a.signature == b.signature != c.signature
    assert a.signature == convolutions(emitted(two_equal()))[0].signature, "it repeats"
    assert a.signature != convolutions(emitted(two_equal(40)))[0].signature, "sizes count"


def test_a_choice_is_used_and_gives_the_same_results() -> None:
    graph = two_equal()
    first = convolutions(emitted(graph))[0]
    wanted = TacticChoice("conv_direct")
    again = convolutions(emitted(graph, {first.signature: wanted}))
    assert [d.choice.tactic for d in again] == ["conv_direct", "conv_direct", "conv_sm90"]

    chosen = BuildOptions(target="simulate", precision="fp16")
    copy = graph.copy()
    optimize(copy, chosen, "simulate")
    other = lower_cuda(copy, chosen, of_arch("sm_90a"), {}, prepared=Prepared({first.signature: wanted}))
    feeds = feeds_of(graph)
    ours, plain = simulate(other, feeds), simulate(lowered(graph), feeds)
    for name, value in plain.items():
        assert abs(ours[name].astype(float) - value).max() < 4e-3 * abs(value).max()


def test_every_offered_configuration_can_be_chosen() -> None:
    graph = two_equal()
    key = convolutions(emitted(graph))[0].signature
    found: list[TacticChoice] = []

    def visit(b: Builder, op: Any, k: str) -> None:
        if k == key and not found:
            before = (len(b.steps), len(b.buffers), dict(b.place), len(b.blobs), len(b.kernels))
            found.extend(
                TacticChoice(t.name, "" if o is None else o.name)
                for t, o in alternatives(b, op, table.TACTICS["Conv"], Selection())
            )
            assert before == (len(b.steps), len(b.buffers), dict(b.place), len(b.blobs), len(b.kernels))

    options = BuildOptions(target="cuda:sm_90a", precision="fp16")
    copy = graph.copy()
    optimize(copy, options, "cuda:sm_90a")
    emit_program(copy, options, of_arch("sm_90a"), {}, None, visit)
    assert len(found) > 10
    assert len(set(found)) == len(found)
    for choice in found[:40:5]:
        assert convolutions(emitted(graph, {key: choice}))[0].choice == choice


@pytest.mark.parametrize("choice", [TacticChoice("no such tactic"), TacticChoice("conv_sm90", "no such tile")])
def test_a_choice_that_does_not_exist_is_an_error(choice: TacticChoice) -> None:
    key = convolutions(emitted(two_equal()))[0].signature
    with pytest.raises(InternalError, match="no such"):
        emitted(two_equal(), {key: choice})


def test_a_chosen_tactic_that_refuses_here_is_replaced_by_the_cost_models_choice() -> None:
    """Tuning combines choices that were measured separately. A tactic may depend on the choices for earlier operators."""
    (conv, *_) = convolutions(emitted(two_equal()))
    (refused, *_) = (r["tactic"] for r in conv.refused if "computes its neighbor" not in r["reason"])
    (found, *_) = convolutions(emitted(two_equal(), {conv.signature: TacticChoice(refused)}))
    assert found.choice == conv.choice
    assert refused in [r["tactic"] for r in found.refused]


def test_a_configuration_that_cannot_run_it_is_an_error() -> None:
    key = convolutions(emitted(two_equal()))[0].signature
    with pytest.raises(InternalError, match=r"2x1m2n64s24o1b1 cannot run it: \d+ bytes of shared memory exceed"):
        emitted(two_equal(), {key: TacticChoice("conv_sm90", "2x1m2n64s24o1b1")})


def test_a_choice_needs_no_ranking_of_candidates(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = two_equal()
    chosen = {d.signature: d.choice for d in convolutions(emitted(graph))}
    assert all(c.config for c in chosen.values())

    def ranked(problem: Any, dense: bool, gpu: Any) -> Any:
        raise AssertionError("the cost model was asked")

    monkeypatch.setattr(hopper_launch, "ranked", ranked)
    again = convolutions(emitted(graph, chosen))
    assert {d.signature: d.choice for d in again} == chosen
    assert all(d.seconds is not None for d in again)


def reasons(found: Emitted) -> str:
    return "; ".join(r["reason"] for d in convolutions(found) for r in d.refused)


def test_workspace_refuses_tactics_that_need_more_scratch_memory() -> None:
    n = Net()
    graph = n.done(n.conv(n.input(1, 16, 16, 16), 16, 2, strides=2, pads=0))
    plain = convolutions(emitted(graph))[0]
    assert plain.choice.tactic == "blocks_sm90"
    assert plain.scratch >= 16 * 16 * 16 * 2, "it moves blocks of pixels into the channels first"
    bounded = emitted(graph, workspace=100)
    (found,) = convolutions(bounded)
    assert found.choice.tactic != "blocks_sm90"
    assert found.scratch <= 100
    assert "scratch memory; 100 are allowed" in reasons(bounded)
    assert convolutions(emitted(graph, workspace=plain.scratch))[0].choice.tactic == "blocks_sm90"


def test_row_invariant_takes_sums_in_one_order_only() -> None:
    n = Net()
    graph = n.done(n.conv(n.input(1, 512, 7, 7), 64, 3))
    plain, invariant = convolutions(emitted(graph))[0], convolutions(emitted(graph, row_invariant=True))[0]
    assert "k" in plain.choice.config, "the cost model splits K here"
    tile = invariant.choice.config
    assert invariant.choice.tactic == "conv_sm90"
    assert "k" not in tile
    assert not tile.startswith("patch")


def test_row_invariant_takes_one_tactic_for_all_counts_of_rows() -> None:
    """The kernel for few rows adds up in another order."""
    chosen = {}
    for rows in (1, 16):
        n = Net()
        graph = n.done(n.matmul(n.input(rows, 1024), 1024))
        for invariant in (False, True):
            (d,) = [d for d in emitted(graph, row_invariant=invariant).decisions if d.op.kind in ("MatMul", "Gemm")]
            chosen[rows, invariant] = d.choice.tactic
    assert chosen[1, False] != chosen[16, False], "else the test says nothing"
    assert chosen[1, True] == chosen[16, True]


def squeezed(n: Net, batch: int) -> Value:
    x = n.op("Relu", n.conv(n.input(batch, 16, 28, 28), 240, 3))
    return n.conv(excited(n, x, 240), 16, 1, pads=0)


def group_normalized(n: Net, batch: int) -> Value:
    x = n.conv(n.input(batch, 8, 32, 32), 64, 1, pads=0)
    y = n.op("GroupNormalization", x, n.positive(64), n.random(64), attrs=GroupNormAttrs(8))
    return n.conv(y, 8, 1, pads=0)


def attending(n: Net, batch: int) -> Value:
    x = n.input(batch, 197, 64)
    q, k, v = (heads(n, x, 12, 64) for _ in range(3))
    return n.op("Attention", q, k, v, attrs=AttentionAttrs())


ORDERS: dict[str, tuple[Callable[[Net, int], Value], str, Callable[[str], str]]] = {
    "a squeeze": (squeezed, "depthwise_tiles", lambda config: config),
    "a group norm": (group_normalized, "GroupNormalization", lambda config: config),
    "attention": (
        attending,
        "Attention",
        lambda config: config.split("n")[-1].partition("s")[0],
    ),  # the number of keys in a tile
}
"""Operators whose configuration decides the order of their sums: the network, the kind or tactic, and the part of the
configuration that decides."""


@pytest.mark.parametrize("name", ORDERS)
def test_row_invariant_sums_in_the_order_that_a_large_batch_takes(name: str) -> None:
    build, kind, order = ORDERS[name]
    seen: dict[bool, set[str]] = {False: set(), True: set()}
    for batch in (1, 8, 64):
        for invariant in seen:
            found = emitted(built(build, batch), row_invariant=invariant).decisions
            (d,) = [d for d in found if kind in (d.op.kind, d.choice.tactic)]
            seen[invariant].add(order(d.variant))
    assert len(seen[False]) > 1, "else the test says nothing"
    assert len(seen[True]) == 1


def test_row_invariant_sums_with_a_constant_are_rounded_at_every_batch() -> None:
    """Positions that are added to one image have its shape. For several images they are broadcast."""
    chosen = {}
    for batch in (1, 2):
        n = Net()
        x = n.op("Add", n.op("Softmax", n.matmul(n.input(batch, 6, 64), 64)), n.random(1, 6, 64))
        y = n.op("LayerNormalization", x, n.positive(64), n.random(64))
        graph = n.done(n.op("Add", x, n.matmul(y, 64)))
        for invariant in (False, True):
            found = emitted(graph, row_invariant=invariant).decisions
            chosen[batch, invariant] = [d.choice.tactic for d in found if d.op.kind in ("Add", "LayerNormalization")]
    assert "add_norm" in chosen[1, False]
    assert "add_norm" not in chosen[1, True]
    assert chosen[1, True] == chosen[2, True]


def test_row_invariant_recurrent_layers_take_rows_one_by_one() -> None:
    for invariant, tactic in ((False, "rnn_resident"), (True, "rnn")):
        (d,) = [d for d in emitted(recurrent("LSTM"), row_invariant=invariant).decisions if d.op.kind == "LSTM"]
        assert d.choice.tactic == tactic


class Foreign(HopperConv):
    """An imagined tactic of a library."""

    name, provider = "foreign", "cudnn"
    row_invariant = False

    def configs(self, b: Builder, op: Any) -> list[Offer]:
        return []

    def emit(self, b: Builder, op: Any, config: Any) -> None:
        super().emit(b, op, super().configs(b, op)[0].config)


def test_providers_restrict_the_choice_and_own_kernels_replace_libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = [t for t in table.TACTICS["Conv"] if t.provider == "own"]
    monkeypatch.setitem(table.TACTICS, "Conv", (*ours, Foreign()))
    tactics = [d.choice.tactic for d in emitted(two_equal(), tactics="cudnn").decisions]
    assert tactics.count("foreign") == 3
    assert set(tactics) - {"foreign"}, "what the library has no kernels for runs on ours"
    for own in ("own", "heuristic", "auto"):
        assert "foreign" not in [d.choice.tactic for d in emitted(two_equal(), tactics=own).decisions]


def test_each_candidate_that_replaces_a_library_can_be_chosen() -> None:
    copy = norm_network(np.dtype(np.int8)).copy()
    FoldQuantized()(copy, PassContext(target="cuda:sm_90a"))
    options = BuildOptions(target="cuda:sm_90a", tactics="cublaslt")
    found: dict[str, set[str]] = {}

    def visit(b: Builder, op: Any, key: str) -> None:
        able = alternatives(b, op, table.TACTICS[op.kind], Selection.of(options))
        found.setdefault(key, set()).update(t.name for t, _ in able)

    decisions = emit_program(copy, options, of_arch("sm_90a"), {}, None, visit).decisions
    norms = [d.signature for d in decisions if d.op.kind == "LayerNormalization"]
    assert norms
    for key in norms:
        assert found[key] == {"rows_quantized"}, "as with our kernels alone"
        choices = {key: TacticChoice("rows_quantized")}
        again = emit_program(copy, options, of_arch("sm_90a"), {}, choices).decisions
        assert [d.choice.tactic for d in again] == [d.choice.tactic for d in decisions]


def test_a_tactic_whose_rows_depend_on_the_batch_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    copy = two_equal().copy()
    options = BuildOptions(target="cuda:sm_90a", precision="fp16", row_invariant=True)
    optimize(copy, options, "cuda:sm_90a")
    seen: list[str] = []

    def visit(b: Builder, op: Any, key: str) -> None:
        if op.kind == "Conv":
            able, refused = usable(b, op, (Foreign(),), Selection.of(options))
            seen.extend(r["reason"] for r in refused)
            assert not able

    emit_program(copy, options, of_arch("sm_90a"), {}, None, visit)
    assert "a row of its result depends on the size of the batch" in seen


def test_options() -> None:
    assert Selection.of(BuildOptions(target="cuda", tactics="heuristic")).providers == {"own"}
    assert Selection.of(BuildOptions(target="cuda", tactics="cudnn,cublaslt")).providers == {"cudnn", "cublaslt"}
    assert Selection.of(BuildOptions(target="cuda")).providers == {"own", "cudnn", "cublaslt"}
    with pytest.raises(
        UsageError, match="do not run on target 'cpu'\n  hint: they are for GPUs; target cpu has auto, openvino"
    ):
        BuildOptions(target="cpu", tactics="own")
    with pytest.raises(
        UsageError, match="do not run on target 'cuda'\n  hint: they are for --target cpu; GPUs have auto, heu"
    ):
        BuildOptions(target="cuda", tactics="openvino")
    with pytest.raises(UsageError, match="is not one of"):
        BuildOptions(target="cuda", tactics="own,openvino")


def atomics(text: str) -> list[str]:
    """Calls and instructions that add atomically, so in the order in which threads arrive."""
    return re.findall(r"\batomic\w+\s*\(|\b(?:red|atom)\.[\w.:]+", text)


def test_no_result_depends_on_the_order_of_threads() -> None:
    """Our own kernels contain no atomic addition of floats."""
    assert atomics('asm("red.global.add.f32 [%0], %1;"); atomicAdd (p, x);') == ["red.global.add.f32", "atomicAdd ("]
    sources = [*nvrtc.template_files().values(), *Path(table.__file__).parent.glob("*.py")]
    found = {path.name: atomics(path.read_text()) for path in sources if path.is_file()}
    # Counters of warps and blocks that have written their sums: integers. The sums are not added up in the order of arrival.
    assert found.pop("counts.cuh") == ["red.release.gpu.global.add.u32"]
    assert found.pop("ptx.cuh") == ["red.or.pred"], "a barrier's vote"
    assert found.pop("mma.cuh") == ["atom.acq_rel.gpu.global.add.u32"]
    assert found.pop("general.cuh") == ["atomicAdd("], "sums of fp16 in float64, which are exact in any order"
    assert found.pop("grid_meeting.cuh") == ["atomicAdd(", "atomicAdd("]
    assert set(found.pop("sample.cu")) == {"atomicAdd("}, "histograms of integers, in shared memory"
    assert found.pop("top_digits.cuh") == ["atomicAdd(", "atomicAdd("], "the same, and places of items as below"
    assert found.pop("top_keys.cuh") == ["atomicAdd("], "places of items that a sort puts in order"
    assert found.pop("suppress.cu") == ["atomicAnd(", "atomicAnd("], "bits that are cleared in any order"
    assert {name for name, calls in found.items() if calls} == {"timer.cu"}, (
        "which measures, and whose maxima are of integers"
    )
