"""Precision plans, which ``assign_precision`` carries out, and the reasons why ops have no form on integers or fp8."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from optdnn.config import GPU_PRECISIONS, OF_PRODUCTS, PACKED_WEIGHTS, PRECISIONS, QUANTIZED, ROUNDED_ROWS
from optdnn.errors import UsageError
from optdnn.ir.graph import Graph, Op
from optdnn.passes.support.facts import operand
from optdnn.target_name import HOPPER, TargetName
from optdnn.types import BF16, FP16, FP64, DType, is_float

ANCHORS = frozenset({"Conv", "ConvTranspose", "Gemm", "MatMul"})
"""Kinds with their own quantized form. The kinds between them follow (see ``passes.support.quantize``)."""

SHARES_SCALE = frozenset(
    {
        *("MaxPool", "GlobalMaxPool", "Identity", "Reshape", "Flatten", "Squeeze", "Unsqueeze", "Transpose", "Slice"),
        *("Concat", "Split", "DepthToSpace", "SpaceToDepth", "Gather", "Expand", "Tile", "Pad"),
    }
)
"""Kinds that only move elements of their operands or add zeros. Operand and result share a scale, and nothing is rounded."""

WEIGHTED = frozenset({"Gemm", "MatMul"})
"""Kinds with a form that reads packed weights."""

OWN_SCALE = frozenset({"Add", "AveragePool", "GlobalAveragePool", "Mul"})
"""Kinds that compute new values from quantized operands, and requantize."""


def key(op: Op) -> str:
    """An op's name in a plan: the name of its first output in the graph when precisions are assigned."""
    return op.outputs[0].name


def fits(pattern: str, name: str) -> bool:
    """Whether a pattern (with * and ?) fits a node's name. A name fits itself, also if it has brackets."""
    return pattern == name or fnmatchcase(name, pattern)


def last_fit(patterns: Iterable[str], names: Collection[str]) -> str | None:
    """The last pattern that fits one of the names."""
    return next((p for p in reversed(list(patterns)) if any(fits(p, name) for name in names)), None)


def pin_of(pins: Mapping[str, str], names: Collection[str]) -> str | None:
    """The pattern in ``pins`` (pattern -> precision) that counts for an op. ``names``: its nodes. None if no pattern fits.

    A node's full name takes precedence over patterns. If several nodes of one op are named, the most accurate precision counts. Of
    several patterns, the last one counts.
    """
    full = [name for name in sorted(names) if name in pins]
    if full:
        return min(full, key=lambda name: PRECISIONS.index(pins[name]))
    return last_fit(pins, names)


@dataclass(frozen=True)
class PrecisionPlan:
    """A precision for each op. ``nodes`` maps an op's :func:`key`, or a pattern for the names of its ONNX nodes, to a precision.

    A key takes precedence over all else (:func:`pin_of`). ``default`` is for every op that ``nodes`` does not name. ``base`` is the
    float precision of ops that cannot run in ``default``. Ops whose keys are ``in_base`` run in it, too: they are not ``named``, so
    what protects fp16 still applies to them. ``reasons`` maps ops in the same way to a text that explains their precision.
    """

    default: str = "fp32"
    nodes: Mapping[str, str] = field(default_factory=dict)
    base: str = "fp32"
    reasons: Mapping[str, str] = field(default_factory=dict)
    in_base: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        for name, precision in (("default", self.default), ("base", self.base), *self.nodes.items()):
            if precision not in PRECISIONS:
                raise UsageError(f"precision {precision!r} of {name} is not one of {', '.join(PRECISIONS)}")
        if self.base in OF_PRODUCTS:
            raise UsageError(f"the float precision with {self.default} cannot be {self.base}")

    @classmethod
    def of_option(cls, text: str, nodes: Mapping[str, str] | None = None) -> PrecisionPlan:
        """The plan of a text such as ``"int8"`` or ``"int8+fp16"``. Raises UsageError.

        The second name is the precision of ops that are not quantized; without it, they are fp32."""
        default, plus, base = text.partition("+")
        if plus and (default not in OF_PRODUCTS or base in OF_PRODUCTS):
            raise UsageError(f"precision {text!r} is neither a precision nor a pair such as int8+fp16")
        if not plus:
            base = "fp32" if default in OF_PRODUCTS else default
        return cls(default, nodes or {}, base)

    def of(self, op: Op) -> str:
        """The precision that the plan asks for."""
        return self._pinned(op) or (self.base if key(op) in self.in_base else self.default)

    def reason(self, op: Op) -> str | None:
        pattern = key(op) if key(op) in self.reasons else last_fit(self.reasons, op.src)
        return None if pattern is None else self.reasons[pattern]

    def named(self, op: Op) -> bool:
        """Whether ``nodes`` names the op."""
        return self._pinned(op) is not None

    def _pinned(self, op: Op) -> str | None:
        pattern = key(op) if key(op) in self.nodes else pin_of(self.nodes, op.src)
        return None if pattern is None else self.nodes[pattern]

    @property
    def quantizes(self) -> bool:
        return not QUANTIZED.isdisjoint({self.default, *self.nodes.values()})

    @property
    def packs(self) -> bool:
        """Whether the plan packs weights."""
        return not PACKED_WEIGHTS.isdisjoint({self.default, *self.nodes.values()})

    @property
    def floats(self) -> tuple[str, ...]:
        """The float precisions in the plan."""
        return tuple(sorted({self.base, self.default, *self.nodes.values()} - OF_PRODUCTS))

    def uses_ranges(self, on_gpu: bool) -> bool:
        """Whether the plan depends on the ranges of calibration data: for integers, or to find values beyond fp16's range."""
        return self.quantizes or (on_gpu and "fp16" in self.floats)

    @property
    def is_mixture(self) -> bool:
        """Whether the plan holds several float precisions. The types in the graph must then record the precision of each op."""
        return len(self.floats) > 1

    @property
    def library_precision(self) -> str:
        """The float precision to request from a CPU library: fp32 for a mixture, which the graph itself expresses."""
        return "fp32" if self.is_mixture else self.floats[0]

    def to_json(self) -> dict[str, Any]:
        return {
            "default": self.default,
            "base": self.base,
            "nodes": dict(self.nodes),
            "reasons": dict(self.reasons),
            **({"in_base": sorted(self.in_base)} if self.in_base else {}),
        }

    @classmethod
    def from_json(cls, plain: Any) -> PrecisionPlan:
        """Raises UsageError for anything that :meth:`to_json` does not write."""
        try:
            texts = [{str(k): str(v) for k, v in plain.get(f, {}).items()} for f in ("nodes", "reasons")]
            base, in_base = str(plain.get("base", "fp32")), frozenset(map(str, plain.get("in_base", ())))
            return cls(str(plain["default"]), texts[0], base, texts[1], in_base)
        except (AttributeError, KeyError, TypeError):
            raise UsageError(f"not a precision plan: {plain!r}") from None


def asks_packed(graph: Graph, plan: PrecisionPlan, op: Op) -> bool:
    """Whether a plan asks for packed weights of an op.

    It does if it names the op or if the op is a product with constant weights. If the model itself has packed the weights of a
    product, w4a8 asks the product to round its rows."""
    if op.kind == "PackedMatMul" and plan.of(op) == ROUNDED_ROWS:
        return True
    weighted = op.kind in WEIGHTED and op.attrs.factors != "float" and graph.constant_value(op.input(1)) is not None
    return plan.of(op) in PACKED_WEIGHTS and (plan.named(op) or weighted)


def no_fp8(graph: Graph, op: Op, target: str = "") -> str | None:
    """The reason why an op has no fp8 form, or None."""
    if op.kind not in ANCHORS:
        return f"{op.kind} has no fp8 form"
    if (reason := _no_eight_bits(target, "fp8")) is not None:
        return reason
    return no_integers(graph, op, target)


def no_integers(graph: Graph, op: Op, target: str = "", *, ranged: bool = False) -> str | None:
    """The reason why an op has no quantized form (on ``target``, if it is given), or None.

    ``ranged``: its scales are known already. Otherwise calibration must find them, which it does only for fp32.
    """
    if (reason := _no_eight_bits(target, "int8")) is not None:
        return reason
    if getattr(op.attrs, "factors", "") == "float":
        return "its matrix is that of a Fourier transform, which stays floating point"
    on_gpu = TargetName.parse(target).on_gpu
    if op.kind == "ConvTranspose" and on_gpu:
        return "there is no kernel for it on integers"
    if op.kind in ("Conv", "MatMul") and on_gpu:
        factor = operand(op, 1)
        if op.kind == "MatMul" and graph.constant_value(factor) is None:
            return "there is no kernel on integers for two computed factors"
        if op.kind == "MatMul" and graph.op(operand(op)).kind == "Softmax" and graph.type(factor).dims[-1:] == (1,):
            return "it is the mean of constants, weighted by a softmax: one kernel of floats computes both"
        if op.kind == "Conv" and (axes := (graph.type(factor).rank or 4) - 2) > 2:
            return f"there is no kernel on integers for {axes} spatial axes"
    if op.kind not in ANCHORS | SHARES_SCALE | OWN_SCALE:
        return f"{op.kind} has no int8 form"
    dtype = op.outputs[0].type.dtype
    if not is_float(dtype):
        return f"it computes {op.outputs[0].type}, not floating point"
    if not ranged and dtype in (FP16, BF16, FP64):
        return f"the model computes it in {_shown(dtype)}, ranges are found for fp32: export the model in fp32"
    if op.kind == "Pad" and (reason := _no_zeros(graph, op, target)) is not None:
        return reason
    if op.kind == "MaxPool" and op.attrs.indices:
        return "it gives positions besides the largest elements"
    if op.kind == "Gemm" and (op.attrs.alpha != 1.0 or op.attrs.beta != 1.0 or op.attrs.transA):
        return "a Gemm with alpha, beta or a transposed A has no int8 form"
    if op.kind in ANCHORS:
        if graph.constant_value(operand(op, 0)) is not None:
            return "its data operand is a constant"
        if op.kind != "MatMul" and graph.constant_value(operand(op, 1)) is None:
            return "its weights are not constant"
        if op.kind == "MatMul" and any(len(graph.type(operand(op, i)).shape or ()) < 2 for i in (0, 1)):
            return "one of its operands is a vector"
        bias = op.input(2) if op.kind != "MatMul" else None
        if bias is not None and graph.constant_value(bias) is None:
            return "its bias is not constant"
        if op.kind == "Gemm" and bias is not None:
            shape = graph.type(bias).shape or ()
            if len(shape) > 2 or (len(shape) == 2 and shape[0] != 1):
                return f"its bias {graph.type(bias)} is not one number per column"
    return None


def _shown(dtype: DType) -> str:
    return {FP16: "fp16", BF16: "bf16", FP64: "fp64"}[dtype]


def multiplies(target: str, precision: str) -> bool:
    """Whether ``target`` is a GPU with kernels that multiply in ``precision`` (tf32, int8 or fp8).

    "cuda" alone and simulate count as Hopper."""
    name = TargetName.parse(target)
    return name.on_gpu and precision in GPU_PRECISIONS.get(name.arch or HOPPER, ())


def no_rounded_rows(target: str) -> str | None:
    """The reason why a target has no product with packed weights that rounds rows to int8, or None.

    "cuda" alone and simulate count as Hopper."""
    name = TargetName.parse(target)
    if not name.on_gpu or (name.arch or HOPPER) == HOPPER:
        return None
    return f"there are no kernels for {name.arch} that round rows to int8"


def _no_eight_bits(target: str, precision: str) -> str | None:
    """The reason why a GPU target has no kernels of an 8-bit precision, or None.

    Without such kernels, an op between DQ and Q would compute on floats, slower than without Q and DQ."""
    name = TargetName.parse(target)
    if not name.on_gpu or multiplies(target, precision):
        return None
    return f"there are no kernels of {precision} for {name.arch}"


def _no_zeros(graph: Graph, op: Op, target: str) -> str | None:
    """The reason why a Pad cannot be quantized, or None. It must add zeros or copies of elements."""
    if target == "cpu":
        return "the libraries pad floats"
    value = op.input(2) if op.attrs.mode == "constant" else None
    if value is None:
        return None
    number = graph.constant_value(value)
    return "it pads with a value that is not known to be 0" if number is None or number.any() else None
