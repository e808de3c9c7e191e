"""``import optdnn`` is quick and lazy, and loads no module that is not used."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from programs import mlp
from support.processor import assert_quick

import optdnn
from optdnn import Engine

HEAVY = ("numpy", "onnx", "networkx", "onnxruntime", "openvino", "click", "rich")
ROOT = Path(__file__).parents[2]


def in_new_process(code: str) -> dict[str, object]:
    """Run ``code``, which sets a dict ``result``. Adds the heavy modules that were loaded."""
    program = f"import json, sys, time\nresult = {{}}\n{code}\n"
    program += f"result['loaded'] = [m for m in {HEAVY!r} if m in sys.modules]\nprint(json.dumps(result))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT)
    answer: dict[str, object] = json.loads(done.stdout)
    return answer


# processor time, so that other load on the machine does not count
TIMED = "t = time.process_time(); import optdnn; {use}; result['ms'] = (time.process_time() - t) * 1e3"


def loads_quickly(use: str, limit_ms: float) -> object:
    """The heavy modules that are loaded after ``import optdnn`` and ``use``, which take less than the limit."""
    runs: list[dict[str, object]] = []

    def measured() -> float:
        runs.append(in_new_process(TIMED.format(use=use)))
        return float(str(runs[-1]["ms"]))

    assert_quick(measured, limit_ms)
    return runs[0]["loaded"]


def test_import_is_quick_and_loads_nothing() -> None:
    assert loads_quickly("pass", 50) == []


def test_load_needs_no_compiler(tmp_path: Path) -> None:
    path = tmp_path / "e.engine"
    Engine(mlp()).save(path)
    use = f"import numpy; optdnn.load({str(path)!r})(numpy.ones((1, 5), 'float32'))"
    assert loads_quickly(use, 500) == ["numpy"]


@pytest.mark.slow
def test_naming_load_imports_within_the_bound() -> None:
    assert loads_quickly("optdnn.load; optdnn.Engine; optdnn.EngineError", 300) == ["numpy"]


def test_errors_alone_need_nothing() -> None:
    assert in_new_process("import optdnn; optdnn.EngineError; optdnn.OptdnnError")["loaded"] == []


def test_every_public_name_is_listed_and_leads_somewhere() -> None:
    assert set(optdnn.__all__) == set(optdnn._WHERE)
    assert sorted(optdnn.__all__) == optdnn.__all__
    assert set(optdnn.__all__) <= set(dir(optdnn))
    for name in optdnn.__all__:
        value = getattr(optdnn, name)
        assert value.__name__ == name
        assert value.__doc__


def test_every_error_is_public() -> None:
    from optdnn import errors

    kinds = {n for n, v in vars(errors).items() if isinstance(v, type) and issubclass(v, errors.OptdnnError)}
    assert kinds <= set(optdnn.__all__)
    assert {getattr(errors, k).exit_code for k in kinds} <= set(errors.EXIT_CODES)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'optdnn' has no attribute 'biuld'"):
        optdnn.biuld  # type: ignore[attr-defined]  # noqa: B018


def test_the_version_is_the_packages() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert project["project"]["dynamic"] == ["version"]
    assert project["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "optdnn.__version__"}
    assert optdnn.__version__.count(".") == 2


def test_example_of_the_docstring(tmp_path: Path) -> None:
    engine = optdnn.Engine(mlp())
    engine.save(tmp_path / "model.engine")
    assert list(optdnn.load(tmp_path / "model.engine").run({"x": np.ones((1, 5), np.float32)})) == ["y", "hidden"]


def test_a_built_engine_is_saved_with_its_report_and_a_loaded_one_without(tmp_path: Path) -> None:
    parser = pytest.importorskip("onnx.parser")
    model = parser.parse_model('<ir_version: 9, opset_import: ["" : 17]> g (float[2] x) => (float[2] y) { y = Exp(x) }')
    engine = optdnn.build(model, target="reference")
    engine.save(tmp_path / "e")
    report = json.loads((tmp_path / "e.report.json").read_text(encoding="utf-8"))
    assert report == json.loads(json.dumps(engine.report))
    assert {"seconds", "machine", "versions", "passes", "tactics"} <= set(report)
    loaded = optdnn.load(tmp_path / "e")
    assert loaded.report is None
    loaded.save(tmp_path / "again")
    assert (tmp_path / "again").read_bytes() == (tmp_path / "e").read_bytes()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["again", "e", "e.report.json"]


@pytest.mark.parametrize("threads", [0, -1, 1.5, "2"])
def test_threads_that_cannot_be(tmp_path: Path, threads: Any) -> None:
    with pytest.raises(optdnn.UsageError, match="threads must be 1 to 1024"):
        optdnn.load(Path(__file__).parents[1] / "golden" / "engine-1.0.engine", threads=threads)


@pytest.mark.parametrize("model", [None, 12, ["m.onnx"]])
def test_objects_that_are_no_model(model: Any) -> None:
    pytest.importorskip("onnx")
    with pytest.raises(optdnn.UsageError, match="a model is a path, its bytes or a ModelProto, not"):
        optdnn.build(model)
