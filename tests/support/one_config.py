"""One configuration for all launches of Hopper's implicit GEMM: tests try each by itself."""

from __future__ import annotations

from typing import Any

import pytest

from optdnn.kernels.conv import hopper_launch, implicit_gemm
from optdnn.kernels.conv.implicit_gemm import Config
from optdnn.kernels.tactic import Offer


def only(monkeypatch: pytest.MonkeyPatch, config: Config) -> None:
    """Let this configuration be the choice of every launch that it can run."""
    offers = hopper_launch.HopperTactic.offers

    def one(self: Any, problem: Any, gpu: Any) -> Any:
        fits = implicit_gemm.refuse(problem, config) is None and (problem.dense or not config.stores_directly)
        return [Offer(config, 1e-6)] if fits else offers(self, problem, gpu)

    monkeypatch.setattr(hopper_launch.HopperTactic, "offers", one)
