"""Each rule has words for what it does."""

from __future__ import annotations

import ast
import pkgutil
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import optdnn.passes
from optdnn.config import QUANTIZED
from optdnn.passes.base import Rule
from optdnn.passes.support.words import RULES, told


def shipped(of: type[Rule]) -> Iterator[str]:
    """Names of the package's own rules: tests may define others."""
    for rule in of.__subclasses__():
        if rule.name and rule.__module__.startswith("optdnn.passes."):
            yield rule.name
        yield from shipped(rule)


def literals() -> Iterator[str]:
    """Names that passes give their rewrites without a rule: Fired("name", …)."""
    for folder in optdnn.passes.__path__:
        for file in Path(folder).glob("*.py"):
            for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "Fired":
                    first = node.args[0]
                    yield from [first.value] if isinstance(first, ast.Constant) else []


def test_every_rule_has_words() -> None:
    for module in pkgutil.iter_modules(optdnn.passes.__path__):
        import_module(f"optdnn.passes.{module.name}")
    further = {"fold_constants", "optimize_bodies", "same_op", "same_constant", *QUANTIZED}
    assert {*shipped(Rule), *literals(), *further} == set(RULES)


def test_rewrites_are_counted() -> None:
    assert told(["conv_bn", "gelu", "conv_bn", "unknown"]) == [
        f"2 × {RULES['conv_bn']}",
        "1 × Gelus recognized",
        "1 × unknown",
    ]
