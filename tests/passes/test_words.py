"""Each rule has a description for users."""

from __future__ import annotations

import ast
import pkgutil
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType

import optdnn.passes
import optdnn.passes.rules
from optdnn.config import OF_PRODUCTS
from optdnn.passes.base import Rule
from optdnn.passes.support.words import RULES, in_words


def modules() -> Iterator[ModuleType]:
    for package in (optdnn.passes, optdnn.passes.rules):
        for module in pkgutil.iter_modules(package.__path__):
            yield import_module(f"{package.__name__}.{module.name}")


def shipped() -> Iterator[str]:
    """Names of the package's own rules: tests may define others."""
    for module in modules():
        for found in vars(module).values():
            if isinstance(found, Rule) or (isinstance(found, type) and issubclass(found, Rule)):
                yield from [found.name] if found.name else []


def literals() -> Iterator[str]:
    """Names in calls: of rewrites without a rule, Fired("name", …), and of instances of rules, _Absorb("name", …)."""
    for module in modules():
        classes = {n for n, c in vars(module).items() if isinstance(c, type) and issubclass(c, Rule)}
        for node in ast.walk(ast.parse(Path(str(module.__file__)).read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in {"Fired", *classes}:
                first = node.args[0] if node.args else None
                yield from [first.value] if isinstance(first, ast.Constant) and isinstance(first.value, str) else []


def test_every_rule_has_words() -> None:
    further = {"fold_constants", "optimize_bodies", "same_op", "same_constant", *OF_PRODUCTS}
    assert {*shipped(), *literals(), *further} == set(RULES)


def test_rewrites_are_counted() -> None:
    assert in_words(["conv_bn", "gelu", "conv_bn", "unknown"]) == [
        f"2 × {RULES['conv_bn']}",
        "1 × Gelus recognized",
        "1 × unknown",
    ]
