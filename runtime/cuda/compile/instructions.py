"""CUDA source of single instructions whose operands depend on a problem (PTX ISA, "wgmma.mma_async")."""

from __future__ import annotations

from collections.abc import Sequence


def values_instruction(features: int, dtype: str) -> str:
    """CUDA source of ``wgmma_values(float (&d)[features / 2], u32 a0..a3, u64 b)``: m64 n``features`` k16, A from
    registers, B MN-major."""
    kind = {"float16": "f16", "bfloat16": "bf16"}[dtype]
    count = features // 2
    registers = ", ".join(f"%{i}" for i in range(count))
    outputs = ", ".join(f'"+f"(d[{i}])' for i in range(count))
    a = ", ".join(f"%{count + i}" for i in range(4))
    return f"""DEVICE void wgmma_values(float (&d)[{count}], u32 a0, u32 a1, u32 a2, u32 a3, u64 b) {{
    asm volatile("wgmma.mma_async.sync.aligned.m64n{features}k16.f32.{kind}.{kind} "
        "{{{registers}}}, {{{a}}}, %{count + 4}, 1, 1, 1, 1;"
        : {outputs} : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(b));
}}"""


def bounded_pair(bounds: Sequence[tuple[str, str, int]]) -> str:
    """CUDA source of ``u32 between(float x, float y)``: a rounded pair, bounded by ("max" or "min", type of pairs, both bounds)."""
    lines = ["DEVICE u32 between(float x, float y) {", "    u32 pair = pack2(x, y);"]
    for name, kind, bits in bounds:
        lines.append(f'    asm("{name}.{kind} %0, %0, %1;" : "+r"(pair) : "r"({bits:#x}u));')
    return "\n".join([*lines, "    return pair;", "}"])


def pixels_instruction(columns: int, dtype: str) -> str:
    """``wgmma_pixels(float (&d)[columns / 2], const u32 (&a)[4], u64 b, int accumulate)``: m64 n``columns`` k16, A from registers,
    B K-major (PTX ISA, "wgmma.mma_async")."""
    kind, count = {"float16": "f16", "bfloat16": "bf16"}[dtype], columns // 2
    registers = ", ".join(f"%{i}" for i in range(count))
    outputs = ", ".join(f'"+f"(d[{i}])' for i in range(count))
    operand = ", ".join(f"%{count + i}" for i in range(4))
    return f"""DEVICE void wgmma_pixels(float (&d)[{count}], const u32 (&a)[4], u64 b, int accumulate) {{
    asm volatile("{{.reg .pred p; setp.ne.b32 p, %{count + 5}, 0; "
        "wgmma.mma_async.sync.aligned.m64n{columns}k16.f32.{kind}.{kind} "
        "{{{registers}}}, {{{operand}}}, %{count + 4}, p, 1, 1, 0;}}"
        : {outputs} : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate));
}}"""
