"""C++ expressions of pointwise stages: element types, literals, and the statements of a generated kernel that compute a chain of stages."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import ml_dtypes
import numpy as np

from optdnn.errors import UnsupportedError
from optdnn.kernels.pointwise.byte_table import BYTES
from optdnn.ops.base import Stage
from optdnn.ops.fused import stage_calls
from optdnn.types import (
    BF16,
    BOOL,
    DTYPES,
    FP16,
    FP32,
    FP64,
    NARROW_FLOATS,
    NARROW_INTEGERS,
    DType,
    TensorType,
    dtype_name,
    is_float,
)

LARGEST = {d: float(ml_dtypes.finfo(d).max) for d in NARROW_FLOATS}  # type: ignore[no-untyped-call]
"""Largest value of each float type of 8 or fewer bits."""
CPP = {
    FP16: "f16", BF16: "bf16", FP32: "f32", FP64: "f64", BOOL: "boolean",
    **{d: n.partition("_")[2] for n, d in DTYPES.items() if d in NARROW_FLOATS},
    **{d: f"{'u' if d.name.startswith('u') else 'i'}{d.name[-1]}" for d in NARROW_INTEGERS},
    **{DTYPES[f"{s}{n}"]: f"{'u' if s == 'uint' else 'i'}{n}" for s in ("int", "uint") for n in (8, 16, 32, 64)},
}  # fmt: skip
"""Element type -> its name in general.cuh."""
_ARITHMETIC = {FP32: "float", FP64: "double", BOOL: "bool"} | dict.fromkeys((FP16, BF16, *NARROW_FLOATS), "float")


def arithmetic(dtype: DType) -> str:
    """The C++ type of the arithmetic on an element type."""
    return _ARITHMETIC.get(dtype) or ("int" if dtype in NARROW_INTEGERS else CPP[dtype])


def literal(value: float | int | bool, type: str) -> str:
    """A C++ literal of an arithmetic type."""
    if type == "bool":
        return "true" if value else "false"
    if type in ("float", "double"):
        v = float(value)
        if math.isnan(v):
            return f"{type}(__int_as_float(0x7fffffff))"
        if math.isinf(v):
            return f"{type}(__int_as_float({'0x7f800000' if v > 0 else '0xff800000'}))"
        return f"{type}({v!r})"
    return f"{type}({int(value)}LL)" if not type.startswith("u") else f"{type}({int(value)}ULL)"


# ---------------------------------------------------------------- expressions

Render = Callable[[Sequence[str | None], Any, str, str], str]
"""(operands, attributes, arithmetic type of operand 0, arithmetic type of the result) -> C++ expression."""


def _f(text: str) -> Render:
    """A template over {0}, {1}, …; {T} is the arithmetic type, attributes by name as literals."""

    def render(args: Sequence[str | None], attrs: Any, given: str, result: str) -> str:
        values = {k: literal(v, given) for k, v in vars_of(attrs).items() if isinstance(v, (int, float))}
        return text.format(*args, T=given, R=result, **values)

    return render


def vars_of(attrs: Any) -> dict[str, Any]:
    return (
        dict(attrs)
        if isinstance(attrs, dict)
        else {k: getattr(attrs, k) for k in getattr(attrs, "__dataclass_fields__", {})}
    )


def _fold(text: str) -> Render:
    def render(args: Sequence[str | None], attrs: Any, given: str, result: str) -> str:
        found = str(args[0])
        for a in args[1:]:
            found = text.format(found, a, T=given)
        return found

    return render


def _mean(args: Sequence[str | None], attrs: Any, given: str, result: str) -> str:
    return f"({' + '.join(map(str, args))}) / {given}({len(args)})"


def _clip(args: Sequence[str | None], attrs: Any, given: str, result: str) -> str:
    low, high = [*args, None, None][1:3]
    x = str(args[0])
    x = f"max_nan({x}, {low})" if low is not None else x
    return f"min_nan({x}, {high})" if high is not None else x


def _div(args: Sequence[str | None], attrs: Any, given: str, result: str) -> str:
    a, b = args
    return f"({a} / {b})" if given in ("float", "double") else f"({b} == 0 ? {given}(0) : {given}({a} / {b}))"


def _mod(args: Sequence[str | None], attrs: Any, given: str, result: str) -> str:
    a, b = args
    if given in ("float", "double"):
        return f"fmod({a}, {b})" if vars_of(attrs).get("fmod") else f"floor_mod({a}, {b})"
    if vars_of(attrs).get("fmod") or given.startswith("u"):
        return f"({b} == 0 ? {given}(0) : {given}({a} % {b}))"
    return f"({b} == 0 ? {given}(0) : {given}(({a} % {b} + {b}) % {b}))"


def _pow(args: Sequence[str | None], attrs: Any, given: str, result: str) -> str:
    a, b = args
    if given == "double":
        return f"pow({a}, double({b}))"
    return f"powf({a}, float({b}))" if given == "float" else f"integer_power({a}, {b})"


def _shift(args: Sequence[str | None], attrs: Any, given: str, result: str) -> str:
    a, b = args
    sign = "<<" if vars_of(attrs)["direction"] == "LEFT" else ">>"
    empty = f"({a} < 0 ? {given}(-1) : {given}(0))" if sign == ">>" and not given.startswith("u") else f"{given}(0)"
    return f"({b} < 0 || u64({b}) >= 8 * sizeof({given}) ? {empty} : {given}({a} {sign} {b}))"


def _isinf(args: Sequence[str | None], attrs: Any, given: str, result: str) -> str:
    v = vars_of(attrs)
    tests = [f"({args[0]} {'>' if s else '<'} {literal(3.4028234663852886e38 * (1 if s else -1), given)})" for s, on in
             ((True, v["detect_positive"]), (False, v["detect_negative"])) if on]  # fmt: skip
    return " || ".join(tests) or "false"


def _gelu(args: Sequence[str | None], attrs: Any, given: str, result: str) -> str:
    x, t = args[0], given
    if vars_of(attrs).get("approximate") == "tanh":
        inner = f"{literal(math.sqrt(2 / math.pi), t)} * ({x} + {literal(0.044715, t)} * {x} * {x} * {x})"
        return f"({literal(0.5, t)} * {x} * ({t}(1) + tanh({inner})))"
    return f"({literal(0.5, t)} * {x} * ({t}(1) + erf({x} * {literal(math.sqrt(0.5), t)})))"


def _prelu(args: Sequence[str | None], attrs: Any, given: str, result: str) -> str:
    return f"({args[0]} < {given}(0) ? {given}({args[0]} * {args[1]}) : {args[0]})"


EXPRESSIONS: dict[str, Render] = {
    "Add": _f("({0} + {1})"), "Sub": _f("({0} - {1})"), "Mul": _f("({0} * {1})"), "Div": _div, "Mod": _mod, "Pow": _pow,
    "PRelu": _prelu, "Snake": _f("({0} + {2} * sin({1} * {0}) * sin({1} * {0}))"), "Min": _fold("min_nan({0}, {1})"), "Max": _fold("max_nan({0}, {1})"), "Sum": _fold("({0} + {1})"),
    "Mean": _mean, "BitShift": _shift, "Equal": _f("({0} == {1})"), "Less": _f("({0} < {1})"),
    "LessOrEqual": _f("({0} <= {1})"), "Greater": _f("({0} > {1})"), "GreaterOrEqual": _f("({0} >= {1})"),
    "And": _f("({0} && {1})"), "Or": _f("({0} || {1})"), "Xor": _f("({0} != {1})"), "BitwiseAnd": _f("({T})({0} & {1})"),
    "BitwiseOr": _f("({T})({0} | {1})"), "BitwiseXor": _f("({T})({0} ^ {1})"), "Where": _f("({0} ? {1} : {2})"),
    "Clip": _clip, "Cast": _f("{0}"), "Identity": _f("{0}"),
    "Relu": _f("max_nan({0}, {T}(0))"), "LeakyRelu": _f("({0} < {T}(0) ? {alpha} * {0} : {0})"),
    "Elu": _f("({0} < {T}(0) ? {alpha} * expm1({0}) : {0})"),
    "Selu": _f("{gamma} * ({0} <= {T}(0) ? {alpha} * expm1({0}) : {0})"),
    "Celu": _f("({0} < {T}(0) ? {alpha} * expm1({0} / {alpha}) : {0})"),
    "ThresholdedRelu": _f("({0} > {alpha} ? {0} : {T}(0))"), "Sigmoid": _f("({T}(1) / ({T}(1) + exp(-({0}))))"),
    "HardSigmoid": _f("min_nan(max_nan({alpha} * {0} + {beta}, {T}(0)), {T}(1))"),
    "HardSwish": _f("({0} * min_nan(max_nan({0} / {T}(6) + {T}(0.5), {T}(0)), {T}(1)))"), "Tanh": _f("tanh({0})"),
    "Softplus": _f("(max_nan({0}, {T}(0)) + log1p(exp(-fabs({0}))))"), "Softsign": _f("({0} / ({T}(1) + fabs({0})))"),
    "Mish": _f("({0} * tanh(max_nan({0}, {T}(0)) + log1p(exp(-fabs({0})))))"), "Gelu": _gelu,
    "Swish": _f("({0} / ({T}(1) + exp(-({alpha} * {0}))))"),
    "FakeQuantize": _f("(fmin(fmax(rint({0} / {scale}), {low}), {high}) * {scale})"),
    "Shrink": _f("({0} < -{lambd} ? {0} + {bias} : {0} > {lambd} ? {0} - {bias} : {T}(0))"),
    "Neg": _f("({T})(-({0}))"), "Abs": _f("({0} < {T}(0) ? ({T})(-({0})) : {0} == {T}(0) ? {T}(0) : {0})"),
    "Sign": _f("({0} != {0} ? {0} : {T}(({0} > {T}(0)) - ({0} < {T}(0))))"), "Ceil": _f("ceil({0})"),
    "Floor": _f("floor({0})"), "Round": _f("rint({0})"), "Reciprocal": _f("({T}(1) / {0})"), "Sqrt": _f("sqrt({0})"),
    "Exp": _f("exp({0})"), "Log": _f("log({0})"), "Erf": _f("{T}(erf({0}))"), "Sin": _f("sin({0})"), "Cos": _f("cos({0})"),
    "Tan": _f("tan({0})"), "Asin": _f("asin({0})"), "Acos": _f("acos({0})"), "Atan": _f("atan({0})"), "Sinh": _f("sinh({0})"),
    "Cosh": _f("cosh({0})"), "Asinh": _f("asinh({0})"), "Acosh": _f("acosh({0})"), "Atanh": _f("atanh({0})"),
    "Not": _f("(!{0})"), "BitwiseNot": _f("({T})(~{0})"), "IsNaN": _f("({0} != {0})"), "IsInf": _isinf,
}  # fmt: skip
"""Kind -> C++ expression over operands in their arithmetic types."""


def quantizing_tail(stages: Sequence[Stage], types: Sequence[TensorType], numbers: Sequence[float | None]) -> int:
    """Number of stages at the end that quantize fp32 values to 8-bit integers: a division by a scalar, a rounding, optionally a zero
    point, a clip, a cast; 0 if there are none. ``numbers``: for each operand, its value if it is a constant scalar."""
    for kinds in (["Div", "Round", "Clip", "Cast"], ["Div", "Round", "Add", "Clip", "Cast"]):
        first = len(stages) - len(kinds)
        last = stages[max(first, 0) :]
        if first < 0 or [s.kind for s in last] != kinds or last[-1].attrs.to not in BYTES:  # type: ignore[attr-defined]
            continue
        chained = all(s.args[0] == ~(first + i) for i, s in enumerate(last))
        slots = [a for s in last for a in s.args[1:]]
        if not chained or any(a is None or a < 0 or types[a].dtype != FP32 for a in slots):
            continue
        scale, *whole = (numbers[a] for a in slots if a is not None)
        exact = all(v is not None and v == int(v) and -128 <= v <= 255 for v in whole)
        if exact and scale is not None and scale >= float(np.finfo(np.float32).tiny):
            return len(kinds)
    return 0


def body(
    stages: Sequence[Stage], types: Sequence[TensorType], start: int = 0, numbers: Sequence[float | None] = ()
) -> tuple[list[str], str, DType]:
    """C++ statements that compute the stages from operands ``v0``, ``v1``, … (already widened).

    Returns (statements, name of the result, element type of the result). Register 0 is operand ``start``. ``numbers``: as for
    :func:`quantizing_tail` (empty: not known).
    """
    registers, kinds = [f"v{start}"], [types[start].dtype]
    lines = []
    tail = quantizing_tail(stages, types, numbers) if numbers else 0
    for k, (stage, (_, result)) in enumerate(zip(stages, stage_calls(stages, types[start], list(types)), strict=True)):
        render = EXPRESSIONS.get(stage.kind)
        if render is None:
            raise UnsupportedError(f"the cuda target has no expression for a stage of kind {stage.kind}")
        args = [None if a is None else registers[~a] if a < 0 else f"v{a}" for a in stage.args]
        given = [types[0].dtype if a is None else kinds[~a] if a < 0 else types[a].dtype for a in stage.args]
        dtype = result.types[0].dtype
        first = given[1] if stage.kind == "Where" else given[0]
        text = render(args, stage.attrs, arithmetic(first), arithmetic(dtype))
        if k >= len(stages) - tail:
            if stage.kind == "Div":
                text = f"quotient({args[0]}, {args[1]})"
            elif stage.kind == "Cast":
                quotient, zero = registers[1 + len(stages) - tail], "0.0f"
                if stages[-3].kind == "Add":
                    zero = f"v{stages[-3].args[1]}"
                low, high = (f"v{a}" for a in stages[-2].args[1:])
                text = f"{CPP[dtype]}(quantized({quotient}, {zero}, {low}, {high}))"
            else:
                text = str(args[0])  # the cast does it
        elif stage.kind == "Cast" and dtype == FP32 and first in BYTES:
            text = f"byte_to_float({args[0]})"
        elif stage.kind == "Cast" and dtype != first:
            if dtype not in CPP or dtype == DTYPES["fp8_e8m0"]:
                raise UnsupportedError(f"the cuda target has no kernel that makes elements of {dtype_name(dtype)}")
            # Conversion through the stored type: a cast rounds, or wraps, exactly once.
            if dtype in LARGEST and stage.attrs.saturate:  # type: ignore[attr-defined]
                t = arithmetic(first) if is_float(first) else "double"
                top = literal(LARGEST[dtype], t)
                text = f"min_nan(max_nan({t}({text}), -{top}), {top})"
            text = f"widen(narrow<{CPP[dtype]}>({text}))"
        lines.append(f"const {arithmetic(dtype)} r{k} = {arithmetic(dtype)}({text});")
        registers.append(f"r{k}")
        kinds.append(dtype)
    return lines, registers[-1], kinds[-1]
