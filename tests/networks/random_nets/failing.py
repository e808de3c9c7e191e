"""Failing networks, which are kept as small ones."""

from __future__ import annotations

import re
import tempfile
from pathlib import Path
from typing import Any

from random_nets.families import network
from random_nets.pool import Row, Task, Worker
from random_nets.shrink import shrunk
from random_nets.trial import opened, saved


def cause(row: Row) -> str:
    """The common properties of equal failures: the verdict, and for an error its class and the place that raised it."""
    found = re.search(r"(\w+): .*\[([\w/.]+:\d+)\]$", row.get("detail", "").partition(": ")[2])
    return " ".join([row["verdict"], *(found.groups() if found else ())])


def shrink(row: Row, task: Task, folder: Path, timeout: float) -> str:
    """Keep the network of a failing row in ``folder``, shrunk as long as it fails. Adds a description to the row."""
    net = opened(Path(task["file"])) if "file" in task else network(row["family"], row["seed"])
    worker = Worker(timeout)
    with tempfile.TemporaryDirectory() as scratch:
        file = Path(scratch) / "candidate.onnx"

        def fails(candidate: Any) -> bool:
            saved(candidate, file)
            return cause(worker.ask({"file": str(file), "setting": task["setting"]})) == cause(row)

        try:
            small = shrunk(net, fails) if fails(net) else net
        finally:
            worker.close()
    folder.mkdir(parents=True, exist_ok=True)
    name = f"{row['setting'].replace(' ', '_').replace(':', '_')}-{row['name']}"
    saved(small, folder / f"{name}.onnx")
    return f"{name}.onnx: {len(small.model.graph.node)} of {len(net.model.graph.node)} nodes"
