"""add_group_norm: sums that a group normalization's kernel includes. test_sequence.py checks its numbers."""

from __future__ import annotations

from typing import Any

import pytest
from support.net import Net
from support.sequence_cases import group_norm_of_sum
from support.simulated import kinds, lowered, refusals

from optdnn.ir.graph import Graph
from optdnn.ir.norm_addition import NormAddition, norm_addition
from optdnn.ops.norm import GroupNormAttrs


def sum_net(
    *, images: int = 32, vectors: tuple[int, ...] = (2, 32, 1, 1), readers: int = 1, norm: str = "GroupNormalization"
) -> Graph:
    """The sum of images and vectors (an input), its norm, and further readers of the sum."""
    n = Net()
    total = n.op("Add", n.conv(n.input(2, 8, 5, 6), images, 3), n.input(*vectors, name="t"))
    if norm == "GroupNormalization":
        y = n.op(norm, total, n.positive(images), n.random(images), attrs=GroupNormAttrs(4, 1e-3))
    else:
        y = n.op(norm, total)
    return n.done(n.conv(y, 8, 3), *(n.conv(total, 8, 3) for _ in range(readers - 1)))


def test_the_sum_is_not_stored_and_parts_of_a_product_are_not_copied() -> None:
    program = lowered(group_norm_of_sum(size=(160, 220)))
    (row,) = [t for t in program.meta["tactics"] if t["tactic"] == "add_group_norm"]
    assert row["launches"] == 2
    assert [s.params["op"]["kind"] for s in program.steps if set(row["nodes"]) & set(s.src)] == [
        "GroupMoments",
        "GroupApply",
    ]
    assert {name.split("_")[0] for name in row["with"]} == {"GroupNormalization", "Swish"}
    small = lowered(group_norm_of_sum())
    assert "Reshape" not in [
        name.split("_")[0] for s in small.steps if s.params["op"]["kind"] == "Copy" for name in s.src
    ]
    assert kinds(small).count("ActivatedNorm") == 1


def test_the_tactic_refuses() -> None:
    program = lowered(sum_net(images=12, vectors=(2, 12, 1, 1)))
    reasons = refusals(program, "add_group_norm")
    assert any("do not consist of aligned vectors of channels" in reason for reason in reasons)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"norm": "Tanh"}, "no group normalization is the only reader of the sum"),
        ({"readers": 2}, "no group normalization is the only reader of the sum"),
        ({"vectors": (2, 32, 5, 6)}, "neither operand is one vector"),
        ({"vectors": (2, 1, 1, 1)}, "neither operand is one vector"),
    ],
)
def test_other_additions(options: dict[str, Any], reason: str) -> None:
    graph = sum_net(**options)
    (add,) = graph.of_kind("Add")
    found = norm_addition(graph, add)
    assert isinstance(found, str)
    assert reason in found


def test_rows_are_no_images() -> None:
    n = Net()
    total = n.op("Add", n.input(2, 32), n.input(2, 32, name="t"))
    graph = n.done(n.op("GroupNormalization", total, n.positive(32), n.random(32), attrs=GroupNormAttrs(4)))
    assert norm_addition(graph, graph.op(total)) == "the sum is not an image"


@pytest.mark.parametrize("vectors", [(2, 32, 1, 1), (1, 32, 1, 1)])
def test_an_addition(vectors: tuple[int, ...]) -> None:
    graph = sum_net(vectors=vectors)
    (add,), (norm,) = graph.of_kind("Add"), graph.of_kind("GroupNormalization")
    assert norm_addition(graph, add) == NormAddition(*add.inputs, norm)  # type: ignore[arg-type]
