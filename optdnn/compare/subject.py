"""The subject of a comparison: the engine of a model or of a file, and the model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from optdnn.build_result import Build
from optdnn.calibration import input_specs
from optdnn.compiler import build_verbose
from optdnn.config import AUTO, BuildOptions, Progress
from optdnn.custom import CustomOp
from optdnn.errors import ShapeError, UsageError
from optdnn.importers.asked import asked_model
from optdnn.importers.draws import draws
from optdnn.importers.model import Source, open_model
from optdnn.importers.onnx import import_model
from optdnn.ir.graph import Graph
from optdnn.loading import load
from optdnn.runtime.cuda.measuring.expected import expected_cliffs
from optdnn.runtime.engine import Engine
from optdnn.runtime.measuring.machine import usable_cores
from optdnn.runtime.pictures.port import specs_of
from optdnn.runtime.program import Plain
from optdnn.types import TensorSpec


@dataclass(frozen=True)
class Subject:
    """The engine that is compared, and the facts of its build.

    ``model`` and ``original`` (the network as imported, before any pass) are None for an engine without its model. ``options``
    are the engine's build options, as far as the graph depends on them. ``record`` has the build's passes and tactics.
    """

    name: str
    engine: Path
    record: Mapping[str, Plain]
    options: BuildOptions
    inputs: tuple[TensorSpec, ...]
    model: Path | None = None
    original: Graph | None = None

    @property
    def draws(self) -> bool:
        """Whether the model has random operators, which the build replaced by draws from its seed."""
        if self.model is None or self.original is None or self.options.random_seed is None:
            return False
        return draws(open_model(self.model))


def build_subject(model: Path, options: BuildOptions, folder: Path, say: Progress) -> Subject:
    """Build ``model`` into an engine in ``folder``. The threads of the comparison apply to the choice of tactics, too."""
    original = import_model(asked_model(model, options), shapes=options.shapes)
    build: Build = build_verbose(model, replace(options, threads=options.threads or usable_cores()), say)
    path = folder / f"{model.stem}.engine"
    build.engine.save(path)
    name = "optdnn" if options.precision == "fp32" else f"optdnn:{options.precision}"
    return Subject(name, path, build.report(), options, specs(original), model, original)


def load_subject(path: Path, model: Path | None, threads: int | None, **data: Any) -> Subject:
    """An engine file, with the model it was built from, if available.

    ``data`` are the build options for calibration (calib, calibrator, calib_cache, labels, images), for a comparison, layer by
    layer, of an engine that was built with such data. Raises UsageError if the engine was built from another model.
    """
    engine = load(path, threads=threads)
    made = engine.meta.get("options", {})
    shapes = _fixed(engine)
    options = BuildOptions(
        target=engine.target,
        precision=_asked(made.get("precision", engine.precision), data),
        shapes=shapes,
        io_dtype=made.get("io_dtype", "model"),
        opt_level=made.get("opt_level", 3),
        stop_after=made.get("stop_after"),
        random_seed=made.get("random_seed"),
        threads=threads,
        **{k: v for k, v in data.items() if v is not None},
    )
    if "preprocess" in made or "postprocess" in made:
        raise UsageError(
            f"{path} takes pictures or gives answers, which its rivals do not",
            hint="compare an engine of the model only",
        )
    record = {**engine.meta, "cliffs": expected_cliffs(engine.program)}
    if model is None:
        return Subject(path.name, path, record, options, engine.inputs)
    original = original_of(engine, model, str(path))
    return Subject(path.name, path, record, options, specs(original), model, original)


def original_of(engine: Engine, model: Source, name: str = "", custom_ops: Sequence[CustomOp] = ()) -> Graph:
    """The network that ``engine`` (a file of this ``name``) was built from, as imported, for its shapes. Raises UsageError if
    inputs or outputs of the model are not the engine's."""
    shapes = _fixed(engine)
    made = engine.meta.get("options", {})
    preprocess, postprocess = specs_of(engine)
    asked = BuildOptions(
        target="reference",
        preprocess=preprocess,
        postprocess=postprocess,
        **{n: made[n] for n in ("values", "sample", "random_seed") if n in made},
    )
    source = asked_model(model, asked)
    there = {v.name for v in source.proto.graph.input}  # a missing input is reported below
    shapes = {n: dims for n, dims in shapes.items() if n in there}
    try:
        original = import_model(source, shapes=shapes, custom_ops=custom_ops)
    except ShapeError as error:
        raise UsageError(
            f"{source.name} is not what {name or 'the engine'} was built from: at the engine's shapes, {error.message}"
        ) from error
    original.profiles = engine.profiles
    wanted, got = [s.name for s in engine.inputs], [s.name for s in specs(original)]
    outputs = [original.op(i).outputs[0].name for i in original.outputs]
    if wanted != got or [s.name for s in engine.outputs] != outputs:
        raise UsageError(
            f"{source.name} is not what {name or 'the engine'} was built from: its inputs are {', '.join(got)} and its outputs "
            f"{', '.join(outputs)}, the engine has {', '.join(wanted)} and {', '.join(s.name for s in engine.outputs)}"
        )
    return original


def _fixed(engine: Engine) -> dict[str, tuple[int | None, ...]]:
    """The shapes of an engine's inputs as a build takes them; None for a size that is not fixed."""
    return {s.name: tuple(d if isinstance(d, int) else None for d in s.shape) for s in engine.inputs}


def _asked(precision: str, data: Mapping[str, Any]) -> str:
    """The precision option of an existing engine. Its plan holds the outcome of "auto", which needs data only for int8."""
    return "fp32" if precision == AUTO and data.get("calib") is None else precision


def specs(graph: Graph) -> tuple[TensorSpec, ...]:
    """The inputs of a graph. Raises UsageError for an input of unknown rank."""
    for out in (graph.op(i).outputs[0] for i in graph.inputs):
        if out.type.shape is None:
            raise UsageError(f"input {out.name!r} has an unknown rank", hint=f"give it: --shape {out.name}=1x3x224x224")
    return tuple(input_specs(graph))
