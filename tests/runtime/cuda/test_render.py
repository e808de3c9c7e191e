"""What is rendered into the kernels: epilogues and the wgmma instruction."""

from __future__ import annotations

import math
import re

import numpy as np
import pytest

from optdnn.errors import InternalError
from optdnn.runtime.cuda.compile import render


def test_stages_are_applied_in_order() -> None:
    text = render.epilogue((("bias",), ("add",), ("clip", 0.0, 6.0)))
    assert (
        text.index("x + c") < text.index("x + r") < text.index("fminf(fmaxf(x, 0.0f), 6.0f)") < text.index("return x")
    )
    assert render.uses_residual((("bias",), ("add",)))
    assert not render.uses_residual((("bias",), ("relu",)))


def test_infinite_bounds_are_literals_that_compile() -> None:
    assert "0xff800000" in render.epilogue((("clip", float("-inf"), 1.0),))


def test_exact_epilogues_approximate_nothing() -> None:
    for name, (count, _) in render.STAGES.items():
        stages = ((name, *[1.5] * count),)
        text = render.exact_epilogue(stages)
        assert not re.search(r"__expf|__fdividef|__saturatef\(fmaf|tanh_fast", text), name
        assert (text != render.epilogue(stages)) == (name in render.EXACT)
    assert set(render.EXACT) == render.INEXACT - {"tanh", "gelu_tanh"}, "which call tanhf"


@pytest.mark.parametrize(
    ("stages", "reason"),
    [
        ((("blur",),), "unknown stage 'blur'"),
        ((("clip", 1.0),), "takes 2 constants, not 1"),
        ((("add",), ("mul",)), "at most one residual"),
        ((("mul_const", float("nan")),), "NaN"),
    ],
)
def test_what_cannot_be_rendered_says_why(stages: tuple[render.Stage, ...], reason: str) -> None:
    with pytest.raises(InternalError, match=reason):
        render.epilogue(stages)


def test_wgmma_names_every_accumulator_once() -> None:
    text = render.wgmma(24, "bfloat16")
    assert "m64n24k16.f32.bf16.bf16" in text
    assert [f'"+f"(d[{i}])' in text for i in range(13)] == [True] * 12 + [False]
    for columns in (0, 4, 12, 264):
        with pytest.raises(InternalError, match="no tile"):
            render.wgmma(columns, "float16")


def test_gelu_is_within_a_fraction_of_a_rounding_to_half() -> None:
    text = render.epilogue((("gelu",),))
    factor = text[text.index("x *= ") + 5 : text.index(";", text.index("x *= "))]
    x = np.linspace(-30, 30, 60001)
    names = {"fmaf": lambda a, b, c: a * b + c, "__saturatef": lambda a: np.clip(a, 0, 1), "x": x, "u": x * x}
    got = x * eval(re.sub(r"(\d)f\b", r"\1", factor), names)
    want = np.array([0.5 * (1 + math.erf(a / math.sqrt(2))) for a in x]) * x
    assert (np.abs(got - want) <= 2.2e-5 * np.abs(x) + 1e-12).all()
    assert np.abs(got - want).max() < 5e-5
