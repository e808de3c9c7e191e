"""Softmaxes and norms of rows whose elements lie apart: neighboring threads take neighboring rows, so that they read whole sectors."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from support.host import needs_compiler
from support.net import Net
from support.on_gpu import checked_launches
from support.on_processor import compare_steps
from support.simulated import check_simulated, feeds_of, kinds, lowered, refusals
from support.sweep import turns

from optdnn.ir.graph import Graph
from optdnn.kernels.norm import row_forms
from optdnn.ops.norm import MeanVarianceAttrs
from optdnn.ops.reduce import ReduceAttrs
from optdnn.ops.shape import TransposeAttrs
from optdnn.ops.softmax import SoftmaxAttrs
from optdnn.runtime.cuda.gpu_facts import of_arch

H100 = of_arch("sm_90a")


def net(kind: str, shape: tuple[int, ...], attrs: Any, part: int = 0) -> Graph:
    """One operator. With ``part`` it reads these columns in the middle of wider rows."""
    n = Net()
    if not part:
        return n.done(n.op(kind, n.input(*shape), attrs=attrs))
    x = n.op("Slice", n.input(*shape), n.ints(part), n.ints(2 * part), n.ints(-1))
    return n.done(n.op(kind, x, attrs=attrs))


CASES = {
    "softmax over tokens": net("Softmax", (2, 70, 24), SoftmaxAttrs(1)),
    "log softmax over classes": net("LogSoftmax", (2, 21, 9, 13), SoftmaxAttrs(1)),
    "rows of a part of columns": net("Softmax", (2, 300, 57), SoftmaxAttrs(1), part=19),
    "many elements": net("Softmax", (1, 1100, 20), SoftmaxAttrs(1)),
    "an axis in the middle": net("Softmax", (2, 3, 18, 40), SoftmaxAttrs(2)),
    "mean and variance": net("MeanVarianceNormalization", (2, 12, 5, 17), MeanVarianceAttrs((1,))),
}


@pytest.mark.parametrize("precision", ["fp32", "fp16", "bf16"])
@pytest.mark.parametrize("name", CASES)
def test_rows_lie_side_by_side_in_a_block(name: str, precision: str) -> None:
    program = check_simulated(CASES[name], precision)
    (step,) = (s for s in program.steps if str(s.params.get("tactic")).startswith("rows"))
    widened = precision != "fp32" and CASES[name].of_kind("Softmax", "LogSoftmax")  # the network's outputs are fp32
    assert step.params["tactic"] == ("rows_widened" if widened else "rows")
    assert "Pointwise" not in kinds(program)[-1:] or not widened
    shape = program.buffers[step.outputs[0]].shape
    axis = step.params["op"]["attrs"].get("axis", 1)
    assert shape is not None
    count = math.prod(n for i, n in enumerate(shape) if i != axis)
    form = row_forms.chosen_form(count, shape[axis], 4 if precision == "fp32" else 2, apart=True, gpu=H100)
    assert form.apart
    assert step.params["launch"]["grid"][0] == -(-count // form.rows)
    assert step.params["launch"]["block"] == form.threads


def test_a_softmax_that_others_read_is_not_widened() -> None:
    n = Net()
    y = n.op("Softmax", n.input(2, 70, 24), attrs=SoftmaxAttrs(1))
    program = check_simulated(n.done(y, n.op("ReduceMax", y, n.ints(1), attrs=ReduceAttrs())))
    assert "rows" in [s.params.get("tactic") for s in program.steps]
    assert "the only reader of its result is not a conversion to fp32" in refusals(program, "rows_widened")


def test_rows_of_neighboring_elements_are_not_widened_apart() -> None:
    """Neighbors of an odd pitch: no other kernel of rows reads them."""
    n = Net()
    y = n.op("Softmax", n.op("Transpose", n.input(2, 70, 24), attrs=TransposeAttrs((0, 2, 1))), attrs=SoftmaxAttrs(1))
    program = check_simulated(n.done(y))
    why = "neighboring threads would not read and write the elements of neighboring rows"
    assert why in refusals(program, "rows_widened")


def test_row_invariant_programs_keep_the_order_of_sums() -> None:
    """The form follows from the number of rows."""
    for images in (1, 40):
        program = lowered(net("Softmax", (images, 70, 24), SoftmaxAttrs(1)), row_invariant=True)
        (step,) = (s for s in program.steps if s.params.get("tactic") == "rows")
        assert step.params["launch"]["grid"][0] == -(-images * 24 // 16)  # rows of 16 threads, sixteen in a block


@needs_compiler
@pytest.mark.parametrize(("name", "precision"), turns(CASES, "fp32", "fp16"))
def test_the_kernel_on_the_processor(name: str, precision: str, tmp_path: Path) -> None:
    program = lowered(CASES[name], precision)
    assert compare_steps(program, feeds_of(CASES[name]), 4e-3 if precision == "fp16" else 1e-5, tmp_path) >= 1


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["fp32", "fp16", "bf16"])
@pytest.mark.parametrize("name", CASES)
def test_the_kernel_on_a_gpu(name: str, precision: str) -> None:
    checked_launches(CASES[name], precision)


@pytest.mark.parametrize(
    ("count", "length", "itemsize", "apart", "form"),
    [
        (4096, 128, 2, False, row_forms.Form(32, 8)),
        (4096, 64, 2, False, row_forms.Form(16, 16)),
        (451584, 9, 2, False, row_forms.Form(2, 128)),
        (451584, 3, 2, False, row_forms.Form(1, 256)),
        (4096, 1000, 2, False, row_forms.Form(256, 1)),
        (12, 1000, 2, True, row_forms.Form(256, 1)),  # fewer rows than a sector holds
        (80, 2000, 2, True, row_forms.Form(256, 4, apart=True)),
        (1216, 3137, 2, True, row_forms.Form(128, 8, apart=True)),
        (1216, 64, 2, True, row_forms.Form(32, 8, apart=True)),
        (25088, 256, 2, True, row_forms.Form(16, 16, apart=True)),
        (262144, 21, 2, True, row_forms.Form(8, 32, apart=True)),
        (262144, 21, 4, True, row_forms.Form(16, 16, apart=True)),
        (20, 64, 4, True, row_forms.Form(128, 2, apart=True)),
    ],
)
def test_forms(count: int, length: int, itemsize: int, apart: bool, form: Any) -> None:
    assert row_forms.chosen_form(count, length, itemsize, apart=apart, gpu=H100) == form


def test_more_sectors_take_more_time() -> None:
    half, whole = row_forms.Form(128, 8, apart=True), row_forms.Form(64, 16, apart=True)
    assert row_forms.apart_seconds(100000, 64, 2, 3, half) > row_forms.apart_seconds(100000, 64, 2, 3, whole)
    assert row_forms.apart_seconds(16, 30000, 2, 3, whole) > 20e-6  # the loads of a thread
