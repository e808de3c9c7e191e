"""``optdnn refit``."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import numpy_helper
from support.cli import Cli, strict
from support.small_models import mlp, retrained, save

import optdnn


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``net.engine``, which holds its model; ``plain.engine``, which does not; and ``new.onnx`` with other weights."""
    folder = tmp_path_factory.mktemp("built")
    save(retrained(mlp()), folder, "new.onnx")
    optdnn.build(save(mlp(), folder), target="simulate", refit=True).save(folder / "net.engine")
    optdnn.build(mlp(), target="simulate").save(folder / "plain.engine")
    return folder


def test_the_weights_of_a_model(cli: Cli, folder: Path, tmp_path: Path) -> None:
    reported = cli("refit", folder / "plain.engine", folder / "new.onnx", "-o", tmp_path / "out.engine")
    assert reported.code == 0
    assert reported.out.startswith(f"{tmp_path / 'out.engine'}: plain.engine with other weights, in ")
    optdnn.build(folder / "new.onnx", target="simulate").save(tmp_path / "fresh.engine")
    assert (tmp_path / "out.engine").read_bytes() == (tmp_path / "fresh.engine").read_bytes()


def test_single_weights_and_an_adapter(cli: Cli, folder: Path, tmp_path: Path) -> None:
    w1, w2 = (numpy_helper.to_array(t) for t in onnx.load(folder / "model.onnx").graph.initializer)
    np.savez(tmp_path / "w.npz", w2=w2 * np.float32(2))
    np.savez(tmp_path / "lora.npz", **{"w1.A": w1, "w1.B": np.eye(24, dtype=np.float32), "w1.scale": np.float32(1)})
    out = tmp_path / "out.engine"
    asked = (
        "refit",
        folder / "net.engine",
        "--weights",
        tmp_path / "w.npz",
        "--adapter",
        tmp_path / "lora.npz",
        "-o",
        out,
    )
    assert strict(cli(*asked, "--json").out).keys() == {"engine", "from", "seconds"}
    x = np.ones((4, 24), np.float32)
    old, new = (optdnn.load(path).run(x)["y"] for path in (folder / "net.engine", out))
    np.testing.assert_allclose(new, 4 * old, rtol=1e-5)  # both weights are doubled


def test_refusals(cli: Cli, folder: Path, tmp_path: Path) -> None:
    out, plain = tmp_path / "out.engine", folder / "plain.engine"
    np.savez(tmp_path / "half.npz", **{"w1.A": np.ones((1, 48), np.float32)})
    np.savez(tmp_path / "odd.npz", w1=np.ones((1, 48), np.float32))
    other = mlp()
    other.graph.node[1].attribute[0].f = 0.5
    for words, code, said in (
        ((plain, folder / "new.onnx"), 2, "-o OUT.engine"),
        ((plain, "-o", out), 2, "optdnn refit ENGINE MODEL"),
        ((plain, plain, "-o", out), 2, "is an engine already"),
        ((plain, save(other, tmp_path), "-o", out), 4, "node 'b': LeakyRelu"),
        ((folder / "net.engine", "--weights", folder / "new.onnx", "-o", out), 2, "not an .npz file"),
        (
            (folder / "net.engine", "--adapter", tmp_path / "half.npz", "-o", out),
            2,
            "half.npz: the adapter of 'w1' needs both arrays, w1.A and w1.B",
        ),
        (
            (folder / "net.engine", "--adapter", tmp_path / "odd.npz", "-o", out),
            2,
            "odd.npz: the array 'w1' is none of NAME.A, NAME.B and NAME.scale",
        ),
    ):
        reported = cli("refit", *words)
        assert (reported.code, reported.out) == (code, ""), reported
        assert said in reported.err
    optdnn.build(mlp(), target="simulate", shapes={"x": (4, 24)}).save(tmp_path / "shaped.engine")
    other.graph.input[0].name = other.graph.node[0].input[0] = "z"
    reported = cli("refit", tmp_path / "shaped.engine", save(other, tmp_path), "-o", out)
    assert (reported.code, reported.out) == (4, "")
    assert "is another network than the engine's: it has no input 'x'\n  hint: its inputs are 'z'" in reported.err
    assert not out.exists()
    np.savez(tmp_path / "lora.npz", **{"w1.A": np.ones((1, 48), np.float32), "w1.B": np.ones((24, 1), np.float32)})
    twice = ("--adapter", tmp_path / "lora.npz") * 2
    assert "has two adapters" in cli("refit", folder / "net.engine", *twice, "-o", out).err
