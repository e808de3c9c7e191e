"""``optdnn env``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from optdnn.cli.common import give_json, stdout, table
from optdnn.cli.options import Command, json_option


@click.command("env", cls=Command)
@json_option
def command(json_file: Path | None) -> None:
    """Show versions, the machine, and which targets are usable here."""
    from optdnn.runtime.measuring.machine import machine, versions

    facts: dict[str, Mapping[str, Any]] = {"machine": machine(), "versions": versions(), "targets": _targets()}
    if give_json(facts, json_file):
        return
    for title, group in facts.items():
        stdout.print(table(title, ["", ""], [[k, _text(v)] for k, v in group.items() if v is not None]))
        stdout.print()


def _text(value: object) -> str:
    return ", ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)


def _targets() -> dict[str, str]:
    from importlib.metadata import PackageNotFoundError, version

    found = []
    for name in ("openvino", "onnxruntime"):
        try:
            found.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            continue
    cpu = f"usable: {', '.join(found)}" if found else "not usable: pip install 'optdnn[cpu]'"
    return {"cuda": _cuda(), "cpu": cpu, "reference": "usable", "simulate": "usable"}


def _cuda() -> str:
    """Whether the GPU is usable, and which libraries are rivals of our kernels there."""
    from optdnn.runtime.cuda import usable
    from optdnn.runtime.cuda.libraries import find as libraries

    reason = usable.why_not()
    if reason is not None:
        return f"not usable: {reason}" + (
            "; builds for a named GPU work: --target cuda:sm_90a" if usable.compiles() else ""
        )
    there = {name: libraries.present(name) for name in ("cudnn", "cublaslt")}
    absent = " and ".join(name for name, found in there.items() if not found)
    found = ", ".join(["usable: our kernels", *(name for name, found in there.items() if found)])
    return f"{found} (no {absent}: pip install 'optdnn[cuda-libs]')" if absent else found
