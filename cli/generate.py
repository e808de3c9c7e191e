"""``optdnn generate``."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import click

from optdnn.cli.build_options import load_options
from optdnn.cli.common import give_json, remark
from optdnn.cli.options import FILE, Command, Integer, Number, engine_argument, json_option, option
from optdnn.errors import UsageError, printable

CHOICE, PROMPT = "Choice of tokens", "Prompt"


@click.command("generate", cls=Command)
@engine_argument
@option("--prompt", group=PROMPT, metavar="TEXT", help="The text to continue; needs --tokenizer.")
@option("--prompt-ids", group=PROMPT, metavar="1,2,3", help="The same as tokens.")
@option(
    "--tokenizer", type=FILE, group=PROMPT, metavar="FILE", help="A tokenizer.json: turns text into tokens, and back."
)
@option("--max-new-tokens", "-n", type=Integer(min=1), default=64, show_default=True, group=CHOICE, metavar="N",
        help="The most tokens to generate.")  # fmt: skip
@option("--stop", multiple=True, type=Integer(min=0), group=CHOICE, metavar="TOKEN",
        help="End with this token. Repeat.")  # fmt: skip
@option("--temperature", type=Number(min=0), default=0.0, show_default=True, group=CHOICE, metavar="T",
        help="0 takes the most probable token.")  # fmt: skip
@option("--top-k", type=Integer(min=0), default=0, group=CHOICE, metavar="K",
        help="Draw from the K most probable tokens.")  # fmt: skip
@option("--top-p", type=Number(0, 1, min_open=True), default=1.0, group=CHOICE, metavar="P",
        help="Draw from the most probable tokens with this total probability.")  # fmt: skip
@option("--seed", type=Integer(min=0), default=0, show_default=True, group=CHOICE, help="Seed of the draws.")
@option("--capacity", type=Integer(min=1), metavar="N", help="Positions of caches whose size the engine leaves open.")
@load_options
@json_option
def command(
    engine: Path, prompt: str | None, prompt_ids: str | None, tokenizer: Path | None, max_new_tokens: int, stop: tuple[int, ...],
    temperature: float, top_k: int, top_p: float, seed: int, capacity: int | None, json_file: Path | None, **loading: Any,
) -> None:  # fmt: skip
    """Generate text (or tokens) with the ENGINE of a language model, and print it as it is generated."""
    import optdnn
    from optdnn.generation.text import TextStream, read_tokenizer

    if (prompt is None) == (prompt_ids is None):
        raise UsageError("give either --prompt or --prompt-ids")
    if prompt is not None and tokenizer is None:
        raise UsageError("--prompt needs --tokenizer", hint="or give tokens: --prompt-ids 1,2,3")
    codes = None if tokenizer is None else read_tokenizer(tokenizer)
    tokens = _numbers(prompt_ids) if prompt_ids is not None else codes.encode(prompt).ids  # type: ignore[union-attr]
    generator = optdnn.Generator(optdnn.load(engine, **loading), capacity=capacity)
    text, show = None if codes is None else TextStream(codes), str(json_file) != "-"
    found: list[int] = []
    begin = time.perf_counter()
    chosen: dict[str, Any] = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "seed": seed}
    try:
        for token in generator.stream(tokens, max_new_tokens=max_new_tokens, stop_tokens=stop, **chosen):
            if not found:
                first = time.perf_counter()
            found.append(token)
            if show:
                click.echo(printable(text.push(token)) if text is not None else f"{token} ", nl=False)
    except BaseException:
        if found and show:
            click.echo()  # the error gets a line of its own
        raise
    end = time.perf_counter()
    if show:
        click.echo(printable(text.end()) if text is not None else "")
    rate = (len(found) - 1) / (end - first) if end > first and len(found) > 1 else None
    report = {
        "prompt": tokens, "tokens": found, "text": None if codes is None else codes.decode(found), "seed": seed,
        "first_token_seconds": round(first - begin, 6), "tokens_per_second": rate and round(rate, 2),
    }  # fmt: skip
    if not give_json(report, json_file):
        speed = "" if rate is None else f", {rate:.0f} a second"
        remark(f"{len(found)} tokens{speed}, the first after {first - begin:.3f} s")


def _numbers(text: str) -> list[int]:
    """The tokens of ``--prompt-ids``. Raises UsageError."""
    try:
        return [int(n) for n in text.split(",") if n.strip()]
    except ValueError:
        raise UsageError(f"--prompt-ids {text!r} is not a list of tokens, such as 1,2,3") from None
