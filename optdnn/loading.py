"""``optdnn.load``: the runtime's function, with the parts of the compiler that it needs: plans for further shapes, and the
examination of parts for CPU libraries."""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping
from typing import Any

from optdnn.errors import MissingDependency
from optdnn.runtime import engine
from optdnn.runtime.program import Program
from optdnn.runtime.steps.executor import LibraryPart
from optdnn.types import Array


@functools.wraps(engine.load)
def load(path: str | os.PathLike[str], **options: Any) -> engine.Engine:
    loaded = engine.load(path, **{"planner": plan_on_demand, "examine": examine_part, **options})
    loaded.refitter = rebuilt_on_demand
    return loaded


def examine_part(part: LibraryPart) -> None:
    """Examine a part that this machine has not examined yet (:func:`optdnn.lowering.cpu.examine.examine`).

    The compiler is imported only in this case.
    """
    from optdnn.lowering.cpu.examined import entry_of, is_known, remember

    entry = entry_of(part)
    if entry is not None and is_known(entry):
        return
    from optdnn.lowering.cpu.examine import examine

    examine(part)
    if entry is not None:
        remember(entry)


def plan_on_demand(
    program: Program, shapes: Mapping[str, tuple[int, ...]], compiled: bool, values: Mapping[str, Array]
) -> Program:
    """:func:`optdnn.shapes.plans.replan`; the compiler is imported when the first plan is made."""
    try:
        from optdnn.shapes.plans import replan
    except ImportError as error:
        raise _missing(error, "to make plans for shapes that the engine holds none for") from error
    return replan(program, shapes, compiled, values)


def rebuilt_on_demand(*args: Any, **options: Any) -> Any:
    """:func:`optdnn.compiler.rebuilt`; the compiler is imported when an engine first gets other weights."""
    try:
        from optdnn.compiler import rebuilt
    except ImportError as error:
        raise _missing(error, "to give an engine other weights") from error
    return rebuilt(*args, **options)


def _missing(error: ImportError, why: str) -> MissingDependency:
    name = (error.name or "onnx").partition(".")[0]
    missing = MissingDependency(name, "", why)
    missing.hint = f"pip install {name}"
    return missing
