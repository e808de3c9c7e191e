"""Products that rotate the heads that they compute: results, refusals, tiles on the processor, and compilation."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.covering import covering
from support.emulated import _text
from support.host import HERE, library
from support.net import Net
from support.on_gpu import checked_launches
from support.one_config import only
from support.rotary_cases import angles, of_a_product
from support.simulated import check_simulated, kinds, lowered, refusals, tactics
from support.sweep import every, turns

from optdnn.errors import InternalError
from optdnn.ir.graph import Graph, Value
from optdnn.kernels.conv import implicit_gemm
from optdnn.kernels.conv.implicit_gemm import Config
from optdnn.kernels.conv.problem import Problem, Source
from optdnn.kernels.conv.row_forms import HeadTurn, RowNorm
from optdnn.ops.attention import RotaryAttrs
from optdnn.ops.index import SplitAttrs
from optdnn.ops.norm import LayerNormAttrs
from optdnn.ops.shape import TransposeAttrs
from optdnn.runtime.cuda.compile import nvrtc
from optdnn.runtime.cuda.compile.nvrtc import template_files
from optdnn.runtime.reference.attention import rotary_embedding


def layer(
    heads: int = 3, groups: int = 3, size: int = 64, *, turned: int = 0, interleaved: bool = False, length: int = 18,
    kind: str = "RMSNormalization", reads: str = "", width: int = 128, parts: int = 1,
) -> Graph:  # fmt: skip
    """The rows of a product, a norm (none if ``kind`` is ""), and attention with rotated queries and keys. ``reads``: another
    form of the network that reads them."""
    n = Net()
    rows = n.matmul(n.input(2, length, 64), width)
    if kind:
        more = [n.random(width)] if kind == "LayerNormalization" else []
        rows = n.op(kind, rows, n.positive(width), *more, attrs=LayerNormAttrs())
    rows = n.op("Add", n.matmul(rows, (heads + 2 * groups) * size), n.random((heads + 2 * groups) * size))
    sizes = n.ints(heads * size, groups * size, groups * size)
    columns = n.op("Split", rows, sizes, attrs=SplitAttrs(-1), outputs=3)
    if reads == "values first":
        columns = columns[2:] + columns[:2]
    turn, others = angles(n, length, (turned or size) // 2), angles(n, length, (turned or size) // 2)
    if reads == "given angles":
        turn = [n.input(1, length, size // 2, name=name) for name in ("cos", "sin")]

    def prepared(x: Value, count: int, turn: list[Any] | None) -> Value:
        x = n.op("Transpose", n.op("Reshape", x, n.ints(2, length, count, size)), attrs=TransposeAttrs((0, 2, 1, 3)))
        return (
            x
            if turn is None
            else n.op("RotaryEmbedding", x, *turn, attrs=RotaryAttrs(interleaved, turned, parts=parts))
        )

    q, v = prepared(columns[0], heads, turn), prepared(columns[2], groups, None)
    k = prepared(columns[1], groups, others if reads == "other angles" else turn)
    past = [n.input(2, groups, 4, size, name=name) for name in ("past_key", "past_value")] if reads == "past" else []
    y = n.op("Attention", q, k, v, *([None, *past] if past else []))
    if reads == "keys":
        return n.done(n.op("Add", n.op("Relu", k), y))
    if reads == "features":
        return n.done(n.op("Add", n.op("Relu", prepared(columns[1], groups, None)), y))
    return n.done(y)


NETS: dict[str, Callable[[], Graph]] = {
    "halves": layer,
    "layer norm": lambda: layer(kind="LayerNormalization"),
    "no norm": lambda: layer(kind=""),
    "groups": lambda: layer(4, 2, 32),
    "a part of a tile": lambda: layer(4, 2, 16),
    "neighbors": lambda: layer(interleaved=True),
    "part": lambda: layer(2, 1, 128, turned=32),
    "neighbors of a part": lambda: layer(1, 1, 256, turned=64, interleaved=True),
    "two tiles": lambda: layer(2, 1, 128),
    "neighbors in two tiles": lambda: layer(2, 1, 128, interleaved=True),
    "odd positions": lambda: layer(length=37),
    "class token": lambda: of_a_product(length=20, still=2),
    "parts": lambda: layer(parts=2),
    "parts of narrow heads": lambda: layer(4, 2, 32, parts=2),
    "three wide parts": lambda: layer(1, 1, 192, parts=3),
    "parts in two tiles": lambda: layer(1, 1, 256, parts=2),
    "the same angles for each image": lambda: of_a_product(length=20, images=2),
}


@pytest.mark.slow
@pytest.mark.parametrize(("name", "precision"), turns(NETS, "fp16", "bf16"))
def test_the_launch_turns_heads(name: str, precision: str) -> None:
    program = check_simulated(NETS[name](), precision)
    assert {"gemm_turned_sm90", "gemm_normed_turned_sm90"} & {*tactics(program, "MatMul")}
    assert "TurnedHeads" in kinds(program)
    assert not {"RotaryPair", "RotaryEmbedding"} & {*kinds(program)}


def apart(length: int = 18) -> Graph:
    """Queries, keys and values of one product; only the keys have an activation."""
    n = Net()
    turn, heads = angles(n, length, 16), n.ints(2, length, 2, 32)
    columns = n.matmul(n.input(2, length, 64), 192)
    q, k, v = n.op("Split", columns, n.ints(64, 64, 64), attrs=SplitAttrs(-1), outputs=3)
    heads_of = (n.op("Reshape", x, heads) for x in (q, n.op("Tanh", k), v))
    q, k, v = (n.op("Transpose", x, attrs=TransposeAttrs((0, 2, 1, 3))) for x in heads_of)
    return n.done(n.op("Attention", *(n.op("RotaryEmbedding", x, *turn, attrs=RotaryAttrs()) for x in (q, k)), v))


def test_heads_that_a_product_rotates_are_not_rotated_again_with_the_others() -> None:
    program = check_simulated(apart(), "fp16")
    assert (kinds(program).count("TurnedHeads"), kinds(program).count("RotaryEmbedding")) == (1, 1)
    assert "whose results are not stored" in refusals(program, "rotary_pair")[-1]


def test_a_norm_in_front_has_no_launch() -> None:
    assert "gemm_normed_turned_sm90" in tactics(lowered(layer(length=200, width=256)), "MatMul")


def _few() -> Graph:
    return layer(length=8)


@pytest.mark.parametrize(
    ("build", "precision", "because"),
    [
        (_few, "fp16", "it is for at least 32 rows of 16-bit floats"),
        (layer, "tf32", "it is for at least 32 rows of 16-bit floats"),
        (lambda: layer(reads="other angles"), "fp16", "its heads are rotated by different angles"),
        (lambda: of_a_product(length=20, own=True), "fp16", "each feature of its heads has an angle of its own"),
        (lambda: layer(turned=32, parts=2), "fp16", "some features beside the parts of its heads do not turn"),
        (lambda: layer(reads="keys"), "fp16", "its heads are not those of one attention alone"),
        (lambda: layer(reads="features"), "fp16", "others read its heads before the rotation"),
        (lambda: layer(reads="past"), "fp16", "its keys have a place beside those of the past"),
        (lambda: layer(size=48), "fp16", "heads of 48 features and tiles of 64 do not divide one another"),
        (lambda: layer(turned=24), "fp16", "24 features do not make pairs in vectors of eight"),
        (lambda: layer(size=128, turned=96), "fp16", "pairs of 96 features lie in different tiles"),
        (
            lambda: layer(reads="values first"),
            "fp16",
            "its heads are not the first of its columns, one after the other",
        ),
        (lambda: layer(reads="given angles"), "fp16", "the angles are not constants, or differ from image to image"),
    ],
)
def test_refusals(build: Callable[[], Graph], precision: str, because: str) -> None:
    program = lowered(build(), precision)
    assert because in refusals(program, "*turned*")
    assert "TurnedHeads" not in kinds(program)


TURN = HeadTurn(64, 64, False, 256, 37)
PLAIN = Problem(74, 384, (Source(1, 1, 128),), (("bias",),), turn=TURN)


def test_tiles_that_hold_no_pairs() -> None:
    for config in (
        Config(1, 1, 1, 40, 2, direct=True),
        Config(1, 1, 1, 64, 2, split=2),
        Config(1, 1, 1, 72, 2, stream=True),
    ):
        assert implicit_gemm.refuse(PLAIN, config) == "heads are rotated in whole tiles in shared memory"
    far = replace(PLAIN, turn=replace(TURN, head=128, turned=128))
    assert (
        implicit_gemm.refuse(far, Config(1, 1, 1, 64, 2))
        == "a warpgroup has one tile of 64 channels, but pairs span two"
    )
    assert implicit_gemm.refuse(far, Config(1, 1, 2, 64, 2)) is None


@pytest.mark.parametrize(
    "fields",
    [{"moments": True}, {"epilogue": (("bias",), ("add",))}, {"out": "float32"}, {"turn": replace(TURN, turned=24)}],
)
def test_problems_that_there_are_not(fields: dict[str, Any]) -> None:
    with pytest.raises(InternalError, match="rotated heads need a product"):
        replace(PLAIN, **fields)


_SOURCE = """
struct Params { const uint4* angles; int turned_channels, positions; u8* tiles; };
%s
static Params parameters;
static void turn() {
    const Params& p = parameters;
    if (threadIdx.x == 0) memcpy(memory, p.tiles, TILES * TILE_ROWS * 128);
    __syncthreads();
    turn_heads<TILES, TILE_ROWS>(p, 0, 0, FIRST_ROW, threadIdx.x, [] { __syncthreads(); });
    __syncthreads();
    if (threadIdx.x == 0) memcpy(p.tiles, memory, TILES * TILE_ROWS * 128);
}
extern "C" int run(const void* block) {
    memcpy(&parameters, block, sizeof(Params));
    gridDim = {1, 1, 1}; blockIdx = {0, 0, 0};
    entry = turn;
    return run_block(128) ? 0 : 1;
}
"""


class _Params(ctypes.Structure):
    _fields_ = [
        ("angles", ctypes.c_void_p),
        ("channels", ctypes.c_int),
        ("positions", ctypes.c_int),
        ("tiles", ctypes.c_void_p),
    ]


@pytest.mark.parametrize(
    ("head", "turned", "interleaved", "rows", "parts"),
    every(3, [
        (64, 64, False, 128, 1), (64, 64, True, 40, 1), (32, 16, True, 24, 1), (32, 32, False, 24, 1), (64, 32, False, 72, 1),
        (128, 128, False, 40, 1), (256, 64, True, 8, 1), (128, 128, True, 64, 1), (16, 16, False, 40, 3), (32, 32, False, 24, 2),
        (64, 64, False, 40, 3), (128, 128, False, 24, 2),
    ]),
)  # fmt: skip
def test_tiles_turn_on_the_processor(
    head: int, turned: int, interleaved: bool, rows: int, parts: int, tmp_path: Path
) -> None:  # fmt: skip
    rng, first, positions = np.random.default_rng(head + turned), 29, 31
    channels = 3 * head * parts if head < 64 else max(128, head * parts)  # narrow heads fill a part of the last tile
    tiles = -(-channels // 64) + 2  # the last tiles are not rotated
    x = rng.standard_normal((rows, tiles * 64)).astype(np.float16)
    turn = rng.uniform(-3, 3, (positions, parts * turned // 2))
    cos, sin = np.cos(turn).astype(np.float16), np.sin(turn).astype(np.float16)
    table = np.ascontiguousarray(np.stack([v.reshape(positions, -1, 8) for v in (cos, sin)], 2))
    at = (np.arange(rows)[:, None], np.arange(8)[None] ^ (np.arange(rows)[:, None] & 7))  # TMA's swizzle
    given = np.zeros((tiles, rows, 8, 8), np.float16)
    given[:, at[0], at[1]] = x.reshape(rows, tiles, 8, 8).transpose(1, 0, 2, 3)
    shim = (HERE / "host_warps.hpp").read_text(encoding="utf-8")
    defines = {
        "TURNED": turned,
        "HEAD": head,
        "INTERLEAVED": int(interleaved),
        "TILE_ROWS": rows,
        "FIRST_ROW": first,
        "TILES": tiles,
        **({"HEAD_PARTS": parts} if parts > 1 else {}),
    }
    defines |= {"OUT_ITEM": 2, "DIRECT": 0, "STREAM": 0, "SCATTER": 0, "BATCHED": 0}
    header = template_files()["conv_turns.cuh"].read_text(encoding="utf-8")
    text = "\n".join([*(f"#define {k} {v}" for k, v in defines.items()), shim, _SOURCE % _text(header)])
    block = _Params(table.ctypes.data, channels, positions, given.ctypes.data)
    assert library(text, tmp_path, "-Og", []).run(ctypes.byref(block)) == 0
    got = given[:, at[0], at[1]].transpose(1, 0, 2, 3).reshape(rows, -1)
    each = (first + np.arange(rows)) % positions
    heads = x[:, :channels].astype(np.float32).reshape(1, rows, -1, parts * head).transpose(0, 2, 1, 3)
    (want,) = rotary_embedding(
        heads,
        cos[each][None].astype(np.float32),
        sin[each][None].astype(np.float32),
        interleaved=interleaved,
        rotary_embedding_dim=0 if parts > 1 else turned,
        parts=parts,
    )
    np.testing.assert_allclose(got[:, :channels], want.transpose(0, 2, 1, 3).reshape(rows, channels), atol=2e-3)
    np.testing.assert_array_equal(got[:, channels:], x[:, channels:])


@pytest.mark.nvrtc
@pytest.mark.parametrize("norm", [None, RowNorm(False, 1e-5)])
def test_it_compiles_without_spills(norm: RowNorm | None) -> None:
    turns = [
        TURN,
        replace(TURN, interleaved=True),
        replace(TURN, head=128, turned=128),
        replace(TURN, head=32, turned=32, parts=2),
    ]
    configs = (
        Config(1, 1, 1, 128, 8, share=(1, 2)),
        Config(1, 1, 2, 96, 5, alternate=True),
        Config(2, 1, 2, 64, 3),
    )
    made = {
        f"{turn}, {config}": implicit_gemm.recipe(problem, config)
        for turn, config in itertools.product(turns, configs)
        if implicit_gemm.refuse(problem := replace(PLAIN, turn=turn, norm=norm), config) is None
    }
    for name in covering(made):
        (kernel,) = nvrtc.resources(made[name]).values()
        assert kernel.spill_bytes == 0, (name, kernel)


CONFIGS = (
    Config(1, 1, 1, 40, 3), Config(2, 1, 1, 64, 2, out_buffers=2), Config(1, 1, 2, 48, 2), Config(1, 1, 1, 104, 3, alternate=True),
    Config(1, 2, 1, 32, 2), Config(1, 1, 1, 128, 2, share=(1, 2)), Config(1, 1, 2, 152, 2, alternate=True), Config(2, 1, 1, 224, 2),
    Config(1, 1, 1, 64, 3, blocks=2), Config(2, 1, 2, 128, 2),
)  # fmt: skip


ALL = {
    **NETS,
    "large": lambda: layer(14, 2, length=1501, width=512),
    "large far": lambda: layer(8, 2, 128, length=1501, width=512),
}


@pytest.mark.hopper
@pytest.mark.parametrize("precision", ["fp16", "bf16"])
@pytest.mark.parametrize("config", CONFIGS, ids=str)
@pytest.mark.parametrize("name", ALL)
def test_each_configuration_on_a_gpu(
    name: str, config: Config, precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    only(monkeypatch, config)
    graph = ALL[name]()
    found = checked_launches(graph, precision)
    assert "TurnedHeads" in {e.kind for e in found}
