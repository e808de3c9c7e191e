"""The statements and declarations of generated kernel texts (see :mod:`optdnn.runtime.cuda.kernel_text.check`)."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

from optdnn.runtime.cuda.kernel_text.expressions import (
    MATRIX,
    MEMBERS,
    POINTER,
    SHARED,
    TYPES,
    VALUE,
    Expressions,
    words,
)

DEFINED = words("""
    epilogue epilogue_beside prologue between between_one after after_one word_offset normalized larger reflected reflected_tap
    first_result second_result first_activation second_activation third_activation
""") | {f"{name}_{n}" for name in ("epilogue", "epilogue_beside") for n in range(6)}
"""Functions that a text may define."""
_LAMBDA = re.compile(r"at_[a-z]\w*|store")


class Source(Expressions):
    """A whole text."""

    def source(self, function: str) -> None:
        """The whole text; ``function``: the kernel that it must define."""
        made = not function
        while self.token != "":
            if self.token == "struct":
                self.parameters()
            elif self.accept("extern", '"C"', "__global__", "void", "__launch_bounds__", "("):
                self.number()
                self.expect(")", function, "(", "const", "__grid_constant__", "Params", "p", ")")
                if made or not self.fields:
                    self.refuse("it defines a kernel that is not expected")
                self.scopes, self.lambdas = [{}], [set()]
                self.block()
                made = True
            else:
                self.device_function()
        if not made:
            self.refuse(f"it does not define {function}")

    def parameters(self) -> None:
        """``struct Params { … };``"""
        self.expect("struct", "Params", "{")
        if self.fields:
            self.refuse("it has two structs of parameters")
        while not self.accept("}"):
            self.accept("const")
            if self.accept("void"):
                self.expect("*")
                self.at -= 1
            else:
                self.value_type()
            for _ in self.separated():
                pointer = self.accept("*")
                name, axes = self.new_name(), 0
                while self.accept("["):
                    self.number()
                    self.expect("]")
                    axes += 1
                self.fields[name] = POINTER if pointer else axes
            self.expect(";")
        self.expect(";")

    def device_function(self) -> None:
        """``DEVICE float name(float x, const float* k) { … }``"""
        if self.accept("template", "<", "typename", "T", ">"):
            self.types = TYPES | {"T"}
        self.expect("DEVICE")
        self.value_type()
        name = self.take()
        if name not in DEFINED or name in self.functions:
            self.refuse(f"{name[:40]!r} is not a valid function name")
        self.expect("(")
        self.scopes, self.lambdas = [{}], [set()]
        for _ in self.separated():
            self.accept("const")
            self.value_type()
            pointer = self.accept("*")
            self.declare(self.new_name(), POINTER if pointer else VALUE)
        self.expect(")")
        self.block()
        self.functions.add(name)
        self.types = TYPES

    # ---------------------------------------------------------------- statements

    def block(self) -> None:
        self.expect("{")
        with self.scope():
            while not self.accept("}"):
                self.statement()

    def statement(self) -> None:
        self.nest()
        token = self.token
        if token == "{":
            self.block()
        elif token in ("if", "switch"):
            self.at += 1
            self.enclosed(self.value)
            self.body()
            if token == "if" and self.accept("else"):
                self.body()
        elif self.accept("for", "("):
            self.loop()
        elif self.accept("case"):
            self.number()
            self.expect(":")
        elif self.accept("return"):
            if self.token != ";":
                self.value()
            self.expect(";")
        elif token in ("break", "continue", ";"):
            self.at += 1
            if token != ";":
                self.expect(";")
        elif not self.declaration():
            self.expression()
            self.expect(";")
        self.depth -= 1

    def body(self) -> None:
        """One statement, with its own scope."""
        with self.scope():
            self.statement()

    @contextmanager
    def scope(self) -> Iterator[None]:
        self.scopes.append({})
        self.lambdas.append(set())
        yield
        self.scopes.pop()
        self.lambdas.pop()

    def loop(self) -> None:
        """``for (int i = 0; i < n; i++) …``, or ``for (; …``."""
        with self.scope():
            if not self.accept(";") and not self.declaration():
                self.refuse("a loop begins without a declaration")
            self.value()
            self.expect(";")
            if self.token != ")":
                self.expression()
            self.expect(")")
            self.body()

    def declaration(self) -> bool:
        """A declaration with its semicolon; False if the statement is not a declaration."""
        begin = self.at
        if self.accept("extern", "__shared__", "__align__", "("):
            self.number()
            self.expect(")")
            if self.accept("unsigned", "char"):
                self.declare(self.new_name(), SHARED)
            else:
                self.value_type()
                self.declare(self.new_name(), 1)
            self.expect("[", "]", ";")
            return True
        if self.token in ("struct", "union"):
            self.together()
            return True
        shared = self.accept("__shared__")
        if shared and self.accept("__align__", "("):
            self.number()
            self.expect(")")
        self.accept("const")
        if self.accept("auto"):
            self.automatic()
            return True
        if self.accept("Matrix"):
            self.matrices()
            return True
        if not self.is_type(self.token) and self.token != "Pack":
            self.at = begin
            return False
        self.value_type()
        if self.token == "(":  # a conversion that begins an expression
            self.at = begin
            return False
        for _ in self.separated():
            self.declarator(shared)
        self.expect(";")
        return True

    def declarator(self, shared: bool) -> None:
        """``name``, ``name[3]``, ``name = value``, ``* name = pointer``, ``name(pointer)``."""
        if self.accept("*"):
            self.accept("const")
            name = self.new_name()
            self.expect("=")
            if shared or self.operand_or_sum() != POINTER:
                self.refuse(f"the pointer {name} begins as none")
            self.declare(name, POINTER)
            return
        name, axes = self.new_name(), 0
        while self.accept("["):
            if self.token != "]":
                self.value()
            self.expect("]")
            axes += 1
        self.declare(name, axes)
        if self.accept("("):
            self.pointer()
            self.expect(")")
        elif self.accept("=", "{"):
            self.values("}")
        elif self.accept("="):
            self.value()

    def together(self) -> None:
        """``struct { f16 lane[1]; } v;`` and ``union { f32 from; u32 to; } bits;``, of numbers."""
        self.at += 1
        self.expect("{")
        while not self.accept("}"):
            self.value_type()
            if self.take() not in (*MEMBERS, "lane"):
                self.refuse("it defines a struct")
            if self.accept("["):
                self.number()
                self.expect("]")
            self.expect(";")
        self.declare(self.new_name(), VALUE)
        self.expect(";")

    def automatic(self) -> None:
        """``auto v = value;`` and ``auto at = [&](i64 a, i64 b) -> i64 { … };``"""
        name = self.new_name()
        self.expect("=")
        if self.accept("[", "&", "]", "("):
            inside: dict[str, int] = {}
            while not self.accept(")"):
                self.value_type()
                inside[self.new_name()] = VALUE
                if self.token != ")":
                    self.expect(",")
            if self.accept("->"):
                self.value_type()
            if not _LAMBDA.fullmatch(name):
                self.refuse(f"{name!r} is not a valid function name")
            self.scopes.append(inside)
            self.block()
            self.scopes.pop()
            self.lambdas[-1].add(name)
        else:
            self.value()
            self.declare(name, VALUE)
        self.expect(";")

    def matrices(self) -> None:
        """``Matrix left = {pointer, int, int}, right = …;``"""
        for _ in self.separated():
            name = self.new_name()
            self.expect("=", "{")
            self.pointer()
            self.expect(",")
            self.values("}")
            self.declare(name, MATRIX)
        self.expect(";")
