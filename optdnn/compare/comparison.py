"""A comparison of an engine with other runtimes on the same model, in speed and accuracy.

The race itself (worker processes, turns, verdicts) is :mod:`optdnn.runtime.racing.race`; this module prepares its inputs and
evaluates its results. The plain form of a :class:`Comparison` is the report of ``optdnn compare --json``, the source of the other
forms.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from optdnn.compare.divergence import Findings, find_divergences, finite
from optdnn.compare.gpu_rivals import torch_candidates
from optdnn.compare.rebuild import side_of
from optdnn.compare.rivals import LIBRARIES, REFERENCE, candidates
from optdnn.compare.subject import Subject, load_subject
from optdnn.config import Progress
from optdnn.errors import UsageError, did_you_mean
from optdnn.ir.evaluate import evaluate, promote, promoted_feeds
from optdnn.ir.graph import Graph
from optdnn.loading import load
from optdnn.report.drawing import Drawing, draw
from optdnn.runtime.contexts.feeds import random_feeds
from optdnn.runtime.contexts.signature import Signature
from optdnn.runtime.file.format import read
from optdnn.runtime.measuring.accuracy import errors_between
from optdnn.runtime.measuring.bench import steps_of
from optdnn.runtime.program import Plain
from optdnn.runtime.racing.race import Race, race
from optdnn.temporary import temporary_folder
from optdnn.types import Array

ORACLE = "the model in NumPy, float64"
"""The reference of errors unless another one is given."""


@dataclass
class Comparison:
    """The outcome. ``findings`` tells where the numbers diverge, if that was requested."""

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
                "build": dict(self.subject.record),
                **(self.findings.to_plain() if self.findings else {}),
            }
        )
        return plain


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

    ``baseline`` (default: the first rival) is the denominator of speedups; ``error_reference`` is a candidate's name, or
    "reference" for the model evaluated in NumPy in float64 (the default if the model is available). ``duration`` is seconds
    per candidate over all ``rounds``. ``look_inside`` finds where the numbers diverge, node by node (see
    :mod:`optdnn.compare.divergence`), and the first node beyond ``tolerance``. ``torch`` is
    "PKG.MODULE:FACTORY" of a module that takes part as ``torch_as`` (one of
    :data:`optdnn.compare.gpu_rivals.TORCH_RIVALS`), at the subject's precision. ``with_energy`` also measures the energy of
    each candidate.

    Raises InputError for inputs that do not fit, UsageError for names that do not exist.
    """
    feeds, other, feeds_from = _feeds(subject, given or {}, sizes, seed)
    if look_inside and subject.original is None:
        raise UsageError(
            "--layers and --bisect need the ONNX model that the engine was built from", hint="--model FILE"
        )
    with temporary_folder() as folder:
        field_ = candidates(against, subject, Path(folder), say)
        if torch is not None:
            field_ += torch_candidates(torch, subject.options.precision, torch_as)
        names = [c.name for c in field_]
        for name in (baseline, error_reference):
            if name is not None and name not in names and (name is baseline or name != REFERENCE):
                raise UsageError(
                    f"{name!r} is not one of the candidates {', '.join(names)}", hint=did_you_mean(name, names)
                )
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
        result.findings = findings_of(subject, feeds, tolerance, say, _engine_rival(against))
    return result


def _feeds(
    subject: Subject, given: Mapping[str, Array], sizes: Mapping[str, int] | None, seed: int
) -> tuple[dict[str, Array], dict[str, Array], str]:
    """The inputs (random ones if none are given), other inputs of the same sizes, and the origin of the first ones in words."""
    profiles = () if subject.original is None else subject.original.profiles
    typical: Any = subject.record.get("sizes")
    made = random_feeds(subject.inputs, seed=seed, sizes=sizes, profiles=profiles, given=given, typical=typical)
    feeds = {**made, **given}
    signature = Signature(subject.inputs, ())
    other = random_feeds(subject.inputs, seed=seed + 1, sizes=signature.sizes(signature.arrays(feeds)))
    if all(s.name in given for s in subject.inputs):
        return feeds, other, "files"
    return feeds, other, f"random, seed {seed}" + (", and files" if given else "")


def _engine_rival(against: Sequence[str]) -> Path | None:
    """The first rival that is an engine file; its layers are compared."""
    return next((Path(n) for n in against if n.partition(":")[0] not in (*LIBRARIES, REFERENCE)), None)


def oracle(original: Graph, feeds: Mapping[str, Array]) -> dict[str, Array]:
    """The outputs of a network evaluated in NumPy in float64."""
    return evaluate(promote(original), promoted_feeds(feeds))


def judge_errors(outcome: Race, want: Mapping[str, Array]) -> None:
    """Replace the errors of a race by the errors against ``want``."""
    outcome.error_reference = ORACLE
    for row in outcome.rows:
        if row.outputs is not None:
            if len(row.outputs) != len(want):
                row.error = f"it has {len(row.outputs)} outputs, the model has {len(want)}"
                row.max_abs_err = row.max_rel_err = None
            else:
                row.max_abs_err, row.max_rel_err = errors_between(list(row.outputs.values()), list(want.values()))


def findings_of(
    subject: Subject, feeds: Mapping[str, Array], tolerance: float | None, say: Progress, rival: Path | None = None
) -> Findings:
    """Where the optimized network on its target diverges from the model, node by node; with ``rival``, another engine of the model,
    where the two engines diverge from each other."""
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
    return find_divergences(subject.original, mine.graph, mine.engine_of, feeds, label, tolerance, other)


def drawn(outcome: Comparison, report: Mapping[str, Plain], say: Progress) -> Drawing:
    """The subject's network for the page of ``report``, with the times of its steps if it runs on this machine."""
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
