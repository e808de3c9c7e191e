"""The timing cache: its contents and its refusals."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from optdnn.errors import OutputError, UsageError
from optdnn.tuning.timing_cache import Candidate, NetworkChoices, TimingCache


def test_stored_times_are_read_back(tmp_path: Path) -> None:
    path = tmp_path / "cache.json"
    cache = TimingCache.open(path)
    assert cache.get("k") is None
    cache.put("k", 1.25)
    cache.save()
    assert TimingCache.open(path).get("k") == 1.25
    assert [p.name for p in tmp_path.iterdir()] == ["cache.json"]


def test_nothing_is_written_when_nothing_was_measured(tmp_path: Path) -> None:
    cache = TimingCache.open(tmp_path / "cache.json")
    cache.save()
    assert not list(tmp_path.iterdir())


def test_the_same_entries_give_the_same_bytes(tmp_path: Path) -> None:
    for name, keys in (("a", "xyz"), ("b", "zyx")):
        cache = TimingCache.open(tmp_path / name)
        for k in keys:
            cache.put(k, 2.0)
        cache.save()
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


@pytest.mark.parametrize(
    "text",
    [
        "not json",
        "[" * 100_000,
        "[]",
        json.dumps({"format": "other", "version": 1, "entries": {}}),
        json.dumps({"format": "optdnn-timing-cache", "version": 2, "entries": {}}),
        json.dumps({"format": "optdnn-timing-cache", "version": 1, "entries": {"k": "fast"}}),
        json.dumps({"format": "optdnn-timing-cache", "version": 1, "entries": {"k": -1}}),
        json.dumps({"format": "optdnn-timing-cache", "version": 1, "entries": {"k": True}}),
        json.dumps({"format": "optdnn-timing-cache", "version": 1, "entries": {"k": 10**400}}),
    ],
)
def test_a_foreign_file_is_refused_and_left_alone(tmp_path: Path, text: str) -> None:
    path = tmp_path / "cache.json"
    path.write_text(text)
    with pytest.raises(UsageError, match=r"cache\.json"):
        TimingCache.open(path)
    assert path.read_text() == text


def test_two_concurrent_builds_keep_the_times_of_both(tmp_path: Path) -> None:
    path = tmp_path / "cache.json"
    first, second = TimingCache.open(path), TimingCache.open(path)
    first.put("a", 1.0)
    first.note("c", Candidate(2e-6, None, {"driver": "1"}))
    second.put("b", 2.0)
    second.note_network("n", NetworkChoices({"s": ("tactic", "config")}, 0.5, {}))
    first.save()
    second.save()
    found = TimingCache.open(path)
    assert found.entries == {"a": 1.0, "b": 2.0}
    assert found.measured("c") is not None
    assert found.network("n") is not None


def test_times_of_gpus_are_read_back(tmp_path: Path) -> None:
    path = tmp_path / "cache.json"
    cache = TimingCache.open(path)
    cache.note("fast", Candidate(2.5e-6, None, {"driver": "13.0"}))
    cache.note("wrong", Candidate(None, "wrong result", {"driver": "13.0"}))
    cache.note_network("net", NetworkChoices({"s": ("conv", "tile")}, 0.25, {"driver": "13.0"}))
    cache.save()
    again = TimingCache.open(path)
    fast, wrong, net = again.measured("fast"), again.measured("wrong"), again.network("net")
    assert fast is not None
    assert fast.seconds == pytest.approx(2.5e-6)
    assert fast.versions == {"driver": "13.0"}
    assert wrong is not None
    assert (wrong.seconds, wrong.failed) == (None, "wrong result")
    assert net is not None
    assert (dict(net.choices), net.ms) == ({"s": ("conv", "tile")}, 0.25)
    assert again.measured("other") is None


@pytest.mark.parametrize(
    "section",
    [
        {"candidates": {"k": {"us": "fast", "versions": {}}}},
        {"candidates": {"k": {"us": 1.0}}},
        {"candidates": []},
        {"networks": {"k": {"choices": {"s": ["only one"]}, "ms": 1.0, "versions": {}}}},
        {"networks": {"k": {"choices": {}, "ms": -1.0, "versions": {}}}},
    ],
)
def test_sections_that_hold_something_else_are_refused(tmp_path: Path, section: dict[str, object]) -> None:
    path = tmp_path / "cache.json"
    path.write_text(json.dumps({"format": "optdnn-timing-cache", "version": 1, "entries": {}, **section}))
    with pytest.raises(UsageError, match="not a measurement"):
        TimingCache.open(path)


def test_an_unwritable_place_is_refused_before_anything_is_measured(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match="cannot be written"):
        TimingCache.open(tmp_path / "absent" / "cache.json")
    cache = TimingCache(tmp_path / "absent" / "cache.json")
    cache.put("k", 1.0)
    with pytest.raises(OutputError, match="cannot be written"):
        cache.save()
