"""The generated header of the convolution kernels on tensor cores, and their compiler options."""

from __future__ import annotations

from collections.abc import Mapping

from optdnn.kernels.conv.problem import Problem
from optdnn.kernels.launch import template_options
from optdnn.runtime.cuda.compile import render


def _turn(problem: Problem) -> dict[str, int]:
    """Constants of the rotary embedding of heads."""
    t = problem.turn
    parts = {} if t is None or t.parts == 1 else {"HEAD_PARTS": t.parts}
    return {} if t is None else {"TURNED": t.turned, "HEAD": t.head, "INTERLEAVED": int(t.interleaved), **parts}


def generated(problem: Problem, tile: Mapping[str, int], instruction: str, pairs: bool = False) -> str:
    """The header of a convolution kernel: its ``tile``, the element types, the epilogue and the source of its ``instruction``."""
    types = {
        "HAS_RESIDUAL": int(problem.residual), "OPERAND_ITEM": problem.item, "OUT_ITEM": problem.out_item,
        "SCATTER": int(problem.scatter),
        "INTEGER": int(problem.dtype in ("int8", "uint8")), "OUT_FLOAT8": int(problem.out_dtype == "float8_e4m3fn"),
        "OUT_ZERO": int(problem.zero_point), "RESIDUAL_UNSIGNED": int((problem.residual_dtype or problem.out_dtype) == "uint8"),
        **({} if problem.beside is None else {"PAIRED": 1}),
        **({"SCALED": 1} if render.SCALE_SHIFT in problem.epilogue else {}),
        **({"IMAGE_SCALED": 1} if problem.image_scale else {}),
        **({"CHANNEL_STAGES": 1} if render.reads_channels(problem.epilogue) else {}),
        **({"VOLUME": 1, "TOGETHER": problem.together} if problem.volume else {}),
        **({"ONE_MATRIX": 1} if problem.one_matrix else {}),
        **({"ROW_BIAS": 1} if problem.row_bias else {}),
        **({"ROW_SCALED": 1} if problem.row_scale else {}),
        **({"DYNAMIC": 1} if problem.dynamic else {}),
        **({"EDGED": 1} if problem.edged else {}),
        **({"MOMENTS": 1} if problem.moments else {}),
        **({"MOMENT_ROWS": problem.moment_rows} if problem.moments and problem.moment_rows > 1 else {}),
        **({"IMAGE_NORM": 1} if problem.norm is not None and problem.norm.image else {}),
        **_turn(problem),
        **({} if problem.norm is None else {"NORMED": 1 if problem.norm.mean else 2}),
        **({} if problem.residual_norm is None else {"NORMED_RESIDUAL": 1 if problem.residual_norm.mean else 2}),
    }  # fmt: skip
    if pairs and problem.beside is None and not problem.parts:
        stages = render.paired_epilogue(problem.epilogue)
    else:
        stages = render.epilogue(problem.epilogue, exact=problem.parts)
    if problem.beside is not None:
        stages += "\n" + render.epilogue(problem.beside, "epilogue_beside", exact=problem.parts)
    if problem.item == 1:
        stages = render.runtime_epilogue(problem.epilogue, problem.out_dtype in ("int8", "uint8"))
    before = [render.prologue(problem.prologue)] if problem.prologue else []
    return "\n".join([render.constants({**tile, **types}), *before, stages, instruction, ""])


def options(problem: Problem) -> tuple[str, ...]:
    """Compiler options. Quantized results are exact to the bit, so their arithmetic is not contracted. fp32 in parts
    uses no fast math."""
    return template_options(problem.dtype, problem.out_dtype, exact=problem.item == 1, fast=not problem.parts)
