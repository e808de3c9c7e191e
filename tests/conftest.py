"""Settings for all tests. GPU tests may run in parallel processes, except those that fill its memory."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import FunctionType
from typing import Any

import pytest
from support.cores import take_own_cores
from support.heap import keep_freed_memory

keep_freed_memory()
take_own_cores()  # set before NumPy and the libraries are imported, which start a thread for each core that they may use
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # hundreds of processes would each compile all of their imports
gc.disable()  # until all tests are collected: garbage collection over many thousands of objects would find nothing

from support.cli import Cli, Result  # noqa: E402
from support.needs import is_for_gpus, needs_nvrtc, why_no_hopper, without_gpu  # noqa: E402
from support.sampled import sample  # noqa: E402
from support.whole_gpu import gpu_taken  # noqa: E402

sys.path.append(str(Path(__file__).parents[1]))  # for ``benchmarks``, which is not installed


@pytest.hookimpl(tryfirst=True)
def pytest_pycollect_makeitem(collector: pytest.Collector, obj: object) -> list[pytest.Item] | None:
    """No items for a function that is marked ``gpu`` where there is none: its cases would take a fifth of the collection."""
    if not isinstance(obj, FunctionType) or not _left_out(collector.config.option.markexpr):
        return None
    return [] if is_for_gpus(obj, getattr(collector, "obj", None)) else None


_left_out = cache(without_gpu)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keeps Hypothesis from searching all modules for constants (5 s, and no test needs them), and leaves out GPU tests.

    Of tests with many cases, only some stay quick. Tests marked ``hopper`` are marked ``gpu``, too. Two thousand tests need a GPU.
    Where there is none, they are left out at once, unless -m names them.
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
    if _is_whole_run(config):
        sample(items)


def _is_whole_run(config: pytest.Config) -> bool:
    """Whether no files were named: those run whole."""
    told = getattr(config, "workerinput", None)
    return told["whole_run"] if told else config.args_source is not pytest.Config.ArgsSource.ARGS


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """pytest-xdist names all files to its workers."""
    node.workerinput["whole_run"] = _is_whole_run(node.config)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if without_gpu(config.option.markexpr):
        terminalreporter.write_line("no NVIDIA GPU: the tests marked gpu were left out")


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """The whole test including the setup of its fixtures, which take memory, too."""
    if "PYTEST_XDIST_WORKER" not in os.environ or item.get_closest_marker("gpu") is None:
        yield
        return
    with gpu_taken(whole=item.get_closest_marker("whole_gpu") is not None):
        yield


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Runs before fixtures, which may compile kernels, too."""
    if item.get_closest_marker("nvrtc") is not None:
        needs_nvrtc()


@pytest.fixture(scope="session", autouse=True)
def short_turns() -> Iterator[None]:
    """Builds time their candidates for milliseconds only: tests check consequences of times, not the times.

    Fixtures import the package, so that the process that only starts the workers of pytest-xdist does not.
    """
    from optdnn.lowering.cpu import base
    from optdnn.precision import cpu_target

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
def _reports_of_compilers(short_turns: None) -> Iterator[None]:
    """NVRTC's reports on kernels that have not changed are those of earlier runs on this machine."""
    from support import compiler_cache

    from optdnn.runtime.cuda.compile import nvrtc

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nvrtc, "resources", compiler_cache.resources)
        yield


@pytest.fixture(scope="module", autouse=True)
def survivors(short_turns: None) -> None:
    """Garbage collections leave out what is alive before a module: the collected tests, and what earlier modules left in caches.

    Each measurement begins with a full collection, which would visit all of these objects.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def one_set_of_workers() -> Iterator[None]:
    """Builds for the CPU try their candidates in the same worker processes. Otherwise each would start new ones."""
    from optdnn.lowering.cpu.trials import kept

    with kept():
        yield


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]) -> Cli:
    from optdnn.cli.main import run

    def call(*argv: object) -> Result:
        capsys.readouterr()
        code = run([str(a) for a in argv])
        found = capsys.readouterr()
        assert "Traceback" not in found.err or "--debug" in argv
        return Result(code, found.out, found.err)

    return call
