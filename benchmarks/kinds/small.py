"""Short commands: keeping results, the table of operators, and the list of steps far from their roofline."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from benchmarks import rows
from benchmarks.models import tests_on_path
from benchmarks.rows import RESULTS, command_parser, say


def keep(words: Sequence[str]) -> int:
    """Put rows of files into the results that are kept: the newest of each key, no error in place of a result."""
    parser = command_parser("keep", keep.__doc__)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--folder", type=Path, default=RESULTS)
    options = parser.parse_args(words)
    for path in rows.keep(options.files, options.folder):
        say(f"{path.name}: {len(rows.read(path))} rows, {path.stat().st_size / 1e3:.1f} kB")
    return 0


def operators(words: Sequence[str]) -> int:
    """Write the table of operators, optdnn/ops/OPERATORS.md, from what ONNX's backend tests showed."""
    command_parser("operators", operators.__doc__).parse_args(words)
    tests_on_path()
    import test_backend_suite as suite
    from support import operators as table

    models = {name: partial(suite.load, name) for name in suite.PASSING}
    table.PATH.write_text(table.table(models, suite.PASSING, suite.LISTED), encoding="utf-8")
    return 0


def cliffs(words: Sequence[str]) -> int:
    """List the steps that are below a share of their roofline and take a share of the run, from rows of 'roofline'."""
    from benchmarks.kinds import roofline
    from optdnn.runtime.cuda.measuring.cliffs import BELOW, OVER

    parser = command_parser("cliffs", cliffs.__doc__)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--below", type=float, default=BELOW, help="share of the roofline")
    parser.add_argument("--over", type=float, default=OVER, help="share of the run")
    parser.add_argument("--most", type=int, default=60, help="lines that are printed")
    options = parser.parse_args(words)
    found = roofline.cliffs(rows.newest(rows.read(*options.files)), options.below, options.over)
    for s in found[: options.most]:
        say(
            f"{s['workload']:44s} {s['share']:6.1%} of the run  {s['us']:8.4g} us at {s['roofline']:5.1%}  "
            f"{s['kind']} {s['tactic']}  {s['nodes']}"
        )
    say(f"{len(found)} steps")
    return 0
