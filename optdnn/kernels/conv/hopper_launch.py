"""Convolutions and matrix products on the Hopper implicit-GEMM kernel: wgmma fed by TMA, epilogue fused.

There are two kernels: implicit GEMM (:mod:`optdnn.kernels.conv.implicit_gemm`) and patches
(:mod:`optdnn.kernels.conv.patch_kernel`). This module ranks the configurations of both and describes their launches.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, ClassVar

import numpy as np

from optdnn.errors import InternalError
from optdnn.ir.epilogue import RESIDUAL, Epilogue
from optdnn.ir.graph import Op
from optdnn.kernels.builder import Builder, TensorView, map_dtype, products, up
from optdnn.kernels.conv import implicit_gemm as hopper
from optdnn.kernels.conv import maps as conv_maps
from optdnn.kernels.conv import parameters as conv_params
from optdnn.kernels.conv import parts_kernel
from optdnn.kernels.conv import patch_kernel as patch
from optdnn.kernels.conv import problem as conv_problem
from optdnn.kernels.conv.configs import estimated
from optdnn.kernels.conv.cost import estimate, with_rounding
from optdnn.kernels.conv.cost_terms import CLOCK, LATENCY, MEMORY
from optdnn.kernels.conv.fused import Convolution, ConvolutionKernel, bias_row, conv_attrs, stage_operands
from optdnn.kernels.conv.maps import Feed, pitch_of
from optdnn.kernels.conv.packed import Meaning, weight_operands, with_parts, with_ranges
from optdnn.kernels.conv.row_forms import MOMENT_CHANNELS
from optdnn.kernels.launch import Launch
from optdnn.kernels.pointwise.prologue import plan_prologue
from optdnn.kernels.tactic import Offer, ProblemTactic
from optdnn.ops.base import Stage
from optdnn.ops.fused import plain_stages
from optdnn.ops.requantize import Requantize
from optdnn.runtime.cuda.compile import render
from optdnn.runtime.cuda.gpu_facts import GpuFacts
from optdnn.runtime.cuda.launches.plan import LOWER, TF32, TensorMap
from optdnn.types import FP32, INT32, Array

Geometry = tuple[Sequence[int], Sequence[int], Sequence[int], Sequence[int]]
"""Kernel, strides, pads (begins, then ends), dilations."""


def refuse(arch: str, dtype: str, feeds: Sequence[Geometry], *, parts: bool = False) -> str | None:
    """Why the kernel cannot run convolutions of these geometries, or None. ``parts``: only fp32, in parts of fp16."""
    if not arch.startswith("sm_90"):
        return f"it needs Hopper's wgmma and TMA (sm_90a), not {arch}"
    if parts and dtype != "float32":
        return f"it multiplies fp32 in parts, not {dtype}"
    if dtype not in render.WGMMA_KINDS or (dtype == "float32" and not parts):
        return f"the kernel takes operands of 16 or 8 bits, or tf32 where that was requested, not {dtype}"
    for kernel, strides, pads, dilations in feeds:
        if max(strides) > 8:
            return f"TMA walks in steps of at most 8, not {max(strides)}"
        if (why := far(kernel, pads, dilations)) is not None:
            return why
    return None


def far(kernel: Sequence[int], pads: Sequence[int], dilations: Sequence[int]) -> str | None:
    """Why TMA does not reach the taps of a filter, or None."""
    reach = [(k - 1) * d for k, d in zip(kernel, dilations, strict=True)]
    ends = pads[len(reach) :]
    if max(*pads, *(r - p for r, p in zip(reach, ends, strict=True))) > 127 or max(reach) > 255:
        return "TMA's corners are 8-bit: padding and dilated kernel size are bounded"
    return None


Config = hopper.Config | patch.PatchConfig | parts_kernel.PartsConfig
"""A tile of one of the kernels: implicit GEMM, patches loaded once (stride 1, filters larger than 1 x 1), or implicit GEMM of fp32 in
parts."""


def family(config: Config) -> Any:
    """The module of the kernel that a configuration belongs to."""
    if isinstance(config, parts_kernel.PartsConfig):
        return parts_kernel
    return hopper if isinstance(config, hopper.Config) else patch


@lru_cache(maxsize=1024)
def ranked(problem: conv_problem.Problem, gpu: GpuFacts) -> tuple[Offer, ...]:
    """Every sensible configuration of the kernels, the best predicted first.

    Configurations that store from registers are left out if such stores cannot reach the tensors.
    """
    dense, exact = problem.dense, is_exact(problem)
    if problem.parts:
        return tuple(Offer(c, s, in_one_order(c)) for s, c in parts_kernel.candidates(problem, gpu) if dense)
    found: list[tuple[float, Config]] = [*estimated(problem, gpu, LIMIT, direct=dense)]
    found += [(_modeled(problem, c, gpu), c) for c in patch.candidates(problem, gpu)]
    if not dense:
        found = [(seconds, c) for seconds, c in found if not c.stores_directly]
    if not exact and not any(in_one_order(c) for _, c in found):
        # Small problems get a larger tile that sums in one order.
        found += [(_modeled(problem, c, gpu), c) for c in _plain_tiles(problem, dense)[:1]]
    offers = [
        Offer(
            c,
            with_rounding(problem, seconds, gpu),
            row_invariant=exact or in_one_order(c),
        )
        for seconds, c in found
    ]
    offers.sort(key=lambda o: o.predicted)
    # Stream-K ranks first only in the range in which it was measured to be faster.
    streams = problem.k_steps >= STREAMED_STEPS
    first = next((o for o in offers if streams or not isinstance(o.config, hopper.Config) or not o.config.stream), None)
    return tuple(offers) if first is None else (first, *(o for o in offers if o is not first))


STREAMED_STEPS = 128
"""K steps from which on stream-K was no slower on an H200. It was up to 2.8 times as fast for Gram matrices with 8,192
to 65,536 products per sum. With 64 steps it was slower by 5 to 45 %."""


def is_exact(problem: conv_problem.Problem) -> bool:
    """Whether sums are the same in any order."""
    return problem.dtype in ("int8", "uint8")


def read(name: str) -> Config | None:
    """The configuration of this name, or None if there is none."""
    return patch.PatchConfig.read(name) or hopper.Config.read(name) or parts_kernel.PartsConfig.read(name)


def offered(problem: conv_problem.Problem, config: Config, gpu: GpuFacts) -> Offer:
    """The offer of a configuration that was chosen before, without ranking the others. Raises InternalError if it
    cannot run the problem."""
    why: str | None = family(config).refuse(problem, config)
    if config.stores_directly and not problem.dense:
        why = "it stores rows without gaps"
    if why is not None:
        raise InternalError(f"the chosen configuration {config} cannot run it: {why}")
    invariant = is_exact(problem) or in_one_order(config)
    return Offer(config, cost(problem, config, gpu), row_invariant=invariant)


def _plain_tiles(problem: conv_problem.Problem, dense: bool) -> list[Config]:
    """Configurations with larger tiles that sum in one order."""
    made = [
        hopper.Config(1, 1, 1, bn, stages, direct=direct)
        for bn in (72, 96, 128)
        for direct in ((True, False) if dense else (False,))
        for stages in (8, 6, 4, 3, 2, 1)
    ]
    return [c for c in made if hopper.refuse(problem, c) is None]


LIMIT = 1 << 20
"""No limit: the tuner decides how many configurations it tries."""


def in_one_order(config: Config) -> bool:
    """Whether the order of summation is the same for all sizes: implicit GEMM, K not split, and one set of accumulators."""
    if config.split > 1 or isinstance(config, patch.PatchConfig):
        return False
    return isinstance(config, parts_kernel.PartsConfig) or (
        not config.stream and config.mt * config.bn > hopper.TWO_SETS
    )


def cost(problem: conv_problem.Problem, config: Config, gpu: GpuFacts) -> float:
    """Predicted seconds."""
    return with_rounding(problem, _modeled(problem, config, gpu), gpu)


def _modeled(problem: conv_problem.Problem, config: Config, gpu: GpuFacts) -> float:
    """Seconds by the model that ranks configurations."""
    if isinstance(config, hopper.Config):
        return estimate(problem, config, gpu)
    if isinstance(config, parts_kernel.PartsConfig):
        return parts_kernel.estimate(problem, config, gpu)
    return max(patch.cycles(problem, config, gpu) / CLOCK, problem.bytes / MEMORY) + LATENCY


def _apart(pitches: Sequence[int | None], channels: int) -> tuple[int, int]:
    """The pitches of result and residual, in elements; 0 if pixels follow one another without gaps."""
    output, residual = (0 if pitch == channels else pitch or 0 for pitch in pitches)
    return output, residual


def paired_pitches(out: TensorView) -> tuple[int, int]:
    """The pitches of a result with one element per two channels."""
    pitch = pitch_of(out)
    return _apart([None if pitch is None else 2 * pitch, None], 2 * out.shape[1])


class HopperTactic(ProblemTactic):
    """A tactic that runs on Hopper's convolution kernels."""

    parts: ClassVar[bool] = False
    """Whether the tactic multiplies fp32 in parts of fp16."""

    def offers(self, problem: conv_problem.Problem, gpu: GpuFacts) -> Sequence[Offer]:
        """The configurations of the kernels."""
        return ranked(problem, gpu)

    def named(self, b: Builder, op: Op, name: str) -> Offer | None:
        """The offer of the configuration ``name``, without ranking the others."""
        config = read(name)
        return None if config is None else offered(self.problem(b, op), config, b.gpu)


class HopperKernel(HopperTactic, ConvolutionKernel):
    """Convolutions of floats on channels-last images."""

    def problem_of(self, b: Builder, op: Op, c: Convolution) -> conv_problem.Problem:
        channels = c.channels if c.scatter is not None else c.out.shape[1]
        wide, depth = up(channels, 8), c.feeds[0].depth
        if depth is not None and depth.together > 1:
            return conv_problem.Problem(
                c.out.shape[0] // depth.together, conv_params.TOGETHER_CHANNELS, (c.feed.source,), (("bias",), *c.ep.rendered),
                products(b, op), map_dtype(c.out.dtype), dense=False,
            )  # fmt: skip
        pitches = [wide if x is None else pitch_of(x) for x in (c.out, c.residual)]
        # If the number of channels is not a multiple of 8, a store of 8 would overwrite the neighbor's channels.
        dense = c.scatter is None and channels == wide and None not in pitches
        problem = conv_problem.Problem(
            c.out.shape[0], wide, tuple(f.source for f in c.feeds), (("bias",), *c.ep.rendered), products(b, op),
            map_dtype(c.out.dtype), prologue=c.prologue, scatter=c.scatter is not None, pooled=c.pooled, bands=c.feeds[0].bands,
            dense=dense or set(pitches) == {wide} or c.scatter is not None, pitches=_apart(pitches, wide) if dense else (0, 0),
            image_rows=0 if c.gate is None else c.out.shape[0] // c.gate.shape[0],
        )  # fmt: skip
        return with_ranges(b, problem, c.feeds)

    def launch(self, b: Builder, op: Op, c: Convolution, problem: conv_problem.Problem, config: Config) -> None:
        emit_conv(b, op, c, problem, config)


def emit_conv(
    b: Builder, op: Op, c: Convolution, problem: conv_problem.Problem, config: Config, moments: TensorView | None = None,
    angles: TensorView | None = None,
) -> None:  # fmt: skip
    """Add the launch of a convolution with channels-last ``out`` and ``residual``. ``moments``: where it writes the moments of
    the result's rows; ``angles``: of the rotary embedding of its heads."""
    before = plan_prologue(b, op, c.feed.x, problem.k_steps * problem.block) if c.prologue else None
    feeds, ep, residual, out, scatter = c.feeds, c.ep, c.residual, c.out, c.scatter
    channels = c.channels if scatter is not None else out.shape[1]
    bias = c.bias if c.bias is None or problem.together == 1 else conv_params.together_bias(c.bias, problem.together)
    bias_at = bias_row(b, op, bias, problem.channels)
    matrix = weight_operands(b, op, problem, feeds)
    weights = matrix["weights"]
    views = [(f.x, w) for f, w in zip(feeds, conv_maps.weight_views(weights, problem, feeds), strict=True)]
    written = out
    bias_view = bias_at.view((channels,), (1,))
    tail, more = stage_operands(b, ep, residual, c.gate), before.operands if before is not None else []
    tail = [*(tail or [None]), *more] if more else tail
    geometry: list[Any] = [f.geometry for f in feeds]
    if problem.volume:
        frames = conv_maps.frames_of(feeds)
        views = conv_maps.over_depth(views, feeds)
        geometry = [conv_maps.depth_geometry(f.depth, f.geometry) for f in feeds]
        tail = [conv_maps.volume_view(x, frames) if x is residual and x is not None else x for x in tail]
        written = conv_maps.volume_view(out, frames)
    if len(feeds) == 1:
        first = before.moved(RESIDUAL + len(ep.constants)) if before is not None else ()
        attrs = conv_attrs(geometry[0], feeds[0].bands, ep.stages, first)
        kind, reads = "PooledConv" if problem.pooled else "Conv", [*views[0], bias_view, *tail]
    else:
        bias_stage = Stage("Add", (-1, 1))
        moved = [Stage(s.kind, tuple(_shifted(a) for a in s.args), s.attrs) for s in ep.stages]
        attrs = {"sources": tuple(geometry), "epilogue": plain_stages([bias_stage, *moved])}
        column = bias_at.view((1, channels, *(1,) * (len(written.shape) - 2)), (0, 1, *(0,) * (len(written.shape) - 2)))
        kind, reads = "ConvSum", [*views[0], *views[1], column, *tail]
    if problem.dtype == "tfloat32":
        attrs[TF32] = tuple(range(2 * len(feeds)))
    if scatter is not None:
        kind, attrs = "ConvBlocks", {**attrs, **blocks(scatter, out)}
    operands = {
        **matrix,
        "channel": channel_row(b, op, c.bias, ep, problem.channels, bias_at),
        "output": out,
        **pixels(feeds),
    }
    if residual is not None:
        operands["residual"] = residual
    if c.gate is not None:
        operands["gate"] = c.gate
    if before is not None:
        operands |= before.named
    if moments is not None:
        operands["moments"] = moments
        kind, attrs = with_moments(kind, attrs, rows=problem.moment_rows)
    if angles is not None:
        operands["angles"] = angles
        kind, attrs, (*reads,) = with_turn((kind, attrs, reads), problem, angles)
    made = launch(problem, config, b.gpu, feeds, operands, scatter)
    emit(b, op, made, problem, config, operands, (kind, attrs, reads), written, moments)


def channel_row(b: Builder, op: Op, bias: Array | None, ep: Epilogue, size: int, row: TensorView) -> TensorView:
    """Per-channel operand of a launch, fp32: the bias ``row``; or pairs (factor, shift) with the bias folded in, of
    ``(x + bias) * factor + shift``; or rows of four values, the bias and the numbers of a stage."""
    if ep.numbers:
        numbers = np.zeros((size, 4), np.float32)
        for k, of_each in enumerate((bias, *ep.numbers)):
            if of_each is not None:
                numbers[: len(of_each), k] = of_each
        return b.constant(numbers, f"{op.outputs[0].name}.numbers")
    if ep.scale is None:
        return row
    factor, shift = ep.scale
    pairs = np.zeros((size, 2), np.float32)
    pairs[: len(factor)] = np.stack([factor, shift if bias is None else bias * factor + shift], axis=1)
    return b.constant(pairs, f"{op.outputs[0].name}.scale")


def with_moments(kind: str, attrs: dict[str, Any], axis: int = 1, rows: int = 1) -> tuple[str, dict[str, Any]]:
    """The kind and attributes of a launch that also writes the moments of its result's rows. ``axis``: the axis along a row;
    ``rows``: number of rows that share moments."""
    together = {"together": MOMENT_CHANNELS, "axis": axis, "rows": rows}
    assert not together.keys() & attrs.keys(), "the launch's own attributes have these names"
    return "RowMoments", {"of": kind, "own": tuple(sorted(attrs)), **together, **attrs}


def with_turn(meaning: Meaning, problem: conv_problem.Problem, angles: TensorView) -> Meaning:
    """The meaning of a launch that also rotates heads of its result by ``angles``."""
    (kind, attrs, reads), turn = meaning, problem.turn
    assert turn is not None
    more = {
        "of": kind,
        "own": tuple(sorted(attrs)),
        "channels": turn.channels,
        "head": turn.head,
        "turned": turn.turned,
        "parts": turn.parts,
    }
    return "TurnedHeads", {**more, "interleaved": turn.interleaved, **attrs}, [*reads, angles]


def pixels(feeds: Sequence[Feed]) -> dict[str, TensorView]:
    """The sources by their operand names in the launch."""
    return {f"pixels{i}": feed.x for i, feed in enumerate(feeds)}


def blocks(scatter: conv_params.Scatter, out: TensorView) -> dict[str, Any]:
    """The attributes of a launch's meaning that say where blocks of pixels go."""
    return {"blocks": scatter.strides, "crops": scatter.crops, "sizes": out.shape[2:], "channels": scatter.channels}


def launch(
    problem: conv_problem.Problem, config: Config, gpu: GpuFacts, feeds: Sequence[Feed],
    operands: Mapping[str, TensorView], scatter: conv_params.Scatter | None = None, requantize: Requantize | None = None,
) -> Launch:  # fmt: skip
    """The launch of a problem in a configuration. Operands: ``pixels0`` (and ``pixels1``) of ``feeds``, packed ``weights``,
    ``channel`` (per-channel constants), ``output`` and ``residual`` (channels-last NCHW); ``factors`` with fp32 in parts; ``before``
    and ``gate`` with a prologue; ``gate`` with factors per image; ``partial`` and ``arrived`` with stream-K."""
    if isinstance(config, patch.PatchConfig):
        maps = conv_maps.patch_maps(problem, config, feeds[0], operands["weights"])
    else:
        maps = conv_maps.gemm_maps(problem, config, feeds, operands["weights"])
    if isinstance(config, parts_kernel.PartsConfig) or scatter is not None or problem.together > 1:
        # TMA stores nothing, so any maps fit.
        results = [maps[0], maps[0]]
    else:
        results = [_result_map(problem, config, operands, name) for name in ("output", "residual")]
    return launch_on(problem, config, gpu, [*maps, *results], operands, scatter, requantize)


def _result_map(
    problem: conv_problem.Problem,
    config: hopper.Config | patch.PatchConfig,
    operands: Mapping[str, TensorView],
    name: str,
) -> TensorMap[str]:
    """The tensor map of the result or of the residual (without one, of the result)."""
    name = name if name in operands else "output"
    x, out, wide = operands[name], operands["output"], problem.channels
    pitch = pitch_of(x)
    assert pitch is not None
    rows = out.shape[1] if pitch_of(out) != wide else wide
    if isinstance(config, hopper.Config):
        return conv_maps.rows_map(name, x, pitch, rows, problem, config)
    box = (64, config.tile_w, config.tile_h)  # a pooled result is stored without TMA
    return conv_maps.image_map(name, x, rows, pitch, box, problem.out_span)


def launch_on(
    problem: conv_problem.Problem, config: Config, gpu: GpuFacts, maps: Sequence[TensorMap[str]],
    operands: Mapping[str, TensorView], scatter: conv_params.Scatter | None = None, requantize: Requantize | None = None,
) -> Launch:  # fmt: skip
    """The launch of a problem in a configuration, given its five tensor maps."""
    kernel = family(config)
    stream = isinstance(config, hopper.Config) and config.stream
    tiles = patch.tiles(problem, config) if isinstance(config, patch.PatchConfig) else config.joint_tiles(problem)
    gate = operands.get("gate")
    parameters = conv_params.parameters(
        problem, maps, tiles, {*operands, *(("partial", "arrived") if stream else ())},
        gate=None if gate is None else (gate.strides[0], gate.shape[1]), scatter=scatter, requantize=requantize,
        frames=_frame_steps(operands["output"]) if problem.together > 1 else (),
    )  # fmt: skip
    return parameters.launch(
        kernel.recipe(problem, config, gpu.arch), kernel.FUNCTION, kernel.grid_blocks(problem, config, gpu),
        config.threads + problem.helpers, shared=kernel.shared_bytes(problem, config), cluster=config.cluster,
        waits=LOWER if stream else "",
    )  # fmt: skip


def _frame_steps(out: TensorView) -> tuple[int, ...]:
    """Channels of a frame, and elements from a frame, a row and a column to the next."""
    return (up(out.shape[1], 8), out.strides[0], *out.strides[2:])


def emit(
    b: Builder, op: Op, made: Launch, problem: conv_problem.Problem, config: Config, operands: Mapping[str, TensorView],
    meaning: Meaning, written: TensorView | None = None,
    second: TensorView | None = None,
) -> None:  # fmt: skip
    """Add a launch with the workspace that it needs. ``meaning``: the operator that it computes; ``written``: the result in the
    operator's shape (None: as the launch writes it); ``second``: another result."""
    scratch: list[TensorView] = []
    kept: list[TensorView] = []
    out = operands["output"]
    if isinstance(config, hopper.Config) and config.stream:
        partial, arrived = hopper.workspace(problem, config, b.gpu)
        name = b.buffers[out.buffer].name
        scratch.append(b.new(f"{name}.partial", FP32, (partial // 4,)))
        kept.append(b.new(f"{name}.arrived", INT32, (arrived // 4,)))
        operands = {**operands, "partial": scratch[0], "arrived": kept[0]}
    kind, attrs, reads = with_parts(meaning, problem, operands) if problem.parts else meaning
    writes = [out if written is None else written, *([] if second is None else [second])]
    b.emit(op, made, operands, kind, attrs, reads, writes, scratch=scratch, kept=kept)


def _shifted(arg: int | None) -> int | None:
    """A stage argument with one more stage in front (registers) and operands in the order (result, bias, residual, constants…)."""
    if arg is None:
        return None
    return arg - 1 if arg < 0 else arg - RESIDUAL + 2
