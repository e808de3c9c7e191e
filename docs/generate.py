"""Write the generated parts of README.md and of the pages under docs/: the reference, and the tables of measured results.

    python docs/generate.py            # rewrites what is out of date and names it
    python docs/generate.py --check    # only names it; exit code 1 where there is any

A generated part is between ``<!-- generated: NAME -->`` and ``<!-- end of NAME -->``. :func:`parts` makes all of them.
"""

from __future__ import annotations

import inspect
import re
import sys
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import fields
from importlib import import_module
from pathlib import Path
from typing import Any

import click

import optdnn
from optdnn import errors, limits
from optdnn.cli.main import COMMANDS, cli
from optdnn.config import BuildOptions
from optdnn.passes.base import Pass
from optdnn.passes.pipelines import PIPELINE

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))  # the benchmarks are a folder of the checkout, and no part of the package

from benchmarks import supported  # noqa: E402
from benchmarks.figures import tables  # noqa: E402

PART = re.compile(r"<!-- generated: (?P<name>[\w-]+) -->\n.*?<!-- end of (?P=name) -->", re.S)
GROUPS: dict[str, tuple[str, ...]] = {
    "Build, load and check": ("build", "load", "retune", "sign", "verify", "Verification"),
    "Run": ("Engine", "Context", "optdnn.runtime.contexts.state.Bound"),
    "Generate text": ("Generator",),
    "Ray": ("Predictor", "optdnn.integrations.ray.application"),
    "Shapes and types": ("DimRange", "TensorSpec"),
    "Pictures": (
        *("ImageSpec", "PictureInput", "AnswerSpec", "picture_answers", "PictureAnswer"),
        "optdnn.integrations.dali.DaliBatches",
    ),
    "Operators of your own": ("custom_op", "CustomOp", "CudaKernel", "CudaLaunch"),
    "PyTorch": ("from_torch", "optdnn.integrations.pytorch.compile_backend"),
    "In place of onnxruntime": ("InferenceSession", "SessionOptions", "get_available_providers"),
}
"""Heading -> public names of ``optdnn``, or full names. Errors have their own page."""


def parts() -> dict[str, str]:
    """Name -> Markdown of every generated part."""
    made = {
        "cli": command_line(),
        "python": python(),
        "build-options": build_options(),
        "errors": error_classes(),
        "exit-codes": table(["code", "meaning"], [[str(c), text] for c, text in errors.EXIT_CODES.items()]),
        "limits": limits_on_files(),
        "operators": supported.table(),
        "operator-cases": operator_cases(),
        "engine-format": docstring("optdnn.runtime.file.format"),
        "passes-cpu": passes("cpu"),
        "passes-cuda": passes("cuda:sm_90a"),
    }
    return {**made, **tables(ROOT / "benchmarks" / "results")}


def pages() -> list[Path]:
    """README.md and every page of the documentation."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def updated(text: str, made: dict[str, str]) -> str:
    """``text`` with its generated parts as in ``made``. Raises ValueError for a part that nothing makes."""

    def part(found: re.Match[str]) -> str:
        name = found["name"]
        if name not in made:
            raise ValueError(f"there is no generated part {name!r}; there are {', '.join(made)}")
        return f"<!-- generated: {name} -->\n{made[name].strip()}\n<!-- end of {name} -->"

    return PART.sub(part, text)


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table. Bars in cells are escaped."""
    cells = [[c.replace("|", "\\|") for c in row] for row in rows]
    return "\n".join(f"| {' | '.join(r)} |" for r in (head, ["---"] * len(head), *cells))


# ---------------------------------------------------------------- command line


def command_line() -> str:
    """A section for each command: its help, arguments and options. An option that an earlier command explains is only named."""
    context = click.Context(cli, info_name="optdnn")
    commands = {f"optdnn {name}": cli.get_command(context, name) for name in COMMANDS}
    commands["python -m optdnn.models"] = import_module("optdnn.models.__main__").main
    found = []
    explained: dict[tuple[str, str], str] = {}
    for name, command in commands.items():
        assert command is not None
        usage = " ".join([name, "[OPTIONS]", *_arguments(command)])
        options = [p for p in command.params if isinstance(p, click.Option) and p.name not in ("quiet", "debug")]
        own, others = [], dict[str, list[str]]()
        for p in options:
            row = (_option(p), _meaning(p))
            if (first := explained.setdefault(row, name)) == name:
                own.append(list(row))
            else:
                others.setdefault(first, []).append(f"`{p.opts[0]}`")
        text = inspect.cleandoc(command.help or "").replace("\b\n", "")
        parts = [f"## {name}", f"```text\n{usage}\n```", text, *([table(["option", "meaning"], own)] if own else [])]
        alike = (f"As for [{n}](#{n.replace(' ', '-')}): {', '.join(names)}." for n, names in others.items())
        parts += [textwrap.fill(line, 130, break_long_words=False, break_on_hyphens=False) for line in alike]
        found.append("\n\n".join(parts))
    return "\n\n".join(found)


def _arguments(command: click.Command) -> list[str]:
    return [p.metavar or (p.name or "").upper() for p in command.params if isinstance(p, click.Argument)]


def _option(option: click.Option) -> str:
    names = ", ".join([*option.opts, *option.secondary_opts])
    value = "" if option.is_flag or option.count else f" {option.metavar or option.type.name.upper()}"
    return f"`{names}{value}`"


def _meaning(option: click.Option) -> str:
    mark = "[GPU] " if getattr(option, "gpu", False) else ""
    text = mark + " ".join((option.help or "").split())
    shown = option.show_default
    default = shown if isinstance(shown, str) else option.default if shown and not option.is_flag else None
    again = " Repeat." if option.multiple and "epeat" not in text else ""
    return f"{text}{again}" + (f" Default: `{default}`." if default is not None else "")


# ---------------------------------------------------------------- Python


def python() -> str:
    """The public names with their signatures and docstrings."""
    return "\n\n".join(
        "\n\n".join([f"## {title}", *(_documented(name) for name in names)]) for title, names in GROUPS.items()
    )


def _documented(name: str) -> str:
    module, _, last = name.rpartition(".")
    value = getattr(import_module(module) if module else optdnn, last)
    if not inspect.isclass(value):
        return f"### {last}\n\n{_signature(last, value)}\n\n{prose(inspect.getdoc(value) or '')}"
    blocks = [f"### {last}", prose(inspect.getdoc(value) or "")]
    for member, found in _members(value):
        if isinstance(found, property):
            blocks.append(f"`{last}.{member}`: {prose(inspect.getdoc(found) or 'see above')}")
        else:
            blocks.append(f"{_signature(f'{last}.{member}', found)}\n\n{prose(inspect.getdoc(found) or '')}".strip())
    return "\n\n".join(blocks)


def _members(cls: type) -> Iterator[tuple[str, Any]]:
    """The public methods and properties of a class, inherited ones too; properties without a docstring explain themselves."""
    bases = (base for base in reversed(cls.__mro__) if base.__module__.startswith("optdnn"))
    for name, value in {name: value for base in bases for name, value in vars(base).items()}.items():
        call = name == "__call__"
        if (not name.startswith("_") or call) and (inspect.isfunction(value) or isinstance(value, property)):
            if isinstance(value, property) and not value.__doc__:
                continue
            yield name, value


def _signature(name: str, value: Any) -> str:
    """The call as a block of Python, an argument per line where it is long."""
    signature = inspect.signature(value)
    arguments = _separated([p for p in signature.parameters.values() if p.name != "self"])
    result = "" if signature.return_annotation is signature.empty else f" -> {_annotation(signature.return_annotation)}"
    shown = f"{name}({', '.join(arguments)}){result}"
    if len(shown) > 100:
        shown = "\n".join([f"{name}(", *(f"    {a}," for a in arguments), f"){result}"])
    return f"```python\n{shown}\n```"


def _separated(given: Sequence[inspect.Parameter]) -> list[str]:
    """The arguments as text, with the star before keyword-only ones."""
    found: list[str] = []
    starred = False
    for p in given:
        if p.kind is p.KEYWORD_ONLY and not starred:
            found.append("*")
        starred = starred or p.kind in (p.KEYWORD_ONLY, p.VAR_POSITIONAL)
        stars = {p.VAR_POSITIONAL: "*", p.VAR_KEYWORD: "**"}.get(p.kind, "")
        of_type = "" if p.annotation is p.empty else f": {_annotation(p.annotation)}"
        equal = " = " if of_type else "="
        found.append(f"{stars}{p.name}{of_type}" + ("" if p.default is p.empty else f"{equal}{p.default!r}"))
    return found


def _annotation(annotation: Any) -> str:
    return annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)


def build_options() -> str:
    """What the fields of ``BuildOptions`` mean. The signature of ``build`` has the same names, with types and defaults."""
    lacking = {f.name for f in fields(BuildOptions)} - inspect.signature(optdnn.build).parameters.keys()
    assert not lacking, f"the signature of build lacks {lacking}"
    return prose(inspect.getdoc(BuildOptions) or "")


def error_classes() -> str:
    """Every public error: class, base, exit code, meaning."""
    rows = []
    for name in optdnn._ERRORS.split():
        cls = getattr(errors, name)
        rows.append(
            [f"`{name}`", f"`{cls.__base__.__name__}`", str(cls.exit_code), prose(cls.__doc__ or "", fill=True)]
        )
    return table(["class", "is a", "exit code", "meaning"], sorted(rows, key=lambda r: int(r[2])))


def prose(text: str, *, fill: bool = False) -> str:
    """A docstring as Markdown: roles and double backquotes become code. ``fill`` puts it on one line."""
    text = re.sub(r":\w+:`~(?:[\w.]*\.)?(\w+)`", r"`\1`", text)
    text = re.sub(r":\w+:`([^`]*)`", r"`\1`", text)
    text = re.sub(r"``(.*?)``", r"`\1`", text, flags=re.S)
    return " ".join(text.split()) if fill else text.strip()


def docstring(module: str) -> str:
    """A module's docstring without its first line; blocks behind ``::`` are fenced."""
    text = prose(inspect.cleandoc(import_module(module).__doc__ or "").partition("\n")[2])

    def fenced(found: re.Match[str]) -> str:
        return f"```text\n{textwrap.dedent(found[1]).strip()}\n```\n\n"

    return re.sub(r"^::\n\n((?:    .*\n|\n)+)", fenced, text, flags=re.M)


# ---------------------------------------------------------------- operators and passes


def limits_on_files() -> str:
    """A row for each limit on what is read."""
    rows = [[f"`{one.variable}`", f"{one.default:,}", one.meaning] for one in limits.LIMITS]
    return table(["variable", "default", "it counts"], rows)


def operator_cases() -> str:
    """The list of operators as ONNX's backend tests of each ran, without its heading."""
    text = (ROOT / "optdnn/ops/OPERATORS.md").read_text(encoding="utf-8")
    return text.partition("\n")[2].partition("\nNot done:")[0]


def passes(target: str) -> str:
    """The passes of the highest level in order: name, and a sentence.

    It is the first one of the module's docstring, or of the pass's own if the module has several passes."""
    rows = []
    for number, one in enumerate(PIPELINE(3, target), start=1):
        module = import_module(type(one).__module__)
        alone = sum(is_pass(c) and c.__module__ == module.__name__ for c in vars(module).values()) == 1
        first = prose((module if alone else type(one)).__doc__ or "", fill=True).partition(". ")[0].rstrip(".")
        assert first, f"{one.name} has no docstring"
        rows.append([str(number), f"`{one.name}`", first])
    return table(["", "pass", "meaning"], rows)


def is_pass(value: Any) -> bool:
    return isinstance(value, type) and issubclass(value, Pass) and not value.__name__.startswith("_")


def main() -> int:
    made = parts()
    stale = []
    for page in pages():
        text = page.read_text(encoding="utf-8")
        if (new := updated(text, made)) != text:
            stale.append(page)
            if "--check" not in sys.argv:
                page.write_text(new, encoding="utf-8")
    for page in stale:
        print(page.relative_to(ROOT))
    return int("--check" in sys.argv and bool(stale))


if __name__ == "__main__":
    sys.exit(main())
