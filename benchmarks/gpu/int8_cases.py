"""Kernels of 8-bit operands on a GPU against what `simulate` computes: a line per fault, then counts.

    python benchmarks/gpu/int8_cases.py [--out results.json] [NAME...]

Convolutions over odd cases, tile by tile, then small networks of every family (convolutions, products, depthwise, pools, additions,
concatenations, zero points), launch by launch. Integers are equal to the bit; behind transcendental stages, to one step.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))
from support import general_kernel
from support.quantized_cases import CASES, DTYPES, GENERAL, Case, arrays, compare, family
from support.quantized_nets import FP8_GROUPS, NARROWED, NETS, QNet, launches

from optdnn.errors import OptdnnError
from optdnn.runtime.cuda import conv_general, conv_params, graphs, nvrtc
from optdnn.runtime.cuda.device import Device

FENCE = 4096
"""Bytes around the result that nothing may write."""


def device(array: np.ndarray) -> torch.Tensor:
    """The array's bytes on the device."""
    return torch.from_numpy(np.ascontiguousarray(array).view(np.uint8).reshape(-1)).to("cuda")


def run(case: Case, cache: nvrtc.KernelCache, at: Device, stream: graphs.Stream) -> str:
    """What is wrong, or ""."""
    data, problem, module = arrays(case), case.problem, family(case)
    kept = {name: device(a) for name, a in (("x", data.image), ("w", data.packed), ("c", data.channel))}
    residual = None if data.residual is None else device(data.residual)
    out = torch.full((data.expected.nbytes + 2 * FENCE,), 0xA5, dtype=torch.uint8, device="cuda")
    pointers = conv_params.Pointers(
        (kept["x"].data_ptr(),), kept["w"].data_ptr(), kept["c"].data_ptr(), out.data_ptr() + FENCE,
        0 if residual is None else residual.data_ptr(),
    )  # fmt: skip
    function = module.load(problem, case.config, cache, checked=True)
    more = {}
    if module is general_kernel:
        more["row"] = data.image[0, 0].size
        for name, size in zip(("partial", "arrived"), conv_general.workspace(problem, case.config), strict=True):
            kept[name] = torch.zeros(max(size, 1), dtype=torch.uint8, device="cuda")
        pointers = replace(pointers, partial=kept["partial"].data_ptr(), arrived=kept["arrived"].data_ptr())
    launch = module.bind(problem, case.config, at, function, pointers, requantize=case.scaling().requantize, **more)
    runs = []
    for poison in (0xA5, 0x5A):
        out[FENCE:-FENCE] = poison
        torch.cuda.synchronize()
        launch.enqueue(stream.handle)
        stream.synchronize()
        raw = out.cpu().numpy()
        if (raw[:FENCE] != 0xA5).any() or (raw[-FENCE:] != 0xA5).any():
            return "it wrote outside of its result"
        runs.append(raw[FENCE:-FENCE].copy())
    if (runs[0] != runs[1]).any():
        return "two runs differ: something is not written"
    out_dtype = DTYPES[case.out.dtype if case.out else case.float_out]
    return compare(case, runs[0].view(out_dtype).reshape(data.expected.shape), data.expected)


def networks() -> list[dict[str, Any]]:
    """A row for each network: its steps, and the worst error of its 8-bit results, or of the floats that are sums of fp8 (see
    ``StepError``)."""
    from support.simulated import feeds_of

    from optdnn.runtime.cuda.check import check_steps

    rows: list[dict[str, Any]] = []
    sums_of_fp8 = {f"fp8: {name}": build for name, build in FP8_GROUPS.items()}
    for name, build in [*NETS.items(), *NARROWED.items(), *sums_of_fp8.items()]:
        n = QNet()
        graph = n.done(*build(n)) if name in NETS else build()  # type: ignore[call-arg, operator]
        context, program = launches(graph)
        steps = check_steps(context, feeds_of(graph))
        narrow = [
            e
            for e in steps
            if name in sums_of_fp8 or any(program.buffers[i].dtype.itemsize == 1 for i in program.steps[e.step].outputs)
        ]
        worst = max((e.error for e in narrow), default=0.0)
        rows.append({"network": name, "kinds": [e.kind for e in steps], "worst": worst})
        allowed = 0.0 if name in NETS else 4e-3
        if worst > allowed:
            print(f"WRONG {name}: {[e for e in narrow if e.error > allowed]}", flush=True)
            rows[-1]["wrong"] = True
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="of single convolutions; none: all of them, and the networks")
    parser.add_argument("--out", type=Path)
    options = parser.parse_intermixed_args()
    names = options.names
    torch.zeros(1, device="cuda")
    at, stream, cache = Device.open(0), graphs.Stream(), nvrtc.KernelCache(Path("/tmp/kernels-int8"))
    chosen = {n: c for n, c in (CASES | GENERAL).items() if not names or n in names}
    begin = time.time()
    cache.get_many([family(c).recipe(c.problem, c.config, checked=True) for c in chosen.values()], 16)
    print(f"{len(chosen)} kernels in {time.time() - begin:.1f} s", flush=True)
    wrong, faults = 0, {}
    for name, case in chosen.items():
        try:
            fault = run(case, cache, at, stream)
        except OptdnnError as error:
            print(f"FAILED {name}: {error}", flush=True)
            return 1
        wrong += bool(fault)
        faults[name] = fault
        if fault:
            print(f"WRONG {name}: {fault}", flush=True)
    print(f"int8 cases: {len(chosen) - wrong} of {len(chosen)} right", flush=True)
    rows = [] if names else networks()
    if rows:
        bad = sum("wrong" in row for row in rows)
        print(f"networks: {len(rows) - bad} of {len(rows)} right", flush=True)
        wrong += bad
    if options.out:
        found = {
            "what": "8-bit kernels against their meaning in NumPy",
            "gpu": at.name,
            "convolutions": faults,
            "networks": rows,
        }
        options.out.write_text(json.dumps(found, indent=1) + "\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
