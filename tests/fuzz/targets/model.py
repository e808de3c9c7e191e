"""ONNX models, as bytes, go through the importer."""

from __future__ import annotations

from functools import cache
from random import Random

from support import onnx_cases

from fuzz.judge import ours
from fuzz.protobufs import mutated_model
from optdnn.importers.onnx import import_model

COVERED = ("optdnn.importers", "optdnn.ops", "optdnn.dim", "optdnn.dim_text", "optdnn.ir")
MOST_BYTES = 6000
"""The size of the largest seed."""


@cache
def seeds() -> list[bytes]:
    """The cases of ONNX's backend tests: every operator in them, with most of its attributes."""
    models = [case.model for case in onnx_cases.cases().values() if case.model is not None]
    found = {bytes(m.SerializeToString(deterministic=True)) for m in models}
    return sorted(data for data in found if len(data) <= MOST_BYTES)


def mutate(data: bytes, rng: Random) -> bytes:
    return mutated_model(data, rng, seeds())


def one_input(data: bytes) -> None:
    with ours():
        import_model(data)
