"""Kernels under compute-sanitizer: memcheck, racecheck and initcheck, over engines of small networks of every template.

    python benchmarks/gpu/sanitize.py                          # all tools; also that each tool catches the fault seeded for it
    python benchmarks/gpu/sanitize.py --tools memcheck int8 rows

Each buffer of an engine is an allocation of its own, to the byte, so that memcheck sees what a planned arena would hide. The seeded
faults (``SEEDED_FAULT`` in kernels/pool_int8.cu: a write past the end, a barrier left out, a read of unwritten memory, a barrier of
threads that do not come) are compiled into a copy of the family "int8". Families are named in sanitize_cases.py. Exits 1 if a clean
family is reported, or a fault is not.

What TMA stores, initcheck does not see. After a launch of such a kernel (``TMA_STORES``) the harness writes the elements that the
step's meaning says it writes, and those alone, so that what lies between them stays unwritten; that the kernel wrote them all, the
checks against NaN hold (``runtime.cuda.check``).

synccheck runs where it is asked for. In convolutions that split K it says that a wait is missing, in block 121, at the first
arrival of all at a barrier that the block has just initialized: at that of the partial sums, and where a rank that is sent none
leaves it alone, at the first stage's. No phase of it has passed then that anyone could have waited for: no fault of the kernel's.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from sanitize_cases import GENERAL, forced, graphs
from targets import facts

FAULTS = {"memcheck": 1, "racecheck": 2, "initcheck": 3, "synccheck": 4}
TOOLS = ("memcheck", "racecheck", "initcheck")
TMA_STORES = frozenset({"conv_sm90.cu", "conv_patch_sm90.cu", "attention_sm90.cu"})
AND, TOGETHER, GENERAL_TOGETHER = " + ", 2, 6
"""How many families share a process, whose start takes longer than they do; those of generated kernels are small."""
FOLLOWED = {"racecheck": ("-DRACECHECK",), "initcheck": ("-DINITCHECK",)}
"""Options for what a tool cannot follow otherwise: kernels/rnn_sm90.cu, conv_sm90.cu and mma.cuh say what it is."""
LINES = "-lineinfo"
"""So that reports name lines of the source; the code is the same."""


def file_of(name: str) -> str:
    """A family's name as part of a file's."""
    return "".join(c if c.isalnum() else "_" for c in name)


def prepare(folder: Path, name: str) -> dict[str, Any]:
    """Build and save an engine, with line numbers in its kernels, and one that racecheck follows; returns its row."""
    from support.simulated import feeds_of, lowered

    from optdnn.runtime import format as engine_format
    from optdnn.runtime.cuda.kernels_of import cubins
    from optdnn.runtime.cuda.nvrtc import KernelCache

    build, precision = graphs()[name]
    graph = build()
    with forced(name):
        program = lowered(graph, precision, target="cuda:sm_90a", no_cubins=True)
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
    """Every launch of a prepared engine, one after the other, on allocations of their own. What a sanitizer watches."""
    from optdnn.runtime import format as engine_format
    from optdnn.runtime.cuda.device import Launch
    from optdnn.runtime.cuda.memory import DeviceMemory, upload
    from optdnn.runtime.cuda.runner import CudaRunner
    from optdnn.runtime.executor import LoadOptions

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
        assert isinstance(item, Launch), "a step on the host"
        item.enqueue(context.stream.handle)
        context.stream.synchronize()
        if tool == "initcheck" and program.kernels[parsed.launch.kernel].template in TMA_STORES:
            written_over(program, (*step.inputs, *step.outputs), parsed, memory)
    print(f"ran {name}: {len(program.steps)} launches", flush=True)


def written_over(program: Any, operands: tuple[int, ...], step: Any, memory: dict[int, Any]) -> None:
    """Write what the step writes from the host, element by element (ones: values decide nothing here)."""
    from optdnn.runtime.cuda.memory import upload
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


def watched(tool: str, folder: Path, name: str, fault: int, seconds: int) -> tuple[bool, str, float]:
    """Whether a tool reports nothing, what it says, and the seconds it took."""
    start = time.time()
    command = ["compute-sanitizer", "--tool", tool, "--error-exitcode", "9", sys.executable, __file__, "--folder", str(folder),
               "--run", name, "--fault", str(fault), "--tools", tool]  # fmt: skip
    environment = {**os.environ, "OPTDNN_CACHE": str(folder)}
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, check=False, env=environment)
    except subprocess.TimeoutExpired:
        return False, f"not done after {seconds} s", time.time() - start
    text = done.stdout + done.stderr
    ran = all(f"ran {one}:" in text for one in name.split(AND))
    return done.returncode == 0 and ran, text, time.time() - start


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("families", nargs="*", help="parts of their names; all, where there are none")
    parser.add_argument("--tools", default=",".join(TOOLS))
    parser.add_argument("--out", type=Path)
    parser.add_argument("--seconds", type=int, default=60, help="of one family under one tool")
    parser.add_argument("--budget", type=float, default=1e9, help="begin nothing after this many seconds")
    parser.add_argument("--workers", type=int, default=max(1, (os.cpu_count() or 2) * 5 // 8))
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--run", help=argparse.SUPPRESS)
    parser.add_argument("--fault", type=int, default=0, help=argparse.SUPPRESS)
    options = parser.parse_intermixed_args()
    if options.run:
        for name in options.run.split(AND):
            run(options.folder, name, options.tools, options.fault)
        return 0
    names = [n for n in graphs() if not options.families or any(part in n for part in options.families)]
    tools, begin = options.tools.split(","), time.time()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        with ProcessPoolExecutor(os.cpu_count()) as pool:
            engines = list(pool.map(prepare, [folder] * len(names), names))
        print(f"{len(names)} engines in {time.time() - begin:.0f} s", flush=True)
        general, others = ([n for n in names if (n in GENERAL) is of] for of in (True, False))
        groups = [AND.join(others[i : i + TOGETHER]) for i in range(0, len(others), TOGETHER)]
        groups += [AND.join(general[i : i + GENERAL_TOGETHER]) for i in range(0, len(general), GENERAL_TOGETHER)]
        jobs = [(tool, group, 0) for tool in tools for group in groups]
        jobs = [*((tool, "int8", FAULTS[tool]) for tool in tools if "int8" in names), *jobs]

        def job(tool: str, name: str, fault: int) -> tuple[dict[str, Any], str]:
            if time.time() - begin > options.budget:
                return {"tool": tool, "family": name, "begun": False}, ""
            clean, text, seconds = watched(tool, folder, name, fault, options.seconds)
            row: dict[str, Any] = {"tool": tool, "family": name, "seconds": round(seconds, 1)}
            if fault:
                caught = not clean and "global_average_pool" in text and "does not compile" not in text
                return row | {"family": "int8, seeded fault", "caught": caught}, "" if caught else text[-3000:]
            said = [line for line in text.splitlines() if "Host Frame" not in line and "backtrace" not in line]
            return row | {"clean": clean} | ({} if clean else {"said": said[:24]}), "\n".join(said[:24])

        with ThreadPoolExecutor(options.workers) as threads:
            for row, text in threads.map(lambda j: job(*j), jobs):
                rows += [row | {"family": one} for one in row["family"].split(AND)]
                if not row.get("clean", row.get("caught")):
                    what = "REPORTED" if "clean" in row else "MISSED" if "caught" in row else "not begun in time"
                    print(f"{row['tool']} {row['family']}: {what}\n{text}".strip(), flush=True)
    if options.out is not None:
        options.out.write_text(json.dumps({**facts(), "engines": engines, "rows": rows}, indent=1) + "\n")
    good = [bool(row.get("clean", row.get("caught"))) for row in rows]
    for tool in tools:
        mine = [row for row in rows if row["tool"] == tool]
        clean = [r["clean"] for r in mine if "clean" in r]
        rest = sum("begun" in r for r in mine)
        caught = "caught" if any(r.get("caught") for r in mine) else "not caught"
        begun = f", {rest} more not begun" if rest else ""
        print(f"{tool}: {sum(clean)} of {len(clean)} families clean{begun}, seeded fault {caught}")
    print(f"{sum(good)} of {len(good)} as they must be, {time.time() - begin:.0f} s")
    return 0 if all(good) else 1


if __name__ == "__main__":
    sys.exit(main())
