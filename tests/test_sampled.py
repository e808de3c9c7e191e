"""Which cases of a test are quick."""

from __future__ import annotations

from typing import Any

import pytest
from support.sampled import sample


class Case:
    """A collected case."""

    def __init__(self, nodeid: str, *marks: str):
        self.nodeid, self.marks = nodeid, list(marks)

    def get_closest_marker(self, name: str) -> str | None:
        return name if name in self.marks else None

    def add_marker(self, name: str) -> None:
        self.marks.append(name)


def quick(*cases: Any) -> list[str]:
    sample(cases)
    return [c.nodeid for c in cases if "slow" not in c.marks]


@pytest.mark.parametrize(("count", "numbers"), [(2, [0, 1]), (3, [0]), (13, [0, 6, 12])])
def test_every_sixth_of_many(count: int, numbers: list[int]) -> None:
    alone = Case("a.py::test_of_one")
    assert quick(alone, *(Case(f"a.py::test[{k}]") for k in range(count))) == [
        alone.nodeid,
        *(f"a.py::test[{k}]" for k in numbers),
    ]


@pytest.mark.parametrize("mark", ["slow", "nvrtc", "gpu"])
def test_cases_that_are_chosen_otherwise_stay(mark: str) -> None:
    cases = [Case(f"a.py::test[{k}]", *([mark] if k == 5 else [])) for k in range(6)]
    assert len(quick(*cases)) == (5 if mark == "slow" else 6)
