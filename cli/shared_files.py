"""Files that two arguments of a command name: if the command writes one of them, the other would be lost."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import click

from optdnn.errors import UsageError


class Written(click.Path):
    """The type of a file that a command writes."""


def refuse_shared_files(ctx: click.Context, more: Mapping[str, Path] | None = None) -> None:
    """Refuse, before the work, a written file that another argument names, too.

    ``more``: files that the command writes without an option for them, by the names for messages. Raises UsageError.
    """
    read, written = list[tuple[click.Parameter, Path]](), list[tuple[click.Parameter | str, Path]]()
    for parameter in ctx.command.params:
        named = [(parameter, path) for path in _files_of(parameter, ctx.params.get(parameter.name or ""))]
        (written if isinstance(parameter.type, Written) else read).extend(named)
    written += (more or {}).items()
    for k, (result, path) in enumerate(written):
        replaces = getattr(result, "replaces", None)
        for other, its in [*((p, f) for p, f in read if p.name != replaces), *written[:k]]:
            if path.resolve() == its.resolve():
                if "json_file" in {getattr(result, "name", None), getattr(other, "name", None)}:
                    ctx.find_root().ensure_object(dict)["json_given"] = True  # the error is not written there either
                what = f"{_called(result)} would overwrite {path}, the file of {_called(other)}"
                raise UsageError(what, hint="name another file")


def _files_of(parameter: click.Parameter, value: Any) -> Iterator[Path]:
    for one in value if isinstance(value, tuple) else (value,):
        if isinstance(one, Path) and str(one) != "-":
            yield one
        elif isinstance(one, str) and getattr(parameter, "data", False):
            yield Path(one.rpartition("=")[2])


def _called(parameter: click.Parameter | str) -> str:
    """A parameter as users know it: "--html", "MODEL"."""
    if isinstance(parameter, str):
        return parameter
    return max(parameter.opts, key=len) if isinstance(parameter, click.Option) else parameter.human_readable_name
