"""Few combinations of parameters stand for all (:mod:`support.sweep`)."""

from __future__ import annotations

from itertools import combinations, product

from support.sweep import all_pairs, turns


def test_all_pairs_of_values_meet() -> None:
    axes = {"a": range(5), "b": "xyz", "c, d": [(1, 2), (3, 4)], "e": {"first": 0, "second": 0}}
    names, rows = all_pairs(axes).args
    assert names == "a, b, c, d, e"
    values = [range(5), "xyz", (1, 3), ("first", "second")]
    chosen = [(a, b, c, e) for a, b, c, d, e in rows if d == c + 1]
    assert 15 <= len(rows) == len(chosen) <= 18, "at least the two longest axes in all combinations, of 60"
    for i, j in combinations(range(4), 2):
        assert {(row[i], row[j]) for row in chosen} == {*product(values[i], values[j])}


def test_each_case_has_its_turn() -> None:
    assert turns(["a", "b", "c"], 1, 2) == [("a", 1), ("b", 2), ("c", 1)]
    assert turns([("a", 0), ("b", 0)], (1, 2)) == [("a", 0, 1, 2), ("b", 0, 1, 2)]
