"""The measuring process of ``targets.py``: reads one order (JSON) per line, answers each with one line "ANSWER {json}".

An order names a row, the folder with its engines, inputs and weights, and who takes part. Each candidate is right first (its error
against the module in fp32, TF32 off, beside what another input changes), then they take turns. Once the process has loaded what it
needs it says "UP". Where the order says "wait", what torch.compile makes is made first; then it says "READY" and goes on when it is
given a line.
"""

from __future__ import annotations

import copy
import gc
import json
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch_modules import factory

import optdnn
from optdnn.runtime.cuda.alone import alone
from optdnn.runtime.cuda.clocks import Monitor
from optdnn.runtime.cuda.device import Device
from optdnn.runtime.cuda.graphs import Flush, Stream
from optdnn.runtime.cuda.measure import replay_times

Replay = Callable[[], object]
WRONG = 0.03
"""Error against fp32, of the largest output, beyond which a candidate at fp16 is called wrong (unless PyTorch's is as large)."""
WRONG_8BIT = 0.25
"""The same at int8 and fp8: the logits of a network with random weights are small differences."""


def main() -> None:
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.benchmark = True
    torch.set_grad_enabled(False)
    device = Device.open()
    torch.zeros(1, device="cuda")
    with suppress(ImportError):
        import torchvision  # noqa: F401
        from transformers import BertModel  # noqa: F401
    print("UP", flush=True)
    for text in sys.stdin:
        try:
            order = json.loads(text)
            # Not beside those that tune; whoever is told to wait is told, too, when nobody else measures.
            turn = nullcontext() if order.get("wait") else alone(device.place)
            with turn:
                answer = measure(order)
        except Exception as error:
            fatal = "CUDA" in str(error) or isinstance(error, (RuntimeError, MemoryError))
            answer = {"error": f"{type(error).__name__}: {error}"[:600], "fatal": fatal}
        print("ANSWER " + json.dumps(answer), flush=True)
        gc.collect()
        torch.cuda.empty_cache()


_modules: dict[str, torch.nn.Module] = {}


def module_of(row: Mapping[str, Any], folder: Path) -> torch.nn.Module:
    """The row's module in fp32 on the GPU; the last one is kept, since rows of one network follow each other."""
    from targets import Row, state_name

    key = state_name(Row(**row))
    if key not in _modules:
        _modules.clear()
        with np.load(folder / f"{key}.npz") as state:
            _modules[key] = factory(row["model"], dict(state)).cuda()
    return _modules[key]


def measure(order: Mapping[str, Any]) -> dict[str, Any]:
    """One row."""
    row, folder = order["row"], Path(order["folder"])
    from targets import Row

    name = Row(**row).name
    given = dict(np.load(folder / f"{name}.in.npz"))
    other = dict(np.load(folder / f"{name}.other.npz"))
    stream = Stream()
    outside = torch.cuda.ExternalStream(stream.handle)
    module = module_of(row, folder)
    feeds = [torch.from_numpy(a).cuda() for a in given.values()]
    want = flat(module(*feeds))
    moved = errors(flat(module(*(torch.from_numpy(a).cuda() for a in other.values()))), want)
    found: dict[str, Any] = {"another_input": moved, "candidates": {}}
    half = [t.half() if t.is_floating_point() else t for t in feeds]
    replays: dict[str, Replay] = {}
    candidates: dict[str, dict[str, Any]] = found["candidates"]
    torch_error = 0.0
    kept: list[Any] = []
    waits = order.get("wait", False)
    for how in sorted(order["torch"], key=lambda how: how != "compile") if waits else order["torch"]:
        try:
            start = time.perf_counter()
            run, outputs = torch_graph(module, half, outside, compiled=how == "compile")
            replays[how] = run
            torch_error = max(torch_error, errors(outputs(), want))
            candidates[how] = {"error_rel": torch_error, "prepare_s": round(time.perf_counter() - start, 2)}
            kept.append(outputs)
        except Exception as error:
            candidates[how] = {"error": f"{type(error).__name__}: {error}"[:400]}
            torch.cuda.synchronize()
        if waits and how == "compile":
            wait_for_turn()
    inputs = dict(zip(given, half, strict=True))
    for which in order["engines"]:
        try:
            start = time.perf_counter()
            engine = optdnn.load(folder / f"{name}.{which}.engine")
            context: Any = engine.context()
            bound, out = bind(engine, context, inputs)
            bound.run(stream)
            stream.synchronize()
            load = time.perf_counter() - start
            got = [t.clone() for t in out.values()]
            error = errors(got, want)
            bound.run(stream)
            stream.synchronize()
            repeats = all(torch.equal(a, b) for a, b in zip(got, out.values(), strict=True))
            candidates[which] = {"error_rel": error, "load_s": round(load, 3), "repeats": repeats}
            if not error <= max(WRONG_8BIT if "8" in row["precision"] else WRONG, 2 * torch_error):
                candidates[which]["error"] = f"wrong: {error:.3g} of the largest output"
            replays[which] = lambda bound=bound: bound.run(stream)  # type: ignore[misc]
            kept.append((engine, context, bound, out))
        except Exception as error:
            candidates[which] = {"error": f"{type(error).__name__}: {error}"[:400]}
            if "CUDA_ERROR" in str(error):
                found["fatal"] = True
                return found
    found |= race(replays, candidates, stream, outside, order)
    return found


def wait_for_turn() -> None:
    """End the compiler's processes, say that all that takes long is done, and wait for this row's turn."""
    from torch._inductor.async_compile import shutdown_compile_workers

    shutdown_compile_workers()
    torch.cuda.empty_cache()
    print("READY", flush=True)
    sys.stdin.readline()


def race(
    replays: Mapping[str, Replay],
    candidates: Mapping[str, dict[str, Any]],
    stream: Stream,
    outside: Any,
    order: Mapping[str, Any],
) -> dict[str, Any]:
    """Turns; fills in the times, gives what is common to all."""
    flush = Flush(2 * Device.open().l2_bytes, stream) if order["flush_l2"] else None
    monitor, clocks = Monitor.open(), []
    taken: dict[str, list[list[float]]] = {name: [] for name in replays}
    with torch.cuda.stream(outside):
        for run in replays.values():
            replay_times(run, stream, iterations=10)
        for turn in range(order["rounds"]):
            names = list(replays)
            for name in names[turn % len(names) :] + names[: turn % len(names)]:
                ns, _, _ = replay_times(replays[name], stream, duration=order["turn"], flush=flush)
                taken[name].append([t / 1e6 for t in ns])
                if monitor is not None:
                    clocks.append(monitor.sample())
    if flush is not None:
        flush.close()
    for name, rounds in taken.items():
        medians = [statistics.median(r) for r in rounds]
        every = sorted(t for r in rounds for t in r)
        candidates[name] |= {
            "median_ms": statistics.median(every),
            "min_ms": every[0],
            "p99_ms": every[min(len(every) - 1, int(len(every) * 0.99))],
            "round_medians_ms": [round(m, 6) for m in medians],
            "runs": len(every),
        }
    sm = [c.sm_mhz for c in clocks if c.sm_mhz]
    held = sorted({h for c in clocks for h in c.held_by})
    return {"sm_mhz": [min(sm), max(sm)] if sm else None, "clocks_held_by": held}


def torch_graph(
    module: torch.nn.Module, feeds: Sequence[torch.Tensor], stream: Any, *, compiled: bool
) -> tuple[Replay, Callable[[], list[torch.Tensor]]]:
    """The module at fp16, channels last, captured into a CUDA graph: (replay, outputs)."""
    layouts = {4: torch.channels_last, 5: torch.channels_last_3d}
    ranks = {p.dim() for p in module.parameters()} & layouts.keys()
    run: Any = copy.deepcopy(module).half().to(memory_format=layouts[max(ranks, default=4)])
    for part in run.modules():
        if isinstance(part, torch.nn.RNNBase):
            part.flatten_parameters()  # else cuDNN gathers the weights in every run
    feeds = [t.contiguous(memory_format=layouts[t.dim()]) if t.dim() in layouts else t for t in feeds]
    if compiled:
        import torch._inductor.config as inductor

        inductor.freezing = True
        run = torch.compile(run, mode="max-autotune-no-cudagraphs")
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
    """An engine's context bound to arrays on the GPU, and those that it writes."""
    dtypes = {"float16": torch.float16, "float32": torch.float32, "int64": torch.int64}
    out = {s.name: torch.empty(s.shape, dtype=dtypes[s.dtype.name], device="cuda") for s in engine.outputs}
    return context.bind(inputs, out), out


def flat(result: Any) -> list[torch.Tensor]:
    """The tensors of what a module returns."""
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


if __name__ == "__main__":
    main()
