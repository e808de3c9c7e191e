"""The process of a rank other than 0; the process of rank 0 starts it and sends it commands."""

from __future__ import annotations

import gc
import os
import socket
import threading
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from optdnn.errors import RankError
from optdnn.runtime.ranks.board import Board
from optdnn.runtime.ranks.group import join
from optdnn.runtime.ranks.member import Member, program_of
from optdnn.runtime.steps.executor import LoadOptions
from optdnn.runtime.workers.wire import Answer, run
from optdnn.types import Array


@dataclass(frozen=True)
class _Call:
    """A call that rank 0 rings for, and its outputs in the shared memory."""

    run: Callable[[], Mapping[str, Array]]
    outputs: Mapping[str, Array]


class _Follower:
    """The thread that runs the steps for which rank 0 rings."""

    def __init__(self, member: Member, board: Board, bell: socket.socket):
        self._member, self.board, self._bell = member, board, bell
        self.calls: dict[int, _Call] = {}
        threading.Thread(target=self._follow, name="optdnn-steps", daemon=True).start()

    def _follow(self) -> None:
        step, group = 0, self._member.group
        while (number := self.board.wait(group.rank, step, self._bell)) is not None:
            step += 1
            try:
                call = self.calls[number]
                results = call.run()
                for name, array in call.outputs.items():
                    np.copyto(array, results[name])
            except RankError:
                return
            except BaseException as error:
                group.fail(f"rank {group.rank} failed: {getattr(error, 'message', error)}")
                return
            self.board.done(group.rank, step)


class _Child:
    """What the other process may ask for; ``join`` comes first."""

    member: Member
    follower: _Follower

    def do_join(self, message: Mapping[str, Any], arrays: Mapping[str, Array]) -> Answer:
        from optdnn.runtime.file.format import read

        group = join((message["host"], message["port"]), message["rank"], message["world"], message["token"])
        try:
            program = read(message["engine"], verify=False, mmap=message["mmap"])
            own = program_of(program, message["rank"])
            own.foreign = False  # rank 0 has checked it
            self.member = Member(own, group, message["rank"], LoadOptions(**message["options"]))
            board = Board(message["board"], message["world"])
            self.follower = _Follower(self.member, board, socket.socket(fileno=message["bell"]))
        except BaseException as error:
            group.fail(f"rank {group.rank} could not start: {getattr(error, 'message', error)}")
            raise
        return {}, None

    def do_context(self, message: Mapping[str, Any], arrays: Mapping[str, Array]) -> Answer:
        return {"number": self.member.context()}, None

    def do_run(self, message: Mapping[str, Any], arrays: dict[str, Array]) -> Answer:
        results = self.member.run(message["number"], arrays)
        return {}, {n: results[n] for n in message["split"]}  # rank 0 has the others

    def do_bind(self, message: Mapping[str, Any], arrays: dict[str, Array]) -> Answer:
        number, (inputs, outputs) = message["number"], self._places(message)
        self.member.bind(number, arrays | inputs, message["state"])
        self.follower.calls[message["call"]] = _Call(lambda: self.member.step(number, inputs, outputs), outputs)
        gc.collect()
        gc.freeze()  # collecting the engine's objects takes as long as many steps, and all ranks would wait for it
        return {}, None

    def _places(self, message: Mapping[str, Any]) -> tuple[dict[str, Array], dict[str, Array]]:
        """This rank's inputs and outputs of a call."""
        inputs, outputs = message["fields"][self.member.group.rank]
        return self.follower.board.arrays(inputs), self.follower.board.arrays(outputs)

    def do_state(self, message: Mapping[str, Any], arrays: dict[str, Array]) -> Answer:
        return {}, self.member.state(message["number"])

    def do_reset(self, message: Mapping[str, Any], arrays: dict[str, Array]) -> Answer:
        self.member.reset(message["number"], arrays)
        return {}, None

    def do_times(self, message: Mapping[str, Any], arrays: dict[str, Array]) -> Answer:
        return {"ms": self.member.times(message["number"], message["repeats"], message["bound"])}, None


def main() -> None:
    """The worker's main function (:class:`optdnn.runtime.workers.process.WorkerProcess`).

    It ends the process immediately: the thread that follows rank 0 may be at work on the GPU, which must stay usable until then."""
    code = 1
    try:
        run(_Child())
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)
