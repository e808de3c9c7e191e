"""Programs for which no engine is created: another target, unmet requirements, malformed plans."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from programs import F32, mlp, program

from optdnn import Engine, load
from optdnn.errors import EngineError, MissingDependency
from optdnn.runtime.program import Buffer, Step
from optdnn.types import BF16


def test_refuses_another_target() -> None:
    p = mlp()
    p.target = "abacus"
    message = r"for target 'abacus'; this installation runs cpu, reference, simulate, cuda\n  hint: rebuild"
    with pytest.raises(EngineError, match=message):
        Engine(p)


def test_refuses_an_unknown_executor() -> None:
    p = program([("x", F32, (1,))], [("y", 1)], [Step("abacus", {}, (0,), (1,))], [(F32, (1,))])
    with pytest.raises(EngineError, match=r"steps for 'abacus'.*\n  hint: upgrade"):
        Engine(p)


def test_refuses_an_unknown_kind_and_malformed_params() -> None:
    for params, message in (
        ({"kind": "Frobnicate", "attrs": {}}, "'Frobnicate', which this version"),
        ({"kind": "Relu"}, "something other than"),
        ({"kind": "Relu", "attrs": []}, "attributes are not a table"),
        ({"kind": "Relu", "attrs": {"a": {"dtype": "fp99"}}}, "attribute 'a' of a step is malformed"),
    ):
        p = program([("x", F32, (1,))], [("y", 1)], [Step("reference", params, (0,), (1,))], [(F32, (1,))])
        with pytest.raises(EngineError, match=message):
            Engine(p)


@pytest.mark.parametrize(
    ("requirement", "error", "message"),
    [
        ("package:optdnn-surely-not-there", MissingDependency, "is needed by this engine, and is not installed"),
        ("package:numpy>=99.0", EngineError, r"needs numpy >= 99.0; .* is installed"),
        ("package:numpy==0.1", EngineError, r"needs numpy == 0.1"),
        ("cpu:warp_drive", EngineError, "processors with warp_drive, which this one lacks"),
        ("moon:full", EngineError, "requires 'moon:full', which this version"),
    ],
)
def test_refuses_unmet_requirements(
    requirement: str, error: type[Exception], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from optdnn.runtime.file import requires

    monkeypatch.setattr(requires, "cpu_flags", lambda: frozenset(["avx2"]))
    p = mlp()
    p.requires = ("package:numpy", "package:numpy>=1.0", "cpu:avx2", requirement)
    with pytest.raises(error, match=message):
        Engine(p)
    p.requires = p.requires[:3]
    Engine(p)


def test_unknown_processor_features_are_not_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from optdnn.runtime.file import requires

    monkeypatch.setattr(requires, "cpu_flags", lambda: None)  # a system that does not report it
    p = mlp()
    p.requires = ("cpu:avx512_bf16",)
    Engine(p)


def test_threads_reach_the_executor(fake: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import sys

    fake(lambda inputs, outs: [inputs[0]])
    seen: list[Any] = []
    module = sys.modules["optdnn_fake_executor"]
    prepare = module.prepare
    monkeypatch.setattr(module, "prepare", lambda s, p, o: (seen.append(o.threads), prepare(s, p, o))[1])
    p = program([("x", F32, (1,))], [("y", 1)], [Step("fake", {}, (0,), (1,))], [(F32, (1,))])
    Engine(p).save(tmp_path / "e.engine")
    load(tmp_path / "e.engine", threads=3)
    assert seen == [None, 3]


def _break(**changes: Any) -> Any:
    def apply(p: Any) -> None:
        for name, value in changes.items():
            setattr(p, name, value)

    return apply


def _buffer(i: int, **changes: Any) -> Any:
    def apply(p: Any) -> None:
        p.buffers = tuple(replace(b, **changes) if k == i else b for k, b in enumerate(p.buffers))

    return apply


def _step(i: int, **changes: Any) -> Any:
    def apply(p: Any) -> None:
        p.steps = tuple(replace(s, **changes) if k == i else s for k, s in enumerate(p.steps))

    return apply


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (_buffer(1, blob=9), "points at blob 9, which does not exist"),
        (_buffer(1, dtype=BF16), "buffer 1 .* its blob float32"),
        (_buffer(1, offset=0), "both constant and in the arena"),
        (_buffer(4, offset=0), "its shape is not static"),
        (_buffer(4, offset=0, shape=(2, 8)), "outside of the arena of 0 bytes"),
        (_buffer(0, dtype=BF16), r"input x: fp32\[n, 5\] and its buffer, bfloat16"),
        (_buffer(0, shape=(5,)), "have different types"),
        (_break(buffers=()), "which does not exist"),
        (_step(0, inputs=(0, 77)), "step 0 reads buffer 77, which does not exist"),
        (_step(0, inputs=(0, -2)), "step 0 reads buffer -2"),
        (_step(0, inputs=(0, 5)), "step 0 reads buffer 5 before it is written"),
        (_step(0, outputs=(77,)), "step 0 writes buffer 77"),
        (_step(0, outputs=(1,)), "step 0 writes buffer 1, which is written already"),
        (_step(3, outputs=(6,)), "step 3 writes buffer 6, which is written already"),
        (_break(steps=()), "nothing writes output 'y'"),
        (lambda p: _break(inputs=p.inputs * 2)(p), "two inputs have one name"),
        (lambda p: _break(outputs=p.outputs * 2)(p), "two outputs have one name"),
        (_buffer(0, shape=("n", 6)), "have different types"),
        (lambda p: _break(inputs=((p.inputs[0][0], 1),))(p), r"input x: fp32\[n, 5\] and its buffer, float32\(5, 8\)"),
        (lambda p: _break(inputs=((p.inputs[0][0], 99),))(p), "input 'x' is buffer 99, which does not exist"),
    ],
)
def test_validate_names_each_fault(fault: Any, message: str) -> None:
    p = mlp()
    fault(p)
    with pytest.raises(EngineError, match=message):
        Engine(p)


def test_an_input_may_not_be_a_constant() -> None:
    c = np.zeros((2,), np.float32)
    p = program([("x", F32, (2,))], [("y", 0)], [], constants=[c])
    p.buffers = (Buffer("x", F32, (2,), blob=0), p.buffers[1])
    with pytest.raises(EngineError, match="input 'x' shares buffer 0 with a constant"):
        Engine(p)
