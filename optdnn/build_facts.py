"""The deterministic facts of a build that its engine keeps: options, model, passes."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from optdnn import __version__
from optdnn.config import AUTO, BuildOptions
from optdnn.errors import warn
from optdnn.image_spec import ImageSpec
from optdnn.ir.digest import graph_digest, structure_digest
from optdnn.ir.graph import Graph
from optdnn.passes.base import PassReport
from optdnn.ranges import input_shapes
from optdnn.refitting.record import STRUCTURE

MOST_DESCRIPTION = 1 << 20
"""The most bytes of a model's metadata that an engine keeps."""


def build_facts(graph: Graph, passes: Sequence[PassReport], *, options: BuildOptions) -> dict[str, Any]:
    """The deterministic facts of a build that its engine keeps."""
    sampled = [graph.type(v).dims[1] for op in graph.of_kind("SampleToken") if (v := op.input(0)) is not None]
    return {
        "optdnn": __version__,
        **({"sampling": {"vocabulary": sampled[0]}} if sampled and isinstance(sampled[0], int) else {}),
        "model": {
            "name": graph.name,
            "digest": graph_digest(graph),
            STRUCTURE: structure_digest(graph, numbers=False),
            **_description(graph),
        },
        "options": {
            "target": options.target,
            "precision": options.precision,
            "io_dtype": options.io_dtype,
            "shapes": input_shapes(options.shapes).to_plain(),
            "opt_level": options.opt_level,
            "threads": options.threads,
            "tactics": options.tactics,
            "stop_after": options.stop_after,
            **({"strict": True} if options.strict else {}),
            **({"values": {n: np.asarray(v).tolist() for n, v in options.values.items()}} if options.values else {}),
            **({"sample": options.sample} if options.sample is not None else {}),
            **({"random_seed": options.random_seed} if options.random_seed is not None else {}),
            **_pictures(options),
            **({"devices": options.devices, "split": options.split} if options.devices > 1 else {}),
            **({"streams": options.streams} if options.streams != AUTO else {}),
            **({"row_invariant": True} if options.row_invariant else {}),
            **({"nearest_tactics": False} if not options.nearest_tactics else {}),
            **({"strict_precision": True} if options.strict_precision else {}),
            **({"workspace": options.workspace} if options.workspace is not None else {}),
            **({"memory_limit": options.memory_limit} if options.memory_limit is not None else {}),
            **({"precision_map": dict(options.precision_map)} if options.precision_map else {}),
            **_calibration(options),
        },
        "passes": [p.to_json() for p in passes],
        "operators": graph.kinds(),
    }


def _description(graph: Graph) -> dict[str, Any]:
    """What the model says about itself; nothing, with a warning, if it says too much for a header."""
    if (size := len(json.dumps(graph.description))) > MOST_DESCRIPTION:
        warn(f"the engine leaves the model's metadata out: {size} bytes, at most {MOST_DESCRIPTION}")
        return {}
    return {"description": dict(graph.description)} if graph.description else {}


def _calibration(options: BuildOptions) -> dict[str, Any]:
    """The options of calibration, without the data, for the engine; empty if nothing was calibrated."""
    if options.calib is None:
        return {}
    images = None if options.images is None else json.dumps(ImageSpec.read(options.images).to_plain(), sort_keys=True)
    return {"calibrator": options.calibrator, **({} if images is None else {"images": images})}


def _pictures(options: BuildOptions) -> dict[str, Any]:
    """The options of pictures and answers, for the engine."""
    both: dict[str, Mapping[str, Any]] = {"preprocess": options.preprocess, "postprocess": options.postprocess}
    return {name: {k: spec.to_plain() for k, spec in specs.items()} for name, specs in both.items() if specs}
