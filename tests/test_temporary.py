"""Temporary folders and files on a machine that has no place for them."""

from __future__ import annotations

import signal
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.cli import Cli
from support.onnxnet import save_convnet

from optdnn.errors import OutputError
from optdnn.temporary import temporary_file, temporary_folder


@pytest.fixture
def _nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "absent"))


@pytest.mark.usefixtures("_nowhere")
@pytest.mark.parametrize("make", [temporary_file, temporary_folder])
def test_their_absence_says_what_to_do(make: Callable[[], Any]) -> None:
    with pytest.raises(OutputError, match=r"no temporary file can be made: .*\n  hint: set TMPDIR"):
        make()


def test_they_are_removed() -> None:
    with temporary_folder() as folder:
        assert Path(folder).is_dir()
    assert not Path(folder).exists()
    with temporary_file() as file:
        file.write(b"x")


@pytest.fixture
def handled() -> Iterator[None]:
    """A shell that starts the tests in the background may have made them ignore this signal."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("handled")
def test_a_signal_while_one_is_made_leaves_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python handles signals between any two steps, also between the creation of a folder and its registration for removal."""
    make = tempfile.mkdtemp

    def interrupted(*given: Any) -> str:
        made = make(*given)
        signal.raise_signal(signal.SIGINT)
        return made

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(tempfile, "mkdtemp", interrupted)
    with pytest.raises(KeyboardInterrupt):
        temporary_folder()
    assert list(tmp_path.iterdir()) == []
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.usefixtures("handled")
def test_a_signal_is_not_lost_where_none_can_be_made(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*_: Any) -> str:
        signal.raise_signal(signal.SIGINT)
        raise OSError

    monkeypatch.setattr(tempfile, "mkdtemp", failing)
    with pytest.raises(KeyboardInterrupt):
        temporary_folder()


def test_a_build_without_them_is_no_defect(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("onnxruntime")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "absent"))
    code, out, err = cli("build", save_convnet(tmp_path / "net.onnx"), "--target", "cpu")
    assert (code, out) == (OutputError.exit_code, "")
    assert "set TMPDIR" in err
