"""How much of ONNX's backend tests a GPU's program runs: with steps on the CPU, and without any.

    python benchmarks/backend_shares.py OUT.json [--target simulate]

Every case of the node, simple, pytorch and real kinds that the importer takes is built as the model stands ("ahead"), and again
with the inputs that only say sizes given their values ("values"), run and compared as ``tests/test_backend_suite.py`` does.
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
    args = parser.parse_args()
    found: dict[str, Any] = {}
    for mode in ("ahead", "values"):
        right, whole, wrong = 0, 0, {}
        for name in suite.PASSING:
            try:
                if mode == "values":
                    prepared: Any = optdnn.backend.prepare(suite.load(name), args.target.upper())
                    engines, run = prepared._run.engines, prepared.run
                else:
                    engine = optdnn.build(suite.load(name), target=args.target, no_cubins=True)
                    engines, run = {0: engine}, _positional(engine)
                for inputs, outputs in suite.data(name):
                    suite.compare(run(inputs), outputs, suite.CASES[name].rtol, suite.CASES[name].atol)
            except Exception as error:  # whatever it is, it is told
                wrong[name] = f"{type(error).__name__}: {error}"[:300]
                continue
            right += 1
            whole += not any(e.meta["host"]["operators"] for e in engines.values())
        n = len(suite.PASSING)
        found[mode] = {
            "cases": n,
            "right": right,
            "without_the_cpu": whole,
            "share": round(whole / n, 4),
            "wrong": wrong,
        }
        print(f"{mode}: {right} of {n} right, {whole} ({whole / n:.1%}) without a step on the CPU")
    args.out.write_text(json.dumps({"what": "ONNX's backend tests", "target": args.target, **found}, indent=1) + "\n")


def _positional(engine: Any) -> Any:
    names = [s.name for s in engine.inputs]
    return lambda inputs: tuple(engine.run(dict(zip(names, inputs, strict=True))).values())


if __name__ == "__main__":
    main()
