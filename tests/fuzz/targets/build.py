"""ONNX models go through a whole build for a Hopper GPU: importer, passes, lowering. Nothing is compiled or run."""

from __future__ import annotations

from functools import cache
from random import Random

from support import small_models

import optdnn
from fuzz.judge import ours
from fuzz.protobufs import mutated_model
from fuzz.targets import model

COVERED = ("optdnn.passes", "optdnn.lowering", "optdnn.kernels", "optdnn.importers", "optdnn.shapes")


@cache
def seeds() -> list[bytes]:
    """The cases of ONNX's backend tests, and small networks that the passes rewrite."""
    networks = [small_models.mlp(2), small_models.residual(), small_models.two_heads(), small_models.attention(1)]
    return [*model.seeds(), *(bytes(m.SerializeToString(deterministic=True)) for m in networks)]


def mutate(data: bytes, rng: Random) -> bytes:
    return mutated_model(data, rng, seeds())


def one_input(data: bytes) -> None:
    with ours():
        optdnn.build(bytes(data), target="simulate", tactics="heuristic")
