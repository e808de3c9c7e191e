"""Pictures through engines: files decoded in threads or by nvImageCodec, and the result or error of each file."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from support.pictures import classifier, picture, write_pictures

import optdnn
from optdnn.answer_spec import AnswerSpec
from optdnn.errors import EngineError, InputError, UsageError
from optdnn.image_spec import ImageSpec
from optdnn.runtime.pictures import nvimgcodec
from optdnn.runtime.pictures.files import Placement, decoded, placed
from optdnn.runtime.pictures.on_gpu import GpuPictures, gpu_runs
from optdnn.runtime.pictures.port import PicturePort

SPEC = {"resize": 14, "crop": 12}
SIZE = (20, 30)


def _engine(**options: Any) -> optdnn.Engine:
    made = {"preprocess": {"x": SPEC}, "postprocess": {"y": {"softmax": True, "top_k": 2, "labels": list("abcdef")}}}
    return optdnn.build(classifier(), target="reference", **{**made, **options})


@pytest.fixture(scope="module")
def any_size() -> optdnn.Engine:
    return _engine()


@pytest.fixture(scope="module")
def one_size() -> optdnn.Engine:
    return _engine(shapes={"x": (3, *SIZE, 3)})


def test_pictures_of_any_sizes_and_forms(any_size: optdnn.Engine, tmp_path: Path) -> None:
    sizes = [SIZE, SIZE, (31, 16), SIZE, (40, 41)]
    paths = write_pictures(tmp_path, sizes)
    found = list(optdnn.picture_answers(any_size, tmp_path, batch=2, workers=2))
    assert [a.name for a in found] == [str(p) for p in paths]
    for k, answer in enumerate(found):
        want = any_size.run({"x": picture(sizes[k], k)[None]})
        np.testing.assert_allclose(answer.outputs["y"], want["y"][0], rtol=1e-5)
        assert [name for name, _ in answer.best] == ["abcdef"[c] for c in want["y_classes"][0]]
        assert answer.best[0][1] >= answer.best[1][1]
    (one,) = optdnn.picture_answers(any_size, [paths[2].read_bytes()])
    np.testing.assert_array_equal(one.outputs["y"], found[2].outputs["y"])
    assert one.name == "picture 0"


def test_a_folder_holds_pictures_of_every_format_that_is_decoded(any_size: optdnn.Engine, tmp_path: Path) -> None:
    for ending in ("tga", "jp2", "ico"):
        write_pictures(tmp_path / ending, [(16, 16)], ending)
    assert len(list(optdnn.picture_answers(any_size, tmp_path, batch=1))) == 3


def test_a_fixed_batch_is_filled_up(one_size: optdnn.Engine, any_size: optdnn.Engine, tmp_path: Path) -> None:
    write_pictures(tmp_path, [SIZE] * 5)
    got = [a.outputs["y"] for a in optdnn.picture_answers(one_size, tmp_path)]
    want = [a.outputs["y"] for a in optdnn.picture_answers(any_size, tmp_path)]
    np.testing.assert_allclose(got, want, rtol=1e-5)
    with pytest.raises(UsageError, match="batch 2 does not fit the engine, which takes 3"):
        list(optdnn.picture_answers(one_size, tmp_path, batch=2))


@pytest.mark.parametrize("own", [(200, 300), (300, 200), (330, 205)])
@pytest.mark.parametrize("changes", [{}, {"resize": (70, 70)}, {"resize": (80, 80), "fit": "contain", "crop": None}])
def test_a_picture_is_brought_to_the_engines_size(
    own: tuple[int, int], changes: dict[str, Any], tmp_path: Path
) -> None:
    """The network sees the same part of the picture as without it, so about the same picture."""
    from optdnn.calibration.images import prepared

    spec = ImageSpec.of({"resize": 70, "crop": 60, "mean": 0, "std": 1, "scale": 1, "pad_value": 100, **changes})
    image = pytest.importorskip("PIL.Image", reason="the images extra is not installed")
    y, x = np.mgrid[: own[0], : own[1]]
    smooth = np.stack([x * 255 / own[1], y * 255 / own[0], (x + y) * 255 / sum(own)], -1).astype(np.uint8)
    image.fromarray(smooth).save(tmp_path / "p.png")
    fitted, place = placed(tmp_path / "p.png", spec, (200, 300))
    assert fitted.shape == (200, 300, 3)
    assert place.size == own
    want, got = prepared(decoded(tmp_path / "p.png", spec)[None], spec), prepared(fitted[None], spec)
    if spec.fit == "stretch":
        assert np.abs(want - got).mean() < 3
    top, left = place.offset
    center = fitted[top + round(own[0] * place.scale[0] / 2), left + round(own[1] * place.scale[1] / 2)]
    assert np.abs(center.astype(int) - smooth[own[0] // 2, own[1] // 2]).max() < 16


def test_boxes_refer_to_the_whole_picture_although_the_engine_takes_one_size() -> None:
    from optdnn.answer_spec import AnswerSpec
    from optdnn.runtime.pictures.stream import _whole_picture

    place = Placement((100, 200), (0.5, 0.25), (10, 20))
    corners = np.float32([[20 + 5, 10 + 5, 20 + 25, 10 + 45]])
    got = _whole_picture(corners, AnswerSpec.of("boxes:xyxy"), place)
    np.testing.assert_array_equal(got, [[20, 10, 100, 90]])
    got = _whole_picture(np.float32([[20 + 15, 10 + 25, 20, 40]]), AnswerSpec.of("boxes:cxcywh"), place)
    np.testing.assert_array_equal(got, [[60, 50, 80, 80]])


def test_pictures_are_rotated_upright_by_their_exif_data(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image", reason="the images extra is not installed")
    exif = image.Exif()
    exif[0x0112] = 6  # rotated by 90 degrees to the right
    pixels = picture(SIZE)
    image.fromarray(pixels).save(tmp_path / "p.png", exif=exif)
    np.testing.assert_array_equal(decoded(tmp_path / "p.png", ImageSpec()), np.rot90(pixels, -1))


def test_other_forms_of_pictures(tmp_path: Path) -> None:
    (path,) = write_pictures(tmp_path, [SIZE])
    pixels = picture(SIZE)
    spec = ImageSpec.of({"input": {"layout": "chw", "dtype": "uint16", "color": "BGR"}})
    np.testing.assert_array_equal(decoded(path, spec), pixels[..., ::-1].transpose(2, 0, 1).astype(np.uint16) * 257)
    gray = decoded(path, ImageSpec.of({"input": {"color": "L", "dtype": "fp32"}}))
    assert (gray.shape, gray.dtype) == ((*SIZE, 1), np.float32)


def test_pictures_of_16_bits_keep_their_upper_8(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image", reason="the images extra is not installed")
    pixels = np.uint16([[0, 1000], [30_000, 65_535]])
    image.fromarray(pixels).save(tmp_path / "p.png")
    np.testing.assert_array_equal(decoded(tmp_path / "p.png", ImageSpec())[..., 0], pixels >> 8)


def test_a_line_of_pixels_and_other_programs_files_are_refused(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image", reason="the images extra is not installed")
    image.new("L", (60_000, 1)).save(tmp_path / "line.png")
    for size in (None, (224, 224)):  # 256 times as high and as wide, before the crop
        with pytest.raises(InputError, match=r"line\.png is resized to \d+x256 pixels"):
            decoded(tmp_path / "line.png", ImageSpec(), size)
    (tmp_path / "eps.png").write_bytes(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\n")
    with pytest.raises(InputError, match="cannot be read as a picture: cannot identify"):
        decoded(tmp_path / "eps.png", ImageSpec())


def test_lists_are_sizes_and_axis_0_is_kept() -> None:
    assert ImageSpec(resize=[9, 8], crop=[8, 8], pad=[1, 2]) == ImageSpec(resize=(9, 8), crop=(8, 8), pad=(1, 2))  # type: ignore[arg-type]
    answer = AnswerSpec(argmax=True, axis=0)
    assert AnswerSpec.of(answer.to_plain()) == answer


def test_files_that_are_no_picture_and_engines_that_take_none(
    any_size: optdnn.Engine, one_size: optdnn.Engine, tmp_path: Path
) -> None:
    small, large = write_pictures(tmp_path, [(3, 4), (40, 30)])
    with pytest.raises(UsageError, match="decoder 'tpu' is not one of auto, cpu, gpu"):
        list(optdnn.picture_answers(any_size, small, decoder="tpu"))
    with pytest.raises(UsageError, match="workers 0 is not a positive number"):
        list(optdnn.picture_answers(any_size, small, workers=0))
    with pytest.raises(InputError, match=r"p\.png cannot be read as a picture"):
        list(optdnn.picture_answers(any_size, tmp_path / "p.png"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageError, match="holds no pictures"):
        list(optdnn.picture_answers(any_size, tmp_path / "empty"))
    plain = optdnn.build(classifier(), target="reference")
    with pytest.raises(UsageError, match="not the engine's only input: its inputs are"):
        list(optdnn.picture_answers(plain, small))
    cropped = _engine(preprocess={"x": {"resize": None, "crop": 12}})
    with pytest.raises(InputError, match="4x3 is smaller than the crop 12x12"):
        list(optdnn.picture_answers(cropped, small))
    exact = _engine(preprocess={"x": {"resize": None, "crop": None}}, shapes={"x": (1, *SIZE, 3)})
    with pytest.raises(InputError, match="has 30x40 pixels, the engine takes 30x20"):
        list(optdnn.picture_answers(exact, large))


def test_sizes_that_an_engine_takes_in_ranges(any_size: optdnn.Engine) -> None:
    from optdnn.types import TensorSpec

    tensor = TensorSpec("x", np.dtype(np.uint8), ("N", "h", 30, 3))
    profiles = tuple(
        {"N": optdnn.DimRange(1, n, 64), "h": optdnn.DimRange(low, low, low + 10)} for n, low in ((32, 20), (4, 50))
    )
    port = PicturePort(tensor, ImageSpec.of(SPEC), {}, profiles)
    assert port.usual_batch == 32
    assert [port.size_for((own, 99))[0] for own in (20, 25, 5, 35, 44, 70)] == [20, 25, 20, 30, 50, 60]
    assert PicturePort.of(any_size).size_for((7, 9)) == (7, 9)
    assert PicturePort.of(any_size).usual_batch == 8


@pytest.mark.parametrize(
    "account",
    [
        {"preprocess": {"x": {"resize": -1}}},
        {"preprocess": 3},
        {"postprocess": {"y": 3}},
        {"preprocess": {"x": "/etc/hostname"}},  # an engine names no files to read
        {"postprocess": {"y": {"labels": "/etc/hostname"}}},
    ],
)
def test_an_engine_whose_account_is_malformed(account: dict[str, Any]) -> None:
    engine = SimpleNamespace(meta={"options": account}, inputs=(), profiles=())
    with pytest.raises(EngineError, match="the engine's record of its pictures is malformed"):
        PicturePort.of(engine)  # type: ignore[arg-type]


def test_an_engine_that_is_not_on_the_gpu_counts_as_such_after_it_was_refused(
    one_size: optdnn.Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nvimgcodec, "installed", lambda: True)
    port = PicturePort.of(one_size)
    with pytest.raises(UsageError, match="which this one does not"):
        next(gpu_runs(one_size, port, write_pictures(tmp_path, [SIZE]), 1))
    assert not GpuPictures.usable(one_size, port)
