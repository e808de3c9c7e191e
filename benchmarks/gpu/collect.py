"""Gathers a round of ``resnet_layers.py`` (JSON lines) into one JSON file.

python benchmarks/gpu/collect.py FOLDER RESULT.json
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any


def rows(path: Path) -> list[dict[str, Any]]:
    """The rows of one JSON-lines file, or none."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def main() -> int:
    folder, result = Path(sys.argv[1]), Path(sys.argv[2])
    found: dict[str, Any] = {
        "what": "ResNet-50, fp16, one CUDA graph with programmatic dependent launch, own kernels alone",
        "batches": {},
    }
    for path in sorted(folder.glob("chain-*.jsonl"), key=lambda p: int(p.stem.split("-")[1])):
        batch = path.stem.split("-")[1]
        chain = rows(path)
        found["machine"] = next(row for row in chain if "device" in row)
        layers: dict[str, dict[str, Any]] = {}
        tried = 0
        for row in rows(folder / f"layers-{batch}.jsonl"):
            if row.get("us"):
                tried += 1
                if row["layer"] not in layers or row["us"] < layers[row["layer"]]["us"]:
                    keys = ("count", "config", "us", "predicted_us", "error")
                    layers[row["layer"]] = {key: row[key] for key in keys}
        configs = next((row["configs"] for row in chain if "configs" in row), {})
        found["batches"][batch] = {
            "chain": [row for row in chain if "median_ms" in row],
            "torch": [row for row in rows(folder / f"torch-{batch}.jsonl") if "median_ms" in row],
            "candidates_timed": tried,
            "layers_alone": layers,
            "configs_in_chain": configs,
        }
    result.parent.mkdir(parents=True, exist_ok=True)
    result.write_text(json.dumps(found, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
