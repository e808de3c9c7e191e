"""An engine as a model of NVIDIA's Triton server: a folder with a configuration, the engine, and code for the Python backend."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

from optdnn.errors import OutputError, UsageError
from optdnn.loading import load
from optdnn.serving.datatypes import check_served, datatype
from optdnn.serving.facts import ModelFacts, facts_of
from optdnn.serving.sizes import BatchSizes, rest_of
from optdnn.types import BF16, TensorSpec

NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
DELAY_MICROSECONDS = 100
"""How long Triton's batcher waits for further requests."""
MODEL_CODE = '''"""The engine in this folder, for the Python backend of NVIDIA's Triton server. optdnn must be installed there."""

from pathlib import Path

import numpy as np
import optdnn
import triton_python_backend_utils as pb_utils

BATCHED = {batched}
MOST_ROWS = {most}
SIZES = {sizes}
OPTIONS = {options}


class TritonPythonModel:
    def initialize(self, args):
        folder = Path(args["model_repository"]) / args["model_version"]
        self.engine = optdnn.load(folder / "model.engine", **OPTIONS)
        self.inputs = [spec.name for spec in self.engine.inputs]

    def execute(self, requests):
        feeds = [{{n: pb_utils.get_input_tensor_by_name(r, n).as_numpy() for n in self.inputs}} for r in requests]
        responses = [None] * len(requests)
        for group in self.groups(feeds):
            for k, response in zip(group, self.answers([feeds[k] for k in group]), strict=True):
                responses[k] = response
        return responses

    def groups(self, feeds):
        """Numbers of the requests that run together: their rows fit in a batch, and their inputs agree in all else."""
        groups, last, rows = [], None, 0
        for k, feed in enumerate(feeds):
            rest = [feed[n].shape[1:] for n in self.inputs] if BATCHED else None
            count = feed[self.inputs[0]].shape[0] if BATCHED else 0
            if groups and BATCHED and rest == last and rows + count <= MOST_ROWS:
                groups[-1].append(k)
                rows += count
            else:
                groups.append([k])
                last, rows = rest, count
        return groups

    def answers(self, feeds):
        """The responses to requests that run together. After an error, each runs by itself."""
        try:
            results = self.run(feeds)
        except optdnn.OptdnnError as error:
            if len(feeds) > 1:
                return [answer for feed in feeds for answer in self.answers([feed])]
            return [pb_utils.InferenceResponse(output_tensors=[], error=pb_utils.TritonError(str(error)))]
        return [pb_utils.InferenceResponse(output_tensors=[pb_utils.Tensor(n, a) for n, a in r.items()]) for r in results]

    def run(self, feeds):
        """The results of each request."""
        if not BATCHED:
            return [self.engine.run(feeds[0])]
        ends = np.cumsum([f[self.inputs[0]].shape[0] for f in feeds])
        size = min((n for n in SIZES if n >= ends[-1]), default=ends[-1])
        whole = {{n: np.concatenate([f[n] for f in feeds]) for n in self.inputs}}
        if size > ends[-1]:
            whole = {{n: np.concatenate([a, np.repeat(a[-1:], size - ends[-1], axis=0)]) for n, a in whole.items()}}
        results = self.engine.run(whole)
        starts = [0, *ends[:-1]]
        return [{{n: a[s:e] for n, a in results.items()}} for s, e in zip(starts, ends, strict=True)]
'''


def export_triton(engine: Path, folder: Path, *, instances: int = 1, trust_cubins: bool = False) -> Path:
    """Write ``folder``/NAME for an engine file NAME.engine: config.pbtxt, 1/model.py and 1/model.engine. Returns that folder.

    Raises UsageError for a name or a type that Triton does not take, and OutputError where the folder exists already or cannot be
    written.
    """
    name = engine.stem
    if not NAME.fullmatch(name):
        raise UsageError(
            f"{name!r} is not a name for a model of Triton", hint="rename the engine file: letters, digits, _ - ."
        )
    loaded = load(engine, trust_cubins=trust_cubins)
    specs = (*loaded.inputs, *loaded.outputs)
    check_served(specs)
    if any(s.dtype == BF16 for s in specs):
        raise UsageError(
            "Triton's Python backend does not support bf16", hint="build with inputs and outputs of fp32 or fp16"
        )
    facts = facts_of(loaded)
    rest = next((rest_of(shapes) for shapes in facts.plans), ())
    most = BatchSizes(facts, None).most(rest) if facts.batch is not None else 0
    code = MODEL_CODE.format(
        batched=facts.batch is not None,
        most=most,
        sizes=sorted({shapes[0][0] for shapes in facts.plans if shapes[0]}) if facts.batch is not None else [],
        options={"trust_cubins": True} if trust_cubins else {},
    )
    target = folder / name
    if target.exists():
        raise OutputError(f"{target} exists already", hint="remove it, or name another folder")
    try:
        target.mkdir(parents=True)
        _fill(target, configuration(name, facts, most, instances), code, engine)
    except OSError as error:
        hint = "check the folder, its permissions and the free space"
        raise OutputError(f"{target} cannot be written: {error.strerror}", hint=hint) from error
    return target


def _fill(target: Path, config: str, code: str, engine: Path) -> None:
    """Write the model's files into its new folder, which disappears if one of them cannot be written."""
    try:
        (target / "1").mkdir()
        (target / "config.pbtxt").write_text(config, encoding="utf-8")
        (target / "1" / "model.py").write_text(code, encoding="utf-8")
        shutil.copyfile(engine, target / "1" / "model.engine")
    except BaseException:
        shutil.rmtree(target, ignore_errors=True)
        raise


def configuration(name: str, facts: ModelFacts, most: int, instances: int) -> str:
    """The text of config.pbtxt. ``most``: rows of a batch; 0 where requests run one by one."""
    skip = 1 if most else 0  # Triton's own dimension of the batch is not written
    kind = "KIND_CPU" if facts.target in ("cpu", "reference", "simulate") else "KIND_GPU"
    parts = [
        f"name: {_quoted(name)}",
        'backend: "python"',
        f"max_batch_size: {most}",
        *(_tensor("input", s, skip) for s in facts.inputs),
        *(_tensor("output", s, skip) for s in facts.outputs),
        f"instance_group [ {{ count: {instances} kind: {kind} }} ]",
    ]
    if most:
        parts.append(f"dynamic_batching {{ max_queue_delay_microseconds: {DELAY_MICROSECONDS} }}")
    return "\n".join(parts) + "\n"


def _tensor(what: str, spec: TensorSpec, skip: int) -> str:
    dims = ", ".join(str(d if isinstance(d, int) else -1) for d in spec.shape[skip:])
    shape = f"dims: [ {dims} ]" if dims else "dims: [ 1 ] reshape { shape: [ ] }"  # Triton takes no empty dims
    return f"{what} [ {{ name: {_quoted(spec.name)} data_type: TYPE_{datatype(spec.dtype)} {shape} }} ]"


def _quoted(text: str) -> str:
    return json.dumps(text)
