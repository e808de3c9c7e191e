"""Kill -9 at random moments of build, save, retune and cache writes: is any file lost, half-written or left behind?

python -m benchmarks faults --moments 1000 --seed 1
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.models import tests_on_path
from benchmarks.rows import command_parser, say

tests_on_path()

from support import killed  # noqa: E402


def main(words: Sequence[str]) -> int:
    """Kill -9 at random moments of build, save, retune and cache writes, and check the files that remain."""
    parser = command_parser("faults", __doc__)
    parser.add_argument("--moments", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(words)
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        killed.prepare(Path(folder))
        killed.moments(Path(folder), args.moments, args.seed, say)
    say(f"{args.moments} moments in {time.perf_counter() - start:.0f} s")
    return 0
