"""What tests read from the checks of ``optdnn.verify``."""

from __future__ import annotations

from optdnn.compare.verification import Verification


def statuses(found: Verification, case: str = "") -> dict[str, str]:
    return {c.name: c.status for c in found.checks if c.case == case}


def text(found: Verification, name: str) -> str:
    return next(c.text for c in found.checks if c.name == name)
