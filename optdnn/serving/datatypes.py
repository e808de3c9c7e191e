"""The protocol's names of element types."""

from __future__ import annotations

from collections.abc import Sequence

from optdnn.errors import UsageError
from optdnn.types import DTYPES, DType, TensorSpec, dtype_name

NAMES = {
    "bool": "BOOL", "uint8": "UINT8", "uint16": "UINT16", "uint32": "UINT32", "uint64": "UINT64", "int8": "INT8",
    "int16": "INT16", "int32": "INT32", "int64": "INT64", "fp16": "FP16", "bf16": "BF16", "fp32": "FP32", "fp64": "FP64",
}  # fmt: skip
"""Our name -> the protocol's."""
DTYPE_OF = {NAMES[name]: DTYPES[name] for name in NAMES}
"""The protocol's name -> dtype."""
_NAME_OF = {dtype: name for name, dtype in DTYPE_OF.items()}


def datatype(dtype: DType) -> str:
    """The protocol's name of a dtype. Raises KeyError for one that it has no name for."""
    return _NAME_OF[dtype]


def check_served(specs: Sequence[TensorSpec]) -> None:
    """Raise UsageError for an input or output whose elements the protocol has no name for."""
    for spec in specs:
        if spec.dtype not in _NAME_OF:
            raise UsageError(
                f"{spec.name!r} is {dtype_name(spec.dtype)}, which the Open Inference Protocol has no name for",
                hint="build the engine with inputs and outputs of fp32 or fp16",
            )
