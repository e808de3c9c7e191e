"""Whole networks on the GPU, are they right? Each is built for it, run, and held against ONNX Runtime's fp32 on the CPU.

    python benchmarks/gpu/networks.py OUT.json [--zoo] [--shared FOLDER] [--precisions fp32,tf32,fp16,bf16] [--checks]
                                      [--only TEXT,…] [--seconds 200] [--target simulate]

``--shared``: FOLDER holds ``fill.py`` and ``graphs/NAME.onnx`` with ``NAME.json`` (skeletons without weights), or
``graphs.tar.xz`` with these. Many networks are built at once, a few run; one that fails is a row with its error.
Of each output: max |error| over max |output| (``errors``), and what another input changes (``another_input``); that a run repeats
bit for bit; which operators ran on the CPU; where an output holds boxes, how many of the kept ones are also ONNX Runtime's.
``agrees``: at fp32 within ``WHOLE``; at others nearer than another input's result, since a network of seeded random weights
amplifies what rounding does: that the kernels are right, ``--checks`` tells. Of boxes ``KEPT`` are the same.

``--checks``: also every launch by itself against its step's meaning, on the GPU's own operands, results poisoned with NaN
(``steps``: how many, the worst error, those beyond ``STEP``); single launches against the graph, to the bit (``singly``); runs on
an arena full of NaN and of something else, between fences (``arena``: what is wrong).
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import queue
import tarfile
import tempfile
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from agreement import BOX, SCORE, error_of, fill_module, onnxruntime_results, same_boxes
from targets import facts

import optdnn
from optdnn.checks import STEP

WHOLE = 5e-4
"""Of a whole network at fp32. Two right runs of yolox_s are 2e-4 apart (fp32_truth.py: and as far from float64)."""
COARSER = {"fp32": 1, "tf32": 10, "fp16": 10, "bf16": 50}
"""How much further than at fp32 the corners and scores of a box may be."""
KEPT, KEPT_FP32 = 0.9, 0.98
"""Share of a detector's boxes that must be the same at fp32, and at others of those that are still the same where ONNX Runtime at
fp32 is given weights and inputs of that precision: scores that are nearly tied decide which are kept."""

PROCESSES = 3
"""That run networks on the GPU at a time; building, which needs none, has most of the cores."""
LIMIT, LAST = 120.0, 20.0
"""Seconds that a network may take on the GPU, and how long after the last was built the last may begin there."""


def model_of(name: str, folder: Path) -> tuple[Any, dict[str, Any], dict[str, Any]]:
    """A network with two sets of inputs. ``zoo/NAME``, or a skeleton of ``folder``."""
    if name.startswith("zoo/"):
        from optdnn.models import zoo
        from optdnn.runtime.feeds import random_feeds

        model = zoo.build(name[4:], batch=1)
        inputs = optdnn.build(model, target="reference").inputs
        return model, random_feeds(inputs, seed=1), random_feeds(inputs, seed=2)
    fill = fill_module(folder)
    model = fill.fill(str(folder / "graphs" / f"{name}.onnx"))
    return model, fill.feeds(model), fill.feeds(model, seed=4)


def checks(engine: Any, feeds: dict[str, Any], precision: str) -> dict[str, Any]:
    """What the engine's own checks say."""
    from optdnn.runtime.cuda.check import check_arena, check_steps, run_singly
    from optdnn.runtime.cuda.runner import CudaRunner
    from optdnn.runtime.executor import LoadOptions

    runner = CudaRunner(engine.program, LoadOptions())
    context: Any = runner.context()
    steps = check_steps(context, feeds)
    graph, singly = context.run(feeds), run_singly(context, feeds)
    wrong = [e for e in steps if not e.error <= STEP[precision]]
    worst = max(steps, key=lambda e: e.error, default=None)
    return {
        "steps": {
            "count": len(steps), "worst": worst and [worst.error, worst.kind, worst.kernel],
            "wrong": [[e.step, e.kind, e.kernel, e.nodes, e.error] for e in wrong][:8],
        },
        "singly": all(np.array_equal(graph[k], v, equal_nan=True) for k, v in singly.items()),
        "arena": check_arena(runner, feeds),
    }  # fmt: skip


def right(found: dict[str, Any]) -> bool:
    """Whether nothing speaks against an engine."""
    good = found["repeats"] and found["agrees"] and found.get("singly", True)
    return bool(good and not found.get("arena") and not found.get("steps", {}).get("wrong"))


def agrees(found: dict[str, Any], another: list[float], precision: str) -> bool:
    """Whether the whole network's result is ONNX Runtime's, as far as its precision lets it be."""
    boxes = found.get("boxes_as_a_set", {"of": 0})
    if boxes["of"]:
        return bool(boxes["same"] >= (KEPT * boxes["rounded"] if "rounded" in boxes else KEPT_FP32 * boxes["of"]))
    if precision == "fp32":
        return max(found["errors"], default=0.0) <= WHOLE
    return all(error <= max(moved, WHOLE) for error, moved in zip(found["errors"], another, strict=True))


def rounded(model: Any, feeds: dict[str, Any], precision: str) -> tuple[Any, dict[str, Any]]:
    """The model and its inputs with weights and inputs that have been at a precision (tf32: about as fine as fp16)."""
    import onnx
    from onnx import numpy_helper

    from optdnn.types import BF16, FP16

    dtype = BF16 if precision == "bf16" else FP16
    made = onnx.ModelProto()
    made.CopyFrom(model)
    for i, tensor in enumerate(made.graph.initializer):
        value = numpy_helper.to_array(tensor)
        if value.dtype == np.float32 and value.ndim > 1:
            value = value.astype(dtype).astype(np.float32)
            made.graph.initializer[i].CopyFrom(numpy_helper.from_array(value, tensor.name))
    floats = {k: v.astype(dtype).astype(np.float32) for k, v in feeds.items() if v.dtype == np.float32}
    return made, {**feeds, **floats}


@dataclass
class Made:
    """A network's engines (precision -> file, or why there is none), with what they are run on and held against."""

    row: dict[str, Any]
    feeds: dict[str, Any]
    want: list[Any]
    engines: dict[str, Path | str]
    build_s: dict[str, float]
    rounded: dict[str, list[Any]]
    """Of a detector: ONNX Runtime's results with weights and inputs of a precision."""


def make(name: str, folder: Path, target: str, precisions: Sequence[str], scratch: Path, until: float) -> Made | str:
    """Everything that needs no GPU; or why it was not done."""
    if time.time() > until:
        return "not begun in time"
    model, feeds, others = model_of(name, folder)
    want, other = onnxruntime_results(model, feeds), onnxruntime_results(model, others)
    row = {"network": name, "another_input": [_moved(a, b) for a, b in zip(other, want, strict=True)]}
    made = Made(row, feeds, want, {}, {}, {})
    for precision in precisions:
        start, file = time.perf_counter(), scratch / f"{name.replace('/', '-')}-{precision}.engine"
        shapes = {k: v.shape for k, v in feeds.items()}
        try:
            optdnn.build(model, target=target, precision=precision, tactics="heuristic", shapes=shapes).save(file)
            made.engines[precision] = file
        except Exception as error:
            made.engines[precision] = f"{type(error).__name__}: {error}"[:1500]
        made.build_s[precision] = round(time.perf_counter() - start, 2)
        if precision != "fp32" and same_boxes(want, want) is not None:
            made.rounded[precision] = onnxruntime_results(*rounded(model, feeds, precision))
    return made


def run(made: Made, checked: bool) -> dict[str, Any]:
    """The row of a network: what needs the GPU."""
    for precision, file in made.engines.items():
        found: dict[str, Any] = {"build_s": made.build_s[precision]}
        made.row[precision] = found
        if isinstance(file, str):
            found["failed"] = file
            continue
        try:
            engine = optdnn.load(file)
            file.unlink()
            got, again = engine.run(made.feeds), engine.run(made.feeds)
            results = [got[s.name] for s in engine.outputs]
            found |= {
                "errors": [error_of(a, w) for a, w in zip(results, made.want, strict=True)],
                "repeats": all(np.array_equal(got[k], again[k], equal_nan=True) for k in got),
                "on_cpu": sorted({o["kind"] for o in engine.meta.get("host", {}).get("operators", [])}),
            }
            near = {"box": BOX * COARSER[precision], "score": SCORE * COARSER[precision]}
            if (boxes := same_boxes(results, made.want, **near)) is not None:
                found["boxes_as_a_set"] = boxes
                if precision in made.rounded:
                    alone = same_boxes(made.rounded[precision], made.want, **near)
                    boxes["rounded"] = alone and alone["same"]
            found["agrees"] = agrees(found, made.row["another_input"], precision)
            if checked:
                found |= checks(engine, made.feeds, precision)
            found["right"] = right(found)
        except Exception as error:
            found["failed"] = f"{type(error).__name__}: {error}"[:1500]
    return made.row


class OnGpu:
    """Processes that run networks on the GPU; one that has died or hangs is replaced. They are few: a GPU takes turns between
    processes, and each copy of a checked step waits for its turn."""

    def __init__(self) -> None:
        self._free: queue.Queue[Any] = queue.Queue()
        for _ in range(PROCESSES):
            self._free.put(_process())

    def row(self, made: Made, checked: bool, limit: float) -> dict[str, Any]:
        """What :func:`run` gives, within ``limit`` seconds."""
        process = self._free.get()
        try:
            found: dict[str, Any] = process.apply_async(run, (made, checked)).get(limit)
        except multiprocessing.TimeoutError:
            process.terminate()
            process = _process()
            found = made.row | {"failed": f"not done in {limit:.0f} s, or its process ended"}
        except Exception as error:
            found = made.row | {"failed": f"{type(error).__name__}: {error}"[:1500]}
        finally:
            self._free.put(process)
        return found

    def close(self) -> None:
        """End the processes."""
        for _ in range(PROCESSES):
            self._free.get().terminate()


def _process() -> Any:
    return multiprocessing.get_context("spawn").Pool(1)


def _shown(found: dict[str, Any]) -> Any:
    """A row in few words."""
    if "failed" in found:
        return found["failed"][:200]
    worst = f"{max(found['errors'], default=0.0):.1e}"
    faults = {k: found[k] for k in ("repeats", "singly", "agrees") if not found.get(k, True)}
    faults |= {"boxes": found["boxes_as_a_set"]} if "boxes_as_a_set" in found else {}
    faults |= {"arena": found["arena"]} if found.get("arena") else {}
    steps = found.get("steps", {})
    faults |= {"wrong": steps["wrong"][:3]} if steps.get("wrong") else {}
    return [worst, f"{steps['worst'][0]:.1e}" if steps.get("worst") else "", *([faults] if faults else [])]


def _moved(a: Any, b: Any) -> float:
    """How far another input moves an output, of its largest magnitude; inf where its size depends on the input."""
    if a.shape != b.shape:
        return float("inf")
    scale = float(np.abs(b.astype(np.float64)).max(initial=0.0)) or 1.0
    return float(np.abs(a.astype(np.float64) - b).max(initial=0.0) / scale)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--zoo", action="store_true")
    parser.add_argument("--shared", type=Path)
    parser.add_argument("--precisions", default="fp32,tf32,fp16,bf16")
    parser.add_argument("--checks", action="store_true")
    parser.add_argument("--only", default="", help="part of a name, or several with commas")
    parser.add_argument("--target", default="cuda:sm_90a", help="simulate: to try this where there is no GPU")
    parser.add_argument("--seconds", type=float, default=200, help="begin no network after this many")
    args = parser.parse_args()
    precisions = args.precisions.split(",")
    begin, about = time.time(), facts()
    os.environ |= {"OMP_NUM_THREADS": "2", "OPENBLAS_NUM_THREADS": "2"}
    workers = max(1, (os.cpu_count() or 2) * 3 // 4)
    rows: list[dict[str, Any]] = []
    lock = threading.Lock()
    with tempfile.TemporaryDirectory() as made:
        scratch, names = Path(made), []
        folder = args.shared
        if folder is not None:
            if not (folder / "graphs").is_dir():
                with tarfile.open(folder / "graphs.tar.xz") as archive:
                    archive.extractall(scratch, filter="data")
                (scratch / "fill.py").write_bytes((folder / "fill.py").read_bytes())
                folder = scratch
            # The large ones first: what is begun last ends last.
            files = sorted((folder / "graphs").glob("*.onnx"), key=lambda p: -p.stat().st_size)
            names += [p.stem for p in files]
        if args.zoo:
            from optdnn.models import zoo

            names += [f"zoo/{n}" for n in zoo.NAMES]
        names = [n for n in names if any(part in n for part in args.only.split(","))]
        gpu = OnGpu()

        def row(name: str, future: Future[Made | str]) -> dict[str, Any]:
            try:
                found = future.result()
            except Exception as error:
                return {"network": name, "failed": f"{type(error).__name__}: {error}"[:1500]}
            if not isinstance(found, str) and time.time() > begin + args.seconds + LAST:
                found = "not begun in time"
            return {"network": name, "failed": found} if isinstance(found, str) else gpu.row(found, args.checks, LIMIT)

        def note(name: str, future: Future[Made | str]) -> None:
            one = row(name, future)
            shown, said = {p: _shown(one[p]) for p in precisions if p in one}, one.get("failed", "")[:300]
            with lock:
                rows.append(one)
                print(f"{time.time() - begin:6.1f} s {name:40s} {shown or ''} {said}", flush=True)
                args.out.write_text(json.dumps({**about, "rows": rows}, indent=1) + "\n")

        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(workers, context) as makers, ThreadPoolExecutor(PROCESSES) as runners:
            given = (folder or Path(), args.target, precisions, scratch, begin + args.seconds)
            futures = {makers.submit(make, n, *given): n for n in names}
            jobs = [runners.submit(note, futures[f], f) for f in as_completed(futures)]
        for job in jobs:
            job.result()
        gpu.close()
    for p in precisions:
        of = [row[p] for row in rows if p in row]
        good = sum(f.get("right", False) for f in of)
        print(f"{p}: {good} of {len(rows)} right, {sum('failed' in f for f in of)} failed")


if __name__ == "__main__":
    main()
