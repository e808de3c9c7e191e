"""The runner "cuda": the whole program as one CUDA graph over one arena.

Kernels and weights are loaded once per engine and shared by its contexts; a context has its own arena, staging memory, stream
and graphs. Nothing touches the GPU before the first context is made, so engines for other machines can be built anywhere.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from optdnn.errors import EngineError, InputError, RunError
from optdnn.runtime.cuda.arrays import import_cupy, on_gpu, pointer_of, stream_handle
from optdnn.runtime.cuda.device import Device, Function, Launch, _bytes, _enums, check, driver, encode_tiled, gpu_count
from optdnn.runtime.cuda.graphs import Graph, Stream
from optdnn.runtime.cuda.kernels_of import cubins
from optdnn.runtime.cuda.memory import DeviceMemory, PinnedMemory
from optdnn.runtime.cuda.nvtx import marked
from optdnn.runtime.cuda.plan import CudaStep, TensorMap, parse
from optdnn.runtime.executor import LoadOptions
from optdnn.runtime.program import Plain, Program
from optdnn.runtime.signature import Signature
from optdnn.types import Array

ALIGN = 256
GRAPHS = 8
"""Graphs that a context keeps: one per set of input and output addresses, the least recently used goes first."""


class CudaRunner:
    """A program made ready; shared by threads."""

    def __init__(self, program: Program, options: LoadOptions):
        others = sorted({s.executor for s in program.steps} - {"cuda"})
        if others:
            raise EngineError(f"a cuda engine holds steps for {', '.join(others)}")
        self.program, self._options = program, options
        self.signature = Signature([s for s, _ in program.inputs], [s for s, _ in program.outputs])
        self.steps = [parse(step, program) for step in program.steps]
        fact: dict[str, Plain] = {"executor": "cuda", "arch": program.target.partition(":")[2]}
        self.facts: tuple[Mapping[str, Plain], ...] = tuple(
            {**fact, "op": s.meaning.kind, "kernel": program.kernels[s.launch.kernel].function} for s in self.steps
        )
        self._lock = threading.Lock()
        self._loaded: Loaded | None = None

    def context(self) -> CudaContext:
        """Raises MissingDependency, RunError (no GPU, out of memory) or EngineError (another architecture)."""
        with self._lock:
            if self._loaded is None:
                self._loaded = Loaded(self.program, self.steps, self._options)
        return CudaContext(self, self._loaded)


class Loaded:
    """Kernels and constants on the GPU."""

    def __init__(self, program: Program, steps: Sequence[CudaStep], options: LoadOptions):
        if gpu_count() == 0:
            raise RunError(
                "there is no usable NVIDIA GPU on this machine",
                hint="load the engine with simulate=True to run it in NumPy",
            )
        self.device = Device.open()
        for arch in sorted({k.arch for k in program.kernels}):
            check_arch(arch, self.device)
        code = cubins(program, trust=options.trust_cubins, recompile=options.recompile)
        shared, cluster = [0] * len(code), [1] * len(code)
        for s in steps:
            k = s.launch.kernel
            shared[k], cluster[k] = max(shared[k], s.launch.shared), max(cluster[k], s.launch.cluster)
        self.functions = [
            Function(cubin, kernel.function, shared=shared[i], wide_cluster=cluster[i] > 8)
            for i, (cubin, kernel) in enumerate(zip(code, program.kernels, strict=True))
        ]
        self.context = check("cuCtxGetCurrent", driver().cuCtxGetCurrent())
        used = {i for s in program.steps for i in s.inputs} | {i for _, i in program.outputs}
        places, size = {}, 0
        for i, b in enumerate(program.buffers):
            if b.blob is not None and i in used:
                places[i] = size
                size += -(-(b.nbytes or 0) // ALIGN) * ALIGN
        self.weights = DeviceMemory(size, "the network's weights")
        for i, offset in places.items():
            blob = program.buffers[i].blob
            assert blob is not None
            self.weights.upload(np.ascontiguousarray(program.blobs[blob]), offset)
        self.constants = {i: self.weights.pointer + offset for i, offset in places.items()}

    def activate(self) -> None:
        """Make the engine's context current on the calling thread."""
        check("cuCtxSetCurrent", driver().cuCtxSetCurrent(self.context))


def check_arch(arch: str, device: Device) -> None:
    """Raises EngineError where code for ``arch`` does not run on the device."""
    number = arch.removeprefix("sm_").rstrip("af")
    major, minor = int(number[:-1]), int(number[-1])
    same = device.capability == (major, minor) if arch.endswith("a") else (
        device.capability[0] == major and device.capability[1] >= minor)  # fmt: skip
    if not same:
        raise EngineError(
            f"the engine was built for {arch}; this GPU, {device.name}, is {device.arch}",
            hint=f"rebuild it: optdnn build MODEL --target cuda:{device.arch}",
        )


def encode(m: TensorMap, pointer: int) -> bytes:
    """The tensor map at an address."""
    if not m.corners:
        return encode_tiled(m.dtype, pointer, m.shape, m.strides, m.box, m.swizzle)
    cu = driver()
    data, interleave, span, promotion, fill = _enums(m.dtype, m.swizzle)
    half = len(m.corners) // 2
    result = cu.cuTensorMapEncodeIm2col(
        data, len(m.shape), pointer, [cu.cuuint64_t(n) for n in m.shape], [cu.cuuint64_t(n) for n in m.strides],
        list(m.corners[:half]), list(m.corners[half:]), m.box[0], m.box[1], [cu.cuuint32_t(n) for n in m.steps],
        interleave, span, promotion, fill,
    )  # fmt: skip
    return _bytes(check(f"cuTensorMapEncodeIm2col(shape={list(m.shape)}, strides={list(m.strides)})", result))


class CudaContext:
    """One thread's arena, staging memory, stream and graphs."""

    def __init__(self, runner: CudaRunner, loaded: Loaded):
        loaded.activate()
        self.runner, self._loaded = runner, loaded
        p = runner.program
        self._arena = DeviceMemory(p.arena_bytes, "the arena of activations")
        self._own: dict[int, DeviceMemory] = {}
        outside = {i for _, i in (*p.inputs, *p.outputs)}
        for i, b in enumerate(p.buffers):
            if b.blob is None and (i in outside or b.offset is None):
                self._own[i] = DeviceMemory(b.nbytes or 0, f"buffer {b.name!r}")
        self._host = {i: PinnedMemory(p.buffers[i].nbytes or 0) for i in sorted(outside) if p.buffers[i].blob is None}
        self.stream = Stream()
        self._graphs: dict[tuple[int, ...], Graph] = {}
        self._lock = threading.Lock()

    # ---------------------------------------------------------------- launches

    def address(self, buffer: int, given: Mapping[int, int]) -> int:
        """Where a buffer lies; ``given``: addresses of inputs and outputs that are the caller's."""
        b = self.runner.program.buffers[buffer]
        if buffer in given:
            return given[buffer]
        if b.blob is not None:
            return self._loaded.constants[buffer]
        return self._own[buffer].pointer if buffer in self._own else self._arena.pointer + (b.offset or 0)

    def launches(self, given: Mapping[int, int]) -> list[Launch]:
        """Every launch, its parameters filled in (``given`` as for :meth:`address`)."""
        launches = []
        for step, parsed in zip(self.runner.program.steps, self.runner.steps, strict=True):
            operands = (*step.inputs, *step.outputs)
            launch = parsed.launch
            block = bytearray(launch.parameters)
            for r in launch.relocations:
                pointer = self.address(operands[r.operand], given) + r.offset
                value = encode(r, pointer) if isinstance(r, TensorMap) else pointer.to_bytes(8, "little")
                block[r.at : r.at + len(value)] = value
            launches.append(
                Launch(
                    self._loaded.functions[launch.kernel], launch.grid, launch.block, [bytes(block)], shared=launch.shared,
                    cluster=launch.cluster, dependent=launch.dependent, label=parsed.label,
                )
            )  # fmt: skip
        return launches

    @property
    def device(self) -> Device:
        """The GPU it runs on."""
        return self._loaded.device

    def graph(self) -> Graph:
        """The graph over the context's own input and output memory, for whoever stages inputs there (``run`` does)."""
        return self._graph({})

    def _graph(self, given: Mapping[int, int]) -> Graph:
        key = tuple(given.get(i, 0) for _, i in (*self.runner.program.inputs, *self.runner.program.outputs))
        graph = self._graphs.pop(key, None)
        if graph is None:
            graph = Graph(self.launches(given), self.stream)
            while len(self._graphs) >= GRAPHS:
                self._graphs.pop(next(iter(self._graphs))).close()
        self._graphs[key] = graph
        return graph

    # ---------------------------------------------------------------- running

    def run(
        self, feeds: Mapping[str, Any], out: Mapping[str, Any] | None = None, stream: object = None
    ) -> dict[str, Any]:
        """Run once. NumPy arrays are staged through pinned memory, and NumPy arrays come back.

        Arrays on the GPU (all of them, then) are read where they are, on the caller's ``stream`` (default: the null stream);
        the results are ``out``'s arrays, or fresh CuPy ones, and the call does not wait for them.
        Raises InputError for what does not fit, RunError when running fails.
        """
        if not self._lock.acquire(blocking=False):
            raise RunError(
                "this context is running in another thread", hint="use engine.run, or engine.context() per thread"
            )
        try:
            self._loaded.activate()
            if isinstance(feeds, Mapping) and any(on_gpu(a) for a in feeds.values()):
                return self._run_device(feeds, out or {}, stream)
            return self._run_host(feeds, out, stream)
        finally:
            self._lock.release()

    def trace(self, feeds: Mapping[str, Any]) -> dict[str, Array]:
        """Run once by single launches, each in an NVTX range named after its ONNX nodes: for profilers, which see no names in
        a graph."""
        results = self.run(feeds)
        with self._lock:
            for k, launch in enumerate(self.launches({})):
                with marked(f"{k}: {launch.label}"):
                    launch.enqueue(self.stream.handle)
                    self.stream.synchronize()
        return results

    def _run_host(self, feeds: Mapping[str, Any], out: Mapping[str, Any] | None, stream: object) -> dict[str, Array]:
        cu, p, signature = driver(), self.runner.program, self.runner.signature
        arrays = signature.arrays(feeds)
        sizes = signature.sizes(arrays)
        given = signature.out_buffers(out, sizes, arrays) if out is not None else [None] * len(p.outputs)
        handle = self.stream.handle if stream is None else stream_handle(stream)
        for (_, i), a in zip(p.inputs, arrays, strict=True):
            self._host[i].bytes[:] = a.reshape(-1).view(np.uint8)
        self.copy_in(handle)
        self._launch_graph(self.graph(), handle)
        self.copy_out(handle)
        check("cuStreamSynchronize", cu.cuStreamSynchronize(handle))
        results: dict[str, Array] = {}
        for (spec, i), buffer in zip(p.outputs, given, strict=True):
            shape = [d for d in spec.shape if isinstance(d, int)]
            if 0 in shape:
                results[spec.name] = buffer if buffer is not None else np.empty(shape, spec.dtype)
                continue
            value = self._host[i].bytes.view(spec.dtype).reshape(shape)
            if buffer is None:
                results[spec.name] = value.copy()
            else:
                np.copyto(buffer, value)
                results[spec.name] = buffer
        return results

    def copy_in(self, stream: int) -> None:
        """Enqueue the copies of the staged inputs to the GPU."""
        for _, i in self.runner.program.inputs:
            if size := self._host[i].bytes.nbytes:
                result = driver().cuMemcpyHtoDAsync(self._own[i].pointer, self._host[i].pointer, size, stream)
                check("cuMemcpyHtoDAsync", result)

    def copy_out(self, stream: int) -> None:
        """Enqueue the copies of the results to their staging memory."""
        for _, i in self.runner.program.outputs:
            if size := self.runner.program.buffers[i].nbytes:
                result = driver().cuMemcpyDtoHAsync(self._host[i].pointer, self.address(i, {}), size, stream)
                check("cuMemcpyDtoHAsync", result)

    def _run_device(self, feeds: Mapping[str, Any], out: Mapping[str, Any], stream: object) -> dict[str, Any]:
        given, outputs = self._placed(feeds, out)
        self._launch_graph(self._graph(given), 0 if stream is None else stream_handle(stream))
        return outputs

    def bind(self, feeds: Mapping[str, Any], out: Mapping[str, Any] | None = None) -> Bound:
        """A call with fixed arrays on the GPU, to be repeated: ``bound.run(stream)`` only launches the graph.

        Outputs that ``out`` does not give are fresh CuPy arrays. The arrays are kept alive. Raises InputError, MissingDependency.
        """
        self._loaded.activate()
        given, outputs = self._placed(feeds, out or {})
        return Bound(self, Graph(self.launches(given), self.stream), outputs, dict(feeds))

    def _placed(self, feeds: Mapping[str, Any], out: Mapping[str, Any]) -> tuple[dict[int, int], dict[str, Any]]:
        """The addresses of the caller's arrays by buffer, and the arrays of the results."""
        p = self.runner.program
        names, wanted = {s.name for s, _ in p.inputs}, {s.name for s, _ in p.outputs}
        if set(feeds) != names or not set(out) <= wanted:
            raise InputError(
                f"give exactly the inputs {', '.join(sorted(names))}, and outputs among {', '.join(sorted(wanted))}"
            )
        given: dict[int, int] = {}
        for spec, i in p.inputs:
            given[i] = pointer_of(feeds[spec.name], spec, f"input {spec.name!r}")
        outputs: dict[str, Any] = {}
        for spec, i in p.outputs:
            array = out.get(spec.name)
            if array is None:
                cupy = import_cupy("to hold results on the GPU; or give arrays of your own as out=")
                array = cupy.empty(spec.shape, spec.dtype)
            given[i] = pointer_of(array, spec, f"the buffer for output {spec.name!r}", writable=True)
            outputs[spec.name] = array
        for pointer in given.values():
            if pointer % 16:
                raise InputError("arrays on the GPU must be aligned to 16 bytes")
        return given, outputs

    @staticmethod
    def _launch_graph(graph: Graph, handle: int) -> None:
        check("cuGraphLaunch", driver().cuGraphLaunch(graph._executable, handle))

    def profile(self, feeds: Mapping[str, Any]) -> tuple[dict[str, Array], list[int]]:
        """Run once by single launches, timed by events: (outputs, GPU nanoseconds per step). Launches do not overlap."""
        cu = driver()
        self.run(feeds)  # inputs are on the device now
        with self._lock:
            launches = self.launches({})
            for launch in launches:  # once without marks: modules are loaded, clocks are up
                launch.enqueue(self.stream.handle)
            marks = [check("cuEventCreate", cu.cuEventCreate(0)) for _ in range(len(self.runner.steps) + 1)]
            check("cuEventRecord", cu.cuEventRecord(marks[0], self.stream.handle))
            for launch, mark in zip(launches, marks[1:], strict=True):
                launch.enqueue(self.stream.handle)
                check("cuEventRecord", cu.cuEventRecord(mark, self.stream.handle))
            self.stream.synchronize()
            times = [
                int(float(check("cuEventElapsedTime", cu.cuEventElapsedTime(a, b))) * 1e6) for a, b in pairwise(marks)
            ]
            for mark in marks:
                cu.cuEventDestroy(mark)
        return self.run(feeds), times


class Bound:
    """A graph over fixed arrays. ``outputs``: name -> array, which each run overwrites."""

    def __init__(self, context: CudaContext, graph: Graph, outputs: dict[str, Any], keep: object):
        self._context, self._graph, self.outputs, self._keep = context, graph, outputs, keep
        weakref.finalize(self, graph.close)

    def run(self, stream: object = None) -> dict[str, Any]:
        """Enqueue one run on ``stream`` (default: the null stream); does not wait."""
        self._context._loaded.activate()
        self._context._launch_graph(self._graph, 0 if stream is None else stream_handle(stream))
        return self.outputs


def prepare(program: Program, options: LoadOptions) -> CudaRunner:
    """Raises EngineError for a malformed program; the GPU is looked at when the first context is made."""
    return CudaRunner(program, options)
