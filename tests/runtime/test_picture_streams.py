"""Pictures through engines: files decoded in threads or by nvImageCodec, and what is said of each."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from support.needs import why_no_hopper
from support.pictures import classifier, picture, write_pictures

import optdnn
from optdnn.answer_spec import AnswerSpec
from optdnn.errors import EngineError, InputError, MissingDependency, UsageError
from optdnn.image_spec import ImageSpec
from optdnn.runtime.pictures import nvimgcodec
from optdnn.runtime.pictures.files import Placement, decoded, placed
from optdnn.runtime.pictures.nvimgcodec import GpuPictures
from optdnn.runtime.pictures.port import PicturePort
from optdnn.types import Array

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
    """The network sees the same part of it as without: about the same picture."""
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
    centre = fitted[top + round(own[0] * place.scale[0] / 2), left + round(own[1] * place.scale[1] / 2)]
    assert np.abs(centre.astype(int) - smooth[own[0] // 2, own[1] // 2]).max() < 16


def test_boxes_are_of_the_whole_picture_though_the_engine_takes_one_size() -> None:
    from optdnn.answer_spec import AnswerSpec
    from optdnn.runtime.pictures.stream import _whole_picture

    place = Placement((100, 200), (0.5, 0.25), (10, 20))
    corners = np.float32([[20 + 5, 10 + 5, 20 + 25, 10 + 45]])
    got = _whole_picture(corners, AnswerSpec.of("boxes:xyxy"), place)
    np.testing.assert_array_equal(got, [[20, 10, 100, 90]])
    got = _whole_picture(np.float32([[20 + 15, 10 + 25, 20, 40]]), AnswerSpec.of("boxes:cxcywh"), place)
    np.testing.assert_array_equal(got, [[60, 50, 80, 80]])


def test_pictures_stand_upright_as_their_exif_data_say(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image", reason="the images extra is not installed")
    exif = image.Exif()
    exif[0x0112] = 6  # turn it a quarter to the right
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
    for size in (None, (224, 224)):  # 256 times as high and as wide, before anything is cropped
        with pytest.raises(InputError, match=r"line\.png is resized to \d+x256 pixels"):
            decoded(tmp_path / "line.png", ImageSpec(), size)
    (tmp_path / "eps.png").write_bytes(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\n")
    with pytest.raises(InputError, match="cannot be read as a picture: cannot identify"):
        decoded(tmp_path / "eps.png", ImageSpec())


def test_lists_are_sizes_and_axis_0_is_kept() -> None:
    assert ImageSpec(resize=[9, 8], crop=[8, 8], pad=[1, 2]) == ImageSpec(resize=(9, 8), crop=(8, 8), pad=(1, 2))  # type: ignore[arg-type]
    answer = AnswerSpec(argmax=True, axis=0)
    assert AnswerSpec.of(answer.to_plain()) == answer


def test_what_is_no_picture_and_what_takes_none(
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
    with pytest.raises(UsageError, match="does not take pictures, or not alone: its inputs are"):
        list(optdnn.picture_answers(plain, small))
    cropped = _engine(preprocess={"x": {"resize": None, "crop": 12}})
    with pytest.raises(InputError, match="4x3 is smaller than the crop 12x12"):
        list(optdnn.picture_answers(cropped, small))
    exact = _engine(preprocess={"x": {"resize": None, "crop": None}}, shapes={"x": (1, *SIZE, 3)})
    with pytest.raises(InputError, match="has 30x40 pixels, the engine takes 30x20"):
        list(optdnn.picture_answers(exact, large))


# ---------------------------------------------------------------- nvImageCodec, by stand-ins for it and for CuPy


class _Events(list[str]):
    """What was asked of the GPU, in order."""


class _Stream:
    """Records events: ``full K`` of batch K on those that decode every other batch, ``run K`` on the one that runs."""

    def __init__(self, log: _Events, name: str):
        self.log, self.name, self.ptr = log, name, hash(name)
        self.count, self.step = (0, 1) if name == "running" else (int(name[-1]), nvimgcodec.DECODERS)

    def __enter__(self) -> None: ...

    def __exit__(self, *error: object) -> None: ...

    def record(self) -> Any:
        name = f"{'run' if self.name == 'running' else 'full'} {self.count}"
        self.count += self.step
        self.log.append(name)
        return SimpleNamespace(name=name, synchronize=lambda: self.log.append(f"host waits for {name}"))

    def wait_event(self, event: Any) -> None:
        self.log.append(f"{self.name} waits for {event.name}")

    def synchronize(self) -> None:
        self.log.append(f"host waits for {self.name}")


class _Memory:
    """An array that passes for one on the GPU."""

    __cuda_array_interface__: dict[str, Any] = {}  # noqa: RUF012

    def __init__(self, array: Array):
        self.array, self.shape = array, array.shape
        self.data = SimpleNamespace(ptr=array.ctypes.data)

    def __getitem__(self, row: int) -> _Row:
        return _Row(self.array[row])


class _Row:
    """A row of it, as CuPy gives one."""

    def __init__(self, array: Array):
        self.array = array

    def __setitem__(self, all_of_it: object, value: Array) -> None:
        self.array[...] = value

    def set(self, array: Array) -> None:
        self.array[...] = array


class _Image:
    """A picture of the decoder's; ``padded``: its rows do not lie one behind the other."""

    def __init__(self, pixels: Array, padded: bool, stream: int, log: _Events):
        self.stream, self.log = stream, log
        self.hold(pixels, padded)

    def hold(self, pixels: Array, padded: bool) -> None:
        self.pixels = pixels
        strides = tuple(2 * n for n in pixels.strides) if padded else None
        table = {"data": (pixels.ctypes.data, False), "shape": pixels.shape, "strides": strides}
        self.__cuda_array_interface__ = table

    def __array__(self, dtype: object = None, copy: object = None) -> Array:
        return self.pixels

    def __del__(self) -> None:
        self.log.append("picture freed")


def _stand_ins(log: _Events, kept: list[_Memory]) -> tuple[Any, Any]:
    """nvImageCodec and CuPy."""
    names = iter(("decoding 0", "decoding 1", "running"))

    def empty(shape: Any, dtype: Any) -> Any:
        kept.append(_Memory(np.zeros(shape, dtype)))
        return kept[-1]

    def memcpy(to: int, source: int, count: int, kind: int, stream: int) -> None:
        assert kind == 3
        assert stream in map(hash, ("decoding 0", "decoding 1"))
        ctypes.memmove(to, source, count)

    runtime = SimpleNamespace(memcpyAsync=memcpy, getDevice=lambda: 0)
    cuda = SimpleNamespace(Stream=lambda non_blocking: _Stream(log, next(names)), runtime=runtime)
    cupy = SimpleNamespace(cuda=cuda, empty=empty, asarray=np.asarray, asnumpy=lambda a: a.array)

    class Code:
        def __init__(self, file: str):
            self.file, self.pixels = file, decoded(Path(file), ImageSpec())
            self.width = self.pixels.shape[1]

        @property
        def height(self) -> int:
            if self.file.endswith("bmp"):
                raise RuntimeError("Failed to get image info")
            return len(self.pixels)

    class Decoder:
        def __init__(self, max_num_cpu_threads: int):
            assert max_num_cpu_threads >= 1
            self.stream: int | None = None

        def decode(self, codes: Sequence[Code], *, params: Any, cuda_stream: int, images: Any = None) -> list[Any]:
            assert self.stream in (None, cuda_stream), "one stream for each decoder"
            self.stream = cuda_stream
            log.append(f"decoded {len(codes)} {params['sample_format']} {'again' if images else 'anew'}")
            for k, image in enumerate(images or ()):
                assert image.stream == cuda_stream
                image.hold(codes[k].pixels, k == 1)
            return images or [_Image(code.pixels, k == 1, cuda_stream, log) for k, code in enumerate(codes)]

    formats = SimpleNamespace(I_RGB="rgb", I_BGR="bgr")
    codec = SimpleNamespace(
        SampleFormat=formats, ColorSpec=SimpleNamespace(SRGB=1), DecodeParams=dict, Decoder=Decoder, CodeStream=Code
    )
    return codec, cupy


class _OnGpu:
    """An engine that says it is on a GPU, and computes in NumPy when its stream would."""

    takes_device_arrays = True

    def __init__(self, engine: optdnn.Engine, log: _Events):
        self.engine, self.log, self.target = engine, log, "cuda:sm_90a"
        self.meta, self.inputs, self.profiles = engine.meta, engine.inputs, engine.profiles

    def context(self) -> Any:
        return self

    def run(self, feeds: dict[str, Any], out: dict[str, Any], stream: _Stream) -> dict[str, Any]:
        assert stream.name == "running"
        self.log.append(f"ran, {'old' if out else 'new'} outputs")
        found = self.engine.run({n: a.array for n, a in feeds.items()})
        return {n: _Memory(a) for n, a in found.items()}


def test_the_gpu_decodes_a_batch_while_it_runs_the_one_before(one_size: optdnn.Engine, tmp_path: Path) -> None:
    """Order on the streams: a slot is filled when the run that read it has ended, and run when it is full."""
    paths = [*write_pictures(tmp_path, [SIZE] * 3 + [(40, 60)] + [SIZE] * 14)]
    other = write_pictures(tmp_path / "b", [SIZE], "bmp")
    log, kept = _Events(), list[_Memory]()
    engine: Any = _OnGpu(one_size, log)
    source = GpuPictures(engine, PicturePort.of(engine), *_stand_ins(log, kept))
    found = list(source.runs([*paths, *other], 3))
    assert [n for names, _, _ in found for n in names] == [str(p) for p in (*paths, *other)]
    assert source.by_cpu == 2
    assert len(kept) == nvimgcodec.SLOTS == 4
    assert [place.size for _, _, places in found for place in places][3] == (40, 60)
    want = [a.outputs["y"] for a in optdnn.picture_answers(one_size, [*paths, *other])]
    np.testing.assert_allclose(np.concatenate([r["y"][: len(names)] for names, r, _ in found]), want)
    happened = {text: at for at, text in enumerate(log)}
    for k in range(6):
        assert happened[f"running waits for full {k}"] > happened[f"full {k}"]
        assert happened[f"run {k}"] > happened[f"running waits for full {k}"]
        assert happened[f"host waits for run {k}"] > happened[f"run {k}"]
    for k in (4, 5):
        assert happened[f"full {k}"] > happened[f"decoding {k % 2} waits for run {k - 4}"] > happened[f"run {k - 4}"]
    assert happened["host waits for run 0"] > happened["run 1"], (
        "the host waits while the GPU has the next batch to run"
    )
    end = happened["host waits for decoding 1"]
    assert set(log[end + 1 :]) == {"picture freed"}, "pictures go before the stream that frees their memory"
    assert [text for text in log if text.startswith("ran")] == ["ran, new outputs"] * 4 + ["ran, old outputs"] * 3
    decoded_so = [text for text in log if text.startswith("decoded")]
    assert sorted(decoded_so) == ["decoded 2 rgb anew", "decoded 3 rgb again"] + ["decoded 3 rgb anew"] * 4


def test_engines_that_the_gpu_does_not_decode_for(
    one_size: optdnn.Engine, any_size: optdnn.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = _Events()
    libraries = _stand_ins(log, [])
    for engine, why in (
        (any_size, "takes pictures of several sizes"),
        (one_size, "for engines that run there, which this one does not"),
    ):
        with pytest.raises(UsageError, match=why):
            GpuPictures(engine, PicturePort.of(engine), *libraries)
        assert not GpuPictures.usable(engine, PicturePort.of(engine))
    chw = _engine(preprocess={"x": {**SPEC, "input": {"layout": "chw"}}}, shapes={"x": (1, 3, *SIZE)})
    with pytest.raises(UsageError, match="the engine takes RGB in chw and uint8"):
        GpuPictures(chw, PicturePort.of(chw), *libraries)
    monkeypatch.setitem(sys.modules, "nvidia", None)
    on_gpu: Any = _OnGpu(one_size, log)
    with pytest.raises(MissingDependency, match=r"pip install 'optdnn\[images-gpu\]'"):
        GpuPictures(on_gpu, PicturePort.of(on_gpu))


def test_decoders_are_used_again_but_not_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    codec = SimpleNamespace(Decoder=lambda max_num_cpu_threads: object())
    monkeypatch.setitem(sys.modules, "nvidia.nvimgcodec", codec)
    monkeypatch.setattr(nvimgcodec, "_idle", {})
    with nvimgcodec._decoder(codec, 0) as first, nvimgcodec._decoder(codec, 0) as second:
        assert first is not second
    with nvimgcodec._decoder(codec, 1) as elsewhere, nvimgcodec._decoder(codec, 0) as again:
        assert again in (first, second)
        assert elsewhere not in (first, second)
    with pytest.raises(ValueError, match="damaged"), nvimgcodec._decoder(codec, 1):
        raise ValueError("damaged")
    assert nvimgcodec._idle[1] == [], "what failed is not used again"


@pytest.mark.gpu
@pytest.mark.skipif(why_no_hopper() is not None, reason=why_no_hopper() or "")
def test_nvimgcodec_decodes_into_the_engine(tmp_path: Path) -> None:
    """The real one: JPEGs of nvJPEG are within a few levels of libjpeg's, so that the best class and its number agree."""
    pytest.importorskip("nvidia.nvimgcodec", reason="the images-gpu extra is not installed")
    sizes = [(375, 500)] * 9 + [(200, 300)]
    paths = write_pictures(tmp_path, sizes, "jpg")
    spec = {"resize": 64, "crop": 56}
    engine = optdnn.build(
        classifier(), target="cuda", precision="fp16", tactics="heuristic", preprocess={"x": spec},
        postprocess={"y": "softmax"}, shapes={"x": (4, 375, 500, 3)},
    )  # fmt: skip
    port = PicturePort.of(engine)
    assert GpuPictures.usable(engine, port)
    source = GpuPictures(engine, port)
    got = np.concatenate([r["y"][: len(names)] for names, r, _ in source.runs(paths, 4)])
    want = np.stack([a.outputs["y"] for a in optdnn.picture_answers(engine, paths, decoder="cpu")])
    assert source.by_cpu == 1
    np.testing.assert_allclose(got, want, atol=0.03)
    assert np.abs(want - want[0]).max() > 0.1


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
    with pytest.raises(EngineError, match="the engine's account of its pictures is malformed"):
        PicturePort.of(engine)  # type: ignore[arg-type]
