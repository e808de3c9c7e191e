"""``python -m benchmarks KIND [OPTIONS]``: see ``kinds/`` for the kinds, ``--help`` of a kind for its options."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.harness import parser_of, run, serve
from benchmarks.kinds import COMMANDS, KINDS, about, command_of, kind_of
from benchmarks.models import SHARED
from benchmarks.rows import say
from optdnn.errors import OptdnnError


def main(words: Sequence[str]) -> int:
    """Run a kind of measurement, or a command; without arguments, list both."""
    if not words or words[0] in ("-h", "--help"):
        say("python -m benchmarks KIND [OPTIONS]\n")
        for name in (*KINDS, *COMMANDS):
            say(f"  {name:14s}{about(name)}")
        return 0
    name, *rest = words
    try:
        if name in COMMANDS:
            return command_of(name)(rest)
        kind = kind_of(name)
        options = parser_of(kind).parse_intermixed_args(rest)
        options.kind = name
        if options.shared:
            os.environ[SHARED] = str(Path(options.shared).resolve())
        return run(kind, options, words)
    except OptdnnError as error:
        say(f"error: {error}")
        return 2


if __name__ == "__main__":
    if sys.argv[1:] == ["--child"]:
        serve()
    else:
        sys.exit(main(sys.argv[1:]))
