"""The estimated configurations that are timed."""

from __future__ import annotations

from optdnn.kernels.ranking import MOST, varied


def test_the_best_first_and_few_of_a_shape() -> None:
    found = [(3.0, "a3"), (1.0, "a1"), (2.0, "a2"), (5.0, "b5"), (4.0, "c4"), (4.0, "c3")]
    assert MOST == 2
    assert varied(found, lambda c: c[0], 12) == ["a1", "a2", "c3", "c4", "b5"]
    assert varied(found, lambda c: c[0], 3) == ["a1", "a2", "c3"]
    assert varied([], lambda c: c, 3) == []
