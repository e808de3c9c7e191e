"""Renders the variable parts of kernel templates: the wgmma instruction of a tile width, and the epilogue of a list of stages."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence

import ml_dtypes
import numpy as np

from optdnn.errors import InternalError

Stage = tuple[str | float, ...]
"""One epilogue stage: ``("bias",)``, ``("add",)``, ``("relu",)``, ``("clip", 0.0, 6.0)``, … (the keys of :data:`STAGES`)."""

# The normal distribution's integral to 2e-5, a twentieth of fp16's rounding: an odd polynomial that leaves 0 .. 1 beyond 4.3, and
# is clamped. erff takes three times the instructions, and then the epilogue takes a third of the time of a product with K = 768.
_GELU = (
    "{{ const float u = x * x; x *= saturated_fma(x, fmaf(fmaf(fmaf(fmaf(fmaf(fmaf(fmaf(fmaf(4.39764301e-11f, u, "
    "-4.42044801e-09f), u, 1.96372838e-07f), u, -5.12585075e-06f), u, 8.84865149e-05f), u, -0.00108068029f), u, 0.00973104965f), "
    "u, -0.0662257895f), u, 0.398853093f), 0.5f); }}"
)

# Full turns are subtracted in two parts. After that, one instruction is exact to 2e-6 up to angles of thousands.
_TURN = "{{{{ const float turns = rint(x * 0.15915494f); x = {}(fmaf(turns, 1.7484556e-7f, fmaf(turns, -6.2831855f, x))); }}}}"

# x is the fp32 accumulator, c the channel's bias, r the residual's element; {0}, {1} are the stage's own constants.
STAGES: dict[str, tuple[int, str]] = {
    "bias": (0, "x = x + c;"),
    "add": (0, "x = x + r;"),
    "mul": (0, "x = x * r;"),
    "relu": (0, "x = fmaxf(x, 0.0f);"),
    "clip": (2, "x = fminf(fmaxf(x, {0}), {1});"),
    "leaky_relu": (1, "x = x < 0.0f ? {0} * x : x;"),
    "elu": (1, "x = x < 0.0f ? {0} * (__expf(x) - 1.0f) : x;"),
    "sigmoid": (0, "x = __fdividef(1.0f, 1.0f + __expf(-x));"),
    "silu": (0, "x = __fdividef(x, 1.0f + __expf(-x));"),
    "swish": (1, "x = __fdividef(x, 1.0f + __expf({0} * -x));"),
    "tanh": (0, "x = tanhf(x);"),
    "hard_sigmoid": (2, "x = __saturatef({0} * x + {1});"),
    "hard_swish": (0, "x = x * __saturatef(x * 0.16666667f + 0.5f);"),
    # The factor of x is rounded to a multiple of {2}, at most {1} times {2}; {0} is 1 / {2}.
    "rounded_silu": (3, "x = x * (fminf(rintf(__fdividef(1.0f, 1.0f + __expf(-x)) * {0}), {1}) * {2});"),
    "rounded_hard_swish": (3, "x = x * (fminf(rintf(__saturatef(x * 0.16666667f + 0.5f) * {0}), {1}) * {2});"),
    "gelu": (0, _GELU),
    "gelu_tanh": (
        0,
        "{{ const float h = 0.5f * x; x = fmaf(h, tanhf(x * fmaf(0.035677408f * x, x, 0.79788456f)), h); }}",
    ),
    "softplus": (0, "x = x > 20.0f ? x : log1pf(__expf(x));"),
    "mish": (0, "{{ const float e = __expf(fminf(x, 20.0f)), n = e * (e + 2.0f); x = x * __fdividef(n, n + 2.0f); }}"),
    "selu": (2, "x = {1} * (x < 0.0f ? {0} * (__expf(x) - 1.0f) : x);"),
    "celu": (1, "x = x < 0.0f ? {0} * (__expf(__fdividef(x, {0})) - 1.0f) : x;"),
    "softsign": (0, "x = __fdividef(x, 1.0f + fabsf(x));"),
    "abs": (0, "x = fabsf(x);"),
    "round": (0, "x = rintf(x);"),
    # Rounded to a multiple of {3} between {1} and {2} times {3}; {0} is 1 / {3}.
    "fake_quantize": (4, "x = fminf(fmaxf(rintf(x * {0}), {1}), {2}) * {3};"),
    "sqrt": (0, "x = sqrt(x);"),
    "reciprocal": (0, "x = 1.0f / x;"),
    "sin": (0, _TURN.format("__sinf")),
    "cos": (0, _TURN.format("__cosf")),
    "square": (0, "x = x * x;"),
    "mul_const": (1, "x = x * {0};"),
    "add_const": (1, "x = x + {0};"),
}

# To 11 bits, with one instruction of the special function units, which are few; used if results are 8-bit integers.
COARSE: dict[str, tuple[int, str]] = {
    "sigmoid": (0, "x = fmaf(tanh_fast(0.5f * x), 0.5f, 0.5f);"),
    "silu": (0, "{{ const float half_x = 0.5f * x; x = fmaf(half_x, tanh_fast(half_x), half_x); }}"),
    "swish": (1, "{{ const float half_x = 0.5f * x; x = fmaf(half_x, tanh_fast({0} * half_x), half_x); }}"),
    "tanh": (0, "x = tanh_fast(x);"),
}

INEXACT = frozenset({
    "elu", "selu", "celu", "sigmoid", "silu", "rounded_silu", "swish", "tanh", "gelu", "gelu_tanh", "softplus", "mish", "softsign",
    "sin", "cos",
})  # fmt: skip
"""Stages that the kernels compute to about 20 bits only; the others are exact in fp32."""


def _literal(value: float) -> str:
    if math.isinf(value):
        return "__int_as_float(0x7f800000)" if value > 0 else "__int_as_float(0xff800000)"
    if math.isnan(value):
        raise InternalError("an epilogue constant is NaN")
    return f"{float(value)!r}f"


def uses_residual(stages: Sequence[Stage]) -> bool:
    """Whether a stage reads the second tensor."""
    return any(stage[0] in ("add", "mul") for stage in stages)


def epilogue(stages: Sequence[Stage], name: str = "epilogue", *, exact: bool = False) -> str:
    """CUDA source of ``float epilogue(float x, float c, float r)`` (or of another ``name``), which applies the stages in order.
    With :data:`SCALE_SHIFT`, c is the channel's factor and shift, which includes its bias; with :data:`IMAGE_SCALE`, its factor in
    the image, and its bias.
    With :data:`CHANNEL_STAGES` it is the channel's bias and the per-channel operands of the stage. ``exact``: to the last bits of
    fp32 (:data:`EXACT`). Raises InternalError."""
    texts = STAGES | EXACT if exact else STAGES
    for scaled, own in ((SCALE_SHIFT, _SCALED), (IMAGE_SCALE, _IMAGE_SCALED)):
        if scaled in stages:
            return _function(f"{name}(float x, float2 c, float r)", stages, texts | own)
    if reads_channels(stages):
        return _function(f"{name}(float x, float4 c, float r)", stages, texts | CHANNEL_STAGES)
    return _function(f"{name}(float x, float c, float r)", stages, texts)


CHANNEL_STAGES: dict[str, tuple[int, str]] = {
    "bias": (0, "x = x + c.x;"),
    "prelu": (0, "x = x < 0.0f ? c.y * x : x;"),
    "channel_add": (0, "x = x + c.y;"),
    "channel_mul": (0, "x = x * c.y;"),
    "affine": (0, "x = fmaf(x, c.y, c.z);"),
    # sin(u)^2 has the period pi; 8.74e-8 is 3.14159274 - pi.
    "snake": (
        0,
        "{{ float u = c.y * x; const float k = rintf(u * 0.31830989f); u = fmaf(k, 8.7422777e-8f, fmaf(k, -3.14159274f, u)); "
        "u = __sinf(u); x = fmaf(c.z * u, u, x); }}",
    ),
}
"""Stages with per-channel operands: c is the channel's bias, then these operands."""


def reads_channels(stages: Sequence[Stage]) -> bool:
    """Whether a stage reads per-channel operands besides the bias."""
    return any(stage[0] in CHANNEL_STAGES for stage in stages if stage[0] != "bias")


SCALE_SHIFT: Stage = ("scale_shift",)
_SCALED: dict[str, tuple[int, str]] = {"bias": (0, ""), "scale_shift": (0, "x = fmaf(x, c.x, c.y);")}
IMAGE_SCALE: Stage = ("image_scale",)
_IMAGE_SCALED: dict[str, tuple[int, str]] = {"bias": (0, "x = x + c.y;"), "image_scale": (0, "x = x * c.x;")}


EXACT: dict[str, tuple[int, str]] = {
    "elu": (1, "x = x < 0.0f ? {0} * expm1f(x) : x;"),
    # __fdividef is off by two units in the last place at most. The exact division has a branch, which makes a thread compute
    # its results one after another.
    "sigmoid": (0, "x = __fdividef(1.0f, 1.0f + expf(-x));"),
    "silu": (0, "x = __fdividef(x, 1.0f + expf(-x));"),
    "rounded_silu": (3, "x = x * (fminf(rintf(__fdividef(1.0f, 1.0f + expf(-x)) * {0}), {1}) * {2});"),
    "swish": (1, "x = __fdividef(x, 1.0f + expf({0} * -x));"),
    "gelu": (0, "x = 0.5f * x * (1.0f + erff(x * 0.70710678f));"),
    "softplus": (0, "x = fmaxf(x, 0.0f) + log1pf(expf(-fabsf(x)));"),
    "mish": (0, "{{ const float e = expf(fminf(x, 20.0f)), n = e * (e + 2.0f); x = x * __fdividef(n, n + 2.0f); }}"),
    "softsign": (0, "x = x / (1.0f + fabsf(x));"),
    "sin": (0, "x = sin(x);"),
    "cos": (0, "x = cos(x);"),
    "selu": (2, "x = {1} * (x < 0.0f ? {0} * expm1f(x) : x);"),
    "celu": (1, "x = x < 0.0f ? {0} * expm1f(x / {0}) : x;"),
}
"""The stages of :data:`INEXACT` to the last bits of fp32 (compile without fast math), for uses that need more than 20 bits."""


PROLOGUE_STAGES: dict[str, tuple[int, str]] = {
    "scale_shift": (0, "x = fmaf(x, a.x, a.y);"),
    "gate": (0, "x = x * g;"),
    **{name: stage for name, stage in STAGES.items() if name not in ("bias", "add", "mul")},
}
"""Stages of a prologue: x is the element, a its channel's scale and shift, g the factor of its image and channel."""


def paired_epilogue(stages: Sequence[Stage]) -> str:
    """Like :func:`epilogue`, for kernels that finish two elements at a time: these apply a final SiLU to both together
    (FINAL_SILU); the text leaves it out."""
    if not stages or stages[-1] != ("silu",):
        return epilogue(stages)
    return f"{constants({'FINAL_SILU': 1})}\n{epilogue(stages[:-1])}"


def prologue(stages: Sequence[Stage]) -> str:
    """CUDA source of ``float prologue(float x, float2 a, float g)``, the stages applied in order. Raises InternalError."""
    return _function("prologue(float x, float2 a, float g)", stages, PROLOGUE_STAGES)


def runtime_epilogue(stages: Sequence[Stage], coarse: bool = False, name: str = "epilogue") -> str:
    """CUDA source of ``float epilogue(float x, float c, float r, const float* k)`` (or of another ``name``): the constants of
    the stages are ``k[0]``, ``k[1]``, … in order, so that layers which differ only in their scales share a kernel. c as in
    :func:`epilogue`. ``coarse``: the result is rounded to 8-bit integers. Raises InternalError."""
    slots, texts = itertools.count(), STAGES | COARSE if coarse else STAGES
    if reads_channels(stages):
        signature, texts = f"{name}(float x, float4 c, float r, const float* k)", texts | CHANNEL_STAGES
    else:
        signature = f"{name}(float x, float c, float r, const float* k)"
    return _function(signature, stages, texts, lambda _: f"k[{next(slots)}]")


def constants_of(stages: Sequence[Stage]) -> list[float]:
    """The constants of the stages, in the order of :func:`runtime_epilogue`."""
    return [float(value) for _, *values in stages for value in values]


def _function(
    signature: str,
    stages: Sequence[Stage],
    texts: Mapping[str, tuple[int, str]],
    constant: Callable[[float], str] = _literal,
) -> str:
    """CUDA source of a function that applies stages to ``x``; ``constant`` renders their constants."""
    if sum(stage[0] in ("add", "mul") for stage in stages) > 1:
        raise InternalError("an epilogue reads at most one residual tensor")
    lines = [f"DEVICE float {signature} {{"]
    for name, *constants in stages:
        if name not in texts:
            raise InternalError(f"unknown stage {name!r}; known: {', '.join(texts)}")
        count, text = texts[str(name)]
        if len(constants) != count:
            raise InternalError(f"stage {name!r} takes {count} constants, not {len(constants)}")
        lines.append("    " + text.format(*[constant(float(value)) for value in constants]))
    return "\n".join([*lines, "    return x;", "}"])


WGMMA_KINDS = {
    "float16": ("f16.f16", "f32"), "bfloat16": ("bf16.bf16", "f32"), "int8": ("s8.s8", "s32"), "uint8": ("s8.u8", "s32"),
    "float8_e4m3fn": ("e4m3.e4m3", "f32"), "tfloat32": ("tf32.tf32", "f32"), "float32": ("f16.f16", "f32"),
}  # fmt: skip
"""Type of the pixels -> types of wgmma's operands (weights, pixels) and accumulators. fp32 is multiplied in parts of fp16."""


def wgmma_columns(columns: int, dtype: str) -> bool:
    """Whether wgmma has a tile of this many columns: multiples of 8; for integers above 32, multiples of 16 (PTX ISA,
    "wgmma.mma_async")."""
    if columns % 8 or not 8 <= columns <= 256:
        return False
    return WGMMA_KINDS[dtype][1] != "s32" or columns <= 32 or columns % 16 == 0


def _sums(count: int, kind: str = "f32") -> tuple[str, str, str]:
    """The accumulators' type ("f32" or "s32") in C++, their list of assembly operands, and their declaration as outputs ``d``."""
    acc, letter = ("int", "r") if kind == "s32" else ("float", "f")
    outputs = ", ".join(f'"+{letter}"(d[{i}])' for i in range(count))
    return acc, ", ".join(f"%{i}" for i in range(count)), outputs


def wgmma(columns: int, dtype: str, *, across: bool = False, name: str = "wgmma_step") -> str:
    """CUDA source of ``wgmma_step(Acc (&d)[columns / 2], u64 a, u64 b, int accumulate)``: m64 n``columns``, 32 bytes of k, both
    operands in shared memory, K-major (``across``: a is MN-major). ``name``: the function's name. Acc is float, or int for integers
    (PTX ISA, "wgmma.mma_async")."""
    if not wgmma_columns(columns, dtype):
        raise InternalError(f"wgmma has no tile of {columns} columns of {dtype}")
    kinds, sums = WGMMA_KINDS[dtype]
    count, depth = columns // 2, {"float16": 16, "bfloat16": 16, "tfloat32": 8}.get(dtype, 32)
    acc, registers, outputs = _sums(count, sums)
    turned = f", 1, 1, {int(across)}, 0"
    unturned = dict.fromkeys(("float8_e4m3fn", "tfloat32"), ", 1, 1")
    tail = {"float16": turned, "bfloat16": turned, **unturned}.get(dtype, "")
    return f"""DEVICE void {name}({acc} (&d)[{count}], u64 a, u64 b, int accumulate) {{
    asm volatile("{{.reg .pred p; setp.ne.b32 p, %{count + 2}, 0; "
        "wgmma.mma_async.sync.aligned.m64n{columns}k{depth}.{sums}.{kinds} {{{registers}}}, %{count}, %{count + 1}, p{tail};}}"
        : {outputs} : "l"(a), "l"(b), "r"(accumulate));
}}"""


MMA_KINDS = {  # depth in elements, types of pixels and weights
    "float16": ("16", "f16.f16"), "bfloat16": ("16", "bf16.bf16"), "tfloat32": ("8", "tf32.tf32"),
    "int8": ("32", "s8.s8"), "uint8": ("32", "u8.s8"), "float8_e4m3fn": ("32", "e4m3.e4m3"),
}  # fmt: skip


def mma(dtype: str) -> str:
    """CUDA source of ``multiply(Acc (&d)[4], const u32 (&a)[4], u32 b0, u32 b1)``: m16 n8, 32 bytes of k, pixels of this type on
    m and weights on n (PTX ISA, "mma"); Acc as in :func:`wgmma`."""
    (depth, kinds), sums = MMA_KINDS[dtype], WGMMA_KINDS[dtype][1]
    acc, _, outputs = _sums(4, sums)
    return f"""DEVICE void multiply({acc} (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {{
    asm volatile("mma.sync.aligned.m16n8k{depth}.row.col.{sums}.{kinds}.{sums} "
                 "{{%0,%1,%2,%3}}, {{%4,%5,%6,%7}}, {{%8,%9}}, {{%0,%1,%2,%3}};"
                 : {outputs} : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}}"""


def values_instruction(features: int, dtype: str) -> str:
    """CUDA source of ``wgmma_values(float (&d)[features / 2], u32 a0..a3, u64 b)``: m64 n``features`` k16, A from
    registers, B MN-major."""
    kind, count = {"float16": "f16", "bfloat16": "bf16"}[dtype], features // 2
    _, registers, outputs = _sums(count)
    a = ", ".join(f"%{count + i}" for i in range(4))
    return f"""DEVICE void wgmma_values(float (&d)[{count}], u32 a0, u32 a1, u32 a2, u32 a3, u64 b) {{
    asm volatile("wgmma.mma_async.sync.aligned.m64n{features}k16.f32.{kind}.{kind} "
        "{{{registers}}}, {{{a}}}, %{count + 4}, 1, 1, 1, 1;"
        : {outputs} : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(b));
}}"""


def between(stages: Sequence[Stage], dtype: str, name: str = "between") -> str:
    """CUDA source of ``u32 between(float x, float y)`` (or of another ``name``): the stages on two neighbors, rounded to a pair of
    ``dtype`` ("float16" or "bfloat16"). Bounds that 16 bits can hold are applied to the rounded pair in one instruction: rounding
    keeps the order. A final SiLU is applied to both together."""
    kind = np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else np.float16).type
    bounds = {"relu": (0.0, math.inf)}.get(str(stages[0][0]), stages[0][1:]) if len(stages) == 1 else ()
    if len(stages) == 1 and stages[0][0] in ("relu", "clip") and all(float(kind(v)) == v for v in bounds):
        pair = "bf16x2" if dtype == "bfloat16" else "f16x2"
        finite = [(op, v) for op, v in zip(("max", "min"), map(float, bounds), strict=True) if math.isfinite(v)]
        return bounded_pair([(op, pair, int(kind(v).view(np.uint16)) * 0x10001) for op, v in finite], name)
    shared = bool(stages) and stages[-1] == ("silu",)
    one = epilogue(stages[:-1] if shared else stages, f"{name}_one")
    lines = [
        *(f"{v} = {name}_one({v}, 0.0f, 0.0f);" for v in "xy"),
        *(["silu_pair(x, y);"] if shared else []),
        "return pack2(x, y);",
    ]
    return f"{one}\nDEVICE u32 {name}(float x, float y) {{ {' '.join(lines)} }}"


def bounded_pair(bounds: Sequence[tuple[str, str, int]], name: str) -> str:
    """CUDA source of ``u32 between(float x, float y)``: a rounded pair, clamped by ("max" or "min", type of pairs, both bounds)."""
    lines = [f"DEVICE u32 {name}(float x, float y) {{", "    u32 pair = pack2(x, y);"]
    for op, kind, bits in bounds:
        lines.append(f'    asm("{op}.{kind} %0, %0, %1;" : "+r"(pair) : "r"({bits:#x}u));')
    return "\n".join([*lines, "    return pair;", "}"])


def pixels_instruction(columns: int, dtype: str, *, across: bool = False, name: str = "wgmma_pixels") -> str:
    """``wgmma_pixels(float (&d)[columns / 2], const u32 (&a)[4], u64 b, int accumulate)``: m64 n``columns`` k16, A from registers,
    B K-major (``across``: MN-major). ``name``: the function's name (PTX ISA, "wgmma.mma_async")."""
    kind, count = {"float16": "f16", "bfloat16": "bf16"}[dtype], columns // 2
    _, registers, outputs = _sums(count)
    operand = ", ".join(f"%{count + i}" for i in range(4))
    return f"""DEVICE void {name}(float (&d)[{count}], const u32 (&a)[4], u64 b, int accumulate) {{
    asm volatile("{{.reg .pred p; setp.ne.b32 p, %{count + 5}, 0; "
        "wgmma.mma_async.sync.aligned.m64n{columns}k16.f32.{kind}.{kind} "
        "{{{registers}}}, {{{operand}}}, %{count + 4}, p, 1, 1, {int(across)};}}"
        : {outputs} : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate));
}}"""


def constants(values: Mapping[str, int]) -> str:
    """``#define NAME value`` lines."""
    return "\n".join(f"#define {name} {value}" for name, value in values.items())
