"""Pictures as network inputs: the preparation of a folder of pictures. Needs Pillow (extra ``images``)."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

from onnx import TensorProto, helper

from optdnn.config import BuildOptions
from optdnn.image_spec import ImageSpec
from optdnn.importers.onnx import import_model
from optdnn.importers.pictures import with_pictures
from optdnn.ir.evaluate import evaluate
from optdnn.ir.graph import Graph
from optdnn.runtime.pictures.files import RawPictures, decoded
from optdnn.types import Array


def pictures_of(options: BuildOptions) -> ImageSpec | RawPictures | None:
    """How pictures become inputs according to the options: outside of the network, inside of it, or not at all."""
    if options.preprocess:
        return RawPictures(options.preprocess)
    return None if options.images is None else ImageSpec.read(options.images)


def read_image(path: Path, spec: ImageSpec) -> Array:
    """One picture, float32 [channels, height, width] or in the order of ``spec.layout``. Raises InputError if it cannot be read.

    It is prepared by the operators that ``--preprocess`` puts into an engine, in NumPy.
    """
    image: Array = prepared(decoded(path, spec)[None], spec)[0]
    return image


def prepared(pictures: Array, spec: ImageSpec) -> Array:
    """A batch of pictures in the format of ``spec.input``, prepared by the operators of the spec in NumPy, as float32."""
    found: Array = evaluate(_preparation(spec), {"picture": pictures})["prepared"]
    return found


@lru_cache(maxsize=16)
def _preparation(spec: ImageSpec) -> Graph:
    """The network that only prepares pictures of any size."""
    dims = [None] * 4
    ports = [helper.make_tensor_value_info(name, TensorProto.FLOAT, dims) for name in ("picture", "prepared")]
    node = helper.make_node("Identity", ["picture"], ["prepared"])
    model = helper.make_model(helper.make_graph([node], "preparation", ports[:1], ports[1:]))
    return import_model(with_pictures(model, {"picture": spec}, {}))


__all__ = ["ImageSpec", "RawPictures", "pictures_of", "prepared", "read_image"]
