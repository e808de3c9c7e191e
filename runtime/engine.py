"""The engine: a prepared program, and the public ways to run it."""

from __future__ import annotations

import json
import os
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from optdnn.config import THREADS_LIMIT
from optdnn.custom import CustomOp, check_custom, custom_list
from optdnn.errors import EngineError, InputError, InternalError, RankError, UsageError, machine_errors
from optdnn.ranges import Profile
from optdnn.runtime.contexts.asynchronous import Callback, Runs
from optdnn.runtime.contexts.base import CONTRADICTS, BaseContext, Runner
from optdnn.runtime.contexts.signature import show
from optdnn.runtime.file.atomic import write_atomic
from optdnn.runtime.file.json_file import read_json
from optdnn.runtime.file.requires import check_requires
from optdnn.runtime.file.signatures import SignedBy, signers
from optdnn.runtime.file.validate import validate
from optdnn.runtime.notebook import Report, table
from optdnn.runtime.plans.by_value import open_runner
from optdnn.runtime.program import Plain, Program, target_of
from optdnn.runtime.ranks.place import place_of
from optdnn.runtime.ranks.runner import RanksRunner, of_one_rank
from optdnn.runtime.steps.executor import Examine, LoadOptions, Planner
from optdnn.types import Array, TensorSpec, dtype_name

Refitter = Callable[..., Any]
"""``refitter(program, model, weights, adapters, calib=, custom_ops=, progress=)`` returns the record of a build, with its
engine."""


class Engine:
    """A compiled network, ready to run. Made by ``optdnn.build`` or ``optdnn.load``; safe to share between threads."""

    def __init__(self, program: Program, *, threads: int | None = None, options: LoadOptions | None = None):
        """Prepare ``program``; ``threads`` overrides the build's number of threads; ``options`` are :func:`load`'s.

        Raises EngineError if it is for another target or machine, MissingDependency if a library that it needs is missing.
        """
        options = options or LoadOptions(threads)
        n = options.threads
        if n is not None and (not isinstance(n, int) or not 1 <= n <= THREADS_LIMIT):
            raise UsageError(f"threads must be 1 to {THREADS_LIMIT}, not {n!r}")
        self._custom = check_custom(program.requires, options.custom_ops)  # kept alive with the engine
        self._options = options
        if not options.simulate and not options.defer:
            check_requires(program.requires)
        validate(program)
        self.program = program
        self._runner = open_engine(program, options)
        self._idle: deque[BaseContext] = deque([] if options.defer else [self.context()])
        self._runs = Runs()
        self.make_report: Callable[[Engine], Mapping[str, Plain]] | None = None
        """Set by the build; creates :attr:`report`."""
        self.refitter: Refitter | None = None
        """Set if the compiler is available; rebuilds the engine for :meth:`refit`."""

    @property
    def inputs(self) -> tuple[TensorSpec, ...]:
        """Name, dtype and shape of each input, in ONNX order."""
        return self._runner.signature.inputs

    @property
    def outputs(self) -> tuple[TensorSpec, ...]:
        """Name, dtype and shape of each output, in ONNX order."""
        return self._runner.signature.outputs

    @property
    def profiles(self) -> tuple[Profile, ...]:
        """The ranges of sizes that the engine accepts, one for each profile. Without profiles it accepts all sizes."""
        return self._runner.signature.profiles

    @property
    def target(self) -> str:
        return self.program.target

    @property
    def precision(self) -> str:
        return self.program.precision

    @property
    def meta(self) -> Mapping[str, Plain]:
        """The deterministic facts of the build: options, passes, tactics, provenance."""
        return self.program.meta

    @property
    def facts(self) -> tuple[Mapping[str, Plain], ...]:
        """Per step: library, version, precision, threads, read back from the library."""
        return self._runner.facts

    @property
    def executors(self) -> tuple[Any, ...]:
        """The executor of each step, for targets whose programs run step by step; none for others."""
        return self._runner.executors

    @property
    def report(self) -> Mapping[str, Plain] | None:
        """The steps and measurements of the build, with wall times and the machine; None for an engine that was loaded."""
        return None if self.make_report is None else Report(self.make_report(self))

    def keep(self, custom_ops: Sequence[CustomOp]) -> None:
        """Keep references to the custom operators that the program runs: it does not load without them."""
        self._custom = tuple(custom_ops)
        requirements = [op.requirement for op in self._custom]
        self.program.requires = (*(r for r in self.program.requires if r not in requirements), *requirements)

    def context(self) -> BaseContext:
        """A new context: one thread's own state, with reusable output buffers through ``run(..., out=...)``."""
        with machine_errors("the memory of a run", EngineError):
            return self._runner.context()

    def run(self, feeds: Mapping[str, Any] | Any, out: Mapping[str, Any] | None = None) -> dict[str, Array]:
        """Run once: input name -> array gives output name -> array, in ONNX output order. Thread-safe.

        ``feeds`` may be the array itself if there is one input. ``out`` may map outputs to arrays that receive (and are) these
        results; all others are new arrays.
        Raises InputError for inputs that do not fit, RunError if running fails.
        """
        # A pool of contexts, as many as ever ran at once; deque's pop and append are atomic.
        idle = self._idle  # a refit makes another pool: contexts with old weights never get into it
        try:
            context = idle.pop()
        except IndexError:
            context = self.context()
        try:
            return context.run(feeds, out)
        finally:
            idle.append(context)

    def run_async(
        self, feeds: Mapping[str, Any] | Any, callback: Callback | None = None, user_data: object = None
    ) -> Future[dict[str, Array]]:
        """Begin a run in a separate thread. The future returns the result or error of :meth:`run`.

        ``callback(results, user_data, error)`` is called in that thread: with the results and "", or with None and the error's
        text. The arrays must not change until then.
        At most :data:`optdnn.runtime.contexts.asynchronous.THREADS` runs are in flight at once.
        """
        return self._runs.start(lambda: self.run(feeds), callback, user_data)

    async def run_awaitable(self, feeds: Mapping[str, Any] | Any) -> dict[str, Array]:
        """:meth:`run` for an event loop, which continues meanwhile: ``results = await engine.run_awaitable(feeds)``."""
        import asyncio

        return await asyncio.wrap_future(self.run_async(feeds))

    def program_for(self, feeds: Mapping[str, Any]) -> Program:
        """The program that runs these inputs: for an engine with several plans, the one for their sizes (and for the values of
        shape inputs), which is created if it does not exist yet. Raises like :meth:`run`."""
        return self._runner.program_for(self._runner.signature.named(feeds))

    def __call__(self, *arrays: Any, **named: Any) -> Array | tuple[Array, ...]:
        """Run on inputs by position or by name; one output gives the array, several a tuple. Raises like :meth:`run`."""
        takes = f"the engine takes {show(self.inputs)}"
        if len(arrays) == 1 and isinstance(arrays[0], Mapping):
            raise InputError(f"the call takes arrays, not a mapping; {takes}", hint="engine.run({NAME: array})")
        if len(arrays) + len(named) != len(self.inputs):
            raise InputError(f"{len(arrays) + len(named)} inputs given; {takes}")
        feeds = {s.name: a for s, a in zip(self.inputs, arrays, strict=False)}
        if twice := sorted(feeds.keys() & named.keys()):
            raise InputError(f"input {twice[0]!r} is given by position and by name; {takes}")
        results = tuple(self.run(feeds | named).values())
        return results[0] if len(results) == 1 else results

    def refit(
        self,
        weights: Mapping[str, Any] | None = None,
        *,
        model: Any = None,
        adapters: Mapping[str, Sequence[Any]] | None = None,
        calib: Any = None,
        progress: Callable[[str], None] | None = None,
    ) -> None:
        """Give the engine new weights, in place. Tactics stay, so nothing is measured, and its speed is that of a new build.

        ``weights`` maps names of the model's initializers to arrays of their shapes and types. ``model`` is the ONNX model (a path,
        bytes or a ModelProto) with all other weights; None: the model in the engine (``refit=True`` at the build).
        ``adapters`` maps names to low-rank adapters ``(A, B)`` or ``(A, B, scale)``: ``W + scale * (B @ A)`` replaces W. They
        are not added to the model in the engine, so ``engine.refit()`` removes them. ``calib`` is calibration data for
        the new weights; without it, a calibrated engine keeps its ranges.

        Runs in flight, and contexts that were created before, finish with the old weights.
        Raises UsageError for arrays that do not fit, UnsupportedError for another network (it names the nodes), EngineError for an
        engine that does not record enough. After an error the engine is unchanged.
        """
        if self.program.ranks is not None:
            raise EngineError("an engine of several devices takes no other weights", hint="build it again")
        if self.refitter is None:
            raise EngineError(
                "this engine takes no other weights", hint="load it with optdnn.load, where onnx is installed"
            )
        build = self.refitter(
            self.program, model, weights, adapters, calib=calib, custom_ops=self._custom, progress=progress
        )
        program = build.engine.program
        runner = open_runner(program, self._options)
        self.make_report, self._runner, self._idle, self.program = build.engine.make_report, runner, deque(), program

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the engine file, and, from a build, PATH.report.json next to it (:attr:`report`); each atomically.

        The engine's bytes are the same for the same model, options and timing cache. Facts that may differ are in the report.
        Raises OutputError if a file cannot be written.
        """
        from optdnn.runtime.file.format import write

        if not isinstance(path, (str, os.PathLike)):
            raise UsageError(f"an engine is saved to a file, not to {type(path).__name__}", hint="give a path")
        write(self.program, path)
        report = self.report
        if report is not None:
            text = json.dumps(report, indent=1, ensure_ascii=False, default=str)
            write_atomic(report_path(path), [(text + "\n").encode()])

    def __reduce__(self) -> NoReturn:
        raise UsageError(
            "an engine is neither pickled nor copied: it holds what its libraries opened",
            hint="save it, and optdnn.load the file in each process; threads of one process share it",
        )

    def __repr__(self) -> str:
        head = f"Engine({self.target}, {self.precision}, {_steps(self.program)}"
        return f"{head}: {show(self.inputs)} -> {show(self.outputs)})"

    def _repr_html_(self) -> str:
        """For notebooks."""
        head = f"Engine: {self.target}, {self.precision}, {_steps(self.program)}"
        ports = [("input", s) for s in self.inputs] + [("output", s) for s in self.outputs]
        return table(
            [(kind, s.name, dtype_name(s.dtype), list(s.shape)) for kind, s in ports], (head, "name", "type", "shape")
        )


def _steps(program: Program) -> str:
    n = len(program.steps)
    return f"{n} step{'s' * (n != 1)}"


def open_engine(program: Program, options: LoadOptions) -> Runner:
    """Prepare any valid program."""
    if program.ranks is not None:
        return RanksRunner(program, program.ranks, options)
    if (alone := of_one_rank(program)) is not None and place_of() is not None:
        return RanksRunner(program, alone, options)
    return open_runner(program, options)


def report_path(engine: str | os.PathLike[str]) -> str:
    """The path of a build's report: next to the engine."""
    return f"{os.fspath(engine)}.report.json"


def saved_report(engine: str | os.PathLike[str]) -> dict[str, Plain]:
    """The report of a build next to its engine; empty if it is missing or cannot be read."""
    try:
        found = read_json(Path(report_path(engine)))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _begin(program: Program, options: LoadOptions, devices: int | None) -> None:
    """Check the program of an engine file before its blobs are read, and start CUDA meanwhile. Raises RankError, EngineError."""
    there = 1 if program.ranks is None else program.ranks.world
    if devices is not None and devices != there:
        raise RankError(
            f"the engine is for {there} device{'s' * (there != 1)}, not for {devices}",
            hint=f"build it with --devices {devices}",
        )
    if target_of(program).family == "cuda" and not options.simulate:
        from optdnn.runtime.cuda.device import choose
        from optdnn.runtime.cuda.kernel_text.allowed import check_kernels
        from optdnn.runtime.cuda.start import begin

        if not options.trust_cubins:
            check_kernels(program, check_custom(program.requires, options.custom_ops))
        if program.ranks is not None and (place := place_of()) is not None:
            choose(place.local)
        begin()


def load(
    path: str | os.PathLike[str],
    *,
    threads: int | None = None,
    verify: bool = True,
    mmap: bool = True,
    simulate: bool = False,
    trust_cubins: bool = False,
    recompile: bool = False,
    huge_pages: bool = True,
    planner: Planner | None = None,
    examine: Examine | None = None,
    custom_ops: Sequence[CustomOp] = (),
    signed_by: SignedBy | None = None,
    devices: int | None = None,
) -> Engine:
    """Load an engine file.

    ``threads`` overrides the number of threads chosen by the build. ``verify=False`` skips the SHA-256 of the blobs (the
    header's is always checked). ``mmap=False`` reads the file into memory, for files that may change underneath.
    ``huge_pages=False`` leaves the memory of an engine for cpu as the libraries allocate it; otherwise, on Linux with huge
    pages on request, a thread moves it onto them after the first run.
    Engines for GPUs: ``simulate`` runs the program in NumPy, on any machine. The kernels are compiled from the sources in the file,
    or come from this machine's cache of compiled kernels, which a build fills. A source must be in the language of
    optdnn's generated kernels (:mod:`optdnn.runtime.cuda.kernel_text.check` describes its guarantees) or belong to one of
    ``custom_ops``. ``trust_cubins=True`` uses the compiled code in the file, and any source, unchecked: for files whose author may
    run code on this machine. ``recompile`` compiles even if this version's templates differ from the build's.
    An engine for a GPU and ranges of shapes makes plans for further shapes with ``planner`` (default: the compiler, if it is
    installed, when such inputs first occur; None: no further plans). An engine with shape inputs does so for their values;
    without a planner, its own program runs for all values.
    ``examine`` checks the networks for CPU libraries before the libraries see them (default:
    :mod:`optdnn.lowering.cpu.examine`). None: an engine that gives them a network is refused.
    ``custom_ops`` are the custom operators that the engine was built with (:func:`optdnn.custom_op`).
    ``signed_by``: the file is refused unless PATH.sig is its signature by this signer: a PEM file with a public key or with root
    certificates, or "sigstore:IDENTITY,ISSUER". The environment variable OPTDNN_SIGNED_BY requires this for every engine file
    that the process reads. A signed file is read into memory (``mmap`` has no effect). It is trusted as with ``trust_cubins=True``.
    An engine for several GPUs starts one process for each further GPU, unless a launcher such as torchrun has started them
    (:mod:`optdnn.runtime.ranks`). ``devices`` refuses an engine for another number of GPUs.
    Raises UsageError if there is no such file, EngineError for a file that is unreadable, corrupt, of another version or for
    another machine, that lacks the required signature, or whose kernels are refused. Raises EngineStale if this version would
    generate other kernels, and MissingDependency for a library that is not installed.
    """
    from optdnn.runtime.file.format import read

    if not isinstance(path, (str, os.PathLike)):
        raise UsageError(
            f"an engine is loaded from its file, not from {type(path).__name__}", hint="give the path of the file"
        )
    wanted = signers(() if signed_by is None else (signed_by,))
    trusted = trust_cubins or bool(wanted)  # reading checks the signatures
    options = LoadOptions(
        threads,
        huge_pages=huge_pages,
        simulate=simulate,
        trust_cubins=trusted,
        recompile=recompile,
        planner=planner,
        examine=examine,
        custom_ops=custom_list(custom_ops),
    )
    seen = partial(_begin, options=options, devices=devices)
    with machine_errors(f"the engine {os.fspath(path)}", EngineError):
        try:
            return Engine(read(path, verify=verify, mmap=mmap, seen=seen, signed_by=wanted), options=options)
        except InternalError as error:
            said = f"the engine {os.fspath(path)} contradicts itself: {error.message}"
            raise EngineError(said, hint=CONTRADICTS) from error
