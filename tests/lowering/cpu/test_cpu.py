"""The search of the target cpu: which libraries are tried, refused (and why) and kept, and which operators are cut out."""

from __future__ import annotations

import gc
import importlib
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.needs import needs_libraries

from optdnn.config import BuildOptions
from optdnn.errors import MissingDependency, RunError, UnsupportedError
from optdnn.ir.evaluate import evaluate, random_feeds
from optdnn.ir.graph import Graph
from optdnn.lowering.cpu import partition as cpu
from optdnn.lowering.cpu.library import LIBRARIES, Contender, Library
from optdnn.lowering.cpu.partition import choose
from optdnn.lowering.cpu.trials import Trial, Trials
from optdnn.ops.gemm import MatMulAttrs
from optdnn.ops.table import OPDEFS
from optdnn.runtime.engine import Engine
from optdnn.runtime.measuring.latency import sample
from optdnn.runtime.program import Program
from optdnn.tuning.timing_cache import TimingCache
from optdnn.types import Array, tensor

needs_libraries()

WIDTH = 24


def network() -> Graph:
    """x @ w, Softsign, @ w, Relu: two operators that can be refused, each after one that cannot."""
    rng = np.random.default_rng(0)
    g = Graph("net")
    x = g.add_input("x", tensor(np.float32, 4, WIDTH))
    w = g.add_constant(rng.standard_normal((WIDTH, WIDTH)).astype(np.float32), "w")
    a = g.add("MatMul", [x, w], MatMulAttrs(), names=["a"], src=["first"])
    b = g.add("Softsign", [a.value], names=["b"], src=["soft"])
    c = g.add("MatMul", [b.value, w], MatMulAttrs(), names=["c"], src=["second"])
    d = g.add("Relu", [c.value], names=["d"], src=["relu"])
    g.add_output(d.value, "y")
    return g


def options(**changes: Any) -> BuildOptions:
    return BuildOptions(**{"target": "cpu", "threads": 1, **changes})


def assert_right(engine: Engine, graph: Graph) -> None:
    feeds = random_feeds(graph, seed=5)
    want = evaluate(graph, feeds)
    for name, got in engine.run(feeds).items():
        np.testing.assert_allclose(got, want[name], rtol=1e-4, atol=1e-5)


def test_both_libraries_are_measured_and_the_faster_is_kept() -> None:
    graph = network()
    choice = choose(graph, options(), TimingCache(), {"k": 1})
    assert {r.settings["library"] for r in choice.rows} == {"openvino", "onnxruntime"}
    times = {r.name: r.median_ms for r in choice.rows}
    best = min(times, key=lambda n: times[n] or 0.0)
    assert choice.engine.meta["tactic"]["name"] == best
    assert choice.engine.meta["k"] == 1
    assert not choice.fallbacks
    assert len(choice.engine.program.steps) == 1
    assert_right(choice.engine, graph)


@pytest.mark.parametrize("library", sorted(LIBRARIES))
def test_a_pinned_library_is_the_only_one(library: str) -> None:
    graph = network()
    choice = choose(graph, options(tactics=library, threads=2), TimingCache(), {})
    assert [r.name for r in choice.rows] == [f"{library}/2t"]
    assert choice.engine.facts[0]["library"] == library
    assert choice.engine.facts[0]["threads"] == 2
    assert choice.engine.program.requires[0].startswith(f"package:{library}>=")
    assert_right(choice.engine, graph)


class HereTrial(Trial):
    """A candidate that is tried in this process, where the tests can replace its library."""

    def __init__(self, engine: Engine):
        self.engine = engine

    def run(self, feeds: Mapping[str, Array], *, poison: bool = False) -> dict[str, Array]:
        self.feeds = feeds
        return self.engine.run(feeds)

    def turn(self, seconds: float) -> list[float]:
        return [ns / 1e6 for ns in sample(lambda: self.engine.run(self.feeds), warmup=1, duration=0.01)]


class Here(Trials):
    def open(self, program: Program, threads: int, *, custom: bool = False) -> Trial:
        return HereTrial(Engine(program, threads=threads))

    def start(self, workers: int) -> None:
        pass


def wrap_prepare(monkeypatch: pytest.MonkeyPatch, library: str, wrapper: Any) -> None:
    """Lets ``wrapper(real, step, program, options)`` prepare the library's steps."""
    monkeypatch.setattr(cpu, "Trials", Here)
    module = importlib.import_module(f"optdnn.runtime.cpu.{library}")
    real = module.prepare
    monkeypatch.setattr(module, "prepare", lambda step, program, options: wrapper(real, step, program, options))


def refuse(monkeypatch: pytest.MonkeyPatch, library: str, when: Callable[[bytes], bool], message: str) -> None:
    """Lets the library refuse every model for which ``when`` is true."""

    def wrapper(real: Any, step: Any, program: Any, load_options: Any) -> Any:
        if when(program.blobs[step.params["model"]].tobytes()):
            raise RunError(message)
        return real(step, program, load_options)

    wrap_prepare(monkeypatch, library, wrapper)


@pytest.mark.parametrize("library", sorted(LIBRARIES))
def test_operators_that_a_library_refuses_run_from_their_numpy_kernels(
    library: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse(monkeypatch, library, lambda model: b"Softsign" in model, "no Softsign here")
    graph = network()
    choice = choose(graph, options(tactics=library), TimingCache(), {})
    assert [s.executor for s in choice.engine.program.steps] == [library, "reference", library]
    assert choice.fallbacks == {library: [{"node": "soft", "operator": "Softsign", "reason": "no Softsign here"}]}
    assert_right(choice.engine, graph)


def test_an_operator_that_no_opset_of_the_library_has_is_cut_out() -> None:
    g = Graph()
    x = g.add_input("x", tensor(np.float32, 3, 4))
    axis = g.add_constant(np.int64(1))
    p = g.add("CumProd", [x, axis], OPDEFS["CumProd"].attrs(), names=["p"], src=["product"])
    r = g.add("Relu", [p.value], names=["r"], src=["relu"])
    g.add_output(r.value, "y")
    choice = choose(g, options(tactics="onnxruntime"), TimingCache(), {})
    assert [s.executor for s in choice.engine.program.steps] == ["reference", "onnxruntime"]
    (reported,) = choice.fallbacks["onnxruntime"]
    assert reported["node"] == "product"
    assert "\n" not in reported["reason"]
    assert "cannot be written" not in reported["reason"]
    assert_right(choice.engine, g)


def test_a_network_that_is_refused_as_a_whole_leaves_the_other_library(monkeypatch: pytest.MonkeyPatch) -> None:
    refuse(monkeypatch, "openvino", lambda model: model.count(b"MatMul") > 1, "too large a network")
    choice = choose(network(), options(), TimingCache(), {})
    refused = {r.name: r.refused for r in choice.rows if r.refused}
    assert refused == {"openvino/1t": "too large a network"}
    assert choice.engine.meta["tactic"]["library"] == "onnxruntime"


def test_a_tactic_with_wrong_results_never_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    class Session:
        def __init__(self, inner: Any):
            self.inner = inner

        def run(self, inputs: Any, outs: Any) -> list[Array]:
            return [r + np.float32(0.1) * np.abs(r).max() for r in self.inner.run(inputs, [None] * len(outs))]

    def wrapper(real: Any, *args: Any) -> Any:
        model = real(*args)
        inner = model.session
        model.session = lambda: Session(inner())
        return model

    wrap_prepare(monkeypatch, "openvino", wrapper)
    choice = choose(network(), options(), TimingCache(), {})
    refused = {r.name: r.refused for r in choice.rows if r.refused}
    assert list(refused) == ["openvino/1t"]
    assert "differs from the reference by 0.1" in str(refused["openvino/1t"])
    with pytest.raises(UnsupportedError, match="differs from the reference"):
        choose(network(), options(tactics="openvino"), TimingCache(), {})


def test_a_missing_library_is_a_row_and_two_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    versions = {"openvino": None, "onnxruntime": LIBRARIES["onnxruntime"].version()}
    monkeypatch.setattr(Library, "version", lambda self: versions[self.name])
    choice = choose(network(), options(), TimingCache(), {})
    assert {r.name: r.refused for r in choice.rows if r.refused} == {
        "openvino": "not installed: pip install 'optdnn[cpu]'"
    }
    versions["onnxruntime"] = None
    with pytest.raises(MissingDependency, match=r"pip install 'optdnn\[cpu\]'"):
        choose(network(), options(), TimingCache(), {})


def test_a_precision_that_no_allowed_library_has_is_an_error() -> None:
    with pytest.raises(UnsupportedError, match="onnxruntime has no bf16 arithmetic"):
        choose(network(), options(tactics="onnxruntime", precision="bf16"), TimingCache(), {})


def test_a_filled_cache_decides_without_measuring(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "cache.json"
    cache = TimingCache.open(path)
    first = choose(network(), options(), cache, {})
    cache.save()

    def never(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("measured although everything is cached")

    monkeypatch.setattr(cpu, "take_turns", never)
    again = choose(network(), options(), TimingCache.open(path), {})
    assert all(r.cached for r in again.rows)
    assert again.engine.meta == first.engine.meta
    first.engine.save(tmp_path / "a.engine")
    again.engine.save(tmp_path / "b.engine")
    assert (tmp_path / "a.engine").read_bytes() == (tmp_path / "b.engine").read_bytes()


def test_other_weights_of_the_same_shapes_share_times_and_other_networks_do_not() -> None:
    graph, other = network(), network()
    assert Contender(graph, LIBRARIES["openvino"], "fp32").key(1) == Contender(
        other, LIBRARIES["openvino"], "fp32"
    ).key(1)
    other.add_output(other.of_kind("Softsign")[0].value, "z")
    assert Contender(graph, LIBRARIES["openvino"], "fp32").key(1) != Contender(
        other, LIBRARIES["openvino"], "fp32"
    ).key(1)
    keys = {Contender(graph, LIBRARIES["openvino"], p).key(n) for p in ("fp32", "bf16") for n in (1, 2)}
    assert len(keys) == 4


@pytest.mark.parametrize(
    ("cores", "ms", "expected"), [(2, 1.0, [1]), (2, 10.0, []), (16, 10.0, [8]), (16, 1.0, [8, 1]), (1, 1.0, [])]
)
def test_thread_counts_worth_trying(cores: int, ms: float, expected: list[int]) -> None:
    assert cpu._fewer_threads(cores, ms) == expected


def test_constants_and_inputs_as_outputs_are_copied_out_by_openvino() -> None:
    """OpenVINO does not write an output that is a constant or an input itself into the tensor that it is given."""
    g = Graph()
    x = g.add_input("x", tensor(np.float32, 2, 3))
    c = g.add_constant(np.arange(400, dtype=np.float32), "c")
    for name, value in (("a", c), ("b", c), ("x1", x), ("x2", x)):
        g.add_output(g.add("Identity", [value], names=[name + "_"], src=[name]).value, name)
    choice = choose(g, options(tactics="openvino"), TimingCache(), {})
    feeds = random_feeds(g)
    for _ in range(2):
        got = choice.engine.run(feeds)
        for name, want in evaluate(g, feeds).items():
            np.testing.assert_array_equal(got[name], want)


def test_onnxruntime_rounds_as_often_as_the_network_says() -> None:
    """Two consecutive quantizations are not merged into one of another scale."""
    g = Graph()
    x = g.add_input("x", tensor(np.float32, 64))
    for scale, zero in ((0.021, 120), (0.034, 131), (0.027, 7)):
        s, z = g.add_constant(np.array(scale, np.float32)), g.add_constant(np.array(zero, np.uint8))
        attrs = OPDEFS["QuantizeLinear"].attrs(output_dtype=np.dtype(np.uint8))
        q = g.add("QuantizeLinear", [x, s, z], attrs)
        x = g.add("DequantizeLinear", [q.value, s, z], OPDEFS["DequantizeLinear"].attrs()).value
    g.add_output(x, "y")
    engine = choose(g, options(tactics="onnxruntime"), TimingCache(), {}).engine
    feeds = random_feeds(g, seed=5)
    np.testing.assert_allclose(engine.run(feeds)["y"], evaluate(g, feeds)["y"], atol=1e-6)


def test_a_build_leaves_no_graph_or_program_in_memory() -> None:
    """Graphs, weights and compiled models are freed with their last user: no module keeps them."""
    graph = network()
    gone = weakref.ref(graph)
    engine = choose(graph, options(), TimingCache(), {}).engine
    program = weakref.ref(engine.program)
    del graph, engine
    gc.collect()
    assert gone() is None
    assert program() is None
