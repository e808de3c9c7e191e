"""``--config FILE.toml``: options of a command from a file."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from optdnn.errors import UsageError, did_you_mean
from optdnn.text_file import read_text


def read_config(ctx: click.Context, parameter: click.Parameter, path: Path | None) -> None:
    """Make the file's values the defaults of the command's options. The command line comes before them.

    Keys are option names (``opt-level = 2``). An option that may be repeated takes a list, and one of the form NAME=VALUE also a
    table. Raises UsageError for a file that cannot be read, and for a key that is no option of the command.
    """
    if path is None:
        return
    options = {
        name.lstrip("-"): p
        for p in ctx.command.params
        if isinstance(p, click.Option) and p.expose_value
        for name in p.opts + p.secondary_opts
        if name.startswith("--")
    }
    found: dict[str, Any] = {}
    for key, value in _table(path).items():
        if key not in options:
            meant = did_you_mean(key.replace("_", "-"), options)
            raise UsageError(
                f"{path}: optdnn {ctx.command.name} has no option {key!r}" + (f"; {meant}" if meant else ""),
                hint=f"optdnn {ctx.command.name} --help lists the options",
            )
        option = options[key]
        assert option.name is not None
        found[option.name] = _value(path, key, option, value)
    ctx.default_map = {**(ctx.default_map or {}), **found}


def _table(path: Path) -> Mapping[str, Any]:
    try:
        return tomllib.loads(read_text(path))
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from None
    except ValueError as error:
        raise UsageError(f"{path} is not TOML: {error}") from None


def _value(path: Path, key: str, option: click.Option, value: Any) -> Any:
    """The value as the option takes it."""
    if isinstance(value, dict) and option.multiple:
        value = [f"{name}={one}" for name, one in value.items()]
    if option.multiple and not isinstance(value, list):
        value = [value]
    single = value if isinstance(value, list) else [value]
    wrong = [v for v in single if isinstance(v, (dict, list)) or isinstance(v, bool) != option.is_flag]
    if wrong or (isinstance(value, list) and not option.multiple):
        wanted = "true or false" if option.is_flag else "a list of values" if option.multiple else "one value"
        raise UsageError(f"{path}: {key} takes {wanted}, not {value!r}")
    return value if option.is_flag else [str(v) for v in value] if option.multiple else str(value)
