"""The distance of an engine's outputs from those of its model, on one set of inputs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from optdnn.calibration.data import open_data
from optdnn.calibration.images import pictures_of
from optdnn.compare.comparison import oracle
from optdnn.compare.divergence import finite
from optdnn.compare.subject import original_of, specs
from optdnn.compare.verification import case_of
from optdnn.config import BuildOptions
from optdnn.errors import OptdnnError, RunError
from optdnn.importers.asked import asked_model
from optdnn.importers.onnx import import_model
from optdnn.ir.graph import STRUCTURAL, Graph
from optdnn.precision.latency import flops_of
from optdnn.runtime.engine import Engine
from optdnn.runtime.measuring.accuracy import errors_between, holds_nan
from optdnn.runtime.program import Plain
from optdnn.types import Array, is_float

MOST_FLOPS = 5e10
"""Largest model, in floating-point operations, that is evaluated in NumPy: about twenty seconds of a slow core."""


@dataclass(frozen=True)
class OutputError:
    """Errors over all floating-point outputs; errors that are not finite are None.

    ``max_rel_err`` is the largest error over the output's largest magnitude, ``rms_rel_err`` the root mean square of the errors
    over the root mean square of the output. ``input_difference`` is ``max_rel_err`` between the engine's outputs on these and on
    other inputs (None: it does not accept the others). ``same_top`` is the fraction of ``rows`` rows of two-dimensional outputs
    with the largest element at the same position; None without such outputs. ``undefined`` names the outputs in which the model
    itself gives NaN: there, equal NaNs are no error. ``undefined_weights`` names the weights of that model that hold NaN.
    """

    max_abs_err: float | None
    max_rel_err: float | None
    rms_rel_err: float | None
    input_difference: float | None
    same_top: float | None
    rows: int
    inputs_from: str
    undefined: tuple[str, ...] = ()
    undefined_weights: tuple[str, ...] = ()

    def to_plain(self) -> dict[str, Plain]:
        """Strict JSON."""
        plain: dict[str, Plain] = finite(asdict(self))
        return plain


def output_error(engine: Engine, model: Path, options: BuildOptions) -> OutputError:
    """Compare ``engine`` with ``model`` in NumPy and float64: on the first batch of the calibration data, otherwise on random
    inputs.

    ``options`` are those of the build. Raises RunError, with the reason, if the two cannot be compared: a model
    of more than :data:`MOST_FLOPS`, or a model that accepts none of the inputs.
    """
    original = original_of(engine, model, custom_ops=options.custom_ops)
    given = _calibration_batch(original, options)
    case = case_of(engine, given)
    work = _flops(model, case.feeds, options)
    if work > MOST_FLOPS:
        raise RunError(
            f"the model has {work / 1e9:.0f} GFLOP, too many to evaluate it in NumPy",
            hint=f"optdnn verify ENGINE --model {model}",
        )
    got = engine.run(case.feeds)
    # The model's own inputs: the engine's may be of another element type.
    dtypes = {s.name: s.dtype for s in specs(original)}
    want = oracle(original, {n: a.astype(dtypes[n]) for n, a in case.feeds.items()})
    pairs = [(np.asarray(got[n], np.float64), np.asarray(want[n], np.float64)) for n in want if is_float(got[n].dtype)]
    absolute, relative = errors_between(list(got.values()), list(want.values()))
    rows = [(a, b) for a, b in pairs if a.ndim == 2 and a.shape[1] > 1]
    same = [float((a.argmax(axis=1) == b.argmax(axis=1)).mean()) for a, b in rows if a.size]
    undefined = tuple(n for n, a in want.items() if holds_nan(a))
    return OutputError(
        absolute,
        relative,
        max((_rms(a - b) / (_rms(b) or 1.0) for a, b in pairs if a.size and a.shape == b.shape), default=None),
        _difference(engine, case.other, got),
        float(np.mean(same)) if same else None,
        max((len(a) for a, _ in rows), default=0),
        "the first batch of the calibration data" if given else "random inputs, seed 0",
        undefined,
        _weights_with_nan(original) if undefined else (),
    )


def _weights_with_nan(original: Graph) -> tuple[str, ...]:
    found = [(op, original.constant_value(op.value)) for op in original.of_kind("Constant")]
    return tuple(op.short_name for op, value in found if value is not None and holds_nan(value))


def _calibration_batch(original: Graph, options: BuildOptions) -> dict[str, Array]:
    """The first batch of the build's calibration data; empty without such data."""
    if options.calib is None:
        return {}
    images = pictures_of(options)
    batches = open_data(options.calib, specs(original), images, original.profiles).batches()
    return dict(next(iter(batches), {}))


def _flops(model: Path, feeds: Mapping[str, Array], options: BuildOptions) -> float:
    shapes = {n: a.shape for n, a in feeds.items()}
    graph = import_model(asked_model(model, options), shapes=shapes, custom_ops=options.custom_ops)
    return sum(flops_of(graph, op) for op in graph.ops() if op.kind not in STRUCTURAL)


def _difference(engine: Engine, other: Mapping[str, Array], got: Mapping[str, Array]) -> float | None:
    try:
        return errors_between(list(engine.run(other).values()), list(got.values()))[1]
    except OptdnnError:
        return None


def _rms(x: Array) -> float:
    return float(np.sqrt(np.mean(np.square(x))))
