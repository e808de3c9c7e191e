"""How much of ONNX's backend tests a GPU's program runs: with steps on the CPU, and without any.

    python benchmarks/backend_shares.py OUT.json [--target simulate|cuda]

Every case of the node, simple, pytorch and real kinds that is not refused is built for its sizes, run and compared as
``tests/test_backend_suite.py`` does. Inputs that only say sizes are inputs like all others; the plans that engines make for their
values count ("share"), and so does, for comparison, the program that is right for all values ("share_for_all_values").
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))


def main() -> None:
    import test_backend_suite as suite

    import optdnn

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--target", default="simulate")
    parser.add_argument("--part", type=int, default=0, help="run every PARTS-th case, from this one on")
    parser.add_argument("--parts", type=int, default=1)
    args = parser.parse_args()
    right, whole, whole_for_all, wrong, on_cpu = 0, 0, 0, {}, {}
    options = {"tactics": "heuristic"} if args.target == "cuda" else {}
    cases = suite.PASSING[args.part :: args.parts]
    for name in cases:
        prepared: Any = optdnn.backend.prepare(suite.load(name), args.target.upper(), **options)
        kinds: set[str] = set()
        general = True
        try:
            for inputs, outputs in suite.data(name):
                suite.compare(prepared.run(inputs), outputs, suite.CASES[name].rtol, suite.CASES[name].atol)
                feeds = dict(zip(prepared.inputs, inputs, strict=True))
                engine = prepared._run.engine(feeds)
                general = general and not engine.meta["host"]["operators"]
                kinds |= {o["kind"] for o in engine.program_for(feeds).meta["host"]["operators"]}
        except Exception as error:  # whatever it is, it is told
            wrong[name] = f"{type(error).__name__}: {error}"[:300]
            continue
        right += 1
        whole += not kinds
        whole_for_all += general
        if kinds:
            on_cpu[name] = sorted(kinds)
    n = len(cases)
    found = {
        "cases": n,
        "right": right,
        "without_the_cpu": whole,
        "share": round(whole / n, 4),
        "without_the_cpu_for_all_values": whole_for_all,
        "share_for_all_values": round(whole_for_all / n, 4),
        "wrong": wrong,
        "on_cpu": on_cpu,
    }
    print(f"{right} of {n} right, {whole} ({whole / n:.1%}) without a step on the CPU; {whole_for_all} for all values")
    args.out.write_text(json.dumps({"what": "ONNX's backend tests", "target": args.target, **found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
