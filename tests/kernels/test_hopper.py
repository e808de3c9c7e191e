"""The launches of Hopper's kernel as data are those that its own host code makes, field by field and map by map."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.net import Net
from support.simulated import check_simulated, lowered

from optdnn.ir.graph import Graph
from optdnn.kernels.conv import hopper_launch as conv_sm90
from optdnn.kernels.conv import implicit_gemm as conv
from optdnn.kernels.conv import parameters as conv_params
from optdnn.kernels.conv import patch_kernel as conv_patch
from optdnn.kernels.conv import problem as conv_problem
from optdnn.kernels.conv.stem import StemConv
from optdnn.kernels.tactic import Offer
from optdnn.ops.shape import TransposeAttrs
from optdnn.runtime.cuda.gpu_facts import of_arch
from optdnn.runtime.cuda.launches.plan import Pointer, TensorMap, parse
from optdnn.runtime.program import Program


class Recorded:
    """Stands for a Launch: keeps what it was made of."""

    def __init__(self, function: Any, grid: Any, block: int, parameters: Any, **options: Any):
        self.grid, self.block, self.parameters, self.options = grid, block, parameters, options


def digest(*facts: Any) -> bytes:
    """128 bytes that stand for a tensor map made of these facts."""
    import hashlib

    return hashlib.sha256(repr(facts).encode()).digest() * 4


def tiled(dtype: str, pointer: int, shape: Any, strides: Any, box: Any, swizzle: int) -> bytes:
    return digest(dtype, pointer, tuple(shape), tuple(strides), tuple(box), swizzle)


def im2col(dtype: str, pointer: int, nhwc: Any, *, kernel: Any, stride: Any, padding: Any, dilation: Any, pixels: int, channels: int,
           swizzle: int) -> bytes:  # fmt: skip
    n, h, w, c = nhwc
    top, left, bottom, right = padding
    corners = (-left, -top, right - (kernel[1] - 1) * dilation[1], bottom - (kernel[0] - 1) * dilation[0])
    steps = (1, stride[1], stride[0], 1)
    return digest(
        dtype, pointer, (c, w, h, n), (c * 2, w * c * 2, h * w * c * 2), (channels, pixels), swizzle, corners, steps
    )


def encoded(m: TensorMap, pointer: int) -> bytes:
    facts = (m.dtype, pointer + m.offset, m.shape, m.strides, m.box, m.swizzle)
    return digest(*facts, m.corners, m.steps) if m.corners else digest(*facts)


def networks() -> dict[str, Graph]:
    n = Net()
    x = n.conv(n.input(2, 16, 14, 14), 32, 3, strides=2, bias=True)
    plain = n.done(n.op("Relu", x))
    n = Net()
    x = n.conv(n.input(1, 64, 14, 14), 64, 1, pads=0)
    residual = n.done(n.op("Relu", n.op("Add", n.conv(x, 64, 3, dilations=2, pads=2), x)))
    n = Net()
    stem = n.done(n.conv(n.input(1, 3, 30, 30), 16, 7, strides=2, pads=3))
    n = Net()
    product = n.done(n.gemm(n.op("Relu", n.input(3, 512)), 1000))
    n = Net()
    x = n.op("Relu", n.conv(n.input(2, 48, 14, 14), 48, 1, pads=0))
    joined = n.op(
        "Add", n.conv(n.op("Relu", n.conv(x, 24, 3, strides=2)), 32, 1, pads=0), n.conv(x, 32, 1, pads=0, strides=2)
    )
    projection = n.done(n.op("Relu", joined))
    return {"plain": plain, "residual": residual, "stem": stem, "product": product, "projection": projection}


STREAM = Offer(conv.Config(1, 1, 1, 64, 2, stream=True), row_invariant=False)


@pytest.mark.parametrize("name", networks())
@pytest.mark.parametrize("precision", ["fp16", "bf16", "fp16, stream-K"])
def test_launches_are_those_of_bind(name: str, precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    problems: list[tuple[conv_problem.Problem, conv_sm90.Config]] = []
    precision, _, stream = precision.partition(", ")
    ranked = conv_sm90.ranked

    def remember(problem: conv_problem.Problem, dense: bool, gpu: Any) -> tuple[Offer, ...]:
        found = ranked(problem, dense, gpu)
        if stream and conv.refuse(problem, STREAM.config) is None:
            found = (STREAM, *found)
        problems.append((problem, found[0].config))
        return found

    with monkeypatch.context() as m:
        m.setattr(conv_sm90, "ranked", remember)
        m.setattr(StemConv, "refuse", lambda self, b, op: "it is left out")
        program = lowered(networks()[name], precision)
    monkeypatch.setattr(conv, "encode_im2col", im2col)
    for module in (conv, conv_patch):
        monkeypatch.setattr(module, "encode_tiled", tiled)
        monkeypatch.setattr(module, "Launch", Recorded)
    launches = [
        (s, parse(s, program))
        for s in program.steps
        if program.kernels[s.params["launch"]["kernel"]].template.startswith("conv_")
    ]
    assert not stream or any(c == STREAM.config for _, c in problems)
    assert len(problems) == len(launches) >= 1, "of what is a second source, no launch of its own is made"
    for (step, parsed), (problem, config) in zip(launches, problems, strict=True):
        addresses = {i: 0x7000000000 + 4096 * 4096 * i for i in (*step.inputs, *step.outputs)}
        operands = [addresses[i] for i in (*step.inputs, *step.outputs)]
        block = bytearray(parsed.launch.parameters)
        for r in parsed.launch.relocations:
            value = (
                encoded(r, operands[r.operand])
                if isinstance(r, TensorMap)
                else (operands[r.operand] + r.offset).to_bytes(8, "little")
            )
            block[r.at : r.at + len(value)] = value
        bind: Any = conv.bind if isinstance(config, conv.Config) else conv_patch.bind
        made = bind(problem, config, of_arch("sm_90a"), None, pointers_of(program, parsed, operands, problem))
        (want,) = made.parameters
        assert parsed.launch.grid == made.grid
        assert parsed.launch.block == made.block
        assert parsed.launch.shared == made.options["shared"]
        assert parsed.launch.cluster == made.options["cluster"]
        assert parsed.launch.dependent == made.options["dependent"]
        kept = [program.buffers[i] for i in step.outputs if i in program.retained]
        if config.stream if isinstance(config, conv.Config) else False:
            assert [b.offset for b in kept] == [None]
            sizes = conv.workspace(problem, config, of_arch("sm_90a"))
            assert kept[0].nbytes == sizes[1]
            assert sizes[0] in [b.nbytes for i in step.outputs if (b := program.buffers[i]).offset is not None]
        else:
            assert kept == []
        assert differing(bytes(block), want) == []


def pointers_of(
    program: Program, parsed: Any, operands: list[int], problem: conv_problem.Problem
) -> conv_params.Pointers:
    """The addresses that the step's relocations name, as bind takes them."""
    at = {r.at: operands[r.operand] + r.offset for r in parsed.launch.relocations}
    start = conv_sm90.POINTERS
    assert all(isinstance(r, Pointer) for r in parsed.launch.relocations if r.at >= start)
    sources = tuple(at[128 * (1 + i)] for i in range(len(problem.sources)))
    return conv_params.Pointers(
        sources, at[0], at[start], at[start + 8], at.get(start + 16, 0),
        partial=at.get(conv_params.PARTIAL, 0), arrived=at.get(conv_params.PARTIAL + 8, 0),
    )  # fmt: skip


def differing(a: bytes, b: bytes) -> list[int]:
    """Where two blocks differ: maps by their number, then byte offsets."""
    assert len(a) == len(b)
    return sorted({i if i >= conv_sm90.POINTERS else i // 128 for i in range(len(a)) if a[i] != b[i]})


def test_a_wrong_stride_is_noticed() -> None:
    assert differing(bytes(700), bytes(130) + b"\1" + bytes(569)) == [1]


def test_split_kernels_do_not_write_into_joint_buffers() -> None:
    """A cluster stores at the pitch of its own channels: in a wider buffer only unsplit configurations do."""
    problem = conv_problem.Problem(1, 64, (conv_problem.Source(7, 7, 512, (3, 3), (1, 1), (1, 1, 1, 1)),), (("bias",),))
    dense, joint = (conv_sm90.ranked(problem, dense, of_arch("sm_90a"))[0].config for dense in (True, False))
    assert dense.split > 1
    assert joint.split == 1


def test_refusals() -> None:
    ok = [((3, 3), (1, 1), (1, 1, 1, 1), (1, 1))]
    assert conv_sm90.refuse("sm_90a", "float16", ok) is None
    assert "wgmma" in str(conv_sm90.refuse("sm_80", "float16", ok))
    assert "16-bit" in str(conv_sm90.refuse("sm_90a", "float32", ok))
    assert "steps of at most 8" in str(conv_sm90.refuse("sm_90a", "float16", [((3, 3), (9, 1), (0,) * 4, (1, 1))]))
    assert "corners" in str(conv_sm90.refuse("sm_90a", "float16", [((3, 3), (1, 1), (0,) * 4, (70, 70))]))


def test_weights_lie_where_the_views_say() -> None:
    weights = np.arange(5 * 3 * 2 * 2, dtype=np.float32).reshape(5, 3, 2, 2)
    problem = conv_problem.Problem(1, 8, (conv_problem.Source(4, 4, 8, (2, 2)),))
    packed = conv_params.pack_weights(problem, [weights])
    depth, lane = problem.k_steps * problem.block, 16
    view = np.lib.stride_tricks.as_strided(packed, weights.shape, [s * 4 for s in (depth, 1, 2 * lane, lane)])
    np.testing.assert_array_equal(view, weights)


def test_patches_are_chosen_where_they_win_and_can() -> None:
    wide = conv_problem.Problem(
        8, 64, (conv_problem.Source(56, 56, 64, (3, 3), (1, 1), (1, 1, 1, 1)),), (("bias",), ("relu",))
    )
    assert isinstance(conv_sm90.ranked(wide, True, of_arch("sm_90a"))[0].config, conv_patch.PatchConfig)
    strided = conv_problem.Problem(
        8, 64, (conv_problem.Source(56, 56, 64, (3, 3), (2, 2), (1, 1, 1, 1)),), (("bias",), ("relu",))
    )
    assert isinstance(conv_sm90.ranked(strided, True, of_arch("sm_90a"))[0].config, conv.Config)


def test_rows_behind_a_transpose_hold_their_padding() -> None:
    """The result lies in the operand's order: its second axis is the outermost, and the last row's padding is in the buffer."""
    n = Net()
    x = n.op("Transpose", n.op("Relu", n.input(2, 3, 32)), attrs=TransposeAttrs((1, 0, 2)))
    graph = n.done(n.op("Sigmoid", n.op("MatMul", x, n.random(32, 2, scale=0.2))))
    program = lowered(graph, "fp16", no_cubins=True)
    assert any(s.params["tactic"].startswith("gemm_sm90") for s in program.steps)
    for step in program.steps:
        parse(step, program)  # refuses a tensor map outside of its buffer
    check_simulated(graph, "fp16")
