"""The table of decoders: the time of a token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from benchmarks.decoders import DECODERS, Decoder
from benchmarks.figures.gpu import ms, workload
from benchmarks.figures.markdown import table
from benchmarks.products import BANDWIDTH
from benchmarks.rows import Row

NAMES = {"llama_8b": "Llama 3 8B", "llama_1b": "Llama 3.2 1B", "small_16x2048": "16 layers of width 2,048"}
WEIGHTS = {16: "fp16", 8: "8 bits", 4: "4 bits"}


def decoding(rows: Sequence[Row]) -> str:
    """Milliseconds per token, with all layers, of each network, kind of weights and batch. PyTorch's may come from an older row."""
    mine = [r for r in rows if r["what"] == "decode" and r.get("times")]
    runs: dict[tuple[str, int, int], dict[int, Row]] = {}
    for row in mine:
        d = Decoder.of(workload(row))
        if d.tokens == 1:
            same = runs.setdefault((workload(row).short, d.bits, d.batch), {})
            older = same[d.layers]["times"] if d.layers in same else {}
            same[d.layers] = {**row, "times": {**older, **row["times"]}}
    lines = [["network", "weights", "batch", "ms per token", "tokens/s", "of the bound", "PyTorch ms per token"]]
    used: list[Row] = []
    computed = False
    for name, bits, batch in sorted(runs, key=lambda k: ([*NAMES].index(k[0]), -k[1], k[2])):
        by_layers, whole = runs[name, bits, batch], replace(DECODERS[name], bits=bits, batch=batch)
        ours, torch = (_of_all(by_layers, n, whole.layers) for n in ("ours", "torch"))
        if ours is None:
            continue
        bound = whole.nbytes / BANDWIDTH * 1e3
        cells = [
            f"{ours:.3f}",
            f"{batch / ours * 1e3:,.0f}",
            f"{bound / ours:.0%}",
            "–" if torch is None else f"{torch:.2f}",
        ]
        lines.append([NAMES[name], WEIGHTS[bits], str(batch), *cells])
        used += by_layers.values()
        computed = computed or whole.layers not in by_layers
    said = ["The bound is the time to read all weights and the filled part of the caches once, at 4.3 TB/s."]
    if computed:
        said.append("The time of 32 layers is computed from runs of two and of four layers, each with the head.")
    prompts = sorted(
        (r for r in mine if Decoder.of(workload(r)).tokens > 1), key=lambda r: r["times"]["ours"]["ms"], reverse=True
    )
    said += [_prompt(r) for r in prompts]
    how = (
        "Untuned, random weights, caches in place and filled up to position 1,024 (16 for the network of the last row). PyTorch "
        "runs as in gpt-fast (torch.compile with coordinate descent, caches that end at the position, PyTorch's 4-bit kernel in "
        "bf16), in a CUDA graph. Its logits were compared with ours."
    )
    return table(lines, " ".join(said), how=how, rows=used + prompts) if used else ""


def _of_all(by_layers: Mapping[int, Row], name: str, layers: int) -> float | None:
    """Milliseconds with all layers: measured, or computed from two runs with fewer."""
    found = {n: t for n, row in by_layers.items() if (t := ms(row, name)) is not None}
    if layers in found or len(found) < 2:
        return found.get(layers)
    few, more = min(found), max(found)
    return found[few] + (layers - few) * (found[more] - found[few]) / (more - few)


def _prompt(row: Row) -> str:
    d = Decoder.of(workload(row))
    weights = "w4a8" if d.row_bits == 8 else WEIGHTS[d.bits]
    return (
        f"A prompt of {d.tokens:,} tokens through {d.layers} layers and the head of {NAMES[workload(row).short]} ({weights}) "
        f"takes {row['times']['ours']['ms']:.2f} ms: {row['tflop_per_s']:.0f} TFLOP/s."
    )
