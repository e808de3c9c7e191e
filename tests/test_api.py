"""The Python API: listed names, the display of results, runs that do not block, and errors with suggestions."""

from __future__ import annotations

import asyncio
import gc
import logging
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import parser

import optdnn
from optdnn.errors import InputError
from optdnn.quick_import import quick_import
from optdnn.runtime.notebook import table

TWO = "<ir_version: 10, opset_import: ['' : 17]> g (float[2] left, float[2] right) => (float[2] y) { y = Add(left, right) }"
ONE = "<ir_version: 10, opset_import: ['' : 17]> g (float[N, 2] x) => (float[N, 2] y, float[N, 2] z) { y = Neg(x) z = Abs(x) }"


def model(text: str) -> bytes:
    return parser.parse_model(text.replace("'", '"')).SerializeToString()  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def one() -> optdnn.Engine:
    return optdnn.build(model(ONE), target="reference")


@pytest.fixture(scope="module")
def two() -> optdnn.Engine:
    return optdnn.build(model(TWO), target="reference")


X = np.float32([[1, -2], [3, -4]])


def test_dir_shows_the_public_names_alone() -> None:
    assert dir(optdnn) == sorted((*optdnn.__all__, "__version__"))
    code = (
        "import sys, optdnn; assert 'numpy' not in sys.modules; print(*dir(optdnn)); assert 'onnx' not in sys.modules"
    )
    found = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    assert found.split() == dir(optdnn)


def test_no_garbage_is_collected_while_modules_are_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "asks_about_garbage.py").write_text("import gc\nenabled = gc.isenabled()\n")
    (tmp_path / "fails_at_once.py").write_text("raise KeyError\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert gc.isenabled()
    assert quick_import("asks_about_garbage").enabled is False
    with pytest.raises(KeyError):
        quick_import("fails_at_once")
    assert gc.isenabled(), "as before"


# ---------------------------------------------------------------- one array


@pytest.mark.parametrize("target", ["reference", "simulate", "cpu"])
def test_one_input_needs_no_name(target: str) -> None:
    shapes = {"x": (2, 2)} if target == "simulate" else {}
    engine = optdnn.build(model(ONE), target=target, shapes=shapes)
    for run in (engine.run, engine.context().run):
        np.testing.assert_array_equal(run(X)["y"], -X)
    assert engine.program_for(X) is engine.program


def test_one_array_for_an_engine_of_several_plans() -> None:
    engine = optdnn.build(model(ONE), target="simulate", shapes={"x": "1..2..4x2"})
    np.testing.assert_array_equal(engine.run(X)["y"], -X)
    np.testing.assert_array_equal(engine.context().run(X[:1])["z"], abs(X[:1]))


def test_one_array_for_two_inputs_is_refused(two: optdnn.Engine) -> None:
    for run in (two.run, two.context().run):
        with pytest.raises(
            InputError, match=r"must map names to arrays, not ndarray; the engine takes left: .* right: "
        ):
            run(X[0])


def test_objects_that_are_no_array_are_refused(one: optdnn.Engine) -> None:
    with pytest.raises(InputError, match="must map names to arrays, not str"):
        one.run("x")


def test_a_wrong_name_of_an_input_gets_the_nearest(two: optdnn.Engine) -> None:
    with pytest.raises(InputError, match=r"there is no input 'rihgt'; .*\n  hint: did you mean 'right'\?"):
        two.run({"left": X[0], "rihgt": X[0]})
    with pytest.raises(InputError) as caught:
        two.run({"left": X[0], "something": X[0]})
    assert caught.value.hint is None


# ---------------------------------------------------------------- how things show


def test_contexts_show_their_ports(one: optdnn.Engine) -> None:
    assert repr(one.context()) == "Context(reference, fp32: x: fp32[N, 2] -> y: fp32[N, 2], z: fp32[N, 2])"
    engine = optdnn.build(model(ONE), target="simulate", shapes={"x": (2, 2)})
    assert repr(engine.context()).startswith("Context(simulate, fp32: x: fp32[2, 2] -> ")
    engine = optdnn.build(model(ONE), target="simulate", shapes={"x": "1..2..4x2"})
    assert repr(engine.context()).startswith("Context(simulate, fp32: x: fp32[N, 2] -> ")


def test_an_engine_and_its_report_show_in_notebooks(one: optdnn.Engine, tmp_path: Path) -> None:
    text = one._repr_html_()
    assert "Engine: reference, fp32, " in text
    assert "<td>input</td><td>x</td><td>fp32</td>" in text
    report: Any = one.report
    assert "<td>target</td><td>reference</td>" in report._repr_html_()
    assert "<th>phase</th>" in report._repr_html_()
    one.save(tmp_path / "m.engine")
    checked = optdnn.verify(tmp_path / "m.engine")
    assert all(f"<td>{c.name}</td>" in checked._repr_html_() for c in checked.checks)


def test_results_of_retuning_are_shown_in_notebooks() -> None:
    from optdnn.tuning.retune import Retuned

    text = Retuned(2.0, 1.5, True, {}, ("slow <link>",))._repr_html_()
    assert "<th>replaced</th>" in text
    assert "<td>2.0000 ms</td>" in text
    assert "<td>slow &lt;link&gt;</td>" in text
    assert "does not run here" in Retuned(None, 1.5, False, {})._repr_html_()


def test_html_is_escaped() -> None:
    assert table([("<b>", 1)], ("&",)) == "<table><tr><th>&amp;</th></tr><tr><td>&lt;b&gt;</td><td>1</td></tr></table>"
    assert table([]) == ""


# ---------------------------------------------------------------- runs that do not block


def test_a_future_has_the_results(one: optdnn.Engine) -> None:
    futures = [one.run_async({"x": X * k}) for k in range(8)]
    for k, future in enumerate(futures):
        np.testing.assert_array_equal(future.result(timeout=60)["z"], abs(X) * k)


def test_the_callback_comes_from_another_thread(one: optdnn.Engine) -> None:
    reported: list[Any] = []
    done = threading.Event()

    def callback(results: Any, user_data: Any, error: str) -> None:
        reported.append((results, user_data, error, threading.current_thread()))
        done.set()

    future = one.run_async(X, callback, "mine")
    assert done.wait(60)
    results, user_data, error, thread = reported[0]
    np.testing.assert_array_equal(results["y"], future.result(60)["y"])
    assert (user_data, error) == ("mine", "")
    assert thread is not threading.current_thread()


def test_an_error_comes_by_callback_and_future(one: optdnn.Engine) -> None:
    reported: list[Any] = []
    future = one.run_async({"y": X}, lambda *given: reported.append(given), 7)
    with pytest.raises(InputError, match="input 'x' is missing"):
        future.result(60)
    ((results, user_data, error),) = reported
    assert (results, user_data) == (None, 7)
    assert "input 'x' is missing" in error


def test_an_error_of_the_callback_is_logged(one: optdnn.Engine, caplog: pytest.LogCaptureFixture) -> None:
    def callback(results: Any, user_data: Any, error: str) -> None:
        raise ValueError("mine")

    with caplog.at_level(logging.ERROR, "optdnn"):
        np.testing.assert_array_equal(one.run_async(X, callback).result(60)["y"], -X)
    assert "the callback of run_async failed" in caplog.text
    assert "ValueError: mine" in caplog.text


def test_an_event_loop_awaits_it(one: optdnn.Engine) -> None:
    async def several() -> list[Any]:
        return await asyncio.gather(*(one.run_awaitable(X * k) for k in range(4)))

    for k, results in enumerate(asyncio.run(several())):
        np.testing.assert_array_equal(results["y"], -X * k)

    async def wrong() -> None:
        await one.run_awaitable({"y": X})

    with pytest.raises(InputError, match="input 'x' is missing"):
        asyncio.run(wrong())


def test_a_session_runs_as_onnxruntimes_does() -> None:
    """The same call on both: output names, feeds, callback, user data."""
    ort = pytest.importorskip("onnxruntime")
    options = ort.SessionOptions()
    options.intra_op_num_threads = 2  # its run_async needs a pool
    found = []
    sessions = (ort.InferenceSession(model(ONE), options), optdnn.InferenceSession(model(ONE)))
    for session in sessions:
        done = threading.Event()
        reported: list[Any] = []

        def callback(
            results: Any, user_data: Any, error: str, reported: list[Any] = reported, done: Any = done
        ) -> None:
            reported.append((results, user_data, error))
            done.set()

        assert session.run_async(["z", "y"], {"x": X}, callback, "mine") is None
        assert done.wait(60)
        found.append(reported[0])
    (theirs, _, _), (ours, user_data, error) = found
    assert (user_data, error) == ("mine", "")
    for a, b in zip(theirs, ours, strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_session_refuses_a_wrong_output_at_once() -> None:
    text = ONE.replace("z", "absolute")
    session = optdnn.InferenceSession(model(text))
    with pytest.raises(InputError, match=r"there is no output 'absolut'; .*\n  hint: did you mean 'absolute'\?"):
        session.run_async(["absolut"], {"x": X}, lambda *given: None)
