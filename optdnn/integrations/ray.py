"""Ray: engines over the blocks of a dataset (Ray Data), and in the replicas of a deployment (Ray Serve). Extra ``ray``.

    workers = ray.data.ActorPoolStrategy(size=4)
    answers = ds.map_batches(optdnn.Predictor, fn_constructor_args=["m.engine"], compute=workers, batch_size=64)
    serve.run(application("m.engine", num_replicas=4, ray_actor_options={"num_gpus": 0.5}))

The path of an engine file must be readable on every machine of the cluster.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from optdnn.errors import InputError, MissingDependency, UsageError
from optdnn.loading import load
from optdnn.runtime.pictures.stream import picture_answers
from optdnn.serving.facts import ModelFacts, Shapes, batch_symbol, plans_of
from optdnn.serving.sizes import BatchSizes, rest_of
from optdnn.types import Array, TensorSpec

if TYPE_CHECKING:
    from optdnn.serving.settings import ServeSettings

Columns = dict[str, Any]
"""A batch: maps the name of each column to an array with one row per sample."""
GRPC_SERVICE = "optdnn.integrations.ray.add_inference_service"
"""The protocol's gRPC service, for ``ray.serve.config.gRPCOptions(grpc_servicer_functions=[...])``."""


class Predictor:
    """An engine as a function from batches to batches, for ``ds.map_batches(optdnn.Predictor, ...)``.

    A batch is a mapping of columns to NumPy arrays, Ray Data's ``batch_format="numpy"``. Columns with the names of the engine's
    inputs are replaced by its outputs, and the others are kept. Ray itself is not needed: any program can call it.

    A batch may have any number of rows. They are run in the sizes that the engine has plans for; the last rows are padded, and
    the padding is cut off. Large batches, of several hundred rows, are the fastest: on a GPU, the copies of one run overlap with
    the computation of another. An engine that takes pictures also accepts a column with the bytes of their files (JPEG, PNG and the
    like). If an output has classes, the columns ``label`` and ``score`` hold the most likely one.
    """

    def __init__(
        self,
        engine: str | os.PathLike[str],
        *,
        columns: Mapping[str, str] | None = None,
        keep: Sequence[str] | None = None,
        instances: int | None = None,
        **loading: Any,
    ):
        """``engine`` is the engine's file. ``columns`` names the column of an input if it has another name. ``keep`` names the
        columns that are kept (default: all that are not inputs). ``instances`` is the number of concurrent runs, each with
        its own memory for activations (default: 2 on one GPU, otherwise 1). ``loading`` are the options of :func:`optdnn.load`.

        Raises UsageError for an engine whose inputs and outputs do not have one row per sample, or for an unknown input name.
        """
        if instances is not None and (type(instances) is not int or instances < 1):
            raise UsageError(f"instances must be a whole number, at least 1, not {instances!r}")
        self.engine = load(engine, **loading)
        names = [s.name for s in self.engine.inputs]
        if unknown := sorted(set(columns or {}) - set(names)):
            raise UsageError(f"the engine has no input {unknown[0]!r}; it has {', '.join(names)}")
        self._columns = {n: (columns or {}).get(n, n) for n in names}
        self._keep = keep
        self._sizes = _sizes_of(self.engine)
        self._instances = instances or _usual_instances(self.engine)
        self._threads = ThreadPoolExecutor(self._instances, "optdnn-predict")
        self._padding_checked = False

    def __call__(self, batch: Columns) -> Columns:
        """The batch with the engine's outputs. Raises InputError for a batch that does not fit."""
        feeds = {n: np.asarray(self._column(batch, column)) for n, column in self._columns.items()}
        first, *others = feeds.values()
        if not others and first.dtype == object and len(first) and isinstance(first[0], bytes):
            results = self._pictures(list(first), batch.get("path"))
        else:
            if ragged := [self._columns[n] for n, a in feeds.items() if a.dtype == object]:
                raise InputError(
                    f"the rows of column {ragged[0]!r} have different shapes or types",
                    hint="bring them to one shape; pictures can be bytes of files, for an engine with preprocessing",
                )
            results = self._rows(feeds)
        kept = self._kept(batch)
        if both := sorted(kept.keys() & results.keys()):
            raise InputError(f"{both[0]!r} is a column and an output", hint="name the columns to keep: keep=[...]")
        return {**kept, **results}

    def _column(self, batch: Columns, column: str) -> Any:
        if column not in batch:
            raise InputError(
                f"the batch has no column {column!r}; it has {', '.join(batch)}",
                hint="columns={INPUT: COLUMN} names another",
            )
        return batch[column]

    def _kept(self, batch: Columns) -> Columns:
        if self._keep is None:
            fed = set(self._columns.values())
            return {n: a for n, a in batch.items() if n not in fed}
        return {n: self._column(batch, n) for n in self._keep}

    def _pictures(self, files: list[bytes], paths: Any) -> Columns:
        """The outputs for the bytes of files. Raises InputError with the path of a file that is not a picture."""
        try:
            answers = list(picture_answers(self.engine, files))
        except InputError:
            for k, file in enumerate(files):
                try:
                    list(picture_answers(self.engine, [file]))
                except InputError as error:
                    which = f"row {k}" if paths is None else paths[k]
                    hint = "Ray's DataContext.max_errored_blocks lets a job continue without the blocks of such files"
                    raise InputError(f"{which}: {error.message}", hint=hint) from error
            raise
        found: Columns = {n: _plain(_stacked([a.outputs[n] for a in answers])) for n in answers[0].outputs}
        if answers[0].best:
            found["label"] = np.array([a.best[0][0] for a in answers])
            found["score"] = np.array([a.best[0][1] for a in answers])
        return found

    def _rows(self, feeds: dict[str, Array]) -> Columns:
        counts = {len(a) if a.ndim else 0 for a in feeds.values()}
        rows, rest = min(counts), rest_of([a.shape for a in feeds.values()])
        if len(counts) > 1 or not rows:
            raise InputError(
                f"the columns of the inputs must have one number of rows, at least 1, not {sorted(counts)}"
            )
        most = self._sizes.most(rest)
        arrays = {s.name: _array_of_rows(s, rows) for s in self.engine.outputs}
        whole = {n: a for n, a in arrays.items() if a is not None}

        def run(start: int) -> dict[str, Array]:
            part = {n: a[start : start + most] for n, a in feeds.items()}
            return self._run(part, {n: a[start : start + most] for n, a in whole.items()}, rest)

        starts = range(0, rows, most)
        alone = self._instances == 1 or len(starts) == 1
        pieces = list(map(run, starts) if alone else self._threads.map(run, starts))
        joined = {n: whole[n] if n in whole else np.concatenate([p[n] for p in pieces]) for n in pieces[0]}
        return {n: _plain(a) for n, a in joined.items()}

    def _run(self, part: dict[str, Array], out: dict[str, Array], rest: Shapes) -> dict[str, Array]:
        """The outputs of rows that run together; outputs in ``out`` are written to its arrays. The rows are padded with copies of
        the last one, which are cut off again."""
        rows = len(next(iter(part.values())))
        size = self._sizes.padded(rows, rest)
        if size == rows:
            return self.engine.run(part, out)
        results = self.engine.run(_padded(part, size, rows - 1))
        if rows > 1 and not self._padding_checked:
            other = self.engine.run(_padded(part, size, 0))
            for name, a in results.items():
                if a[:rows].tobytes() != other[name][:rows].tobytes():
                    raise UsageError(
                        f"the rows of output {name!r} depend on one another, so a batch cannot be padded",
                        hint=f"give batches of {size} rows, or build the engine for their size",
                    )
            self._padding_checked = True
        for name, a in out.items():
            a[...] = results[name][:rows]
        return {n: a[:rows] for n, a in results.items()}


def _usual_instances(engine: Any) -> int:
    """Two runs on one GPU hide each other's copies. A run on the CPU, or on several GPUs, already uses all of it."""
    return 2 if engine.target.startswith("cuda") and engine.program.ranks is None else 1


def _array_of_rows(spec: TensorSpec, rows: int) -> Array | None:
    """An array for ``rows`` rows of an output; None if another of its sizes is unknown."""
    rest = [d for d in spec.shape[1:] if isinstance(d, int)]
    return np.empty((rows, *rest), spec.dtype) if len(rest) == len(spec.shape) - 1 else None


def _padded(part: Mapping[str, Array], size: int, copied: int) -> dict[str, Array]:
    """``part`` with ``size`` rows: copies of row ``copied`` follow its own rows."""
    return {n: np.concatenate([a, np.repeat(a[copied : copied + 1], size - len(a), axis=0)]) for n, a in part.items()}


def _stacked(rows: Sequence[Array]) -> Array:
    """The rows as one array; an array of objects if their shapes differ (masks of pictures of different sizes)."""
    if len({a.shape for a in rows}) == 1:
        return np.stack(rows)
    found = np.empty(len(rows), object)
    for k, a in enumerate(rows):  # one by one: at once, NumPy would look into rows with equal first sizes
        found[k] = a
    return found


def _plain(array: Array) -> Array:
    """An output in a type that Arrow supports: bfloat16 and smaller floats become fp32."""
    return array.astype(np.float32) if array.dtype.kind == "V" else array


class _FixedRows:
    """The sizes of an engine that takes ``rows`` rows at a time."""

    def __init__(self, rows: int):
        self._rows = rows

    def most(self, rest: Shapes) -> int:
        return self._rows

    def padded(self, rows: int, rest: Shapes) -> int:
        return self._rows


def _sizes_of(engine: Any) -> BatchSizes | _FixedRows:
    """The numbers of rows that an engine accepts at once. Raises UsageError if it does not take rows."""
    specs = (*engine.inputs, *engine.outputs)
    fixed = {s.shape[0] if s.shape else None for s in specs}
    if len(fixed) == 1 and isinstance(rows := next(iter(fixed)), int):
        return _FixedRows(rows)
    symbol, why = batch_symbol(engine.inputs, engine.outputs)
    if symbol is None:
        raise UsageError(f"the engine does not give a row for each row that it takes: {why}")
    facts = ModelFacts(engine.inputs, engine.outputs, engine.profiles, plans_of(engine), engine.target, symbol, "")
    return BatchSizes(facts, None)


# ---------------------------------------------------------------- Ray Serve


def add_inference_service(servicer: Any, server: Any) -> None:
    """The function that :data:`GRPC_SERVICE` names. Ray calls it in the process that receives the requests."""
    from tritonclient.grpc import service_pb2_grpc

    _let_messages_travel()
    service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(servicer, server)


def _let_messages_travel() -> None:
    """Ray pickles requests. The messages of tritonclient state a wrong module name: make the module available under it."""
    from tritonclient.grpc import service_pb2

    sys.modules.setdefault(service_pb2.ModelInferRequest.__module__, service_pb2)


class EngineReplica:
    """One replica of a deployment: the engines in threads of its process, with the protocol of ``optdnn serve``."""

    async def __init__(self, settings: ServeSettings):  # type: ignore[misc]  # Ray waits for it
        from optdnn.serving.core import Core

        _let_messages_travel()
        self._core = Core(settings)
        await self._core.repository.start()

    def __serve_build_asgi_app__(self) -> Any:
        from optdnn.serving.http_app import http_app

        return http_app(self._core, replica=True)

    async def check_health(self) -> None:
        """Called by Ray, which replaces a replica that raises."""
        if not self._core.repository.ready:
            raise RuntimeError("an engine cannot run requests")

    async def ServerLive(self, request: Any) -> Any:
        return await self._by_grpc("ServerLive", request, None)

    async def ServerReady(self, request: Any) -> Any:
        return await self._by_grpc("ServerReady", request, None)

    async def ServerMetadata(self, request: Any) -> Any:
        return await self._by_grpc("ServerMetadata", request, None)

    async def ModelReady(self, request: Any, grpc_context: Any) -> Any:
        return await self._by_grpc("ModelReady", request, grpc_context)

    async def ModelMetadata(self, request: Any, grpc_context: Any) -> Any:
        return await self._by_grpc("ModelMetadata", request, grpc_context)

    async def ModelInfer(self, request: Any, grpc_context: Any) -> Any:
        return await self._by_grpc("ModelInfer", request, grpc_context)

    async def _by_grpc(self, method: str, request: Any, grpc_context: Any) -> Any:
        from optdnn.serving.grpc_service import GrpcService

        return await getattr(GrpcService(self._core), method)(request, _Context(grpc_context))


class _Context:
    """A call's context as the service uses it, over Ray's context, which has no deadline."""

    def __init__(self, given: Any):
        self._given = given

    def time_remaining(self) -> None:
        return None

    async def abort(self, code: Any, details: str) -> None:
        self._given.set_code(code)
        self._given.set_details(details)
        raise InputError(details)


def application(engines: str | os.PathLike[str] | Sequence[str | os.PathLike[str]], *, name: str = "optdnn",
                batch_delay_ms: float = 0.0, max_batch: int | None = None, instances: int = 1, queue: int = 256,
                loading: Mapping[str, Any] | None = None, **options: Any) -> Any:  # fmt: skip
    """A Ray Serve application of engines, for ``ray.serve.run``. Each replica answers like ``optdnn serve``.

    ``engines`` are engine files, or one folder of them; a model is named after its file. Each replica batches its requests:
    ``batch_delay_ms``, ``max_batch``, ``instances`` and ``queue`` are as in ``optdnn serve``, ``loading`` the options of
    :func:`optdnn.load`. ``options`` are options of Ray's deployments: ``num_replicas``, ``autoscaling_config``,
    ``ray_actor_options={"num_gpus": 0.5}``, ``max_ongoing_requests`` (default: ``queue``) and others.

    Raises MissingDependency without Ray or the packages of ``optdnn serve``, UsageError for invalid settings and for files
    that are missing here.
    """
    from optdnn.serving.settings import ServeSettings

    given = [engines] if isinstance(engines, (str, os.PathLike)) else engines
    paths = [Path(p).absolute() for p in given]
    settings = ServeSettings(paths, batch_delay_ms=batch_delay_ms, max_batch=max_batch, instances=instances, queue=queue,
                             workers=0, loading=dict(loading or {}))  # fmt: skip
    settings.models()  # for a file missing on a replica, Ray reports only that the deployment has failed
    try:
        from ray import serve

        import optdnn.serving.grpc_service
        import optdnn.serving.http_app  # noqa: F401
    except ImportError as error:
        raise MissingDependency((error.name or "ray").partition(".")[0], "ray", "to serve engines on Ray") from error
    made = serve.deployment(serve.ingress()(EngineReplica), name=name)
    return made.options(**{"max_ongoing_requests": queue, **options}).bind(settings)
