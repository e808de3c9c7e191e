"""The build options that an engine file may contain, for the plans that are made from it after loading.

An engine is untrusted input. Only the options listed here are read from it, each with its type and range. None of them names a
file, starts a process or sets a number of threads. If the build used such an option, the engine makes no further plans.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from optdnn.config import AUTO, GPU_TACTICS, IO_DTYPES, OF_PRODUCTS, PRECISIONS, STREAMS
from optdnn.errors import EngineError
from optdnn.target_name import GPUS

WORKSPACE_LIMIT = 1 << 48
"""The most bytes of scratch memory that a file can ask for."""
_TARGET = re.compile(rf"(cuda:(sm_[0-9]{{2,3}}a?|{'|'.join(GPUS)})|simulate)")
_PASS = re.compile(r"[a-z][a-z0-9_]{0,63}")


def _flag(value: Any) -> bool:
    return type(value) is bool


def _number(low: int, high: int) -> Callable[[Any], bool]:
    return lambda value: type(value) is int and low <= value <= high


def _precision(value: Any) -> bool:
    if type(value) is not str:
        return False
    name, plus, base = value.partition("+")
    floats = set(PRECISIONS) - OF_PRODUCTS
    return name in PRECISIONS and (not plus or (name in OF_PRODUCTS and base in floats))


def _tactics(value: Any) -> bool:
    return value == AUTO or (type(value) is str and set(value.split(",")) <= {"heuristic", *GPU_TACTICS})


PLAN_OPTIONS: Mapping[str, Callable[[Any], bool]] = {
    "io_dtype": lambda value: type(value) is str and value in IO_DTYPES,
    "nearest_tactics": _flag,
    "no_cubins": _flag,
    "opt_level": _number(0, 3),
    "precision": _precision,
    "row_invariant": _flag,
    "stop_after": lambda value: type(value) is str and _PASS.fullmatch(value) is not None,
    "streams": lambda value: value == AUTO or _number(1, STREAMS)(value),
    "strict": _flag,
    "strict_precision": _flag,
    "tactics": _tactics,
    "target": lambda value: type(value) is str and _TARGET.fullmatch(value) is not None,
    "workspace": _number(1, WORKSPACE_LIMIT),
}
"""Option of :class:`optdnn.config.BuildOptions` -> whether a value of it may come from a file."""


def check_plans(target: str) -> None:
    """Raises EngineError for a target whose engines hold all their plans."""
    if _TARGET.fullmatch(target) is None:
        raise EngineError(f"further plans are made only for GPUs, not for target {target!r:.60}")


def check_plan_options(options: Mapping[str, Any], target: str) -> None:
    """Raises EngineError for an option that an engine for ``target`` may not contain, or for a value outside of its range."""
    for name, value in options.items():
        allowed = PLAN_OPTIONS.get(name)
        if allowed is None:
            raise EngineError(
                f"the engine asks for the build option {name!r:.60}, which no engine may set",
                hint="rebuild the engine with this version",
            )
        if not allowed(value):
            raise EngineError(f"the engine sets the build option {name!r} to {value!r:.60}, which is out of its range")
    if options.get("target", target) != target:
        raise EngineError(f"the engine is for target {target!r:.60}; plans would be made for {options['target']!r:.60}")
