"""The process of a rank other than 0, which the process of rank 0 starts and commands."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from optdnn.errors import InternalError
from optdnn.runtime.ranks.group import join
from optdnn.runtime.ranks.member import Member, program_of
from optdnn.runtime.steps.executor import LoadOptions
from optdnn.runtime.workers.wire import Answer, run
from optdnn.types import Array


class _Child:
    def __init__(self) -> None:
        self._member: Member | None = None

    @property
    def member(self) -> Member:
        if self._member is None:
            raise InternalError("a rank that has not joined was given work")
        return self._member

    def do_join(self, message: Mapping[str, Any], arrays: Mapping[str, Array]) -> Answer:
        from optdnn.runtime.file.format import read

        group = join((message["host"], message["port"]), message["rank"], message["world"], message["token"])
        try:
            program = read(message["engine"], verify=False, mmap=message["mmap"])
            own = program_of(program, message["rank"])
            own.foreign = False  # rank 0 has checked it
            self._member = Member(own, group, message["rank"], LoadOptions(**message["options"]))
        except BaseException as error:
            group.fail(f"rank {group.rank} could not start: {getattr(error, 'message', error)}")
            raise
        return {}, None

    def do_context(self, message: Mapping[str, Any], arrays: Mapping[str, Array]) -> Answer:
        return {"number": self.member.context()}, None

    def do_run(self, message: Mapping[str, Any], arrays: dict[str, Array]) -> Answer:
        return {}, self._wanted(message, self.member.run(message["number"], arrays))

    def do_bind(self, message: Mapping[str, Any], arrays: dict[str, Array]) -> Answer:
        self.member.bind(message["number"], arrays, message["state"])
        return {}, None

    def do_step(self, message: Mapping[str, Any], arrays: dict[str, Array]) -> Answer:
        return {}, self._wanted(message, self.member.step(message["number"], arrays))

    def do_state(self, message: Mapping[str, Any], arrays: dict[str, Array]) -> Answer:
        return {}, self.member.state(message["number"])

    def do_reset(self, message: Mapping[str, Any], arrays: dict[str, Array]) -> Answer:
        self.member.reset(message["number"], arrays)
        return {}, None

    def do_times(self, message: Mapping[str, Any], arrays: dict[str, Array]) -> Answer:
        return {"ms": self.member.times(message["number"], message["repeats"], message["bound"])}, None

    @staticmethod
    def _wanted(message: Mapping[str, Any], results: Mapping[str, Array]) -> dict[str, Array]:
        """Only outputs that are split need to travel: rank 0 has the others."""
        return {n: a for n, a in results.items() if n in message["split"]}


def main() -> None:
    """The worker's main function (:class:`optdnn.runtime.workers.process.WorkerProcess`)."""
    run(_Child())
