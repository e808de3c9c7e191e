"""Rivals of an engine: other libraries, other engines, and modules of PyTorch."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from importlib.util import find_spec
from pathlib import Path

from optdnn.compare.gpu_rivals import (
    GPU_RIVALS,
    ONNXRUNTIME_CUDA,
    RESTRICTED,
    check_gpu_rival,
    restricted,
)
from optdnn.compare.subject import Subject
from optdnn.compiler import build_verbose
from optdnn.config import BuildOptions, Progress
from optdnn.errors import EngineError, MissingDependency, UsageError, did_you_mean
from optdnn.ir.export_onnx import export_model
from optdnn.runtime.cuda.measuring.rivals import ONNXRUNTIME
from optdnn.runtime.file.format import read
from optdnn.runtime.racing.candidates import Candidate

REFERENCE = "reference"
LIBRARIES: dict[str, tuple[str, ...]] = {"onnxruntime": ("fp32",), "openvino": ("fp32", "bf16", "fp16")}
"""Rival library -> the precisions that it offers."""


def installed() -> list[str]:
    """The rival libraries that are installed. Raises MissingDependency if there are none."""
    found = [name for name in LIBRARIES if find_spec(name) is not None]
    if not found:
        raise MissingDependency(" or ".join(LIBRARIES), "cpu", "to compare with it")
    return found


def check_rivals(names: Sequence[str], *, has_model: bool, target: str = "cpu") -> None:
    """Refuse, before any work, rivals that cannot take part.

    Raises UsageError for an unknown name, a precision that a library lacks or a missing model, and MissingDependency for an
    absent library.
    """
    if not names:
        raise UsageError("there is nothing to compare with", hint="--against onnxruntime,openvino")
    for name in names:
        library, _, precision = name.partition(":")
        if library in LIBRARIES:
            if precision and precision not in LIBRARIES[library]:
                raise UsageError(f"{library} has no precision {precision}; it has {', '.join(LIBRARIES[library])}")
            if find_spec(library) is None:
                raise MissingDependency(library, "cpu", "to compare with it")
        elif name in GPU_RIVALS:
            check_gpu_rival(name, target)
        elif name != REFERENCE:
            if not Path(name).is_file():
                rivals = [*LIBRARIES, *GPU_RIVALS, REFERENCE]
                raise UsageError(
                    f"--against {name!r} is not one of {', '.join(rivals)}, and no engine file",
                    hint=did_you_mean(library, rivals) or "a precision follows a colon, as in openvino:bf16",
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
            found.append(Candidate(name, ONNXRUNTIME, str(model), "fp32", shapes))
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
    """Raise UsageError if an engine file has other inputs than the subject: it belongs to another network."""
    own = [s.name for s in subject.inputs]
    try:
        others = [s.name for s, _ in read(rival, verify=False).inputs]
    except EngineError:
        return  # a row of the comparison reports it
    if set(own) != set(others):
        raise UsageError(
            f"{rival} is an engine of another network: its inputs are {', '.join(others)}, "
            f"{subject.name} has {', '.join(own)}",
            hint="compare engines of one network",
        )


def _model_of_others(subject: Subject, folder: Path, say: Progress) -> Path | None:
    """The model file for other libraries. If the model has random operators, the file is the network as imported, with the engine's
    draws: a library's own random numbers would differ, and the difference is not the engine's error."""
    if not subject.draws:
        return subject.model
    assert subject.model is not None
    assert subject.original is not None
    say(f"other libraries run {subject.model.name} with the engine's draws in place of its random operators")
    path = folder / subject.model.name
    export_model(subject.original, external_weights=True).save(path)
    return path


def rival_name(path: str, taken: Collection[str]) -> str:
    """The label of an engine file among others: its name, or its path if names are equal."""
    return next(name for name in (Path(path).name, path, f"{path} (again)") if name not in taken)


def _fixed_shapes(subject: Subject) -> dict[str, tuple[int, ...]]:
    """Input shapes to fix in the rivals, too: shapes given to the build that are fully known."""
    static = {s.name: tuple(d for d in s.shape if isinstance(d, int)) for s in subject.inputs}
    ranks = {s.name: len(s.shape) for s in subject.inputs}
    return {n: static[n] for n in subject.options.shapes if n in static and len(static[n]) == ranks[n]}
