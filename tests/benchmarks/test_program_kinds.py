"""Every launch of a program has a kind with a definition, which reads its attributes and infers the shapes of its results."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from support.sweep import sweep

from optdnn.ops.base import Call
from optdnn.ops.fused import plain_attrs, typed_attrs
from optdnn.ops.table import FAMILIES, OPDEFS
from optdnn.runtime.cuda.launches.plan import TF32, CudaStep, OperandView, parse
from optdnn.runtime.program import Program, Step
from optdnn.runtime.reference.run import PlainStage
from optdnn.runtime.steps.attrs import attrs_from_plain, attrs_to_plain
from optdnn.types import FP32, INT8, NARROW_FLOATS, TensorType, is_float

script = pytest.importorskip("benchmarks.program_fingerprints", reason="an installed copy has no benchmarks")

REGIONS = {d.kind for d in FAMILIES["regions of lowered programs (our own)"]}
FAST = "lstm:1 fp16 sm_90a"
COVERING = (
    *("resnet18:1 int8 sm_90a", "resnet18:32 fp16 sm_90a", "resnet18:1..4..8 fp16 sm_90a"),
    *("mobilenet_v2:1 fp16 sm_90a", "mobilenet_v2:1 fp32 sm_90a", "mobilenet_v2:1 int8 sm_90a"),
    *("bert_base:1 int8 sm_80", "vit_b_16:1 fp16 sm_90a", "vit_b_16:1 fp16 sm_89"),
    *("densenet121:1 int8 sm_90a", "efficientnet_b0:1 int8 sm_90a", "yolox_s:1 fp16 sm_90a"),
    *(FAST, "lstm:1 fp32 sm_90a"),
)
"""Builds with all pairs of kind and kernel in the cases of the fingerprints, a large batch, and a range of sizes."""
DEPTH = {
    **{"resnet18": 0.5, "mobilenet_v2": 0.34, "efficientnet_b0": 0.34, "yolox_s": 0.34},
    **{"densenet121": 0.2, "bert_base": 0.17, "vit_b_16": 0.17},
}
"""Further blocks of a network have the same kinds and kernels."""
BUILDS = {case.name: replace(case, depth=DEPTH.get(case.network, 1.0)) for case in script.CASES}


def launches(program: Program) -> Iterator[tuple[Program, Step, CudaStep]]:
    """The launches of a program and of its plans."""
    for step in program.steps:
        if step.executor == "cuda":
            yield program, step, parse(step, program)
    for plan in program.dynamic.plans if program.dynamic is not None else ():
        yield from launches(plan)


def seen(program: Program, step: Step, view: OperandView | None) -> TensorType | None:
    """The type with which the launch computes a view: narrow floats are fp32."""
    if view is None:
        return None
    dtype = program.buffers[(*step.inputs, *step.outputs)[view.operand]].dtype
    wide = is_float(dtype) and (dtype.itemsize < FP32.itemsize or dtype in NARROW_FLOATS)
    return TensorType(FP32 if wide else dtype, view.shape)


@pytest.mark.parametrize("name", sweep(COVERING, FAST))
def test_launches_are_of_defined_kinds(name: str) -> None:
    regions = 0
    for program, step, parsed in launches(script.build(BUILDS[name])):
        kind, given = parsed.meaning.kind, attrs_from_plain(dict(parsed.meaning.attrs))
        given.pop(TF32, None)
        assert kind in OPDEFS
        if (
            kind not in REGIONS and OPDEFS[kind].arity is None
        ):  # a reduction that computes its own operand also has stages
            stages = [*given.pop("prologue", ()), *given.pop("epilogue", ())]
            assert all(isinstance(s, PlainStage) for s in stages)
            assert given.pop("arity", 1) >= 1
        attrs = typed_attrs(OPDEFS[kind], given)
        if kind not in REGIONS:
            continue
        regions += 1
        assert attrs_to_plain(plain_attrs(OPDEFS[kind], attrs)) == attrs_to_plain(given)
        types = [seen(program, step, v) for v in parsed.meaning.reads]
        if kind == "ConvSqueeze" and given["of"] == "QuantizedConv":  # the depthwise kernel reads its weights as floats
            assert types[1] is not None
            types[1] = types[1].with_dtype(INT8)
        call = Call(kind, attrs, tuple(types), (None,) * len(types), len(parsed.meaning.writes), no_symbol)
        result = OPDEFS[kind].infer(call)
        for view, type in zip(parsed.meaning.writes, result.types, strict=False):
            assert view is None or view.shape == type.shape, f"{kind} of {', '.join(step.src)}"
        cost = OPDEFS[kind].cost
        assert cost is not None
        assert np.isfinite(cost(call, result).flops)
    assert regions or name != FAST


def no_symbol(hint: str, most: object = None) -> object:
    raise AssertionError(f"a launch has the unknown size {hint!r}")
