"""The model inside of an engine: with it, single weights can be changed without the model file.

``meta["held_model"]`` is ``{"model": blob, "weights": {name: blob}, "calibration": blob}``: the serialized model without large
initializers, these, and (where the build calibrated) the ranges. Weights that the program reads as they are share its blobs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np

from optdnn.calibration.plan_calibration import SharedCalibration
from optdnn.errors import EngineError
from optdnn.importers.model import Model, Source
from optdnn.importers.split_weights import put_together, split_weights
from optdnn.ir.constant_cache import ConstantCache
from optdnn.ir.embedded_graph import hold, released
from optdnn.runtime.program import Program
from optdnn.shapes.plan_base import Blobs
from optdnn.types import Array

HELD_MODEL = "held_model"
"""The key in the program's ``meta``."""
_ASKED = ("values", "sample", "random_seed", "preprocess", "postprocess")
"""Options that change the model before it is compiled."""


def hold_model(program: Program, model: Source | Model, calib: Any) -> None:
    """Add the model to the program; and what calibration found, where ``calib`` is a :class:`SharedCalibration`.

    The program's graph then reads the model's weights instead of corrections of its own."""
    graph = released(program)
    data, weights = split_weights(model)
    blobs = Blobs(ConstantCache(), program.blobs)
    table: dict[str, Any] = {"weights": {name: blobs.add(array) for name, array in sorted(weights.items())}}
    table["model"] = blobs.add(np.frombuffer(data, np.uint8))
    if isinstance(calib, SharedCalibration) and calib.found:
        table["calibration"] = blobs.add(calib.to_bytes())
    program.blobs[:] = blobs.arrays  # the plans of a program share its list
    program.meta[HELD_MODEL] = table
    if graph is not None:
        hold(graph, program)


def keep_model(old: Program, new: Program) -> None:
    """Add the model that a program holds, if it does, to another program of the same network, which does not hold its graph yet."""
    table = old.meta.get(HELD_MODEL)
    if table is None:
        return
    blobs = Blobs(ConstantCache(), new.blobs)
    with _readable():
        weights = {str(name): blobs.add(_blob(old, number)) for name, number in table["weights"].items()}
        others = {key: blobs.add(_blob(old, table[key])) for key in ("model", "calibration") if key in table}
    new.blobs[:] = blobs.arrays
    new.meta[HELD_MODEL] = {"weights": weights, **others}


@contextmanager
def _readable() -> Iterator[None]:
    """Raises EngineError for a table in another form than builds write."""
    try:
        yield
    except (KeyError, TypeError, AttributeError) as error:
        raise EngineError(f"the model in the engine cannot be read: {error!r}") from None


def held_model(program: Program) -> Model | None:
    """The model that an engine holds; None without one. Raises EngineError for a broken one."""
    table = program.meta.get(HELD_MODEL)
    if table is not None:
        with _readable():
            weights = {str(name): _blob(program, number) for name, number in table["weights"].items()}
            data = _blob(program, table["model"])
        return put_together(data.tobytes(), weights, "the engine's model")
    source = None if program.dynamic is None else program.dynamic.source
    if source is None or any(name in program.meta.get("options", {}) for name in _ASKED):
        return None
    weights = {name: program.blobs[number] for name, number in source.weights.items()}
    return put_together(program.blobs[source.model].tobytes(), weights, "the engine's model")


def held_calibration(program: Program) -> SharedCalibration | None:
    """The ranges that an engine holds; None without any. Raises EngineError for broken ones."""
    table = program.meta.get(HELD_MODEL)
    number = table.get("calibration") if isinstance(table, Mapping) else None
    if number is None and program.dynamic is not None and program.dynamic.source is not None:
        number = program.dynamic.source.calibration
    return None if number is None else SharedCalibration.from_bytes(_blob(program, number))


def _blob(program: Program, number: Any) -> Array:
    if type(number) is not int or not 0 <= number < len(program.blobs):
        raise EngineError(f"the model in the engine names the blob {number!r:.60}, which does not exist")
    return program.blobs[number]
