"""Plans of kernels for rows, attention and RNNs, without a GPU: packing, coverage, refusals, candidates."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from support.attention_cases import bshd, merged

from optdnn.kernels.attention import hopper_config
from optdnn.kernels.attention import hopper_kernel as attention
from optdnn.kernels.attention.problem import HeadView, Problem, bhsd
from optdnn.kernels.launch import Parameters, tensor_map
from optdnn.kernels.norm import group_norm_kernel as group_norm
from optdnn.kernels.norm import rows_kernel as rows
from optdnn.kernels.recurrent import kernel as rnn
from optdnn.runtime.cuda import gpu_facts
from optdnn.runtime.cuda.compile.nvrtc import Recipe
from optdnn.runtime.cuda.gpu_facts import of_arch
from optdnn.runtime.cuda.launches.plan import CLUSTER, LOWER, NOTHING, Pointer
from optdnn.runtime.reference.packed_rnn import pack_matrix

DEVICE = of_arch("sm_90a")
BEFORE_HOPPER = ("sm_80", "sm_86", "sm_89")


# ---- rows ---------------------------------------------------------------------------------------------------------------------

R = rows.Problem("layer_norm", 128, 768)


@pytest.mark.parametrize(
    ("problem", "config", "reason"),
    [
        (replace(R, operation="hardmax"), rows.Config(32, 3, 8, 128), "no operation"),
        (replace(R, operation="softmax", add=True), rows.Config(32, 3, 8, 128), "add no residual"),
        (replace(R, sum=True), rows.Config(32, 3, 8, 128), "a sum needs an addend"),
        (replace(R, rows=0), rows.Config(32, 3, 8, 128), "no rows"),
        (replace(R, length=196), rows.Config(32, 3, 8, 128), "not vectors of 8"),
        (R, rows.Config(24, 4, 8, 96), "not a valid group"),
        (R, rows.Config(64, 2, 8, 128), "not a valid group"),
        (R, rows.Config(32, 3, 8, 2048), "not a valid block"),
        (R, rows.Config(32, 2, 8, 128), "does not fit 32 threads"),
        (R, rows.Config(16, 6, 8, 128), "more than 32 elements"),
        (replace(R, length=32768), rows.Config(1024, 4, 8, 1024), "more than 24 elements"),
    ],
)
def test_rows_refuses(problem: rows.Problem, config: rows.Config, reason: str) -> None:
    assert reason in (rows.refuse(problem, config) or "")


@pytest.mark.parametrize("length", [1, 7, 20, 197, 768, 1000, 4096, 12345])
def test_any_row_length_has_candidates_and_enough_blocks(length: int) -> None:
    problem = rows.Problem("softmax", 1001, length)
    found = rows.candidates(problem, DEVICE)
    assert found
    for config in found:
        grid = rows.launch(problem, config, DEVICE).grid[0]
        assert (grid - 1) * config.threads < 1001 * config.group <= grid * config.threads


def test_a_row_that_is_too_long_has_no_candidate() -> None:
    assert rows.candidates(rows.Problem("softmax", 4, 1 << 20), DEVICE) == []


# ---- group norm ---------------------------------------------------------------------------------------------------------------

G = group_norm.Problem(2, 100, 320, 32)
GC = group_norm.Config(40, 2, 256, 8)


@pytest.mark.parametrize(
    ("problem", "config", "reason"),
    [
        (replace(G, groups=7), GC, "do not form 7 equal groups"),
        (replace(G, epilogue=(("bias",),)), GC, "no operands"),
        (G, replace(GC, slab=44), "vectors of 8"),
        (G, replace(GC, slab=48), "whole groups"),
        (G, replace(GC, cluster=32), "100 pixels for 32 blocks"),
        (G, replace(GC, threads=2048), "threads"),
        (replace(G, pixels=1 << 20), GC, "shared memory"),
        (replace(G, batch=70000), GC, "grid"),
    ],
)
def test_group_norm_refuses(problem: group_norm.Problem, config: group_norm.Config, reason: str) -> None:
    assert group_norm.refuse(G, GC) is None
    assert reason in (group_norm.refuse(problem, config) or "")


@pytest.mark.parametrize("arch", BEFORE_HOPPER)
def test_group_norms_before_hopper_fit_a_block_and_need_no_clusters(arch: str) -> None:
    gpu = gpu_facts.of_arch(arch)
    assert "capability 8.6 have no clusters" in (group_norm.refuse(G, GC, capability=(8, 6)) or "")
    large = replace(G, pixels=1100)  # 88 KB for 40 channels, and 11 to 42 KB for sums
    for problem in (G, large):
        proposed = group_norm.candidates(problem, gpu, 99)
        assert proposed
        assert all(c.cluster == 1 and group_norm.shared_bytes(problem, c) <= gpu.shared_per_block for c in proposed)
    assert any(c.cluster > 1 for c in group_norm.candidates(large, DEVICE, 99))
    assert group_norm.candidates(replace(G, pixels=4096), gpu) == []


def test_group_norms_slabs_are_whole_groups_of_whole_vectors() -> None:
    for problem in (G, group_norm.Problem(1, 49, 24, 24), group_norm.Problem(1, 50, 15, 5)):
        found = group_norm.candidates(problem, DEVICE, 99)
        assert found
        assert all(c.slab % problem.group == c.slab % c.lanes == problem.channels % c.slab == 0 for c in found)


# ---- attention ----------------------------------------------------------------------------------------------------------------


def test_views_of_a_joint_projection_address_its_parts() -> None:
    whole = np.arange(2 * 5 * 3 * 4 * 8).reshape(2, 5, 3, 4, 8)
    for part in range(3):
        view = bshd(5, 4, 8, parts=3, part=part)
        strides = [8 * x for x in (view.batch, view.head, view.position, 1)]
        seen = np.lib.stride_tricks.as_strided(whole.ravel()[view.offset :], (2, 4, 5, 8), strides)
        np.testing.assert_array_equal(seen, whole[:, :, part].transpose(0, 2, 1, 3))
    apart = bhsd(5, 4, 8)
    assert (apart.batch, apart.head, apart.position, apart.offset) == (160, 40, 8, 0)


@pytest.mark.parametrize(
    ("features", "head", "span"),
    [(64, 64, 128), (128, 128, 128), (32, 32, 64), (96, 96, 64), (80, 80, 32), (40, 48, 32)],
)
def test_heads_are_cut_into_swizzled_subtiles(features: int, head: int, span: int) -> None:
    problem = merged(1, 2, 70, features)
    assert (problem.head, problem.span) == (head, span)
    config = attention.Config(2, 48, 2)
    made = attention.launch(problem, config, DEVICE)
    maps = {m.operand: m for m in made.maps}
    assert maps["k"].offset == 2 * features * 2
    assert maps["out"].offset == 0
    assert maps["q"].shape == (features, 70, 2, 1)
    assert maps["q"].box == (span // 2, 64, 1, 1)
    assert made.grid == (-(-70 // maps["q"].box[1] // ((made.block - made.block % 128) // 128)), 2, 1)


A = merged(2, 4, 300, 64)
AC = attention.Config(1, 64, 2)


@pytest.mark.parametrize(
    ("problem", "config", "reason"),
    [
        (merged(2, 4, 300, 36), AC, "36 features"),
        (merged(2, 4, 300, 264), AC, "264 features"),
        (replace(A, scale=0.0), AC, "a scale of 0.0"),
        (replace(A, key_heads=3), AC, "do not share 3 key heads"),
        (replace(A, k=HeadView(8, 8, 4)), AC, "k: TMA needs"),
        (A, replace(AC, keys=40), "not a tile"),
        (A, replace(AC, stages=6), "6 stages for 5 tiles"),
        (merged(2, 4, 3000, 128), attention.Config(1, 256, 4), "shared memory exceed"),
        (A, replace(AC, blocks=6), "that many blocks"),
        (A, attention.Config(2, 256, 1, 1), "registers"),
        (replace(A, batch=70000), AC, "grid"),
    ],
)
def test_attention_refuses(problem: Problem, config: attention.Config, reason: str) -> None:
    assert attention.refuse(A, AC) is None
    assert reason in (attention.refuse(problem, config) or "")


def test_a_loading_warp_is_there_only_if_tiles_outnumber_stages() -> None:
    assert hopper_config.threads(A, AC) == 160
    assert hopper_config.threads(A, replace(AC, stages=5)) == 128
    # Five warps use two slots of one partition: each gets half of its registers, less than 65536 / 160.
    assert hopper_config.register_limit(A, AC) == 255
    assert hopper_config.register_limit(A, replace(AC, blocks=2)) == 168


def test_attentions_fragments_are_the_products_operands() -> None:
    """wgmma's accumulator fragment of the scores, packed in pairs, is the register operand of the second product."""
    keys = 32
    scores = np.arange(64 * keys).reshape(64, keys)
    for warp, lane in itertools.product(range(4), range(32)):
        row, column = warp * 16 + lane // 4, lane % 4 * 2
        s = [scores[row + 8 * (i // 2 % 2), column + 8 * (i // 4) + i % 2] for i in range(keys // 2)]
        weights = [(s[2 * i], s[2 * i + 1]) for i in range(keys // 4)]
        for k in range(keys // 16):
            a = weights[4 * k : 4 * k + 4]
            for register, (low, high) in enumerate(a):  # PTX ISA: fragment of A, m64k16
                at = (row + 8 * (register % 2), 16 * k + column + 8 * (register // 2))
                assert (low, high) == (scores[at], scores[at[0], at[1] + 1])


# ---- RNN ----------------------------------------------------------------------------------------------------------------------


def mma(a: Any, b: Any) -> Any:
    """m16n8k16 from fragments [lane][8] and [lane][4]: PTX ISA, "Matrix fragments for mma.m16n8k16"."""
    left, right = np.zeros((16, 16)), np.zeros((16, 8))
    for lane, register, low in itertools.product(range(32), range(4), range(2)):
        left[lane // 4 + 8 * (register % 2), lane % 4 * 2 + 8 * (register // 2) + low] = a[lane, 2 * register + low]
    for lane, register, low in itertools.product(range(32), range(2), range(2)):
        right[lane % 4 * 2 + 8 * register + low, lane // 4] = b[lane, 2 * register + low]
    return left @ right


@pytest.mark.parametrize(("gates", "hidden", "width"), [(4, 64, 64), (3, 32, 40)])
def test_packed_fragments_give_each_lane_its_units_gates(gates: int, hidden: int, width: int) -> None:
    rng = np.random.default_rng(3)
    matrix, chunks = rng.standard_normal((gates * hidden, width)), -(-width // 32)
    packed = pack_matrix(matrix, hidden)
    assert packed.shape == (hidden // 32, 8, 2 * chunks, 32, 8)
    x = np.zeros((8, chunks * 32))
    x[:, :width] = rng.standard_normal((8, width))
    wanted = np.zeros((4, hidden, 8))
    wanted[:gates] = (matrix @ x[:, :width].T).reshape(gates, hidden, 8)
    for rank, warp in itertools.product(range(hidden // 32), range(8)):
        total = np.zeros((16, 8))
        for c in range(chunks):
            lanes = np.stack([x[lane // 4, c * 32 + lane % 4 * 8 :][:8] for lane in range(32)])  # one 16-byte load
            total += mma(packed[rank, warp, 2 * c], lanes[:, :4]) + mma(packed[rank, warp, 2 * c + 1], lanes[:, 4:])
        for lane in range(32):
            row, quad = lane // 4, lane % 4
            pick, partner = row // 4, (lane ^ 16) // 4

            def accumulator(r: int, at: int, total: Any = total, quad: int = quad) -> Any:
                return total[r + 8 * (at // 2), 2 * quad + at % 2]

            x0, y0 = (accumulator(partner, 1 if pick else 0), accumulator(partner, 3 if pick else 2))  # by shuffle
            first = (accumulator(row, 0), x0, accumulator(row, 2), y0)
            found = (x0, accumulator(row, 1), y0, accumulator(row, 3)) if pick else first
            unit = rank * 32 + warp * 4 + row % 4
            np.testing.assert_allclose(found, wanted[:, unit, 2 * quad + pick], atol=1e-12)


def test_a_grus_hidden_bias_stays_apart() -> None:
    rng = np.random.default_rng(4)
    w, r = rng.standard_normal((2, 3 * 32))
    gru = rnn.pack_bias(rnn.Problem("gru", 1, 1, 8, 32), [w], [r])
    np.testing.assert_allclose(gru[0].T, [w[:32] + r[:32], w[32:64] + r[32:64], w[64:], r[64:]], rtol=1e-6)
    w, r = rng.standard_normal((2, 4 * 32))
    lstm = rnn.pack_bias(rnn.Problem("lstm", 1, 1, 8, 32), [w], [r])
    np.testing.assert_allclose(lstm[0].T, (w + r).reshape(4, 32), rtol=1e-6)


L = rnn.Problem("lstm", 128, 32, 512, 512, 2)


@pytest.mark.parametrize(
    ("problem", "config", "reason"),
    [
        (replace(L, cell="rnn"), rnn.Config(16), "no cell"),
        (replace(L, hidden=520), rnn.Config(16), "520 hidden units"),
        (replace(L, hidden=1024), rnn.Config(16), "1024 hidden units"),
        (replace(L, inputs=100), rnn.Config(16), "100 inputs"),
        (replace(L, steps=0), rnn.Config(16), "nothing to compute"),
        (replace(L, batch=33), rnn.Config(16), "a batch of 33"),
        (L, rnn.Config(12), "not a tile"),
        (L, rnn.Config(8), "10 clusters cannot run at once"),
        (replace(L, steps=1 << 17), rnn.Config(16), "more elements"),
    ],
)
def test_rnn_refuses(problem: rnn.Problem, config: rnn.Config, reason: str) -> None:
    assert rnn.refuse(L, rnn.Config(16)) is None
    assert reason in (rnn.refuse(problem, config) or "")


def test_a_layer_is_one_projection_and_a_recurrence_per_part_of_the_batch() -> None:
    made = rnn.launch(L, rnn.Config(16), DEVICE)
    assert (made.grid, made.cluster, made.block) == ((2 * (1 + 2) * 16, 1, 1), 16, 384)
    assert rnn.workspace(L, rnn.Config(16))["gates"] == 16 * 2 * 128 * 32 * 512
    assert rnn.candidates(replace(L, inputs=513), DEVICE) == []
    assert rnn.Config(8) not in rnn.candidates(L, DEVICE)


# ---- launches ----------------------------------------------------------------------------------------------------------------

RECIPE = Recipe("rows.cu", "sm_90a")


def test_a_parameter_block_is_laid_out_as_in_c() -> None:
    parameters = Parameters().i32(1).pointer("x", offset=4).tensor_map(tensor_map("y", "float16", (8,), (), (8,), 0))
    made = parameters.f32(2.0).i64(3).launch(RECIPE, "k", 5, 32)
    assert made.pointers == (Pointer(8, "x", 4),)
    assert made.maps[0].at == 64
    assert len(made.parameters) == 256
    assert made.parameters[200:208] == (3).to_bytes(8, "little")
    assert made.operands == ("x", "y")
    assert made.grid == (5, 1, 1)


def test_an_absent_operand_is_a_null_pointer() -> None:
    made = Parameters().pointer("x", None).u32(7).launch(RECIPE, "k", 1, 32)
    assert made.operands == ("x",)
    assert made.parameters == bytes(16) + (7).to_bytes(8, "little"), "filled up to the size of the struct"


def test_blocks_of_a_cluster_wait_for_one_another_unless_they_wait_for_more() -> None:
    waits = [
        Parameters().launch(RECIPE, "k", 8, 32, **more).waits
        for more in ({}, {"cluster": 4}, {"cluster": 4, "waits": LOWER})
    ]
    assert waits == [NOTHING, CLUSTER, LOWER]
