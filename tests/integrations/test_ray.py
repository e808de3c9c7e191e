"""Engines on a real Ray cluster of this machine with several worker processes. The tests kill some of them.

Without Ray, the tests that need it are skipped with the reason: pip install 'optdnn[cpu,ray]'.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import pytest

import optdnn
from optdnn.errors import InputError, MissingDependency, RunError, UsageError
from optdnn.integrations.ray import GRPC_SERVICE, Predictor, _stacked, _usual_instances, application
from optdnn.models import trained

WORKERS = 3
HTTP, GRPC = 18123, 18124


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the digits for batches of 1 to 8."""
    folder = tmp_path_factory.mktemp("engines")
    built = optdnn.build(trained.load("digits_resnet").path, target="reference", shapes={"x": "1..4..8x1x8x8"})
    built.save(folder / "digits.engine")
    return folder


@pytest.fixture(scope="module")
def file(engines: Path) -> str:
    return str(engines / "digits.engine")


def answers(file: str, x: Any) -> Any:
    """The logits of the engine without Ray."""
    engine = optdnn.load(file)
    return np.concatenate([engine.run(x[k : k + 8])["logits"] for k in range(0, len(x), 8)])


# ---------------------------------------------------------------- the predictor by itself


def test_columns_in_and_out(file: str) -> None:
    data = trained.load("digits_resnet")
    want = answers(file, data.x[:20])
    predictor = Predictor(file, columns={"x": "pixels"})
    batch = {"pixels": data.x[:20], "y": data.y[:20]}
    got = predictor(batch)  # more rows than the largest batch of the engine
    assert list(got) == ["y", "logits"]
    np.testing.assert_allclose(got["logits"], want, rtol=1e-5, atol=1e-5)
    assert list(Predictor(file, columns={"x": "pixels"}, keep=["pixels"])(batch)) == ["pixels", "logits"]


@pytest.mark.parametrize("instances", [1, 3])
def test_any_number_of_runs_at_once_gives_the_same_rows(file: str, instances: int) -> None:
    x = trained.load("digits_resnet").x[:61]
    got = Predictor(file, instances=instances)({"x": x})["logits"]
    np.testing.assert_allclose(got, answers(file, x), rtol=1e-5, atol=1e-5)
    assert got.flags.c_contiguous


def test_two_runs_go_on_at_once(file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each run waits until another one has begun. In sequence they would wait for ever."""
    predictor = Predictor(file, instances=2)
    run, both = predictor.engine.run, threading.Barrier(2, timeout=20)

    def together(feeds: Any, out: Any = None) -> Any:
        both.wait()
        return run(feeds, out)

    monkeypatch.setattr(predictor.engine, "run", together)
    assert len(predictor({"x": trained.load("digits_resnet").x[:32]})["logits"]) == 32


def test_runs_write_into_one_array(file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    predictor = Predictor(file)
    given: list[Any] = []
    run = predictor.engine.run
    monkeypatch.setattr(predictor.engine, "run", lambda feeds, out=None: (given.append(out), run(feeds, out))[1])
    got = predictor({"x": trained.load("digits_resnet").x[:16]})["logits"]
    assert [np.shares_memory(o["logits"], got) for o in given] == [True, True]


def test_outputs_of_sizes_that_are_not_known_before(tmp_path: Path) -> None:
    predictor = Predictor(saved(tmp_path, "(float[N, M] x) => (float[N, M] y) { y = Add(x, x) }"), instances=2)
    x = np.arange(12, dtype=np.float32).reshape(4, 3)
    np.testing.assert_array_equal(predictor({"x": x})["y"], 2 * x)


@pytest.mark.parametrize("instances", [0, -1, 1.5, "2", True])
def test_instances_are_a_number_of_runs(file: str, instances: Any) -> None:
    with pytest.raises(UsageError, match="instances must be a whole number, at least 1, not"):
        Predictor(file, instances=instances)


@pytest.mark.parametrize(
    ("target", "ranks", "count"), [("cuda:sm_90a", None, 2), ("cuda:sm_90a", 2, 1), ("cpu", None, 1)]
)
def test_runs_at_once_by_default(target: str, ranks: int | None, count: int) -> None:
    engine = SimpleNamespace(target=target, program=SimpleNamespace(ranks=ranks))
    assert _usual_instances(engine) == count


def test_an_error_of_one_run_is_the_call_s(file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    predictor = Predictor(file, instances=2)
    run = predictor.engine.run

    def failing(feeds: Any, out: Any = None) -> Any:
        if feeds["x"][0, 0, 0, 0] == 7:
            raise RunError("the third run fails")
        return run(feeds, out)

    monkeypatch.setattr(predictor.engine, "run", failing)
    x = trained.load("digits_resnet").x[:40].copy()
    x[16] = 7
    with pytest.raises(RunError, match="the third run fails"):
        predictor({"x": x})
    assert len(predictor({"x": x[:16]})["logits"]) == 16


def test_threads_may_share_a_predictor(file: str) -> None:
    data = trained.load("digits_resnet")
    predictor, want = Predictor(file, instances=2), answers(file, data.x[:91])
    parts = [slice(k, k + 13) for k in range(0, 91, 13)]
    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(lambda p: predictor({"x": data.x[p], "y": data.y[p]}), parts * 4))
    for part, got in zip(parts * 4, found, strict=True):
        np.testing.assert_allclose(got["logits"], want[part], rtol=1e-5, atol=1e-5)
        np.testing.assert_array_equal(got["y"], data.y[part])


@pytest.mark.gpu
@pytest.mark.parametrize("instances", [1, 2, 3])
def test_runs_on_a_gpu_overlap_and_stay_apart(tmp_path: Path, instances: int) -> None:
    data = trained.load("digits_resnet")
    built = optdnn.build(data.path, target="cuda", precision="fp16", shapes={"x": (8, 1, 8, 8)})
    built.save(tmp_path / "digits.engine")
    x = np.concatenate([data.x[:61]] * 8)
    one = optdnn.load(tmp_path / "digits.engine")
    full = np.concatenate([x, x[-1:].repeat(-len(x) % 8, axis=0)])
    want = np.concatenate([one.run(full[k : k + 8])["logits"] for k in range(0, len(full), 8)])[: len(x)]
    predictor = Predictor(str(tmp_path / "digits.engine"), instances=instances)
    for _ in range(5):
        np.testing.assert_array_equal(predictor({"x": x})["logits"], want)


def saved(folder: Path, text: str) -> str:
    model = onnx.parser.parse_model(f'<ir_version: 9, opset_import: ["" : 18]> net {text}')
    optdnn.build(model, target="reference").save(folder / "net.engine")
    return str(folder / "net.engine")


def test_an_engine_of_fixed_rows_pads_the_last_ones(tmp_path: Path) -> None:
    predictor = Predictor(saved(tmp_path, "(float[4, 2] x) => (float[4, 2] y) { y = Add(x, x) }"))
    x = np.arange(14, dtype=np.float32).reshape(7, 2)
    np.testing.assert_array_equal(predictor({"x": x})["y"], 2 * x)


def test_files_of_pictures(tmp_path: Path) -> None:
    pytest.importorskip("PIL", reason="Pillow is not installed")
    from support.pictures import classifier, write_pictures

    write_pictures(tmp_path / "files", [(12, 16)] * 3 + [(16, 12)])
    spec = {"resize": 8, "crop": 8, "mean": 0.5, "std": 0.25}
    engine = optdnn.build(classifier(), target="reference", preprocess={"x": spec}, postprocess={"y": "softmax"})
    engine.save(tmp_path / "net.engine")
    want = list(optdnn.picture_answers(engine, tmp_path / "files"))
    files = np.array([Path(a.name).read_bytes() for a in want], object)
    got = Predictor(str(tmp_path / "net.engine"), columns={"x": "bytes"})({"bytes": files, "number": np.arange(4)})
    assert list(got) == ["number", "y", "label", "score"]
    assert got["label"].tolist() == [a.best[0][0] for a in want]
    np.testing.assert_allclose(got["score"], [a.best[0][1] for a in want], rtol=1e-5)
    np.testing.assert_allclose(got["y"], [a.outputs["y"] for a in want], rtol=1e-5)
    files[2] = b"nothing"
    predictor = Predictor(str(tmp_path / "net.engine"))
    for more, named in (({"path": ["a", "b", "c.png", "d"]}, r"c\.png"), ({}, "row 2")):
        with pytest.raises(InputError, match=rf"^{named}: the picture cannot be read(.|\n)*max_errored_blocks"):
            predictor({"x": files, **more})


def test_rows_of_different_shapes_stay_apart() -> None:
    rows = [np.zeros((2, 3)), np.ones((2, 4))]
    found = _stacked(rows)
    assert (found.dtype, [a.shape for a in found]) == (object, [(2, 3), (2, 4)])
    assert _stacked(rows[:1]).shape == (1, 2, 3)


def test_rows_that_depend_on_one_another_are_not_padded(tmp_path: Path) -> None:
    predictor = Predictor(saved(tmp_path, "(float[4, 2] x) => (float[4, 2] y) { y = Softmax<axis = 0>(x) }"))
    x = np.arange(8, dtype=np.float32).reshape(4, 2)
    assert predictor({"x": x})["y"].shape == (4, 2)
    with pytest.raises(UsageError, match=r"rows of output 'y' depend on one another(.|\n)*batches of 4 rows"):
        predictor({"x": x[:3]})


def test_small_floats_become_those_of_arrow(tmp_path: Path) -> None:
    predictor = Predictor(saved(tmp_path, "(float[N] x) => (bfloat16[N] y) { y = Cast<to = 16>(x) }"))
    assert predictor({"x": np.ones(3, np.float32)})["y"].dtype == np.float32


def test_what_does_not_fit(file: str, tmp_path: Path) -> None:
    x = trained.load("digits_resnet").x[:2]
    with pytest.raises(UsageError, match="no input 'z'; it has x"):
        Predictor(file, columns={"z": "x"})
    with pytest.raises(InputError, match=r"no column 'x'; it has pixels(.|\n)*columns="):
        Predictor(file)({"pixels": x})
    with pytest.raises(InputError, match="'logits' is a column and an output"):
        Predictor(file)({"x": x, "logits": x})
    ragged = np.empty(2, object)
    ragged[:] = [x[0], x[1, :, :4]]
    with pytest.raises(InputError, match="rows of column 'x' have different shapes"):
        Predictor(file)({"x": ragged})
    with pytest.raises(InputError, match=r"at least 1, not \[0\]"):
        Predictor(file)({"x": x[:0]})
    two = saved(tmp_path, "(float[N] a, float[N] b) => (float[N] y) { y = Add(a, b) }")
    with pytest.raises(InputError, match=r"one number of rows, at least 1, not \[2, 3\]"):
        Predictor(two)({"a": np.ones(2, np.float32), "b": np.ones(3, np.float32)})
    with pytest.raises(UsageError, match="does not give a row for each row"):
        Predictor(saved(tmp_path, "(float[N] x) => (float y) { y = ReduceSum<keepdims = 0>(x) }"))


def test_a_file_that_is_missing_is_said_before_ray_is_asked(file: str) -> None:
    with pytest.raises(UsageError, match=r"there is no file .*digit\.engine\n(.|\n)*did you mean 'digits\.engine'"):
        application(file.replace("digits.engine", "digit.engine"))


@pytest.mark.parametrize(("module", "named"), [("ray", "ray"), ("starlette.routing", "starlette")])
def test_without_the_extra_it_is_named(file: str, monkeypatch: pytest.MonkeyPatch, module: str, named: str) -> None:
    if module != "ray":
        pytest.importorskip("ray", reason="the extra ray is not installed")
        monkeypatch.delitem(sys.modules, "optdnn.serving.http_app", raising=False)
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(MissingDependency, match=rf"{named}(.|\n)*pip install 'optdnn\[ray\]'"):
        application(file)


def test_it_is_imported_when_it_is_used() -> None:
    import subprocess

    code = "import sys, optdnn; optdnn.Predictor; print('ray' in sys.modules, 'onnx' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]


# ---------------------------------------------------------------- a cluster


@pytest.fixture(scope="module")
def ray(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A cluster of this machine that declares this number of cores, with a worker process for each."""
    found = pytest.importorskip("ray", reason="the extra ray is not installed")
    paths = os.pathsep.join(p for p in sys.path if p)
    everywhere = {"env_vars": {"PYTHONPATH": paths}}
    found.init(
        num_cpus=WORKERS, include_dashboard=False, log_to_driver=False, logging_level="error", runtime_env=everywhere
    )
    yield found
    found.shutdown()


class Dying(Predictor):
    """The first batch with row 20 ends its process in the middle of the run."""

    def __init__(self, engine: str, marker: str):
        super().__init__(engine)
        self._marker = Path(marker)

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        found = super().__call__(batch)
        if 20 in batch["row"] and not self._marker.exists():
            self._marker.write_text(str(os.getpid()))
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(0.05)
        return {**found, "process": np.full(len(batch["row"]), os.getpid())}


def test_a_worker_that_is_killed_loses_nothing(ray: Any, file: str, tmp_path: Path) -> None:
    x = trained.load("digits_resnet").x[:64]
    rows = ray.data.from_items([{"x": a, "row": k} for k, a in enumerate(x)], override_num_blocks=16)
    marker = tmp_path / "died"
    workers = ray.data.ActorPoolStrategy(size=WORKERS - 1)
    answered = rows.map_batches(Dying, fn_constructor_args=[file, str(marker)], compute=workers, batch_size=4)
    got = {int(r["row"]): r for r in answered.take_all()}
    assert sorted(got) == list(range(64))
    want = answers(file, x)
    np.testing.assert_allclose([got[k]["logits"] for k in range(64)], want, rtol=1e-5, atol=1e-5)
    assert int(marker.read_text()) != got[20]["process"]  # the batch was run again
    assert len({r["process"] for r in got.values()}) >= 2


@pytest.fixture(scope="module")
def deployed(ray: Any, engines: Path) -> Iterator[str]:
    """The address of a deployment with two replicas."""
    pytest.importorskip("tritonclient.grpc", reason="the extra serve is not installed")
    from ray import serve
    from ray.serve.config import HTTPOptions, gRPCOptions

    serve.start(
        http_options=HTTPOptions(port=HTTP), grpc_options=gRPCOptions(port=GRPC, grpc_servicer_functions=[GRPC_SERVICE])
    )
    options = {"num_replicas": 2, "ray_actor_options": {"num_cpus": 0.5}, "health_check_period_s": 1}
    serve.run(application(engines, batch_delay_ms=20, **options))
    yield f"127.0.0.1:{HTTP}"
    serve.shutdown()


def ask(address: str, x: Any) -> tuple[int, Any]:
    """Status and answer of a request by HTTP with binary tensors."""
    from http.client import HTTPConnection

    from support.serving import infer_body, raw_input

    body, headers = infer_body(raw_input(x), data=x.tobytes())
    connection = HTTPConnection(address, timeout=30)
    connection.request("POST", "/v2/models/digits/infer", body, headers)
    answer = connection.getresponse()
    return answer.status, answer.read()


def logits(body: bytes) -> Any:
    import json

    return np.array(json.loads(body)["outputs"][0]["data"], np.float32).reshape(-1, 10)


def test_replicas_speak_the_protocol(deployed: str, file: str) -> None:
    import json
    from urllib.request import urlopen

    import tritonclient.grpc

    x = trained.load("digits_resnet").x[:6]
    want = optdnn.load(file).run(x)["logits"]
    status, body = ask(deployed, x)
    assert status == 200
    np.testing.assert_allclose(logits(body), want, rtol=1e-5, atol=1e-5)
    assert json.load(urlopen(f"http://{deployed}/v2/models/digits"))["inputs"][0]["shape"] == [-1, 1, 8, 8]
    assert urlopen(f"http://{deployed}/v2/health/ready").status == 200
    with tritonclient.grpc.InferenceServerClient(f"127.0.0.1:{GRPC}") as client:
        given = tritonclient.grpc.InferInput("x", list(x.shape), "FP32")
        given.set_data_from_numpy(x)
        np.testing.assert_allclose(client.infer("digits", [given]).as_numpy("logits"), want, rtol=1e-5, atol=1e-5)
        assert client.is_server_ready()
        assert client.get_model_metadata("digits").outputs[0].name == "logits"
        with pytest.raises(tritonclient.grpc.InferenceServerException, match="there is no model 'none'"):
            client.infer("none", [given])


def test_refusals_of_a_replica(deployed: str) -> None:
    from urllib.error import HTTPError
    from urllib.request import Request, urlopen

    status, body = ask(deployed, np.zeros((2, 1, 9, 9), np.float32))
    assert (status, b"'x'" in body) == (400, True)
    for path in ("/v2/repository/models/digits/unload", "/metrics"):  # of one replica only
        with pytest.raises(HTTPError) as found:
            urlopen(Request(f"http://{deployed}{path}", data=b"{}" if "unload" in path else None))
        assert found.value.code == 404


def replicas() -> set[int]:
    """The processes of the replicas."""
    found = set()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                line = (entry / "cmdline").read_bytes()
            except OSError:
                continue
            if line.startswith(b"ray::ServeReplica:default:optdnn"):
                found.add(int(entry.name))
    return found


def test_a_replica_that_is_killed_is_replaced(deployed: str) -> None:
    x = trained.load("digits_resnet").x[:1]
    before = replicas()
    assert len(before) == 2
    killed = before.pop()
    os.kill(killed, signal.SIGKILL)
    end = time.monotonic() + 60
    while len(replicas() - {killed}) < 2:
        ask(deployed, x)  # the other replica answers; a request to the killed one gets an error
        assert time.monotonic() < end
        time.sleep(0.1)
    assert ask(deployed, x)[0] == 200
