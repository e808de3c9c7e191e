"""Build options, checked in one place, for the Python API and the command line alike."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from optdnn.errors import UsageError

TARGETS = ("auto", "cpu", "reference", "simulate", "cuda", "cuda:sm_90a", "cuda:sm_80")
PRECISIONS = ("fp32", "bf16", "fp16")
IO_DTYPES = ("model", "fp32", "fp16", "bf16")
LIBRARY_TACTICS = ("auto", "openvino", "onnxruntime", "heuristic")


@dataclass(frozen=True)
class BuildOptions:
    """Everything that shapes an engine.

    ``shapes`` maps an input's name to its dimensions (None leaves one symbolic); ``threads`` None lets the build measure;
    ``workspace`` bounds scratch memory in bytes; ``budget`` bounds tuning in seconds. For GPUs,
    ``tactics="heuristic"`` trusts the cost model, and ``no_cubins`` keeps the recipes of kernels alone.
    """

    target: str = "auto"
    precision: str = "fp32"
    shapes: Mapping[str, tuple[int | None, ...]] = field(default_factory=dict)
    io_dtype: str = "model"
    opt_level: int = 3
    tactics: str = "auto"
    threads: int | None = None
    timing_cache: Path | None = None
    workspace: int | None = None
    budget: float | None = None
    dump: Path | None = None
    stop_after: str | None = None
    emit_onnx: Path | None = None
    debug: bool = False
    no_cubins: bool = False

    def __post_init__(self) -> None:
        _among("target", self.target, TARGETS)
        _among("precision", self.precision, PRECISIONS)
        _among("io-dtype", self.io_dtype, IO_DTYPES)
        _among("tactics", self.tactics, LIBRARY_TACTICS)
        gpu = self.target.partition(":")[0] in ("cuda", "simulate")
        if self.precision == "fp16" and not gpu:
            raise UsageError(
                f"precision fp16 is for GPUs, not for target {self.target!r}",
                hint="give --target cuda, or --precision bf16",
            )
        if (self.tactics not in ("auto", "heuristic") and gpu) or (self.tactics == "heuristic" and not gpu):
            raise UsageError(f"tactics {self.tactics!r} do not run on target {self.target!r}")
        if not 0 <= self.opt_level <= 3:
            raise UsageError(f"opt-level {self.opt_level} is not one of 0, 1, 2, 3")
        for name, value in (("threads", self.threads), ("workspace", self.workspace), ("budget", self.budget)):
            if value is not None and value <= 0:
                raise UsageError(f"{name} must be positive, not {value}")
        for name, dims in self.shapes.items():
            if any(d is not None and d < 0 for d in dims):
                raise UsageError(f"shape of {name!r} has a negative dimension: {dims}")


def _among(what: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise UsageError(f"{what} {value!r} is not one of {', '.join(allowed)}")
