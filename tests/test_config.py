"""Build options of a caller: accepted forms, and refusals with their messages."""

from __future__ import annotations

import inspect
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import optdnn
from optdnn.config import BuildOptions
from optdnn.errors import MissingDependency, RunError, UsageError, did_you_mean
from optdnn.runtime.cuda import device, usable
from optdnn.runtime.cuda.compile import nvrtc
from optdnn.target_name import BUILDABLE, GPUS, TargetName
from optdnn.targets import resolve_target


def test_paths_may_be_text_and_numbers_numpys() -> None:
    options = BuildOptions(timing_cache="a/b.json", dump="d", emit_onnx=b"e.onnx", threads=np.int64(2))  # type: ignore[arg-type]
    assert (options.timing_cache, options.dump, options.emit_onnx) == (Path("a/b.json"), Path("d"), Path("e.onnx"))
    assert type(options.threads) is int
    shapes = {"x": [np.int64(1), None, 8]}
    assert BuildOptions(shapes=shapes).shapes == {"x": (1, None, 8)}  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "because"),
    [
        ({"timing_cache": 3}, "timing_cache must be a path, not 3"),
        ({"threads": 1.5}, "threads must be an integer, not 1.5"),
        ({"workspace": True}, "workspace must be an integer, not True"),
        ({"precision": 16}, "precision must be text, not 16"),
        ({"target": None}, "target must be text, not None"),
        ({"tactics": ["own"]}, r"tactics must be text, not \['own'\]"),
        ({"stop_after": ["cse"]}, "stop_after must be text"),
        ({"strict": "no"}, "strict must be True or False, not 'no'"),
        ({"budget": "20"}, "budget must be a number, not '20'"),
        ({"budget": float("nan")}, "budget must be a finite number, not nan"),
        ({"max_drop": float("inf")}, "max_drop must be a finite number, not inf"),
        ({"max_drop": True}, "max_drop must be a number, not True"),
        ({"candidates": 16}, "candidates must be a list of precisions, not 16"),
        ({"threads": 0}, "threads must be positive"),
        ({"opt_level": None}, "opt_level must be an integer"),
        ({"opt_level": 4}, "opt-level 4 is not one of"),
        ({"shapes": [1, 2]}, "shapes must map names"),
        ({"shapes": {"x": 3}}, "shape of 'x' must be a tuple"),
        ({"shapes": {"x": "1,3"}}, "the shape '1,3' cannot be read"),
        ({"shapes": {"x": ("N", 3)}}, "must hold integers.*\n.*None leaves"),
        ({"shapes": {"x": ("1..2..4", 3)}}, r"must hold integers.*\n.*DimRange\(min, opt, max\)"),
        ({"shapes": {"x": (-1, 3)}}, "negative dimension"),
        ({"target": "reference", "precision": "bf16"}, "there is no precision bf16"),
        ({"target": "reference", "tactics": "openvino"}, "there is no tactics 'openvino'"),
        ({"target": "cpu", "precision": "fp16"}, "fp16 is for GPUs"),
        ({"target": "tpu"}, "'tpu' is not one of auto, cpu, reference"),
        ({"io_dtype": "int8"}, "io-dtype 'int8' is not one of"),
    ],
)
def test_refusals(options: dict[str, Any], because: str) -> None:
    with pytest.raises(UsageError, match=because):
        BuildOptions(**options)


@pytest.mark.parametrize(
    ("option", "target"),
    [
        ({"precision": "bf16"}, "cpu"),
        ({"precision": "fp16"}, "cuda"),
        ({"precision": "w4+fp16"}, "cuda"),
        ({"tactics": "own"}, "cuda"),
    ],
)
def test_what_reference_has_not_is_named_with_a_target_that_has_it(option: dict[str, Any], target: str) -> None:
    with pytest.raises(UsageError) as caught:
        BuildOptions(target="reference", **option)
    assert str(caught.value.hint).endswith(f"give --target {target}")


def test_an_unknown_option_of_build_is_named() -> None:
    with pytest.raises(UsageError, match=r"build has no option 'presicion'\n  hint: did you mean 'precision'\?"):
        optdnn.build(b"", presicion="fp32")  # type: ignore[call-arg]
    with pytest.raises(
        UsageError, match=r"build has no option 'zzz'\n  hint: its options are target, precision, shapes"
    ):
        optdnn.build(b"", zzz=1)  # type: ignore[call-arg]


def test_build_and_its_options_have_the_same_names_and_defaults() -> None:
    parameters = dict(inspect.signature(optdnn.build).parameters)
    del parameters["model"], parameters["progress"]
    assert all(p.kind is p.KEYWORD_ONLY for p in parameters.values())
    options = {f.name: f for f in fields(BuildOptions)}
    assert parameters.keys() == options.keys()
    for name, p in parameters.items():
        made = options[name].default_factory
        wanted = options[name].default if made is MISSING else None  # tables: None gives an empty one
        assert p.default == wanted, name


def test_the_command_line_has_the_defaults_of_build() -> None:
    from optdnn.cli.build import command

    options = {f.name: f.default for f in fields(BuildOptions) if f.default is not MISSING}
    shared = [p for p in command.params if p.name in options and not getattr(p, "multiple", False)]
    assert len(shared) > 15
    for p in shared:
        default = p.default if isinstance(p.default, (str, int, float)) else None
        assert (bool(default) if getattr(p, "is_flag", False) else default) == options[p.name], p.name  # type: ignore[index]


def test_targets_are_parsed_in_one_place() -> None:
    assert str(TargetName.parse("cuda:sm_90a")) == "cuda:sm_90a"
    assert TargetName.parse("cuda:sm_120f").arch == "sm_120f"
    assert [TargetName.parse(t).on_gpu for t in ("cpu", "reference", "simulate", "cuda:sm_80")] == [
        False,
        False,
        True,
        True,
    ]
    assert str(TargetName.parse("simulate").machine) == "cuda:sm_90a"
    for wrong, hint in (
        ("simulated", "did you mean 'simulate'?"),
        ("cuda:90a", "did you mean 'cuda:sm_90a'?"),
        ("cuda:rtx4090", "did you mean 'cuda:rtx-4090'?"),
        ("cuda:", "did you mean 'cuda'?"),
        ("gpu", "the GPU of this machine is --target cuda"),
        ("cuda:gtx", f"MACHINE is one of {', '.join((*BUILDABLE, *GPUS))}"),
    ):
        with pytest.raises(UsageError, match=f"target '{wrong}' is not one of auto, cpu, .* or cuda:MACHINE") as caught:
            TargetName.parse(wrong)
        assert caught.value.hint == hint, wrong
    with pytest.raises(UsageError, match=r"'simulated' is not one of .*\n  hint: did you mean 'simulate'\?"):
        BuildOptions(target="simulated")


def test_auto_is_the_gpu_where_it_is_usable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(usable, "why_not", lambda: "no NVIDIA GPU or no driver")
    assert resolve_target("auto") == "cpu"
    monkeypatch.setattr(usable, "why_not", lambda: None)
    monkeypatch.setattr(device, "gpu_count", lambda: 1)
    monkeypatch.setattr(device, "arch_here", lambda: "sm_90a")
    assert resolve_target("auto") == "cuda:sm_90a"


@pytest.mark.parametrize("options", [{"precision": "fp16"}, {"tactics": "heuristic"}, {"tactics": "heuristic,own"}])
def test_options_for_gpus_are_refused_once_auto_is_cpu(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(usable, "why_not", lambda: "no NVIDIA GPU or no driver")
    assert BuildOptions(**options).target == "auto"
    with pytest.raises(UsageError, match=r"for GPUs, not for target 'cpu'|do not run on target 'cpu'"):
        optdnn.build(b"", **options)


def test_a_gpu_is_not_usable_without_its_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(usable, "PACKAGES", {"json": "json", "no.such.module": "cupy-cuda13x"})
    assert usable.why_not() == "cupy-cuda13x not installed: pip install 'optdnn[cuda]'"


def test_a_gpu_is_not_usable_where_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(usable, "PACKAGES", {})
    monkeypatch.setattr(device, "gpu_count", lambda: 0)
    assert usable.why_not() == "no NVIDIA GPU or no driver"
    monkeypatch.setattr(device, "gpu_count", lambda: 1)
    monkeypatch.setattr(nvrtc, "version", _no_nvrtc)
    assert usable.why_not() == "NVRTC cannot be loaded"


def test_without_nvrtc_a_build_may_leave_compiling_to_another_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise ImportError(name)

    monkeypatch.setattr(nvrtc.importlib, "import_module", missing)
    nvrtc._nvrtc.cache_clear()
    with pytest.raises(MissingDependency, match=r"hint: pip install 'optdnn\[cuda\]'; or build with --no-cubins"):
        nvrtc._nvrtc()
    nvrtc._nvrtc.cache_clear()


def _no_nvrtc() -> tuple[int, int]:
    raise RunError("NVRTC cannot be loaded")


def test_a_suggestion_is_like_the_wrong_name_or_contains_it() -> None:
    assert did_you_mean("precison", ["target", "precision"]) == "did you mean 'precision'?"
    assert did_you_mean("CONV1", ["Conv1", "conv2", "Gemm"], 2) == "did you mean 'Conv1', 'conv2'?"
    assert did_you_mean("layer1", ["/net/layer1/sub/Conv", "/net/fc/Gemm"]) == "did you mean '/net/layer1/sub/Conv'?"
    assert did_you_mean("zzz", ["target", "precision"]) is None
    assert did_you_mean("et", ["target", "precision"]) is None
