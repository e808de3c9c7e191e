"""What holds for all tests: those on a GPU may run in parallel processes, but for those that fill its memory."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.cores import take_own_cores
from support.heap import keep_freed_memory

keep_freed_memory()
take_own_cores()  # before NumPy and the libraries, which start a thread for each core that they may use
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # hundreds of processes would each compile all that they import
gc.disable()  # until all tests are collected: each pass over so many thousands of objects finds nothing to free

from support.cli import Cli, Result  # noqa: E402
from support.needs import needs_nvrtc, why_no_hopper, without_gpu  # noqa: E402
from support.whole_gpu import gpu_taken  # noqa: E402

from optdnn.cli.main import run  # noqa: E402
from optdnn.lowering.cpu import base  # noqa: E402
from optdnn.lowering.cpu.trials import kept  # noqa: E402
from optdnn.precision import cpu_target  # noqa: E402

sys.path.append(str(Path(__file__).parents[1]))  # for ``benchmarks``, which is not installed


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Before Hypothesis looks for constants to try in all modules of the checkout: that takes 5 s, and no test needs them.

    Tests marked ``hopper`` are marked ``gpu``, too. Two thousand tests need a GPU. Where there is none, they are left out
    at once, unless -m names them.
    """
    providers = sys.modules.get("hypothesis.internal.conjecture.providers")
    if providers is not None:
        providers.is_local_module_file = lambda path: False  # type: ignore[attr-defined]
    of_hopper = [item for item in items if item.get_closest_marker("hopper") is not None]
    why = why_no_hopper() if of_hopper else None
    for item in of_hopper:
        item.add_marker("gpu")
        if why is not None:
            item.add_marker(pytest.mark.skip(reason=why))
    if without_gpu(config.option.markexpr):
        left_out = [item for item in items if item.get_closest_marker("gpu") is not None]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item.get_closest_marker("gpu") is None]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if without_gpu(config.option.markexpr):
        terminalreporter.write_line("no NVIDIA GPU: the tests marked gpu were left out")


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """The whole test, its fixtures' setup with it: they take memory, too."""
    if "PYTEST_XDIST_WORKER" not in os.environ or item.get_closest_marker("gpu") is None:
        yield
        return
    with gpu_taken(whole=item.get_closest_marker("whole_gpu") is not None):
        yield


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Before the fixtures, which may compile kernels, too."""
    if item.get_closest_marker("nvrtc") is not None:
        needs_nvrtc()


@pytest.fixture(scope="session", autouse=True)
def short_turns() -> Iterator[None]:
    """Builds time their candidates for milliseconds: tests ask for what follows from times, not for good ones."""
    gc.collect()
    gc.freeze()  # thousands of collected tests, which each measurement's collection of garbage would visit
    gc.set_threshold(
        20_000, 20, 20
    )  # graphs and models live for a whole test: a pass after each 700 objects finds no garbage
    gc.enable()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(base, "TURN_SECONDS", 0.004)
        patch.setattr(base, "REST_SECONDS", 0.0)
        patch.setattr(cpu_target, "TURN_SECONDS", 0.004)
        yield


@pytest.fixture(scope="session", autouse=True)
def one_set_of_workers() -> Iterator[None]:
    """Builds for the CPU try their candidates in the same worker processes: each would start its own."""
    with kept():
        yield


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]) -> Cli:
    def call(*argv: object) -> Result:
        capsys.readouterr()
        code = run([str(a) for a in argv])
        found = capsys.readouterr()
        assert "Traceback" not in found.err or "--debug" in argv
        return Result(code, found.out, found.err)

    return call
