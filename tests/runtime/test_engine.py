"""The engine: running, threads, outputs that belong to the caller, and every refusal of inputs and buffers."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from programs import F32, mlp, mlp_expected, program

from optdnn import Engine
from optdnn.errors import InputError, UsageError
from optdnn.runtime.program import Step
from optdnn.runtime.steps.reference import reference_step
from optdnn.types import BF16

RNG = np.random.default_rng(0)
X = RNG.standard_normal((4, 5)).astype(np.float32)


@pytest.fixture
def engine() -> Engine:
    return Engine(mlp())


def identity(n: int | str = "n", **more: Any) -> Engine:
    """y = Identity(x): the kernel returns the array of its input."""
    steps = [reference_step("Identity", {}, (0,), (1,))]
    return Engine(program([("x", F32, (n, 5))], [("y", 1)], steps, [(F32, (n, 5))], **more))


def pair() -> Engine:
    """y = a - b"""
    steps = [reference_step("Sub", {}, (0, 1), (2,))]
    return Engine(program([("a", F32, (4, 5)), ("b", F32, (4, 5))], [("y", 2)], steps, [(F32, (4, 5))]))


# ---------------------------------------------------------------- what it gives


def test_runs_in_onnx_output_order(engine: Engine) -> None:
    got = engine.run({"x": X})
    assert list(got) == ["y", "hidden"]
    for name, want in mlp_expected(engine.program, X).items():
        np.testing.assert_array_equal(got[name], want)
    another = engine.run({"x": -X})
    assert np.abs(another["y"] - got["y"]).max() > 0.1


def test_positional_call_gives_a_tuple_or_the_array(engine: Engine) -> None:
    y, hidden = engine(X)
    np.testing.assert_array_equal(y, engine.run({"x": X})["y"])
    assert hidden.shape == (4, 8)
    np.testing.assert_array_equal(identity()(X), X)
    with pytest.raises(InputError, match=r"2 inputs given; the engine takes x: fp32\[n, 5\]"):
        engine(X, X)


def test_a_call_takes_inputs_by_name() -> None:
    two = pair()
    want = two.run({"a": X, "b": 2 * X})["y"]
    for got in (two(X, 2 * X), two(X, b=2 * X), two(a=X, b=2 * X)):
        np.testing.assert_array_equal(got, want)
    with pytest.raises(InputError, match="input 'a' is given by position and by name"):
        two(X, a=X)
    with pytest.raises(InputError, match="1 inputs given"):
        two(b=X)
    with pytest.raises(InputError, match="there is no input 'c'"):
        two(X, c=X)
    with pytest.raises(InputError, match=r"takes arrays, not a mapping.*\n  hint: engine\.run\(\{NAME: array\}\)"):
        two({"a": X, "b": X})


def test_an_engine_is_saved_to_a_path(engine: Engine) -> None:
    with pytest.raises(UsageError, match="an engine is saved to a file, not to NoneType"):
        engine.save(None)  # type: ignore[arg-type]


def test_describes_itself(engine: Engine) -> None:
    assert [str(s) for s in engine.inputs] == ["x: fp32[n, 5]"]
    assert [s.name for s in engine.outputs] == ["y", "hidden"]
    assert (engine.target, engine.precision) == ("reference", "fp32")
    assert engine.meta["passes"][0]["name"] == "fold_constants"
    assert len(engine.facts) == 4
    assert engine.facts[0]["library"] == "numpy"
    assert "x: fp32[n, 5] -> y: fp32[n, 3]" in repr(engine)


def test_symbolic_batch_runs_at_any_size(engine: Engine) -> None:
    for n in (1, 7, 0, 3):
        assert engine.run({"x": np.ones((n, 5), np.float32)})["y"].shape == (n, 3)


# ---------------------------------------------------------------- outputs are fresh


def test_an_output_that_is_the_input_is_copied() -> None:
    x = X.copy()
    y = identity().run({"x": x})["y"]
    assert not np.shares_memory(x, y)
    y[:] = 0
    np.testing.assert_array_equal(x, X)


def test_an_output_that_is_a_constant_is_copied() -> None:
    c = np.arange(3, dtype=np.float32)
    e = Engine(program([], [("y", 0)], [], constants=[c]))
    y = e.run({})["y"]
    y[:] = 9
    np.testing.assert_array_equal(e.run({})["y"], [0, 1, 2])


def test_an_output_that_is_an_input_buffer_is_copied() -> None:
    e = Engine(program([("x", F32, (2,))], [("y", 0)], []))
    x = np.ones(2, np.float32)
    y = e.run({"x": x})["y"]
    y[:] = 5
    assert x.tolist() == [1, 1]


def test_one_buffer_under_two_output_names_gives_two_arrays() -> None:
    steps = [reference_step("Relu", {}, (0,), (1,))]
    e = Engine(program([("x", F32, (2,))], [("a", 1), ("b", 1)], steps, [(F32, (2,))]))
    got = e.run({"x": np.ones(2, np.float32)})
    assert not np.shares_memory(got["a"], got["b"])
    buffer = np.zeros(2, np.float32)
    got = e.context().run({"x": np.ones(2, np.float32)}, out={"b": buffer})
    assert got["b"] is buffer
    assert buffer.tolist() == [1, 1]
    assert not np.shares_memory(got["a"], got["b"])


def test_views_of_one_intermediate_are_separated() -> None:
    steps = [
        reference_step("Relu", {}, (0,), (1,)),
        reference_step("Identity", {}, (1,), (2,)),
        reference_step("Identity", {}, (1,), (3,)),
    ]
    e = Engine(program([("x", F32, (2,))], [("a", 2), ("b", 3)], steps, [(F32, (2,))] * 3))
    got = e.run({"x": np.ones(2, np.float32)})
    assert not np.shares_memory(got["a"], got["b"])


# ---------------------------------------------------------------- input checks


@pytest.mark.parametrize(
    ("feeds", "message"),
    [
        ({}, r"input 'x' is missing; the engine takes x: fp32\[n, 5\]"),
        ({"x": X, "z": X}, r"there is no input 'z'; the engine takes x: fp32\[n, 5\]"),
        ({"z": X}, r"input 'x' is missing, there is no input 'z'"),
        ([X], r"inputs must map names to arrays, not list"),
        ({"x": X.astype(np.float64)}, r"input 'x' is fp64; the engine takes fp32\n  hint: .*astype\(np.float32\)"),
        ({"x": X.astype(">f4")}, r"input 'x' is >f4; the engine takes fp32"),
        ({"x": [[1.0, 2, 3, 4, 5]]}, r"input 'x' is fp64; the engine takes fp32"),
        ({"x": [[1.0, 2], [3]]}, r"input 'x', a list, cannot be read as an array"),
        ({"x": None}, r"input 'x' is object; the engine takes fp32"),
        ({"x": np.ma.masked_array(X)}, r"input 'x' is a masked array"),
        ({"x": X[0]}, r"input 'x' has shape \[5\]; the engine takes x: fp32\[n, 5\] \(rank 1 instead of 2\)"),
        ({"x": X[:, :4]}, r"input 'x' has shape \[4, 4\]; .*\(axis 1 is 4 instead of 5\)"),
    ],
)
def test_refuses_inputs_that_do_not_fit(engine: Engine, feeds: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        engine.run(feeds)
    assert engine.run({"x": X})["y"].shape == (4, 3)  # the engine is still usable


def test_equal_symbols_must_agree() -> None:
    steps = [reference_step("Add", {}, (0, 1), (2,))]
    e = Engine(program([("a", F32, ("n", 2)), ("b", F32, ("n", 2))], [("y", 2)], steps, [(F32, ("n", 2))]))
    one, three = np.ones((1, 2), np.float32), np.ones((3, 2), np.float32)
    assert e.run({"a": three, "b": three})["y"].shape == (3, 2)
    with pytest.raises(InputError, match=r"'b' has shape \[1, 2\].*n is 1 on axis 0, but 3 on axis 0 of input 'a'"):
        e.run({"a": three, "b": one})  # NumPy would broadcast


def test_bf16_is_exact_and_the_hint_names_ml_dtypes() -> None:
    steps = [reference_step("Relu", {}, (0,), (1,))]
    e = Engine(program([("x", BF16, (2,))], [("y", 1)], steps, [(BF16, (2,))]))
    assert e(np.array([-1, 2], ml_dtypes.bfloat16)).tolist() == [0, 2]
    with pytest.raises(InputError, match=r"fp32; the engine takes bf16\n.*ml_dtypes.bfloat16"):
        e(np.ones(2, np.float32))
    with pytest.raises(
        InputError, match=r"files keep the bytes of bf16, but not the type: pass x.view\(ml_dtypes.bfloat16\)"
    ):
        e(np.array([-1, 2], ml_dtypes.bfloat16).view(np.dtype("V2")))  # as np.load returns them


def test_other_layouts_and_array_likes_are_taken(engine: Engine) -> None:
    want = engine.run({"x": X})["y"]
    unaligned = np.frombuffer(b"\0" + X.tobytes(), np.uint8)[1:].view(np.float32).reshape(4, 5)

    class Foreign:
        def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
            return X

    for x in (np.asfortranarray(X), np.stack([X, X], -1)[..., 0], unaligned, Foreign(), X.view(np.memmap)):
        np.testing.assert_array_equal(engine.run({"x": x})["y"], want)


def test_scalars_keep_rank_zero() -> None:
    steps = [reference_step("Relu", {}, (0,), (1,))]
    e = Engine(program([("x", F32, ())], [("y", 1)], steps, [(F32, ())]))
    y = e(np.float32(2.5))
    assert isinstance(y, np.ndarray)
    assert y.shape == ()
    assert y == 2.5


# ---------------------------------------------------------------- out buffers


def test_out_buffers_are_reused(engine: Engine) -> None:
    context = engine.context()
    buffer = np.full((4, 3), np.nan, np.float32)
    got = context.run({"x": X}, out={"y": buffer})
    assert got["y"] is buffer
    assert got["hidden"].shape == (4, 8)
    np.testing.assert_array_equal(buffer, mlp_expected(engine.program, X)["y"])


def test_an_engine_takes_buffers_as_well(engine: Engine) -> None:
    buffer = np.full((4, 3), np.nan, np.float32)
    got = engine.run({"x": X}, out={"y": buffer})
    assert got["y"] is buffer
    np.testing.assert_array_equal(buffer, mlp_expected(engine.program, X)["y"])


def test_an_executor_may_write_into_the_buffer(fake: Any) -> None:
    def run(inputs: Any, outs: Any) -> Any:
        assert outs[0] is not None
        outs[0][:] = inputs[0] * 2
        return outs

    fake(run)
    steps = [Step("fake", {}, (0,), (1,))]
    e = Engine(program([("x", F32, (2,))], [("y", 1)], steps, [(F32, (2,))]))
    buffer = np.zeros(2, np.float32)
    assert e.context().run({"x": np.ones(2, np.float32)}, out={"y": buffer})["y"] is buffer
    assert buffer.tolist() == [2, 2]


def _read_only() -> Any:
    a = np.zeros((4, 3), np.float32)
    a.flags.writeable = False
    return a


@pytest.mark.parametrize(
    ("out", "message"),
    [
        ({"z": np.zeros((4, 3), np.float32)}, r"there is no output 'z'; the engine gives y: fp32\[n, 3\], hidden"),
        ([np.zeros((4, 3), np.float32)], r"out must map output names to arrays, not list"),
        ({"y": [0.0]}, r"output 'y' is a list, not a NumPy array"),
        ({"y": np.zeros((4, 3))}, r"output 'y' is fp64; the output is y: fp32\[n, 3\]"),
        ({"y": _read_only()}, r"output 'y' is read-only"),
        ({"y": np.zeros((4, 6), np.float32)[:, ::2]}, r"output 'y' is not C-contiguous"),
        ({"y": np.zeros((4, 4), np.float32)}, r"output 'y' has shape \[4, 4\]"),
        ({"y": np.zeros((3, 3), np.float32)}, r"output 'y' has shape \[3, 3\]"),
        ({"y": np.zeros(12, np.float32)}, r"output 'y' has shape \[12\]"),
    ],
)
def test_refuses_out_buffers_that_do_not_fit(engine: Engine, out: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        engine.context().run({"x": X}, out=out)


def test_refuses_out_buffers_that_overlap(engine: Engine) -> None:
    memory = np.zeros(64, np.float32)
    x = memory[:20].reshape(4, 5)
    with pytest.raises(InputError, match="overlaps an input"):
        engine.context().run({"x": x}, out={"y": memory[10:22].reshape(4, 3)})
    with pytest.raises(InputError, match="overlaps an input or another"):
        engine.context().run({"x": X}, out={"y": memory[:12].reshape(4, 3), "hidden": memory[8:40].reshape(4, 8)})


def test_an_out_buffer_of_a_data_dependent_size_is_checked_after_the_run(fake: Any) -> None:
    fake(lambda inputs, outs: [np.ones(3, np.float32)])
    steps = [Step("fake", {}, (0,), (1,))]
    e = Engine(program([("x", F32, (2,))], [("y", 1)], steps, [(F32, ("found",))]))
    with pytest.raises(InputError, match=r"output 'y' has shape \[2\], the result \[3\]"):
        e.context().run({"x": np.ones(2, np.float32)}, out={"y": np.ones(2, np.float32)})


def test_a_stream_is_refused_on_targets_without_streams(engine: Engine) -> None:
    with pytest.raises(InputError, match="has no streams"):
        engine.context().run({"x": X}, stream=0)
