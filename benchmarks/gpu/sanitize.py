"""Kernels under compute-sanitizer: memcheck, racecheck and initcheck, over engines of small networks of every kernel family.

    python benchmarks/gpu/sanitize.py                          # all tools; also that each tool catches the fault seeded for it
    python benchmarks/gpu/sanitize.py --tools memcheck int8 rows

Each buffer of an engine is an allocation of its own, to the byte, so that memcheck sees what a planned arena would hide. The seeded
faults (``SEEDED_FAULT`` in kernels/pool_int8.cu: a write past the end, a barrier left out, a read of unwritten memory) are compiled
into a copy of the family "int8". Exits 1 if a clean family is reported, or a fault is not.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

sys.path[:0] = [str(Path(__file__).parents[2] / "tests"), str(Path(__file__).parents[2] / "tests" / "tactics" / "cuda")]
TOOLS = ("memcheck", "racecheck", "initcheck")
FAULTS = {"memcheck": 1, "racecheck": 2, "initcheck": 3}


def quantized(n: Any) -> Any:
    """8-bit convolutions (a stem, both kernels, depthwise, with a residual), pools, and a product."""
    from optdnn.ops.base import Stage

    x = n.fake(n.qconv(n.fake(n.input(2, 3, 64, 64), 0.03), 32, 7, stride=2, epilogue=(Stage("Relu", (-1,)),)), 0.03)
    x = n.fake(n.pool(x), 0.03)
    y = n.fake(n.qconv(x, 64, 3, epilogue=(Stage("Relu", (-1,)),)), 0.03)
    y = n.fake(n.qconv(n.fake(n.qconv(y, 64, 5, stride=2, group=64), 0.03), 32, 1), 0.03)
    z = n.fake(n.qconv(y, 32, 1, epilogue=(Stage("Add", (-1, 3)), Stage("Relu", (-2,))), more=[y]), 0.04)
    pooled = n.fake(n.op("GlobalAveragePool", z), 0.02)
    return n.qconv(pooled, 16, 1)


def halves(n: Any) -> Any:
    """16-bit convolutions: a stem, both kernels, a split, depthwise by both kernels, groups."""
    x = n.op("Relu", n.conv(n.input(2, 3, 64, 64), 32, 7, pads=3, strides=2, bias=True))
    x = n.op("Relu", n.conv(n.op("Relu", n.conv(n.max_pool(x, pads=1), 64, bias=True)), 64, group=64, bias=True))
    y = n.conv(n.op("Relu", n.conv(x, 64, 5, pads=2, strides=2, group=64, bias=True)), 512, 1, pads=0)
    y = n.op("Add", n.conv(n.op("Relu", y), 64, bias=True), n.conv(y, 64, 3, group=8))
    return n.gemm(n.op("Flatten", n.op("GlobalAveragePool", y)), 24)


def graphs() -> dict[str, tuple[Callable[[], Any], str]]:
    """Family -> what builds its graph, and the precision."""
    from support.net import Net
    from support.quantized_nets import QNet
    from test_generated import graph_of  # type: ignore[import-not-found]

    def net(kind: type, build: Callable[[Any], Any]) -> Callable[[], Any]:
        def made() -> Any:
            n = kind()
            return n.done(build(n))

        return made

    from support.sequence_cases import ATTENTION, GROUP_NORM, RECURRENT

    families = (("attention", ATTENTION), ("recurrent", RECURRENT), ("groups", GROUP_NORM))
    sequences = {f"{kind}: {name}": cases[name][0] for kind, cases in families for name in list(cases)[:2]}
    general = ("softmaxes", "norms", "reductions", "pools", "products", "resizes", "gathers", "movements")
    return {
        "int8": (net(QNet, quantized), "fp16"),
        "fp16": (net(Net, halves), "fp16"),
        "bf16": (net(Net, halves), "bf16"),
        **{name: (lambda name=name: graph_of(name), "fp16") for name in general},
        **{name: (build, "fp16") for name, build in sequences.items()},
    }


def file_of(name: str) -> str:
    """A family's name as part of a file's."""
    return "".join(c if c.isalnum() else "_" for c in name)


def prepare(folder: Path, names: list[str]) -> list[str]:
    """Build and save the engines; returns the names of those that there are."""
    from support.simulated import feeds_of, lowered

    from optdnn.runtime import format as engine_format

    known = graphs()
    for name in names or known:
        build, precision = known[name]
        graph = build()
        program = lowered(graph, precision, target="cuda:sm_90a")
        engine_format.write(program, folder / f"{file_of(name)}.engine")
        np.savez(folder / f"{file_of(name)}.npz", **feeds_of(graph))  # type: ignore[arg-type]
    return list(names or known)


def run(folder: Path, name: str, fault: int) -> None:
    """Every launch of a prepared engine, one after the other, on allocations of their own. What a sanitizer watches."""
    from optdnn.runtime import format as engine_format
    from optdnn.runtime.cuda.device import Launch
    from optdnn.runtime.cuda.memory import DeviceMemory, upload
    from optdnn.runtime.cuda.runner import CudaRunner
    from optdnn.runtime.executor import LoadOptions

    program = engine_format.read(folder / f"{file_of(name)}.engine")
    if fault:
        kernels = [replace(k, options=(*k.options, f"-DSEEDED_FAULT={fault}"), cubin=None) if k.template == "pool_int8.cu" else k
                   for k in program.kernels]  # fmt: skip
        assert kernels != list(program.kernels), "no kernel to seed a fault in"
        program = replace(program, kernels=tuple(kernels))
    context = CudaRunner(program, LoadOptions(recompile=bool(fault))).context()
    feeds = dict(np.load(folder / f"{file_of(name)}.npz"))
    memory = {
        i: DeviceMemory(b.nbytes or 0, b.name) for i, b in enumerate(program.buffers) if b.blob is None and b.nbytes
    }
    for spec, i in program.inputs:
        upload(memory[i].pointer, np.ascontiguousarray(feeds[spec.name]))
    for step, item in zip(program.steps, context.items({i: m.pointer for i, m in memory.items()}), strict=True):
        assert isinstance(item, Launch), "a step on the host"
        item.enqueue(context.stream.handle)
        context.stream.synchronize()
        for i in step.outputs:
            written_over(memory[i])
    print(f"ran {name}: {len(program.steps)} launches", flush=True)


def written_over(memory: Any) -> None:
    """Copy a buffer away and back: initcheck does not see what TMA stores. (That all of a result is written, the checks against
    poisoned memory hold.)"""
    from optdnn.runtime.cuda.device import check, driver
    from optdnn.runtime.cuda.memory import DeviceMemory

    if memory.size:
        other = DeviceMemory(memory.size, "a copy")
        for target, source in ((other, memory), (memory, other)):
            check("cuMemcpyDtoD", driver().cuMemcpyDtoD(target.pointer, source.pointer, memory.size))
        check("cuCtxSynchronize", driver().cuCtxSynchronize())


def watched(tool: str, folder: Path, name: str, fault: int, seconds: int) -> tuple[bool, str]:
    """Whether a tool reports nothing, and the end of what it says."""
    command = ["compute-sanitizer", "--tool", tool, "--error-exitcode", "9", sys.executable, __file__, "--folder", str(folder),
               "--run", name, "--fault", str(fault)]  # fmt: skip
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, check=False)
    except subprocess.TimeoutExpired:
        return False, f"not done after {seconds} s"
    text = done.stdout + done.stderr
    return done.returncode == 0 and "ran " in text, text


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("families", nargs="*")
    parser.add_argument("--tools", default=",".join(TOOLS))
    parser.add_argument("--out", type=Path)
    parser.add_argument("--seconds", type=int, default=60, help="of one family under one tool")
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--run", help=argparse.SUPPRESS)
    parser.add_argument("--fault", type=int, default=0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.run:
        run(options.folder, options.run, options.fault)
        return 0
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as made:
        folder, begin = Path(made), time.time()
        names = prepare(folder, options.families)
        print(f"{len(names)} engines in {time.time() - begin:.0f} s", flush=True)
        for tool in options.tools.split(","):
            for name in names:
                start = time.time()
                clean, text = watched(tool, folder, name, 0, options.seconds)
                rows.append({"tool": tool, "family": name, "clean": clean, "seconds": round(time.time() - start, 1)})
                print(f"{tool} {name}: {'clean' if clean else 'REPORTED'} ({rows[-1]['seconds']} s)", flush=True)
                if not clean:
                    print("\n".join(text.splitlines()[:30]), flush=True)
            if "int8" in names:
                clean, text = watched(tool, folder, "int8", FAULTS[tool], options.seconds)
                caught = not clean and "global_average_pool" in text and "does not compile" not in text
                rows.append({"tool": tool, "family": "int8, seeded fault", "caught": caught})
                print(f"{tool} seeded fault: {'caught' if caught else 'MISSED'}", flush=True)
                if not caught:
                    print("\n".join(text.splitlines()[-15:]), flush=True)
    if options.out is not None:
        options.out.write_text(json.dumps({"commit": os.environ.get("COMMIT", ""), "rows": rows}, indent=1))
    good = all(row.get("clean", row.get("caught")) for row in rows)
    print(f"{sum(bool(row.get('clean', row.get('caught'))) for row in rows)} of {len(rows)} as they must be")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
