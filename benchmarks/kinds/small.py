"""Short commands: keeping results, the table of operators, and the list of cliffs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from benchmarks import rows
from benchmarks.models import tests_on_path
from benchmarks.rows import RESULTS, command_parser, say


def keep(words: Sequence[str]) -> int:
    """Put rows of files into benchmarks/results: the newest row of each key, but no error in place of a result."""
    parser = command_parser("keep", keep.__doc__)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--folder", type=Path, default=RESULTS)
    options = parser.parse_args(words)
    for path in rows.keep(options.files, options.folder):
        say(f"{path.name}: {len(rows.read(path))} rows, {path.stat().st_size / 1e3:.1f} kB")
    return 0


def operators(words: Sequence[str]) -> int:
    """Write the table of operators, optdnn/ops/OPERATORS.md, from the results of ONNX's backend tests."""
    command_parser("operators", operators.__doc__).parse_args(words)
    tests_on_path()
    import test_backend_suite as suite
    from support import operators as table

    models = {name: partial(suite.load, name) for name in suite.PASSING}
    table.PATH.write_text(table.table(models, suite.PASSING, suite.LISTED), encoding="utf-8")
    return 0


def cliffs(words: Sequence[str]) -> int:
    """List the cliffs of all networks in rows of 'roofline', those with the largest gain first."""
    from benchmarks.kinds import roofline

    parser = command_parser("cliffs", cliffs.__doc__)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--most", type=int, default=60, help="lines that are printed")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write all of them")
    options = parser.parse_args(words)
    measured = [r for r in rows.newest(rows.read(*options.files)) if "cliffs" in r]
    found = roofline.listed(measured)
    for c in found[: options.most]:
        at = "on the CPU" if c["roofline"] is None else f"at {c['roofline']:6.1%}"
        say(
            f"{c['workload']:44s} gains {c['gain']:5.1%}  {c['us']:8.4g} us {at}  {c['tactic']}  {c['nodes']}: {c['why']}"
        )
    say(f"{len(found)} cliffs in {len({c['workload'] for c in found})} of {len(measured)} runs")
    if options.json is not None:
        options.json.write_text(json.dumps(found, separators=(",", ":")) + "\n", encoding="utf-8")
    return 0
