"""Rendered parts of kernels: epilogues and the wgmma instruction."""

from __future__ import annotations

import ctypes
import math
import re
import subprocess
from pathlib import Path

import numpy as np
import pytest
from support.host import needs_compiler
from support.sweep import every

from optdnn.errors import InternalError
from optdnn.runtime.cuda.compile import render
from optdnn.runtime.reference import quantized

SUPPORT = Path(__file__).parents[2] / "support"


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
        text = render.epilogue(stages, exact=True)
        assert not re.search(r"__expf|saturated_fma|tanh_fast", text), name
        # To two units in the last place, if the divisor is between 2^-126 and 2^126: here it is at least 1.
        divided = r"__fdividef\((1\.0f|x), 1\.0f \+ expf|__fdividef\(n, n \+ 2\.0f\)"
        assert "__fdividef" not in text or re.search(divided, text), name
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
def test_stages_that_cannot_be_rendered_are_refused_with_the_reason(
    stages: tuple[render.Stage, ...], reason: str
) -> None:
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
    names = {
        "fmaf": lambda a, b, c: a * b + c,
        "saturated_fma": lambda a, b, c: np.clip(a * b + c, 0, 1),
        "x": x,
        "u": x * x,
    }
    got = x * eval(re.sub(r"(\d)f\b", r"\1", factor), names)
    want = np.array([0.5 * (1 + math.erf(a / math.sqrt(2))) for a in x]) * x
    assert (np.abs(got - want) <= 2.2e-5 * np.abs(x) + 1e-12).all()
    assert np.abs(got - want).max() < 5e-5


def test_a_silu_at_the_end_is_done_to_two_elements_at_once() -> None:
    text = render.paired_epilogue((("bias",), ("silu",)))
    assert "#define FINAL_SILU 1" in text
    assert "__expf" not in text
    assert render.paired_epilogue((("silu",), ("bias",))) == render.epilogue((("silu",), ("bias",)))
    assert "silu_pair(x, y)" in render.between((("silu",),), "float16")
    assert "max.f16x2" in render.between((("relu",),), "float16", "after")
    assert "silu_pair" not in render.between((("clip", -0.1, 0.7),), "float16")


def test_two_silus_share_one_reciprocal() -> None:
    source = Path(render.__file__).parents[1] / "kernels" / "common" / "ptx.cuh"
    (body,) = re.findall(r"DEVICE void silu_pair\(.*?\) \{(.*?)\n\}", source.read_text(encoding="utf-8"), re.DOTALL)
    lines = [line.strip().replace("const float ", "") for line in body.split(";") if line.strip()]
    code = "\n".join(re.sub(r"(\d)f\b", r"\1", re.sub(r", (\w) =", r"; \1 =", line)) for line in lines)
    values = np.array([-65504, -1e3, -90, -41, -40, -17, -5, -1, -1e-3, 0, 1e-3, 1, 5, 17, 90, 65504], np.float32)
    x, y = (v.reshape(-1).copy() for v in np.meshgrid(values, values))
    names = {"x": x.copy(), "y": y.copy(), "fminf": np.fmin, "__expf": np.exp, "__fdividef": np.divide}
    with np.errstate(over="raise", invalid="raise", divide="raise"):
        exec(code, names)
    with np.errstate(over="ignore"):
        wanted = [v / (1 + np.exp(-v)) for v in (x, y)]
    for got, want in zip((names["x"], names["y"]), wanted, strict=True):
        assert got.dtype == np.float32
        np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-12)


WANTED = {
    "mish": lambda x: x * np.tanh(np.logaddexp(0, x)),
    "selu": lambda x: 1.05 * np.where(x < 0, 1.67 * np.expm1(np.minimum(x, 0)), x),
    "celu": lambda x: np.where(x < 0, 1.67 * np.expm1(np.minimum(x, 0) / 1.67), x),
    "softsign": lambda x: x / (1 + np.abs(x)),
    "sin": np.sin,
    "cos": np.cos,
    "abs": np.abs,
    "sqrt": np.sqrt,
    "reciprocal": lambda x: 1 / x,
    "round": np.rint,
    "fake_quantize": lambda x: np.clip(np.rint(x * np.float32(1.67)), 1.05, 0.6) * 0.3,
}


@needs_compiler
@pytest.mark.parametrize("name", every(2, WANTED))
def test_activations_on_the_processor(name: str, tmp_path: Path) -> None:
    """Each error is a small fraction of the rounding to fp16, also for large arguments and in the exact form."""
    stages = ((name, *(1.67, 1.05, 0.6, 0.3)[: render.STAGES[name][0]]),)
    source = f"""#include "{SUPPORT / "host.hpp"}"
#define DEVICE static inline
{render.epilogue(stages, "fast")}
{render.epilogue(stages, exact=True)}
extern "C" void run(const float* x, float* fast_y, float* y, int n) {{
    for (int i = 0; i < n; i++) {{ fast_y[i] = fast(x[i], 0, 0); y[i] = epilogue(x[i], 0, 0); }}
}}
"""
    (tmp_path / "stage.cpp").write_text(source)
    library = tmp_path / "stage.so"
    subprocess.run(["g++", "-O1", "-shared", "-fPIC", "-o", library, tmp_path / "stage.cpp"], check=True, timeout=120)
    x = np.concatenate([np.linspace(-30, 30, 6001), np.linspace(-3000, 3000, 6001)]).astype(np.float32)
    x = np.abs(x) if name == "sqrt" else x
    x = x[x != 0] if name == "reciprocal" else x
    fast, exact = np.empty_like(x), np.empty_like(x)
    pointers = [a.ctypes.data_as(ctypes.POINTER(ctypes.c_float)) for a in (x, fast, exact)]
    ctypes.CDLL(str(library)).run(*pointers, len(x))
    want = WANTED[name](x.astype(np.float64))  # type: ignore[no-untyped-call]
    for got, bound in ((fast, 5e-6), (exact, 1e-6)):
        np.testing.assert_allclose(got, want, rtol=bound, atol=bound)


def test_each_stage_has_its_meaning_after_products_of_integers() -> None:
    """8-bit convolutions take the same stages. ``simulate`` and the check of steps compute them."""
    assert set(render.STAGES) - {"bias", "add", "mul"} == set(quantized.STAGES)
    x = np.linspace(-30, 30, 241, dtype=np.float32)
    for name, want in WANTED.items():
        given = np.abs(x) if name == "sqrt" else x
        given = x[x != 0] if name == "reciprocal" else given
        found = quantized.STAGES[name](given, *(1.67, 1.05, 0.6, 0.3)[: render.STAGES[name][0]])
        np.testing.assert_allclose(found, want(given.astype(np.float64)), rtol=1e-5, atol=1e-6)  # type: ignore[no-untyped-call]
