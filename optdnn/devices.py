"""Engines for several GPUs: the choice of how to split a network, and the check that each part fits its GPU's memory."""

from __future__ import annotations

from dataclasses import replace

from optdnn.config import BuildOptions
from optdnn.errors import NotMet, UnsupportedError
from optdnn.ir.graph import STRUCTURAL, Graph
from optdnn.kernels.libraries.collective import predicted_seconds
from optdnn.ops.checks import elements
from optdnn.ops.collective import COLLECTIVES
from optdnn.passes.base import PassReport, run_pipeline
from optdnn.passes.batch_parallel import BatchParallel
from optdnn.passes.dce import DeadCode
from optdnn.passes.fold_constants import FoldConstants
from optdnn.passes.tensor_parallel import Ports, TensorParallel
from optdnn.precision.latency import BYTES, Roofline, flops_of
from optdnn.runtime.cuda.gpu_facts import GpuFacts
from optdnn.runtime.program import Program
from optdnn.shapes.plan_base import plans_of
from optdnn.types import TensorType, is_float

MOST_REASONS = 8
"""The most reasons that an error names."""
WEIGHTS, BATCH = "weights", "batch"


def split_for(graph: Graph, options: BuildOptions, rank: int) -> tuple[list[PassReport], Ports | None]:
    """Reduce a graph to the part of one rank, if there are several. Returns the reports of the passes, and the split of the ports.

    Raises UnsupportedError if nothing in the network can be split this way."""
    if options.devices == 1:
        return [], None
    split = (BatchParallel if options.split == BATCH else TensorParallel)(rank, options.devices)
    reports = run_pipeline(graph, (DeadCode(), FoldConstants(), split, DeadCode()), verify=options.debug)
    (report,) = (r for r in reports if r.name == split.name)
    if not report.fired:
        why = [f"{' + '.join(r.nodes)}: {r.reason}" for r in report.refused[:MOST_REASONS]] or [
            "it has no products of weights"
        ]
        raise UnsupportedError(
            "\n  ".join([f"nothing of the network can be split for {options.devices} devices:", *why]),
            hint="build it for one device, and run an engine on each",
        )
    return reports, split.ports


def chosen_split(graph: Graph, options: BuildOptions, gpu: GpuFacts) -> tuple[str, str]:
    """The split for ``split="auto"`` and its reason: of the possible splits, the one that is predicted to be faster.

    The batch is split without collectives, but each GPU then reads all weights. The graph is not changed.
    """
    limit, weights = options.memory_limit, _weights(graph, options)
    if limit is not None and weights > limit:
        return WEIGHTS, f"all weights, {_size(weights)}, are more than the {_size(limit)} that are allowed on a GPU"
    ms = {}
    for split in (BATCH, WEIGHTS):  # the batch first: to see that it cannot be split, no weights need to be cut
        made = graph.copy()
        try:
            split_for(made, replace(options, split=split), 0)
        except UnsupportedError as error:
            other = WEIGHTS if split == BATCH else BATCH
            return other, f"split by {split}, {error.message.splitlines()[-1].strip()}"
        ms[split] = 1e3 * seconds_of(made, options, gpu)
    best = min(ms, key=lambda split: ms[split])
    return best, "predicted: " + ", ".join(f"{split} {time:.3g} ms" for split, time in ms.items())


def seconds_of(graph: Graph, options: BuildOptions, gpu: GpuFacts) -> float:
    """The predicted time of one rank, to compare splits: products, attention and norms by a roofline, and collectives.

    Pointwise operators and data movement are left out: most become part of other kernels.
    """
    machine = Roofline.of(gpu)
    rate = machine.ops.get(options.base_precision, machine.ops["fp32"])
    total = 0.0
    for op in graph.order():
        if op.kind in COLLECTIVES:
            nbytes = _bytes(op.outputs[0].type, options)
            total += predicted_seconds(op.kind, nbytes, op.attrs.world)
        elif op.kind not in STRUCTURAL and not op.pointwise and (flops := flops_of(graph, op)):
            operands = [graph.type(v) for v in dict.fromkeys(op.inputs) if v is not None]
            moved = sum(_bytes(t, options) for t in (*operands, *(o.type for o in op.outputs)))
            total += 1e-6 * max(flops / rate, moved / machine.bandwidth)
    return total


def _bytes(t: TensorType, options: BuildOptions) -> float:
    """Bytes of a value as the engine stores it."""
    floats = is_float(t.dtype) and t.dtype.itemsize > 1
    return elements(t) * float(BYTES.get(options.base_precision, 4) if floats else t.dtype.itemsize)


def _weights(graph: Graph, options: BuildOptions) -> int:
    return int(sum(_bytes(op.outputs[0].type, options) for op in graph.of_kind("Constant")))


def _size(nbytes: int) -> str:
    return f"{nbytes / 1e9:.3g} GB" if nbytes >= 1e8 else f"{nbytes / 1e6:.3g} MB"


# ---------------------------------------------------------------- memory


def memory_of(program: Program) -> tuple[int, int]:
    """Bytes that a program of one rank needs on its GPU: for weights, and for one context (activations, inputs and outputs)."""
    blobs, context = set[int](), 0
    for plan in plans_of(program):
        ports = {i for _, i in (*plan.inputs, *plan.outputs)}
        own = sum(b.nbytes or 0 for i, b in enumerate(plan.buffers) if i in ports and b.blob is None)
        context = max(context, plan.arena_bytes + own)
        blobs |= {b.blob for b in plan.buffers if b.blob is not None}
    return sum(program.blobs[b].nbytes for b in blobs), context


def check_memory(program: Program, options: BuildOptions) -> None:
    """Raise NotMet if a program needs more of its GPU's memory than ``options.memory_limit``."""
    limit = options.memory_limit
    weights, context = memory_of(program)
    if limit is None or weights + context <= limit:
        return
    enough = next((n for n in (2, 4, 8, 16, 32, 64) if n > options.devices and weights / n + context <= limit), None)
    if options.devices > 1 and options.split == BATCH:
        hint = "split the weights instead of the batch: --split weights"
    elif enough is None:
        hint = "use a smaller batch"
    else:
        hint = f"build it for several GPUs, each with a part of the weights: --devices {enough}"
    raise NotMet(
        f"the engine needs {_size(weights + context)} of memory on {'a' if options.devices == 1 else 'each'} GPU, "
        f"{_size(weights)} for weights; {_size(limit)} are allowed",
        hint=hint,
    )
