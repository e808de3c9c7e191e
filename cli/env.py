"""``optdnn env``."""

from __future__ import annotations

import click

from optdnn.cli.common import print_json, stdout, table


@click.command("env")
@click.option("--json", "as_json", is_flag=True, help="Print as JSON.")
def command(as_json: bool) -> None:
    """Show versions, the machine, and which targets are usable here."""
    from optdnn.runtime.machine import machine, versions

    facts = {"machine": machine(), "versions": versions(), "targets": _targets()}
    if as_json:
        print_json(facts)
        return
    for title, group in facts.items():
        stdout.print(table(title, ["", ""], [[k, v] for k, v in group.items()]))
        stdout.print()


def _targets() -> dict[str, str]:
    from importlib.metadata import PackageNotFoundError, version

    found = []
    for name in ("openvino", "onnxruntime"):
        try:
            found.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            continue
    cpu = f"usable: {', '.join(found)}" if found else "not usable: pip install 'optdnn[cpu]'"
    from optdnn.runtime.cuda.usable import why_not

    reason = why_not()
    cuda = "usable" if reason is None else f"not usable: {reason}"
    return {"cuda": cuda, "cpu": cpu, "reference": "usable", "simulate": "usable"}
