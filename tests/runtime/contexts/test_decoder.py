"""A decoder whose caches are state: every target gives the same results as with caches passed by hand, and GPU programs keep
the caches in place."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.decoder import decoder, empty, generated, states, tokens

import optdnn
from optdnn.errors import InputError
from optdnn.runtime.cuda.launches.plan import parse
from optdnn.runtime.cuda.memory.in_place import check_overlap, kept_in_place, stays
from optdnn.runtime.cuda.memory.state import grows
from optdnn.runtime.plans.by_value import open_runner
from optdnn.runtime.steps.executor import LoadOptions

STEPS = 6


@pytest.fixture(scope="module", params=[False, True], ids=["fixed", "grows"])
def case(request: pytest.FixtureRequest) -> Any:
    model = decoder(grows=request.param)
    return model, request.param, generated(optdnn.build(model, target="reference"), model, STEPS)


@pytest.mark.parametrize("target", ["reference", "cpu", "simulate"])
def test_caches_are_state(case: Any, target: str) -> None:
    model, growing, want = case
    shapes = dict.fromkeys(states().values(), "1x2x0..4..8x16") if growing and target == "simulate" else None
    engine = optdnn.build(model, target=target, shapes=shapes, **({"threads": 1} if target == "cpu" else {}))
    at, token = np.zeros(1, np.int64), np.zeros((1, 1), np.int64)
    bound: Any = engine.context().bind({"token": token, "at": at, **empty(model, 0)}, state=states())  # type: ignore[attr-defined]
    for k, given in enumerate(tokens(STEPS)):
        at[:], token[:] = k, given
        results = bound.run()
        np.testing.assert_allclose(results["logits"], want[k], rtol=1e-3, atol=1e-4)
        assert results["new.key.0"].shape[2] == (k + 1 if growing else 32)


def test_a_gpus_program_keeps_caches_in_place() -> None:
    program = optdnn.build(decoder(), target="cuda:sm_90a", precision="fp16", io_dtype="fp16", no_cubins=True).program
    steps = [parse(s, program) for s in program.steps]
    found = kept_in_place(program, steps)
    names = {i: s.name for s, i in (*program.inputs, *program.outputs)}
    assert {names[o]: names[i] for o, i in found.items()} == states()
    o, i = next(iter(found.items()))
    copies = [s for s in program.steps if stays(s, {i: 4096, o: 4096}, found)]
    assert [(s.inputs, s.outputs) for s in copies] == [((i,), (o,))]
    assert not [s for s in program.steps if stays(s, {i: 4096, o: 1 << 20}, found) or stays(s, {}, found)]
    check_overlap(program, {i: 4096, o: 4096}, found)
    check_overlap(program, {i: 4096, o: 1 << 20}, found)
    with pytest.raises(
        InputError, match=r"the buffer for 'new.(key|value).0' overlaps that for '(key|value).0'\n.*TensorScatter"
    ):
        check_overlap(program, {i: 4096, o: 4096 + 16}, found)
    with pytest.raises(InputError, match="overlaps"):
        check_overlap(program, {i: 4096, o: 4096}, {})


def test_state_with_other_readers_is_not_kept_in_place() -> None:
    import onnx.parser

    model = onnx.parser.parse_model(
        """<ir_version: 11, opset_import: ["": 24]> g (float[1, 4, 8] cache, float[1, 1, 8] row, int64[1] at)
        => (float[1, 4, 8] new, float[1, 4, 8] y) { new = TensorScatter(cache, row, at)  y = Sub(new, cache) }"""
    )
    program = optdnn.build(model, target="cuda:sm_90a", no_cubins=True).program
    assert not kept_in_place(program, [parse(s, program) for s in program.steps])


@pytest.mark.slow
def test_growing_state_is_recognized_by_its_dimensions() -> None:
    shapes = dict.fromkeys(states().values(), "1x2x1..4..8x16")
    engine = optdnn.build(decoder(grows=True), target="simulate", shapes=shapes)
    signature = open_runner(engine.program, LoadOptions(simulate=True)).signature
    assert grows(signature, states())
    fixed = optdnn.build(decoder(), target="simulate").program
    assert not grows(open_runner(fixed, LoadOptions(simulate=True)).signature, states())
