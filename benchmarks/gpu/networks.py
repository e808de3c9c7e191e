"""Whole networks on the GPU, are they right? Each is built for it, run, and held against ONNX Runtime's fp32 on the CPU.

    python benchmarks/gpu/networks.py OUT.json [--zoo] [--shared FOLDER] [--precisions fp32,tf32,fp16,bf16] [--checks]
                                      [--only TEXT] [--seconds 200]

``--shared``: FOLDER holds ``fill.py`` and ``graphs/NAME.onnx`` with ``NAME.json`` (skeletons without weights), or
``graphs.tar.xz`` with these. Several networks are built at once (in processes); a network that fails is a row with its error.
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
import os
import subprocess
import sys
import tarfile
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from agreement import BOX, SCORE, error_of, fill_module, onnxruntime_results, same_boxes
from targets import facts

import optdnn

STEP = {"fp32": 2e-5, "tf32": 3e-4, "fp16": 4e-3, "bf16": 3e-2}
"""Largest error of a launch, of the largest magnitude of its result: a few roundings of its element type, or of tf32's factors."""

WHOLE = 5e-4
"""Of a whole network at fp32. Two right runs of yolox_s are 2e-4 apart (fp32_truth.py: and as far from float64)."""
COARSER = {"fp32": 1, "tf32": 10, "fp16": 10, "bf16": 50}
"""How much further than at fp32 the corners and scores of a box may be."""
KEPT, KEPT_FP32 = 0.9, 0.98
"""Share of a detector's boxes that must be the same at fp32, and at others of those that are still the same where ONNX Runtime at
fp32 is given weights and inputs of that precision: scores that are nearly tied decide which are kept."""


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


def one(name: str, folder: Path, precisions: list[str], *, checked: bool = False) -> dict[str, Any]:
    """The row of a network."""
    row: dict[str, Any] = {"network": name}
    model, feeds, others = model_of(name, folder)
    want, other = onnxruntime_results(model, feeds), onnxruntime_results(model, others)
    row["another_input"] = [_moved(a, b) for a, b in zip(other, want, strict=True)]
    for precision in precisions:
        start = time.perf_counter()
        shapes = {k: v.shape for k, v in feeds.items()}
        try:
            engine = optdnn.build(model, target="cuda", precision=precision, tactics="heuristic", shapes=shapes)
            seconds = time.perf_counter() - start
            got, again = engine.run(feeds), engine.run(feeds)
            found = {
                "build_s": round(seconds, 2),
                "errors": [error_of(got[s.name], w) for s, w in zip(engine.outputs, want, strict=True)],
                "repeats": all(np.array_equal(got[k], again[k], equal_nan=True) for k in got),
                "on_cpu": sorted({o["kind"] for o in engine.meta.get("host", {}).get("operators", [])}),
            }
            near = {"box": BOX * COARSER[precision], "score": SCORE * COARSER[precision]}
            boxes = same_boxes([got[s.name] for s in engine.outputs], want, **near)
            if boxes is not None:
                found["boxes_as_a_set"] = boxes
                if precision != "fp32":
                    alone = same_boxes(onnxruntime_results(*rounded(model, feeds, precision)), want, **near)
                    boxes["rounded"] = alone and alone["same"]
            found["agrees"] = agrees(found, row["another_input"], precision)
            row[precision] = found
            if checked:
                found |= checks(engine, feeds, precision)
            found["right"] = right(found)
        except Exception as error:
            row.setdefault(precision, {})["failed"] = f"{type(error).__name__}: {error}"[:1500]
    return row


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
    parser.add_argument("--only", default="")
    parser.add_argument("--seconds", type=float, default=200, help="begin no network after this many")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    args = parser.parse_args()
    precisions = args.precisions.split(",")
    if args.one:
        print("ROW " + json.dumps(one(args.one, args.shared or Path(), precisions, checked=args.checks)))
        return
    begin, about = time.perf_counter(), facts()
    with tempfile.TemporaryDirectory() as scratch, ThreadPoolExecutor(max(1, (os.cpu_count() or 2) * 3 // 4)) as pool:
        names: list[str] = []
        folder = args.shared
        if folder is not None:
            if not (folder / "graphs").is_dir():
                with tarfile.open(folder / "graphs.tar.xz") as archive:
                    archive.extractall(scratch, filter="data")
                (Path(scratch) / "fill.py").write_bytes((folder / "fill.py").read_bytes())
                folder = Path(scratch)
            # The large ones first: what is begun last ends last.
            files = sorted((folder / "graphs").glob("*.onnx"), key=lambda p: -p.stat().st_size)
            names += [p.stem for p in files if args.only in p.stem]
        if args.zoo:
            from optdnn.models import zoo

            names += [f"zoo/{n}" for n in zoo.NAMES if args.only in n]

        def child(name: str) -> dict[str, Any]:
            if time.perf_counter() - begin > args.seconds:
                return {"network": name, "failed": f"not begun within {args.seconds:.0f} s"}
            command = [sys.executable, __file__, str(args.out), "--one", name, "--precisions", args.precisions]
            command += ["--shared", str(folder)] if folder is not None else []
            command += ["--checks"] if args.checks else []
            environment = {**os.environ, "OMP_NUM_THREADS": "2", "OPENBLAS_NUM_THREADS": "2"}
            limit = max(10.0, begin + args.seconds + 30 - time.perf_counter())
            try:
                done = subprocess.run(
                    command, capture_output=True, text=True, env=environment, timeout=limit, check=False
                )
            except subprocess.TimeoutExpired:
                return {"network": name, "failed": f"not done in {limit:.0f} s"}
            last = [line for line in done.stdout.splitlines() if line.startswith("ROW ")]
            return json.loads(last[-1][4:]) if last else {"network": name, "failed": done.stderr[-1500:]}

        rows = []
        for row in pool.map(child, names):
            rows.append(row)
            shown = {p: _shown(row[p]) for p in precisions if p in row}
            print(
                f"{time.perf_counter() - begin:6.1f} s {row['network']:40s}",
                shown or row.get("failed", "")[:300],
                flush=True,
            )
            args.out.write_text(json.dumps({**about, "rows": rows}, indent=1) + "\n")
        for p in precisions:
            found = [row[p] for row in rows if p in row]
            print(
                f"{p}: {sum(f.get('right', False) for f in found)} of {len(rows)} right, {sum('failed' in f for f in found)} failed"
            )


if __name__ == "__main__":
    main()
