"""Rotary embeddings in vectors: chosen if features form vectors, refused otherwise. The kernel compiles, and runs on the
processor."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
from support.host import WHY_NOT, needs_compiler
from support.net import Net
from support.on_gpu import checked_program
from support.on_processor import compare_steps
from support.rotary_cases import ROTARY, heads_first, normalized_after, over_a_past
from support.simulated import TOLERANCE, check_simulated, feeds_of, kinds, lowered, refusals
from support.sweep import in_turn, turns

from optdnn.ir.graph import Graph
from optdnn.kernels.builder import TensorView, row_major
from optdnn.kernels.gemm import turned
from optdnn.kernels.index.rotary import Turn
from optdnn.ops.shape import TransposeAttrs
from optdnn.runtime.cuda.compile import nvrtc
from optdnn.runtime.cuda.compile.recipes import recipe_of
from optdnn.runtime.program import Program
from optdnn.types import FP16, FP32, FP64, DType


@pytest.fixture(autouse=True)
def launches_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """No product rotates the heads."""
    monkeypatch.setattr(turned, "LEAST_ROWS", 1 << 30)


def chosen(program: Program) -> list[str]:
    return [t["tactic"] for t in program.meta["tactics"] if t["kind"] == "RotaryEmbedding"]


@pytest.mark.parametrize(("name", "precision"), turns(ROTARY, "fp16", "bf16", "fp32"))
def test_each_form_takes_the_kernel(name: str, precision: str) -> None:
    program = check_simulated(ROTARY[name](), precision)
    assert set(chosen(program)) <= {"rotary", "rotary_pair"}


@needs_compiler
@pytest.mark.parametrize(
    ("name", "precision", "tolerance"),
    turns([n for n in ROTARY if n != "many rows"], ("fp16", 1.2e-3), ("bf16", 9e-3), ("fp32", 3e-6)),
)
def test_the_kernel_on_the_processor(name: str, precision: str, tolerance: float, tmp_path: Path) -> None:
    graph = ROTARY[name]()
    program = lowered(graph, precision, opt_level=2)
    assert {"rotary", "rotary_pair"} & set(chosen(program))
    compare_steps(program, feeds_of(graph), tolerance, tmp_path)


def test_keys_that_follow_those_of_the_past_share_the_launch(tmp_path: Path) -> None:
    graph = over_a_past()
    program = check_simulated(graph)
    assert kinds(program).count("RotaryPair") == 1
    assert "RotaryEmbedding" not in kinds(program)
    if WHY_NOT is None:
        compare_steps(lowered(graph), feeds_of(graph), 1.2e-3, tmp_path)


def test_keys_that_are_joined_early_turn_alone() -> None:
    program = check_simulated(over_a_past(joined_first=True))
    assert "the other heads are joined to others, or normalized, before it" in refusals(program, "rotary_pair")
    assert kinds(program).count("RotaryEmbedding") == 2


@pytest.mark.parametrize("kind", ["RMSNormalization", "LayerNormalization"])
def test_heads_that_are_normalized_next_share_the_launch(kind: str, tmp_path: Path) -> None:
    graph = normalized_after(kind)
    program = check_simulated(graph, tolerance=1e-2)
    assert kinds(program).count("RotaryPair") == 1
    assert "RotaryEmbedding" not in kinds(program)
    if WHY_NOT is None:
        compare_steps(lowered(graph), feeds_of(graph), 4e-3, tmp_path)


def test_keys_that_are_normalized_early_turn_alone() -> None:
    program = check_simulated(normalized_after(first=True), tolerance=1e-2)
    assert "the other heads are joined to others, or normalized, before it" in refusals(program, "rotary_pair")
    assert kinds(program).count("RotaryEmbedding") == 2


def test_keys_of_more_heads_turn_alone() -> None:
    program = check_simulated(over_a_past(axis=1))
    assert kinds(program).count("RotaryEmbedding") == 2


@pytest.mark.parametrize("name", ["of a product", "of a product, grouped", "class token", "registers"])
def test_queries_and_keys_are_read_where_a_product_leaves_them(name: str) -> None:
    program = check_simulated(ROTARY[name]())
    assert kinds(program).count("RotaryPair") == 1
    assert "RotaryEmbedding" not in kinds(program)
    assert not {"Copy", "Concat", "Slice"} & set(kinds(program)[1:-1])


@pytest.mark.parametrize("name", ["by head", "by head, images"])
def test_heads_of_different_angles_turn_where_they_lie(name: str) -> None:
    found = kinds(check_simulated(ROTARY[name]()))
    assert found.count("RotaryPair") == 1
    assert not {"RotaryEmbedding", "Copy"} & set(found)


@pytest.mark.parametrize(("name", "early"), [("halves", 1), ("angles of inputs", 0), ("position ids", 0)])
def test_only_constant_angles_are_read_before_earlier_launches_end(name: str, early: int) -> None:
    program = lowered(ROTARY[name]())
    (kernel,) = (k for k in program.kernels if k.template == "rotary.cu")
    assert f"#define EARLY {early}\n" in kernel.generated["generated.cuh"]


def turn(shape: tuple[int, ...] = (2, 3, 5, 64), turned: int = 64, dtype: DType = FP16) -> Turn:
    def dense(sizes: tuple[int, ...]) -> TensorView:
        return TensorView(0, 0, sizes, row_major(sizes), dtype)

    angles = dense((1, shape[2], turned // 2))
    return Turn(dense(shape), angles, angles, dense(shape), turned)


def test_vectors_are_as_wide_as_sizes_and_places_allow() -> None:
    whole = turn()
    assert whole.lanes == 8
    assert turn(dtype=FP32).lanes == 4
    assert turn((2, 3, 5, 80), 72).lanes == 4
    assert turn((2, 3, 5, 70), 64).lanes == 2
    assert replace(whole, x=replace(whole.x, offset=4)).lanes == 4
    assert replace(whole, out=replace(whole.out, strides=(966, 322, 66, 1))).lanes == 2
    assert replace(whole, x=replace(whole.x, shape=(1, 3, 5, 64), strides=(7, 320, 64, 1))).lanes == 8


def test_refusals() -> None:
    assert turn().refuse() is None
    assert "it is for 16-bit floats and fp32" in (turn(dtype=FP64).refuse() or "")
    mixed = replace(turn(), x=turn(dtype=FP32).x)
    assert "its operand and its result have different types" in (mixed.refuse() or "")
    assert "aligned vectors" in (turn((2, 3, 5, 6), 6).refuse() or "")
    assert "more vectors" in (turn((1 << 20, 1 << 6, 1 << 4, 64)).refuse() or "")


def other_forms() -> dict[str, Graph]:
    n = Net()
    x = n.op("Transpose", n.op("Abs", n.input(2, 64, 3, 7)), attrs=TransposeAttrs((0, 2, 3, 1)))
    columns = n.done(n.op("RotaryEmbedding", x, n.random(1, 7, 32), n.random(1, 7, 32)))
    return {"odd": heads_first((2, 3, 7, 6)), "columns": columns}


@pytest.mark.parametrize("name", ["odd", "columns"])
def test_other_forms_run_elsewhere(name: str) -> None:
    program = check_simulated(other_forms()[name])
    assert chosen(program) == ["each"]
    (said,) = (t["refused"] for t in program.meta["tactics"] if t["kind"] == "RotaryEmbedding")
    assert [r["reason"] for r in said if r["tactic"] == "rotary"] == ["its features are not aligned vectors"]


def test_without_rows_there_is_no_launch() -> None:
    program = lowered(heads_first((0, 3, 7, 64)))
    assert not program.kernels


@pytest.mark.nvrtc
@pytest.mark.parametrize(
    ("name", "arch", "precision"),
    in_turn(
        ("halves", "neighbors", "a part, neighbors", "every second angle"),
        *product(("sm_80", "sm_90a"), ("fp16", "bf16", "fp32")),
    ),
)
def test_the_kernel_compiles_without_spills(name: str, precision: str, arch: str) -> None:
    program = lowered(ROTARY[name](), precision, f"cuda:{arch}")
    (kernel,) = (k for k in program.kernels if k.function == "rotary")
    found = nvrtc.resources(recipe_of(kernel))["rotary"]
    assert found.spill_bytes == 0
    assert found.registers <= 64


def refused(program: Program) -> set[str]:
    return set(refusals(program, "rotary_pair", kind="RotaryEmbedding"))


@pytest.mark.parametrize(
    ("angles", "read_twice", "because"),
    [
        ("other", "", "the next attention has no other heads that are rotated by the same angles"),
        ("same", "queries", "the next attention has no other heads that are rotated by the same angles"),
        ("same", "keys", "the next attention has no other heads that are rotated by the same angles"),
        ("same", "", "the other heads are rotated after it"),
    ],
)
def test_which_heads_turn_in_one_launch(angles: str, read_twice: str, because: str) -> None:
    """Others may read the keys, which are rotated last: they may be a result."""
    n = Net()
    q, k, v = (
        n.op("Softmax", n.input(2, heads, 6, 16, name=name)) for name, heads in zip("qkv", (4, 2, 2), strict=True)
    )
    first = [n.random(1, 6, 8), n.random(1, 6, 8)]
    second = first if angles == "same" else [n.random(1, 6, 8), n.random(1, 6, 8)]
    q, k = n.op("RotaryEmbedding", q, *first), n.op("RotaryEmbedding", k, *second)
    y = n.op("Attention", q, k, v)
    program = check_simulated(n.done(y, *([n.op("Tanh", q if read_twice == "queries" else k)] if read_twice else [])))
    assert because in refused(program)
    assert kinds(program).count("RotaryPair") == (angles == "same" and read_twice != "queries")


def test_heads_in_other_vectors_turn_in_launches_of_their_own() -> None:
    n = Net()
    q, v = (n.op("Softmax", n.input(2, 2, 6, 16, name=name)) for name in "qv")
    wide = n.op("Softmax", n.input(2, 2, 6, 20, name="k"))
    k = n.op("Slice", wide, n.ints(0), n.ints(16), n.ints(3))  # rows of 40 bytes: vectors of eight
    angles = [n.random(1, 6, 8), n.random(1, 6, 8)]
    y = n.op("Attention", n.op("RotaryEmbedding", q, *angles), n.op("RotaryEmbedding", k, *angles), v)
    program = check_simulated(n.done(y))
    assert "queries and keys have vectors of different sizes" in refused(program)
    assert kinds(program).count("RotaryEmbedding") == 2


@pytest.mark.hopper
@pytest.mark.parametrize("precision", ["fp32", "fp16", "bf16"])
@pytest.mark.parametrize("name", ROTARY)
def test_launches_on_a_gpu(name: str, precision: str) -> None:
    graph = ROTARY[name]()
    program = lowered(graph, precision, target="cuda:sm_90a")
    assert {t["tactic"] for t in program.meta["tactics"] if t["kind"] == "RotaryEmbedding"} <= {"rotary", "rotary_pair"}
    found = checked_program(program, feeds_of(graph), TOLERANCE[precision])
    assert {"RotaryEmbedding", "RotaryPair"} & {e.kind for e in found}
