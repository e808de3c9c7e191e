"""DALI pipelines on the CPU feed engines. Without DALI, these tests are skipped with the reason."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import optdnn
from optdnn.errors import InputError, MissingDependency, UsageError

SIZE = (12, 16)
COUNT = 5


@pytest.fixture(scope="module")
def engine() -> optdnn.Engine:
    from support.pictures import classifier

    spec = {"resize": 8, "crop": 8, "mean": 0.5, "std": 0.25}
    return optdnn.build(classifier(), target="reference", preprocess={"x": spec}, shapes={"x": (None, *SIZE, 3)})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from support.pictures import write_pictures

    found = tmp_path_factory.mktemp("pictures")
    write_pictures(found, [SIZE] * COUNT)
    write_pictures(found / "other", [SIZE, (16, 12)])
    return found


def _pipeline(files: list[Path], batch: int = 2) -> Any:
    dali = pytest.importorskip("nvidia.dali", reason="the dali extra is not installed")

    @dali.pipeline_def(batch_size=batch, num_threads=1, device_id=None)
    def made() -> Any:
        data, labels = dali.fn.readers.file(files=[str(f) for f in files], name="files")
        return dali.fn.decoders.image(data, output_type=dali.types.RGB), labels

    return made()


def test_an_epoch_through_an_engine_without_copies(engine: optdnn.Engine, folder: Path) -> None:
    from optdnn.integrations.dali import DaliBatches

    files = sorted(folder.glob("*.png"))
    batches = DaliBatches(_pipeline(files), ["x", "labels"], reader="files")
    assert batches.stream is None
    want = [a.outputs["y"] for a in optdnn.picture_answers(engine, files)]
    for _ in range(2):
        got, labels = [], []
        for batch in batches:
            feeds = batch.feeds(engine)
            assert feeds["x"].__array_interface__["data"][0] == batch["x"].__array_interface__["data"][0]
            assert not batch["x"].flags.owndata
            got += list(engine.run(feeds)["y"][: batch.count])
            labels += batch["labels"].reshape(-1)[: batch.count].tolist()
        assert len(got) == COUNT
        order = np.argsort(labels)  # the second epoch begins where the last batch of the first ended
        np.testing.assert_array_equal(np.array(got)[order], np.array(want))


def test_what_does_not_fit(engine: optdnn.Engine, folder: Path) -> None:
    from optdnn.integrations.dali import DaliBatches

    files = sorted((folder / "other").glob("*.png"))
    mixed = DaliBatches(_pipeline(files), ["x", "labels"], reader="files")
    with pytest.raises(InputError, match="the samples of 'x' have different sizes"):
        next(iter(mixed))
    with pytest.raises(UsageError, match="has 2 outputs; their names are given as"):
        DaliBatches(_pipeline(files), ["x"])
    with pytest.raises(UsageError, match="no reader 'nothing'"):
        DaliBatches(_pipeline(files), ["x", "labels"], reader="nothing")
    with pytest.raises(UsageError, match="a pipeline of DALI is needed, not int"):
        DaliBatches(3, ["x"])
    other = next(iter(DaliBatches(_pipeline(files[:1], 1), ["a", "b"], reader="files")))
    with pytest.raises(InputError, match="no output for input 'x'"):
        other.feeds(engine)


def test_without_dali_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    from optdnn.integrations.dali import DaliBatches

    monkeypatch.setitem(sys.modules, "nvidia.dali.pipeline", None)
    with pytest.raises(MissingDependency, match=r"optdnn\[dali\]"):
        DaliBatches(object(), ["x"])


@pytest.mark.hopper
def test_a_pipeline_on_the_gpu_shares_the_engines_stream(folder: Path) -> None:
    dali = pytest.importorskip("nvidia.dali", reason="the dali extra is not installed")
    from support.pictures import classifier

    from optdnn.integrations.dali import DaliBatches

    files = sorted(folder.glob("*.png"))
    spec = {"resize": 8, "crop": 8, "mean": 0.5, "std": 0.25}
    engine = optdnn.build(
        classifier(), target="cuda", tactics="heuristic", preprocess={"x": spec}, shapes={"x": (2, *SIZE, 3)}
    )

    @dali.pipeline_def(batch_size=2, num_threads=1, device_id=0)
    def made() -> Any:
        data, labels = dali.fn.readers.file(files=[str(f) for f in files], name="files")
        return dali.fn.decoders.image(data, device="mixed", output_type=dali.types.RGB), labels

    batches, context = DaliBatches(made(), ["x", "labels"], reader="files"), engine.context()
    got = [row for b in batches for row in context.run(b.feeds(engine), stream=batches.stream)["y"].get()[: b.count]]
    want = [a.outputs["y"] for a in optdnn.picture_answers(engine, files, decoder="cpu")]
    np.testing.assert_allclose(got, want, rtol=1e-3, atol=1e-3)
