"""Huge pages: the memory that is moved, and when. Memory stays unchanged if no huge pages are requested."""

from __future__ import annotations

import mmap
import threading

import numpy as np
import pytest

from optdnn.runtime.cpu import huge_pages
from optdnn.runtime.cpu.huge_pages import HUGE, NewMemory, huge_parts, resident, settle

MB = 1 << 20


def maps(*mappings: tuple[int, int, str, str]) -> str:
    """The text of /proc/self/maps: (start, end, permissions, name)."""
    return "".join(f"{a:x}-{b:x} {perm} 00000000 00:00 0    {name}\n" for a, b, perm, name in mappings)


def whole(start: int, end: int) -> int:
    """A stand-in for a check of residence: all pages are in memory."""
    return end - start


def test_only_whole_huge_pages_of_new_memory() -> None:
    text = maps((3 * MB, 11 * MB, "rw-p", ""))
    assert huge_parts(text, [], whole) == [(4 * MB, 10 * MB)]
    assert huge_parts(text, [(3 * MB, 5 * MB)], whole) == [(6 * MB, 10 * MB)]
    assert huge_parts(text, [(5 * MB, 7 * MB)], whole) == [(8 * MB, 10 * MB)]
    assert huge_parts(text, [(0, 20 * MB)], whole) == []


@pytest.mark.parametrize(
    "mapping",
    [
        pytest.param((0, 8 * MB, "rw-p", "/model.engine"), id="a file"),
        pytest.param((0, 8 * MB, "r--p", ""), id="read-only"),
        pytest.param((0, 8 * MB, "rw-s", ""), id="shared"),
        pytest.param((0, 8 * MB, "rw-p", "[stack]"), id="a stack"),
        pytest.param((MB, 3 * MB, "rw-p", ""), id="no whole page"),
    ],
)
def test_other_memory_is_left_alone(mapping: tuple[int, int, str, str]) -> None:
    assert huge_parts(maps(mapping), [], whole) == []


def test_mostly_untouched_memory_is_left_alone() -> None:
    text = maps((0, 8 * MB, "rw-p", ""), (20 * MB, 28 * MB, "rw-p", ""))
    assert huge_parts(text, [], lambda a, b: 3 * MB if a == 0 else 4 * MB) == [(20 * MB, 28 * MB)]


def test_the_heap_counts() -> None:
    assert huge_parts(maps((0, 4 * MB, "rw-p", "[heap]")), [], whole) == [(0, 4 * MB)]


@pytest.fixture
def moved(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """The parts that would be collapsed, on a machine that gives huge pages on request."""
    found: list[tuple[int, int]] = []
    monkeypatch.setattr(huge_pages, "on_request", lambda: True)
    monkeypatch.setattr(huge_pages, "_collapse", found.extend)
    return found


def address(memory: mmap.mmap) -> int:
    return int(np.frombuffer(memory, np.uint8).ctypes.data)


linux = pytest.mark.skipif(not huge_pages._MAPS.exists(), reason="there is no /proc/self/maps")


@linux
def test_memory_that_is_resident() -> None:
    page, block = mmap.PAGESIZE, mmap.mmap(-1, 2 * HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    block.madvise(mmap.MADV_NOHUGEPAGE)
    start = address(block)
    assert resident(start, start + len(block)) == 0
    block[: 3 * page] = bytes(3 * page)
    assert resident(start, start + len(block)) == 3 * page
    assert resident(0, 16 * page) == 0, "nothing is mapped there"


@linux
def test_memory_mapped_after_the_snapshot_is_moved_once(moved: list[tuple[int, int]]) -> None:
    memory = NewMemory()
    block = mmap.mmap(-1, 16 * HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    block.write(b"x" * len(block))
    start = address(block)
    memory.after_run()
    settle()
    inside = sum(max(0, min(b, start + len(block)) - max(a, start)) for a, b in moved)
    assert inside >= 15 * HUGE
    moved.clear()
    memory.after_run()
    settle()
    assert not moved


@linux
def test_not_wanted(moved: list[tuple[int, int]]) -> None:
    memory = NewMemory(wanted=False)
    memory.after_run()
    settle()
    assert not moved
    assert not any(t.name == "optdnn-huge-pages" for t in threading.enumerate())


@pytest.mark.parametrize("text", ["[always] madvise never", "always madvise [never]", None])
def test_only_where_huge_pages_are_given_on_request(
    text: str | None, tmp_path: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Setting:
        def read_text(self) -> str:
            if text is None:
                raise FileNotFoundError
            return text

    monkeypatch.setattr(huge_pages, "_SETTING", Setting())
    assert not huge_pages.on_request()


@pytest.mark.skipif(not huge_pages.on_request(), reason="this machine does not give huge pages on request")
def test_contents_stay() -> None:
    memory = NewMemory()
    array = np.arange(8 * HUGE // 8, dtype=np.int64)
    memory.after_run()
    settle()
    assert np.array_equal(array, np.arange(8 * HUGE // 8, dtype=np.int64))
