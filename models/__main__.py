"""``python -m optdnn.models NAME``: write a network of the zoo as an ONNX file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from optdnn.errors import OptdnnError
from optdnn.models import zoo
from optdnn.runtime.file.atomic import check_writable, write_atomic


def _value(text: str) -> bool | int | float | str:
    """A setting as the builders take it: true or false, a number, or a name."""
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def _setting(context: click.Context, parameter: click.Parameter, values: tuple[str, ...]) -> dict[str, Any]:
    settings = {}
    for value in values:
        key, separator, text = value.partition("=")
        if not separator or not key:
            raise click.BadParameter(f"{value!r} is not NAME=VALUE", ctx=context, param=parameter)
        settings[key] = _value(text)
    return settings


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("name", required=False, metavar="NAME", type=click.Choice(zoo.NAMES))
@click.option(
    "-o", "--output", type=click.Path(dir_okay=False, path_type=Path), help="Where to write it.  [default: NAME.onnx]"
)
@click.option("--batch", help='Batch size, or a name ("N") for a symbolic one.')
@click.option("--image-size", type=int, help="Height and width of the pictures.")
@click.option("--num-classes", type=int, help="Number of classes.")
@click.option("--width", type=float, help="Scale of the channel counts.")
@click.option("--depth", type=float, help="Scale of the block counts.")
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Seed of the weights.")
@click.option("--opset", type=int, default=17, show_default=True)
@click.option(
    "--set", "settings", multiple=True, callback=_setting, metavar="NAME=VALUE", help="Any other option of the network."
)
@click.option("--list", "listing", is_flag=True, help="List the networks with their options and leave.")
def main(
    name: str | None, output: Path | None, seed: int, opset: int, settings: dict[str, Any], listing: bool, **common: Any
) -> None:
    """Build the network NAME with seeded weights and write it as ONNX."""
    if listing:
        for known in zoo.NAMES:
            click.echo(f"{known}: " + " ".join(f"{k}={v}" for k, v in zoo.options(known).items()))
        return
    if name is None:
        raise click.UsageError("Missing argument 'NAME'; --list shows the networks.")
    given: dict[str, Any] = {k: _value(v) if k == "batch" else v for k, v in common.items() if v is not None}
    target = output or Path(f"{name}.onnx")
    try:
        check_writable(target)
        model = zoo.build(name, seed=seed, opset=opset, **given, **settings)
        write_atomic(target, [content := model.SerializeToString(deterministic=True)])
    except OptdnnError as error:
        click.echo(f"Error: {error}", err=True)
        raise SystemExit(error.exit_code) from None
    click.echo(f"{target}: {len(model.graph.node)} nodes, {len(content) / 1e6:.1f} MB")


if __name__ == "__main__":
    main(prog_name="python -m optdnn.models")
