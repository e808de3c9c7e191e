"""Pictures decoded on the GPU: with stand-ins for nvJPEG, nvImageCodec and CuPy, and with the real ones on a GPU."""

from __future__ import annotations

import ctypes
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from support.pictures import classifier, picture, write_pictures

import optdnn
from optdnn.errors import InputError, MissingDependency, UsageError
from optdnn.image_spec import ImageSpec
from optdnn.runtime.pictures import nvimgcodec, on_gpu
from optdnn.runtime.pictures.contents import METADATA, Contents, Span
from optdnn.runtime.pictures.files import Size, decoded
from optdnn.runtime.pictures.on_gpu import GpuPictures
from optdnn.runtime.pictures.port import PicturePort
from optdnn.types import Array

SPEC = {"resize": 14, "crop": 12}
SIZE = (20, 30)


def _engine(**options: Any) -> optdnn.Engine:
    made = {"preprocess": {"x": SPEC}, "postprocess": {"y": "softmax"}, "shapes": {"x": (3, *SIZE, 3)}}
    return optdnn.build(classifier(), target="reference", **{**made, **options})


@pytest.fixture(scope="module")
def one_size() -> optdnn.Engine:
    return _engine()


class _Log(list[str]):
    """The calls to the GPU, in order."""


class _Event:
    """An event that records the earlier work of its stream."""

    name = ""

    def __init__(self, log: _Log):
        self.log = log

    def record(self, stream: _Stream) -> None:
        self.name = stream.last

    def synchronize(self) -> None:
        self.log.append(f"waited for {self.name}")


class _Stream:
    def __init__(self, log: _Log):
        self.log, self.ptr, self.last = log, id(self), ""

    def __enter__(self) -> None: ...

    def __exit__(self, *error: object) -> None: ...

    def record(self, event: _Event) -> _Event:
        event.record(self)
        return event

    def synchronize(self) -> None:
        self.log.append("waited for a stream")


class _Memory:
    """An array that counts as one on the GPU."""

    __cuda_array_interface__: dict[str, Any] = {}  # noqa: RUF012

    def __init__(self, array: Array):
        self.array, self.shape = array, array.shape
        self.data = SimpleNamespace(ptr=array.ctypes.data)

    def __getitem__(self, row: int) -> _Row:
        return _Row(self.array[row])


class _Row:
    """A row of the array, like CuPy's."""

    def __init__(self, array: Array):
        self.array = array

    def __setitem__(self, all_of_it: object, value: Array) -> None:
        self.array[...] = value

    def set(self, array: Array) -> None:
        self.array[...] = array


class _Image:
    """A picture of nvImageCodec. ``padded``: there is space between its lines."""

    def __init__(self, pixels: Array, padded: bool):
        self.hold(pixels, padded)

    def hold(self, pixels: Array, padded: bool) -> None:
        self.pixels = pixels
        strides = tuple(2 * n for n in pixels.strides) if padded else None
        self.__cuda_array_interface__ = {"data": (pixels.ctypes.data, False), "shape": pixels.shape, "strides": strides}

    def __array__(self, dtype: object = None, copy: object = None) -> Array:
        return self.pixels


class _Engines:
    """JPEG engines that accept PNG files. ``fails``: they refuse to decode."""

    def __init__(self, libraries: _Libraries, order: int, fails: bool):
        self.libraries, self.order, self.fails, self.closed, self.thread = libraries, order, fails, False, 0

    def takes(self, file: Span, size: Size) -> bool:
        data = ctypes.string_at(*file)
        return data[1:4] == b"PNG" and decoded(data, ImageSpec()).shape[:2] == size

    def decode(self, files: Sequence[Span], rows: Sequence[int], pitch: int, stream: int) -> bool:
        assert not self.closed
        if self.fails:
            return False
        for file, row in zip(files, rows, strict=True):
            pixels = decoded(ctypes.string_at(*file), ImageSpec())
            assert pixels.strides[0] == pitch
            ctypes.memmove(row, pixels.ctypes.data, pixels.nbytes)
        self.libraries.log.append(f"wrote {self.libraries.slot(rows[0])}")
        return True

    def close(self) -> None:
        self.closed = True


class _Libraries:
    """Stand-ins for CuPy, nvImageCodec and nvJPEG."""

    def __init__(self, *, engines: bool = True, fails: bool = False):
        self.log, self.kept, self.streams, self.made = _Log(), list[_Memory](), list[_Stream](), list[_Engines]()
        runtime = SimpleNamespace(memcpyAsync=self._memcpy, getDevice=lambda: 0)
        cuda = SimpleNamespace(
            Stream=self._stream, Event=lambda block, disable_timing: _Event(self.log), runtime=runtime,
            Device=lambda number: SimpleNamespace(use=lambda: None),
        )  # fmt: skip
        self.cupy = SimpleNamespace(cuda=cuda, empty=self._empty, asarray=np.asarray, asnumpy=lambda a: a.array)
        formats = SimpleNamespace(I_RGB="rgb", I_BGR="bgr")
        self.codec = SimpleNamespace(
            SampleFormat=formats, ColorSpec=SimpleNamespace(SRGB=1), DecodeParams=dict, CodeStream=_code,
            Decoder=self._decoder,
        )  # fmt: skip
        self.here, self.fails, self.decoders = engines, fails, 0
        self.jpeg = SimpleNamespace(here=self._engines)

    def slot(self, address: int) -> int:
        """The number of the memory that contains an address."""
        return next(k for k, m in enumerate(self.kept) if 0 <= address - m.data.ptr < m.array.nbytes)

    def _stream(self, non_blocking: bool) -> _Stream:
        self.streams.append(_Stream(self.log))
        return self.streams[-1]

    def _empty(self, shape: Any, dtype: Any) -> _Memory:
        self.kept.append(_Memory(np.zeros(shape, dtype)))
        return self.kept[-1]

    def _memcpy(self, to: int, source: int, count: int, kind: int, stream: int) -> None:
        assert kind == 3
        assert stream in [s.ptr for s in self.streams]
        ctypes.memmove(to, source, count)

    def _engines(self, order: int) -> _Engines | None:
        if not self.here:
            return None
        self.made.append(_Engines(self, order, self.fails))
        return self.made[-1]

    def _decoder(self, max_num_cpu_threads: int) -> Any:
        assert max_num_cpu_threads >= 1
        self.decoders += 1
        streams = set()

        def decode(codes: Sequence[Any], *, params: Any, cuda_stream: int, images: Any = None) -> list[Any]:
            streams.add(cuda_stream)
            assert len(streams) == 1, "one stream for each decoder"
            self.log.append(f"nvImageCodec {len(codes)} {params['sample_format']} {'again' if images else 'anew'}")
            for k, image in enumerate(images or ()):
                image.hold(codes[k].pixels, k == 1)
            return images or [_Image(code.pixels, k == 1) for k, code in enumerate(codes)]

        return SimpleNamespace(decode=decode)


def _code(file: str | bytes) -> Any:
    """A parsed head of files other than BMP."""
    data = file if isinstance(file, bytes) else Path(file).read_bytes() if Path(file).exists() else b""
    if data[:2] in (b"", b"BM"):
        raise RuntimeError("Failed to get image info")
    pixels = decoded(data, ImageSpec())
    return SimpleNamespace(pixels=pixels, height=pixels.shape[0], width=pixels.shape[1])


class _OnGpu:
    """An engine that counts as one on a GPU, and computes with NumPy when its stream would."""

    takes_device_arrays = True

    def __init__(self, engine: optdnn.Engine, libraries: _Libraries):
        self.engine, self.libraries, self.target, self.runs = engine, libraries, "cuda:sm_90a", 0
        self.meta, self.inputs, self.profiles = engine.meta, engine.inputs, engine.profiles
        self.program, self.contexts = engine.program, 0

    def context(self) -> Any:
        self.contexts += 1
        return self

    def run(self, feeds: dict[str, Any], out: dict[str, Any], stream: _Stream) -> dict[str, Any]:
        (feed,) = feeds.values()
        self.libraries.log.append(f"ran {self.libraries.slot(feed.data.ptr)}, {'old' if out else 'new'} outputs")
        stream.last, self.runs = f"run {self.runs}", self.runs + 1
        return {n: _Memory(a) for n, a in self.engine.run({n: a.array for n, a in feeds.items()}).items()}


def _source(engine: optdnn.Engine, libraries: _Libraries) -> GpuPictures:
    made: Any = _OnGpu(engine, libraries)
    return GpuPictures(made, PicturePort.of(made), libraries.codec, libraries.cupy, libraries.jpeg)


def test_a_slot_is_written_when_the_run_that_read_it_has_ended(one_size: optdnn.Engine, tmp_path: Path) -> None:
    """The JPEG engines write immediately, whatever a stream waits for. So the host must have waited for the run."""
    batches = 2 * on_gpu.SLOTS + 3
    paths = write_pictures(tmp_path, [SIZE] * (3 * batches - 1))
    libraries = _Libraries()
    source = _source(one_size, libraries)
    found = list(source.runs(paths, 3))
    assert [n for names, _, _ in found for n in names] == [str(p) for p in paths]
    want = [a.outputs["y"] for a in optdnn.picture_answers(one_size, paths)]
    np.testing.assert_allclose(np.concatenate([r["y"][: len(names)] for names, r, _ in found]), want)
    assert (source.by_cpu, libraries.decoders, len(libraries.kept)) == (0, 0, on_gpu.SLOTS)
    at = {text: k for k, text in reversed([*enumerate(libraries.log)])}
    written = [[k for k, text in enumerate(libraries.log) if text == f"wrote {s}"] for s in range(on_gpu.SLOTS)]
    ran = [k for k, text in enumerate(libraries.log) if text.startswith("ran ")]
    for k in range(batches):
        wrote = written[k % on_gpu.SLOTS][k // on_gpu.SLOTS]
        assert wrote < ran[k]
        if k >= on_gpu.SLOTS:
            assert ran[k - on_gpu.SLOTS] < at[f"waited for run {k - on_gpu.SLOTS}"] < wrote
    assert at["waited for run 0"] > ran[0]
    texts = [text.rpartition(", ")[2] for text in libraries.log if text.startswith("ran ")]
    assert texts == ["new outputs"] * on_gpu.SLOTS + ["old outputs"] * (batches - on_gpu.SLOTS)


def test_the_decoder_of_an_engine_is_kept_for_the_next_call(
    one_size: optdnn.Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths, libraries = write_pictures(tmp_path, [SIZE] * 20), _Libraries()
    made: Any = _OnGpu(one_size, libraries)
    port, given = PicturePort.of(made), (libraries.codec, libraries.cupy, libraries.jpeg)
    monkeypatch.setattr(on_gpu, "GpuPictures", lambda *of: GpuPictures(*of, *given))

    def answers(batches: int) -> Any:
        return np.concatenate([r["y"] for _, r, _ in on_gpu.gpu_runs(made, port, paths[: 3 * batches], 3)])

    want = [a.outputs["y"] for a in optdnn.picture_answers(one_size, paths[:18])]
    np.testing.assert_allclose(answers(2), want[:6])
    np.testing.assert_allclose(answers(6), want)
    assert (made.contexts, len(libraries.kept)) == (1, on_gpu.SLOTS)  # the second call adds to the memory of the first
    next(left := on_gpu.gpu_runs(made, port, paths, 3))
    answers(1)  # while another call is in progress
    assert made.contexts == 2
    left.close()  # its runs may still be in progress: it is not kept
    made.program = object()  # a refit
    np.testing.assert_allclose(answers(6), want)
    assert made.contexts == 3
    assert [p.program for p in on_gpu._ready[made]] == [made.program]


def test_each_picture_goes_to_the_first_decoder_that_takes_it(one_size: optdnn.Engine, tmp_path: Path) -> None:
    jpegs = write_pictures(tmp_path / "j", [SIZE] * 4, "jpg")
    pngs = write_pictures(tmp_path / "p", [SIZE] * 3 + [(40, 60)])
    (bmp,) = write_pictures(tmp_path / "b", [SIZE], "bmp")
    paths = [pngs[0], jpegs[0], bmp, jpegs[1], pngs[1].read_bytes(), pngs[3], jpegs[2], jpegs[3], pngs[2]]
    libraries = _Libraries()
    source = _source(one_size, libraries)
    found = list(source.runs(paths, 3))
    assert source.by_cpu == 2
    want = [a.outputs["y"] for a in optdnn.picture_answers(one_size, paths)]
    np.testing.assert_allclose(np.concatenate([r["y"] for _, r, _ in found]), want)
    assert [place.size for _, _, places in found for place in places].count((40, 60)) == 1
    assert found[1][0][1] == "picture 4"
    assert sum(text.startswith("wrote") for text in libraries.log) == 3
    assert sum(text.startswith("nvImageCodec") for text in libraries.log) == 3


@pytest.mark.parametrize("libraries", [_Libraries(engines=False), _Libraries(fails=True)], ids=["none", "failing"])
def test_nvimagecodec_decodes_where_the_engines_do_not(
    libraries: _Libraries, one_size: optdnn.Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(on_gpu, "LINES", 1)
    paths = write_pictures(tmp_path, [SIZE] * 7)
    found = list(_source(one_size, libraries).runs(paths, 3))
    want = [a.outputs["y"] for a in optdnn.picture_answers(one_size, paths)]
    np.testing.assert_allclose(np.concatenate([r["y"][: len(names)] for names, r, _ in found]), want)
    used = [text for text in libraries.log if text.startswith("nvImageCodec")]
    assert used == ["nvImageCodec 3 rgb anew", "nvImageCodec 3 rgb again", "nvImageCodec 1 rgb anew"]
    bgr = _engine(preprocess={"x": {**SPEC, "input": {"color": "BGR"}}})
    libraries.log.clear()
    list(_source(bgr, libraries).runs(paths[:1], 3))
    assert "nvImageCodec 1 bgr anew" in libraries.log


def test_a_broken_file_is_named_and_lines_are_used_again_only_where_none_failed(
    one_size: optdnn.Engine, tmp_path: Path
) -> None:
    paths = write_pictures(tmp_path, [SIZE] * 9)
    libraries = _Libraries()
    source = _source(one_size, libraries)
    list(source.runs(paths, 3))
    list(source.runs(paths, 3))
    assert len(libraries.made) == on_gpu.LINES == len(source.idle[0, "RGB"])
    paths[4].write_bytes(b"BM, and no more")
    with pytest.raises(InputError, match=r"4\.png cannot be read as a picture"):
        list(source.runs(paths, 3))
    assert source.idle[0, "RGB"] == []
    assert all(engines.closed for engines in libraries.made)
    with pytest.raises(InputError, match=r"gone\.png"):
        list(source.runs([tmp_path / "gone.png"], 3))
    made, kept, source = len(libraries.made), len(libraries.kept), _source(one_size, libraries)
    assert list(source.runs([], 3)) == []
    assert len(list(source.runs(paths[:4], 3))) == 2
    assert (len(libraries.made) - made, len(libraries.kept) - kept) == (2, 2), "no more than there are batches"


def test_jpegs_that_only_libjpeg_decodes_right_go_to_the_cpu(one_size: optdnn.Engine, tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image", reason="the images extra is not installed")
    paths = write_pictures(tmp_path, [SIZE] * 3, "jpg")
    image.fromarray(picture(SIZE, 1)).save(paths[1], keep_rgb=True)
    libraries = _Libraries()
    source = _source(one_size, libraries)
    list(source.runs(paths, 3))
    assert source.by_cpu == 1
    assert [text for text in libraries.log if text.startswith("nvImageCodec")] == ["nvImageCodec 2 rgb anew"]
    paths[2].write_bytes(paths[2].read_bytes()[:-40])
    with pytest.raises(InputError, match=r"2\.jpg cannot be read as a picture: .*truncated"):
        list(source.runs(paths, 3))


def test_one_who_stops_early_leaves_no_thread(one_size: optdnn.Engine, tmp_path: Path) -> None:
    source = _source(one_size, _Libraries()).runs(write_pictures(tmp_path, [SIZE] * 60), 3)
    next(iter(source))
    source.close()  # type: ignore[attr-defined]
    assert not [t for t in threading.enumerate() if t.name.startswith("optdnn-decode")]


@pytest.mark.parametrize("slow", [False, True])
def test_one_line_reads_at_a_time_but_none_waits_long(
    slow: bool, one_size: optdnn.Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several lines read from slow storage concurrently."""
    paths, reading, most = write_pictures(tmp_path, [SIZE] * 30), [], []
    read = Contents.read

    def watched(self: Contents, *arguments: Any) -> list[Span]:
        reading.append(self)
        most.append(len(reading))
        time.sleep(0.1 if slow else 0.002)
        reading.remove(self)
        return read(self, *arguments)

    monkeypatch.setattr(Contents, "read", watched)
    monkeypatch.setattr(on_gpu, "PATIENCE", 0.001 if slow else 60)
    assert len(list(_source(one_size, _Libraries()).runs(paths, 3))) == 10
    assert (max(most) > 1) == slow


def test_contents_are_in_memory_that_grows_and_files_that_are_too_large_are_not_read(tmp_path: Path) -> None:
    held, long = Contents(), bytes(range(256)) * (METADATA // 200)
    for name, data in (("a", b"12345"), ("b", long), ("c", b"")):
        (tmp_path / name).write_bytes(data)
    files = [tmp_path / "a", long, tmp_path / "b", tmp_path / "none", tmp_path, tmp_path / "c", b"67"]
    for _ in range(2):
        got = [ctypes.string_at(*span) for span in held.read(files, len(long))]
        assert got == [b"12345", long, long, b"", b"", b"", b"67"]
    assert [length for _, length in held.read(files, 5)] == [5, len(long), 0, 0, 0, 0, 2]
    assert len(held.memory) < 12 * len(long)


def test_engines_that_the_gpu_does_not_decode_for(one_size: optdnn.Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    any_size = _engine(shapes={})
    for engine, why in (
        (any_size, "takes pictures of several sizes"),
        (one_size, "for engines that run there, which this one does not"),
    ):
        with pytest.raises(UsageError, match=why):
            GpuPictures(engine, PicturePort.of(engine), object(), object())
        assert not GpuPictures.usable(engine, PicturePort.of(engine))
    chw = _engine(preprocess={"x": {**SPEC, "input": {"layout": "chw"}}}, shapes={"x": (1, 3, *SIZE)})
    with pytest.raises(UsageError, match="the engine takes RGB in chw and uint8"):
        GpuPictures(chw, PicturePort.of(chw), object(), object())
    monkeypatch.setitem(sys.modules, "nvidia", None)
    made: Any = _OnGpu(one_size, _Libraries())
    with pytest.raises(MissingDependency, match=r"pip install 'optdnn\[images-gpu\]'"):
        GpuPictures(made, PicturePort.of(made))
    assert not nvimgcodec.installed()


# ---------------------------------------------------------------- on a GPU


@pytest.mark.hopper
def test_jpegs_are_decoded_into_the_engine(tmp_path: Path) -> None:
    """nvJPEG's pixels are within a few levels of libjpeg's, so the best class and its number agree."""
    pytest.importorskip("nvidia.nvimgcodec", reason="the images-gpu extra is not installed")
    image = pytest.importorskip("PIL.Image", reason="the images extra is not installed")
    size = (375, 500)
    paths = write_pictures(tmp_path, [size] * 25 + [(200, 300)], "jpg")
    pixels = [image.fromarray(picture(size, k)) for k in range(5)]
    exif = image.Exif()
    exif[0x0112] = 3  # upside down
    pixels[0].save(paths[3], progressive=True)
    pixels[1].convert("L").save(paths[5])
    pixels[2].save(paths[7], exif=exif)
    pixels[3].convert("CMYK").save(paths[9])
    pixels[4].save(paths[11], subsampling=0, quality=95)
    pixels[4].save(paths[13], keep_rgb=True)
    spec = {"resize": 64, "crop": 56}
    engine = optdnn.build(
        classifier(), target="cuda", precision="fp16", tactics="heuristic", preprocess={"x": spec},
        postprocess={"y": "softmax"}, shapes={"x": (4, *size, 3)},
    )  # fmt: skip
    port = PicturePort.of(engine)
    assert GpuPictures.usable(engine, port)
    source = GpuPictures(engine, port)
    kept = [[a.outputs["y"] for a in optdnn.picture_answers(engine, paths, decoder="gpu")] for _ in range(3)]
    assert len(on_gpu._ready[engine]) == 1
    np.testing.assert_array_equal(kept[1:], [kept[0]] * 2)
    for _ in range(2):
        got = np.concatenate([r["y"][: len(names)] for names, r, _ in source.runs(paths, 4)])
        want = np.stack([a.outputs["y"] for a in optdnn.picture_answers(engine, paths, decoder="cpu")])
        np.testing.assert_allclose(got, want, atol=0.03)
    assert np.abs(want - want[0]).max() > 0.1
