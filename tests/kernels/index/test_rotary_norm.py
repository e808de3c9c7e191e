"""Norms and rotary embeddings of queries and keys in one launch: choice, refusals, and the kernel on the processor."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from pathlib import Path

import pytest
from support.host import needs_compiler
from support.net import Net
from support.on_gpu import checked_launches
from support.on_processor import compare_steps
from support.rotary_cases import NORMED, angles, normed, over_a_past
from support.simulated import TOLERANCE, check_simulated, feeds_of, kinds, lowered, refusals
from support.sweep import in_turn, turns

from optdnn.ir.graph import Graph
from optdnn.ops.norm import LayerNormAttrs
from optdnn.runtime.cuda.compile import nvrtc
from optdnn.runtime.cuda.compile.recipes import recipe_of
from optdnn.runtime.program import Program

PRECISIONS = ("fp32", "fp16", "bf16")


@pytest.mark.slow
@pytest.mark.parametrize(("name", "precision"), turns(NORMED, *PRECISIONS))
def test_each_form_takes_the_kernel(name: str, precision: str) -> None:
    program = check_simulated(NORMED[name](), precision, tolerance={"fp16": 1e-2, "bf16": 6e-2}.get(precision))
    assert kinds(program).count("RotaryNormPair") == 1
    assert not {"RotaryPair", "RotaryEmbedding", "RMSNormalization", "LayerNormalization", "Copy"} & set(
        kinds(program)[1:-1]
    )


def test_keys_that_follow_those_of_the_past() -> None:
    program = check_simulated(over_a_past("RMSNormalization"), tolerance=1e-2)
    assert kinds(program).count("RotaryNormPair") == 1
    program = check_simulated(over_a_past("RMSNormalization", joined_first=True), tolerance=1e-2)
    assert "the other heads are joined to others, or normalized, before it" in refusals(program, "rotary_norm")
    assert "RotaryNormPair" not in kinds(program)


@pytest.mark.slow
@needs_compiler
@pytest.mark.parametrize(("name", "precision"), turns(NORMED, *PRECISIONS[::-1]))
def test_the_kernel_on_the_processor(name: str, precision: str, tmp_path: Path) -> None:
    graph = NORMED[name]()
    program = lowered(graph, precision, opt_level=2)
    assert "RotaryNormPair" in kinds(program)
    compare_steps(program, feeds_of(graph), TOLERANCE[precision], tmp_path)


def pair(
    *, second: str = "RMSNormalization", epsilon: float = 1e-5, axis: int = -1, used: bool = False, computed: bool = False, size: int = 16,
    heads: int = 2, scale: int = 0, tokens: bool = False,
) -> Graph:  # fmt: skip
    """Queries and keys that are inputs. Their norms may differ."""
    n = Net()
    turn = angles(n, 6, size // 2)
    q, k, v = (n.op("Softmax", n.input(2, heads, 6, size, name=name)) for name in "qkv")
    width = scale or size
    own = n.positive(width)
    weight = n.op("Exp", n.input(width, name="w")) if computed else own
    if tokens:
        q, k = (n.op("Reshape", x, n.ints(2, heads, 6 * size)) for x in (q, k))
        own = weight = n.positive(6 * size)
    q = n.op("RMSNormalization", q, own, attrs=LayerNormAttrs(axis=axis))
    k = n.op(
        second, k, weight, attrs=LayerNormAttrs(axis=axis, epsilon=epsilon) if second == "RMSNormalization" else None
    )
    more = [n.op("Tanh", k)] if used else []
    q, k = (n.op("Reshape", x, n.ints(2, heads, 6, size)) for x in (q, k)) if tokens else (q, k)
    q, k = (n.op("RotaryEmbedding", x, *turn) for x in (q, k))
    return n.done(n.op("Attention", q, k, v), *more)


def reasons(program: Program) -> set[str]:
    return set(refusals(program, "rotary_norm", kind="RotaryEmbedding"))


@pytest.mark.parametrize(
    ("graph", "because"),
    [
        (lambda: pair(used=True), "or not both have a norm before them"),
        (lambda: normed(own=True), "each feature of its heads has its own angle"),
        (lambda: pair(epsilon=1e-3), "the norms of queries and keys differ"),
        (lambda: pair(second="LayerNormalization"), "the norms of queries and keys differ"),
        (lambda: pair(axis=-2, scale=1), "its norms are neither of heads nor of tokens"),
        (lambda: pair(tokens=True), "its norms are neither of heads nor of tokens"),
        (lambda: pair(computed=True), "the scale and bias of its norms are not constant"),
        (lambda: pair(scale=1), "the scale of its norms is not a single row"),
        (lambda: pair(size=1024), "a head has more vectors than a warp has lanes"),
        (lambda: normed(tokens=True, heads=3, groups=3), "12 threads for a token are not a valid block"),
        (lambda: pair(size=6), "its features are not aligned vectors"),
    ],
)
def test_refusals(graph: Callable[[], Graph], because: str) -> None:
    found = reasons(lowered(graph()))
    assert [r for r in found if because in r], found


@pytest.mark.nvrtc
@pytest.mark.parametrize(
    ("name", "precision", "arch"),
    in_turn(("layer norms of heads", "a part turns", "tokens, grouped"), *product(PRECISIONS, ("sm_80", "sm_90a"))),
)
def test_the_kernel_compiles_without_spills(name: str, precision: str, arch: str) -> None:
    program = lowered(NORMED[name](), precision, f"cuda:{arch}")
    (kernel,) = (k for k in program.kernels if k.function == "rotary_norm")
    assert nvrtc.resources(recipe_of(kernel))["rotary_norm"].spill_bytes == 0


@pytest.mark.hopper
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("name", NORMED)
def test_every_launch_agrees_with_its_meaning(name: str, precision: str) -> None:
    graph = NORMED[name]()
    found = checked_launches(graph, precision)
    assert "RotaryNormPair" in {e.kind for e in found}
