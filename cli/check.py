"""``optdnn check``."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from optdnn.cli.common import (
    build_options,
    make_options,
    print_host,
    print_json,
    refuse_engine,
    stdout,
    table,
    value_option,
)


@click.command("check")
@click.argument("model", type=click.Path(path_type=Path, dir_okay=False))
@build_options
@value_option
@click.option("--json", "as_json", is_flag=True, help="Print the findings as JSON.")
@click.pass_context
def command(ctx: click.Context, /, model: Path, as_json: bool, **options: Any) -> None:
    """Import and optimize MODEL.onnx without building: whether it is supported, and what each pass would do.

    For a GPU also what it lacks: the operators that would run on the CPU, why, and what that costs. --strict refuses them.
    """
    from optdnn.importers.onnx import import_model
    from optdnn.importers.values import size_inputs, with_values
    from optdnn.optimizing import optimize
    from optdnn.target_name import TargetName
    from optdnn.targets import resolve_target

    refuse_engine(model)
    chosen = make_options(ctx, **options)
    target = resolve_target(chosen.target)
    chosen = replace(chosen, target=target)
    name = TargetName.parse(target)
    source = with_values(model, chosen.values)
    graph = import_model(source, shapes=chosen.shapes)
    inputs = [f"{out.name}: {out.type}" for out in (graph.op(i).outputs[0] for i in graph.inputs)]
    if graph.profiles and name.on_gpu:
        from optdnn.plans import optimum

        graph = import_model(source, shapes=optimum(graph))
    sizes = size_inputs(graph)
    before = graph.kinds()
    reports = optimize(graph, chosen, target)
    facts = {
        "model": str(model),
        "target": target,
        "supported": True,
        "inputs": inputs,
        "operators_before": before,
        "operators_after": graph.kinds(),
        "passes": [r.to_json() for r in reports],
    }
    host = None
    if name.on_gpu:
        from optdnn.lower_cuda import lower_cuda
        from optdnn.runtime.cuda.device import facts_for

        host = lower_cuda(graph, replace(chosen, no_cubins=True), facts_for(name.arch), {}).meta["host"]
        facts["host"] = host
        facts["size_inputs"] = sizes
    if as_json:
        print_json(facts)
        return
    stdout.print(f"inputs: {', '.join(inputs)}\n")
    kinds = sorted({*before, *graph.kinds()})
    rows = [[k, before.get(k, 0), graph.kinds().get(k, 0)] for k in kinds]
    stdout.print(table(None, ["operator", "in the model", "after the passes"], rows, right=[1, 2]))
    if host is not None:
        print_host(host, target)
        if sizes and host["operators"]:
            stdout.print(
                f"inputs that only say sizes: {', '.join(sizes)}; their values get plans of their own, in which nothing runs on "
                "the CPU because of them (what they always are can be given by --value)"
            )
    stdout.print(f"\n{model}: supported on {target}; {sum(before.values())} operators become {len(graph)}")
