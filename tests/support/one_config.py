"""One configuration for all launches of Hopper's implicit GEMM: tests try each one separately."""

from __future__ import annotations

from typing import Any

import pytest

from optdnn.kernels.conv import hopper_launch, implicit_gemm
from optdnn.kernels.conv.implicit_gemm import Config
from optdnn.kernels.tactic import Offer

CONFIGS = (
    Config(1, 1, 1, 40, 3), Config(2, 1, 1, 64, 2), Config(1, 1, 2, 48, 2), Config(1, 1, 1, 104, 3, alternate=True),
    Config(1, 1, 1, 24, 2, direct=True), Config(1, 1, 1, 32, 2, split=2), Config(2, 1, 1, 256, 2), Config(1, 2, 1, 32, 2),
    Config(1, 1, 1, 128, 2, share=(2, 1)), Config(1, 1, 1, 64, 2, stationary=True), Config(1, 1, 1, 64, 3, stream=True),
)  # fmt: skip
"""Each kind of configuration: tiles, rings, stores, and ways to divide the work."""
STORED = (
    Config(2, 1, 1, 96, 3, direct=True), Config(1, 2, 1, 96, 3, direct=True), Config(1, 1, 2, 48, 3, direct=True),
    Config(2, 1, 1, 64, 2, split=2), Config(1, 1, 1, 40, 2, split=3),
)  # fmt: skip
"""Larger tiles that are stored from registers, like those of fp32."""
PAIR_TOLERANCE = {"fp16": 4e-3, "bf16": 3e-2, "tf32": 4e-3, "fp32": 4e-6}
"""Precision -> the largest error of the product of two results of one launch."""


def only(monkeypatch: pytest.MonkeyPatch, config: Config) -> None:
    """Makes this configuration the choice of every launch that it can run."""
    offers = hopper_launch.HopperTactic.offers

    def one(self: Any, problem: Any, gpu: Any) -> Any:
        fits = implicit_gemm.refuse(problem, config) is None and (problem.dense or not config.stores_directly)
        return [Offer(config, 1e-6)] if fits else offers(self, problem, gpu)

    monkeypatch.setattr(hopper_launch.HopperTactic, "offers", one)


def only_of(monkeypatch: pytest.MonkeyPatch, tactic: Any, config: hopper_launch.Config) -> None:
    """Makes this configuration the only one of a tactic, which then does not defer. Skips the test if the launch cannot run it."""
    monkeypatch.setattr(tactic, "defer", lambda self, b, op: None)
    offers = tactic.configs

    def one(self: Any, b: Any, op: Any) -> list[Offer]:
        problem = self.problem(b, op)
        if (why := hopper_launch.family(config).refuse(problem, config)) is not None or (
            config.stores_directly and not problem.dense
        ):
            pytest.skip(why or "it stores rows without gaps")
        assert offers(self, b, op)
        return [Offer(config, 1e-6)]

    monkeypatch.setattr(tactic, "configs", one)
