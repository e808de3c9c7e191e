"""Options of commands: in groups, with one spelling for all commands and a suggestion for a misspelled one."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from fractions import Fraction
from math import isfinite
from pathlib import Path
from typing import Any, TypeVar

import click
from click.shell_completion import CompletionItem

from optdnn.cli.config_file import read_config
from optdnn.cli.foreign_options import about_foreign
from optdnn.cli.shared_files import Written, refuse_shared_files

F = TypeVar("F", bound=Callable[..., Any])
GENERAL = "General"
RESULTS = "Results"
GPU = "GPU"
FILE = click.Path(path_type=Path, dir_okay=False)
WRITTEN = Written(path_type=Path, dir_okay=False)


class Size(click.IntRange):
    """A number of bytes: "1048576", or with a unit of 1024: "1M", "4GiB"."""

    _TEXT = re.compile(r"(\d{1,18}(?:\.\d{1,18})?)\s*([kmgt]?)(?:i?b)?", re.IGNORECASE)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        match = self._TEXT.fullmatch(str(value).strip())
        found = 0 if match is None else int(Fraction(match[1]) * 1024 ** " kmgt".index(match[2].lower() or " "))
        if found < 1:
            self.fail(f"{value!r} is not a number of bytes, such as 1048576, 512M or 4G", param, ctx)
        return found


SIZE = Size(min=1)


class Number(click.FloatRange):
    """A finite number within bounds: click's own type accepts nan, which is within all of them."""

    name = "number"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        found = super().convert(value, param, ctx)
        if not isfinite(found):
            self.fail(f"{value!r} is not a finite number", param, ctx)
        return found


class Integer(click.IntRange):
    """An integer within bounds."""

    name = "integer"


class Option(click.Option):
    """An option in a group of its command's help. ``gpu``: it has a meaning on GPUs only. ``data``: its text names a
    file that is read, FILE or NAME=FILE. ``replaces``: the argument whose file a written one may be."""

    def __init__(
        self,
        *args: Any,
        group: str = "Options",
        gpu: bool = False,
        data: bool = False,
        replaces: str = "",
        **attributes: Any,
    ):
        super().__init__(*args, **attributes)
        self.group, self.gpu, self.data, self.replaces = group, gpu, data, replaces

    def get_help_record(self, ctx: click.Context) -> tuple[str, str] | None:
        record = super().get_help_record(ctx)
        return (record[0], f"[{GPU}] {record[1]}") if record is not None and self.gpu else record


class Command(click.Command):
    """A command whose help shows its options in groups, and that takes ``--json`` with a file or without one."""

    def __init__(self, *args: Any, **attributes: Any):
        super().__init__(*args, **attributes)
        self.params += [_quiet_option(), _debug_option()]

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        groups: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx) if isinstance(parameter, click.Option) else None
            if record is not None:
                groups.setdefault(getattr(parameter, "group", GENERAL), []).append(record)
        last = [g for g in (RESULTS, GENERAL) if g in groups]
        for group in [*(g for g in groups if g not in last), *last]:
            with formatter.section(group):
                formatter.write_dl(groups[group])

    def invoke(self, ctx: click.Context) -> Any:
        refuse_shared_files(ctx)
        return super().invoke(ctx)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, json_with_its_file(args))
        except click.NoSuchOption as error:
            known = {o for p in self.params for o in p.opts}
            said = about_foreign(error.option_name, known)
            if said is None:
                raise
            raise click.NoSuchOption(error.option_name, said, ctx=error.ctx) from None


def json_with_its_file(args: Sequence[str]) -> list[str]:
    """``--json FILE.json`` and ``--json -`` as one word, and ``--json`` alone as ``--json=-``.

    Only a word that ends in .json is taken for the file: what follows may be the command's own argument.
    """
    found: list[str] = []
    rest = list(args)
    while rest:
        word = rest.pop(0)
        if word == "--":
            return [*found, word, *rest]
        if word == "--json":
            takes = bool(rest) and (rest[0] == "-" or rest[0].lower().endswith(".json"))
            word = f"--json={rest.pop(0) if takes else '-'}"
        found.append(word)
    return found


engine_argument = click.argument("engine", type=FILE)


def option(*names: str, group: str = "Options", gpu: bool = False, **attributes: Any) -> Callable[[F], F]:
    """``click.option``, in a group of the help."""
    return click.option(*names, cls=Option, group=group, gpu=gpu, **attributes)


def words(*known: str) -> Callable[[click.Context, click.Parameter, str], list[CompletionItem]]:
    """The shell completion of a value that is one of these words."""

    def complete(ctx: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
        return [CompletionItem(w) for w in known if w.startswith(incomplete)]

    return complete


def output_option(help_text: str, replaces: str = "") -> Callable[[F], F]:
    """``--output``, ``-o``: the file that a command writes its result to. ``replaces``: as for :class:`Option`."""
    return option("--output", "-o", group=RESULTS, type=WRITTEN, metavar="FILE", help=help_text, replaces=replaces)


def _json_file(ctx: click.Context, parameter: click.Parameter, value: Path | None) -> Path | None:
    """Refuse, before the work, a file that could not be written at its end. An error goes to the same file."""
    if value is not None and str(value) != "-":
        from optdnn.runtime.file.atomic import check_writable

        check_writable(value)
    if value is not None:
        ctx.find_root().ensure_object(dict)["json_file"] = value
    return value


json_option = option(
    "--json", "json_file", group=RESULTS, metavar="[FILE]", callback=_json_file,
    type=Written(path_type=Path, dir_okay=False, allow_dash=True),
    help="Print everything as JSON instead of text; --json FILE.json writes it there and prints the text too.",
)  # fmt: skip

input_option = option(
    "--input", "inputs", multiple=True, group="Inputs", metavar="[NAME=]FILE", data=True,
    help="FILE.npy (NAME= where there are several inputs), or an .npz of named arrays; NAME=FILE.npz takes one. "
    "Random if it is not given. Repeat.",
)  # fmt: skip

size_option = option(
    "--size", "sizes", multiple=True, group="Inputs", metavar="NAME=N",
    help="Size of a symbolic dimension.  [default: the profile's optimum, else that at which the build measured]",
)  # fmt: skip

seed_option = option(
    "--seed", type=Integer(min=0), default=0, show_default=True, group="Inputs", help="Seed of random inputs."
)

config_option = option(
    "--config", group=GENERAL, metavar="FILE.toml", is_eager=True, expose_value=False, callback=read_config,
    type=FILE,
    help="Take options from a TOML file: its keys are their names without leading dashes. The command line overrides it.",
)  # fmt: skip


def be_quiet(ctx: click.Context, parameter: click.Parameter, value: bool) -> None:
    """Print no progress and no remarks from here on."""
    if value and not ctx.resilient_parsing:
        from optdnn.cli.common import stderr

        ctx.find_root().ensure_object(dict)["quiet"] = True
        stderr.quiet = True


def _quiet_option() -> Option:
    return Option(
        ["-q", "--quiet"], is_flag=True, expose_value=False, callback=be_quiet, group=GENERAL,
        help="Print only results, warnings and errors; build prints the engine's file.",
    )  # fmt: skip


def _debug_option() -> Option:
    """For the help and for shells: the command group accepts the option at any place."""
    return Option(
        ["--debug"], is_flag=True, expose_value=False, group=GENERAL,
        help="Show tracebacks, and check the graph after every pass.",
    )  # fmt: skip
