"""Is a compiled network right? Each is built, run, and compared with ONNX Runtime at fp32 on the CPU (a PyTorch module with
itself).

    python -m benchmarks correctness --shared FOLDER --out correctness.jsonl
    python -m benchmarks correctness zoo/resnet50:1 --precisions fp16,int8+fp16 --target cuda:sm_80 --compile-for sm_90a
    python -m benchmarks correctness --shared FOLDER --target simulate --precisions fp32      # needs no GPU

``errors``: max |error| over max |output| of each output. ``another_input``: the change of the outputs with another input.
``agrees``: at fp32, whether the error is within ``WHOLE``; at other precisions, whether it is smaller than the change with
another input, since networks with seeded random weights amplify rounding errors. For outputs with boxes it counts how many of
the kept boxes ONNX Runtime keeps, too.

On a GPU also ``steps``: every launch by itself against its step's meaning, on the GPU's own operands, with results filled with NaN
before; ``singly``: single launches against the graph, to the bit; ``arena``: faults of runs on arenas that are filled with NaN and
with another value, between fences. ``--compile-for``: the program of an older GPU, with its kernels compiled for this GPU.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import Any

import numpy as np

import optdnn
from benchmarks.harness import Job, Kind
from benchmarks.models import TORCH, engine_of, feeds_of, kinds_on_cpu, module_of, onnx_of, tensors_of, tests_on_path
from benchmarks.rows import Row
from benchmarks.workloads import Workload
from optdnn.compare.checks import STEP
from optdnn.compare.divergence import widest
from optdnn.runtime.engine import Engine
from optdnn.runtime.program import Program
from optdnn.runtime.steps.executor import LoadOptions

tests_on_path()

from support.agreement import BOX, SCORE, error_of, onnxruntime_results, same_boxes  # noqa: E402 (tests are no package)

WHOLE = 5e-4
"""Of a whole network at fp32. Two right runs of yolox_s are 2e-4 apart, and as far from float64."""
COARSER = {"fp32": 1, "tf32": 10, "fp16": 10, "bf16": 50}
"""Precision -> how much larger than at fp32 the errors of a box's corners and scores may be."""
KEPT, KEPT_FP32 = 0.9, 0.98
"""Share of a detector's boxes that must be the same. At fp32: of all boxes. At other precisions: of the boxes that ONNX Runtime
still finds at fp32 from weights and inputs rounded to that precision, since nearly tied scores decide which boxes are kept."""


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--compile-for", metavar="ARCH", help="compile the kernels for this architecture (that of --target)"
    )


def setups(options: argparse.Namespace, workload: Workload) -> list[str]:
    return [options.target + (f" compiled for {options.compile_for}" if options.compile_for else "")]


def compiled_for(program: Program, arch: str) -> Program:
    """The same program, its kernels to be compiled for another architecture."""
    from optdnn.runtime.cuda.compile.nvrtc import KernelCache
    from optdnn.runtime.cuda.compile.recipes import recipe_of

    recipes = [replace(recipe_of(k), arch=arch) for k in program.kernels]
    made = zip(program.kernels, recipes, strict=True)
    kernels = tuple(replace(k, arch=arch, source=r.digest(), cubin=None) for k, r in made)
    KernelCache().get_many(recipes, workers=4)
    return replace(program, kernels=kernels, meta={**program.meta, "arch": arch})


# ---------------------------------------------------------------- without a GPU


def prepare(job: Job) -> Row:
    """The engine, its inputs, and the expected outputs."""
    workload, target, other_arch = job.workload, job.options.target, job.options.compile_for
    if workload.source in TORCH:
        module = module_of(workload)
        feeds, others = (feeds_of(workload, seed=seed) for seed in (1, 2))
        want, other = (_flat(module(*tensors_of(workload, seed))) for seed in (1, 2))
        near: list[Any] | None = None
    else:
        model = onnx_of(workload)
        feeds, others = (feeds_of(workload, model, seed=seed) for seed in (3, 4))
        want, other = onnxruntime_results(model, feeds), onnxruntime_results(model, others)
        detects = workload.precision in COARSER and workload.precision != "fp32" and same_boxes(want, want) is not None
        near = onnxruntime_results(*rounded(model, feeds, workload.precision)) if detects else None
    options: dict[str, Any] = {"tactics": "heuristic"} if target != "cpu" else {}
    engine = engine_of(workload, feeds, target=target, no_cubins=bool(other_arch), **options)
    if other_arch:
        engine = Engine(compiled_for(engine.program, other_arch), options=LoadOptions(simulate=True))
    engine.save(job.folder / "engine")
    np.savez(job.folder / "feeds.npz", **feeds)
    for name, arrays in (("want", want), ("rounded", near or [])):
        np.savez(job.folder / f"{name}.npz", **{str(k): a for k, a in enumerate(arrays)})
    return {"another_input": [_moved(a, b) for a, b in zip(other, want, strict=True)]}


def _flat(found: Any) -> list[Any]:
    return [t.numpy() for t in ([found] if hasattr(found, "numpy") else found)]


def rounded(model: Any, feeds: dict[str, Any], precision: str) -> tuple[Any, dict[str, Any]]:
    """The model and its inputs, with weights and inputs rounded to a precision (tf32: about as fine as fp16)."""
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


def _moved(a: Any, b: Any) -> float:
    """The change of an output with another input, relative to its largest magnitude; inf if its size depends on the input."""
    if a.shape != b.shape:
        return float("inf")
    scale = float(np.abs(b.astype(np.float64)).max(initial=0.0)) or 1.0
    return float(np.abs(a.astype(np.float64) - b).max(initial=0.0) / scale)


# ---------------------------------------------------------------- on the target


def measure(job: Job) -> Row:
    """Run the engine, and compare it with the expected outputs."""
    precision, target = job.workload.precision, job.options.target
    feeds, want, near = (dict(np.load(job.folder / f"{name}.npz")) for name in ("feeds", "want", "rounded"))
    engine = optdnn.load(job.folder / "engine")
    got, again = engine.run(feeds), engine.run(feeds)
    results, wanted = [got[s.name] for s in engine.outputs], list(want.values())
    found: Row = {
        "errors": [
            error_of(a.astype(w.dtype) if w.dtype.kind == "f" else a, w) for a, w in zip(results, wanted, strict=True)
        ],
        "repeats": all(np.array_equal(got[k], again[k], equal_nan=True) for k in got),
        "on_cpu": kinds_on_cpu(engine),
    }
    coarser = COARSER.get(precision, 50)
    distance = {"box": BOX * coarser, "score": SCORE * coarser}
    if (boxes := same_boxes(results, wanted, **distance)) is not None:
        found["boxes_as_a_set"] = boxes
        if near:
            alone = same_boxes(list(near.values()), wanted, **distance)
            boxes["rounded"] = alone and alone["same"]
    found["agrees"] = agrees(found, job.prepared["another_input"], precision)
    if target.startswith("cuda"):
        found |= checks(engine, feeds)
    return {**found, "verdict": "right" if right(found) else "wrong"}


def checks(engine: Any, feeds: dict[str, Any]) -> Row:
    """The results of the engine's own checks on a GPU."""
    from optdnn.runtime.cuda.runner import CudaRunner
    from optdnn.runtime.cuda.trials.check import check_arena, check_steps, run_singly

    runner = CudaRunner(engine.program, LoadOptions())
    context: Any = runner.context()
    steps = check_steps(context, feeds)
    graph, singly = context.run(feeds), run_singly(context, feeds)
    most = widest(STEP, engine.precision)
    wrong = [e for e in steps if not e.error <= most]
    worst = max(steps, key=lambda e: e.error, default=None)
    return {
        "steps": {
            "count": len(steps), "worst": worst and [worst.error, worst.kind, worst.kernel],
            "wrong": [[e.step, e.kind, e.kernel, e.nodes, e.error] for e in wrong][:8],
        },
        "singly": all(np.array_equal(graph[k], v, equal_nan=True) for k, v in singly.items()),
        "arena": check_arena(runner, feeds),
    }  # fmt: skip


def right(found: Row) -> bool:
    """Whether an engine passed all checks."""
    good = found["repeats"] and found["agrees"] and found.get("singly", True)
    return bool(good and not found.get("arena") and not found.get("steps", {}).get("wrong"))


def agrees(found: Row, another: list[float], precision: str) -> bool:
    """Whether the whole network's result agrees with the reference, within the bounds of its precision."""
    boxes = found.get("boxes_as_a_set", {"of": 0})
    if boxes["of"]:
        return bool(boxes["same"] >= (KEPT * boxes["rounded"] if "rounded" in boxes else KEPT_FP32 * boxes["of"]))
    if precision == "fp32":
        return max(found["errors"], default=0.0) <= WHOLE
    return all(error <= max(moved, WHOLE) for error, moved in zip(found["errors"], another, strict=True))


def shown(row: Row) -> str:
    """A row in few words."""
    worst = f"{max(row['errors'], default=0.0):.1e}"
    faults = {k: row[k] for k in ("repeats", "singly", "agrees") if not row.get(k, True)}
    faults |= {k: row[k] for k in ("boxes_as_a_set", "arena") if row.get(k)}
    steps = row.get("steps", {})
    faults |= {"wrong": steps["wrong"][:3]} if steps.get("wrong") else {}
    launch = f", worst launch {steps['worst'][0]:.1e}" if steps.get("worst") else ""
    return f"{row['verdict']}: {worst}{launch} {faults or ''}".rstrip()


KIND = Kind(
    name="correctness", about=__doc__ or "", measure=measure, prepare=prepare, arguments=arguments, groups=("zoo", "shared"),
    precisions="fp32,tf32,fp16,bf16", setups=setups, at_once=3, limit_s=120.0, shown=shown,
)  # fmt: skip
