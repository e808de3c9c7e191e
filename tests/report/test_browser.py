"""The HTML report in a real browser: charts are drawn, there are no errors, no hostile text runs, and it fits a phone."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from optdnn.report import to_html

BROWSER = next((b for b in map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome")) if b), None)
pytestmark = [pytest.mark.slow, pytest.mark.skipif(BROWSER is None, reason="no Chromium is installed")]


def browse(page: Path, profile: Path, *options: str) -> tuple[str, list[str]]:
    """The output of the browser, and the complaints on its console."""
    assert BROWSER is not None
    done = subprocess.run(
        [
            *(BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
            *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
            *(f"--user-data-dir={profile}", "--enable-logging=stderr", "--hide-scrollbars", *options, page.as_uri()),
        ],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    return done.stdout, re.findall(r"CONSOLE.*", done.stderr)


@pytest.fixture(scope="module")
def page(report: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("page") / "report.html"
    path.write_text(to_html(report), encoding="utf-8")
    return path


def test_the_charts_are_in_the_dom_and_nothing_complains(page: Path, report: dict[str, Any], tmp_path: Path) -> None:
    dom, complaints = browse(page, tmp_path / "profile", "--dump-dom")
    assert complaints == []
    assert len(re.findall(r'<path class="violin( own)?" d="M', dom)) == len(report["rows"])
    for name in ("latency", "profile-chart", "operators", "passes", "tactics"):
        assert f'class="chart {name}"' in dom
    assert "<title>optdnn: net &lt;b&gt;.onnx</title>" in dom  # the page has not changed it
    assert "<script" not in dom
    assert "<img" not in dom
    assert "&lt;script&gt;document.title='owned'&lt;/script&gt;" in dom


def test_a_script_that_got_in_would_not_run_and_would_be_seen(page: Path, tmp_path: Path) -> None:
    bad = tmp_path / "bad.html"
    bad.write_text(page.read_text().replace("<header>", "<header><script>document.title='owned'</script>"))
    dom, complaints = browse(bad, tmp_path / "profile", "--dump-dom")
    assert "<title>optdnn: net" in dom
    assert any("Content Security Policy" in c for c in complaints)


MEASURE = """<script>
const box = e => { const b = e.getBoundingClientRect(); return [b.width, b.height] };
const all = q => [...document.querySelectorAll(q)].map(box);
const html = document.documentElement;
document.title = JSON.stringify({
  width: [html.scrollWidth, html.clientWidth], charts: all(".chart"), violins: all(".violin"),
  bars: all(".operators .bar-other"), names: all(".row .name"),
});
</script>"""


@pytest.mark.parametrize("width", [1100, 500])
def test_it_is_laid_out_and_fits(page: Path, tmp_path: Path, width: int) -> None:
    probe = tmp_path / "probe.html"
    # A script of the test reads the layout; the page's policy would forbid it.
    text = re.sub(r"<meta http-equiv=.*?>", "", page.read_text())
    probe.write_text(text.replace("</body>", f"{MEASURE}</body>").replace("<details", "<details open"))
    dom, complaints = browse(probe, tmp_path / "profile", "--dump-dom", f"--window-size={width},900")
    assert complaints == []
    found = re.search(r"<title>({.*})</title>", dom)
    assert found is not None
    seen = json.loads(found[1])
    assert seen["width"] == [width, width]  # nothing to scroll sideways
    for chart in seen["charts"]:
        assert chart[0] > 150
        assert chart[1] > 8
    for violin in seen["violins"]:
        assert violin[0] > 10
        assert 15 < violin[1] < 46
    assert seen["bars"][0][0] > 150  # the most frequent operator has the longest bar


NARROW = """<script>
addEventListener("load", () => {
  const page = document.querySelector("iframe").contentDocument, html = page.documentElement;
  const cells = [...page.querySelectorAll("#results td")].map(e => e.getBoundingClientRect());
  document.title = JSON.stringify({
    page: [html.scrollWidth, html.clientWidth], widest: Math.max(...cells.map(b => b.right)),
    least: Math.min(...cells.map(b => b.left)), heights: cells.map(b => b.height),
    label: getComputedStyle(page.querySelector("#results td.num"), "::before").content,
  });
});
</script>"""


def test_at_the_width_of_a_phone_no_cell_of_the_results_is_cut_off(page: Path, tmp_path: Path) -> None:
    # In a frame, since a browser's window may have a larger minimum width.
    text = html.escape(re.sub(r"<meta http-equiv=.*?>", "", page.read_text()), quote=True)
    probe = tmp_path / "probe.html"
    frame = f'<iframe style="width:400px;height:900px;border:0" srcdoc="{text}"></iframe>'
    probe.write_text(f"<!DOCTYPE html><meta charset=utf-8><title></title>{NARROW}{frame}")
    dom, complaints = browse(probe, tmp_path / "profile", "--dump-dom")
    assert complaints == []
    found = re.search(r"<title>({.*?})</title>", dom)
    assert found is not None
    seen = json.loads(html.unescape(found[1]))
    assert seen["page"] == [400, 400]
    assert 0 <= seen["least"] < seen["widest"] <= 400
    assert min(seen["heights"]) > 10
    assert "median ms" in seen["label"]


def test_it_can_be_photographed(page: Path, tmp_path: Path) -> None:
    shot = tmp_path / "shot.png"
    _, complaints = browse(page, tmp_path / "profile", f"--screenshot={shot}", "--window-size=1100,1500")
    assert complaints == []
    blank = tmp_path / "blank.html"
    blank.write_text("<!DOCTYPE html><title>blank</title>")
    browse(blank, tmp_path / "profile2", f"--screenshot={tmp_path / 'blank.png'}", "--window-size=1100,1500")
    assert shot.stat().st_size > 10 * (tmp_path / "blank.png").stat().st_size
