"""Look for faults of optdnn with mutated inputs. Exit code 1 if some are found.

With atheris (``pip install atheris``), ``--guided`` lets coverage choose the inputs that are mutated further.
"""

from __future__ import annotations

import argparse
import os
import sys
import warnings
from pathlib import Path

for library in ("OPENBLAS", "OMP"):
    os.environ.setdefault(f"{library}_NUM_THREADS", "1")  # before NumPy: arrays are small, processes are many
ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT)]

from fuzz import guided, unguided  # noqa: E402
from fuzz.table import NAMES  # noqa: E402


def main() -> int:
    given = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    given.add_argument("targets", nargs="*", metavar="TARGET", help=f"{', '.join(NAMES)} [default: all]")
    given.add_argument("--seconds", type=float, default=60.0, help="processor time of each target [default: 60]")
    given.add_argument("--runs", type=int, default=1 << 31, help="the most inputs of each target")
    given.add_argument("--first", type=int, default=0, help="the number of the first input; with --guided the seed")
    given.add_argument("--guided", action="store_true", help="by coverage, with atheris")
    given.add_argument(
        "--out", type=Path, default=Path("fuzz-faults"), help="for inputs with faults [default: fuzz-faults]"
    )
    asked = given.parse_args()
    if unknown := sorted(set(asked.targets) - {*NAMES}):
        given.error(f"there is no target {unknown[0]!r}")
    warnings.simplefilter("ignore")
    fuzz = guided.fuzz if asked.guided else unguided.fuzz
    faults = 0
    for name in asked.targets or NAMES:
        result = fuzz(name, asked.out, runs=asked.runs, seconds=asked.seconds, first=asked.first)
        print(result, flush=True)
        faults += len(result.faults)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
