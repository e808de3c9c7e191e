"""The summary of a run of many trials: counts, and the failed, explained and refused trials."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from random_nets.pool import Row
from random_nets.trial import FAILED

EXAMPLES = 8
"""Number of names in the summary for trials that were refused for the same reason."""


def summary(rows: Sequence[Row], seconds: float, trials: int, about: Mapping[str, Any]) -> dict[str, Any]:
    """The facts of the run (``about``), counts by setting and family, and the failing, explained and refused trials."""
    table: dict[str, dict[str, Counter[str]]] = {}
    for r in rows:
        family = r.get("family", "files")
        table.setdefault(r["setting"], {}).setdefault(family, Counter())[r["verdict"]] += 1
    spent: Counter[str] = Counter()
    for r in rows:
        spent.update(r.get("seconds", {}))
    return {
        **about,
        "trials": len(rows),
        "verdicts": dict(Counter(r["verdict"] for r in rows)),
        "seconds": round(seconds, 1),
        "trials_per_second": round(trials / max(seconds, 1e-9), 2),
        "stages": {k: round(v, 1) for k, v in spent.items()},
        "counts": table,
        "failing": [
            {k: r[k] for k in ("name", "setting", "verdict", "detail")} for r in rows if r["verdict"] in FAILED
        ],
        "explained": explained(rows),
        "refused": refused(rows),
    }


def explained(rows: Iterable[Row]) -> dict[str, dict[str, list[str]]]:
    """Explanation -> setting -> names: explanations of the judge, and "oracle" if float64 agrees with optdnn."""
    found: dict[str, dict[str, list[str]]] = {}
    for r in rows:
        if r["verdict"] in ("explained", "oracle"):
            why = r["detail"].partition(":")[0] if r["verdict"] == "explained" else "oracle"
            found.setdefault(why, {}).setdefault(r["setting"], []).append(r["name"])
    return found


def refused(rows: Iterable[Row]) -> list[dict[str, Any]]:
    """Setting and reason (without numbers and names) of refused trials, their number, and some of them; the most frequent first."""
    found: dict[tuple[str, str], list[str]] = {}
    for r in rows:
        if r["verdict"] in ("refused", "no_oracle"):
            reason = re.sub(
                r"'[^']*'",
                "'…'",
                re.sub(r"\d+(\.\d+)?(e[+-]?\d+)?", "#", r["detail"].rpartition(" [")[0] or r["detail"]),
            )
            found.setdefault((r["setting"], f"{r['verdict']}: {reason}"[:240]), []).append(r["name"])
    return [
        {"setting": setting, "reason": reason, "trials": len(names), "first": names[:EXAMPLES]}
        for (setting, reason), names in sorted(found.items(), key=lambda item: -len(item[1]))
    ]


def written(found: dict[str, Any]) -> str:
    """JSON with one line for each family's counts and each trial."""

    def lines(value: Any, depth: int) -> str:
        flat = json.dumps(value, ensure_ascii=False)
        if not isinstance(value, dict | list) or len(flat) + depth < 110 or depth > 2:
            return flat
        pad = "\n" + " " * (depth + 1)
        if isinstance(value, dict):
            inner = [f"{json.dumps(k)}: {lines(v, depth + 1)}" for k, v in value.items()]
            return "{" + pad + f",{pad}".join(inner) + "}"
        return "[" + pad + f",{pad}".join(lines(v, depth + 1) for v in value) + "]"

    return lines(found, 0) + "\n"
