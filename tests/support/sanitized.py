"""Engines of the sanitizers' families: built with line numbers, and run launch by launch.

``python -m benchmarks sanitize`` runs these under compute-sanitizer. initcheck does not see TMA's stores. So after a launch of such
a kernel (:func:`stores_by_tma`), the host writes exactly the elements that the step's meaning writes; the gaps between them stay
unwritten. The checks against NaN (``runtime.cuda.check``) prove that the kernel itself has written all of these elements.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from support.sanitizer_nets import forced, graphs

FOLLOWED = {"racecheck": ("-DRACECHECK",), "initcheck": ("-DINITCHECK",), "memcheck": ("-DINITCHECK",)}
"""Options of tools that would report a correct kernel. rnn_sm90.cu, conv_sm90.cu and mma.cuh give the reasons."""
LINES = "-lineinfo"
"""With it, reports name lines of the source. The code is the same."""


def file_of(name: str) -> str:
    """A family's name as part of a file's."""
    return "".join(c if c.isalnum() else "_" for c in name)


def stores_by_tma(kernel: Any) -> bool:
    """Whether a kernel's own sources store by TMA."""
    from optdnn.runtime.cuda.compile.recipes import recipe_of

    return any("tma_store_" in text for name, text in recipe_of(kernel).sources().items() if name != "ptx.cuh")


def prepare(folder: Path, name: str) -> dict[str, Any]:
    """Build and save an engine with line numbers in its kernels, which racecheck can follow; returns its row."""
    from optdnn.runtime.cuda.compile.nvrtc import KernelCache
    from optdnn.runtime.cuda.compile.recipes import cubins
    from optdnn.runtime.file import format as engine_format
    from support.simulated import feeds_of, lowered

    build, precision = graphs()[name]
    graph = build()
    with forced(name):
        program = lowered(graph, precision, target="cuda:sm_90a")
    for tool, more in {"": (), **FOLLOWED}.items():
        followed = tuple(replace(k, options=(*k.options, LINES, *more)) for k in program.kernels)
        cache = KernelCache(folder / "kernels")
        code = cubins(replace(program, kernels=followed), trust=True, recompile=True, cache=cache)
        first = len(program.blobs)
        blobs = [*program.blobs, *(np.frombuffer(c, np.uint8) for c in code)]
        kernels = tuple(replace(k, cubin=first + i) for i, k in enumerate(program.kernels))
        engine_format.write(replace(program, blobs=blobs, kernels=kernels), folder / f"{file_of(name)}{tool}.engine")
    np.savez(folder / f"{file_of(name)}.npz", **feeds_of(graph))  # type: ignore[arg-type]
    tactics = sorted({str(s.params.get("tactic", "")) for s in program.steps})
    made = sorted({f"{k.template}:{k.function}" for k in program.kernels})
    return {"family": name, "precision": precision, "launches": len(program.steps), "kernels": made, "tactics": tactics}


def run(folder: Path, name: str, tool: str, fault: int) -> None:
    """Every step of a prepared engine, one after the other, on separate allocations. A sanitizer watches this function."""
    from optdnn.runtime.cuda.allocator import DeviceMemory, upload
    from optdnn.runtime.cuda.launches.chain import do
    from optdnn.runtime.cuda.launches.plan import CudaStep
    from optdnn.runtime.cuda.runner import CudaRunner
    from optdnn.runtime.file import format as engine_format
    from optdnn.runtime.steps.executor import LoadOptions

    program = engine_format.read(folder / f"{file_of(name)}{tool if tool in FOLLOWED else ''}.engine")
    if fault:
        kernels = [replace(k, options=(*k.options, f"-DSEEDED_FAULT={fault}"), cubin=None) if k.template == "pool_int8.cu" else k
                   for k in program.kernels]  # fmt: skip
        assert kernels != list(program.kernels), "no kernel to seed a fault in"
        program = replace(program, kernels=tuple(kernels))
    context = CudaRunner(program, LoadOptions(trust_cubins=True, recompile=bool(fault))).context()
    feeds = dict(np.load(folder / f"{file_of(name)}.npz"))
    memory = {
        i: DeviceMemory(b.nbytes or 0, b.name) for i, b in enumerate(program.buffers) if b.blob is None and b.nbytes
    }
    for i in program.retained:
        memory[i].clear()
    for spec, i in program.inputs:
        upload(memory[i].pointer, np.ascontiguousarray(feeds[spec.name]))
    items = context.items({i: m.pointer for i, m in memory.items()})
    for step, parsed, item in zip(program.steps, context.runner.steps, items, strict=True):
        do(item, context.stream)
        context.stream.synchronize()
        if (
            tool == "initcheck"
            and isinstance(parsed, CudaStep)
            and stores_by_tma(program.kernels[parsed.launch.kernel])
        ):
            written_over(program, (*step.inputs, *step.outputs), parsed, memory)
    print(f"ran {name}: {len(program.steps)} launches", flush=True)


def written_over(program: Any, operands: tuple[int, ...], step: Any, memory: dict[int, Any]) -> None:
    """Write the elements that the step writes from the host, one by one. All are 1: values do not matter here."""
    from optdnn.runtime.cuda.allocator import upload
    from optdnn.runtime.simulate.runner import strided

    for view in step.meaning.writes:
        if view is None or not memory[operands[view.operand]].size:
            continue
        buffer = program.buffers[operands[view.operand]]
        mask = np.zeros((buffer.nbytes or 0) // buffer.dtype.itemsize, np.int8)
        strided(mask, view)[...] = 1
        ends = np.flatnonzero(np.diff(mask, prepend=0, append=0))
        for begin, end in zip(ends[::2], ends[1::2], strict=True):
            at = memory[operands[view.operand]].pointer + int(begin) * buffer.dtype.itemsize
            upload(at, np.ones(int(end - begin), buffer.dtype))
