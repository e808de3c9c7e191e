"""Measures programs on the GPU for the autotuner: whether a candidate is correct, its time, and the faster of networks.

A candidate is a small program. It runs on operands that look like activations. The first candidate is compared with the NumPy
meaning of its steps, on a sample of the batch. Once one has passed, the others are compared with its whole result on the GPU. Only
then is a candidate timed: in a CUDA graph of many launches, each depending on the previous one, as in a network.
"""

from __future__ import annotations

import statistics
import struct
import time
import zlib
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import as_strided

from optdnn.errors import OptdnnError, RunError
from optdnn.runtime.cuda.allocator import DeviceMemory, download, fill
from optdnn.runtime.cuda.compile.nvrtc import KernelCache, KernelError, Recipe, version
from optdnn.runtime.cuda.device import Device, Function, Launch, check, driver
from optdnn.runtime.cuda.launches.graphs import Graph, Stream, time_runs
from optdnn.runtime.cuda.launches.plan import CudaStep, OperandView
from optdnn.runtime.cuda.libraries.handles import version_of
from optdnn.runtime.cuda.memory.shared import Pool
from optdnn.runtime.cuda.runner import CudaContext, CudaRunner
from optdnn.runtime.cuda.trials.check import FencedArena, relative_error
from optdnn.runtime.program import Program
from optdnn.runtime.simulate.runner import evaluator
from optdnn.runtime.steps.executor import LoadOptions
from optdnn.types import Array, DType, dtype_name, is_float

TOLERANCE = {"fp16": 4e-3, "bf16": 3e-2, "fp32": 1e-4, "fp64": 1e-9}
"""Largest error of a result, as a fraction of its largest magnitude. The value for fp32 is for long sums. Products of factors
rounded to tf32 exceed it, unless the step's meaning rounds them, too."""
BATCHWISE = frozenset({
    "Conv", "ConvSum", "ChainedConv", "PooledConv", "PooledImageConv", "SeparableConv", "ExcitationGate", "ConvTranspose",
    "MaxPool", "AveragePool", "LpPool", "GlobalAveragePool", "GlobalMaxPool", "SpaceToDepthImage", "BlocksToSpace",
    "ConvBlocks", "ImageConv", "LayerNormalization", "RMSNormalization", "DeviationNormalization",
    "Softmax", "LogSoftmax",
})  # fmt: skip
"""Kinds of two axes or more; their results at a position of axis 0 depend only on the same position of their operands."""
SAMPLE = 500_000
"""Approximate number of elements of a batchwise result that are computed in NumPy."""
GRAPH_SECONDS, MOST_LAUNCHES = 300e-6, 40
"""The time that a timed graph should take, in seconds, and the most launches in it."""
HANGS, SLOWER = 10.0, 30.0
"""Launches are assumed to hang after this many seconds, or after this many times the expected time, whichever is longer."""
UNWRITTEN = 0xFF
"""The byte that fills a candidate's arena: NaN in every floating type."""
DISTURBANCE = 1 << 22
"""Number of elements that :meth:`GpuTimer.disturb` writes: some microseconds on all multiprocessors."""
_CPP = {"fp16": "f16", "bf16": "bf16", "fp32": "f32", "fp64": "f64"}


class TrialFailed(OptdnnError):
    """A candidate must not be used: it does not compile or launch, or gives wrong results."""


class KernelHangs(RunError):
    """A kernel does not end. It cannot be ended either, so nothing more can be measured in this process."""


class KernelCrashes(RunError):
    """A kernel has ended the process's use of the GPU, for example by an illegal address."""


class MemoryCorrupted(RunError):
    """A kernel has written outside of its buffers: other data in the process's memory may be wrong."""


@dataclass(frozen=True)
class Machine:
    """The conditions of measured times. ``device`` names the GPU (times of another GPU mean nothing). ``versions`` of software may
    change its speed a little: a measurement under other versions still ranks. ``place`` distinguishes several equal GPUs."""

    device: str
    l2_bytes: int
    versions: Mapping[str, str]
    place: str = ""


class Timer:
    """The common part of the timer in the worker and its counterpart in the parent."""

    cache: KernelCache

    def compile(self, recipes: Sequence[Recipe], workers: int) -> None:
        """Compile the recipes into the cache. A recipe that does not compile fails when it is tried."""
        with suppress(KernelError):
            self.cache.get_many(recipes, workers)

    def race(self, networks: Sequence[Any], rounds: int) -> list[float]:
        """Median milliseconds of one inference of each network, from its ``times()`` in this many rounds."""
        times: list[list[float]] = [[] for _ in networks]
        for _ in range(rounds):
            for network, own in zip(networks, times, strict=True):
                own += network.times()
        return [statistics.median(own) for own in times]


class GpuTimer(Timer):
    """Measures on GPU 0. Raises RunError without a GPU. One thread uses it. ``libraries``: the libraries whose versions matter."""

    def __init__(self, libraries: Collection[str] = ()):
        self.device = Device.open()
        self.cache = KernelCache()
        self.stream = Stream()
        driver_version = ".".join(map(str, self.device.driver_version))
        libraries = {
            name: v for name in ("cudnn", "cublaslt") if name in libraries and (v := version_of(name)) is not None
        }
        self.machine = Machine(
            f"{self.device.name} x{self.device.multiprocessors}", self.device.l2_bytes,
            {"driver": driver_version, "nvrtc": ".".join(map(str, version())), **libraries}, self.device.place,
        )  # fmt: skip
        self._tools: dict[tuple[str, str], Function] = {}
        self._golden: tuple[str, list[tuple[DeviceMemory, int]]] | None = None
        self.pool = Pool()
        """Constants and kernels of the loaded networks."""
        self._difference = DeviceMemory(256, "the difference of two results")
        self._disturbed: DeviceMemory | None = None
        self._alone_s = 0.0

    # ---------------------------------------------------------------- candidates

    def trial(self, key: str, program: Program, *, cold: bool, give_up: float) -> float:
        """Seconds of one run of a candidate. ``key`` names the problem: all its candidates give the same results.

        ``cold``: weights come from memory, because the network's do not stay in L2. A candidate that takes longer than
        ``give_up`` seconds is timed roughly. Its memory is between fences. Raises TrialFailed; CudaError, KernelHangs or
        MemoryCorrupted if this process must not measure any more.
        """
        arena: FencedArena | None = None
        try:
            arena = FencedArena(program.arena_bytes)
            context = CudaRunner(program, TRUSTED).context(arena)
            arena.fill(UNWRITTEN)
            self._check(key, program, context)
            seconds = self._seconds(program, context, cold, give_up)
            need_intact(arena)
            return seconds
        except TrialFailed:
            need_intact(arena)
            raise
        except KernelError as error:
            raise TrialFailed(error.message.splitlines()[0]) from error
        except (KernelHangs, MemoryCorrupted):
            raise
        except RunError as error:  # out of memory, for example, or a library that has fewer plans than it ranks
            self.stream.synchronize()  # raises if the context is lost: nothing more can be measured in this process
            need_intact(arena)
            raise TrialFailed(error.message) from error

    def _check(self, key: str, program: Program, context: CudaContext) -> None:
        self._feed(context)
        for _, i in program.outputs:
            if i not in {j for _, j in program.inputs}:
                self._poison(context, i)
        if self._golden is not None and self._golden[0] == key and len(self._golden[1]) == len(program.outputs):
            for launch in context.launches({}):
                launch.enqueue(context.stream.handle)
            self._alone_s = wait(context.stream)
            if all(self._like(context, i, g) for (_, i), g in zip(program.outputs, self._golden[1], strict=True)):
                return
            self._feed(context)  # padding may differ: NumPy decides
        self._check_meaning(context)
        self._golden = key, [(self._copy(context, i), i) for _, i in program.outputs]

    def _check_meaning(self, context: CudaContext) -> None:
        self._alone_s = 0.0
        for step, parsed, launch in zip(context.program.steps, context.runner.steps, context.launches({}), strict=True):
            if not isinstance(parsed, CudaStep):
                raise TrialFailed(f"a step of {step.executor!r} is not a kernel")
            operands = (*step.inputs, *step.outputs)
            rows = _sample(parsed, {n for n, i in enumerate(operands) if context.program.buffers[i].blob is not None})
            reads = [None if v is None else self._view(context, operands, v, rows) for v in parsed.meaning.reads]
            for i in step.outputs:
                if i not in step.inputs:
                    self._poison(context, i)
            launch.enqueue(context.stream.handle)
            self._alone_s += wait(context.stream)
            with np.errstate(all="ignore"):
                wanted = evaluator(parsed)(reads)
            for v, want in zip(parsed.meaning.writes, wanted, strict=False):
                if v is None:
                    continue
                got = self._view(context, operands, v, rows)
                error = relative_error(got, np.asarray(want))
                limit = TOLERANCE.get(dtype_name(got.dtype), 0.0)
                if not error <= limit:
                    raise TrialFailed(
                        f"wrong result of {parsed.meaning.kind}: error {error:.2e} of the largest, {limit:.0e} allowed"
                    )

    def _view(
        self,
        context: CudaContext,
        operands: Sequence[int],
        v: OperandView,
        rows: dict[int, list[int]],
    ) -> Array:
        """A view's elements on the host, or only those at some positions of axis 0."""
        buffer = operands[v.operand]
        dtype = context.program.buffers[buffer].dtype
        if not v.shape or 0 in v.shape:
            return self._elements(context, buffer, v.offset, v.shape, v.strides, dtype)
        wanted = rows.get(v.operand)
        if wanted is None or v.shape[0] != rows[-1][0]:
            return self._elements(context, buffer, v.offset, v.shape, v.strides, dtype)
        parts = [
            self._elements(context, buffer, v.offset + r * v.strides[0], (1, *v.shape[1:]), v.strides, dtype)
            for r in wanted
        ]
        return np.concatenate(parts)

    @staticmethod
    def _elements(
        context: CudaContext, buffer: int, offset: int, shape: Sequence[int], strides: Sequence[int], dtype: DType
    ) -> Array:
        if 0 in shape:
            return np.empty(shape, dtype)
        ends = [(n - 1) * s for n, s in zip(shape, strides, strict=True)]
        low, high = sum(min(0, e) for e in ends), sum(max(0, e) for e in ends)
        pointer = context.memory.address(buffer, {}) + (offset + low) * dtype.itemsize
        flat = download(pointer, np.empty(high - low + 1, dtype))
        return as_strided(flat[-low:], shape, [s * dtype.itemsize for s in strides]).copy()

    # ---------------------------------------------------------------- operands and results

    def _feed(self, context: CudaContext) -> None:
        """Write values like activations to the inputs: floats around 0, the same for equal names; integers are 0."""
        for _, i in context.program.inputs:
            b = context.program.buffers[i]
            if i in context.runner.on_host:
                continue
            name, pointer = dtype_name(b.dtype), context.memory.address(i, {})
            if name in _CPP:
                count = (b.nbytes or 0) // b.dtype.itemsize
                values = struct.pack("<QQI4x", pointer, count, zlib.crc32(b.name.encode()))
                self._run(name, "fill", values, count)
            elif b.nbytes:
                fill(pointer, 0, b.nbytes)
        self.stream.synchronize()

    def _poison(self, context: CudaContext, buffer: int) -> None:
        context.memory.fill(buffer, 0xFF if is_float(context.program.buffers[buffer].dtype) else 0)

    def _copy(self, context: CudaContext, buffer: int) -> DeviceMemory:
        size = context.program.buffers[buffer].nbytes or 0
        copy = DeviceMemory(size, "a result to compare with")
        if size:
            check("cuMemcpyDtoD", driver().cuMemcpyDtoD(copy.pointer, context.memory.address(buffer, {}), size))
        return copy

    def _like(self, context: CudaContext, buffer: int, golden: tuple[DeviceMemory, int]) -> bool:
        """Whether a result equals the result of the candidate that was checked."""
        b, (memory, _) = context.program.buffers[buffer], golden
        name = dtype_name(b.dtype)
        if memory.size != b.nbytes or name not in _CPP:
            return False
        fill(self._difference.pointer, 0, 16)
        count = memory.size // b.dtype.itemsize
        values = struct.pack(
            "<QQQQ", context.memory.address(buffer, {}), memory.pointer, count, self._difference.pointer
        )
        self._run(name, "compare", values, count)
        self.stream.synchronize()
        sums = download(self._difference.pointer, np.zeros(4, np.float32))
        error, scale, odd = float(sums[0]), float(sums[1]), int(sums.view(np.uint32)[2])
        return odd == 0 and error <= 2 * TOLERANCE[name] * scale

    def _run(self, dtype: str, name: str, values: bytes, count: int) -> None:
        key = (dtype, name)
        if key not in self._tools:
            text = f"typedef {_CPP[dtype]} Element;\n"
            recipe = Recipe("timer.cu", self.device.arch, {"generated.cuh": text}, ("--std=c++17",))
            self._tools[key] = Function(self.cache.get(recipe), name)
        blocks = max(1, min(-(-count // 256), 8 * self.device.multiprocessors))
        Launch(self._tools[key], (blocks, 1, 1), 256, [values], dependent=False).enqueue(self.stream.handle)

    def disturb(self) -> None:
        """Keep all multiprocessors busy for a moment, on a separate stream."""
        self._disturbed = self._disturbed or DeviceMemory(4 * DISTURBANCE, "the disturbance of a network's runs")
        values = struct.pack("<QQI4x", self._disturbed.pointer, DISTURBANCE, 1)
        self._run("fp32", "fill", values, DISTURBANCE)

    def usable(self) -> bool:
        """Whether the process can still use the GPU."""
        cu = driver()
        return cu.cuStreamQuery(self.stream.handle)[0] in (cu.CUresult.CUDA_SUCCESS, cu.CUresult.CUDA_ERROR_NOT_READY)

    # ---------------------------------------------------------------- times

    def _seconds(self, program: Program, context: CudaContext, cold: bool, give_up: float) -> float:
        rough = self._timed(context, [{}] * 4, repeats=3)
        if rough > give_up:
            return rough
        count = max(4, min(MOST_LAUNCHES, int(GRAPH_SECONDS / rough)))
        places, keep = self._copies(context, count) if cold else ([{}], [])
        seconds = self._timed(context, [places[i % len(places)] for i in range(count)], repeats=9)
        del keep
        return seconds

    def _timed(self, context: CudaContext, places: Sequence[Mapping[int, int]], repeats: int) -> float:
        launches_at = {id(p): context.launches(p) for p in {id(p): p for p in places}.values()}
        launches = [x for p in places for x in launches_at[id(p)]]
        graph = Graph(launches, context.stream)
        expected = self._alone_s * len(places) * (2 + repeats)
        times = time_runs(
            lambda: graph.replay(context.stream), context.stream, warmup=2, repeats=repeats,
            wait=partial(wait, context.stream, limit_of(expected)),
        )  # fmt: skip
        graph.close()
        return statistics.median(times) / len(places) / 1e3

    def _copies(self, context: CudaContext, count: int) -> tuple[list[dict[int, int]], list[Any]]:
        """Addresses of enough copies of the constants that no use finds them in L2."""
        used = sorted(
            {i for s in context.program.steps for i in s.inputs if context.program.buffers[i].blob is not None}
        )
        total = sum(context.program.buffers[i].nbytes or 0 for i in used)
        if total < 1 << 16:
            return [{}], []
        copies = min(count, -(-3 * self.machine.l2_bytes // (2 * total)))
        keep = [{i: self._copy(context, i) for i in used} for _ in range(copies)]
        return [{i: m.pointer for i, m in k.items()} for k in keep], keep

    # ---------------------------------------------------------------- networks

    def load(self, program: Program) -> Network:
        """A whole network, ready to be raced. Raises RunError; KernelHangs if it does not end."""
        context = CudaRunner(program, LoadOptions(trust_cubins=True, pool=self.pool)).context()
        self._feed(context)
        return Network(context)


TRUSTED = LoadOptions(trust_cubins=True)
"""Measured programs come from this build, so they are trusted."""


def need_intact(arena: FencedArena | None) -> None:
    """Raise MemoryCorrupted if something was written outside of the arena and the other buffers."""
    if arena is not None and not arena.intact(UNWRITTEN):
        raise MemoryCorrupted("it writes outside of its buffers")


def limit_of(expected: float) -> float:
    """Seconds after which launches that should take ``expected`` seconds are assumed to hang."""
    return max(HANGS, SLOWER * expected)


def wait(stream: Stream, limit: float = HANGS) -> float:
    """Wait for a stream; returns the seconds that it took. Raises KernelHangs if it takes longer than ``limit`` seconds."""
    cu, begin = driver(), time.monotonic()
    while (status := cu.cuStreamQuery(stream.handle)[0]) == cu.CUresult.CUDA_ERROR_NOT_READY:
        passed = time.monotonic() - begin
        if passed > limit:
            raise KernelHangs(f"it has not ended after {limit:.0f} s")
        if passed > 0.01:
            time.sleep(0.0005)
    check("cuStreamQuery", (status,))
    return time.monotonic() - begin


class Network:
    """A network as one CUDA graph."""

    def __init__(self, context: CudaContext):
        self.context = context
        self.graph = context.graph()
        self.graph.replay(context.stream)
        self._alone_s = wait(context.stream, 2 * HANGS)
        self.rough = min(self._run(3, 1))

    def _run(self, repeats: int, inner: int) -> list[float]:
        stream = self.context.stream
        limit = limit_of(self._alone_s * inner * (3 + repeats))
        return time_runs(
            lambda: self.graph.replay(stream), stream, warmup=3, repeats=repeats, inner=inner,
            wait=partial(wait, stream, limit),
        )  # fmt: skip

    def times(self) -> list[float]:
        """Milliseconds of one inference, several times; each value is the mean of some consecutive ones."""
        inner = max(1, min(10, int(1.5 / max(self.rough, 1e-3))))
        return self._run(7 if self.rough < 1 else 4, inner)

    def close(self) -> None:
        self.graph.close()


def _sample(step: CudaStep, constants: set[int]) -> dict[int, list[int]]:
    """Operand number -> the positions of axis 0 that are compared (absent: all). The key -1 holds the axis's length."""
    m = step.meaning
    results = [v for v in m.writes if v is not None]
    if m.kind not in BATCHWISE or not results or len(results[0].shape) < 2:
        return {-1: [-1]}
    n, size = results[0].shape[0], int(np.prod(results[0].shape[1:], dtype=np.int64))
    count = max(1, min(n, SAMPLE // max(size, 1)))
    if count == n:
        return {-1: [-1]}
    rows = sorted({int(r) for r in np.linspace(0, n - 1, count)} | {n - 1})
    numbers = {v.operand for v in (*m.reads, *m.writes) if v is not None} - constants
    return {-1: [n], **dict.fromkeys(numbers, rows)}
