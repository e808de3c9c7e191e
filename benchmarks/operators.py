"""Write the table of operators, ``optdnn/ops/OPERATORS.md``, from what ONNX's backend tests showed.

python benchmarks/operators.py
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))


def main() -> None:
    import test_backend_suite as suite
    from support import operators

    models = {name: partial(suite.load, name) for name in suite.PASSING}
    operators.PATH.write_text(operators.table(models, suite.PASSING, suite.LISTED), encoding="utf-8")


if __name__ == "__main__":
    main()
