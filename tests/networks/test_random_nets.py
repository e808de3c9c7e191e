"""Random networks on every target of this machine, and the code that draws, judges and shrinks them."""

from __future__ import annotations

import hashlib
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper
from random_nets import oracle as oracles
from random_nets.draw import Array, Network, Random
from random_nets.families import FAMILIES, network
from random_nets.judge import distance, judged
from random_nets.oracle import NoOracleError, Oracle, in_float64
from random_nets.pool import Worker, tried
from random_nets.shrink import shrunk
from random_nets.targets import Setting, UnsteadyError
from random_nets.trial import FAILED, trial

from optdnn.errors import InputError, RunError, UnsupportedError

onnxruntime = pytest.importorskip("onnxruntime")


# ---------------------------------------------------------------- the networks on the targets

TRIED = {
    "cpu": (["cpu", "fp32", "auto"], range(0, 3)),
    "reference": (["reference", "fp32", ""], range(4, 12)),
    "openvino": (["cpu", "fp32", "openvino"], range(16, 18)),
    "onnxruntime": (["cpu", "fp32", "onnxruntime"], range(19, 21)),
    "simulate-fp32": (["simulate", "fp32", ""], range(22, 26)),
    "simulate-fp16": (["simulate", "fp16", ""], range(28, 31)),
    "simulate-int8": (["simulate", "int8", ""], range(32, 34)),
}
"""Setting -> the seeds of each family. Each seed runs in one setting. ``python -m benchmarks random`` tries thousands."""
QUICK, QUICK_SEEDS = "reference", 1


def cases() -> list[Any]:
    """Each setting with its seeds. The first seeds of a setting are a separate quick test."""
    found = []
    for name, (_, seeds) in TRIED.items():
        few = QUICK_SEEDS if name == QUICK else 0
        found += [pytest.param(name, seeds[:few], id=f"{name}-quick")] if few else []
        found.append(pytest.param(name, seeds[few:], id=name, marks=pytest.mark.slow))
    return found


@pytest.mark.parametrize(("name", "seeds"), cases())
def test_random_networks_are_right(name: str, seeds: range) -> None:
    setting = TRIED[name][0]
    if "openvino" in setting:
        pytest.importorskip("openvino")
    tasks = [{"family": f, "seed": s, "setting": setting} for s in seeds for f in FAMILIES]
    rows = list(tried(tasks, jobs=1, timeout=60))
    failing = [f"{r['name']}: {r['verdict']}: {r['detail']}" for r in rows if r["verdict"] in FAILED]
    assert not failing, "\n".join(failing)
    counts = Counter(r["verdict"] for r in rows)
    assert counts["right"] >= 0.7 * len(tasks), counts


# ---------------------------------------------------------------- the generator

DIGESTS = {
    "conv": "3fa4b616070f",
    "attention": "1152b54098de",
    "recurrent": "5d4977d69095",
    "soup": "cfac72f922c4",
    "quantized": "05070f31d3ed",
    "control": "b11611f55fdb",
    "dynamic": "c929f5f62458",
    "packed": "661613eb9510",
}


def digest(net: Network) -> str:
    """A digest of the operators, the constants and the inputs."""
    h = hashlib.sha256()
    for node in net.model.graph.node:
        h.update(f"{node.op_type} {list(node.input)} {list(node.output)}\n".encode())
    for t in net.model.graph.initializer:
        h.update(numpy_helper.to_array(t).tobytes())
    for feed in net.feeds:
        for name, array in feed.items():
            h.update(name.encode() + array.tobytes())
    return h.hexdigest()[:12]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_seed_is_one_network_everywhere(family: str) -> None:
    assert digest(network(family, 3)) == digest(network(family, 3)) == DIGESTS[family]
    assert digest(network(family, 4)) != DIGESTS[family]


def test_the_random_numbers_stay() -> None:
    r = Random(5)
    assert [r.below(100) for _ in range(6)] == [80, 80, 51, 28, 5, 38]
    whole = r.array(np.int8, (500,), -3, 3)
    assert set(whole.tolist()) == set(range(-3, 4))


@pytest.mark.slow
def test_families_draw_the_operators_of_networks(monkeypatch: pytest.MonkeyPatch) -> None:
    """ONNX Runtime accepts the networks, and they cover the operators."""
    monkeypatch.setattr(oracles, "bytes_saturate", lambda: False)
    seen: set[str] = set()
    refused = 0
    for family in FAMILIES:
        for seed in range(60):
            net = network(family, seed)
            seen |= {n.op_type for n in net.model.graph.node}
            try:
                oracle = Oracle(net.model)
                for feed in net.feeds:
                    oracle.run(feed)
            except NoOracleError:
                refused += 1
    assert refused <= 4
    assert len(seen) >= 110, sorted(seen)
    wanted = {
        "Conv",
        "ConvTranspose",
        "MaxPool",
        "Attention",
        "LSTM",
        "GRU",
        "TopK",
        "ScatterND",
        "QLinearConv",
        "MatMulNBits",
        "If",
        "Loop",
    }
    assert wanted | {"Scan", "NonZero", "Unique", "NonMaxSuppression", "Compress", "Resize", "Einsum"} <= seen


def test_dynamic_networks_run_at_several_sizes_and_selections_select_some_and_none() -> None:
    sizes = {tuple(sorted(s.items())) for k in range(5) for s in network("dynamic", k).sizes}
    assert len(sizes) > 3
    rows: set[int] = set()
    for seed in range(12):
        net = network("control", seed)
        if any(n.op_type == "Compress" for n in net.model.graph.node):
            oracle = Oracle(net.model)
            rows |= {a.size for f in net.feeds for a in oracle.run(f).values()}
    assert 0 in rows
    assert len(rows) > 2


# ---------------------------------------------------------------- the judge


def small(
    *nodes: onnx.NodeProto, outputs: tuple[tuple[str, int], ...] = (("y", 1),), shape: tuple[int, ...] = (64,)
) -> Network:
    """A network of these nodes on one input "x" with 64 numbers."""
    graph = helper.make_graph(
        list(nodes),
        "small",
        [helper.make_tensor_value_info("x", 1, shape)],
        [helper.make_tensor_value_info(n, t, None) for n, t in outputs],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)
    x = np.random.default_rng(1).standard_normal(shape).astype(np.float32)
    return Network("small", model, ({"x": x},))


def verdict(net: Network, change: Callable[[Array], Array], precision: str = "fp32") -> str:
    """The verdict on the right results after ``change``."""
    oracle = Oracle(net.model)
    want = [oracle.run(f) for f in net.feeds]
    got = [{n: change(a) for n, a in w.items()} for w in want]
    return judged(oracle, net.feeds, got, want, precision).kind


TANH = helper.make_node("Tanh", ["x"], ["y"])


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        (lambda a: a, "right"),
        (lambda a: a * np.float32(1 + 1e-6), "right"),
        (lambda a: a * np.float32(1.01), "wrong"),
        (lambda a: a * np.float32(1 + 3e-4), "wrong"),  # like the rounding of tf32
        (lambda a: a[:-1], "wrong"),
        (lambda a: a.astype(np.int32), "wrong"),
        (lambda a: np.where(a == a[3], np.nan, a).astype(a.dtype), "wrong"),
        (lambda a: np.where(a == a[3], a + np.float32(0.1), a), "wrong"),
    ],
)
def test_an_error_is_seen(change: Callable[[Array], Array], kind: str) -> None:
    assert verdict(small(TANH), change) == kind


def test_empty_results_have_a_rank_and_a_type() -> None:
    empty = np.zeros((0, 3), np.float32)
    assert distance(empty, np.zeros((0, 0), np.float32)).within(0, 0)
    assert distance(empty, np.zeros((0,), np.float32)).why
    assert distance(empty, np.zeros((1, 3), np.float32)).why
    assert distance(empty, empty.astype(np.int64)).why


def test_terms_that_cancel_leave_their_rounding() -> None:
    zeros = small(helper.make_node("Sub", ["x", "x"], ["y"]))
    assert verdict(zeros, lambda a: a + np.float32(2.4e-7)) == "right"
    assert verdict(zeros, lambda a: a + np.float32(1e-5)) == "wrong"


def test_fp16_has_a_wider_tolerance_and_an_end() -> None:
    assert verdict(small(TANH), lambda a: a.astype(np.float16).astype(np.float32), "fp16") == "right"
    assert verdict(small(TANH), lambda a: a * np.float32(1.2), "fp16") == "wrong"
    big = small(
        helper.make_node("Constant", [], ["c"], value_float=4e5),
        helper.make_node("Mul", ["x", "c"], ["m"]),
        helper.make_node("Tanh", ["m"], ["y"]),
    )
    assert verdict(big, lambda a: a * np.float32(1.2), "fp16") == "beyond_fp16"


def dynamically_quantized(last: float) -> Network:
    """Numbers from -1 to ``last`` as 8-bit integers: the zero point is 255 / (1 + last) before it is rounded."""
    net = small(
        helper.make_node("DynamicQuantizeLinear", ["x"], ["y", "s", "z"]), outputs=(("y", 2), ("s", 1), ("z", 2))
    )
    return replace(net, feeds=({"x": np.linspace(-1, last, 64).astype(np.float32)},))


def test_a_zero_point_between_two_integers_may_be_either() -> None:
    tied, other = dynamically_quantized(1.0), dynamically_quantized(1.01)
    assert verdict(tied, lambda a: a - 1 if a.dtype == np.uint8 and a.ndim == 0 else a) == "right"
    assert verdict(other, lambda a: a - 1 if a.dtype == np.uint8 and a.ndim == 0 else a) == "wrong"


def test_scales_of_sizes_are_not_nudged() -> None:
    """A scale of 3 that is moved would give another size."""
    net = small(helper.make_node("Resize", ["x", "", "sizes"], ["y"], mode="nearest"))
    net.model.graph.initializer.append(numpy_helper.from_array(np.array([3], np.float32), "sizes"))
    moved = Oracle(net.model).nudged(net.feeds, 1e-3, 6)
    assert {m[0]["y"].shape for m in moved} == {(192,)}


def test_a_moved_network_that_is_refused_is_no_oracle(monkeypatch: pytest.MonkeyPatch) -> None:
    net = small(TANH)
    oracle = Oracle(net.model)
    monkeypatch.setattr("random_nets.oracle._nudged_model", lambda *_: onnx.ModelProto())
    with pytest.raises(NoOracleError, match="nudged"):
        oracle.nudged(net.feeds, 1e-6, 1)


def test_a_jump_at_a_rounding_edge_is_no_error() -> None:
    """An integer near an edge may be rounded either way, others may not."""
    floor = small(
        helper.make_node("Floor", ["x"], ["f"]), helper.make_node("Cast", ["f"], ["y"], to=7), outputs=(("y", 7),)
    )
    on_edge = np.arange(64, dtype=np.float32)
    assert verdict(replace(floor, feeds=({"x": on_edge},)), lambda a: a - (a == 5)) == "right"
    assert verdict(replace(floor, feeds=({"x": on_edge + np.float32(0.5)},)), lambda a: a - (a == 5)) == "wrong"


def test_sizes_are_not_nudged() -> None:
    net = small(helper.make_node("Resize", ["x", "", "s"], ["y"]), shape=(1, 1, 16, 4))
    scales = np.array([1, 1, 1.5, 1], np.float32)
    net.model.graph.initializer.append(onnx.numpy_helper.from_array(scales, "s"))
    assert verdict(net, lambda a: a * np.float32(1.01)) == "wrong"


def test_float64_decides_where_the_two_disagree() -> None:
    """ONNX Runtime's float32 loses all digits here; a better result is not wrong."""
    c = helper.make_node("Constant", [], ["c"], value_float=1e7)
    lossy = small(c, helper.make_node("Add", ["x", "c"], ["s"]), helper.make_node("Sub", ["s", "c"], ["y"]))
    found = in_float64(lossy.model, lossy.feeds[0])
    assert found is not None
    assert found[1] == "onnxruntime"
    assert distance(found[0]["y"].astype(np.float32), lossy.feeds[0]["x"]).most < 1e-6
    oracle = Oracle(lossy.model)
    want = [oracle.run(lossy.feeds[0])]
    kind = judged(oracle, lossy.feeds, [{"y": lossy.feeds[0]["x"]}], want, "fp32").kind
    assert kind in ("right", "edge", "oracle")


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (UnsupportedError("no"), "refused"),
        (InputError("no"), "refused"),
        (RunError("no"), "run_error"),
        (KeyError("x"), "foreign"),
        (UnsteadyError("x"), "unsteady"),
    ],
)
def test_each_error_has_its_verdict(error: Exception, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def build(*_: object) -> None:
        raise error

    monkeypatch.setattr("random_nets.targets.build", build)
    assert trial(small(TANH), Setting("reference"))["verdict"] == kind


def test_networks_that_onnx_runtime_refuses_are_not_judged() -> None:
    net = small(helper.make_node("NoSuchOperator", ["x"], ["y"]))
    assert trial(net, Setting("reference"))["verdict"] == "no_oracle"


# ---------------------------------------------------------------- the workers, and what shrinks

STUB = """
import json, os, sys, time
print(json.dumps("ready"), flush=True)
for line in sys.stdin:
    task = json.loads(line)
    print(json.dumps("oracle" if task["seed"] == 4 else "build"), flush=True)
    if task["seed"] in (1, 4):
        os.abort()
    if task["seed"] == 2:
        time.sleep(60)
    print(json.dumps({"verdict": "right"}), flush=True)
"""


@pytest.mark.slow
@pytest.mark.slow
def test_a_process_that_dies_or_hangs_costs_its_network_alone() -> None:
    tasks = [{"family": "conv", "seed": s, "setting": ["cpu", "fp32", ""]} for s in range(5)]
    rows = list(tried(tasks, jobs=2, timeout=3, command=[sys.executable, "-c", STUB]))
    found = {r["seed"]: (r["verdict"], r.get("detail", "")) for r in rows}
    assert [found[s][0] for s in range(5)] == ["right", "crashed", "hung", "right", "no_oracle"]
    assert found[1][1] == "build: the process ended with SIGABRT"
    assert found[2][1] == "build: no end within 3 s"


def test_a_worker_that_does_not_start_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="a worker did not start"):
        Worker(5, command=[sys.executable, "-c", "raise SystemExit(3)"]).ask({"seed": 0})


def test_a_failing_network_becomes_small() -> None:
    """Shrunk to the one node that fails, with its operands as inputs."""
    seed = next(
        s for s in range(20) if sum(n.op_type == "Softmax" for n in network("attention", s).model.graph.node) == 1
    )
    net = network("attention", seed)

    def fails(candidate: Network) -> bool:
        try:
            for feed in candidate.feeds:
                Oracle(candidate.model).run(feed)
        except NoOracleError:
            return False
        return any(n.op_type == "Softmax" for n in candidate.model.graph.node)

    made = shrunk(net, fails)
    assert [n.op_type for n in made.model.graph.node] == ["Softmax"]
    assert len(made.feeds) == 1


def test_integer_products_have_no_oracle_where_sums_of_bytes_saturate(monkeypatch: pytest.MonkeyPatch) -> None:
    x = onnx.helper.make_tensor_value_info("x", onnx.TensorProto.UINT8, [2, 3])
    w = onnx.helper.make_tensor_value_info("w", onnx.TensorProto.INT8, [3, 2])
    y = onnx.helper.make_tensor_value_info("y", onnx.TensorProto.INT32, [2, 2])
    graph = onnx.helper.make_graph([onnx.helper.make_node("MatMulInteger", ["x", "w"], ["y"])], "g", [x, w], [y])
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 21)], ir_version=10)
    monkeypatch.setattr(oracles, "bytes_saturate", lambda: False)
    Oracle(model)
    monkeypatch.setattr(oracles, "bytes_saturate", lambda: True)
    with pytest.raises(NoOracleError, match="saturate on this processor"):
        Oracle(model)
