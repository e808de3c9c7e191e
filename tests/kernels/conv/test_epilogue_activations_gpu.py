"""Activations in epilogues on a GPU: every launch agrees with its meaning, and writes nothing else."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from support.activation_cases import ACTIVATIONS, constant_images, convolutions, products
from support.needs import why_no_hopper
from support.on_gpu import TOLERANCE, checked_launches

from optdnn.ir.graph import Graph

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(why_no_hopper() is not None, reason=why_no_hopper() or "")]


@pytest.mark.parametrize("precision", TOLERANCE)
@pytest.mark.parametrize("made", [products, convolutions])
@pytest.mark.parametrize("kind", ACTIVATIONS)
def test_each_activation(kind: str, made: Callable[[str], Graph], precision: str) -> None:
    assert checked_launches(made(kind), precision)


@pytest.mark.parametrize("precision", TOLERANCE)
def test_constant_images(precision: str) -> None:
    assert checked_launches(constant_images(), precision)
