"""``optdnn build --preprocess``, and ``optdnn run`` with pictures."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import onnx
import pytest
from support.cli import Cli
from support.pictures import classifier, write_pictures

import optdnn
from optdnn.cli.main import run

SIZE = (20, 30)
SPEC = '{"resize": 14, "crop": 12}'


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with an engine, its labels and pictures."""
    folder = tmp_path_factory.mktemp("built")
    onnx.save(classifier(), folder / "m.onnx")
    (folder / "labels.txt").write_text("ant\nbee\ncat\ndog\nelk\nfox\n")
    (folder / "spec.json").write_text(SPEC)
    write_pictures(folder / "pictures", [SIZE, (31, 16), SIZE], "jpg")
    answer = f"y=softmax+top-k:2,labels={folder / 'labels.txt'}"
    words = ["--target", "reference", "--preprocess", f"x={folder / 'spec.json'}", "--postprocess", answer, "-q"]
    assert run(["build", str(folder / "m.onnx"), *words]) == 0
    return folder


def test_the_best_classes_of_a_picture(cli: Cli, built: Path) -> None:
    one = built / "pictures/0.jpg"
    done = cli("run", built / "m.engine", "--input", f"x={one}")
    assert done.code == 0, done.err
    lines = done.out.splitlines()
    assert lines[0] == str(one)
    (want,) = optdnn.picture_answers(optdnn.load(built / "m.engine"), one)
    assert [line.split()[0] for line in lines[2:]] == [name for name, _ in want.best]
    assert {name for name, _ in want.best} <= {"ant", "bee", "cat", "dog", "elk", "fox"}


def test_a_folder_gives_a_row_or_a_line_of_json_for_each(cli: Cli, built: Path, tmp_path: Path) -> None:
    done = cli("run", built / "m.engine", "--input", f"x={built / 'pictures'}", "-o", tmp_path / "out.npz")
    assert done.code == 0, done.err
    assert len(done.out.splitlines()) == 4
    assert "3 pictures in" in done.err
    with np.load(tmp_path / "out.npz") as arrays:
        assert {n: arrays[n].shape for n in arrays.files} == {"y": (3, 2), "y_classes": (3, 2)}
    done = cli("run", built / "m.engine", "--input", built / "pictures", "--json")
    found = [json.loads(line) for line in done.out.splitlines()]
    assert [Path(one["picture"]).name for one in found] == ["0.jpg", "1.jpg", "2.jpg"]
    assert found[0]["best"][0]["score"] >= found[0]["best"][1]["score"]


def test_the_engine_is_checked_and_explained_with_its_pictures(cli: Cli, built: Path) -> None:
    done = cli("verify", built / "m.engine", "--model", built / "m.onnx")
    assert done.code == 0, done.err
    done = cli("explain", built / "m.engine", "preprocess/x/resize", "--json")
    assert json.loads(done.out)[0]["steps"]
    done = cli("check", built / "m.onnx", "--preprocess", f"x={SPEC}", "--target", "reference")
    assert "x: uint8[N, x.height, x.width, 3]" in done.out
    done = cli("compare", built / "m.engine", "--model", built / "m.onnx")
    assert done.code == 2
    assert "takes pictures or gives answers, which its rivals do not" in done.err


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("--input", "z={folder}/pictures/0.jpg"), "no input 'z'"),
        (("--input", "x=nowhere.jpg"), "there is no file nowhere.jpg"),
        (("--input", "x={folder}/pictures/0.jpg", "--input", "x={folder}/pictures/1.jpg"), "is the only --input"),
    ],
)
def test_pictures_that_are_no_input(cli: Cli, built: Path, words: tuple[str, ...], why: str) -> None:
    done = cli("run", built / "m.engine", *(w.format(folder=built) for w in words))
    assert done.code == 2
    assert why in done.err


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("--preprocess", "x"), "--preprocess 'x' is not NAME=SPEC\n  hint: NAME is an input of the model"),
        (
            ("--postprocess", "softmax"),
            "--postprocess 'softmax' is not NAME=SPEC\n  hint: NAME is an output of the model",
        ),
        (("--preprocess", "x={}", "--preprocess", "x={}"), "--preprocess x is given twice"),
        (("--preprocess", "x=nowhere.json"), "preprocess of input 'x': .* neither JSON nor a file"),
        (("--postprocess", "y=soft"), "'soft' is not softmax"),
    ],
)
def test_specs_that_make_no_sense(cli: Cli, built: Path, words: tuple[str, ...], why: str) -> None:
    done = cli("build", built / "m.onnx", "--target", "reference", "-o", built / "other.engine", *words)
    assert done.code == 2
    assert re.search(why, done.err), done.err


def test_calibration_prepares_pictures_as_the_engine_does(built: Path) -> None:
    """The calibrated ranges of the first convolution's input equal those of pictures that were prepared outside of the network."""
    from optdnn.calibration import calibrate
    from optdnn.calibration.images import ImageSpec, RawPictures
    from optdnn.importers.onnx import import_model
    from optdnn.importers.pictures import with_pictures

    spec = ImageSpec.read(SPEC)
    outside = calibrate(import_model(classifier()), built / "pictures", "minmax", images=spec)
    inside_model = import_model(with_pictures(classifier(), {"x": spec}, {}), shapes={"x": (3, *SIZE, 3)})
    inside = calibrate(inside_model, built / "pictures", "minmax", images=RawPictures({"x": spec}))
    low, high = outside.ranges["x"].low, outside.ranges["x"].high
    got = inside.ranges["x.prepared"]
    np.testing.assert_allclose((got.low, got.high), (low, high), atol=0.1)
    assert high - low > 1


def test_a_terminal_shows_how_far_a_folder_is(cli: Cli, built: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from optdnn.cli.common import stderr

    one = built / "pictures/0.jpg"
    for terminal, words, shown in (
        (True, built / "pictures", True),
        (True, one, False),
        (False, built / "pictures", False),
    ):
        monkeypatch.setattr(stderr, "_force_terminal", terminal)
        done = cli("run", built / "m.engine", "--input", f"x={words}")
        assert done.code == 0, done.err
        assert ("\x1b[?25l" in done.err) == shown, "a bar hides the cursor"
        assert "\x1b" not in done.out
