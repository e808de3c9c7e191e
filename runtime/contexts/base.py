"""The common part of the runners and contexts of all targets."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

import numpy as np

from optdnn.errors import InputError, InternalError, RunError
from optdnn.runtime.contexts.signature import Signature, show
from optdnn.runtime.contexts.state import Binding, Bound
from optdnn.runtime.program import Plain, Program
from optdnn.types import Array, TensorSpec

CONTRADICTS = (
    "the file is damaged or hostile, or optdnn wrote it wrong: rebuild the engine, and report a defect if this remains"
)


class OneThread:
    """Lets only one thread at a time into a ``with`` block. A second one gets RunError."""

    def __init__(self) -> None:
        self.lock = threading.Lock()

    def __enter__(self) -> None:
        if not self.lock.acquire(blocking=False):
            raise RunError(
                "this context is running in another thread", hint="use engine.run, or engine.context() per thread"
            )

    def __exit__(self, *exc: object) -> None:
        self.lock.release()


class BaseContext:
    """One thread's own state for running a program. It may be handed from thread to thread, but only one at a time may use it.

    ``takes_device_arrays``: whether arrays on the GPU are read in place, on the caller's stream."""

    takes_device_arrays = False

    def __init__(self, program: Program, signature: Signature):
        self.program, self.signature = program, signature
        self._alone = OneThread()

    def __repr__(self) -> str:
        sides = f"{show(self.signature.inputs)} -> {show(self.signature.outputs)}"
        return f"Context({self.program.target}, {self.program.precision}: {sides})"

    def run(
        self, feeds: Mapping[str, Any], out: Mapping[str, Any] | None = None, stream: object = None
    ) -> dict[str, Any]:
        """Run once.

        ``feeds`` maps each input's name to an array of exactly its dtype and of a matching shape. ``out`` may map output
        names to writable C-contiguous arrays that receive (and are) these results; all other results are new arrays. ``stream`` is
        for targets that have streams. Returns name -> array in ONNX output order.
        Raises InputError for arrays that do not fit, RunError if running fails.
        """
        with self._alone:
            try:
                return self._run(feeds, out, stream)
            except InternalError as error:
                if not self.program.foreign:
                    raise
                raise RunError(f"the engine contradicts itself: {error.message}", hint=CONTRADICTS) from error

    def _run(self, feeds: Mapping[str, Any], out: Mapping[str, Any] | None, stream: object) -> dict[str, Any]:
        """:meth:`run`, while no other thread has this context."""
        raise NotImplementedError

    def bind(
        self,
        inputs: Mapping[str, Any],
        outputs: Mapping[str, Any] | None = None,
        state: Mapping[str, str] | None = None,
    ) -> Bound:
        """A repeatable call on these arrays: each ``run()`` reads their present contents.

        ``outputs`` may give buffers; ``state`` maps outputs to the inputs that they become in the next run, without a copy
        (:mod:`optdnn.runtime.contexts.state`); ``inputs`` then hold its initial value.
        Raises InputError for arrays that do not fit.
        """
        bound: Bound = self._bind(Binding(inputs, outputs or {}, state or {}))
        return bound

    def _bind(self, given: Binding) -> Any:
        return Bound(self.run, self.signature, given)

    def profile(self, feeds: Mapping[str, Any]) -> tuple[dict[str, Array], list[int]]:
        """Run once and time each step: (outputs, nanoseconds per step of the program)."""
        raise NotImplementedError

    def innermost(self, feeds: Mapping[str, Any]) -> tuple[BaseContext, Mapping[str, Any]]:
        """The context of the single plan that runs these inputs, and the inputs that it takes."""
        return self, feeds


class HostContext(BaseContext):
    """A context for arrays in host memory."""

    def _run(self, feeds: Mapping[str, Any], out: Mapping[str, Any] | None, stream: object) -> dict[str, Array]:
        if stream is not None:
            raise InputError(f"target {self.program.target!r} has no streams; leave stream out")
        if self.program.file is not None:
            self.program.file.check()
        return self._run_timed(feeds, out, None)

    def profile(self, feeds: Mapping[str, Any]) -> tuple[dict[str, Array], list[int]]:
        """Run once and time each step: (outputs, nanoseconds per step of the program)."""
        times: list[int] = []
        with self._alone:
            return self._run_timed(feeds, None, times), times

    def _run_timed(
        self, feeds: Mapping[str, Any], out: Mapping[str, Any] | None, times: list[int] | None
    ) -> dict[str, Array]:
        """Run once, and append the nanoseconds of each step to ``times``."""
        raise NotImplementedError


class Runner:
    """A prepared program, shared by all threads."""

    program: Program
    signature: Signature
    executors: tuple[Any, ...] = ()
    """The executor of each step, if the program runs step by step."""
    _facts: tuple[Mapping[str, Plain], ...] = ()

    @property
    def facts(self) -> tuple[Mapping[str, Plain], ...]:
        """Per step, the library that runs it and its facts."""
        return self._facts

    def context(self, arena: Any = None) -> BaseContext:
        """One thread's own state. ``arena``: memory on the GPU that the contexts of several plans share."""
        raise NotImplementedError

    def program_for(self, feeds: Mapping[str, Any]) -> Program:
        """The program that runs these inputs."""
        return self.program


def hand_over(spec: TensorSpec, value: Array | None, buffer: Array | None) -> Array:
    """A result in host memory, in the caller's ``buffer`` or otherwise in a new array.

    Raises InputError if the size of the result, which depended on data, differs from the buffer's.
    """
    if value is None:
        raise InternalError(f"output {spec.name!r} was not computed")
    if buffer is None:
        return value.copy(order="C")
    if buffer.shape != value.shape:
        raise InputError(
            f"the buffer for output {spec.name!r} has shape {list(buffer.shape)}, the result {list(value.shape)}"
        )
    np.copyto(buffer, value)
    return buffer
