"""Programs with steps on the CPU, on a GPU: repeated runs from host and device arrays, compared with the reference."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.fallback import NETWORKS, feeds

import optdnn
from optdnn.errors import InputError
from optdnn.runtime.cuda.launches.chain import Chain
from optdnn.runtime.cuda.trials.check import check_steps
from optdnn.runtime.measuring.bench import bench
from optdnn.types import is_float

pytestmark = pytest.mark.hopper


def engine_of(name: str, precision: str = "fp32") -> tuple[Any, Any]:
    made = NETWORKS[name]()
    return made, optdnn.build(made, target="cuda:sm_90a", precision=precision, tactics="heuristic")


def agree(got: dict[str, Any], want: dict[str, Any], bound: float = 1e-5) -> None:
    assert list(got) == list(want)
    for key, w in want.items():
        assert got[key].dtype == w.dtype
        assert got[key].shape == w.shape
        if is_float(w.dtype):
            np.testing.assert_allclose(got[key], w, rtol=0, atol=bound * float(np.abs(w).max(initial=1e-30)))
        else:
            np.testing.assert_array_equal(got[key], w)


@pytest.mark.parametrize("name", NETWORKS)
def test_agrees_with_the_reference_and_repeats(name: str) -> None:
    made, engine = engine_of(name)
    reference, context = optdnn.build(made, target="reference"), engine.context()
    context = getattr(context, "_general", context)  # with plans by value: the program for all values
    assert isinstance(context.graph(), Chain)
    for seed in (0, 1, 0, 1):  # sizes that depend on data change from run to run
        agree(context.run(feeds(made, seed)), reference.run(feeds(made, seed)))
    wrong = [e for e in check_steps(context, feeds(made)) if e.error > 1e-5]
    assert not wrong


@pytest.mark.parametrize("name", NETWORKS)
def test_half_precision_agrees_with_simulate(name: str) -> None:
    made, engine = engine_of(name, "fp16")
    simulated = optdnn.build(made, target="simulate", precision="fp16", tactics="heuristic").run(feeds(made))
    got = engine.run(feeds(made))
    for key, w in simulated.items():
        if got[key].shape == w.shape:  # rounding may change the selection
            bound = 1e-2 * float(np.abs(w).max(initial=1e-30))
            np.testing.assert_allclose(got[key].astype(np.float64), w.astype(np.float64), rtol=0, atol=bound)


@pytest.mark.parametrize("name", NETWORKS)
def test_device_arrays_give_device_arrays_but_for_sizes_that_depend_on_data(name: str) -> None:
    cupy = pytest.importorskip("cupy")
    made, engine = engine_of(name)
    context, given = engine.context(), feeds(made)
    want = context.run(given)
    on_gpu = {k: cupy.asarray(v) for k, v in given.items()}
    got = context.run(on_gpu)
    for spec in engine.outputs:
        static = all(isinstance(d, int) for d in spec.shape)
        assert isinstance(got[spec.name], cupy.ndarray if static else np.ndarray)
    agree({k: cupy.asnumpy(v) for k, v in got.items()}, want, 0.0)
    stream = cupy.cuda.Stream(non_blocking=True)
    bound = context.bind(on_gpu)
    for _ in range(3):
        bound.run(stream)
    stream.synchronize()
    agree({k: cupy.asnumpy(v) for k, v in bound.outputs.items()}, want, 0.0)
    agree(context.run(given), want, 0.0)
    sized = [s for s in engine.outputs if not all(isinstance(d, int) for d in s.shape)]
    if sized:
        with pytest.raises(InputError, match="depends on data"):
            context.run(on_gpu, out={sized[0].name: cupy.empty(3, sized[0].dtype)})


def test_profile_and_bench_show_the_steps_on_the_cpu() -> None:
    made, engine = engine_of("three")
    report: Any = bench(engine, feeds(made), warmup=2, iterations=20, with_profile=True)
    assert [p["executor"] for p in report["profile"]] == [s.executor for s in engine.program.steps]
    assert {p["executor"] for p in report["profile"]} == {"cuda", "copy", "host"}
    assert all(p["us"] > 0 for p in report["profile"])
    assert sum(p["share"] for p in report["profile"]) == pytest.approx(1)
