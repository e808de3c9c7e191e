"""Temporary folders and files on a machine that has no place for them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.cli import Cli
from support.onnxnet import save_convnet

import optdnn.temporary
from optdnn.errors import OutputError
from optdnn.temporary import _remove_leftovers, fcntl, temporary_file, temporary_folder


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


OWNER = """
import os, signal, tempfile
tempfile.tempdir = {place!r}
from optdnn.temporary import temporary_folder
folder = temporary_folder("optdnn-trial-")
open(os.path.join(folder.name, "file"), "w").close()
print(folder.name, flush=True)
{end}
"""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder for temporary folders, where this process has made none."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    _remove_leftovers.cache_clear()
    yield tmp_path
    _remove_leftovers.cache_clear()


@pytest.mark.skipif(fcntl is None, reason="no locks here")
def test_those_of_a_killed_process_are_removed(place: Path) -> None:
    own = OWNER.format(place=str(place), end="os.kill(os.getpid(), signal.SIGKILL)")
    killed = subprocess.run([sys.executable, "-c", own], capture_output=True, text=True, timeout=60)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    left = Path(killed.stdout.strip())
    assert (left / "file").exists()
    with temporary_folder():
        assert not left.exists()


@pytest.mark.skipif(fcntl is None, reason="no locks here")
def test_those_of_others_stay(place: Path) -> None:
    """A living process, a name of another kind, and a link to a folder elsewhere."""
    elsewhere = place / "elsewhere"
    others = [place / "optdnn-trial-abcdefgh", place / "optdnn-Report.locked", elsewhere]
    for folder in others:
        folder.mkdir()
        (folder / "file").touch()
    link = place / "optdnn-trial-abcdefgh.locked"
    link.symlink_to(elsewhere)
    own = OWNER.format(place=str(place), end="input()")
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", own], stdin=pipe, stdout=pipe, text=True) as living:
        assert living.stdout is not None
        used = Path(living.stdout.readline().strip())
        with temporary_folder():
            assert (used / "file").exists()
            assert all((folder / "file").exists() for folder in others)
            assert link.is_symlink()
        living.communicate("\n", timeout=60)
    assert sorted(place.iterdir()) == sorted([*others, link])


@pytest.mark.skipif(fcntl is None, reason="no locks here")
def test_another_user_keeps_his(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = place / "optdnn-trial-abcdefgh.locked"
    theirs.mkdir()
    own = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: own + 1)
    with temporary_folder():
        assert theirs.exists()
    monkeypatch.undo()
    monkeypatch.setattr(tempfile, "tempdir", str(place))
    _remove_leftovers.cache_clear()
    with temporary_folder():
        assert not theirs.exists()


@pytest.mark.skipif(fcntl is None, reason="no locks here")
def test_one_that_is_removed_before_it_is_locked_is_made_again(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    removed = []

    def late(folder: tempfile.TemporaryDirectory[str]) -> None:
        if not removed:
            removed.append(folder.name)
            os.rmdir(folder.name)
        lock(folder)

    lock = optdnn.temporary._lock
    monkeypatch.setattr(optdnn.temporary, "_lock", late)
    with temporary_folder() as folder:
        assert os.path.isdir(folder)
        assert folder not in removed
    assert len(removed) == 1


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
