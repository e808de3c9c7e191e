"""Activations in epilogues on a GPU: every launch does what its step means, and writes nothing else."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from support.activation_cases import ACTIVATIONS, constant_images, convolutions, products
from support.on_gpu import checked_launches

from optdnn.ir.graph import Graph

pytestmark = pytest.mark.hopper


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize("made", [products, convolutions])
@pytest.mark.parametrize("kind", ACTIVATIONS)
def test_each_activation(kind: str, made: Callable[[str], Graph], precision: str) -> None:
    assert checked_launches(made(kind), precision)


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_constant_images(precision: str) -> None:
    assert checked_launches(constant_images(), precision)
