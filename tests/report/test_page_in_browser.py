"""Pages with a network in a real browser: in the width of a phone and a desktop, light and dark, with clicks, keys and hostile
names."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from support.browser import BROWSER, Page, browser
from support.onnxnet import HOSTILE, save_convnet

import optdnn
from optdnn.compare.difference import TABLES, difference
from optdnn.report.difference import to_html
from optdnn.report.drawing import draw
from optdnn.report.html import bench_html, build_html
from optdnn.runtime.measuring.bench import bench

pytestmark = [pytest.mark.slow, pytest.mark.skipif(BROWSER is None, reason="no Chromium is installed")]
NAMES = {**HOSTILE, "pool": "</script><script>document.title='owned'</script>", "relu1": "<!--<script>"}
SIZES = [(1280, False), (1280, True), (400, False), (400, True)]
MATRIX = "document.querySelector('#canvas > g').transform.baseVal.consolidate().matrix"
X = np.zeros((1, 3, 8, 8), np.float32)


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    with browser(tmp_path_factory.mktemp("profile")) as found:
        yield found


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The pages of build, bench and diff, of networks with hostile names, and of a deep one."""
    folder = tmp_path_factory.mktemp("pages")
    model = save_convnet(folder / "net <b>.onnx", names=NAMES)
    half = optdnn.build(model, target="simulate", precision="fp16")
    full = optdnn.build(model, target="simulate", precision="fp32")
    half.save(folder / "half.engine")
    full.save(folder / "full.engine")
    report: dict[str, Any] = {**(half.report or {}), "command": "optdnn build 'net <b>.onnx'", "time": "now"}
    texts = {"build": build_html(report, draw(half.program, report), model.name)}
    measured = {**bench(full, {"x": X}, iterations=20, with_profile=True), "precision_text": "fp32"}
    texts["bench"] = bench_html(measured, draw(full.program, measured, measured=measured), "full.engine")
    found = difference(folder / "half.engine", folder / "full.engine", shapes={}, run=False)
    texts["diff"] = to_html(found, TABLES, draw(full.program, {}, changes=found["tables"]["times"]))
    deep = optdnn.build(chain(600), target="reference", opt_level=0)
    texts["deep"] = build_html(deep.report or {}, draw(deep.program, deep.report or {}), "deep")
    for name, text in texts.items():
        (folder / f"{name}.html").write_text(text, encoding="utf-8")
    return {name: folder / f"{name}.html" for name in texts}


def chain(operators: int) -> bytes:
    """A deep network of sines. Every third one is added to the one two before it."""
    values, nodes = ["x"], []
    for k in range(operators):
        inputs = [values[-1], values[-3]] if k % 3 == 2 else [values[-1]]
        values.append(f"v{k}")
        nodes.append(helper.make_node("Add" if len(inputs) == 2 else "Sin", inputs, [values[-1]], name=f"node_{k}"))
    nodes.append(helper.make_node("Add", [values[-1], "c"], ["y"], name="last"))
    ports = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [4]) for name in "xy"]
    weights = [numpy_helper.from_array(np.ones(4, np.float32), "c")]
    graph = helper.make_graph(nodes, "chain", ports[:1], ports[1:], weights)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    data: bytes = onnx.load_model_from_string(model.SerializeToString()).SerializeToString()
    return data


@pytest.mark.parametrize("name", ["build", "bench", "diff", "deep"])
@pytest.mark.parametrize(("width", "dark"), SIZES)
def test_it_fits_draws_and_asks_for_nothing(
    page: Page, pages: dict[str, Path], name: str, width: int, dark: bool, tmp_path: Path
) -> None:
    page.asked.clear()
    page.open(pages[name], width, dark=dark)
    assert page.complaints == []
    assert page.asked == [pages[name].as_uri()]
    assert page.value("[document.documentElement.scrollWidth, innerWidth]") == [width, width]
    assert page.value("document.querySelectorAll('#canvas .node').length") >= 6
    # the whole picture is in its frame
    inside = (
        "(() => { const f = document.querySelector('#canvas').getBoundingClientRect();"
        " return [...document.querySelectorAll('.node')].every((n) => { const b = n.getBoundingClientRect();"
        " return b.left >= f.left && b.right <= f.right && b.top >= f.top && b.bottom <= f.bottom; }); })()"
    )
    assert page.value(inside)
    background = page.value("getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, background[4:-1].split(","))) < 200) is dark
    page.shot(tmp_path / "shot.png", whole=True)
    assert (tmp_path / "shot.png").stat().st_size > 20_000


def test_operators_do_not_lie_on_one_another(page: Page, pages: dict[str, Path]) -> None:
    page.open(pages["deep"], 1280)
    overlaps = (
        "(() => { const b = [...document.querySelectorAll('.node')].map((n) => n.getBoundingClientRect());"
        " let n = 0; b.forEach((p, i) => b.slice(i + 1).forEach((q) => {"
        " if (p.left < q.right && q.left < p.right && p.top < q.bottom && q.top < p.bottom) n++; })); return n; })()"
    )
    assert page.value(overlaps) == 0
    columns = (
        "new Set([...document.querySelectorAll('.node')].map((n) => Math.round(n.getBoundingClientRect().x))).size"
    )
    assert page.value(columns) > 5  # not one thin line of 600


def test_a_click_shows_the_facts(page: Page, pages: dict[str, Path]) -> None:
    page.open(pages["build"], 1280)
    page.click(".node[data-id='2']")
    facts = page.value("document.querySelector('#facts').innerText")
    for text in ("Conv + Add + Relu", HOSTILE["relu2"], "conv2", "predicted by the cost model", "fp16", "of roofline"):
        assert text in facts
    for heading in ("ONNX nodes (4)", "Rewrites made", "Tactics that refused"):
        assert heading in facts
    assert page.value("document.querySelector('.node.current').dataset.id") == "2"
    assert page.value("document.querySelectorAll('.edge.touched').length") == 2
    page.click("#facts .neighbors .link")
    assert page.value("document.querySelector('.node.current').dataset.id") == "1"


def test_hostile_names_stay_text(page: Page, pages: dict[str, Path]) -> None:
    for name in ("build", "bench", "diff"):
        page.open(pages[name], 1280)
        assert "owned" not in page.value("document.title")
        assert page.value("document.querySelectorAll('img, main script, #canvas script').length") == 0
        shown = ""
        for k in range(1, 5):
            page.click(f".node[data-id='{k}']")
            shown += page.value("document.querySelector('#facts').innerText")
        for name_of in ("relu1", "relu2", "pool"):
            assert NAMES[name_of] in shown
        assert page.value("document.querySelectorAll('#facts img, #facts script').length") == 0
        assert page.complaints == []


def test_a_script_that_got_in_would_not_run(page: Page, pages: dict[str, Path], tmp_path: Path) -> None:
    bad = tmp_path / "bad.html"
    bad.write_text(pages["build"].read_text().replace("<header>", "<header><script>document.title='owned'</script>"))
    page.open(bad, 1280)
    assert page.value("document.title") == "optdnn: net <b>.onnx"
    assert any("Content Security Policy" in c for c in page.complaints)
    with pytest.raises(AssertionError, match="TrustedHTML"):
        page.value("document.body.innerHTML = '<b>x</b>'")
    page.complaints.clear()


def test_the_keyboard_is_enough(page: Page, pages: dict[str, Path]) -> None:
    page.open(pages["build"], 1280)
    page.value("document.querySelector('.node[tabindex=\"0\"]').focus()")
    keys = {"ArrowDown": "1", "ArrowRight": "2", "ArrowUp": "1", "End": "5", "ArrowLeft": "4", "Home": "0"}
    for key, current in keys.items():
        page.key(key)
        assert page.value("document.querySelector('.node.current').dataset.id") == current
        assert page.value("document.activeElement.dataset.id") == current
    before = scale(page)
    page.key("+")
    assert scale(page) == pytest.approx(1.4 * before)
    page.key("0")
    assert scale(page) == pytest.approx(before)
    page.key("ArrowDown")
    page.key("Enter")
    assert page.value("document.activeElement.id") == "facts"
    spoken = page.value("document.querySelector('.node.current').getAttribute('aria-label')")
    assert spoken.startswith("ImageConv + Relu, ")
    assert spoken.endswith("µs")
    assert page.value("document.querySelectorAll('.node[tabindex=\"0\"]').length") == 1


def scale(page: Page) -> float:
    found: float = page.value(f"{MATRIX}.a")
    return found


def change(page: Page, field: str, value: str, event: str) -> None:
    """Set the value of a field of the page."""
    page.value(
        f"(() => {{ const f = document.querySelector('#{field}'); f.value = '{value}'; f.dispatchEvent(new Event('{event}')); }})()"
    )


def test_search_finds_names_and_tactics(page: Page, pages: dict[str, Path]) -> None:
    page.open(pages["deep"], 400)
    page.click("#search")
    page.write("node_59")
    assert page.value("document.querySelector('#matches').textContent") == "11 of 603"
    assert page.value("document.querySelectorAll('.node.hit').length") == 11
    page.key("Enter")
    page.key("Enter")
    assert "node_590" in page.value("document.querySelector('#facts').innerText")
    left, right, width = page.value(
        "(() => { const b = document.querySelector('.node.current').getBoundingClientRect(),"
        " f = document.querySelector('#canvas').getBoundingClientRect(); return [b.left - f.left, f.right - b.right, b.width]; })()"
    )
    assert min(left, right) >= 0
    assert width > 60
    change(page, "search", "", "input")
    assert page.value("document.querySelectorAll('.node.hit').length") == 0


def test_the_mouse_moves_and_zooms(page: Page, pages: dict[str, Path]) -> None:
    page.open(pages["build"], 1280)
    matrix = f"(() => {{ const m = {MATRIX}; return [m.a, m.e, m.f]; }})()"
    a, x, y = page.value(matrix)
    page.drag(".node[data-id='3']", 60, 30)
    assert page.value(matrix) == pytest.approx([a, x + 60, y + 30])
    assert page.value("document.querySelector('.node.current')") is None  # a drag does not count as a click
    page.wheel("#canvas", -100, ctrl=False)
    assert scale(page) == pytest.approx(a)
    page.wheel("#canvas", -100, ctrl=True)
    page.until(f"{MATRIX}.a > {1.1 * a}")
    page.click("#zoom-fit")
    assert page.value(matrix) == pytest.approx([a, x, y])


def test_colors_bars_findings_and_rows_lead_to_operators(page: Page, pages: dict[str, Path]) -> None:
    page.open(pages["build"], 1280)
    modes = page.value("[...document.querySelector('#mode').options].map((o) => o.value)")
    assert modes == ["time", "roofline", "operator", "precision"]
    filled = "getComputedStyle(document.querySelector(\".node[data-id='1'] rect\")).fill"
    colors = set()
    for mode in ("time", "roofline", "operator"):
        change(page, "mode", mode, "change")
        colors.add(page.value(filled))
        assert page.value("document.querySelectorAll('#legend li').length") >= 1
    assert len(colors) == 3
    page.click("#timeline .bar[data-node='3']")
    assert page.value("document.querySelector('.node.current').dataset.id") == "3"
    page.click(".findings .show")
    assert page.value("document.querySelectorAll('.node.hit').length") == 4
    page.value("document.querySelector('#network > details').open = true")
    page.click("#network > details [data-node='4']")
    assert page.value("document.querySelector('.node.current').dataset.id") == "4"


def test_without_scripts_the_table_is_there(page: Page, pages: dict[str, Path]) -> None:
    page.send("Emulation.setScriptExecutionDisabled", value=True)
    try:
        page.send("Page.navigate", url=pages["build"].as_uri())
        page.until("document.readyState === 'complete' && document.querySelector('#network')")
        assert "needs a script" in page.value("document.querySelector('#network').innerText")
        assert page.value("document.querySelectorAll('#network tbody tr').length") == 4
    finally:
        page.send("Emulation.setScriptExecutionDisabled", value=False)
