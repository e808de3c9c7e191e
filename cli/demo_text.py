"""The text of ``demo``: a short table, the account of ResNet-50, and a chart; at most 80 columns wide."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from optdnn.cli.bars import chart
from optdnn.cli.common import stdout, table


def show_begin(facts: Mapping[str, Any], version: str, batch: int) -> None:
    """The heading, before the work."""
    stdout.print(f"optdnn {version} on {facts['machine']['cpu']}, {facts['threads']} threads each\n")
    stdout.print("1. Trained networks: built, saved, loaded, run on pictures of digits that they")
    stdout.print(f"   never saw, and raced against ONNX Runtime, {batch} pictures at once")


def show_trained(networks: Sequence[Mapping[str, Any]]) -> None:
    """Accuracy and size of the trained networks."""
    rows = [
        [
            n["name"],
            f"{n['right']} of {n['pictures']}",
            f"{n['accuracy']:.2%}",
            f"{n['recorded_accuracy']:.2%}",
            f"{n['operators_before']} → {n['operators_after']}",
            _error(n["max_rel_err"]),
        ]
        for n in networks
        if "unsupported" not in n
    ]
    columns = ["network", "right", "accuracy", "trained", "operators", "error"]
    stdout.print()
    stdout.print(table(None, columns, rows, right=range(1, 6)))
    for n in networks:
        if "unsupported" in n:
            stdout.print(f"{n['name']}: its {', '.join(n['unsupported'])} come in a later release")
    stdout.print("\n2. ResNet-50 on a picture of 224 x 224, seeded weights")


def show_resnet(r: Mapping[str, Any]) -> None:
    """The account of ResNet-50's build."""
    tried = ", ".join(f"{t['tactic']} {_ms(t.get('median_ms'))} ms" for t in r["tactics"] if "median_ms" in t)
    folded = r["bn_before"] - r["bn_after"]
    stdout.print(f"\nbuilt in {r['build_seconds']:.1f} s, {r['engine_bytes'] / 2**20:.0f} MiB, saved, loaded, run")
    stdout.print(
        f"operators {r['nodes']} → {r['operators_after']}: {folded} of {r['bn_before']} BatchNormalizations folded"
    )
    stdout.print(f"tried {tried}: kept {r['tactic']}")
    if r["max_rel_err"] is not None and r["input_difference"] is not None:
        stdout.print(
            f"outputs within {r['max_rel_err']:.1e} of ONNX Runtime's (another picture: {r['input_difference']:.1g})"
        )


def show_chart(measured: Sequence[Mapping[str, Any]]) -> None:
    """Milliseconds a call of each network, and of ONNX Runtime."""
    rows = []
    for n in measured:
        ours, other = n.get("median_ms"), n.get("onnxruntime_median_ms")
        if ours is None or other is None:
            continue
        rows.append((n["name"], "optdnn", ours, f"{_ms(ours)} ms  {_speedup(n['versus'])}"))
        rows.append((n["name"], "onnxruntime", other, f"{_ms(other)} ms  {'':{_SPEEDUP}}"))
    if not rows:
        return
    stdout.print("\nMilliseconds a call (short is fast), and how many times as fast\n")
    for line in chart(rows):
        stdout.print(line)
    if any(n["versus"] and n["versus"]["verdict"] == "unstable" for n in measured if "versus" in n):
        stdout.print("a range (0.9–1.1×): it is not clear which is faster")
    for n in measured:
        if n.get("median_ms") is None and "unsupported" not in n:
            stdout.print(f"{n['name']}: optdnn – ms: {n['error']}")


_SPEEDUP = 10


def _speedup(versus: Mapping[str, Any] | None) -> str:
    if versus is None:
        return f"{'':{_SPEEDUP}}"
    low, high = versus["range"]
    text = f"{low:.2f}–{high:.2f}×" if versus["verdict"] == "unstable" else f"{versus['speedup']:.2f}×"
    return f"{text:>{_SPEEDUP}}"


def show_next(report: str | None, can_report: bool) -> None:
    """The report that was written, and the next commands."""
    if report is not None:
        stdout.print(f"\nThe whole comparison of ResNet-50, with charts: {report}")
    stdout.print("\nNext, with a model of your own:\n")
    stdout.print("    optdnn build your.onnx      # makes your.engine")
    stdout.print("    optdnn bench your.engine    # how fast it is")
    html = " --html report.html" if can_report else ""
    stdout.print(f"    optdnn compare your.onnx{html}")
    if not can_report:
        stdout.print("\nFor reports in HTML: pip install 'optdnn[report]'")


def _ms(value: float | None) -> str:
    return "–" if value is None else f"{value:.3g}"


def _error(value: float | None) -> str:
    return "–" if value is None else f"{value:.0e}"
