"""ONNX's own backend tests: every case is either right, or refused with a typed error and on a list.

``backend_expected.json`` maps patterns of test names to the reasons of these refusals. ``on_cpu`` names the cases with steps on the
CPU in their GPU engine, ``by_numpy`` those with steps in NumPy on the target cpu. The lists only shrink: a listed case that passes
is a failure here, and so is a pattern without a match.
"""

from __future__ import annotations

import fnmatch
import functools
import json
import os
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx import numpy_helper
from support import onnx_pool, operators
from support.onnx_cases import cases, group

import optdnn.integrations.onnx_backend
from optdnn.errors import InputError, ModelError, UnsupportedError
from optdnn.importers.onnx import import_model
from optdnn.ir.evaluate import evaluate
from optdnn.ir.export_onnx import export_model
from optdnn.lowering.cpu import partition as cpu
from optdnn.lowering.cpu.eight_bits import WEIGHTS
from optdnn.runtime.file.requires import bytes_saturate

LISTED = json.loads(Path(__file__).with_name("backend_expected.json").read_text())
KNOWN_ONNX = LISTED["onnx"]
SAME_ONNX = onnx.__version__.startswith(KNOWN_ONNX + ".")
LIGHT = Path(onnx.__file__).parent / "backend/test/data/light"
ULPS = 2
"""Numbers of roundoffs by which fp16 and bf16 results may differ. ONNX's own runner allows bfloat16 the same."""


CASES = cases()


def reason(name: str) -> str | None:
    """The reason for which a case is expected to be refused, or None."""
    return _reasons().get(name)


@functools.lru_cache
def _reasons() -> dict[str, str]:
    out: dict[str, str] = {}
    for pattern, why in LISTED["refused"].items():
        expression = re.compile(fnmatch.translate(pattern))
        out.update({name: why for name in CASES if expression.match(name)})
    return out


PASSING = sorted(name for name in CASES if reason(name) is None)
GROUPS: dict[str, list[str]] = defaultdict(list)
"""The passing cases by operator: one test runs the cases of one operator."""
for _name in PASSING:
    GROUPS[group(_name)].append(_name)


def groups(*slow: str, real: bool = True) -> pytest.MarkDecorator:
    """Each group of cases is a test. ``real``: including whole networks. Whole networks, and groups whose names end in
    ``slow``, are slow."""
    named = [g for g in sorted(GROUPS) if real or g != "real"]
    marked = [pytest.param(g, marks=pytest.mark.slow) if g == "real" or g.endswith(slow) else g for g in named]
    return pytest.mark.parametrize("group", marked)


def each(group: str, run: Callable[[str], object], names: Sequence[str] | None = None) -> None:
    """Run the cases of a group (all, or ``names``), and report all that fail."""
    failed = {}
    for name in GROUPS[group] if names is None else names:
        try:
            run(name)
        except Exception as error:
            failed[name] = f"{type(error).__name__}: {error}"
    assert not failed, "\n".join(f"{name}: {why}" for name, why in failed.items())


@functools.lru_cache(maxsize=4)
def load(name: str) -> onnx.ModelProto:
    case = CASES[name]
    if case.model is not None:
        return case.model
    path = Path(case.model_dir) / "model.onnx" if case.model_dir else LIGHT / Path(case.url).name
    return onnx.load(path)


def data(name: str) -> Iterator[tuple[list[Any], list[Any]]]:
    """Inputs and expected outputs, per data set."""
    case = CASES[name]
    if case.data_sets is not None:
        for inputs, outputs in case.data_sets:
            given, expected = [_array(x) for x in inputs], [_array(x) for x in outputs]
            yield given, [_low_bits(given[0], expected[0])] if TO_FEW_BITS.match(name) else expected
    elif case.model_dir:
        for folder in sorted(Path(case.model_dir).glob("test_data_set*")):
            yield _stored(folder, "input"), _stored(folder, "output")
    else:
        model = load(name)
        constants = {t.name for t in model.graph.initializer}
        (shape,) = (
            [d.dim_value for d in v.type.tensor_type.shape.dim] for v in model.graph.input if v.name not in constants
        )
        size = int(np.prod(shape))  # like ONNX's runner for its light models
        expected = onnx.load_tensor(LIGHT / f"{Path(case.url).stem}_output_0.pb")
        yield [(np.arange(size).reshape(shape) / size).astype(np.float32)], [numpy_helper.to_array(expected)]


TO_FEW_BITS = re.compile("test_cast(like)?_FLOAT(16)?_to_U?INT[24](_expanded)?$")
"""Cases whose floats are partly out of range. ONNX does not define their integers: those of its cases are what ml_dtypes gives,
wrapped before version 0.7 and 0 since then."""


def _low_bits(given: Any, expected: Any) -> Any:
    """The expected integers. Where a float is out of range, its low bits, as optdnn gives them."""
    limits, whole = ml_dtypes.iinfo(expected.dtype), given.astype(np.int64)
    inside = (whole >= limits.min) & (whole <= limits.max)
    return np.where(inside, expected.astype(np.int64), whole).astype(expected.dtype)


def _array(x: Any) -> Any:
    return numpy_helper.to_array(x) if isinstance(x, onnx.TensorProto) else x


def _stored(folder: Path, what: str) -> list[Any]:
    count = len(list(folder.glob(f"{what}_*.pb")))
    return [numpy_helper.to_array(onnx.load_tensor(folder / f"{what}_{i}.pb")) for i in range(count)]


TIED = frozenset({"test_squeezenet"})
"""Networks with constant weights, in which all logits are equal (9.5e9).

Sums in another order, as with one thread, change some of them by one rounding (1024). Softmax then gives the others 0. So their
probabilities are summed.
"""


@dataclass(frozen=True)
class Runner:
    """One way to run a model."""

    device: str
    options: tuple[tuple[str, Any], ...] = ()

    def __call__(self, name: str) -> optdnn.integrations.onnx_backend.PreparedModel:
        prepared = optdnn.integrations.onnx_backend.prepare(load(name), self.device, **dict(self.options))
        for inputs, outputs in data(name):
            check(name, prepared.run(inputs), outputs)
        return prepared


def check(name: str, got: Any, want: list[Any]) -> None:
    """Compare with a case's expected outputs, within its tolerances."""
    if name in TIED:
        got, want = [y.sum(1) for y in got], [y.sum(1) for y in want]
    compare(got, want, CASES[name].rtol, CASES[name].atol)


def compare(got: Any, want: list[Any], rtol: float, atol: float) -> None:
    assert len(got) == len(want)
    for a, b in zip(got, want, strict=True):
        assert a.dtype == b.dtype
        assert a.shape == b.shape
        if a.dtype.itemsize == 2 and a.dtype.kind not in "iu":
            rtol = max(rtol, ULPS * 2.0 ** (-10 if a.dtype == np.float16 else -7))
            a, b = a.astype(np.float32), b.astype(np.float32)
        elif a.dtype.kind not in "iubfc":  # fp8
            a, b = a.astype(np.float32), b.astype(np.float32)
        np.testing.assert_allclose(a, b, rtol=rtol, atol=atol)


NOT_WRITTEN = "^test_(resize_(up|down)sample_scales_(linear|cubic)_align_corners$|bitcast_|cumprod_)"
"""Cases without an ONNX form: the meaning of fractional scales depends on sizes, which are known only at run time."""

REFERENCE = Runner("REFERENCE")
OPTIMIZED = Runner("REFERENCE", (("opt_level", 3), ("debug", True)))
CPU = Runner("CPU", (("threads", 1),))


def attempt(run: Runner, name: str) -> optdnn.integrations.onnx_backend.PreparedModel | None:
    """The model that ran the case; None if it is refused and the list is for another version of ONNX."""
    try:
        return run(name)
    except UnsupportedError:
        if SAME_ONNX:
            raise
        return None


@groups()
def test_reference(group):
    each(group, functools.partial(attempt, REFERENCE))


@pytest.mark.slow
@groups("expanded", real=False)
def test_optimized(group):
    """All passes, with each result verified. ``tests/networks/test_end_to_end.py`` does the same for whole networks."""
    each(group, functools.partial(attempt, OPTIMIZED))


def test_a_failing_case_is_reported_with_its_name():
    def run(name):
        if name == "test_abs":
            raise InputError("no")

    with pytest.raises(AssertionError, match="test_abs: InputError: no"):
        each("Abs", run)


def onnxruntime_first(runners, tick=lambda name: None):
    """A stand-in for measuring, with the same times on every machine."""
    return {name: 1.0 if name.startswith("onnxruntime") else 2.0 for name in runners}


@pytest.mark.slow
@groups(real=False)
def test_cpu(group, monkeypatch):
    """Both libraries are checked. If both are right, ONNX Runtime counts as faster, so that chance does not decide.
    ``tests/networks/test_end_to_end.py`` does the same for whole networks."""
    for library in ("onnxruntime", "openvino"):
        pytest.importorskip(library, reason="the cpu extra is not installed")
    monkeypatch.setattr(cpu, "take_turns", onnxruntime_first)
    each(group, on_cpu, cpu_cases(group))


INTEGER_PRODUCTS = frozenset({"Conv", "MatMul", *WEIGHTS})
"""Kinds that run in NumPy on processors without VNNI, if their weights are computed integers."""


def cpu_cases(group):
    """The listed cases, two of each operator, and a sixteenth of the others. Of the bodies of functions, whose operators have
    their own cases, a 24th.

    ``OPTDNN_ALL_CASES=1`` runs all of them, as before a release. (All cases run on ``reference``, with and without passes.)
    """
    if os.environ.get("OPTDNN_ALL_CASES") == "1":
        return GROUPS[group]
    first, every = (0, 24) if group.endswith("expanded") else (2, 16)
    return [n for k, n in enumerate(GROUPS[group]) if k < first or k % every == 0 or n in LISTED["by_numpy"]]


def on_cpu(name):
    prepared = attempt(CPU, name)
    if prepared is None:
        return
    engine = prepared._run.__self__
    by_numpy = sorted({step.params["kind"] for step in engine.program.steps if step.executor == "reference"})
    if SAME_ONNX:
        listed = LISTED["by_numpy"].get(name, [])
        if bytes_saturate() and set(by_numpy) <= {*listed, *INTEGER_PRODUCTS}:
            return  # no library sums these exactly
        # A newer library may run more: ONNX Runtime 1.32 shifts 16-bit integers, 1.31 did not.
        assert set(by_numpy) <= set(listed), f"{', '.join(by_numpy)} runs in NumPy: correct the list (other libraries?)"


REPEATED = frozenset(
    {"test_densenet121", "test_inception_v1", "test_inception_v2", "test_resnet50", "test_vgg19", "test_zfnet512"}
)
"""Networks whose operators also occur in the other ones. NumPy takes seconds for each."""


@groups("expanded", "Attention", "Loss")
def test_simulate(group):
    """Runs as a GPU's program. Exactly the listed steps run on the CPU.

    Of the bodies of functions, the listed cases and every third one: passes turn a body into the operator, whose cases all run
    here, and ``test_optimized`` runs every body with all passes. ``OPTDNN_ALL_CASES=1`` runs all of them.
    """
    every = 3 if group.endswith("expanded") and os.environ.get("OPTDNN_ALL_CASES") != "1" else 1
    names = [n for n in GROUPS[group] if n not in REPEATED]
    each(group, check_simulated, [n for k, n in enumerate(names) if k % every == 0 or n in LISTED["on_cpu"]])


def check_simulated(name):
    on_cpu = sorted(simulated(name))
    if SAME_ONNX:
        listed = LISTED["on_cpu"].get(name, [])
        assert on_cpu == listed, f"{', '.join(on_cpu) or 'nothing'} runs on the CPU: correct the list"


def simulated(name: str) -> set[str]:
    """Run a case as a GPU's program, built for its sizes only. Returns the kinds of operators that ran on the CPU."""
    prepared = optdnn.integrations.onnx_backend.prepare(load(name), "SIMULATE")
    on_cpu = set()
    for inputs, outputs in data(name):
        check(name, prepared.run(inputs), outputs)
        feeds = dict(zip(prepared.inputs, inputs, strict=True))
        plan = prepared._run.engine(feeds).program_for(feeds)
        on_cpu |= {o["kind"] for o in plan.meta["host"]["operators"]}
    return on_cpu


@pytest.mark.skipif(not SAME_ONNX, reason=f"the list is of onnx {KNOWN_ONNX}")
def test_shares_on_a_gpu():
    """All cases that are not refused pass, 97 of 100 without a step on the CPU."""
    assert set(LISTED["on_cpu"]) <= set(PASSING), "these are no cases that pass"
    assert len(LISTED["on_cpu"]) <= 0.03 * len(PASSING)


@pytest.mark.skipif(not SAME_ONNX, reason=f"the list is of onnx {KNOWN_ONNX}")
def test_the_table_of_operators_agrees_with_the_runs():
    assert set(LISTED["by_numpy"]) <= set(PASSING), "these are no cases that pass"
    models = {name: functools.partial(load, name) for name in PASSING}
    written = operators.PATH.read_text(encoding="utf-8")
    assert operators.table(models, PASSING, LISTED) == written, "run: python -m benchmarks operators"


@pytest.fixture(scope="module")
def one_gpu_process():
    """The builds of this module try their programs in one worker process. Otherwise each would start its own."""
    from optdnn.runtime.cuda.trials.process import gpu_process

    with gpu_process():
        yield


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.usefixtures("one_gpu_process")
@groups()
def test_cuda(group):
    """On this machine's GPU: `pytest -m gpu -k test_cuda tests/test_backend_suite.py` (it compiles kernels for many minutes)."""
    if not optdnn.integrations.onnx_backend.supports_device("CUDA"):
        pytest.skip("no usable GPU")
    each(group, on_cuda)


def on_cuda(name):
    try:
        attempt(Runner("CUDA", (("tactics", "heuristic"),)), name)
    except AssertionError:
        if name not in ROUNDED:
            raise


ROUNDED = ("test_dft_inverse", "test_dft_inverse_opset19")
"""Cases that only NumPy's own algorithm passes: the expected values have a rounding of 2e-7 where an exact transform gives 0."""


@groups("expanded", real=False)
def test_round_trip(group):
    """The export of an imported model has the same results: equal to the last bit, or to roundoff if ONNX has no such node. The
    operators of whole networks have their own cases."""
    each(group, check_round_trip)


def check_round_trip(name):
    if not SAME_ONNX and refused(name):
        return
    graph = import_model(load(name))
    if re.search(NOT_WRITTEN, name):
        with pytest.raises(UnsupportedError, match=r"sizes that are not known|there is no (BitCast|CumProd)"):
            export_model(graph)
        return
    again = import_model(export_model(graph).proto)
    names = [graph.op(i).outputs[0].name for i in graph.inputs]
    for inputs, _ in data(name):
        feeds = dict(zip(names, inputs, strict=True))
        want, got = evaluate(graph, feeds), evaluate(again, feeds)
        assert list(got) == list(want)
        compare(tuple(got.values()), list(want.values()), 1e-5, 1e-6)


@pytest.mark.skipif(not SAME_ONNX, reason=f"the list of refused cases is of onnx {KNOWN_ONNX}")
def test_the_list_of_refused_cases_is_true():
    unmatched = [p for p in LISTED["refused"] if not any(fnmatch.fnmatchcase(n, p) for n in CASES)]
    assert unmatched == [], "these patterns match no case"
    passing = [name for name in CASES if reason(name) is not None and not refused(name)]
    assert passing == [], "these cases are listed as refused but run: shorten the list"


def refused(name: str) -> bool:
    """Whether importing or running the case raises a typed error. A wrong result or a crash fails the test."""
    try:
        REFERENCE(name)
    except (UnsupportedError, ModelError):
        return True
    return False


def test_comparisons_can_fail():
    one = np.ones((2, 50), np.float32)
    compare((one,), [one], 1e-3, 1e-7)
    wrong = one.copy()
    wrong[1, 7] = 1.01
    for bad in (wrong, one[:1], one.astype(np.float64)):
        with pytest.raises(AssertionError):
            compare((bad,), [one], 1e-3, 1e-7)
    half = np.ones(4, np.float16)
    with pytest.raises(AssertionError):
        compare((half + np.float16(0.004),), [half], 1e-3, 1e-7)


@pytest.mark.parametrize("kind", ["AVG", "MAX", "LPPOOL"])
@pytest.mark.parametrize(("strides", "shape"), [(None, (4, 6)), ((2, 3), (2, 2))])
def test_pooling_of_the_generated_cases_is_onnx_own(kind, strides, shape):
    x = np.random.default_rng(0).standard_normal((2, 3, 5, 8)).astype(np.float32)
    got, want = (f(x, x.shape, (2, 3), strides, shape, kind, p=3) for f in (onnx_pool.pool, onnx_pool.own))
    compare([got], [want], 1e-5, 1e-6)
