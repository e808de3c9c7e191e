"""A pointwise operator without an expression runs on the host."""

from __future__ import annotations

import pytest
from support.net import Net
from support.simulated import lowered

from optdnn.kernels.pointwise.expressions import EXPRESSIONS


def test_an_operator_without_an_expression(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(EXPRESSIONS, "Softsign")
    n = Net()
    program = lowered(n.done(n.op("Softsign", n.input(4, 8))))
    (row,) = program.meta["host"]["operators"]
    assert "there is no expression for Softsign" in row["why"]
