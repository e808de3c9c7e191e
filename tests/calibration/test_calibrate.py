"""Calibrating a graph: sources of data, agreement with ONNX Runtime's calibrators, the cache, and refusals."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.net import Net

from optdnn.calibration import calibrate
from optdnn.calibration.cache import Extremes
from optdnn.calibration.data import BATCH, open_data
from optdnn.calibration.images import ImageSpec
from optdnn.dim import symbol
from optdnn.errors import InputError, OutputError, UsageError
from optdnn.ir.export_onnx import export_model
from optdnn.ir.graph import Graph
from optdnn.types import Array, TensorSpec

pytest.importorskip("onnxruntime", reason="the cpu extra is not installed")


def net(batch: Any = 2) -> Graph:
    n = Net()
    x = n.op("Relu", n.conv(n.input(batch, 3, 6, 6), 4, bias=True))
    return n.done(n.op("GlobalAveragePool", n.conv(x, 5)))


def pictures(count: int = 8, seed: int = 0) -> Array:
    return np.random.default_rng(seed).standard_normal((count, 3, 6, 6)).astype(np.float32)


class Reader:
    """ONNX Runtime's interface for calibration data."""

    def __init__(self, x: Array, batch: int):
        self.batches = iter([{"x": x[i : i + batch]} for i in range(0, len(x), batch)])

    def get_next(self) -> Any:
        return next(self.batches, None)


@pytest.mark.parametrize("method", ["minmax", "percentile", "entropy"])
def test_ranges_agree_with_onnx_runtime(method: str, tmp_path: Path) -> None:
    from onnxruntime.quantization.calibrate import CalibrationMethod, create_calibrator

    graph, x = net(), pictures()
    export_model(graph).save(tmp_path / "m.onnx")
    ways = {"minmax": ("MinMax", {}), "percentile": ("Percentile", {"symmetric": False, "num_bins": 512}),
            "entropy": ("Entropy", {"num_bins": 512})}  # fmt: skip
    name, options = ways[method]
    theirs = create_calibrator(
        str(tmp_path / "m.onnx"),
        augmented_model_path=str(tmp_path / "augmented.onnx"),
        calibrate_method=getattr(CalibrationMethod, name),
        extra_options=options,
    )
    theirs.collect_data(Reader(x, 2))
    found = calibrate(graph, {"x": x}, method, bins=512)
    wanted = {n: d.range_value for n, d in theirs.compute_data().items()}
    assert {"x", "Relu_2", "Conv_3"} <= wanted.keys()
    for value, (low, high) in wanted.items():
        if value in found.ranges:
            assert found.ranges[value].low == pytest.approx(np.min(low), rel=1e-5, abs=1e-7), value
            assert found.ranges[value].high == pytest.approx(np.max(high), rel=1e-5, abs=1e-7), value
    assert found.ranges.keys() >= {"x", "Conv_1", "Relu_2", "Conv_3"}
    assert found.samples == 4


@pytest.mark.slow
def test_every_source_gives_the_same(tmp_path: Path) -> None:
    graph, x = net(), pictures()
    np.savez(tmp_path / "a.npz", x=x, labels=np.arange(8))
    np.savez(tmp_path / "b.npz", anything=x)
    np.save(tmp_path / "a.npy", x)
    parts = [x[i : i + 2] for i in range(0, 8, 2)]

    def made() -> Iterator[dict[str, Array]]:
        return iter([{"x": p} for p in parts])

    sources: list[Any] = [
        *(str(tmp_path / f) for f in ("a.npz", "b.npz", "a.npy")),
        *(x, {"x": x}, parts, [{"x": p} for p in parts], made, made(), (p for p in parts)),
    ]
    found = [calibrate(graph, s, "entropy", bins=256) for s in sources]
    assert all(f.ranges == found[0].ranges for f in found)
    assert all(f.samples == 4 for f in found)


def test_the_order_of_batches_does_not_matter() -> None:
    graph, x = net_symbolic(), pictures(20)
    assert calibrate(graph, x, "mse").ranges == calibrate(graph, x[::-1], "mse").ranges


def net_symbolic() -> Graph:
    return net(symbol("N"))


def test_a_symbolic_batch_takes_all_samples() -> None:
    found = open_data(pictures(BATCH * 2 + 3), [TensorSpec("x", np.dtype(np.float32), ("N", 3, 6, 6))])
    assert [len(b["x"]) for b in found.batches()] == [BATCH, BATCH, 3]
    assert calibrate(net_symbolic(), pictures(11), "minmax").samples == 2


def test_channels_and_means() -> None:
    x = pictures()
    found = calibrate(net(), x, "minmax")
    np.testing.assert_allclose(found.channels["x"], np.abs(x).max(axis=(0, 2, 3)), rtol=1e-6)
    np.testing.assert_allclose(found.means["x"], x.mean(axis=(0, 2, 3)), rtol=1e-4, atol=1e-6)


def test_without_a_library_numpy_runs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    fast = calibrate(net(), pictures(4), "minmax")
    monkeypatch.setattr("optdnn.lowering.cpu.library.Library.version", lambda self: None)
    slow = calibrate(net(), pictures(4), "minmax")
    for name, r in fast.ranges.items():
        assert slow.ranges[name].high == pytest.approx(r.high, rel=1e-4)


# ---------------------------------------------------------------- pictures


def test_a_folder_of_pictures(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image", reason="the images extra is not installed")
    rng = np.random.default_rng(0)
    for k in range(4):
        image.fromarray(rng.integers(0, 256, (9 + k, 12, 3), dtype=np.uint8)).save(tmp_path / f"{k}.png")
    (tmp_path / "notes.txt").write_text("no picture")
    spec = ImageSpec(resize=8, crop=6, mean=(0.5,), std=(0.25,))
    found = calibrate(net(), tmp_path, "minmax", images=spec)
    assert found.samples == 2
    assert -2 <= found.ranges["x"].low < -1
    assert 1 < found.ranges["x"].high <= 2
    with pytest.raises(
        InputError, match=r"the array has shape .*224\]\n  hint: say how pictures are prepared: --images"
    ):
        calibrate(net(), tmp_path, "minmax")
    (tmp_path / "9.png").write_bytes(b"no picture")
    with pytest.raises(InputError, match=r"9\.png cannot be read as a picture"):
        list(open_data(tmp_path, [TensorSpec("x", np.dtype(np.float32), (5, 3, 6, 6))], spec).batches())
    with pytest.raises(InputError, match=r"the array has shape \[2, 3, 8, 8\]"):
        calibrate(net(), tmp_path, "minmax", images=ImageSpec(resize=(8, 8), crop=None))


def test_one_pixel_is_prepared_as_the_spec_says(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image", reason="the images extra is not installed")
    image.fromarray(np.array([[[10, 20, 30]]], np.uint8)).save(tmp_path / "p.png")
    from optdnn.calibration.images import read_image

    spec = ImageSpec.read('{"resize": null, "crop": null, "color": "BGR", "scale": 1, "mean": [1, 2, 3], "std": [2]}')
    np.testing.assert_array_equal(read_image(tmp_path / "p.png", spec).reshape(-1), [14.5, 9.0, 3.5])
    hwc = ImageSpec(resize=None, crop=None, scale=1.0, mean=(0.0,), std=(1.0,), layout="hwc")
    assert read_image(tmp_path / "p.png", hwc).shape == (1, 1, 3)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ('{"size": 3}', "has no size"),
        ("[1]", "must be an object|neither JSON"),
        ('{"std": [0]}', "std must not be zero"),
        ('{"mean": [1, 2]}', "does not fit 3 channels"),
        ('{"color": "CMYK"}', "is not RGB"),
        ('{"layout": "nchw"}', "is not chw or hwc"),
        ("nowhere.json", "neither JSON nor a file"),
        ('{"resize": "abc"}', "resize 'abc' is not a positive whole number"),
        ('{"resize": 17.0}', "resize 17.0 is not"),
        ('{"resize": -4}', "resize -4 is not"),
        ('{"resize": true}', "resize True is not"),
        ('{"crop": 0}', "crop 0 is not"),
        ('{"crop": [1, 2, 3]}', r"crop \(1, 2, 3\) is not"),
        ('{"scale": "x"}', "scale 'x' is not a finite number"),
        ('{"scale": 0}', "scale 0 is not"),
        ('{"std": ["a"]}', "is not a finite number, or one for each channel"),
        ('{"std": NaN}', "std nan is not"),
        ('{"mean": []}', "does not fit 3 channels"),
    ],
)
def test_preprocessing_that_makes_no_sense(text: str, why: str) -> None:
    with pytest.raises(UsageError, match=why):
        ImageSpec.read(text)


def test_one_number_is_for_all_channels() -> None:
    spec = ImageSpec.read('{"mean": 0.5, "std": 2, "scale": 1}')
    assert (spec.mean, spec.std, spec.scale) == ((0.5,), (2,), 1)


@pytest.mark.filterwarnings("ignore:.*Truncated File Read")
def test_a_damaged_picture_is_named(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image", reason="the images extra is not installed")
    from optdnn.calibration.images import read_image

    rng = np.random.default_rng(0)
    said: list[str] = []
    for kind in ("png", "jpeg", "gif", "bmp", "tiff", "webp"):
        path = tmp_path / f"p.{kind}"
        image.fromarray(rng.integers(0, 256, (9, 12, 3), dtype=np.uint8)).save(path)
        whole = path.read_bytes()
        for end in range(0, len(whole), 23):
            changed = bytearray(whole)
            changed[end] ^= 0xFF
            for blob in (whole[:end], bytes(changed)):
                path.write_bytes(blob)
                try:
                    read_image(path, ImageSpec(resize=8, crop=6))
                except InputError as error:
                    said.append(str(error))
    assert len(said) > 50
    assert all(str(tmp_path / "p.") in text for text in said)


# ---------------------------------------------------------------- the cache


def test_the_cache_spares_the_work_and_is_readable(tmp_path: Path) -> None:
    graph, x, cache = net(), pictures(), tmp_path / "c.json"
    said: list[str] = []
    first = calibrate(graph, x, "entropy", cache=cache)
    again = calibrate(graph, x, "entropy", cache=cache, progress=said.append)
    assert said == ["calibration from the cache"]
    assert again.ranges == first.ranges
    np.testing.assert_array_equal(again.means["x"], first.means["x"])
    plain = json.loads(cache.read_text())
    assert plain["entries"][0]["result"]["ranges"]["x"] == [first.ranges["x"].low, first.ranges["x"].high]
    # Another method, other data and another graph are calibrated again.
    assert calibrate(graph, x, "minmax", cache=cache).ranges != first.ranges
    assert calibrate(graph, pictures(seed=1), "minmax", cache=cache).ranges["x"] != first.seen["x"]


@pytest.mark.slow
def test_an_interrupted_calibration_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("optdnn.calibration.run.SAVE_SECONDS", 0.0)
    graph, x, cache = net(), pictures(), tmp_path / "c.json"
    for stop in (3, 6):
        seen: list[str] = []

        def interrupt(text: str, seen: list[str] = seen, stop: int = stop) -> None:
            seen.append(text)
            if len(seen) == stop:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            calibrate(graph, x, "entropy", cache=cache, progress=interrupt)
    said: list[str] = []
    found = calibrate(graph, x, "entropy", cache=cache, progress=said.append)
    # Two batches were done, then two and three: three are left of the eight.
    assert said == [f"calibrate: histograms, batch {k} of 4" for k in (4,)]
    assert found.ranges == calibrate(graph, x, "entropy").ranges
    np.testing.assert_allclose(found.means["x"], calibrate(graph, x, "entropy").means["x"])


def test_other_files_are_not_taken_for_a_cache(tmp_path: Path) -> None:
    path = tmp_path / "c.json"
    for text in ("{", "{}", "[]"):
        path.write_text(text)
        with pytest.raises(UsageError, match="is not a calibration cache"):
            calibrate(net(), pictures(), "minmax", cache=path)
        assert path.read_text() == text
    with pytest.raises(OutputError):
        calibrate(net(), pictures(), "minmax", cache=tmp_path / "no" / "where.json")


INFINITE, HUGE = float("inf"), 10**400
DAMAGE: dict[str, tuple[str, tuple[str, ...], Any]] = {
    "an infinite range": ("result", ("ranges", "x"), [0, INFINITE]),
    "a number that is too large": ("result", ("seen", "x"), [0, HUGE]),
    "infinitely many samples": ("result", ("samples",), INFINITE),
    "channels in a table": ("result", ("channels", "x"), [[1.0]]),
    "no extremes": ("progress", ("extremes", "table", "x"), [1]),
    "an infinite element": ("progress", ("extremes", "table", "x", "high"), INFINITE),
    "sums of other channels": ("progress", ("extremes", "table", "x", "sum"), [1.0]),
    "a text for a number": ("progress", ("extremes", "table", "x", "number"), "x"),
    "negative counts": ("progress", ("counts", "table", "x"), [-1] * 2048),
    "counts of other bins": ("progress", ("counts", "table", "x"), [1, 2, 3]),
    "a value without extremes": ("progress", ("extremes", "table"), {}),
}


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The text of a calibration cache."""
    path = tmp_path_factory.mktemp("kept") / "c.json"
    calibrate(net(), pictures(), "entropy", cache=path)
    return path.read_text()


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_cache_is_an_error(damage: str, kept: str, tmp_path: Path) -> None:
    graph, x, path = net(), pictures(), tmp_path / "c.json"
    kind, (*keys, last), value = DAMAGE[damage]
    plain = json.loads(kept)
    (entry,) = plain["entries"]
    if kind == "progress":
        seen = Extremes.of(np.ones((1, 3, 8, 8), np.float32)).to_plain()
        table = dict.fromkeys(entry.pop("result")["ranges"], seen)
        counts = {"batches": 0, "done": False, "table": {}}
        entry["progress"] = {"extremes": {"batches": 4, "done": True, "table": table}, "counts": counts}
    at = entry = entry[kind]
    for key in keys:
        at = at[key]
    at[last] = value
    path.write_text(json.dumps(plain))
    with pytest.raises(UsageError, match="is a damaged calibration cache"):
        calibrate(graph, x, "entropy", cache=path)


# ---------------------------------------------------------------- what is refused


def test_bad_data(tmp_path: Path) -> None:
    x = pictures()
    holes = x.copy()
    holes[3, 1, 2, 2] = np.nan
    (tmp_path / "text.npz").write_text("no arrays")
    (tmp_path / "empty").mkdir()
    np.savez(tmp_path / "other.npz", y=x, z=x)
    cases: list[tuple[Any, type[Exception], str]] = [
        (holes, InputError, "batch 1: input x.*holds NaN or infinity"),
        (holes * np.inf, InputError, "holds NaN or infinity"),
        (x.astype(np.float64) * 1e300, InputError, "holds NaN or infinity"),
        (x[:0], UsageError, "there are no samples"),
        ([], UsageError, "there are no samples"),
        (iter([]), UsageError, "there are no samples"),
        (np.zeros_like(x), InputError, "every element is the same"),
        (x[:1], InputError, "has 1 samples, a batch of the network is 2"),
        (x[:, :2], InputError, r"the array has shape \[2, 2, 6, 6\]"),
        (x[0], InputError, r"the array has shape \[3, 6, 6\]"),
        ([x[:3]], InputError, r"the array has shape \[3, 3, 6, 6\]"),
        (x > 0, InputError, "the data is bool"),
        ({"y": x}, UsageError, "no array for input 'x'"),
        ([{"y": x}], InputError, "no array for input 'x'"),
        (tmp_path / "nowhere.npz", UsageError, "there is no calibration data"),
        (tmp_path / "text.npz", UsageError, "is not a .npz or .npy"),
        (tmp_path / "other.npz", UsageError, "has no array for input 'x'; it has y, z"),
        (tmp_path / "empty", UsageError, "holds no pictures"),
        (3, UsageError, "int is not calibration data"),
        (lambda: 3, UsageError, "the function that makes calibration data gave int"),
        ({"x": [[1.0], [2.0, 3.0]]}, InputError, "'x', the given value is not an array"),
        ([{"x": [[1.0], [2.0, 3.0]]}], InputError, "batch 0: input x.*, the given value is not an array"),
        ([{"x": "abc"}], InputError, r"the array has shape \[\]"),
        ([None], InputError, r"the array has shape \[\]"),
    ]
    for data, error, why in cases:
        cache = tmp_path / "cache.json"
        with pytest.raises(error, match=why):
            calibrate(net(), data, "minmax", cache=cache)
        assert not cache.exists(), "nothing is left half-written"
    with pytest.raises(UsageError, match="calibrator 'best'"):
        calibrate(net(), x, "best")


def test_an_iterator_that_cannot_be_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No temporary file stays, neither if the disk is full nor if the data are wrong."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    good = {"x": pictures(2)}
    graph = net()
    with pytest.raises(InputError, match="calibration batch 1"):
        calibrate(graph, iter([good, {"x": "abc"}]), "minmax")
    assert not list(tmp_path.iterdir())

    def full(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(np, "save", full)
    with pytest.raises(OutputError, match=r"batch 0 of the calibration data cannot be kept in .*: No space left"):
        calibrate(graph, iter([good]), "minmax")
    assert not list(tmp_path.iterdir())


def test_a_network_that_overflows_is_reported(tmp_path: Path) -> None:
    n = Net()
    graph = n.done(n.op("Exp", n.op("Mul", n.input(1, 4), 1000.0)))
    with pytest.raises(InputError, match="the network computes NaN or infinity in 'Exp"):
        calibrate(graph, np.ones((3, 4), np.float32) * np.arange(4, dtype=np.float32), "minmax")


@pytest.mark.parametrize("fill", [-np.inf, np.finfo(np.float32).min, -1e30])
def test_the_fill_of_a_mask_is_no_part_of_a_range(fill: float) -> None:
    n = Net()
    x = n.input(2, 4)
    mask = np.array([0, 0, fill, 0], np.float32)
    graph = n.done(n.op("Softmax", n.op("Add", x, n.const(mask))))
    data = np.random.default_rng(0).uniform(-3, 3, (8, 4)).astype(np.float32)
    for method in ("minmax", "mse", "entropy", "percentile"):
        found = calibrate(graph, data, method).ranges["Add_1"]
        assert -3 <= found.low < found.high <= 3
    assert calibrate(graph, data, "minmax").ranges["Add_1"].low < -2.5


def test_huge_values_are_counted() -> None:
    n = Net()
    graph = n.done(n.op("Mul", n.input(2, 4), 1e38))
    data = np.random.default_rng(0).uniform(0, 3, (8, 4)).astype(np.float32)
    for method in ("mse", "entropy", "percentile"):
        assert 1e37 < calibrate(graph, data, method).ranges["Mul_1"].high < 3.1e38


def test_two_inputs_need_names() -> None:
    n = Net()
    a = n.input(2, 4, name="a")
    b = n.input(2, 4, name="b")
    graph = n.done(n.op("Add", a, b))
    x = np.random.default_rng(0).standard_normal((4, 4)).astype(np.float32)
    with pytest.raises(UsageError, match=r"has 2 inputs \(a, b\)"):
        calibrate(graph, x, "minmax")
    with pytest.raises(InputError, match="different numbers of samples"):
        calibrate(graph, {"a": x, "b": x[:2]}, "minmax")
    assert calibrate(graph, {"a": x, "b": x}, "minmax").ranges["a"].high == float(x.max())
