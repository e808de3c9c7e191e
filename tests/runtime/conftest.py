"""Fixtures of the runtime's tests."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # for `programs`

from optdnn.runtime.steps import executor


class FakeExecutor:
    """Runs a Python function as a step: ``run(inputs, outs) -> arrays``. ``seen`` keeps the calls."""

    facts: dict[str, Any] = {"library": "fake"}  # noqa: RUF012

    def __init__(self, function: Callable[..., Sequence[Any]], aliases: bool):
        self.function, self.aliases, self.sessions = function, aliases, 0

    def session(self) -> Any:
        self.sessions += 1
        return SimpleNamespace(run=self.function)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Callable[..., FakeExecutor]:
    """``fake(function)`` makes every "fake" step run that function."""

    def install(function: Callable[..., Sequence[Any]], aliases: bool = False) -> FakeExecutor:
        made = FakeExecutor(function, aliases)
        module = ModuleType("optdnn_fake_executor")
        module.prepare = lambda step, program, options: made  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "optdnn_fake_executor", module)
        monkeypatch.setitem(executor.EXECUTORS, "fake", "optdnn_fake_executor")
        return made

    return install
