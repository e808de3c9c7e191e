"""Checks of a kernel's source as NVRTC compiles it: offsets of its parameters, and conditions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from optdnn.kernels.launch import Launch
from optdnn.runtime.cuda.compile import nvrtc

ATTENTION_FIELDS = {
    "q": "queries",
    "k": "keys",
    "v": "values",
    "out": "output",
    "new_k": "new_keys",
    "new_v": "new_values",
}
"""Fields of operands in the parameter blocks of attention."""


def check_pointers(launch: Launch, names: Mapping[str, str], *conditions: str) -> None:
    """The kernel's ``Params`` have the size of the launch's block, and hold its pointers at the launch's offsets. ``names``: fields
    whose operands have another name."""
    fields = {names.get(p.operand, p.operand): p.at for p in launch.pointers}
    compile_checks(launch, fields, f"sizeof(Params) == {len(launch.parameters)}", *conditions)


def compile_checks(launch: Launch | Any, fields: Mapping[str, int], *conditions: str) -> None:
    """``fields`` of the kernel's ``Params`` are at these offsets (bytes), and ``conditions`` hold. Raises KernelError otherwise."""
    recipe = launch.recipe
    offsets = [f"__INTADDR__(&((Params*)0)->{name}) == {at}" for name, at in fields.items()]
    lines = [f"static_assert({condition});" for condition in (*offsets, *conditions)]
    text = "\n".join([f'#include "{recipe.name}"', *lines, ""])
    check_syntax(replace(recipe, name="check.cu", generated={**recipe.generated, "check.cu": text}))


def check_syntax(recipe: nvrtc.Recipe) -> None:
    """Run the compiler's front end, which evaluates each ``static_assert``, and no more: it takes a tenth of the time."""
    nvrtc.compile_recipe(replace(recipe, options=(*recipe.options, "--fdevice-syntax-only")))
