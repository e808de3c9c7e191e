"""The formats of a report: their text, hostile names stay text, absent parts are left out."""

from __future__ import annotations

import builtins
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from support.onnxnet import HOSTILE

import optdnn.report.page
from optdnn.errors import MissingDependency, OutputError
from optdnn.report import check_outputs, problems, sentences, speedup_text, to_html, to_markdown, write_reports


class Page(HTMLParser):
    """Collects open tags, attributes, and the text of a page."""

    def __init__(self, source: str):
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []
        self.open: list[str] = []
        self.feed(source)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def test_the_page_is_well_formed_and_asks_for_nothing(report: dict[str, Any]) -> None:
    page = Page(to_html(report))
    assert page.open == []
    assert not {t for t, _ in page.tags} & {"script", "img", "link", "iframe", "object", "embed", "form", "a"}
    for _, attrs in page.tags:
        assert not [a for a in attrs if a.startswith("on") or a in ("src", "href")]
    assert "http" not in to_html(report).replace("http-equiv", "")
    assert "@import" not in to_html(report)
    assert "url(" not in to_html(report)


def test_hostile_names_stay_text(report: dict[str, Any]) -> None:
    source = to_html(report)
    text = "".join(Page(source).text)
    for name in (HOSTILE["conv1"], HOSTILE["relu2"]):
        assert name not in source
        assert name in text
    markdown = to_markdown(report)
    assert "<script" not in markdown
    assert "<img" not in markdown
    assert r"a\|b\`\*\_\[x\](javascript:1) &lt;/summary&gt;" in markdown


def test_every_section_has_its_chart(report: dict[str, Any]) -> None:
    source = to_html(report)
    sections = re.findall(r'<section id="(\w+)">', source)
    assert sections == [
        "results", "latency", "accuracy", "divergence", "operators", "passes", "tactics", "machine",
    ]  # fmt: skip
    assert source.count('class="chart latency"') == 4
    assert source.count('class="dot chart"') == 4
    assert source.count('class="chart passes"') == len(report["build"]["passes"])
    assert source.count('class="chart tactics"') == len([t for t in report["build"]["tactics"] if "median_ms" in t])
    assert source.count('class="chart operators"') == 7
    assert "10 → 5" in source


def test_passes_that_did_nothing_are_left_out_of_markdown(report: dict[str, Any]) -> None:
    table = to_markdown(report).split("## Passes")[1].split("## ")[0]
    assert "fuse" in table
    assert "| 0 | 0 |" not in table
    assert any(not p["fired"] and not p["refused"] for p in report["build"]["passes"])


def test_values_that_were_not_measured_are_left_out(altered: dict[str, Any]) -> None:
    del altered["layers"], altered["bisect"]
    altered["build"] = {}
    altered["error_reference"] = altered["input_difference"] = None
    sections = re.findall(r'<section id="(\w+)">', to_html(altered))
    assert sections == ["results", "latency", "machine"]
    assert "## Passes" not in to_markdown(altered)
    for row in altered["rows"]:
        row |= {"quantiles_ms": [], "round_medians_ms": [], "median_ms": None, "p99_ms": None, "stable": None}
        row |= {
            "throughput_per_s": None,
            "speedup": None,
            "speedup_range": None,
            "verdict": None,
            "error": "it <b>crashed",
        }
    altered |= {"versus": [], "speedup_reference": None}
    source = to_html(altered)
    assert re.findall(r'<section id="(\w+)">', source) == ["results", "machine"]
    assert source.count("it &lt;b&gt;crashed") == 4
    assert r"it &lt;b&gt;crashed" in to_markdown(altered)


def test_markdown_has_the_same_facts(report: dict[str, Any]) -> None:
    text = to_markdown(report)
    assert re.findall(r"^#+ (.*)$", text, re.M) == [
        "optdnn compared: net &lt;b&gt;.onnx",
        "Divergence by node",
        "Passes",
        "Operators",
        "Tactics tried",
        "Machine and versions",
    ]
    tables = [line.count("|") - line.count(r"\|") for line in text.splitlines() if line.startswith("|")]
    assert set(tables) == {3, 4, 6, 7, 9}
    for row in report["rows"]:
        assert f"| {row['name']} |" in text
    assert "| fuse\\_conv\\_bn | 2 | 0 |" in text
    assert report["machine"]["cpu"].split()[0] in text


def test_refusals_are_explained_once_per_reason(altered: dict[str, Any]) -> None:
    refused = [{"rule": "r", "nodes": [f"n{i}"], "reason": "it is <used> twice"} for i in range(300)]
    altered["build"]["passes"][0]["refused"] = refused
    source = to_html(altered)
    assert source.count("it is &lt;used&gt; twice") == 1
    assert "n199" in source
    assert "and 100 more" in source
    text = to_markdown(altered)
    assert text.count("it is &lt;used&gt; twice") == 1
    assert "## Fusions refused" in text


# ---------------------------------------------------------------- words


def versus(verdict: str, speedup: float = 1.5, low: float = 1.4, high: float = 1.6) -> dict[str, Any]:
    return {"against": "other", "speedup": speedup, "range": [low, high], "verdict": verdict}


def test_instability_is_said_and_not_ranked(altered: dict[str, Any]) -> None:
    altered["versus"] = [
        versus("unstable", 1.05, 0.8, 1.3),
        versus("equal", 1.0, 0.99, 1.01),
        versus("slower", 0.5, 0.4, 0.6),
    ]
    said = sentences(altered)
    assert said[0] == "optdnn against other: not clear which is faster (0.80 to 1.30 times as fast)"
    assert said[1] == "optdnn is as fast as other, within 2 % (0.99 to 1.01)"
    assert said[2] == "optdnn is 0.50 times as fast as other (0.40 to 0.60)"
    source = to_html(altered)
    assert "not clear</b><span>if faster than other: 0.80 to 1.30×" in source
    unstable = {"verdict": "unstable", "speedup": 1.05, "speedup_range": [0.8, 1.3]}
    assert speedup_text(unstable) == "not clear (0.80 to 1.30)"
    assert speedup_text(unstable | {"verdict": "faster"}) == "1.05× (0.80 to 1.30)"


def test_references_are_named(report: dict[str, Any]) -> None:
    said = "\n".join(sentences(report))
    assert "onnxruntime's latency over each one's" in said
    assert "errors: against the model in NumPy, float64" in said
    assert "x float32[1, 3, 8, 8]; random, seed 0" in said
    assert report["input_difference"] > 1e-3


def test_errors_that_say_little_are_pointed_out(altered: dict[str, Any]) -> None:
    for row in altered["rows"]:
        row["stable"] = True
    assert problems(altered) == []
    altered["rows"][2]["max_rel_err"] = altered["input_difference"] / 2
    assert problems(altered) == ["warning: errors that are not well below what other inputs make: openvino"]
    altered["rows"][2]["max_rel_err"] = None
    assert problems(altered) == [
        "warning: other shapes than the reference's, or elements that are not finite: openvino"
    ]
    altered["rows"][2]["error"] = "crashed"
    assert problems(altered) == []
    altered["input_difference"] = 0
    assert problems(altered) == ["warning: other inputs make no difference to the outputs, so the errors prove little"]
    altered["rows"][1]["stable"] = False
    assert "drifted or were few while measuring onnxruntime" in problems(altered)[1]


# ---------------------------------------------------------------- files


def test_files_are_written_or_refused_before_the_work(report: dict[str, Any], tmp_path: Path) -> None:
    files = {"html": tmp_path / "r.html", "markdown": tmp_path / "r.md"}
    check_outputs(files)
    assert list(tmp_path.iterdir()) == []
    assert write_reports(report, files) == [files["html"], files["markdown"]]
    assert files["markdown"].read_text() == to_markdown(report)
    assert json.loads(json.dumps(report, allow_nan=False)) == report
    assert files["html"].read_text().startswith("<!DOCTYPE html>")
    with pytest.raises(OutputError, match="cannot be written"):
        check_outputs({"html": None, "markdown": tmp_path / "nowhere" / "r.md"})


def test_without_jinja2_html_is_refused_by_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(optdnn.report.page, "find_spec", lambda name: None)
    check_outputs({"markdown": tmp_path / "r.md"})
    with pytest.raises(MissingDependency, match=r"jinja2 is needed to write an HTML report") as caught:
        check_outputs({"html": tmp_path / "r.html"})
    assert caught.value.hint == "pip install 'optdnn[report]'"


def test_other_forms_need_no_jinja2(report: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def refuse(name: str, *rest: Any) -> Any:
        if name.startswith("jinja2"):
            raise ImportError(name)
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", refuse)
    assert to_markdown(report)


def test_slow_steps_are_listed_where_an_engine_records_times(altered: dict[str, Any]) -> None:
    assert '<section id="cliffs">' not in to_html(altered)
    altered["build"]["cliffs"] = [
        {"step": 3, "src": ["<b>norm"], "tactic": "norm", "us": 41.5, "share": 0.25, "roofline": 0.125, "gain_us": 20.75,
         "why": "8 blocks do not fill 132 multiprocessors", "source": "measured"}]  # fmt: skip
    page = to_html(altered)
    assert '<section id="cliffs">' in page
    for text in (
        "".join(Page(page).text),
        to_markdown(altered).replace("\\", "").replace("&lt;", "<").replace("&gt;", ">"),
    ):
        assert "teps below 25% of their roofline that take over 2% of the run, by times measured in tuning" in text
        for cell in ("41.5", "25%", "12%", "20.8", "<b>norm", "8 blocks do not fill 132 multiprocessors"):
            assert cell in text
