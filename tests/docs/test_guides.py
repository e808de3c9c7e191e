"""The code of the guides runs: the fenced blocks of each page, in order, in a separate folder.

Blocks of ``python`` and ``bash`` run. ``needs="gpu"`` after the language (or ``needs="torch"``, or both with a comma) marks a
block for machines that have it; ``text`` and everything else is only shown. Python blocks of a page share their names.
"""

from __future__ import annotations

import linecache
import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[2]
FENCE = re.compile(r"^```(?P<language>python|bash)(?: +needs=\"(?P<needs>[\w,]+)\")?\n(?P<code>.*?)^```$", re.S | re.M)
NEEDS = {
    "torch": ("torch",),
    "onnxscript": ("torch", "onnxscript"),
    "pictures": ("PIL",),
    "sign": ("model_signing",),
    "text": ("tokenizers",),
    "serve": ("uvicorn", "tritonclient", "geventhttpclient"),
    "ray": ("ray", "PIL"),
    **{name: (name,) for name in ("numba", "jax", "tensorflow", "pycuda")},
}
"""Need -> packages."""
PAGES = ("getting-started.md", "coming-from-tensorrt.md", "coming-from-onnxruntime.md", "guide/*.md")
LIMIT = 120
"""The limit in seconds for a command on a busy machine. A whole guide takes less than ten on an idle one."""


class Block(NamedTuple):
    language: str
    needs: frozenset[str]
    code: str
    line: int


def blocks(text: str) -> list[Block]:
    """The blocks of a page that run."""
    return [
        Block(
            m["language"],
            frozenset((m["needs"] or "").split(",")) - {""},
            m["code"],
            text.count("\n", 0, m.start()) + 2,
        )
        for m in FENCE.finditer(text)
    ]


def cases() -> list[tuple[str, frozenset[str]]]:
    """Each page with the blocks that run everywhere, and once more for each set of needs."""
    found = []
    for page in (p for pattern in PAGES for p in sorted((ROOT / "docs").glob(pattern))):
        needs = dict.fromkeys(b.needs for b in blocks(page.read_text(encoding="utf-8")))
        found += [(page.relative_to(ROOT / "docs").as_posix(), n) for n in needs]
    return found


def why_not(need: str) -> str | None:
    """The reason for which this machine does not have it."""
    if need == "gpu":
        from optdnn.runtime.cuda.usable import why_not

        return why_not()
    missing = [name for name in NEEDS[need] if find_spec(name) is None]
    return f"{', '.join(missing)} is not installed" if missing else None


def run(page: str, code: list[Block]) -> None:
    """Run blocks in the current folder. Raises what a Python block raises; AssertionError for a command that fails."""
    names: dict[str, object] = {"__name__": "__guide__"}
    env = {**os.environ, "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])}
    for block in code:
        where = f"{page}:{block.line}"
        if block.language == "bash":
            words = ["bash", "-euo", "pipefail", "-c", block.code]
            done = subprocess.run(words, capture_output=True, text=True, env=env, timeout=LIMIT)
            assert done.returncode == 0, f"{where} ended with code {done.returncode}\n{done.stdout}\n{done.stderr}"
            continue
        # The source is kept for inspect.getsource, which custom operators use.
        linecache.cache[where] = (len(block.code), None, block.code.splitlines(keepends=True), where)
        exec(compile(block.code, where, "exec"), names)


def marks(needs: frozenset[str]) -> list[pytest.MarkDecorator]:
    """All guides are slow: they run real networks, like a user."""
    return [pytest.mark.gpu] * ("gpu" in needs) + [pytest.mark.slow]


@pytest.mark.parametrize(
    ("page", "needs"),
    [pytest.param(p, n, marks=marks(n), id=":".join([p, *sorted(n)])) for p, n in cases()],
)
def test_the_blocks_of_a_page_run(
    page: str, needs: frozenset[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for package in ("onnxruntime", "openvino"):
        pytest.importorskip(package)
    for need in sorted(needs):
        if reason := why_not(need):
            pytest.skip(f"blocks that need {need}: {reason}")
    monkeypatch.chdir(tmp_path)
    found = blocks((ROOT / "docs" / page).read_text(encoding="utf-8"))
    run(page, [b for b in found if b.needs <= needs])


def test_there_are_pages_with_blocks() -> None:
    if not (ROOT / "docs").is_dir():
        pytest.skip("an installed copy has no docs")
    assert {p.stem for p in (ROOT / "docs" / "guide").glob("*.md")} <= {Path(p).stem for p, _ in cases()}


def test_every_need_is_known() -> None:
    assert {need for _, needs in cases() for need in needs} <= {"gpu", *NEEDS}


def test_failing_blocks_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    text = 'One\n\n```bash\ntrue\nfalse\n```\n\n```python needs="gpu"\nx = 1\n```\n\n```text\nno code\n```\n'
    first, second = blocks(text)
    assert (first.line, second.needs) == (4, frozenset({"gpu"}))
    with pytest.raises(AssertionError, match=r"a\.md:4 ended with code 1"):
        run("a.md", [first])
    with pytest.raises(ZeroDivisionError):
        run("a.md", [second, Block("python", frozenset(), "x / 0", 9)])
