"""A comparison of an engine with other runtimes on the same model, in speed and accuracy.

The race itself (worker processes, turns, verdicts) is :mod:`optdnn.runtime.racing.race`; this module prepares its inputs and
evaluates its results. The plain form of a :class:`Comparison` is the report of ``optdnn compare --json``, which the other forms
are drawn from.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from optdnn.calibration import input_specs
from optdnn.compare.divergence import Findings, find, finite
from optdnn.compare.gpu_rivals import (
    GPU_RIVALS,
    ONNXRUNTIME_CUDA,
    RESTRICTED,
    check_gpu_rival,
    onnxruntime_cuda,
    restricted,
    torch_candidates,
)
from optdnn.compare.rebuild import Progress, side_of
from optdnn.compiler import Build, build_verbose
from optdnn.config import AUTO, BuildOptions
from optdnn.custom import CustomOp
from optdnn.errors import EngineError, MissingDependency, UsageError
from optdnn.importers.asked import asked_model
from optdnn.importers.draws import draws
from optdnn.importers.model import open_model
from optdnn.importers.onnx import import_model
from optdnn.ir.evaluate import evaluate, promote
from optdnn.ir.export_onnx import export_model
from optdnn.ir.graph import Graph
from optdnn.loading import load
from optdnn.report.drawing import Drawing, draw
from optdnn.runtime.contexts.feeds import random_feeds
from optdnn.runtime.contexts.signature import Signature
from optdnn.runtime.cuda.measuring.expected import expected_cliffs
from optdnn.runtime.engine import Engine
from optdnn.runtime.file.format import read
from optdnn.runtime.measuring.accuracy import errors_between
from optdnn.runtime.measuring.bench import steps_of
from optdnn.runtime.measuring.machine import usable_cores
from optdnn.runtime.pictures.port import specs_of
from optdnn.runtime.program import Plain
from optdnn.runtime.racing.candidates import Candidate
from optdnn.runtime.racing.race import Race, race
from optdnn.temporary import temporary_folder
from optdnn.types import Array, TensorSpec, is_float

REFERENCE = "reference"
ORACLE = "the model in NumPy, float64"
"""The reference of errors unless another one is given."""
LIBRARIES: dict[str, tuple[str, ...]] = {"onnxruntime": ("fp32",), "openvino": ("fp32", "bf16", "fp16")}
"""Rival library -> the precisions it can be asked for."""


@dataclass(frozen=True)
class Subject:
    """The engine that is compared, and the facts of its build.

    ``model`` and ``original`` (the network as imported, before any pass) are None for an engine without its model. ``options``
    are those the engine was built with, as far as the graph depends on them. ``account`` records passes and tactics.
    """

    name: str
    engine: Path
    account: Mapping[str, Plain]
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


@dataclass
class Comparison:
    """The outcome. ``findings`` says where the numbers diverge, if that was requested."""

    subject: Subject
    race: Race
    feeds: Mapping[str, Array]
    feeds_from: str
    findings: Findings | None = None

    def versus(self) -> list[dict[str, Plain]]:
        """The subject's speedup over each other candidate that was measured."""
        rows = []
        for row in self.race.rows[1:]:
            found = self.race.versus(self.subject.name, row.name)
            if found is not None:
                range_ = [_round(v) for v in found.range]
                rows.append(
                    {"against": row.name, "speedup": _round(found.speedup), "range": range_, "verdict": found.verdict}
                )
        return rows

    def to_plain(self) -> dict[str, Plain]:
        """The report as plain data (strict JSON: numbers that are not finite are None)."""
        model = self.subject.model
        plain: dict[str, Plain] = finite(
            {
                "subject": self.subject.name,
                "model": None if model is None else model.name,
                "engine_bytes": self.subject.engine.stat().st_size,
                "inputs": {n: {"dtype": str(a.dtype), "shape": list(a.shape)} for n, a in self.feeds.items()},
                "inputs_from": self.feeds_from,
                **self.race.to_plain(),
                "versus": self.versus(),
                "build": dict(self.subject.account),
                **(self.findings.to_plain() if self.findings else {}),
            }
        )
        return plain


# ---------------------------------------------------------------- the subject


def build_subject(model: Path, options: BuildOptions, folder: Path, say: Progress) -> Subject:
    """Build ``model`` into an engine in ``folder``. The threads of the comparison hold for the choice of tactics too."""
    original = import_model(asked_model(model, options), shapes=options.shapes)
    build: Build = build_verbose(model, replace(options, threads=options.threads or usable_cores()), say)
    path = folder / f"{model.stem}.engine"
    build.engine.save(path)
    name = "optdnn" if options.precision == "fp32" else f"optdnn:{options.precision}"
    return Subject(name, path, build.report(), options, specs(original), model, original)


def load_subject(path: Path, model: Path | None, threads: int | None, **data: Any) -> Subject:
    """An engine file, with the model it was built from, if available.

    ``data`` are the build options for calibration (calib, calibrator, calib_cache, labels, images): for comparing an engine
    that was built with it layer by layer. Raises UsageError where the model is not the one that the engine was built from.
    """
    engine = load(path, threads=threads)
    made = engine.meta.get("options", {})
    shapes = {s.name: tuple(d if isinstance(d, int) else None for d in s.shape) for s in engine.inputs}
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
    account = {**engine.meta, "cliffs": expected_cliffs(engine.program)}
    if model is None:
        return Subject(path.name, path, account, options, engine.inputs)
    original = original_of(engine, model, str(path))
    return Subject(path.name, path, account, options, specs(original), model, original)


def original_of(engine: Engine, model: str | Path, name: str = "", custom_ops: Sequence[CustomOp] = ()) -> Graph:
    """The network that ``engine`` (a file of this ``name``) was built from, as imported, for its shapes. Raises UsageError where
    inputs or outputs of the model are not the engine's."""
    shapes = {s.name: tuple(d if isinstance(d, int) else None for d in s.shape) for s in engine.inputs}
    made = engine.meta.get("options", {})
    preprocess, postprocess = specs_of(engine)
    asked = BuildOptions(
        target="reference",
        preprocess=preprocess,
        postprocess=postprocess,
        **{n: made[n] for n in ("values", "sample", "random_seed") if n in made},
    )
    source = asked_model(model, asked)
    there = {v.name for v in source.proto.graph.input}  # without one of the inputs, it is told below
    shapes = {n: dims for n, dims in shapes.items() if n in there}
    original = import_model(source, shapes=shapes, custom_ops=custom_ops)
    original.profiles = engine.profiles
    wanted, got = [s.name for s in engine.inputs], [s.name for s in specs(original)]
    outputs = [original.op(i).outputs[0].name for i in original.outputs]
    if wanted != got or [s.name for s in engine.outputs] != outputs:
        raise UsageError(
            f"{model} is not what {name or 'the engine'} was built from: its inputs are {', '.join(got)} and its outputs "
            f"{', '.join(outputs)}, the engine has {', '.join(wanted)} and {', '.join(s.name for s in engine.outputs)}"
        )
    return original


def _asked(precision: str, data: Mapping[str, Any]) -> str:
    """The precision option of an existing engine. Its plan holds the outcome of "auto", which needs data only for int8."""
    return "fp32" if precision == AUTO and data.get("calib") is None else precision


def specs(graph: Graph) -> tuple[TensorSpec, ...]:
    """The inputs of a graph. Raises UsageError for one whose rank is not known."""
    for out in (graph.op(i).outputs[0] for i in graph.inputs):
        if out.type.shape is None:
            raise UsageError(f"input {out.name!r} has an unknown rank", hint=f"give it: --shape {out.name}=1x3x224x224")
    return tuple(input_specs(graph))


# ---------------------------------------------------------------- the others


def installed() -> list[str]:
    """The rival libraries that are installed. Raises MissingDependency where there is none."""
    found = [name for name in LIBRARIES if find_spec(name) is not None]
    if not found:
        raise MissingDependency(" or ".join(LIBRARIES), "cpu", "to compare with it")
    return found


def check_rivals(names: Sequence[str], *, has_model: bool, target: str = "cpu") -> None:
    """Refuse, before any work, rivals that could not take part.

    Raises UsageError for an unknown name, a precision that a library lacks or a missing model, and MissingDependency for an
    absent library.
    """
    if not names:
        raise UsageError("there is nothing to compare with", hint="--against onnxruntime,openvino")
    for name in names:
        library, _, precision = name.partition(":")
        if library in LIBRARIES:
            if precision and precision not in LIBRARIES[library]:
                raise UsageError(f"{library} cannot be asked for {precision}; it has {', '.join(LIBRARIES[library])}")
            if find_spec(library) is None:
                raise MissingDependency(library, "cpu", "to compare with it")
        elif name in GPU_RIVALS:
            check_gpu_rival(name, target)
        elif name != REFERENCE:
            if not Path(name).is_file():
                rivals = ", ".join([*LIBRARIES, *GPU_RIVALS, REFERENCE])
                raise UsageError(
                    f"--against {name!r} is neither {rivals} nor an engine file",
                    hint="a precision follows a colon, as in openvino:bf16",
                )
            continue
        if not has_model:
            raise UsageError(f"{name} needs the ONNX model that the engine was built from", hint="give --model FILE")


def candidates(names: Sequence[str], subject: Subject, folder: Path, say: Progress) -> list[Candidate]:
    """The subject and its rivals, ready to race."""
    found = [Candidate(subject.name, "engine", str(subject.engine))]
    shapes = _fixed_shapes(subject)
    model = _model_of_others(subject, folder, say)
    for name in names:
        library, _, precision = name.partition(":")
        if library in LIBRARIES:
            found.append(Candidate(name, library, str(model), precision or "fp32", shapes))
        elif name in RESTRICTED:
            assert subject.model is not None
            found.append(restricted(name, subject.model, subject.options, folder, say))
        elif name == ONNXRUNTIME_CUDA:
            assert model is not None
            found.append(onnxruntime_cuda(model, shapes))
        elif name == REFERENCE:
            say("build the NumPy reference")
            assert subject.model is not None
            asked = subject.options
            options = BuildOptions("reference", shapes=asked.shapes, opt_level=0, random_seed=asked.random_seed)
            build_verbose(subject.model, options).engine.save(folder / "reference.engine")
            found.append(Candidate(name, "engine", str(folder / "reference.engine")))
        else:
            _check_inputs(subject, name)
            found.append(Candidate(rival_name(name, [c.name for c in found]), "engine", name))
    return found


def _check_inputs(subject: Subject, rival: str) -> None:
    """Raise UsageError where an engine file has other inputs than the subject: it is of another network."""
    own = [s.name for s in subject.inputs]
    try:
        others = [s.name for s, _ in read(rival, verify=False).inputs]
    except EngineError:
        return  # a row of the comparison tells this
    if set(own) != set(others):
        raise UsageError(
            f"{rival} is an engine of another network: its inputs are {', '.join(others)}, "
            f"{subject.name} has {', '.join(own)}",
            hint="compare engines of one network",
        )


def _model_of_others(subject: Subject, folder: Path, say: Progress) -> Path | None:
    """The file for other libraries. Where the model has random operators, it is the network as imported, with the engine's draws:
    a library's own random numbers would be others, and no error of the engine."""
    if not subject.draws:
        return subject.model
    assert subject.model is not None
    assert subject.original is not None
    say(f"other libraries run {subject.model.name} with the engine's draws in place of its random operators")
    path = folder / subject.model.name
    export_model(subject.original, external_weights=True).save(path)
    return path


def rival_name(path: str, taken: Collection[str]) -> str:
    """The label of an engine file among others: its name, or its path where names are equal."""
    return next(name for name in (Path(path).name, path, f"{path} (again)") if name not in taken)


def _fixed_shapes(subject: Subject) -> dict[str, tuple[int, ...]]:
    """Input shapes to fix in the rivals too: those that the build was given and that are fully known."""
    static = {s.name: tuple(d for d in s.shape if isinstance(d, int)) for s in subject.inputs}
    ranks = {s.name: len(s.shape) for s in subject.inputs}
    return {n: static[n] for n in subject.options.shapes if n in static and len(static[n]) == ranks[n]}


# ---------------------------------------------------------------- the comparison


def compare(
    subject: Subject,
    against: Sequence[str],
    *,
    given: Mapping[str, Array] | None = None,
    sizes: Mapping[str, int] | None = None,
    seed: int = 0,
    baseline: str | None = None,
    error_reference: str | None = None,
    threads: int | None = None,
    rounds: int = 10,
    duration: float = 2.5,
    look_inside: bool = False,
    tolerance: float | None = None,
    torch: str | None = None,
    torch_as: Sequence[str] = ("torch",),
    with_energy: bool = False,
    say: Progress = lambda text: None,
) -> Comparison:
    """Race ``subject`` against ``against`` on ``given`` inputs (the rest random) and measure all errors.

    ``baseline`` (default: the first rival) is what speedups are over; ``error_reference`` is a candidate's name, or
    "reference" for the model evaluated in NumPy in float64 (the default if the model is available). ``duration`` is seconds
    per candidate over all ``rounds``. ``look_inside`` finds where the numbers part, node by node (see
    :mod:`optdnn.compare.divergence`), and which node is the first beyond ``tolerance``. ``torch`` is
    "PKG.MODULE:FACTORY" of a module that takes part as ``torch_as`` (one of
    :data:`optdnn.compare.gpu_rivals.TORCH_RIVALS`), at the subject's precision. ``with_energy`` also measures the energy of
    each candidate.

    Raises InputError for inputs that do not fit, UsageError for names that do not exist.
    """
    feeds = dict(given or {})
    missing = [s for s in subject.inputs if s.name not in feeds]
    profiles = () if subject.original is None else subject.original.profiles
    typical: Any = subject.account.get("sizes")
    made = random_feeds(subject.inputs, seed=seed, sizes=sizes, profiles=profiles, given=feeds, typical=typical)
    feeds = {**made, **feeds}
    signature = Signature(subject.inputs, ())
    found = signature.sizes(signature.arrays(feeds))
    other = random_feeds(subject.inputs, seed=seed + 1, sizes=found)
    feeds_from = "files" if not missing else f"random, seed {seed}" + (", and files" if given else "")
    if look_inside:
        _check_look(subject)
    with temporary_folder() as folder:
        field_ = candidates(against, subject, Path(folder), say)
        if torch is not None:
            field_ += torch_candidates(torch, subject.options.precision, torch_as)
        names = [c.name for c in field_]
        for name in (baseline, error_reference):
            if name is not None and name not in names and (name is baseline or name != REFERENCE):
                raise UsageError(f"the reference {name!r} is not one of {', '.join(names)}")
        outcome = race(
            field_,
            feeds,
            other_feeds=other,
            error_reference=error_reference if error_reference in names else None if subject.original else names[1],
            speedup_reference=baseline or (names[1] if len(names) > 1 else None),
            threads=threads,
            rounds=rounds,
            turn_s=duration / rounds,
            with_energy=with_energy,
            progress=say,
        )
    if subject.original is not None and error_reference in (None, REFERENCE):
        say("evaluate the model in NumPy")
        judge_errors(outcome, oracle(subject.original, feeds))
    if subject.draws:
        for name, row in zip(names, outcome.rows, strict=True):
            if name.partition(":")[0] == "openvino":
                row.max_abs_err = row.max_rel_err = None
                row.error = "it keeps uint32 as int32, and cannot draw the random numbers of the engine"
    result = Comparison(subject, outcome, feeds, feeds_from)
    if look_inside:
        result.findings = look(subject, feeds, tolerance, say, _engine_rival(against))
    return result


def _engine_rival(against: Sequence[str]) -> Path | None:
    """The first rival that is an engine file: its layers are compared."""
    return next((Path(n) for n in against if n.partition(":")[0] not in (*LIBRARIES, REFERENCE)), None)


def _check_look(subject: Subject) -> None:
    if subject.original is None:
        raise UsageError("to look inside, the ONNX model that the engine was built from is needed", hint="--model FILE")


def oracle(original: Graph, feeds: Mapping[str, Array]) -> dict[str, Array]:
    """The outputs of a network evaluated in NumPy in float64."""
    return evaluate(promote(original), {n: a.astype("float64") if is_float(a.dtype) else a for n, a in feeds.items()})


def judge_errors(outcome: Race, want: Mapping[str, Array]) -> None:
    """Replace the errors of a race by those against ``want``."""
    outcome.error_reference = ORACLE
    for row in outcome.rows:
        if row.outputs is not None:
            if len(row.outputs) != len(want):
                row.error = f"it has {len(row.outputs)} outputs, the model has {len(want)}"
                row.max_abs_err = row.max_rel_err = None
            else:
                row.max_abs_err, row.max_rel_err = errors_between(list(row.outputs.values()), list(want.values()))


def look(
    subject: Subject, feeds: Mapping[str, Array], tolerance: float | None, say: Progress, rival: Path | None = None
) -> Findings:
    """Where the optimized network on its target parts from the model, node by node; with ``rival``, another engine of the model,
    where the two part from each other."""
    assert subject.original is not None
    assert subject.model is not None
    say("look inside")
    mine = side_of(subject.engine, subject.model, subject.options, say)
    other, label = None, read(subject.engine, verify=False).precision
    if rival is not None:
        say(f"look inside {rival.name}")
        options = replace(
            load_subject(rival, subject.model, subject.options.threads).options, calib=subject.options.calib
        )
        other, label = side_of(rival, subject.model, options, say), f"{label}+{read(rival, verify=False).precision}"
    return find(subject.original, mine.graph, mine.engine_of, feeds, label, tolerance, other)


def drawn(outcome: Comparison, report: Mapping[str, Plain], say: Progress) -> Drawing:
    """The subject's network for the page of ``report``, with the times of its steps where it runs on this machine."""
    subject = outcome.subject
    engine = load(subject.engine, threads=subject.options.threads)
    measured = None
    if outcome.race.rows[0].error is None:
        say("measure the steps")
        measured = steps_of(engine, outcome.feeds, engine.context())
    return draw(engine.program_for(outcome.feeds), report, measured=measured)


# ---------------------------------------------------------------- plain data


def _round(value: float) -> float:
    return float(f"{value:.6g}")
