"""The command as a process: signals that end it, the files that it then leaves, and the encoding of its output."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support.sweep import sweep

import optdnn

MAIN = "from optdnn.cli.main import main; main()"


def _signals_by_default() -> None:
    """Runs in the child: a shell or nohup may have started the tests with ignored signals, which children inherit."""
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)


@pytest.mark.usefixtures("_libraries")
@pytest.mark.parametrize("number", sweep([signal.SIGTERM, signal.SIGHUP, signal.SIGINT], signal.SIGTERM))
def test_a_build_that_is_ended_leaves_no_folder(model: Path, tmp_path: Path, number: signal.Signals) -> None:
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    command = [sys.executable, "-c", MAIN, "build", model, "--target", "cpu", "-o", tmp_path / "out.engine"]
    env = os.environ | {"TMPDIR": str(temporary)}
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, env=env, stdout=pipe, stderr=pipe, text=True, preexec_fn=_signals_by_default)
    end = time.monotonic() + 60
    while not list(temporary.glob("optdnn-trial-*")) and process.poll() is None and time.monotonic() < end:
        time.sleep(0.01)
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    reported = "interrupted" if number == signal.SIGINT else f"ended by {number.name}"
    assert (process.returncode, out, err.strip()) == (128 + number, "", reported)
    assert list(temporary.iterdir()) == []
    assert not (tmp_path / "out.engine").exists()


@pytest.mark.parametrize("interrupted", [True, False])
def test_an_import_that_was_interrupted_is_no_defect(interrupted: bool) -> None:
    program = f"""
import os, signal
from optdnn.cli import main
def failing(name):
    try:
        if {interrupted}:
            os.kill(os.getpid(), signal.SIGINT)
    except KeyboardInterrupt:
        pass
    raise ImportError("numpy._core.umath failed to import")
main.quick_import = failing
main.main(["env"])
"""
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, preexec_fn=_signals_by_default)
    assert done.returncode == (130 if interrupted else 70)
    assert done.stderr.startswith("interrupted" if interrupted else "internal error: ImportError")


@pytest.mark.parametrize("encoding", sweep(["ascii", "latin-1", "utf-8"], "ascii"))
def test_an_encoding_that_lacks_a_sign_is_no_defect(model: Path, tmp_path: Path, encoding: str) -> None:
    command = [sys.executable, "-c", MAIN, "build", model, "-v", "--target", "reference", "-o", tmp_path / "é.engine"]
    done = subprocess.run(command, env=os.environ | {"PYTHONIOENCODING": encoding}, capture_output=True, timeout=60)
    assert done.returncode == 0, done.stderr
    reported = done.stdout.decode(encoding)
    assert f" {'→' if encoding == 'utf-8' else '?'} " in reported
    assert f"{'?' if encoding == 'ascii' else 'é'}.engine" in reported
    command = [sys.executable, "-c", MAIN, "inspect", tmp_path / "é.engine", "--json"]
    done = subprocess.run(command, env=os.environ | {"PYTHONIOENCODING": encoding}, capture_output=True, timeout=60)
    assert json.loads(done.stdout.decode(encoding))["file"] == str(tmp_path / "é.engine")


def test_an_ignored_signal_stays_ignored() -> None:
    program = """
import signal
from optdnn.cli.ending import watch
signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
watch()
print(signal.getsignal(signal.SIGHUP) is signal.SIG_IGN, signal.getsignal(signal.SIGTERM) is signal.SIG_DFL)
"""
    assert subprocess.check_output([sys.executable, "-c", program], text=True).split() == ["True", "False"]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")
@pytest.mark.parametrize("more", [[], ["--json"], ["--debug"]])
def test_output_to_a_full_disk_is_no_defect(more: list[str]) -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-c", MAIN, "env", *more], stdout=full, stderr=subprocess.PIPE, text=True
        )
    assert done.returncode == 9
    assert done.stderr == "error: the output cannot be written: No space left on device\n  hint: check the free space\n"


def test_python_runs_the_package_as_the_command() -> None:
    done = subprocess.run([sys.executable, "-m", "optdnn", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("optdnn")


@pytest.mark.parametrize("closed", sweep(["1", "2", "012"], "012"))
def test_closed_streams_are_no_defect(model: Path, tmp_path: Path, closed: str) -> None:
    """A file that the command opens must not get the number of a stream: printed text would go into it."""
    command = [sys.executable, "-c", MAIN, "build", model, "--target", "reference", "-o", tmp_path / "out.engine"]
    done = subprocess.run(command, preexec_fn=lambda: [os.close(int(number)) for number in closed], timeout=60)
    assert done.returncode == 0
    assert optdnn.load(tmp_path / "out.engine").outputs
