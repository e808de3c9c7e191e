"""Races on a GPU: CUDA graphs of engines and of PyTorch modules take turns, timed between events.

Each candidate is checked first: its error against the module in fp32 (TF32 off), relative to the largest output. Then replays of
all candidates take turns. Needs PyTorch and a GPU.
"""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

import optdnn
from optdnn.runtime.cuda.device import Device
from optdnn.runtime.cuda.launches.graphs import Flush, Stream
from optdnn.runtime.cuda.measuring.clocks import Monitor
from optdnn.runtime.cuda.measuring.measure import replay_times

Replay = Callable[[], object]
SETTLE_S, LOOK_S, CALM_S = 10.0, 0.03, 3e-4
"""Seconds: the longest wait for a quiet GPU, the length of one test, and the median round trip of a launch on a quiet GPU."""
MODES = {"compile": "default", "compile-max": "max-autotune-no-cudagraphs"}
"""Candidate -> the mode of torch.compile. A CUDA graph is captured around both."""
DTYPES = {"fp32": torch.float32, "tf32": torch.float32, "bf16": torch.bfloat16}
"""Precision of an engine -> the type of PyTorch's weights and inputs beside it. fp16 for the others."""


def begin() -> None:
    """The settings of PyTorch for every race: true fp32, cuDNN's own search, no gradients."""
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.benchmark = True
    torch.set_grad_enabled(False)


def end_compilers() -> None:
    """End the processes of torch's compiler, which would disturb the timing."""
    from torch._inductor.async_compile import shutdown_compile_workers

    shutdown_compile_workers()
    torch.cuda.empty_cache()


def settled(round_trip: Callable[[], float], clock: Callable[[], float] = time.perf_counter) -> bool:
    """Wait until the work that other processes enqueued before they were stopped has ended. Returns False if it has not ended
    after :data:`SETTLE_S`.

    ``round_trip``: measures the seconds from a short launch until the host sees its end. If another process has work on the GPU,
    the launch waits for that process's time slice, a millisecond or more.
    """
    end = clock() + SETTLE_S
    while clock() < end:
        trips, until = [], clock() + LOOK_S
        while clock() < until:
            trips.append(round_trip())
        if statistics.median(trips) < CALM_S:
            return True
    return False


def round_trip() -> float:
    """Seconds of a launch of one element, its end seen by the host."""
    x = torch.zeros(1, device="cuda")
    torch.cuda.synchronize()
    start = time.perf_counter()
    x.add_(1)
    torch.cuda.synchronize()
    return time.perf_counter() - start


def race(
    replays: Mapping[str, Replay], stream: Stream, outside: Any, *, rounds: int, seconds: float, flush_l2: bool = False
) -> dict[str, Any]:
    """``rounds`` turns of each candidate, each of ``seconds``. Returns ``times`` (milliseconds) and the clocks meanwhile.

    ``outside`` is PyTorch's view of ``stream``. ``flush_l2``: L2 is emptied before each run.
    """
    flush = Flush(2 * Device.open().l2_bytes, stream) if flush_l2 else None
    monitor, clocks = Monitor.open(), []
    taken: dict[str, list[list[float]]] = {name: [] for name in replays}
    with torch.cuda.stream(outside):
        for run in replays.values():
            replay_times(run, stream, iterations=10)
        for names in orders(list(replays), rounds):
            for name in names:
                ns, _, _ = replay_times(replays[name], stream, duration=seconds, flush=flush)
                taken[name].append([t / 1e6 for t in ns])
                if monitor is not None:
                    clocks.append(monitor.sample())
    if flush is not None:
        flush.close()
    times = {}
    for name, turns in taken.items():
        every = sorted(t for r in turns for t in r)
        times[name] = {
            "ms": statistics.median(every),
            "min_ms": every[0],
            "p99_ms": every[min(len(every) - 1, int(len(every) * 0.99))],
            "rounds_ms": [round(statistics.median(r), 6) for r in turns],
            "runs": len(every),
        }
    sm = [c.sm_mhz for c in clocks if c.sm_mhz]
    held = sorted({h for c in clocks for h in c.held_by})
    return {"times": times, "sm_mhz": [min(sm), max(sm)] if sm else None, "clocks_held_by": held}


def orders(names: Sequence[str], rounds: int) -> list[list[str]]:
    """The order of names in each round: each round begins with the next name. Empty without names."""
    return [[*names[k:], *names[:k]] for k in (turn % len(names) for turn in range(rounds))] if names else []


def dtype_of(precision: str) -> torch.dtype:
    return DTYPES.get(precision, torch.float16)


@contextmanager
def tf32(allowed: bool) -> Iterator[None]:
    """Whether PyTorch may multiply fp32 numbers as tf32, meanwhile."""
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = allowed
    try:
        yield
    finally:
        torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False


def torch_graph(
    module: torch.nn.Module, feeds: Sequence[torch.Tensor], stream: Any, precision: str, *, mode: str | None
) -> tuple[Replay, Callable[[], list[torch.Tensor]]]:
    """The module at a precision, channels last, captured into a CUDA graph: (replay, outputs). ``mode``: of torch.compile;
    None: eager."""
    layouts = {4: torch.channels_last, 5: torch.channels_last_3d}
    run: Any = copy.deepcopy(module).to(dtype_of(precision))
    for weights in (p for p in run.parameters() if p.dim() in layouts):
        weights.data = weights.data.contiguous(memory_format=layouts[weights.dim()])
    for part in run.modules():
        if isinstance(part, torch.nn.RNNBase):
            part.flatten_parameters()  # else cuDNN gathers the weights in every run
    feeds = [t.contiguous(memory_format=layouts[t.dim()]) if t.dim() in layouts else t for t in feeds]
    if mode is not None:
        import torch._inductor.config as inductor

        inductor.freezing = True
        torch._dynamo.reset()
        run = torch.compile(run, mode=mode)
    with tf32(precision == "tf32"):
        return captured(run, feeds, stream)


def captured(
    run: Callable[..., Any], feeds: Sequence[torch.Tensor], stream: Any
) -> tuple[Replay, Callable[[], list[torch.Tensor]]]:
    """A function of PyTorch, captured into a CUDA graph: (replay, outputs)."""
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            run(*feeds)
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        outputs = flat(run(*feeds))
    graph.replay()
    torch.cuda.synchronize()
    used = (run, feeds)  # the graph reads weights and inputs at their addresses: they must live as long as it does

    def found() -> list[torch.Tensor]:
        assert used
        return outputs

    return graph.replay, found


def bind(
    engine: optdnn.Engine, context: Any, inputs: Mapping[str, torch.Tensor]
) -> tuple[Any, dict[str, torch.Tensor]]:
    """An engine's context, bound to arrays on the GPU, and the arrays of its outputs."""
    out = {s.name: torch.empty(s.shape, dtype=getattr(torch, s.dtype.name), device="cuda") for s in engine.outputs}
    return context.bind(inputs, out), out


def flat(result: Any) -> list[torch.Tensor]:
    """The tensors of a module's result."""
    return [result] if isinstance(result, torch.Tensor) else [t for t in result if isinstance(t, torch.Tensor)]


def errors(got: Sequence[torch.Tensor], want: Sequence[torch.Tensor]) -> float:
    """Largest difference of any output, of its largest magnitude; NaN counts as infinite."""
    if len(got) != len(want):
        return float("inf")
    worst = 0.0
    for a, b in zip(got, want, strict=True):
        if a.shape != b.shape or not torch.isfinite(a).all():
            return float("inf")
        worst = max(worst, float((a.float() - b.float()).abs().max() / b.abs().max().clamp_min(1e-30)))
    return worst
