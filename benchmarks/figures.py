"""The tables of measured results: :func:`tables` makes Markdown from the files under ``benchmarks/results/``.

``python docs/generate.py`` puts them into the README and into ``docs/performance/``.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from figures_checks import correctness
from figures_gpu import compared, compiled, growth, note, others, side_by_side, table, targets, waits

from optdnn.report.precision import declined

GPU_ROWS = (
    "resnet50:1", "resnet50:128", "mobilenet_v2:1", "efficientnet_b0:128",
    "vit_b_16:32", "bert_base:1:128", "bert_base:32:128", "lstm:1",
)  # fmt: skip
"""Rows of the README's GPU table."""
CPU_ROWS = (
    ("cpu-fp32", "mobilenet_v2.ts"),
    ("cpu-fp32", "resnet50.ts"),
    ("cpu-bf16", "resnet50.ts"),
    ("cpu-int8", "resnet50"),
)
"""Rows of the README's CPU table: (file, network); the geometric mean of the first file follows."""


def tables(results: Path) -> dict[str, str]:
    """Name -> Markdown of each table whose result file is in the folder ``results``."""
    makers: dict[str, tuple[str, Callable[[Path], str]]] = {
        "readme-gpu": ("targets-h200", partial(readme_gpu, results / "compile-h200.json")),
        "readme-cpu": ("cpu-fp32", readme_cpu),
        **{name: (name, cpu) for name in ("cpu-fp32", "cpu-int8", "cpu-bf16")},
        **{name: (name, precision) for name in ("precision-cpu", "precision-h200")},
        "checks": ("networks-h200", lambda file: correctness(file.parent)),
        "targets": ("targets-h200", targets),
        "compiled": ("compile-h200", compiled),
        "others": ("others-h200", others),
        "streams": ("streams-h200", side_by_side),
        "waits": ("waits-h200", waits),
        "compare": ("waits-h200", compared),
        "growth": ("growth-h200", growth),
    }
    files = {name: results / f"{stem}.json" for name, (stem, _) in makers.items()}
    return {name: make(files[name]) for name, (_, make) in makers.items() if files[name].exists()}


def _read(file: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return found


# ---------------------------------------------------------------- README


def readme_gpu(others: Path, file: Path) -> str:
    """Some target rows, beside the libraries alone, torch.compile (from ``others``) and eager PyTorch."""
    data = _read(file)
    found = {r["name"]: r["candidates"] for r in data["rows"]}
    torch_compile = {r["name"]: r.get("candidates", {}) for r in _read(others)["rows"]} if others.exists() else {}
    rows = [["network, batch", "optdnn", "cuDNN, cuBLASLt", "torch.compile", "PyTorch eager"]]
    for name in (n for n in GPU_ROWS if n in found):
        of = {**torch_compile.get(name, {}), **found[name]}
        ms = [of.get(n, {}).get("median_ms") for n in ("ours", "libraries", "compile", "eager")]
        rows.append([name.replace(":", ", "), *(f"{t:.3f}" if t else "–" for t in ms)])
    return table(rows)


def readme_cpu(file: Path) -> str:
    """Some networks beside ONNX Runtime and OpenVINO, both at fp32; last the geometric mean of all networks at fp32."""
    rows = [["network", "precision", "optdnn ms", "over ONNX Runtime", "over OpenVINO"]]
    for stem, network in CPU_ROWS:
        path = file.with_name(f"{stem}.json")
        entries = _read(path)["summary"]["rows"] if path.exists() else []
        for row in (r for r in entries if r["network"] == network):
            over = [f"{row['over'][n]:.2f}×" for n in ("onnxruntime", "openvino")]
            rows.append([network.removesuffix(".ts"), stem.removeprefix("cpu-"), f"{row['optdnn_ms']:.2f}", *over])
    summary = _read(file)["summary"]
    mean = [f"{summary['geomean'][n]:.2f}×" for n in ("onnxruntime", "openvino")]
    return table([*rows, [f"geometric mean of {len(summary['rows'])}", "fp32", "", *mean]])


# ---------------------------------------------------------------- CPU


def cpu(file: Path) -> str:
    """A row for each network: our time, and how much faster it is than each library and than the faster of them."""
    data = _read(file)
    summary, first = data["summary"], data["comparisons"][0]
    rivals = [n for n in summary["geomean"] if n != "faster of them"]
    rows = [["network", "optdnn ms", *(f"over {n}" for n in rivals), "over the faster"]]
    for row in summary["rows"]:
        over = [f"{row['over'][n]:.2f}×" if n in row["over"] else "" for n in rivals]
        rows.append([row["network"], f"{row['optdnn_ms']:.2f}", *over, f"{row['over_faster']:.2f}×"])
    mean = summary["geomean"]
    means = [f"**{mean[n]:.2f}×**" for n in (*rivals, "faster of them")]
    rows.append(["**geometric mean**", "", *means])
    machine, versions = first["machine"], first["versions"]
    how = (
        f"{machine['cpu']}, {machine['usable_cores']} cores, {first['threads']} threads each; onnxruntime "
        f"{versions['onnxruntime']}, openvino {versions['openvino']}; {data['date']}. Each candidate runs in a process of its "
        "own, in turns, on the same file with fixed shapes."
    )
    return table(rows, how=how, commands=[data["command"]])


# ---------------------------------------------------------------- precisions


def precision(file: Path) -> str:
    """A table for each network, with a row for each precision; the fastest within half a point of fp32 is bold."""
    data = _read(file)
    entries = [*data.get("networks", []), *data.get("zoo", [])]
    parts = [f"### {e['network']}\n\n{_precisions(e)}" for e in entries]
    if missed := [f"- {line}." for e in data["networks"] for line in _missed(e)]:
        parts.append("### Beyond the bound on held-out pictures\n\n" + "\n".join(missed))
    if said := [f"- {e['network']}: {line}." for e in entries for line in _int8_declined(e)]:
        parts.append("### Why `auto` declined int8\n\n" + "\n".join(said))
    machine = data["machine"]
    place = f"{machine['cpu']}, {machine['usable_cores']} cores" if data["target"] == "cpu" else machine["device"]
    remark = f" {data['note']}." if "note" in data else ""
    how = (
        f"{place}; {data['date']}.{remark} All engines of a network were timed in turns, the trained ones at batch "
        f"{data['batch']}. The reason for each node's precision is in "
        f"[{file.stem}.md](../../benchmarks/results/{file.stem}.md)."
    )
    return "\n\n".join([*parts, note("How it was measured", how, [data["command"]])])


def _precisions(entry: Mapping[str, Any]) -> str:
    found = {c: r for c, r in entry["rows"].items() if "error" not in r}
    lost = {c: _lost(r, found["fp32"]) for c, r in found.items()}
    within = [c for c in found if lost[c] <= entry.get("bound", 0.5) and "ms" in found[c]]
    best = min(within, key=lambda c: found[c]["ms"], default=None)
    score = "accuracy" if "accuracy" in found["fp32"] else "cosine distance"
    rows = [["precision", score, "latency ms", "engine KB", "chosen", "over the fastest single"]]
    for name, row in found.items():
        cells = [
            f"{row['accuracy']:.2f} %" if "accuracy" in row else f"{row['drop']:.1g}",
            f"{row['ms']:.3f}" if "ms" in row else "",
            f"{row['engine_bytes'] / 1e3:.0f}",
            row["precision"] if "auto" in row else "",
            _over_best(row),
        ]
        rows.append([f"**{name}**" if name == best else name, *cells])
    return table(rows)


def _over_best(row: Mapping[str, Any]) -> str:
    over = row.get("over_best")
    if over is None:
        return ""
    return "the same engine" if over["verdict"] == "the same engine" else f"{over['speedup']:.2f}× {over['single']}"


def _int8_declined(entry: Mapping[str, Any]) -> list[str]:
    autos = [r["auto"] for c, r in entry["rows"].items() if c.startswith("auto") and "auto" in r]
    return [line for auto in autos[:1] for line in declined(auto) if line.startswith("int8 ")]


def _missed(entry: Mapping[str, Any]) -> list[str]:
    """Where automatic precision lost more on held-out pictures than its bound, which it kept on those it chose by."""
    found = []
    for config, row in entry["rows"].items():
        lost = _lost(row, entry["rows"]["fp32"]) if "auto" in row else 0.0
        if "auto" in row and lost > row["auto"]["metric"]["bound"]:
            chosen = next(c for c in row["auto"]["candidates"] if c["name"] == row["auto"]["chosen"])
            samples = row["auto"]["samples"]["verification"]
            expected = f" ({chosen['expected']:.2f} expected)" if chosen.get("expected") is not None else ""
            found.append(
                f"{entry['network']}, {config}: {lost:.2f} points of {entry['pictures']} pictures, after "
                f"{max(chosen['drop'], chosen['verified']):.2f}{expected} on the {samples} that verified it. So few samples cannot "
                f"tell so fine a bound: none lost of them still means up to {300 / samples:.2f} points"
            )
    return found


def _lost(row: Mapping[str, Any], fp32: Mapping[str, Any]) -> float:
    return float(row["drop"] if "drop" in row else fp32["accuracy"] - row["accuracy"])
