"""``optdnn``: the command group, errors and exit codes.

Commands are loaded when they are called, so ``optdnn --help`` stays quick.
"""

from __future__ import annotations

import errno
import gc
import os
import sys
import traceback
import warnings
from shlex import quote
from typing import Any

import click
from click.shell_completion import CompletionItem

from optdnn import __version__
from optdnn.cli.ending import Ended, was_interrupted, watch
from optdnn.errors import (
    EXIT_CODES,
    InternalError,
    OptdnnError,
    OutputError,
    RunError,
    UsageError,
    did_you_mean,
    printable,
)
from optdnn.quick_import import quick_import

COMMANDS: dict[str, str] = {
    "build": "Compile an ONNX model into an engine.",
    "retune": "Tune an engine for a GPU on the GPU, in place.",
    "refit": "Give an engine the weights of the same network trained further.",
    "run": "Run an engine once on given or random inputs.",
    "generate": "Generate text with the engine of a language model.",
    "bench": "Measure an engine's latency and throughput.",
    "profile": "Show where the time of a run goes: Nsight Systems, Nsight Compute, or a trace for Perfetto.",
    "compare": "Race an engine or model against other runtimes: speed and accuracy.",
    "diff": "Show the differences between two engines or models.",
    "verify": "Check an engine on this machine: its steps, memory, repeatability, and results.",
    "serve": "Serve engines over HTTP and gRPC, in the Open Inference Protocol.",
    "export-triton": "Write an engine as a model of NVIDIA's Triton server.",
    "sign": "Sign an engine file, for optdnn verify and optdnn.load to check.",
    "inspect": "Show what is in a model or an engine, and what the build did.",
    "explain": "Show how an engine runs a node of its model, and why.",
    "check": "Show what a build would do with a model, without building.",
    "env": "Show versions, the machine, and which targets are usable.",
    "demo": "Build, run and compare the shipped networks: a first look.",
}
"""Command -> its one-line help; each is the function ``command`` of the module ``optdnn.cli.NAME`` (with _ for -)."""


class LazyGroup(click.Group):
    """Imports a command's module when it is called."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in COMMANDS:
            return None
        command: click.Command = quick_import(f"optdnn.cli.{name.replace('-', '_')}").command
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))

    def resolve_command(self, ctx: click.Context, args: list[str]) -> Any:
        name = args[0]
        if name not in COMMANDS and not name.startswith("-") and not ctx.resilient_parsing:
            meant = _for_a_file(name) or did_you_mean(OTHER_WORDS.get(name, name), COMMANDS)
            ctx.fail(f"there is no command {name!r}" + (f"; {meant}" if meant else ""))
        return super().resolve_command(ctx, args)

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """The commands, without importing their modules, and the group's options."""
        found = [CompletionItem(n, help=line) for n, line in COMMANDS.items() if n.startswith(incomplete)]
        return found + click.Command.shell_complete(self, ctx, incomplete)

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Exit codes"):
            formatter.write_dl([(str(code), meaning) for code, meaning in EXIT_CODES.items()])
        with formatter.section("Completion in a shell"):
            formatter.write_dl([(shell, completion_line(shell)) for shell in ("bash", "zsh", "fish")])


OTHER_WORDS = {"compile": "build", "convert": "build", "benchmark": "bench", "trace": "profile", "info": "inspect",
               "show": "inspect", "infer": "run", "predict": "run", "chat": "generate",
               "validate": "verify", "tune": "retune"}  # fmt: skip
"""Command name in other programs -> our command."""


def _for_a_file(name: str) -> str | None:
    """What to do with a model or an engine that stands in the place of a command."""
    for ending, command in ((".onnx", "build"), (".engine", "run")):
        if name.lower().endswith(ending):
            return f"did you mean optdnn {command} {quote(name)}?"
    return None


FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Error numbers of a full disk. Engines and reports raise OutputError for these; here they come from printing."""


def completion_line(shell: str) -> str:
    """The shell line that switches on completion of commands, options and their values."""
    source = f"_OPTDNN_COMPLETE={shell}_source optdnn"
    return f"{source} | source" if shell == "fish" else f'eval "$({source})"'


def _quiet(ctx: click.Context, parameter: click.Parameter, value: bool) -> None:
    if value:
        from optdnn.cli.options import be_quiet

        be_quiet(ctx, parameter, value)


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(__version__, prog_name="optdnn")
@click.option(
    "-q", "--quiet", is_flag=True, expose_value=False, callback=_quiet, help="Print only results, warnings and errors."
)
@click.option("--debug", is_flag=True, help="Show tracebacks, and check the graph after every pass.")
@click.pass_context
def cli(ctx: click.Context, debug: bool) -> None:
    """Compile trained networks from ONNX into fast, verified inference engines.

    A first look: optdnn demo. Then: optdnn build model.onnx, and optdnn COMMAND --help.
    """
    ctx.ensure_object(dict)["debug"] = debug


def main(argv: list[str] | None = None) -> None:
    """Entry point: runs the command and turns errors into one message and an exit code."""
    argv = sys.argv[1:] if argv is None else argv
    open_closed_streams()
    watch()
    take_any_text(sys.stdout)
    code = run(argv)
    gc.disable()  # the process ends, and a last collection would take a tenth of a second
    sys.exit(code)


def open_closed_streams() -> None:
    """Open closed standard streams to nowhere. Otherwise the next file that is opened, such as an engine, gets their number."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the lowest free number, which is this one
            setattr(sys, name, os.fdopen(number, "w" if number else "r", encoding="utf-8", closefd=False))


def take_any_text(stream: Any) -> None:
    """Let a stream write ? instead of failing if its encoding lacks a character of our tables (→, ×, µ)."""
    if hasattr(stream, "reconfigure"):
        try:
            "→×µ".encode(stream.encoding)
        except (UnicodeEncodeError, LookupError):
            stream.reconfigure(errors="replace")


class _Warnings:
    """Shows a warning like an error message: its text, without the line of code that raised it (``warnings.showwarning``).

    Each text is shown once, since a command may open a model several times.
    """

    def __init__(self) -> None:
        self.shown: set[str] = set()

    def __call__(self, message: Warning | str, *where: Any, **more: Any) -> None:
        if (text := str(message)) not in self.shown:
            self.shown.add(text)
            _complain("warning:", text, "yellow")


def _complain(title: str, text: str, color: str = "red") -> None:
    click.echo(f"{click.style(title, fg=color, bold=True)} {printable(text)}", err=True)


def run(argv: list[str]) -> int:
    """Run a command line; returns its exit code."""
    common = sys.modules.get("optdnn.cli.common")
    if common is not None:
        common.stderr.quiet = False  # an earlier command line in the same process may have set it
    with warnings.catch_warnings():  # restores the hook below, for programs that call this function
        if "--debug" not in argv:
            warnings.showwarning = _Warnings()
        return _run(argv)


def _run(argv: list[str]) -> int:
    # --debug belongs to the group, but is accepted anywhere on the command line.
    end = argv.index("--") if "--" in argv else len(argv)
    debug = "--debug" in argv[:end]
    args = [*(["--debug"] if debug else []), *(a for a in argv[:end] if a != "--debug"), *argv[end:]]
    state: dict[str, Any] = {"argv": tuple(argv)}
    try:
        result = cli.main(args=args, prog_name="optdnn", standalone_mode=False, obj=state)
        sys.stdout.flush()  # inside the try: the handler below covers a closed pipe
        return result if isinstance(result, int) else 0
    except click.exceptions.Exit as stop:
        return stop.exit_code
    except (BrokenPipeError, SystemExit):
        # The reader of a pipe has ended (head, less), which is no error; click then asks to exit.
        # Without this, Python would complain once more on exit.
        _to_nowhere()
        return 0
    except (click.ClickException, click.Abort, KeyboardInterrupt, Ended) as error:
        failure = _ended(error)
    except Exception as error:
        failure = _ended(error) if was_interrupted(error) else _failed(error, debug)
    from optdnn.cli.json_error import give_error

    try:
        give_error(argv, state, failure)
    except OSError:  # a closed pipe, a full disk
        _to_nowhere()
    code: int = failure["exit_code"]
    return code


def _ended(error: BaseException) -> dict[str, Any]:
    """Print that the command line is wrong or that a signal ended the command. Returns the error as plain data."""
    if isinstance(error, click.ClickException):
        error.show()
        return UsageError(error.format_message()).to_plain()
    text, code = (f"ended by {error}", 128 + error.number) if isinstance(error, Ended) else ("interrupted", 130)
    click.echo(text, err=True)
    return OptdnnError(text).to_plain() | {"type": "Ended", "exit_code": code}


def _failed(error: Exception, debug: bool) -> dict[str, Any]:
    """Print an error. Returns it as plain data. With --debug, a defect is raised again."""
    title = "error:"
    if isinstance(error, OSError) and error.errno in FULL:
        _drop_output()
        ours: OptdnnError = OutputError(f"the output cannot be written: {error.strerror}", hint="check the free space")
    elif isinstance(error, MemoryError):
        ours = RunError(f"out of memory: {error}")
    elif isinstance(error, OptdnnError):
        ours = error
    elif debug:
        raise error
    else:
        title = "internal error:"
        hint = "this is a defect of optdnn; please report it with the output of the same command with --debug"
        ours = InternalError(f"{type(error).__name__}: {error}", hint=hint)
    if debug and not isinstance(error, OSError):
        traceback.print_exception(error)
    _complain(title, str(ours))
    return ours.to_plain()


def _drop_output() -> None:
    """Flush standard output; if that fails, redirect it to nowhere, or Python would complain once more on exit."""
    try:
        sys.stdout.flush()
    except OSError:
        _to_nowhere()


def _to_nowhere() -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    main()
