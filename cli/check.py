"""``optdnn check``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from shlex import quote
from typing import Any

import click

from optdnn.cli.build_options import CHECK_LACKS, build_options, make_options
from optdnn.cli.common import give_json, print_host, refuse_engine, stdout, table
from optdnn.cli.options import FILE, Command, json_option
from optdnn.config import BuildOptions


@click.command("check", cls=Command)
@click.argument("model", type=FILE)
@build_options(without=CHECK_LACKS, automatic=False)
@json_option
@click.pass_context
def command(ctx: click.Context, /, model: Path, json_file: Path | None, **options: Any) -> None:
    """Import and optimize MODEL.onnx without building: whether it is supported.

    Shows the operators before and after the passes; --json also shows the work of each pass. For a GPU it shows the operators that
    would run on the CPU, the reason, and the cost; --strict refuses them. Sizes that are not fixed get a suggestion for --shape.
    """
    from optdnn.targets import resolve_target

    refuse_engine(model)
    chosen = make_options(ctx, **options)
    facts = findings(model, replace(chosen, target=resolve_target(chosen.target)))
    if not give_json(facts, json_file):
        _show(facts)


def findings(model: Path, options: BuildOptions) -> dict[str, Any]:
    """The outcome of a build with these options (of a resolved target), without building. Raises as a build does."""
    from optdnn.importers.asked import asked_model
    from optdnn.importers.onnx import import_model
    from optdnn.importers.values import size_inputs
    from optdnn.lowering.likely_shapes import sizes_needed, suggest_shapes
    from optdnn.optimize import optimize
    from optdnn.target_name import TargetName

    target = options.target
    name = TargetName.parse(target)
    on_gpu = name.on_gpu
    source = asked_model(model, options)
    graph = import_model(source, shapes=options.shapes)
    inputs = [f"{out.name}: {out.type}" for out in (graph.op(i).outputs[0] for i in graph.inputs)]
    suggested = suggest_shapes(graph)
    if suggested and on_gpu and not graph.profiles:
        raise sizes_needed(graph, target)
    if graph.profiles and on_gpu:
        from optdnn.shapes.plans import optimum

        graph = import_model(source, shapes=optimum(graph))
    sizes = size_inputs(graph)
    before = graph.kinds()
    reports = optimize(graph, options, target)
    facts: dict[str, Any] = {
        "model": str(model),
        "target": target,
        "supported": True,
        "inputs": inputs,
        **({"suggested_shapes": suggested} if suggested else {}),
        "operators_before": before,
        "operators_after": graph.kinds(),
        "passes": [r.to_json() for r in reports],
    }
    if on_gpu:
        from optdnn.lowering.cuda import lower_cuda
        from optdnn.runtime.cuda.device import facts_for

        facts["host"] = lower_cuda(graph, replace(options, no_cubins=True), facts_for(name), {}).meta["host"]
        facts["size_inputs"] = sizes
    return facts


def _show(facts: Mapping[str, Any]) -> None:
    before, after = facts["operators_before"], facts["operators_after"]
    stdout.print(f"inputs: {', '.join(facts['inputs'])}\n")
    rows = [[k, before.get(k, 0), after.get(k, 0)] for k in sorted({*before, *after})]
    stdout.print(table(None, ["operator", "in the model", "after the passes"], rows, right=[1, 2]))
    host, sizes = facts.get("host"), facts.get("size_inputs")
    if host is not None:
        print_host(host, facts["target"])
        if sizes and host["operators"]:
            stdout.print(
                f"shape inputs: {', '.join(sizes)}; this check does not know their values. Each of their values gets its own "
                "plan, in which the sizes and conditions that follow from them are known: see the plan of one with "
                f"--value {sizes[0]}=…"
            )
    if "suggested_shapes" in facts:
        shapes = " ".join(f"--shape {quote(s)}" for s in facts["suggested_shapes"])
        stdout.print(f"\nsizes that are not fixed: the CPU takes any; a GPU needs a range, such as {shapes}")
    total, left = sum(before.values()), sum(n for k, n in after.items() if k != "Constant")
    stdout.print(f"\n{facts['model']}: supported on {facts['target']}; {total} operators become {left}")
