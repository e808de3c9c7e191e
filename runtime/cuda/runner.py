"""The runner "cuda": the whole program as one CUDA graph over one arena (or several graphs, separated by steps on the host).

Kernels and weights are loaded once per engine and shared by its contexts; a context has its own arena, staging memory, stream
and graphs. Nothing touches the GPU before the first context is made, so engines for other machines can be built anywhere.
"""

from __future__ import annotations

import struct
import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from optdnn.errors import InputError, warn
from optdnn.runtime.contexts.base import BaseContext, hand_over
from optdnn.runtime.contexts.dlpack import import_cupy, on_gpu
from optdnn.runtime.contexts.state import Binding
from optdnn.runtime.cuda.device import Device, Launch, check, driver
from optdnn.runtime.cuda.gpu_facts import GpuFacts
from optdnn.runtime.cuda.launches.chain import Chain, Item, Transfer, do, follows_copy, timed
from optdnn.runtime.cuda.launches.graphs import Graph, Stream
from optdnn.runtime.cuda.launches.nvtx import marked
from optdnn.runtime.cuda.launches.plan import GRID, Ahead, CudaStep, LaunchPlan, TensorMap
from optdnn.runtime.cuda.launches.runs import grouped, joined_parameters
from optdnn.runtime.cuda.launches.steps import GpuProgramRunner
from optdnn.runtime.cuda.libraries.calls import Called, LibraryCall
from optdnn.runtime.cuda.libraries.handles import Caller
from optdnn.runtime.cuda.memory.arrays import check_pointer, check_stream, pointer_of, stream_handle
from optdnn.runtime.cuda.memory.context import ContextMemory
from optdnn.runtime.cuda.memory.in_place import check_overlap, kept_in_place, stays
from optdnn.runtime.cuda.memory.loaded import Loaded, encode
from optdnn.runtime.cuda.memory.shared import Arena
from optdnn.runtime.cuda.memory.state import Streaming
from optdnn.runtime.cuda.suppression import TEMPLATE, Suppression
from optdnn.runtime.program import Plain, Program, known_sizes, target_of
from optdnn.runtime.reference.suppression import suppressed_by
from optdnn.runtime.steps.executor import LoadOptions
from optdnn.runtime.steps.host import TO_HOST, CopyPlan, HostPlan
from optdnn.types import Array, TensorSpec

GRAPHS = 8
"""The most graphs that a context keeps: one per set of input and output addresses, the least recently used is dropped first."""


class CudaRunner(GpuProgramRunner):
    """A prepared program; shared by threads."""

    refusal = "a cuda engine holds steps for"

    def __init__(self, program: Program, options: LoadOptions):
        super().__init__(program)
        self._options = options
        self.names_in, self.names_out = {s.name for s, _ in program.inputs}, {s.name for s, _ in program.outputs}
        self.in_place = kept_in_place(program, self.steps)
        """Output -> input buffer: the output begins as a copy of the input, which nothing else reads. If the caller gives both
        the same memory, nothing is copied."""
        self.groups = grouped(self.steps, joined=not program.lanes)
        """The numbers of the steps of each launch of a graph."""
        self._lock = threading.Lock()
        self._loaded: Loaded | None = None

    def _step_facts(self, step: CudaStep) -> Mapping[str, Plain]:
        fact: dict[str, Plain] = {"executor": "cuda", "arch": target_of(self.program).arch}
        if isinstance(step.launch, LibraryCall):
            return fact | {"kernel": step.launch.operation.library}
        return fact | {"kernel": self.program.kernels[step.launch.kernel].function}

    def context(self, arena: Arena | None = None) -> CudaContext:
        """Raises MissingDependency, RunError (no GPU, out of memory) or EngineError (another architecture)."""
        with self._lock:
            if self._loaded is None:
                self._loaded = Loaded(self.program, self.steps, self._options)
                if self._options.pool is None and (why := planned_elsewhere(self.program, self._loaded.device)):
                    warn(why, PlannedElsewhere)
        return CudaContext(self, self._loaded, arena)


class PlannedElsewhere(UserWarning):
    """An engine was planned for another GPU than the one that runs it."""


def planned_elsewhere(program: Program, here: GpuFacts) -> str | None:
    """A warning that the program's tactics were chosen for another GPU than ``here``; None if they were chosen for the same
    kind."""
    planned: Any = program.meta.get("gpu")
    if not planned or (planned["name"], planned["multiprocessors"]) == (here.name, here.multiprocessors):
        return None
    return (
        f"the engine was planned for {planned['name']} ({planned['multiprocessors']} multiprocessors); this GPU is {here.name} "
        f"({here.multiprocessors}). Results are right, but other tactics may be faster: optdnn retune ENGINE"
    )


class CudaContext(BaseContext):
    """One thread's arena, staging memory, stream and graphs."""

    takes_device_arrays = True

    def __init__(self, runner: CudaRunner, loaded: Loaded, arena: Arena | None = None):
        super().__init__(runner.program, runner.signature)
        loaded.activate()
        self.runner, self._loaded = runner, loaded
        self.memory = ContextMemory(runner.program, runner.steps, runner.on_host, loaded.constants, arena)
        self._caller = Caller(
            (s.launch.operation, self._lane(k))
            for k, s in enumerate(runner.steps)
            if isinstance(s, CudaStep) and isinstance(s.launch, LibraryCall)
        )
        self.stream = Stream()
        kernels = zip(loaded.functions, runner.program.kernels, strict=True)
        kernel = next((function for function, k in kernels if k.template == TEMPLATE), None)
        most = loaded.device.multiprocessors
        self._suppression = None if kernel is None else Suppression(kernel, self.stream.handle, most)
        self._first: Graph | None = None
        self._streams: set[int] = set()
        self._graphs: dict[tuple[int, ...], Graph | Chain] = {}

    def _lane(self, k: int) -> int:
        lanes = self.program.lanes
        return lanes[k].lane if lanes else 0

    # ---------------------------------------------------------------- launches

    def launches(self, given: Mapping[int, int]) -> list[Launch | Called]:
        """Every launch of a program without host steps, with its parameters filled in; ``given`` as in :meth:`items`."""
        return [item for item in self.items(given) if isinstance(item, (Launch, Called))]

    def _joined_launches(self, given: Mapping[int, int]) -> list[Launch | Called]:
        """Like :meth:`launches`, with the jobs of a run in one launch."""
        return [item for item in self.items(given, self.runner.groups) if isinstance(item, (Launch, Called))]

    def items(self, given: Mapping[int, int], groups: Sequence[Sequence[int]] = ()) -> list[Item]:
        """The work of each step of the program, or of each group of steps. ``given``: addresses of inputs and outputs that belong
        to the caller, by buffer."""
        launches: list[Item] = []
        for k, *others in groups or ([k] for k in range(len(self.runner.steps))):
            parsed = self.runner.steps[k]
            if others:
                launches.append(self._unit((k, *others), given))
            elif isinstance(parsed, HostPlan):
                launches.append(partial(self._run_on_host, parsed))
            elif isinstance(parsed, CopyPlan):
                launches.append(self.memory.transfer(parsed, given))
            elif stays(self.program.steps[k], given, self.runner.in_place):
                launches.append(Transfer(0, 0, 0, False, parsed.label))
            else:
                launches.append(self._launch(k, parsed, given, dependent=not follows_copy(launches)))
        return launches

    def _run_on_host(self, plan: HostPlan) -> None:
        """Run a step on the host. A kernel compares its boxes, if the program has one and there are many."""
        if self._suppression is None:
            self.memory.run_on_host(plan)
            return
        with suppressed_by(self._suppression):
            self.memory.run_on_host(plan)

    def _launch(self, k: int, parsed: CudaStep, given: Mapping[int, int], *, dependent: bool = True) -> Launch | Called:
        """Step ``k`` of the program, with its parameters filled in. ``dependent``: its launch may begin early, if it can."""
        step, launch = self.program.steps[k], parsed.launch
        operands = (*step.inputs, *step.outputs)
        if isinstance(launch, LibraryCall):
            at = {
                name: self.memory.address(operands[i], given) + offset for name, (i, offset) in launch.operands.items()
            }
            return self._caller.call(launch.operation, at, self._lane(k), dependent=dependent)
        block, grid = self._parameters(launch, operands, given), launch.grid
        if launch.part is not None:
            return self._joined(launch, [block], parsed.label)
        return Launch(
            self._loaded.functions[launch.kernel], grid, launch.block, [block], shared=launch.shared,
            cluster=launch.cluster, label=parsed.label, dependent=dependent and launch.dependent,
            cooperative=launch.waits == GRID,
        )  # fmt: skip

    def _parameters(self, launch: LaunchPlan, operands: Sequence[int], given: Mapping[int, int]) -> bytes:
        block = bytearray(launch.parameters)
        for r in launch.relocations:
            if isinstance(r, Ahead):
                value = struct.pack("<QI", self.memory.address(r.buffer, {}) + r.offset, r.bytes)
                block[r.at : r.at + len(value)] = value
                continue
            pointer = self.memory.address(operands[r.operand], given) + r.offset
            value = encode(r, pointer) if isinstance(r, TensorMap) else pointer.to_bytes(8, "little")
            block[r.at : r.at + len(value)] = value
        return bytes(block)

    def _joined(self, first: LaunchPlan, blocks: Sequence[bytes], label: str) -> Launch:
        """One launch of the jobs of a run; ``blocks``: the parameters of their own launches."""
        assert first.part is not None
        grid = (min(first.grid[0], self.device.multiprocessors), 1, 1)
        return Launch(
            self._loaded.functions[first.kernel], grid, first.block, [joined_parameters(first.part, blocks)], shared=first.shared,
            label=label, dependent=False, cooperative=True,
        )  # fmt: skip

    def _unit(self, steps: Sequence[int], given: Mapping[int, int]) -> Launch | Called:
        """One launch of these steps: several jobs of a run, or one step."""
        parsed = [p for k in steps if isinstance(p := self.runner.steps[k], CudaStep)]
        first = parsed[0].launch
        if len(steps) == 1 or isinstance(first, LibraryCall):
            return self._launch(steps[0], parsed[0], given)
        blocks = []
        for k, p in zip(steps, parsed, strict=True):
            assert isinstance(p.launch, LaunchPlan)
            step = self.program.steps[k]
            blocks.append(self._parameters(p.launch, (*step.inputs, *step.outputs), given))
        return self._joined(first, blocks, f"{parsed[0].label} to {parsed[-1].label}")

    @property
    def device(self) -> Device:
        return self._loaded.device

    def graph(self) -> Graph | Chain:
        """The graph over the context's own input and output memory, in which ``run`` stages inputs."""
        return self._graph({})

    def _chain(self, given: Mapping[int, int]) -> Chain:
        """The run of a program with host steps. ``given`` as in :meth:`items`: empty if inputs and outputs are NumPy arrays."""
        p, on_host = self.program, self.runner.on_host

        def exchanged(ports: Sequence[tuple[TensorSpec, int]], *, to_host: bool) -> Iterator[Item]:
            """Copies between the caller's arrays on the GPU and the host's buffers."""
            for _, i in ports:
                if i in on_host and i in given:
                    here, b = self.memory.host[i].pointer, p.buffers[i]
                    ends = (here, given[i]) if to_host else (given[i], here)
                    yield Transfer(*ends, b.nbytes or 0, to_host, b.name)

        items: list[Item] = list(exchanged(p.inputs, to_host=True))
        fed = {i for _, i in p.inputs}
        for plan, item in zip(self.runner.steps, self.items(given), strict=True):
            if isinstance(plan, CopyPlan) and plan.to == TO_HOST and plan.device in fed:
                # An array that the caller gave as NumPy array is already on the host.
                flat = self.memory.pinned(plan.device).reshape(-1)[plan.offset : plan.offset + plan.size]
                here = self.memory.pinned(plan.host) if given else flat.reshape(plan.shape)
                items.insert(0, partial(self.memory.use, plan.host, here))
                if not given:
                    continue
            items.append(item)
        items += exchanged(p.outputs, to_host=False)
        return Chain(items, self.stream)

    def _new_graph(self, given: Mapping[int, int]) -> Graph | Chain:
        if any(isinstance(s, HostPlan) for s in self.runner.steps):
            return self._chain(given)
        if any(given.get(o, 0) and given.get(o) == given.get(i) for o, i in self.runner.in_place.items()):
            return Graph(
                self._joined_launches(given), self.stream
            )  # without the copies: it has other nodes than the rest
        if self._first is None:
            self._first = Graph(self._joined_launches({}), self.stream, self.runner.waits)
        changed = {
            n: self._unit(group, given)
            for n, group in enumerate(self.runner.groups)
            if any(not given.keys().isdisjoint((*(s := self.program.steps[k]).inputs, *s.outputs)) for k in group)
        }
        kernels = {k: launch for k, launch in changed.items() if isinstance(launch, Launch)}
        if len(kernels) < len(changed):  # a library's own nodes cannot be changed: all launches are captured again
            return Graph(self._joined_launches(given), self.stream, self.runner.waits)
        return self._first.moved(kernels)

    def _check_pointers(self, given: Mapping[int, int]) -> None:
        for i, pointer in given.items():
            if pointer:
                check_pointer(pointer, self.device, f"the array for {self.program.buffers[i].name!r}")
        check_overlap(self.program, given, self.runner.in_place)

    @property
    def in_place(self) -> dict[str, str]:
        """Output -> input, by name: pairs that may be the same array (see :class:`CudaRunner`)."""
        p = self.program
        names = {i: s.name for s, i in (*p.inputs, *p.outputs)}
        return {names[o]: names[i] for o, i in self.runner.in_place.items()}

    def _graph(self, given: Mapping[int, int]) -> Graph | Chain:
        key = tuple(given.get(i, 0) for _, i in (*self.program.inputs, *self.program.outputs))
        graph = self._graphs.pop(key, None)
        if graph is None:
            self._check_pointers(given)
            graph = self._new_graph(given)
            while len(self._graphs) >= GRAPHS:
                self._graphs.pop(next(iter(self._graphs))).close()
        self._graphs[key] = graph
        return graph

    # ---------------------------------------------------------------- running

    def _run(self, feeds: Mapping[str, Any], out: Mapping[str, Any] | None, stream: object) -> dict[str, Any]:
        """NumPy arrays are staged through pinned memory, and the results are NumPy arrays.

        Arrays on the GPU (then all must be) are read in place, on the caller's ``stream`` (default: the null stream);
        the results are ``out``'s arrays, or new CuPy arrays, and the call does not wait for them (unless there are steps on
        the host; results whose size depends on data are NumPy arrays).
        Raises InputError for arrays that do not fit, RunError if running fails.
        """
        self._loaded.activate()
        feeds = self.signature.named(feeds)
        if any(on_gpu(a) for a in feeds.values()):
            return self._run_device(feeds, out or {}, stream)
        return self._run_host(feeds, out, stream)

    def trace(self, feeds: Mapping[str, Any]) -> dict[str, Array]:
        """Run once by single launches, each in an NVTX range named after its ONNX nodes: for profilers, which see no names in
        a graph."""
        results = self.run(feeds)
        with self._alone:
            for k, (item, step) in enumerate(zip(self.items({}), self.runner.steps, strict=True)):
                with marked(f"{k}: {step.label}"):
                    do(item, self.stream)
                    self.stream.synchronize()
        return results

    def _run_host(self, feeds: Mapping[str, Any], out: Mapping[str, Any] | None, stream: object) -> dict[str, Array]:
        p = self.program
        arrays, given = self.signature.checked(feeds, out)
        handle = self.stream.handle if stream is None else self.stream_of(stream)
        self.stage(arrays)
        self.memory.copy_in(handle)
        self.graph().run(handle)
        self.memory.copy_out(handle)
        check("cuStreamSynchronize", driver().cuStreamSynchronize(handle))
        results: dict[str, Array] = {}
        for (spec, i), buffer in zip(p.outputs, given, strict=True):
            if i in self.runner.on_host:
                results[spec.name] = hand_over(spec, self.memory.value(i), buffer)
                continue
            shape = known_sizes(spec.shape)
            if 0 in shape:
                results[spec.name] = buffer if buffer is not None else np.empty(shape, spec.dtype)
                continue
            value = self.memory.host[i].bytes.view(spec.dtype).reshape(shape)
            results[spec.name] = hand_over(spec, value, buffer)
        return results

    def stage(self, arrays: Sequence[Array]) -> None:
        """Put the inputs, in the program's order and types, into their staging memory."""
        for (_, i), a in zip(self.program.inputs, arrays, strict=True):
            self.memory.host[i].bytes[:] = a.reshape(-1).view(np.uint8)

    def _run_device(self, feeds: Mapping[str, Any], out: Mapping[str, Any], stream: object) -> dict[str, Any]:
        given, outputs = self._placed(feeds, out)
        self._graph(given).run(self.stream_of(stream))
        outputs.update(self.memory.sized_by_data())
        return outputs

    def _bind(self, given: Binding) -> Any:
        """A call with fixed arrays on the GPU: ``bound.run(stream)`` only launches the graph.

        Outputs that are not given are new CuPy arrays. The arrays are kept alive. Raises InputError, MissingDependency.
        """
        if given.state:
            return Streaming(self, given)
        self._loaded.activate()
        addresses, results = self._placed(given.inputs, given.outputs)
        self._check_pointers(addresses)
        return Bound(self, self._new_graph(addresses), results, dict(given.inputs))

    def _placed(self, feeds: Mapping[str, Any], out: Mapping[str, Any]) -> tuple[dict[int, int], dict[str, Any]]:
        """The addresses of the caller's arrays by buffer, and the arrays of the results."""
        p, names, wanted = self.program, self.runner.names_in, self.runner.names_out
        if feeds.keys() != names or not out.keys() <= wanted:
            raise InputError(
                f"give exactly the inputs {', '.join(sorted(names))}, and outputs among {', '.join(sorted(wanted))}"
            )
        given: dict[int, int] = {}
        for spec, i in p.inputs:
            given[i] = pointer_of(feeds[spec.name], spec, f"input {spec.name!r}")
        outputs: dict[str, Any] = {}
        for spec, i in p.outputs:
            array = out.get(spec.name)
            if p.buffers[i].nbytes is None:
                if array is not None:
                    raise InputError(f"the size of output {spec} depends on data: it comes as a new NumPy array")
                outputs[spec.name] = None  # a placeholder that keeps the order
                continue
            if array is None:
                cupy = import_cupy("to hold results on the GPU; or pass your own arrays as out=")
                array = cupy.empty(spec.shape, spec.dtype)
            given[i] = pointer_of(array, spec, f"the buffer for output {spec.name!r}", writable=True)
            outputs[spec.name] = array
        for pointer in given.values():
            if pointer % 16:
                raise InputError("arrays on the GPU must be aligned to 16 bytes")
        return given, outputs

    def stream_of(self, stream: object) -> int:
        """The handle of the caller's stream (None: the null stream). Raises InputError for a stream of another GPU."""
        handle = 0 if stream is None else stream_handle(stream)
        if handle not in self._streams:
            check_stream(handle, self._loaded.context)
            self._streams.add(handle)
        return handle

    def profile(self, feeds: Mapping[str, Any]) -> tuple[dict[str, Array], list[int]]:
        """Run once by single launches, timed by events: (outputs, GPU nanoseconds per step). Launches do not overlap."""
        self.run(feeds)  # the inputs are on the device
        with self._alone:
            times = timed(self.items({}), self.stream)
        return self.run(feeds), times


class Bound:
    """A graph over fixed arrays. ``outputs``: name -> array, which each run overwrites (or, if its size depends on data,
    replaces by a new NumPy array)."""

    def __init__(self, context: CudaContext, graph: Graph | Chain, outputs: dict[str, Any], keep: object):
        self._context, self._graph, self.outputs, self._keep = context, graph, outputs, keep
        self._sized_by_data = any(context.program.buffers[i].nbytes is None for _, i in context.program.outputs)
        weakref.finalize(self, graph.close)

    def run(self, stream: object = None) -> dict[str, Any]:
        """Enqueue one run on ``stream`` (default: the null stream); does not wait (unless there are steps on the host)."""
        self._context._loaded.activate()
        self._graph.run(self._context.stream_of(stream))
        if self._sized_by_data:
            self.outputs.update(self._context.memory.sized_by_data())
        return self.outputs


def prepare(program: Program, options: LoadOptions) -> CudaRunner:
    """Raises EngineError for a malformed program. The GPU is not used before the first context is created."""
    return CudaRunner(program, options)
