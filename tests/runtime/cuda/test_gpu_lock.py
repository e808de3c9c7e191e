"""Only one process at a time measures on a GPU."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from optdnn.runtime.cuda.gpu_lock import alone, lock_path

HOLDS = """
import sys, time
from optdnn.runtime.cuda.gpu_lock import alone
with alone("0000:1B:00.0", print):
    print("held", flush=True)
    sys.stdin.readline()
"""


def test_another_process_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPTDNN_CACHE", str(tmp_path))
    words = [sys.executable, "-c", HOLDS]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdin is not None
        assert other.stdout.readline() == "held\n"
        said: list[tuple[str, float]] = []

        def say(text: str) -> None:
            said.append((text, time.monotonic()))
            other.stdin.write("\n")  # type: ignore[union-attr]
            other.stdin.flush()  # type: ignore[union-attr]

        with alone("0000:1B:00.0", say):
            assert other.wait(5) == 0, "it is ours while the other still holds it"
        assert [t for t, _ in said] == ["another process measures on GPU 0000:1B:00.0: waiting for it"]
    with alone("0000:1B:00.0", pytest.fail), alone("0000:43:00.0", pytest.fail):
        pass  # the GPU is free again; another GPU has another file


def test_a_lock_that_is_not_possible_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("OPTDNN_CACHE", str(tmp_path / "file"))
    said: list[str] = []
    with alone("GPU", said.append):
        pass
    assert len(said) == 1
    assert said[0].startswith("cannot lock the GPU")
    assert lock_path("0000:1B:00.0").name == "gpu-0000-1b-00-0.lock"
