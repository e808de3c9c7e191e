"""The conditions for a fault of optdnn."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from optdnn.errors import InternalError, OptdnnError

SECONDS = 20.0
"""The limit on processor time of one input."""
BYTES = 2 << 30
"""The limit on memory of one input."""


class OutOfBounds(Exception):
    """One input took more time or memory than allowed."""


@contextmanager
def ours(bounded: bool = True) -> Iterator[None]:
    """Errors of optdnn pass, except InternalError. MemoryError passes only if memory is not ``bounded``."""
    try:
        yield
    except InternalError:
        raise
    except OptdnnError as error:
        if bounded and isinstance(error.__cause__, MemoryError):
            raise OutOfBounds(str(error)) from error


def timed(one_input: Callable[[bytes], None]) -> Callable[[bytes], None]:
    """``one_input``, which also raises OutOfBounds if an input takes longer than SECONDS."""

    def run(data: bytes) -> None:
        start = time.process_time()
        one_input(data)
        taken = time.process_time() - start
        if taken > SECONDS:
            raise OutOfBounds(f"it took {taken:.0f} s")

    return run
