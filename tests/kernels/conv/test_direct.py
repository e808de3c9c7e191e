"""Predictions of the convolutions with one result per thread."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from support.net import Net, built
from support.simulated import lowered

from optdnn.ir.graph import Value
from optdnn.kernels.conv.direct import DirectConv, DirectConvTranspose
from optdnn.lowering.table import TACTICS
from optdnn.runtime.cuda.measuring.expected import expected_steps

NETS: dict[str, tuple[Callable[[Net], Value], int]] = {
    "49 taps of one channel": (
        lambda n: n.conv(n.input(8, 48, 64, 64), 96, 7, pads=3, strides=2, group=48),
        8 * 96 * 32 * 32 * 49,
    ),
    "many channels": (lambda n: n.conv(n.input(2, 64, 32, 32), 64, 3), 2 * 64 * 32 * 32 * 64 * 9),
    "transposed": (
        lambda n: n.conv_transpose(n.input(2, 64, 16, 16), 32, 4, strides=2, pads=1),
        2 * 32 * 32 * 32 * 64 * 4,
    ),
}
"""Networks, and the multiply-adds of each."""
RATE = 132 * 128 * 1.98e9
"""Multiply-adds per second of an H200's scalar units, at its highest clock."""


@pytest.mark.parametrize("name", NETS)
def test_predictions_are_not_faster_than_scalar_units(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TACTICS, "Conv", (DirectConv(),))
    monkeypatch.setitem(TACTICS, "ConvTranspose", (DirectConvTranspose(),))
    build, products = NETS[name]
    (step,) = [
        s
        for s in expected_steps(lowered(built(build), "fp16", target="cuda:h200", no_cubins=True))
        if "direct" in str(s["tactic"])
    ]
    assert step["us"] > 1e6 * products / RATE


def test_a_prediction_is_near_its_measurement() -> None:
    """FastViT-T8 at fp32: 30.9 us on an H200."""
    (step,) = expected_steps(
        lowered(built(NETS["49 taps of one channel"][0]), "fp32", target="cuda:h200", no_cubins=True)
    )
    assert step["tactic"] == "conv_direct"
    assert step["us"] == pytest.approx(30.9, rel=0.15)
