"""Unary pointwise operators and activations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from optdnn.dim import DimLike, bounds, dim_max
from optdnn.errors import ShapeError
from optdnn.ops.base import DEFAULT_TOL, EXACT, Attrs, Call, Infer, Result, Tol, Traits
from optdnn.ops.checks import per_output
from optdnn.ops.definition import OpDef
from optdnn.ops.exchange import Export, FromOnnx, ToOnnx, read_attrs, simple_import
from optdnn.ops.values import Symbolic, Undecided, elementwise, require, with_values
from optdnn.types import BOOL, DType, is_float, is_int


def f32(value: float) -> float:
    """The float32 nearest to a decimal, as ONNX's schema stores a default."""
    return float(np.float32(value))


@dataclass(frozen=True)
class LeakyReluAttrs(Attrs):
    alpha: float = f32(0.01)


@dataclass(frozen=True)
class AlphaAttrs(Attrs):
    """``alpha`` of Elu, Celu, ThresholdedRelu and Swish."""

    alpha: float = 1.0


@dataclass(frozen=True)
class SeluAttrs(Attrs):
    alpha: float = f32(1.67326319217681884765625)
    gamma: float = f32(1.05070102214813232421875)


@dataclass(frozen=True)
class HardSigmoidAttrs(Attrs):
    alpha: float = f32(0.2)
    beta: float = 0.5


@dataclass(frozen=True)
class GeluAttrs(Attrs):
    """``approximate`` is "none" (by erf) or "tanh"."""

    approximate: str = "none"


@dataclass(frozen=True)
class ShrinkAttrs(Attrs):
    lambd: float = 0.5
    bias: float = 0.0


@dataclass(frozen=True)
class FakeQuantizeAttrs(Attrs):
    """``scale``: the step of the grid. ``low``, ``high``: the smallest and the largest integer of the grid, without zero point."""

    scale: float = 1.0
    low: float = -128.0
    high: float = 127.0

    @property
    def inverse(self) -> float:
        """The reciprocal of the scale: kernels multiply by it."""
        return f32(1.0 / self.scale)


@dataclass(frozen=True)
class IsInfAttrs(Attrs):
    detect_negative: bool = True
    detect_positive: bool = True


def is_numeric(dtype: DType) -> bool:
    return is_float(dtype) or is_int(dtype)


_ACCEPTS: dict[str, Callable[[DType], bool]] = {
    "a floating-point operand": is_float,
    "a numeric operand": is_numeric,
    "a signed numeric operand": lambda d: is_float(d) or d.kind == "i",
    "an integer operand": is_int,
    "a bool operand": lambda d: d == BOOL,
}


def _infer(accepts: str, to_bool: bool = False) -> Infer:
    check = _ACCEPTS[accepts]

    def infer(call: Call) -> Result:
        if len(call.types) > 1:  # ONNX has no schemas for com.microsoft's operators
            raise ShapeError(f"{call.kind} takes one operand, not {len(call.types)}")
        t = call.type(0)
        require(check(t.dtype), call, accepts, t)
        return Result((t.with_dtype(BOOL) if to_bool else t,))

    return infer


# ---------------------------------------------------------------- export


def _export_swish(attrs: AlphaAttrs, inputs: Sequence[str], n_outputs: int, e: Export) -> Sequence[str]:
    """Swish, which is new in opset 24, as ``x * sigmoid(alpha * x)``."""
    (x,) = inputs
    if attrs.alpha == 1:
        return e.node("Mul", [x, *e.node("Sigmoid", [x])])
    scaled = e.node("Mul", [x, e.const(np.asarray(attrs.alpha, dtype=e.type(x).dtype))])
    return e.node("Mul", [x, *e.node("Sigmoid", scaled)])


def _export_fake_quantize(attrs: FakeQuantizeAttrs, inputs: Sequence[str], n_outputs: int, e: Export) -> Sequence[str]:
    """FakeQuantize as ``Clip(Round(x / scale)) * scale``."""
    (x,) = inputs
    scale, low, high = (e.const(np.asarray(n, dtype=e.type(x).dtype)) for n in (attrs.scale, attrs.low, attrs.high))
    steps = e.node("Round", e.node("Div", [x, scale]))
    return e.node("Mul", [*e.node("Clip", [*steps, low, high]), scale])


# ---------------------------------------------------------------- the table


def _sign(a: DimLike) -> DimLike:
    lo, hi = bounds(a)
    if lo > 0:
        return 1
    if hi < 0:
        return -1
    raise Undecided


_SYMBOLIC: dict[str, Callable[[Any], DimLike]] = {
    "Neg": lambda a: -a,
    "Abs": lambda a: dim_max(a, -a),
    "Relu": lambda a: dim_max(a, 0),
    "Sign": _sign,
}
"""Unary kinds that occur in shape arithmetic on integers."""


def define_pointwise(
    kind: str,
    infer: Infer,
    attrs: type[Attrs] = Attrs,
    *,
    symbolic: Symbolic | None = None,
    onnx: dict[str, FromOnnx] | FromOnnx | None = None,
    to_onnx: ToOnnx | None = None,
    flops: int = 1,
    tol: Tol = DEFAULT_TOL,
    **traits: bool,
) -> OpDef:
    """A pointwise operator. ``symbolic`` evaluates it on sizes; ``flops`` is per element of the result."""
    return OpDef(
        kind,
        with_values(infer, symbolic),
        attrs,
        onnx,
        to_onnx,
        cost=per_output(flops),
        tol=tol,
        traits=Traits(pointwise=True, **traits),
    )


def _define(
    kind: str,
    attrs: type[Attrs] = Attrs,
    *,
    accepts: str = "a floating-point operand",
    to_bool: bool = False,
    aliases: tuple[str, ...] = (),
    **more: Any,
) -> OpDef:
    symbolic = elementwise(_SYMBOLIC[kind]) if kind in _SYMBOLIC else None
    importers = dict.fromkeys((kind, *aliases), simple_import(kind, read_attrs(attrs)))
    return define_pointwise(kind, _infer(accepts, to_bool), attrs, symbolic=symbolic, onnx=importers, **more)


_NUMERIC = "a numeric operand"
_SIGNED = "a signed numeric operand"

DEFS: tuple[OpDef, ...] = (
    # Activations. Monotone only if every choice of attributes is.
    _define("Relu", accepts=_SIGNED, tol=EXACT, monotone=True),
    _define("LeakyRelu", LeakyReluAttrs, accepts=_NUMERIC, flops=2),
    _define("Elu", AlphaAttrs, flops=3),
    _define("Selu", SeluAttrs, flops=4),
    _define("Celu", AlphaAttrs, flops=5),
    _define("ThresholdedRelu", AlphaAttrs, tol=EXACT),
    _define("Sigmoid", flops=4, monotone=True),
    _define("HardSigmoid", HardSigmoidAttrs, flops=3),
    _define("HardSwish", flops=4),
    _define("Tanh", flops=4, monotone=True),
    _define("Softplus", flops=4, monotone=True),
    _define("Softsign", flops=3, monotone=True),
    _define("Mish", flops=8),
    _define("Gelu", GeluAttrs, flops=8, aliases=("com.microsoft.Gelu",)),
    _define("Swish", AlphaAttrs, flops=5, to_onnx=_export_swish),
    define_pointwise(
        "FakeQuantize",
        _infer("a floating-point operand"),
        FakeQuantizeAttrs,
        onnx={},
        to_onnx=_export_fake_quantize,
        flops=5,
        monotone=True,
    ),
    _define("Shrink", ShrinkAttrs, accepts=_NUMERIC, flops=2, tol=EXACT),
    # Arithmetic.
    _define("Neg", accepts=_SIGNED, tol=EXACT),
    _define("Abs", accepts=_NUMERIC, tol=EXACT),
    _define("Sign", accepts=_NUMERIC, tol=EXACT, monotone=True),
    _define("Ceil", tol=EXACT, monotone=True),
    _define("Floor", tol=EXACT, monotone=True),
    _define("Round", tol=EXACT, monotone=True),
    _define("Reciprocal"),
    _define("Sqrt", monotone=True),
    _define("Exp", flops=4, monotone=True),
    _define("Log", flops=4, monotone=True),
    _define("Erf", accepts=_NUMERIC, flops=4, monotone=True),
    # Trigonometric and hyperbolic functions and their inverses.
    _define("Sin", flops=4),
    _define("Cos", flops=4),
    _define("Tan", flops=4),
    _define("Asin", flops=4, monotone=True),
    _define("Acos", flops=4),
    _define("Atan", flops=4, monotone=True),
    _define("Sinh", flops=4, monotone=True),
    _define("Cosh", flops=4),
    _define("Asinh", flops=4, monotone=True),
    _define("Acosh", flops=4, monotone=True),
    _define("Atanh", flops=4, monotone=True),
    # Logic and classification.
    _define("Not", accepts="a bool operand", tol=EXACT),
    _define("BitwiseNot", accepts="an integer operand", tol=EXACT),
    _define("IsNaN", to_bool=True, tol=EXACT),
    _define("IsInf", IsInfAttrs, to_bool=True, tol=EXACT),
)
