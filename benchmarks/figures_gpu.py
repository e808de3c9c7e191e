"""The tables that were measured on a GPU; see ``figures.py``."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

NAMES = {
    "ours": "optdnn",
    "tuned": "tuned",
    "untuned": "not tuned",
    "own": "our kernels",
    "libraries": "libraries",
    "eager": "eager",
}
"""Candidate -> its column."""


def table(rows: Sequence[Sequence[str]], said: str = "", *, how: str = "", commands: Sequence[str] = ()) -> str:
    """A Markdown table (the first row is the head, numbers to the right), what it says, and in a closed note how it was made."""
    lines = [rows[0], ["---", *["--:"] * (len(rows[0]) - 1)], *rows[1:]]
    parts = ["\n".join(f"| {' | '.join(r)} |" for r in lines), said.strip()]
    return "\n\n".join([*(p for p in parts if p), *([note("How it was measured", how, commands)] if how else [])])


def note(summary: str, text: str, commands: Sequence[str] = ()) -> str:
    """A note that is closed until it is opened, on GitHub and in the built pages."""
    block = ["```text", *commands, "```", ""] if commands else []
    return "\n".join(
        ['<details markdown="1">', f"<summary>{summary}</summary>", "", text.strip(), "", *block, "</details>"]
    )


def targets(file: Path) -> str:
    """The target rows: ours, ours by the cost model, the libraries alone, PyTorch eager."""
    data = json.loads(file.read_text(encoding="utf-8"))
    shown = [n for n in NAMES if any("median_ms" in r.get("candidates", {}).get(n, {}) for r in data["rows"])]
    rows = [["network, batch", *(f"{NAMES[n]} ms" for n in shown), "to reach"]]
    for row in data["rows"]:
        cells = []
        for n in shown:
            found = row.get("candidates", {}).get(n, {})
            text = f"{found['median_ms']:.3f}" if "median_ms" in found else "–"
            wrong = "error" in found and "median_ms" in found
            best = n in ("ours", "tuned") and found.get("median_ms", math.inf) <= (row.get("reach") or 0)
            coarse = "8" in row.get("precision", "") and "error_rel" in found
            said = f"{text} (off by {found['error_rel']:.2f})" if coarse else f"{text} (wrong)"
            cells.append(said if wrong else f"**{text}**" if best else text)
        rows.append([row["name"].replace(":", ", "), *cells, f"{row['reach']:g}" if row.get("reach") else ""])
    tuned = data.get("tune_s")
    if tuned:
        tactics = (
            f"Engines were tuned for at most {tuned:g} s each, except in the column that says so. The libraries alone were tuned "
            "among the first six of their own ranking."
        )
    else:
        tactics = "The cost model chose all configurations. The libraries run what they rank first."
    said = [f"Median milliseconds of one inference; **bold**: the goal is reached. {_over_libraries(data)}"]
    cells = " ".join(text for row in rows for text in row)
    if "(wrong)" in cells:
        said.append('"wrong": the error against fp32 is beyond its bound.')
    if "(off by" in cells:
        said.append(
            '"off by": the error of 8 bits against fp32, relative to the largest output. These networks have seeded random '
            "weights, which amplify rounding errors (fp16 is off by 0.01). Every launch of int8 equals its integer "
            "meaning to the bit."
        )
    how = (
        f"{_machine(data)}. The GPU replays a CUDA graph between two events; all arrays are on the GPU, its L2 is {data['l2']}, "
        f"and the candidates of a row take turns. Each result was first compared with PyTorch in fp32. {tactics} Our "
        "kernels stand in "
        f"where the libraries have none. {_note(data)}"
    )
    return table(rows, " ".join(said), how=how, commands=_commands(data))


def _over_libraries(data: Mapping[str, Any]) -> str:
    """Our kernels alone over the libraries alone, in geometric mean over the rows that have both."""
    own = (
        "own"
        if any("own" in r.get("candidates", {}) for r in data["rows"])
        else "untuned"
        if data.get("tune_s")
        else "ours"
    )
    ratios = []
    for row in data["rows"]:
        ours, theirs = (row.get("candidates", {}).get(n, {}) for n in (own, "libraries"))
        if "median_ms" in ours and "median_ms" in theirs and theirs.get("library_steps") != 0 and "error" not in ours:
            ratios.append(theirs["median_ms"] / ours["median_ms"])
    if not ratios:
        return ""
    mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
    return (
        f"Our kernels alone{', not tuned,' if own == 'untuned' else ''} are {mean:.2f} times as fast as the libraries alone in "
        f"geometric mean over {len(ratios)} rows (the least: {min(ratios):.2f})."
    )


def _note(data: Mapping[str, Any]) -> str:
    """The remark that a result file holds."""
    return f"{data['note'][:1].upper()}{data['note'][1:]}. " if data.get("note") else ""


def _machine(data: Mapping[str, Any]) -> str:
    """GPU, versions, date and the commits that were measured."""
    versions = data["versions"]
    rows = data.get("rows", [])
    parts = [p for r in rows for p in (r, *r.get("candidates", {}).values()) if "commit" in p]
    parts = parts or list(data.get("runs", {}).values()) or [data]
    commits = list(dict.fromkeys(p.get("commit", "")[:8] for p in parts))
    return (
        f"{data['gpu']}, driver {data['driver']}; torch {versions['torch']}, cuDNN {versions['nvidia-cudnn-cu13']}, cuBLAS "
        f"{versions['nvidia-cublas']}; {data['date']}, commit {', '.join(c for c in commits if c)}"
    )


def _commands(data: Mapping[str, Any]) -> list[str]:
    """The commands that measured it; the one that made most rows first."""
    of_rows = [r["command"] for r in data.get("rows", []) if "command" in r]
    commands = of_rows or [r["command"] for r in [*data.get("runs", {}).values(), data]]
    return [command for command, _ in Counter(commands).most_common()]


def compiled(file: Path) -> str:
    """torch.compile, with what was measured beside it."""
    data = json.loads(file.read_text(encoding="utf-8"))
    rows = [["network, batch", "optdnn ms", "torch.compile ms", "eager ms", "over torch.compile", "it compiled for"]]
    absent = []
    for row in data["rows"]:
        found, name = row.get("candidates", {}), row["name"].replace(":", ", ")
        if "median_ms" not in found.get("compile", {}):
            absent.append(name)
            continue
        ms = [
            found[n]["median_ms"] if "median_ms" in found.get(n, {}) else math.nan for n in ("ours", "compile", "eager")
        ]
        cells = [f"{t:.3f}" for t in ms]
        rows.append(
            [
                name,
                *cells,
                f"{ms[1] / ms[0]:.2f}×",
                f"{found['compile']['prepare_s']:.0f} s{' *' * bool(row.get('resumed'))}",
            ]
        )
    said = ["optdnn ran by the cost model, untuned."]
    if any(r.get("resumed") for r in data["rows"]):
        said.append("*: an attempt was cut off, and this one went on from its cache.")
    if absent:
        said.append(f"Not compiled and measured within the {data['seconds']:.0f} s of the call: {'; '.join(absent)}.")
    how = (
        f"{_machine(data)}. torch.compile: max-autotune, frozen weights, channels last, in a CUDA graph, measured once beside "
        f"eager (an nn.LSTM stays cuDNN's). Several rows may have compiled at once on the {data['cores']} cores, "
        "hence the long times. "
        f"{_note(data)}"
    )
    return table(rows, " ".join(said), how=how, commands=_commands(data))


def side_by_side(file: Path) -> str:
    """Networks in one lane and with lanes."""
    data = json.loads(file.read_text(encoding="utf-8"))
    rows = [["network, batch", "one lane µs", "lanes µs", "faster", "lanes", "steps aside"]]
    alike = []
    for row in data["rows"]:
        one, found = row["variants"]["1"], row["variants"]["auto"]
        name = f"{Path(row['network'].replace('@', ', batch ')).name.removesuffix('.ts')}"
        if found["lanes"] == 1:
            alike.append(name)
            continue
        gain = f"{one['us'] / found['us']:.2f}×"
        rows.append([name, f"{one['us']:.1f}", f"{found['us']:.1f}", gain, str(found["lanes"]), str(found["aside"])])
    said = f"No independent steps worth a lane: {'; '.join(alike)}." if alike else ""
    how = (
        f"{data['device']}, driver {data['driver']}; {data['date']}, commit {data['commit'][:8]}. fp16, batch 1 unless a row "
        "says otherwise; the cost model chose the kernels, the same ones in both columns; medians of replays in "
        "turns. Each result was the "
        f"same bits in 50 runs over an arena full of NaN, and without a graph. {data.get('note', '')}"
    )
    return table(rows, said, how=how, commands=[data["command"]])


def others(file: Path) -> str:
    """Architectures that nothing was tuned for, a row each, beside eager."""
    data = json.loads(file.read_text(encoding="utf-8"))
    found: dict[str, dict[str, Mapping[str, Any]]] = {}
    for row in data["rows"]:
        name, batch = row["name"].split(":")
        found.setdefault(name, {})[batch] = row["candidates"]
    batches = ("1", "16")
    rows = [["network", *(f"{what}, batch {b}" for b in batches for what in ("optdnn ms", "eager ms", "faster"))]]
    ratios, wrong = [], []
    for name, of in found.items():
        cells = []
        for batch in batches:
            ours, eager = (of.get(batch, {}).get(n, {}).get("median_ms") for n in ("ours", "eager"))
            cells += [f"{t:.3f}" if t else "–" for t in (ours, eager)]
            cells.append(f"{eager / ours:.1f}×" if ours and eager else "–")
            ratios += [eager / ours] if ours and eager else []
            if ours and not of[batch]["ours"]["error_rel"] <= max(0.03, 2 * of[batch]["eager"].get("error_rel", 0.0)):
                wrong.append(f"{name}, {batch}")
        rows.append([name, *cells])
    mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
    said = f"{mean:.1f} times as fast as eager in geometric mean of {len(ratios)} pairs, {min(ratios):.2f} at least."
    if wrong:
        said += f" Further off, or not finite: {'; '.join(wrong)}."
    how = (
        f"{_machine(data)}. Modules of torchvision and transformers with seeded weights through `optdnn.from_torch`, "
        "fp16, by the "
        "cost model, untuned. Eager: fp16, channels last, in a CUDA graph. Each result was compared with the module "
        "in fp32 (within 0.03 "
        f"of the largest output, or twice eager's error). {_note(data)}"
    )
    return table(rows, said, how=how, commands=_commands(data))


def growth(file: Path) -> str:
    """The drawing that lies beside the series, and which of them were not measured."""
    data = json.loads(file.read_text(encoding="utf-8"))
    over = {"resnet50": "ResNet-50 over batch", "bert_base": "BERT over sequence"}
    there = {r["model"] for r in data["rows"] if any("median_ms" in c for c in r.get("candidates", {}).values())}
    missing = [text for model, text in over.items() if model not in there]
    shown = " and ".join(text for model, text in over.items() if model in there)
    said = f" {' and '.join(missing)}: not measured yet." if missing else ""
    drawing = f"![Latency of {shown}]({file.with_suffix('.svg').name})"
    how = f"{_machine(data)}. fp16, by the cost model, beside PyTorch eager.{said}"
    return f"{drawing}\n\n{note('How it was measured', how, _commands(data))}"


def waits(file: Path) -> str:
    """How long a user waits: builds, loads, the first run of a size, Python's part of a call."""
    data = json.loads(file.read_text(encoding="utf-8"))
    rows = [["what", "measured", "to reach"]]
    if "cold" in (build := data.get("build", {})):
        rows.append(["build of ResNet-50, full autotune, caches cold", f"{build['cold']['seconds']:.1f} s", "120 s"])
        if "warm" in build:
            same = ", the same bytes" if build.get("the_same_bytes") else ""
            rows.append(["the same, caches warm", f"{build['warm']['seconds']:.1f} s{same}", "5 s"])
    if "median_s" in (load := data.get("load", {})):
        rows.append(["`optdnn.load` to the first result, a fresh process", f"{load['median_s']:.2f} s", "0.5 s"])
    rows += _plans(file.with_name("dynamic-shapes-h200.json"))
    call = data.get("call", {})
    for key, what in (
        ("bound", "Python's part of a call with bound buffers"),
        ("engine_with_gpu_arrays", "Python's part of `engine.run` with GPU arrays"),
    ):
        if "call_us" in call.get(key, {}):
            rows.append([what, f"{call[key]['call_us']:.1f} µs", "20 µs"])
    if "after_ms" in (tuned := data.get("retune", {})):
        network = tuned["build"]["command"].split()[2].partition(".")[0]
        gained = f"{tuned['before_ms']:.4f} → {tuned['after_ms']:.4f} ms, {tuned['seconds']:.0f} s"
        rows.append([f"`optdnn retune` of {network}, built with the GPU hidden", gained, ""])
    how = f"{_machine(data)}. Seconds are those of the whole command. {_note(data)}"
    return table(rows, how=how, commands=_commands(data))


def _plans(file: Path) -> list[list[str]]:
    """What the first run of a further length takes."""
    kept = json.loads(file.read_text(encoding="utf-8"))["rows"] if file.exists() else []
    first, *later = [r for r in kept if r.get("row") == "bert_base:1" and "stages" in r and r["length"] != 128] or [{}]
    rows = []
    if first:
        whole = first["import_the_compiler_s"] + first["first_seconds"]
        what = "the first run of BERT-base at a length that its engine holds no plan for, the first of a process"
        rows.append([what, f"{whole:.1f} s", ""])
    for compiled in sorted({r["kernels_compiled"] for r in later}):
        times = sorted(r["first_seconds"] for r in later if r["kernels_compiled"] == compiled)
        kernels = f"{compiled} kernel{'s' * (compiled > 1)} compiled" if compiled else "no kernel compiled"
        rows.append(
            [f"at a further such length, {kernels}", f"{times[len(times) // 2]:.2f} s", "0.5 s" * (not compiled)]
        )
    return rows


def compared(file: Path) -> str:
    """The results of ``optdnn compare``, a row for each call; "" where none was made."""
    names = ("own", "cudnn", "torch", "torch-compile")
    rows = [["network", "optdnn ms", *(f"{n} ms" for n in names)]]
    runs = [r for r in json.loads(file.read_text(encoding="utf-8")).get("compare", []) if r["code"] == 0]
    for run in runs:
        subject, *rivals = run["rows"]
        ms = {r["name"]: f"{r['median_ms']:.3f}" if r["median_ms"] is not None else r["error"] for r in rivals}
        network = run["command"].split()[2].partition(".")[0]
        rows.append([network, f"{subject['median_ms']:.3f}", *(ms.get(n, "") for n in names)])
    if not runs:
        return ""
    how = "GPU time. Each candidate runs in a process of its own, in turns, and is compared with the model in float64."
    return table(rows, how=how, commands=[r["command"] for r in runs])
