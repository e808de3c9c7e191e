"""Products of a few rows with packed weights, the norm before them and a second product: the choice, and the kernel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from support.net import Net
from support.on_gpu import checked_launches
from support.packed_cases import Case, drawn
from support.simulated import check_simulated, kinds, refusals

from optdnn.ir.graph import Graph
from optdnn.kernels.packed.row_product import PackedResidentPair
from optdnn.ops.norm import LayerNormAttrs
from optdnn.ops.packed_layout import PackedMatMulAttrs


def network(case: Case, *, norm: bool, gated: bool, other: Case | None = None) -> Graph:
    """A product of a case after a norm, multiplied by another product, or added to an input."""
    n, o = Net(), drawn(case)
    x = n.op("Abs", n.input(case.rows, case.depth))
    if norm:
        x = n.op("RMSNormalization", x, n.random(case.depth, offset=1.0), attrs=LayerNormAttrs(-1, 1e-5))

    def product(of: Case, flip: int) -> Any:
        drawn_ = drawn(of)
        constants = [
            None if a is None else n.graph.add_constant(a)
            for a in (drawn_.packed ^ np.uint8(flip), drawn_.scales, drawn_.zeros)
        ]
        q = of.problem
        return n.op("PackedMatMul", x, *constants, attrs=PackedMatMulAttrs(q.code, q.depth, q.block))

    y = n.op("Add", product(case, 0), n.const(o.bias))
    if not gated:
        return n.done(n.op("Add", y, n.input(case.rows, case.columns, name="r")))
    return n.done(n.op("Mul", n.op("Swish", y), product(other or case, 0x5A)))


SMALL_NETWORKS: dict[str, Callable[[], Graph]] = {
    "norm, residual": lambda: network(Case(1, 96, 1024), norm=True, gated=False),
    "norm, gated": lambda: network(Case(1, 96, 1024), norm=True, gated=True),
    "gated, four rows": lambda: network(Case(4, 96, 1024), norm=False, gated=True),
    "norm, gated, seven rows": lambda: network(Case(7, 96, 1024, zeros="uint8"), norm=True, gated=True),
    "norm, gated, 8 bits": lambda: network(Case(1, 2048, 512, "uint8"), norm=True, gated=True),
}


PAIRS: dict[str, Callable[[], Graph]] = {
    "16 rows": lambda: network(Case(16, 2304, 1024), norm=True, gated=True),
    "9 rows, 8 bits": lambda: network(Case(9, 2120, 512, "uint8", 64, "uint8"), norm=False, gated=True),
}
"""For 9 to 16 rows, the norm is a separate launch."""


def only_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Untuned builds compute both products in one launch."""
    monkeypatch.setattr(PackedResidentPair, "defer", lambda *given: None)


@pytest.mark.parametrize("name", PAIRS)
def test_two_products_of_more_rows(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    only_pairs(monkeypatch)
    found = kinds(check_simulated(PAIRS[name](), target="cuda:sm_90a", tolerance=8e-3))
    assert found.count("PackedRowProduct") == 1
    assert "TiledPackedMatMul" not in found


def test_two_products_of_another_form() -> None:
    program = check_simulated(
        network(Case(16, 2304, 1024), norm=False, gated=True, other=Case(16, 2304, 1024, block=64)),
        target="cuda:sm_90a",
        tolerance=8e-3,
    )
    said = refusals(program, "packed_resident_pair")
    assert any("have another form" in reason for reason in said)
    assert "its result is not multiplied by another product of the same rows without other readers" in said


@pytest.mark.parametrize("name", SMALL_NETWORKS)
def test_accepted_networks(name: str) -> None:
    found = kinds(check_simulated(SMALL_NETWORKS[name](), tolerance=8e-3))
    assert found.count("PackedRowProduct") == 1
    assert not {"RMSNormalization", "TiledPackedMatMul"} & set(found)


@pytest.mark.parametrize(
    ("because", "rows", "norm", "gated", "other"),
    [
        ("its rows are not normalized by their mean square", 1, False, False, None),
        ("it is for up to 8 rows, not 9", 9, True, False, None),
        ("have another form", 1, True, True, Case(1, 96, 1024, block=64)),
    ],
)
def test_refusals(because: str, rows: int, norm: bool, gated: bool, other: Case | None) -> None:
    program = check_simulated(network(Case(rows, 96, 1024), norm=norm, gated=gated, other=other), tolerance=8e-3)
    assert "PackedRowProduct" not in kinds(program)
    said = refusals(program, "packed_digits_rows")
    assert any(because in reason for reason in said)


TOLERANCE = {"fp16": 8e-3, "bf16": 5e-2}


@pytest.mark.hopper
@pytest.mark.parametrize("precision", TOLERANCE)
@pytest.mark.parametrize("name", SMALL_NETWORKS | PAIRS)
def test_launches_on_a_gpu(name: str, precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    only_pairs(monkeypatch)
    graph = (SMALL_NETWORKS | PAIRS)[name]()
    found = checked_launches(graph, precision, TOLERANCE[precision])
    assert "PackedRowProduct" in {e.kind for e in found}
