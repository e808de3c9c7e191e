"""How calls become objects of the libraries, on stand-ins for both: plans by rank, layouts, epilogues, refusals."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from optdnn.errors import RunError
from optdnn.runtime.cuda.libraries import cublaslt, cudnn
from optdnn.runtime.cuda.libraries.calls import Attention, Convolution, MatMul, Norm

CONV = Convolution(
    "float16", (2, 8, 5, 5), (200, 1, 40, 8), (16, 8, 3, 3), (72, 1, 24, 8), (2, 16, 5, 5), (400, 1, 80, 16), (1, 1),
    (1, 2, 3, 4), (1, 1), ("bias", "add", "relu"), (400, 1, 80, 16),
)  # fmt: skip
PRODUCT = MatMul("float16", 4, 8, 16, 16, 16, 8, bias=True, activation="gelu_tanh", ldc=8)


# ---------------------------------------------------------------- cuDNN


class Tensor:
    def __init__(self, name: str):
        self.name = name

    def __getattr__(self, setter: str) -> Any:
        return lambda value: self


class Frontend:
    """Records the requested graphs. Plans with numbers in ``broken`` cannot be built; ``count`` plans are ranked."""

    class cudnnGraphNotSupportedError(Exception):
        pass

    def __init__(self, count: int = 4, broken: tuple[int, ...] = ()):
        self.count, self.broken, self.said = count, broken, []
        names = ("HALF", "BFLOAT16", "FLOAT")
        self.data_type = SimpleNamespace(**{n: n for n in names})
        self.heur_mode = SimpleNamespace(A="A", FALLBACK="F")
        self.numerical_note = SimpleNamespace(
            NONDETERMINISTIC="random", TENSOR_CORE="tensor core", DOWN_CONVERT_INPUTS="tf32"
        )
        self.norm_forward_phase = SimpleNamespace(INFERENCE="inference")
        self.said: list[tuple[str, Any]] = []

    def backend_version(self) -> int:
        return 91900

    def create_handle(self) -> str:
        return "handle"

    def set_stream(self, handle: Any, stream: int) -> None:
        self.said.append(("stream", stream))

    def pygraph(self, **options: Any) -> Any:
        frontend = self

        class Graph:
            def __getattr__(self, name: str) -> Any:
                def call(*args: Any, **given: Any) -> Any:
                    frontend.said.append((name, given or args))
                    if name in ("sdpa", "layernorm"):
                        return [Tensor(name), None, None]
                    return Tensor(given.get("name", name))

                return call

            def get_execution_plan_count(self) -> int:
                return frontend.count

            def get_workspace_size_plan_at_index(self, index: int) -> int:
                return 100 + index

            def build_plan_at_index(self, index: int) -> None:
                frontend.said.append(("build", index))
                if index in frontend.broken:
                    raise RuntimeError("no kernel image")

            def check_support(self) -> None:
                if not frontend.count:
                    raise Frontend.cudnnGraphNotSupportedError("no engine\nmore")

            def execute_plan_at_index(self, pack: Any, workspace: int, index: int, handle: Any) -> None:
                frontend.said.append(("run", ({t.name: at for t, at in pack.items()}, workspace, index)))

        return Graph()

    def asked(self, name: str) -> list[Any]:
        return [what for n, what in self.said if n == name]


@pytest.fixture
def frontend(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    def use(**options: Any) -> Frontend:
        made = Frontend(**options)
        monkeypatch.setattr(cudnn, "frontend", lambda: made)
        forget()
        return made

    def forget() -> None:
        cudnn._plan_of.cache_clear()
        cudnn._planning_handle.cache_clear()

    yield use
    forget()


def test_a_convolution_becomes_a_graph(frontend: Any) -> None:
    used = frontend()
    prepared = cudnn.Handle().prepare(CONV)
    (conv,) = used.asked("conv_fprop")
    assert (conv["pre_padding"], conv["post_padding"]) == ([1, 2], [3, 4])
    assert [n for n, _ in used.said if n in ("bias", "add", "relu")] == ["bias", "add", "relu"]
    assert used.asked("deselect_numeric_notes") == [(["random"],)]
    assert (prepared.ranked, prepared.workspace) == (4, 100)
    bound = prepared.bind({"x": 1, "w": 2, "y": 3, "bias": 4, "z": 5}, 99)
    bound.enqueue(7)
    assert used.asked("stream") == [7]
    ((pack, workspace, index),) = used.asked("run")
    assert (workspace, index) == (99, 0)
    assert {pack[k] for k in ("x", "w", "bias", "z")} == {1, 2, 4, 5}


def test_fp32_is_not_tf32(frontend: Any) -> None:
    used = frontend()
    cudnn.Handle().prepare(replace(CONV, dtype="float32"))
    assert used.asked("deselect_numeric_notes") == [(["random", "tensor core", "tf32"],)]


def test_plans_are_chosen_by_rank_and_made_once(frontend: Any) -> None:
    used = frontend(broken=(0, 1))
    first = cudnn.Handle().prepare(CONV)
    assert used.asked("build") == [0, 1, 2], "of rank 0 the first that can be built"
    assert first.workspace == 102
    assert cudnn.Handle().prepare(replace(CONV, plan=3)).workspace == 103
    assert used.asked("build")[3:] == [3]
    cudnn.Handle().prepare(CONV)
    assert len(used.asked("build")) == 4, "contexts share what was made"
    with pytest.raises(RunError, match="no kernel image"):
        cudnn.Handle().prepare(replace(CONV, plan=1))
    with pytest.raises(RunError, match="tune it again"):
        cudnn.Handle().prepare(replace(CONV, plan=4))


def test_a_problem_that_the_library_cannot_run_is_an_error(frontend: Any) -> None:
    frontend(count=0)
    with pytest.raises(RunError, match=r"cuDNN cannot run Convolution.*: no engine$"):
        cudnn.Handle().prepare(CONV)


def test_attention_and_norms_become_graphs(frontend: Any) -> None:
    used = frontend()
    heads = Attention("float16", (1, 2, 4, 8), (1, 2, 6, 8), (64, 32, 8, 1), (96, 48, 8, 1), (96, 48, 8, 1), (64, 32, 8, 1),
                      0.35, True, (1, 1, 4, 6), (24, 24, 6, 1))  # fmt: skip
    cudnn.Handle().prepare(heads)
    (sdpa,) = used.asked("sdpa")
    assert (sdpa["attn_scale"], sdpa["use_causal_mask"], sdpa["bias"].name) == (0.35, True, "mask")
    prepared = cudnn.Handle().prepare(Norm("float16", "layer", 6, 32, 0.25))
    prepared.bind({"x": 1, "scale": 2, "bias": 3, "y": 4}, 0).enqueue(1)
    ((pack, _, _),) = used.asked("run")
    assert ctypes.cast(pack["epsilon"], ctypes.POINTER(ctypes.c_float))[0] == 0.25, "by value, in host memory"


# ---------------------------------------------------------------- cuBLASLt


class Library:
    """Records attributes and calls, and ranks ``count`` algorithms. Algorithm k needs 10 k bytes."""

    def __init__(self, count: int = 3, status: int = 0):
        self.count, self.status = count, status
        self.layouts: list[tuple[int, int, int, int]] = []
        self.attributes: dict[int, int] = {}
        self.batches: list[tuple[int, int]] = []
        self.ran: list[Any] = []

        class Version:
            def __call__(self) -> int:
                return 130100

        self.cublasLtGetVersion = Version()

    def __getattr__(self, name: str) -> Any:
        return lambda *args: 0  # creation and destruction of objects that are only passed on

    def cublasLtMatrixLayoutCreate(self, layout: Any, kind: Any, rows: Any, columns: Any, pitch: Any) -> int:
        self.layouts.append((kind.value, rows.value, columns.value, pitch.value))
        return 0

    def cublasLtMatrixLayoutSetAttribute(self, layout: Any, key: Any, value: Any, size: Any) -> int:
        self.batches.append((key.value, value._obj.value))
        return 0

    def cublasLtMatmulDescSetAttribute(self, descriptor: Any, key: Any, value: Any, size: Any) -> int:
        self.attributes[key.value] = value._obj.value
        return 0

    def cublasLtMatmulAlgoGetHeuristic(self, *args: Any) -> int:
        results, count = args[-2], args[-1]
        for k in range(self.count):
            results[k].workspace = 10 * k
        count._obj.value = self.count
        return 0

    def cublasLtMatmul(self, *args: Any) -> int:
        self.ran.append(args)
        return self.status


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Any:
    def use(**options: Any) -> Library:
        made = Library(**options)
        monkeypatch.setattr(cublaslt, "shared_object", lambda name: made)
        return made

    return use


def test_a_product_is_asked_for_transposed(library: Any) -> None:
    used = library()
    prepared = cublaslt.Handle().prepare(PRODUCT)
    # b (n x k, in rows of k) is a column-major k x n matrix, read transposed; a is likewise k x m; d and c are n x m
    assert used.layouts == [(2, 16, 8, 16), (2, 16, 4, 16), (2, 8, 4, 8), (2, 8, 4, 8)]
    assert (used.attributes[3], used.attributes[4], used.attributes[7]) == (1, 0, 36)
    assert (prepared.ranked, prepared.workspace) == (3, 0)
    prepared.bind({"a": 1, "b": 2, "c": 3, "d": 4, "bias": 5}, 6).enqueue(7)
    assert used.attributes[8] == 5, "the bias is where it lies now"
    (args,) = used.ran
    operands = [a.value for a in (args[3], args[5], args[8], args[10])]
    assert operands == [2, 1, 3, 4], "b, a, c, d"
    assert (args[2]._obj.value, args[7]._obj.value) == (1.0, 1.0)
    assert (args[13].value, args[15].value) == (6, 7)


def test_stacks_and_other_orders(library: Any) -> None:
    used = library()
    plain = replace(
        PRODUCT, bias=False, activation="", ldc=0, transposed=False, ldb=8, batch=5, strides=(64, 128, 0, 32)
    )
    prepared = cublaslt.Handle().prepare(plain)
    assert used.layouts[0] == (2, 8, 16, 8)
    assert used.attributes == {3: 0, 4: 0, 7: 1}
    assert used.batches == [(5, 5), (6, 128), (5, 5), (6, 64), (5, 5), (6, 32)]
    prepared.bind({"a": 1, "b": 2, "d": 4}, 0).enqueue(7)
    assert used.ran[0][7]._obj.value == 0.0, "nothing is added"
    assert used.ran[0][8].value == 4


def test_algorithms_by_rank(library: Any) -> None:
    library()
    assert cublaslt.Handle().prepare(replace(PRODUCT, algorithm=2)).workspace == 20
    with pytest.raises(RunError, match=r"ranks 3 algorithms.*asks for number 3"):
        cublaslt.Handle().prepare(replace(PRODUCT, algorithm=3))
    library(count=0)
    with pytest.raises(RunError, match="has no algorithm"):
        cublaslt.Handle().prepare(PRODUCT)


def test_a_call_that_fails_is_an_error(library: Any) -> None:
    library(status=13)
    bound = cublaslt.Handle().prepare(PRODUCT).bind({"a": 1, "b": 2, "c": 3, "d": 4, "bias": 5}, 6)
    with pytest.raises(RunError, match="failed with status 13"):
        bound.enqueue(0)
