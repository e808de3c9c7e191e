"""``optdnn.verify``: is an engine right on this machine?

It runs every check of :mod:`optdnn.compare.checks` that applies to the target. Inputs are given or generated. If the model is
available, the whole engine is compared with it, too.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import inf
from typing import Any

import numpy as np

from optdnn.compare import checks
from optdnn.compare.checks import FAILED, PASSED, Check, Found, attempt, not_checked, passed, same_bits
from optdnn.compare.divergence import tolerance_of
from optdnn.compare.subject import original_of
from optdnn.config import Progress
from optdnn.custom import CustomOp
from optdnn.errors import InputError, OptdnnError, RunError, UsageError
from optdnn.importers.model import Source
from optdnn.ir.evaluate import evaluate, promote, promoted_feeds
from optdnn.ir.graph import Graph
from optdnn.loading import load
from optdnn.runtime.contexts.base import BaseContext
from optdnn.runtime.contexts.feeds import fractions, random_feeds
from optdnn.runtime.contexts.stepwise import Context
from optdnn.runtime.engine import Engine
from optdnn.runtime.measuring.accuracy import holds_nan
from optdnn.runtime.measuring.machine import machine, versions
from optdnn.runtime.notebook import table
from optdnn.runtime.program import Plain, Program
from optdnn.runtime.simulate.runner import SimulateContext
from optdnn.types import Array, is_float, is_int

RUNS = 5
"""Number of times that each set of inputs is run again."""


@dataclass(frozen=True)
class Case:
    """One set of inputs, with ``other`` inputs of the same shapes. ``made_up``: all of them are random."""

    label: str
    feeds: Mapping[str, Array]
    other: Mapping[str, Array]
    made_up: bool = False


@dataclass(frozen=True)
class Verification:
    """The result of :func:`verify`, check by check."""

    engine: str
    target: str
    precision: str
    simulated: bool
    inputs_from: str
    checks: tuple[Check, ...]

    @property
    def failed(self) -> tuple[Check, ...]:
        """The checks that failed."""
        return tuple(c for c in self.checks if c.status == FAILED)

    @property
    def ok(self) -> bool:
        """Whether no check failed."""
        return not self.failed

    def _repr_html_(self) -> str:
        """For notebooks."""
        head = f"{self.engine}: {'all checks passed' if self.ok else f'{len(self.failed)} checks failed'}"
        return table([(c.name, c.case, c.status, c.text) for c in self.checks], (head, "inputs", "outcome", ""))

    def to_plain(self) -> dict[str, Plain]:
        """The report of ``optdnn verify --json``."""
        return {
            **vars(self),
            "ok": self.ok,
            "checks": [c.to_plain() for c in self.checks],
            "machine": machine(),
            "versions": versions(),
        }


def verify(
    engine: str | os.PathLike[str] | Engine,
    model: Source | None = None,
    inputs: Mapping[str, Array] | None = None,
    *,
    sizes: Mapping[str, int] | None = None,
    seed: int = 0,
    tolerance: float | None = None,
    custom_ops: Sequence[CustomOp] = (),
    progress: Progress | None = None,
    **options: Any,
) -> Verification:
    """Check an engine (a file, or a loaded engine) on this machine. ``model`` is a path, the file's bytes or a ModelProto.

    ``runs``: it accepts the inputs. ``steps``: each launch on a GPU against its step's meaning in NumPy; each step of a CPU library
    against its own ONNX model in NumPy. ``one by one``: the CUDA graph against single launches; on other targets the program
    against the same program without shared memory. ``repeats``: the same bits again, after other inputs, too. ``memory``: results
    do not depend on the earlier contents of memory (NaN). ``rows``: the same bits for a row at any position, if the build
    promised that. ``model``: the whole against ``model`` in NumPy and float64, within ``tolerance`` (default: the precision's) of
    the change by other inputs.

    ``inputs`` are arrays by name; missing ones are random (``seed``). Without any, an engine for ranges of shapes is
    checked at the minimum, optimum and maximum of each profile, another engine at ``sizes`` of its symbols (default: the sizes of
    the build's measurements, otherwise 1). ``options`` are those of :func:`optdnn.load`, for a file. Raises EngineError for a
    file that cannot be loaded, InputError for inputs that do not fit, UsageError for a model that is not the engine's. Findings
    of checks are in the result; they are not raised.
    """
    say = progress or (lambda text: None)
    if tolerance is not None and not 0 <= tolerance < inf:
        raise UsageError(f"tolerance must be a number from 0 on, not {tolerance}")
    if isinstance(engine, Engine):
        if options:
            raise UsageError(f"{', '.join(options)} are options of loading a file; this engine is loaded")
        name, loaded = "", engine
    else:
        loaded = load(engine, custom_ops=custom_ops, **options)
        name = os.fspath(engine)
    original = None if model is None else original_of(loaded, model, name, custom_ops)
    found: list[Check] = []
    simulated = False
    for case in cases(loaded, inputs or {}, sizes, seed):
        one = _CaseChecks(loaded, case, original, tolerance, say)
        found += one.checks()
        simulated = simulated or one.simulated
    given = set(inputs or {})
    missing = [s.name for s in loaded.inputs if s.name not in given]
    origin = f"random, seed {seed}" + (", and given" if given else "") if missing else "given"
    return Verification(name or "engine", loaded.target, loaded.precision, simulated, origin, tuple(found))


# ---------------------------------------------------------------- inputs


def cases(engine: Engine, given: Mapping[str, Array], sizes: Mapping[str, int] | None, seed: int) -> Iterator[Case]:
    """The sets of inputs that an engine is checked on. Raises InputError for a given input that the engine does not have."""
    names = [s.name for s in engine.inputs]
    if unknown := sorted(given.keys() - set(names)):
        raise InputError(f"there is no input {unknown[0]!r}", hint=f"the inputs are {', '.join(names)}")
    if given or sizes or not engine.profiles:
        yield case_of(engine, given, sizes=sizes, seed=seed)
        return
    seen: list[dict[str, int]] = []
    for k, profile in enumerate(engine.profiles):
        for which in ("min", "opt", "max"):
            wanted = {name: int(getattr(r, which)) for name, r in profile.items()}
            if wanted not in seen:
                seen.append(wanted)
                label = which if len(engine.profiles) == 1 else f"profile {k} {which}"
                yield case_of(engine, {}, label, wanted, seed)


def case_of(
    engine: Engine,
    given: Mapping[str, Array],
    label: str = "",
    sizes: Mapping[str, int] | None = None,
    seed: int = 0,
) -> Case:
    """One set of inputs that the engine accepts, of ``sizes`` (default: the optimum, or the sizes of the build's measurements)."""
    typical = engine.meta.get("sizes")
    made = random_feeds(engine.inputs, seed=seed, sizes=sizes, profiles=engine.profiles, given=given, typical=typical)
    first = {s.name: given[s.name] if s.name in given else made[s.name] for s in engine.inputs}
    feeds = _accepted(engine, first, frozenset(given))
    drawn = random_feeds(engine.inputs, seed=seed + 1, sizes=_sizes(engine, feeds), profiles=engine.profiles)
    if any(is_float(a.dtype) and feeds[n] is not a for n, a in first.items()):
        drawn = fractions(drawn)
    other = {n: a if is_float(a.dtype) else feeds[n] for n, a in drawn.items()}
    if all(not is_float(a.dtype) for a in drawn.values()) and _runs(engine, drawn) is None:
        other = drawn
    return Case(label, feeds, other, made_up=not given)


def _sizes(engine: Engine, feeds: Mapping[str, Array]) -> dict[str, int]:
    """The size of each symbol that is a dimension of an input."""
    from optdnn.runtime.contexts.signature import Signature

    signature = Signature(engine.inputs, engine.outputs, engine.profiles)
    found = signature.sizes(signature.arrays(feeds))
    return {n: size for n, size in found.items() if n not in signature.derived}


def _accepted(engine: Engine, feeds: dict[str, Array], given: frozenset[str]) -> dict[str, Array]:
    """``feeds``; if the engine rejects them, with all made-up integers (axes, positions, lengths) set to 1, or to 0, or with
    made-up floats from 0 to 1.

    Raises InputError for given inputs that do not fit."""
    error = _runs(engine, feeds)
    made_up = [n for n, a in feeds.items() if is_int(a.dtype) and n not in given]
    for fill in (1, 0) if error is not None and made_up else ():
        tried = {n: np.full_like(a, fill) if n in made_up else a for n, a in feeds.items()}
        if _runs(engine, tried) is None:
            return tried
    if error is not None:
        tried = fractions({n: a for n, a in feeds.items() if n not in given})
        if _runs(engine, {**feeds, **tried}) is None:
            return {**feeds, **tried}
    if isinstance(error, InputError) and given:
        raise error
    return feeds


def _runs(engine: Engine, feeds: Mapping[str, Array]) -> RunError | None:
    """None if the engine accepts these inputs, otherwise the reason."""
    try:
        engine.run(feeds)
    except RunError as error:
        return error
    except OptdnnError:
        return None  # a fault of the engine: the checks report it
    return None


# ---------------------------------------------------------------- the checks of one set of inputs


class _CaseChecks:
    """The checks on one set of inputs."""

    def __init__(self, engine: Engine, case: Case, original: Graph | None, tolerance: float | None, say: Progress):
        self.engine, self.case, self.original, self.tolerance, self.say = engine, case, original, tolerance, say
        self.feeds, self.other = case.feeds, case.other
        self.simulated = False
        self.want: dict[str, Array] = {}
        self.context: BaseContext | None = None
        self.own: dict[str, Array] = {}

    def checks(self) -> list[Check]:
        """All checks, in order. After a failed run, the others are skipped."""
        every: dict[str, Callable[[], Found]] = {
            "runs": self.runs,
            "steps": self.steps,
            "one by one": self.one_by_one,
            "repeats": self.repeats,
            "memory": self.memory,
            "rows": self.rows,
            "model": self.model,
        }
        found: list[Check] = []
        for name, check in every.items():
            self.say(f"{self.case.label} {name}".strip())
            stopped = bool(found) and found[0].status == FAILED
            f = not_checked("it does not run") if stopped else attempt(check)
            found.append(Check(**vars(f), name=name, case=self.case.label))
        return found

    def runs(self) -> Found:
        self.want = self.engine.run(self.feeds)
        self.context, own = self.engine.context().innermost(self.feeds)
        self.own = dict(own)
        self.simulated = isinstance(self.context, SimulateContext)
        shown = ", ".join(f"{n} {a.dtype}{list(a.shape)}" for n, a in self.want.items())
        return passed(f"it gives {shown}")

    @property
    def program(self) -> Program:
        """The program that runs these inputs."""
        program = self.engine.program_for(self.feeds)
        return replace(program, dynamic=None, by_value=None, profiles=())

    def steps(self) -> Found:
        if self.simulated:
            return not_checked(
                "simulate runs the meanings of the steps: there is no other computation to compare them with"
            )
        if not isinstance(self.context, Context):
            return checks.launches(self.context, self.own, self.engine.precision)
        alone = checks.Stepwise(self.engine)
        _, read, made = alone.run(self.feeds)
        _, others, _ = alone.run(self.other)
        return checks.library_steps(self.engine.program, read, others, made)

    def one_by_one(self) -> Found:
        if self.simulated:
            return checks.simulated_apart(self.program, self.own, self.want)
        if not isinstance(self.context, Context):
            return checks.singly(self.context, self.own)
        runs = [checks.Stepwise(self.engine).run(self.feeds)[0]]
        ok = "the outputs are the same with every buffer in its own memory"
        return same_bits(runs, self.want, ok, "depend on which buffers share memory")

    def repeats(self) -> Found:
        context = self.engine.context()
        runs = [context.run(self.feeds)]
        for _ in range(RUNS - 1):
            context.run(self.other)
            runs.append({n: a.copy() for n, a in context.run(self.feeds).items()})
        return same_bits(
            runs, self.want, f"{len(runs)} runs, with others in between, give the same bits", "differ from run to run"
        )

    def memory(self) -> Found:
        if self.simulated:
            return checks.simulated_poisoned(self.program, self.own, self.want, RUNS)
        if not isinstance(self.context, Context):
            return checks.arena(self.context, self.own)
        return checks.poisoned_outputs(self.engine, self.feeds, self.want)

    def rows(self) -> Found:
        if not self.engine.meta.get("options", {}).get("row_invariant"):
            return not_checked("the build did not promise it (--row-invariant)")
        if self.simulated:
            return not_checked("simulate sums in NumPy's order: the promise is of the kernels on a GPU")
        sizes = _batches(self.engine, _sizes(self.engine, self.feeds))
        exact = None if self.original is None else partial(_exact, promote(self.original))
        tolerance = tolerance_of(self.engine.precision)
        return checks.rows(self.engine.run, self.feeds, self.want, sizes, exact, tolerance)

    def model(self) -> Found:
        if self.original is None:
            return not_checked("the model is not given (--model)")
        precision = self.engine.precision
        results = checks.exact_results(self.original, self.feeds, self.other, precision)
        found = checks.judge(self.want, *results, precision, self.tolerance)
        undefined = _undefined(self.want, results[0])
        if found.status == PASSED and (names := [n for n, a in results[0].items() if holds_nan(a)]):
            return replace(found, text=f"{found.text}; the model itself gives NaN in {', '.join(names)}")
        if found.status != FAILED or not undefined:
            return found
        # For example, a softmax of a row that is masked as a whole: attention on GPUs gives zeros there.
        exact, other, rounded = results
        got, exact, other = (_filled(r, undefined) for r in (self.want, exact, other))
        rest = checks.judge(got, exact, other, [_filled(r, undefined) for r in rounded], precision, self.tolerance)
        told = f"the model gives NaN in {', '.join(undefined)} at positions where the engine gives numbers"
        if rest.status == FAILED or not self.case.made_up:
            return replace(found, text=f"{rest.text if rest.status == FAILED else found.text}; {told}")
        return not_checked(f"{told}, for these random inputs: give --input")


def _undefined(got: Mapping[str, Array], exact: Mapping[str, Array]) -> dict[str, Array]:
    """Output -> the positions that the model leaves undefined (NaN), for outputs in which ``got`` has numbers there."""
    holes = {n: np.isnan(a) for n, a in exact.items() if is_float(a.dtype) and a.shape == got[n].shape}
    return {n: hole for n, hole in holes.items() if np.isfinite(got[n][hole]).any()}


def _filled(results: Mapping[str, Array], holes: Mapping[str, Array]) -> dict[str, Array]:
    """``results`` with zeros in the holes."""
    return {n: np.where(holes[n], 0, a) if n in holes else a for n, a in results.items()}


def _batches(engine: Engine, sizes: Mapping[str, int]) -> list[int]:
    """Further sizes of the batch (axis 0 of the first input) that an engine accepts, with its other symbols unchanged."""
    symbol = engine.inputs[0].shape[0] if engine.inputs and engine.inputs[0].shape else None
    if not isinstance(symbol, str):
        return []
    fitting = [
        p
        for p in engine.profiles
        if symbol in p and all(sizes[n] in r for n, r in p.items() if n in sizes and n != symbol)
    ]
    return sorted({n for p in fitting for n in (p[symbol].min, p[symbol].opt)})


def _exact(promoted: Graph, feeds: Mapping[str, Array]) -> dict[str, Array]:
    return evaluate(promoted, promoted_feeds(feeds))
