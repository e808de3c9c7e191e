"""The decisions of an engine's build, reused for the same network with other weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from optdnn.errors import EngineError
from optdnn.ir.graph import Op
from optdnn.kernels.builder import Builder
from optdnn.lowering.choose import TacticChoice
from optdnn.lowering.lane_choice import LaneChoice
from optdnn.runtime.program import Program

DECIDED = "decided"
"""Key of a program's ``meta``: ``{"lanes": LaneChoice.to_plain()}`` if measurements decided; absent otherwise."""


class EarlierChoices:
    """A ``Visit`` that adds the choices of an earlier program to ``choices``: by signature, else by the ONNX nodes.

    The signature of a quantized operator covers its scales, which other weights may change. Such an operator is found by its
    nodes, and its measured time (``lanes.seconds``) goes to the new signature. If the cost model decided the earlier program,
    nothing is added. Raises EngineError for a malformed record.
    """

    def __init__(self, program: Program):
        self.choices: dict[str, TacticChoice] = {}
        self.seconds: dict[str, float] = {}
        self.lanes: LaneChoice | None = None
        self._old: list[dict[str, Any]] = program.meta.get("tactics", [])
        self._rows: dict[tuple[str, tuple[str, ...]], Mapping[str, Any]] = {}
        noted = program.meta.get(DECIDED)
        if noted is None:
            return
        try:
            self._read(noted)
        except (KeyError, TypeError, AttributeError):
            raise EngineError("the engine's record of its tactics is malformed", hint="build it again") from None

    def _read(self, noted: Mapping[str, Any]) -> None:
        for row in sorted(self._old, key=lambda row: not row.get("dropped", False)):
            self.choices[row["signature"]] = TacticChoice(row["tactic"], row.get("config", ""))
            self._rows[row["kind"], tuple(row["nodes"])] = row
        lanes = LaneChoice.of_plain(noted["lanes"])
        if lanes is not None:
            self.seconds = dict(lanes.seconds)
            self.lanes = LaneChoice(lanes.most, self.seconds, lanes.one_ms, lanes.lanes_ms)

    def __call__(self, b: Builder, op: Op, key: str) -> None:
        row = self._rows.get((op.kind, tuple(sorted(op.src))))
        if key in self.choices or row is None:
            return
        self.choices[key] = TacticChoice(row["tactic"], row.get("config", ""))
        if row["signature"] in self.seconds:
            self.seconds[key] = self.seconds[row["signature"]]

    def keep_record(self, program: Program) -> None:
        """Give the program the earlier record of tactics, refusals included, if it has the same tactics."""
        new = program.meta["tactics"]
        if [_decision(row) for row in new] == [_decision(row) for row in self._old]:
            rows = zip(self._old, new, strict=True)
            program.meta["tactics"] = [{**old, "signature": row["signature"]} for old, row in rows]


def _decision(row: Mapping[str, Any]) -> tuple[Any, ...]:
    return row["kind"], row["nodes"], row["tactic"], row.get("config"), row.get("dropped")
