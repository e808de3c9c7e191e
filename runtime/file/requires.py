"""The requirements of an engine, and the check that this machine meets them.

A requirement is text: ``package:NAME>=VERSION`` (an installed Python package; also ``==``, or no version at all) or
``cpu:FLAG`` (a processor feature, named as in Linux's /proc/cpuinfo, for example ``cpu:avx512_bf16``).
"""

from __future__ import annotations

import platform
import re
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path

from optdnn.custom import PREFIX
from optdnn.errors import EngineError, MissingDependency

_PACKAGE = re.compile(r"package:([A-Za-z0-9_.-]+)(?:(>=|==)([0-9][0-9A-Za-z.+-]*))?")
_CPU = re.compile(r"cpu:([a-z0-9_]+)")


def check_requires(requires: Iterable[str]) -> None:
    """Raise MissingDependency or EngineError for the first requirement that this machine does not meet."""
    for text in requires:
        if m := _PACKAGE.fullmatch(text):
            _check_package(*m.groups())
        elif text.startswith(PREFIX):
            continue  # optdnn.custom.check_custom has checked it
        elif m := _CPU.fullmatch(text):
            flags = cpu_flags()
            if flags is not None and m[1] not in flags:
                raise EngineError(
                    f"the engine was built for processors with {m[1]}, which this one lacks",
                    hint="rebuild it on this machine: optdnn build MODEL --target cpu",
                )
        else:
            raise EngineError(
                f"the engine requires {text!r}, which this version of optdnn does not know",
                hint="upgrade optdnn, or rebuild the engine with this version",
            )


def _check_package(name: str, relation: str | None, version: str | None) -> None:
    from importlib.metadata import PackageNotFoundError
    from importlib.metadata import version as installed_version

    try:
        installed = installed_version(name)
    except PackageNotFoundError:
        raise MissingDependency(name, "cpu", "by this engine") from None
    if version is None:
        return
    have, want = release(installed), release(version)
    if have != want if relation == "==" else have < want:
        raise EngineError(
            f"the engine needs {name} {relation} {version}; {installed} is installed",
            hint=f"pip install '{name}{relation}{version}', or rebuild the engine here",
        )


def release(version: str) -> tuple[int, ...]:
    """The numeric release of a version ("1.20.1+cpu" -> (1, 20, 1)), trailing zeros dropped."""
    m = re.match(r"\d+(?:\.\d+)*", version)
    numbers = [int(x) for x in m[0].split(".")] if m else []
    while numbers and not numbers[-1]:
        numbers.pop()
    return tuple(numbers)


@lru_cache(maxsize=1)
def cpu_flags() -> frozenset[str] | None:
    """Processor features by Linux's names; None if they are unknown."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    m = re.search(r"^(?:flags|Features)\s*:(.*)$", text, re.MULTILINE)
    return frozenset(m[1].split()) if m else None


EXACT_BYTES = frozenset({"avx512_vnni", "avx_vnni", "amx_int8"})
"""Features of x86 processors that accumulate products of bytes in 32 bits."""


def bytes_saturate() -> bool:
    """Whether this machine's processor is known to add two products of bytes in 16 bits, in the instructions that libraries use."""
    flags = cpu_flags()
    return platform.machine() in ("x86_64", "AMD64") and flags is not None and not flags & EXACT_BYTES
