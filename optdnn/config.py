"""Build options, checked in one place, for the Python API and the command line alike."""

from __future__ import annotations

import inspect
import operator
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import wraps
from math import isfinite
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import numpy as np

from optdnn.custom import CustomOp, custom_list
from optdnn.errors import UsageError, did_you_mean
from optdnn.ranges import InputShapes, input_shapes
from optdnn.target_name import BUILDABLE, TARGETS, TargetName

if TYPE_CHECKING:
    from optdnn.answer_spec import AnswerSpec
    from optdnn.image_spec import ImageSpec

Progress = Callable[[str], None]
"""Called with a line of text for each step of the work."""
GPU_PRECISIONS: Mapping[str, frozenset[str]] = {
    **dict.fromkeys(("sm_80", "sm_86", "sm_87"), frozenset({"tf32", "int8"})),
    **dict.fromkeys(
        ("sm_89", "sm_90", "sm_90a", "sm_100", "sm_103", "sm_110", "sm_120", "sm_121"),
        frozenset({"tf32", "int8", "fp8"}),
    ),
}
"""Architecture -> the types, besides 16-bit floats, that its tensor cores multiply."""
PRECISIONS = ("fp32", "tf32", "fp16", "bf16", "w8", "fp8", "int8", "w4", "w4a8")
"""All precisions of a node, the most accurate first."""
AUTO = "auto"
THREADS_LIMIT = 1024
"""Largest number of threads of an engine."""
SPLITS = (AUTO, "weights", "batch")
"""Ways to divide a network among several GPUs."""
DEVICES_LIMIT = 64
"""The most GPUs of one engine."""
STREAMS = 8
"""Largest number of streams."""
QUANTIZED = frozenset({"int8", "fp8"})
"""Precisions that need scales, and so calibration; "int8+fp16" means fp16 for operators without int8."""
ROUNDED_ROWS = "w4a8"
"""The precision of products with 4-bit weights whose kernels may round rows of activations to int8, each with its own scale."""
PACKED_WEIGHTS = frozenset({"w4", "w8", ROUNDED_ROWS})
"""Precisions of products with constant weights packed to 4 or 8 bits; activations are in a float precision."""
GPU_ONLY = frozenset({"tf32", "fp16", "fp8"})
"""Precisions that only GPUs have."""
ON_REQUEST = frozenset({"tf32", ROUNDED_ROWS})
"""Precisions that precision auto chooses only if the candidates name them."""
OF_PRODUCTS = QUANTIZED | PACKED_WEIGHTS
"""Precisions that need a float precision for all other operators: "int8+fp16", "w4+bf16"."""
CALIBRATORS = ("mse", "entropy", "percentile", "minmax")
IO_DTYPES = ("model", "fp32", "fp16", "bf16")
LIBRARY_TACTICS = ("auto", "openvino", "onnxruntime", "heuristic")
GPU_TACTICS = ("own", "cudnn", "cublaslt")
"""Providers of GPU kernels; a build can be restricted to some of them, separated by commas."""


@dataclass(frozen=True)
class BuildOptions:
    """All options that affect an engine. Raises UsageError for invalid values.

    ``shapes`` maps an input's name to its dimensions (None leaves one symbolic), or to ranges of them
    (:func:`optdnn.ranges.input_shapes` lists the forms). ``io_dtype`` is the element type of the floating-point inputs and
    outputs ("model": their own). With ``threads`` None, the build measures the best number. ``timing_cache``, ``dump`` (a folder)
    and ``emit_onnx`` are paths, given as text or path objects. ``stop_after`` names the last pass to run. ``workspace`` bounds
    the scratch memory of GPU kernels in bytes (the libraries of the cpu target have no such bound). ``budget`` bounds tuning in
    seconds. ``debug`` verifies the graph after every pass.

    For GPUs: ``tactics="heuristic"`` uses the cost model without measuring. "own", "cudnn" or "cublaslt" (or several, separated by
    commas) restrict to those kernels; "heuristic,cudnn" does so without measuring. ``row_invariant`` restricts to kernels that
    give a row of a batch the same bits for any batch size. ``no_cubins`` keeps only the recipes of kernels. ``strict`` refuses a
    network that would need steps on the CPU. ``streams`` is the number of streams on which independent steps may run side by
    side: 1, more (wherever a gain is predicted), or "auto" (if tuning measures that the network is faster; untuned, if a
    clear gain is predicted). With ``nearest_tactics``, later plans for further sizes use the tactics of the engine's plan for the
    nearest size (a tuned one, if there is one), unless the cost model disagrees. Without it, only the cost model chooses.

    ``devices`` is the number of GPUs that run the engine together. ``split`` is the way to divide the work among them: "weights"
    (:mod:`optdnn.passes.tensor_parallel`), "batch" (:mod:`optdnn.passes.batch_parallel`), or "auto": the split that is predicted to
    be faster. ``memory_limit`` is the largest number of bytes that the engine may use on a GPU for weights and one context;
    the build raises NotMet if it needs more.

    ``values`` maps input names to constant values: the engine has no such inputs, and sizes that depend on them are known.
    ``sample`` names the logits output of a language model: the engine samples the next token from it, and returns the token
    instead (:mod:`optdnn.importers.sampling` lists the inputs).

    ``random_seed`` is a number from 0 on. It allows random operators: they draw numbers that depend only on the seed, the
    node and the element's position, the same ones in every run and on every target (:mod:`optdnn.importers.draws`). Without it,
    random operators are refused.

    ``preprocess`` maps input names to :class:`optdnn.image_spec.ImageSpec` (or JSON of it): these inputs take
    pictures. ``postprocess`` maps output names to :class:`optdnn.answer_spec.AnswerSpec` (or text of it).

    For int8, fp8 and fp16: ``calib`` is the calibration data (see :func:`optdnn.calibration.data.open_data`), ``calibrator`` the
    method that chooses ranges, ``calib_cache`` a JSON file that keeps them, ``images`` the preparation of pictures (JSON text, or
    a JSON file). ``precision_map`` gives single nodes another precision (names or patterns, ``{"head*": "fp32"}``): a full name
    counts before patterns, and a later pattern before an earlier one.
    With ``strict_precision`` it is an error (NotMet) if a node does not run in the requested precision.

    With ``precision="auto"``, the build searches for the fastest engine within a bound on accuracy
    (:mod:`optdnn.precision.search`). ``calib`` is the data: one part is for the search, one for verification. ``labels`` are its
    labels, if the data does not hold them. ``metric`` is "top1", "mse", "cosine", "PKG.MODULE:F", or a function of outputs and
    labels. ``max_drop`` is the largest allowed loss in the metric's own unit (None: the metric's default). ``precision_map`` pins
    nodes to a precision. ``candidates`` are the precisions to choose from besides fp32 (None: all of the target's except tf32 and
    w4a8, which are used only on request). ``budget`` bounds the search in seconds.

    ``refit`` keeps the model in the engine, so that single weights can be changed later without it (:meth:`Engine.refit`).
    ``lock`` is a lockfile to write: it records everything that the build depends on. ``locked`` is a lockfile to build from: the
    build raises NotMet if the engine would not have the same bytes (:mod:`optdnn.lockfile`).
    """

    target: str = "auto"
    precision: str = "fp32"
    shapes: Mapping[str, Any] = field(default_factory=InputShapes)
    io_dtype: str = "model"
    opt_level: int = 3
    tactics: str = "auto"
    threads: int | None = None
    timing_cache: Path | None = None
    workspace: int | None = None
    memory_limit: int | None = None
    budget: float | None = None
    dump: Path | None = None
    stop_after: str | None = None
    emit_onnx: Path | None = None
    debug: bool = False
    no_cubins: bool = False
    row_invariant: bool = False
    nearest_tactics: bool = True
    strict: bool = False
    streams: int | str = AUTO
    devices: int = 1
    split: str = AUTO
    values: Mapping[str, Any] = field(default_factory=dict)
    sample: str | None = None
    random_seed: int | None = None
    preprocess: Mapping[str, ImageSpec] = field(default_factory=dict)
    postprocess: Mapping[str, AnswerSpec] = field(default_factory=dict)
    calib: Any = None
    calibrator: str = "mse"
    calib_cache: Path | None = None
    images: str | None = None
    precision_map: Mapping[str, str] = field(default_factory=dict)
    strict_precision: bool = False
    metric: Any = "top1"
    max_drop: float | None = None
    labels: Any = None
    candidates: Sequence[str] | None = None
    refit: bool = False
    lock: Path | None = None
    locked: Path | None = None
    custom_ops: tuple[CustomOp, ...] = ()

    def __post_init__(self) -> None:
        for name, normal in _NORMAL.items():
            object.__setattr__(self, name, normal(name, getattr(self, name)))
        arch = TargetName.parse(self.target).arch
        if arch and arch not in BUILDABLE:
            raise UsageError(f"there are no kernels for {arch}", hint=f"there are some for {', '.join(BUILDABLE)}")
        _among("target", self.target, TARGETS)
        _among("calibrator", self.calibrator, CALIBRATORS)
        _among("io-dtype", self.io_dtype, IO_DTYPES)
        if not 0 <= self.opt_level <= 3:
            raise UsageError(f"opt-level {self.opt_level} is not one of 0, 1, 2, 3")
        for name in ("threads", "workspace", "memory_limit", "budget"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise UsageError(f"{name} must be positive, not {value}")
        if self.random_seed is not None and self.random_seed < 0:
            raise UsageError(f"random_seed must be 0 or more, not {self.random_seed}")
        if self.threads is not None and self.threads > THREADS_LIMIT:
            raise UsageError(f"threads must be at most {THREADS_LIMIT}, not {self.threads}")
        self._check_precision()
        self._check_target()
        self._check_devices()
        if self.locked is not None and self.timing_cache is not None:
            raise UsageError("locked builds take the times of their lockfile", hint="leave --timing-cache out")
        if self.images is not None and self.preprocess:
            raise UsageError(
                "images describes how pictures are prepared outside of the engine, and preprocess inside of it",
                hint="leave --images out: calibration prepares pictures as the engine does",
            )

    @property
    def base_precision(self) -> str:
        """The float precision of all operators that are not quantized (auto: fp32 until the search ends)."""
        if self.precision == AUTO:
            return "fp32"
        name, _, base = self.precision.partition("+")
        return base or ("fp32" if name in OF_PRODUCTS else name)

    def _check_devices(self) -> None:
        """Raise UsageError for options that engines of several GPUs do not support."""
        if not 1 <= self.devices <= DEVICES_LIMIT:
            raise UsageError(f"devices must be 1 to {DEVICES_LIMIT}, not {self.devices}")
        _among("split", self.split, SPLITS)
        if self.devices == 1:
            return
        shapes: Any = self.shapes
        refused = {
            "calib": self.calib is not None, "precision auto": self.precision == AUTO, "emit_onnx": self.emit_onnx is not None,
            "custom_ops": bool(self.custom_ops), "streams": self.streams not in (1, AUTO),
            "ranges of shapes": bool(shapes.profiles),
            "refit": self.refit,
            "lock": self.lock is not None or self.locked is not None,
        }  # fmt: skip
        if self.target == "cpu":
            raise UsageError("devices are GPUs; target cpu has none", hint="--target cuda, reference or simulate")
        for name, given in refused.items():
            if given:
                raise UsageError(
                    f"an engine for {self.devices} devices has no {name}", hint="leave it out, or build for one"
                )

    def _check_precision(self) -> None:
        name, plus, base = self.precision.partition("+")
        _among("precision", name, (*PRECISIONS, AUTO))
        if plus and (name not in OF_PRODUCTS or base not in PRECISIONS or base in OF_PRODUCTS):
            raise UsageError(
                f"precision {self.precision!r} is not one of {', '.join(PRECISIONS)}, int8+fp16 and the like"
            )
        if name in PACKED_WEIGHTS and not plus and TargetName.parse(self.target).on_gpu:
            object.__setattr__(self, "precision", f"{name}+fp16")
        if self.precision == AUTO:
            if self.target != "reference" and self.calib is None:
                raise UsageError(
                    "precision auto needs data to judge accuracy by", hint="give --calib DATA.npz (inputs and labels)"
                )
            return
        for option, given in (
            ("metric", self.metric != "top1"),
            ("max-drop", self.max_drop is not None),
            ("labels", self.labels is not None),
            ("candidates", self.candidates is not None),
        ):
            if given:
                raise UsageError(f"--{option} is for precision auto, not {self.precision}", hint="--precision auto")

    def _check_target(self) -> None:
        restricted = set(self.tactics.split(",")) <= {"heuristic", *GPU_TACTICS}
        if not restricted:
            _among("tactics", self.tactics, (*LIBRARY_TACTICS, *GPU_TACTICS))
        own = self.precision == "fp32" or self.precision in PACKED_WEIGHTS
        asked = {self.precision.partition("+")[0], self.base_precision, *self.precision_map.values()}
        if self.target == "reference" and (not own or self.tactics != "auto"):
            what = f"tactics {self.tactics!r}" if own else f"precision {self.precision}"
            raise UsageError(
                f"target reference runs NumPy kernels in the model's own types; there is no {what}",
                hint=f"leave the option out, or give --target {'cuda' if restricted or asked & GPU_ONLY else 'cpu'}",
            )
        gpu = TargetName.parse(self.target).on_gpu
        if self.target == "reference" and (other := set(self.precision_map.values()) - PACKED_WEIGHTS - {"fp32"}):
            raise UsageError(
                f"target reference has no precision {min(other)}", hint="pin nodes to fp32, w4, w8 or w4a8"
            )
        if self.tactics in ("openvino", "onnxruntime") and gpu:
            raise UsageError(
                f"tactics {self.tactics!r} do not run on target {self.target!r}",
                hint=f"they are for --target cpu; GPUs have auto, heuristic, {', '.join(GPU_TACTICS)}",
            )
        if gpu or self.target == "auto":  # the build resolves auto, and checks the options again for that target
            return
        if only := sorted(GPU_ONLY.intersection(asked.union(self.candidates or ()))):
            raise UsageError(
                f"precision {only[0]} is for GPUs, not for target {self.target!r}",
                hint="give --target cuda, or --precision bf16" if only[0] == "fp16" else "give --target cuda",
            )
        if restricted:
            raise UsageError(
                f"tactics {self.tactics!r} do not run on target {self.target!r}",
                hint="they are for GPUs; target cpu has auto, openvino, onnxruntime",
            )
        if self.memory_limit is not None:
            raise UsageError(
                f"memory_limit is for GPUs, not for target {self.target!r}", hint="leave --memory-limit out"
            )
        if self.strict:
            raise UsageError(f"strict is for GPUs, not for target {self.target!r}", hint="leave --strict out")
        if self.streams not in (1, AUTO):
            raise UsageError(f"streams are for GPUs, not for target {self.target!r}", hint="leave --streams out")


def _among(what: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise UsageError(f"{what} {value!r} is not one of {', '.join(allowed)}", hint=did_you_mean(str(value), allowed))


def _precisions(name: str, table: Any) -> dict[str, str]:
    if not isinstance(table, Mapping):
        raise UsageError(f"precision_map must map names of nodes to precisions, not {table!r}")
    for node, precision in table.items():
        _among(f"precision of {node!r}", precision, PRECISIONS)
    return {str(k): v for k, v in table.items()}


def _candidates(name: str, given: Any) -> tuple[str, ...] | None:
    if given is None:
        return None
    if not isinstance(given, Iterable):
        raise UsageError(f"candidates must be a list of precisions, not {given!r}")
    names = given.split(",") if isinstance(given, str) else list(given)
    for one in names:
        _among("candidate", one, PRECISIONS)
    return tuple(p for p in PRECISIONS if p == "fp32" or p in names)


def _path(name: str, value: Any) -> Path | None:
    try:
        return None if value is None else Path(os.fsdecode(value))
    except TypeError:
        raise UsageError(f"{name} must be a path, not {value!r}") from None


def _streams(name: str, value: Any) -> int | str:
    if value == AUTO:
        return AUTO
    try:
        found = int(value) if isinstance(value, str) else operator.index(value)
    except (TypeError, ValueError):
        found = 0
    if not 1 <= found <= STREAMS:
        raise UsageError(f"streams must be auto or a number from 1 to {STREAMS}, not {value!r}")
    return found


def _integer(name: str, value: Any) -> int | None:
    try:
        if isinstance(value, bool):  # an index, too, but hardly meant as 1
            raise TypeError
        return None if value is None and name not in ("opt_level", "devices") else operator.index(value)
    except TypeError:
        raise UsageError(f"{name} must be an integer, not {value!r}") from None


def _text(name: str, value: Any) -> str | None:
    if not isinstance(value, str) and not (value is None and name == "stop_after"):
        raise UsageError(f"{name} must be text, not {value!r}")
    return value


def _flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool | np.bool_):
        raise UsageError(f"{name} must be True or False, not {value!r}")
    return bool(value)


def _number(name: str, value: Any) -> Any:
    if value is not None and (isinstance(value, bool) or not isinstance(value, Real)):
        raise UsageError(f"{name} must be a number, not {value!r}")
    if value is not None and not isfinite(value):
        raise UsageError(f"{name} must be a finite number, not {value}")
    return value


def _sample(name: str, given: Any) -> str | None:
    if given is not None and (not isinstance(given, str) or not given):
        raise UsageError(f"sample must name an output, not {given!r}")
    return given


def _values(name: str, given: Any) -> Mapping[str, Any]:
    if not isinstance(given, Mapping) or any(not isinstance(n, str) for n in given):
        raise UsageError(f"values must map names of inputs to arrays, not {given!r}")
    return given


def _specs(name: str, given: Any) -> dict[str, Any]:
    """The specs of ``preprocess`` and ``postprocess``; errors name the option."""
    port = "input" if name == "preprocess" else "output"
    if not isinstance(given, Mapping) or any(not isinstance(n, str) for n in given):
        raise UsageError(f"{name} must map names of {port}s to specs, not {given!r}")
    if not given:
        return {}
    from optdnn.answer_spec import AnswerSpec
    from optdnn.image_spec import ImageSpec

    kind: Any = ImageSpec if name == "preprocess" else AnswerSpec
    found = {}
    for key, spec in given.items():
        try:
            found[key] = kind.of(spec)
        except UsageError as error:
            raise UsageError(f"{name} of {port} {key!r}: {error.message}", hint=error.hint) from None
    return found


_NORMAL: Mapping[str, Callable[[str, Any], Any]] = {
    "custom_ops": lambda name, given: custom_list(given),
    **dict.fromkeys(("timing_cache", "dump", "emit_onnx", "calib_cache", "lock", "locked"), _path),
    **dict.fromkeys(("target", "precision", "tactics", "stop_after"), _text),
    **dict.fromkeys(
        ("debug", "no_cubins", "row_invariant", "nearest_tactics", "strict", "strict_precision", "refit"), _flag
    ),
    **dict.fromkeys(("budget", "max_drop"), _number),
    "shapes": lambda name, given: input_shapes(given),
    "values": _values,
    "sample": _sample,
    **dict.fromkeys(("preprocess", "postprocess"), _specs),
    "streams": _streams,
    **dict.fromkeys(("opt_level", "threads", "workspace", "memory_limit", "devices", "random_seed"), _integer),
    "precision_map": _precisions,
    "candidates": _candidates,
}
"""Option -> function(name, value) that returns the value in normal form, or raises UsageError."""


P = ParamSpec("P")
Result = TypeVar("Result")


def checked_keywords(function: Callable[P, Result]) -> Callable[P, Result]:
    """The function, with a UsageError for unknown keywords."""
    known = [p.name for p in inspect.signature(function).parameters.values() if p.kind is not p.POSITIONAL_ONLY]

    @wraps(function)
    def checked(*args: P.args, **kwargs: P.kwargs) -> Result:
        for name in kwargs:
            if name not in known:
                raise UsageError(
                    f"{function.__name__} has no option {name!r}",
                    hint=did_you_mean(name, known) or f"its options are {', '.join(known[1:])}",
                )
        return function(*args, **kwargs)

    return checked
