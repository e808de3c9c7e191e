"""The language of generated kernel texts, and its checker: what an engine file that nobody vouches for may bring as source.

The renderers (:mod:`optdnn.runtime.cuda.render`, ``optdnn.tactics.cuda``) write a small subset of CUDA C++. :func:`check_text` parses
a text by the grammar of that subset and refuses everything else:

- Preprocessor lines are ``#pragma unroll``, ``#define NAME integer`` for names that templates leave open, and known includes.
- Inline assembly is compared with what the renderer gives for the same parameters.
- Calls go to a list of arithmetic functions, to functions and lambdas of the text itself, and to ``launch_dependents`` and its like.
  Nothing allocates, prints, traps or launches.
- A pointer is a field of the kernel's parameters, shared memory, or one of these plus an offset. There are no addresses of
  variables, no casts of numbers to pointers and none of pointers to numbers.

The checker does not bound indices and loops: a text may read and write beside its buffers, and it may not end.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable
from functools import cache, lru_cache
from typing import NoReturn

from optdnn.runtime.cuda import attention, render, separable
from optdnn.runtime.cuda.nvrtc import KERNELS, TEMPLATE

VALUE, POINTER, SHARED, MATRIX = 0, -1, -2, -3
"""Kinds of an expression: a number, or a small struct of numbers; a pointer; untyped shared memory; a ``Matrix`` of matmul_fp32.cuh. A
positive kind is an array of so many axes."""

TYPES = frozenset(
    "float double bool int u8 i8 u16 i16 u32 i32 u64 i64 f16 bf16 f32 f64 boolean e4m3 e5m2 e4m3fnuz e5m2fnuz e2m3 e3m2 e2m1 e8m0 "
    "i4 u4 i2 u2 uint4 float2".split()
)
FUNCTIONS = frozenset(
    "widen byte_to_float quotient quantized max_nan min_nan floor_mod integer_power max2_f16 max2_bf16 min max pow powf fmod sqrt exp "
    "expf expm1 expm1f log log1p log1pf sin cos tan asin acos atan sinh cosh tanh tanhf asinh acosh atanh erf erff fabs fabsf ceil "
    "floor rint isinf fmaxf fminf fmaf tanh_fast pack2 row_of __expf __fdividef __saturatef __int_as_float __shfl_xor_sync "
    "__syncthreads launch_dependents wait_for_predecessor own_row own_column".split()
)
"""Functions of numbers, and barriers."""
DEFINED = frozenset("epilogue prologue between between_one word_offset normalized larger reflected".split())
"""Functions that a text may define."""
BUILT_IN = frozenset(("threadIdx", "blockIdx", "gridDim"))
MEMBERS = frozenset(("x", "y", "z", "w", "from", "to"))
RESERVED = frozenset(
    "asm auto bool break case catch char class const constexpr continue default delete do double else enum explicit extern false float "
    "for friend goto if inline int long mutable namespace new operator private protected public register return short signed sizeof "
    "static struct switch template this throw true try typedef typeid typename union unsigned using virtual void volatile while".split()
)
DEBUGGING = frozenset(("SEEDED_FAULT", "PROFILE", "RACECHECK", "INITCHECK", "BARRIER_TRAP"))
"""Macros of the templates that only tests and benchmarks define."""
INCLUDES = {"matmul_fp32.cu": frozenset(("matmul_fp32.cuh",))}
"""Template -> what a text for it may include."""
TEXT_LIMIT, DEPTH_LIMIT, INTEGER_LIMIT = 1 << 19, 200, 1 << 24
"""Longest text in characters, deepest nesting of brackets, largest defined integer."""

_ASSIGN = frozenset(("=", "+=", "-=", "*=", "/=", "%=", "&=", "|=", "^=", "<<=", ">>="))
_BINARY = frozenset(("+", "-", "*", "/", "%", "<<", ">>", "<", ">", "<=", ">=", "==", "!=", "&", "|", "^", "&&", "||"))
_TOKEN = re.compile(
    r"""(?:\s+|//[^\n]*)*(?P<token> "C" | [A-Za-z_]\w*
    | (?:0x[0-9a-f]+ | \d+\.?\d*(?:e[+-]?\d+)?) (?:f|u|ull|LL|ULL)? (?![\w.])
    | <<= | >>= | [-+*/%&|^=!<>]= | && | \|\| | << | >> | \+\+ | -- | -> | [-+*/%&|^=!<>~?:;,.(){}\[\]] | (?P<strange>.) | \Z )""",
    re.VERBOSE | re.DOTALL,
)
_ELSEWHERE = re.compile(r"[^ -~\n]|\\|/\*|\?\?")
"""What the compiler's lexer reads otherwise than :data:`_TOKEN`, or might: control characters, spliced lines, trigraphs."""
_DEFINE = re.compile(r"#define ([A-Z][A-Z0-9_]*) (-?\d{1,10})")
_LAMBDA = re.compile(r"at_[a-z]\w*|store")
_INCLUDE = re.compile(r'#include "([\w.]+)"')


class TextRefused(Exception):
    """A text is not of the language; the message says where and why."""


@lru_cache(maxsize=1024)
def check_text(text: str, template: str, function: str) -> None:
    """Check a generated text for ``template``. ``function``: the kernel that the text defines; "" where the template has it.

    Raises TextRefused.
    """
    if len(text) > TEXT_LIMIT:
        raise TextRefused(f"it is longer than {TEXT_LIMIT} characters")
    if found := _ELSEWHERE.search(text):
        raise TextRefused(f"line {text.count(chr(10), 0, found.start()) + 1} has {found[0]!r}")
    rest = _preprocessed(text, template)
    try:
        _Parser(_ASSEMBLY.sub(_same_assembly, rest)).source(function)
    except RecursionError as error:
        raise TextRefused("it is nested too deeply") from error


@cache
def macros() -> frozenset[str]:
    """The macros that the templates leave open: names in capitals, but for those that a template defines as something else than an
    integer."""
    paths = [path for path in sorted(KERNELS.iterdir()) if TEMPLATE.fullmatch(path.name)]
    texts = [re.sub(r"//[^\n]*", "", path.read_text(encoding="utf-8")) for path in paths]
    used = {name for text in texts for name in re.findall(r"\b[A-Z][A-Z0-9_]+\b", text)}
    defined = {name for text in texts for name in re.findall(r"#\s*define\s+(\w+)(?! -?\d+\b)", text)}
    return frozenset(used - defined - DEBUGGING)


def _preprocessed(text: str, template: str) -> str:
    """The text with its preprocessor lines blanked. Raises TextRefused for lines that the renderers do not write."""
    lines = text.split("\n")
    seen: set[str] = set()
    for k, line in enumerate(lines):
        bare = line.strip(" \t")
        if not bare.startswith("#"):
            if "#" in bare:
                raise TextRefused(f"line {k + 1} has a preprocessor sign")
            continue
        lines[k] = ""
        if bare == "#pragma unroll":
            continue
        if (define := _DEFINE.fullmatch(bare)) is not None:
            name, value = define[1], int(define[2])
            if name not in macros() or name in seen or abs(value) > INTEGER_LIMIT:
                raise TextRefused(f"line {k + 1} defines {name} as {value}")
            seen.add(name)
        elif (include := _INCLUDE.fullmatch(bare)) is None or include[1] not in INCLUDES.get(template, ()):
            raise TextRefused(f"line {k + 1} is {bare[:60]!r}")
    return "\n".join(lines)


# ---------------------------------------------------------------- assembly


def _same_assembly(match: re.Match[str]) -> str:
    """Nothing, where a function with assembly is what its renderer gives. Raises TextRefused."""
    name, text = match[1], match[0]
    if text not in _RENDERED[name](text):
        raise TextRefused(f"{name} is not what this version of optdnn renders")
    return "\n" * text.count("\n")


def _columns(text: str) -> int:
    found = re.search(r"\.m64n(\d{1,3})k", text)
    return int(found[1]) if found else 0


def _both_in_memory(text: str) -> Iterable[str]:
    for dtype, across in itertools.product(render.WGMMA_KINDS, (False, True)):
        if render.wgmma_columns(_columns(text), dtype):
            made = render.wgmma(_columns(text), dtype, across=across)
            yield made
            yield made.replace("wgmma_step", "wgmma_scores")


def _one_in_registers(text: str) -> Iterable[str]:
    for dtype in ("float16", "bfloat16"):
        if render.wgmma_columns(_columns(text), dtype):
            yield attention.values_instruction(_columns(text), dtype)
            yield separable.pixels_instruction(_columns(text), dtype)


def _between(text: str) -> Iterable[str]:
    bounds = re.findall(r'asm\("(max|min)\.(bf16x2|f16x2) .*"r"\(0x([0-9a-f]{1,8})u\)', text)
    yield separable.bounded_pair([(name, kind, int(bits, 16)) for name, kind, bits in bounds])


_RENDERED: dict[str, Callable[[str], Iterable[str]]] = {
    "wgmma_step": _both_in_memory, "wgmma_scores": _both_in_memory, "wgmma_values": _one_in_registers,
    "wgmma_pixels": _one_in_registers, "multiply": lambda text: map(render.mma, render.WGMMA_KINDS), "between": _between,
}  # fmt: skip
"""Function with assembly -> the texts that it may have."""
_ASSEMBLY = re.compile(rf"^DEVICE \w+ ({'|'.join(_RENDERED)})\([^\n]*\{{\n.*?^\}}$", re.MULTILINE | re.DOTALL)


# ---------------------------------------------------------------- everything else


class _Parser:
    """Recursive descent over tokens; it keeps no tree, only the kind of each expression and the names in scope."""

    def __init__(self, text: str):
        self.text = text
        found = list(_TOKEN.finditer(text))
        self.starts = [m.start("token") for m in found]
        self.tokens = [m["token"] or "" for m in found]
        self.at, self.depth = 0, 0
        self.scopes: list[dict[str, int]] = []
        self.fields: dict[str, int] = {}
        self.types = TYPES
        self.functions: set[str] = set()
        self.lambdas: list[set[str]] = [set()]
        for m in found:
            if m["strange"] is not None:
                self.at = found.index(m)
                self.refuse(f"{m['strange']!r} is no part of the language")

    # ------------------------------------------------ tokens

    @property
    def token(self) -> str:
        return self.tokens[self.at]

    def ahead(self, count: int = 1) -> str:
        return self.tokens[min(self.at + count, len(self.tokens) - 1)]

    def take(self) -> str:
        token = self.tokens[self.at]
        if token == "":
            self.refuse("it ends too soon")
        self.at += 1
        return token

    def accept(self, *tokens: str) -> bool:
        """Step over these tokens, where they come next."""
        if tuple(self.tokens[self.at : self.at + len(tokens)]) != tokens:
            return False
        self.at += len(tokens)
        return True

    def expect(self, *tokens: str) -> None:
        for token in tokens:
            if self.token != token:
                self.refuse(f"{token!r} is expected, not {self.token!r}")
            self.at += 1

    def refuse(self, why: str) -> NoReturn:
        line = self.text.count("\n", 0, self.starts[min(self.at, len(self.starts) - 1)]) + 1
        raise TextRefused(f"line {line}: {why}")

    # ------------------------------------------------ names

    def new_name(self) -> str:
        name = self.take()
        if not re.fullmatch(r"[a-z][a-z0-9_]{0,40}", name) or name in RESERVED:
            self.refuse(f"{name[:40]!r} is no name for a variable")
        return name

    def declare(self, name: str, kind: int) -> None:
        self.scopes[-1][name] = kind

    def lookup(self, name: str) -> int | None:
        return next((scope[name] for scope in reversed(self.scopes) if name in scope), None)

    def is_type(self, token: str) -> bool:
        """Whether a token names a type of numbers, hidden by no variable (``i2`` may be either)."""
        return token in self.types and self.lookup(token) is None

    def number(self) -> int:
        token = self.take()
        if not token.isdecimal():
            self.refuse(f"a whole number is expected, not {token!r}")
        return int(token)

    def value_type(self) -> None:
        """A type of numbers, or of several of them together."""
        if self.accept("Pack", "<"):
            self.value_type()
            self.expect(",")
            self.number()
            self.expect(">")
        elif self.take() not in self.types:
            self.at -= 1
            self.refuse(f"{self.token!r} is no type")

    # ------------------------------------------------ a source

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
                    self.refuse("it defines a kernel that nobody asked for")
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
            while True:
                pointer = self.accept("*")
                name, axes = self.new_name(), 0
                while self.accept("["):
                    self.number()
                    self.expect("]")
                    axes += 1
                self.fields[name] = POINTER if pointer else axes
                if not self.accept(","):
                    break
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
            self.refuse(f"{name[:40]!r} is no name for a function")
        self.expect("(")
        self.scopes, self.lambdas = [{}], [set()]
        while True:
            self.accept("const")
            self.value_type()
            pointer = self.accept("*")
            self.declare(self.new_name(), POINTER if pointer else VALUE)
            if not self.accept(","):
                break
        self.expect(")")
        self.block()
        self.functions.add(name)
        self.types = TYPES

    # ------------------------------------------------ statements

    def block(self) -> None:
        self.expect("{")
        self.scopes.append({})
        self.lambdas.append(set())
        while not self.accept("}"):
            self.statement()
        self.scopes.pop()
        self.lambdas.pop()

    def statement(self) -> None:
        self.nest()
        token = self.token
        if token == "{":
            self.block()
        elif token in ("if", "switch"):
            self.at += 1
            self.expect("(")
            self.value()
            self.expect(")")
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
        """One statement, with a scope of its own."""
        self.scopes.append({})
        self.lambdas.append(set())
        self.statement()
        self.scopes.pop()
        self.lambdas.pop()

    def nest(self) -> None:
        self.depth += 1
        if self.depth > DEPTH_LIMIT:
            self.refuse("it is nested too deeply")

    def loop(self) -> None:
        """``for (int i = 0; i < n; i++) …``, or ``for (; …``."""
        self.scopes.append({})
        if not self.accept(";") and not self.declaration():
            self.refuse("a loop begins without a declaration")
        self.value()
        self.expect(";")
        if self.token != ")":
            self.expression()
        self.expect(")")
        self.body()
        self.scopes.pop()

    def declaration(self) -> bool:
        """A declaration with its semicolon; False where the statement is none."""
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
        while True:
            self.declarator(shared)
            if not self.accept(","):
                break
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
                self.refuse("it has a struct of its own")
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
                self.refuse(f"{name!r} is no name for a function")
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
        while True:
            name = self.new_name()
            self.expect("=", "{")
            self.pointer()
            self.expect(",")
            self.values("}")
            self.declare(name, MATRIX)
            if not self.accept(","):
                break
        self.expect(";")

    # ------------------------------------------------ expressions

    def value(self) -> None:
        if (kind := self.expression()) != VALUE:
            self.refuse(f"a number is expected, not {_name_of(kind)}")

    def pointer(self) -> None:
        if (kind := self.expression()) != POINTER:
            self.refuse(f"a pointer is expected, not {_name_of(kind)}")

    def values(self, end: str) -> None:
        """Numbers up to a closing bracket."""
        while not self.accept(end):
            self.value()
            if self.token != end:
                self.expect(",")

    def expression(self) -> int:
        """An expression, with assignments and choices; returns its kind."""
        self.nest()
        kind = self.operand_or_sum()
        if self.token in _ASSIGN:
            plain = self.take() == "="
            if (kind == POINTER and not plain) or kind not in (VALUE, POINTER) or self.expression() != kind:
                self.refuse("what is assigned is of another kind")
        while self.token == "?":
            if kind != VALUE:
                self.refuse("a condition is no number")
            self.at += 1
            self.value()
            self.expect(":")
            if self.operand_or_sum() != VALUE:
                self.refuse("a choice is no number")
        self.depth -= 1
        return kind

    def operand_or_sum(self) -> int:
        """Operands between binary operators. A pointer comes first, and numbers are added to it."""
        kind = self.operand()
        while self.token in _BINARY:
            operator = self.take()
            allowed = kind == VALUE or (kind == POINTER and operator in "+-*/%")
            if not allowed or self.operand() != VALUE:
                self.refuse(f"{operator!r} of something else than numbers")
        return kind

    def operand(self) -> int:
        token = self.take()
        if token in ("-", "!", "~", "++", "--", "*"):
            wanted = POINTER if token == "*" else VALUE
            if self.operand() != wanted:
                self.refuse(f"{token!r} of something else than {_name_of(wanted)}")
            return VALUE
        if token == "(":
            if self.is_type(self.token) and self.ahead() == ")":  # a conversion: (int)(-x)
                self.at += 2
                if self.operand() != VALUE:
                    self.refuse("a conversion of something else than a number")
                return VALUE
            kind = self.expression()
            self.expect(")")
            return self.behind(kind)
        if token[0].isdigit() or token in ("true", "false"):
            return VALUE
        self.at -= 1
        return self.behind(self.named())

    def named(self) -> int:
        """What begins with a name."""
        token = self.token
        if self.is_type(token) or token == "Pack":
            self.value_type()
            self.expect("(")
            if token == "Pack":
                self.pointer()
            else:
                self.value()
            self.expect(")")
            return VALUE
        self.at += 1
        if token in ("static_cast", "reinterpret_cast"):
            return self.cast(token)
        if token == "sizeof":
            self.expect("(")
            self.value_type()
            self.expect(")")
            return VALUE
        if token == "narrow" and self.accept("<"):
            self.value_type()
            self.expect(">")
        if self.accept("("):
            self.call(token)
            return VALUE
        kind = self.lookup(token)
        if kind is not None:
            return kind
        if token == "p" and self.accept("."):
            name = self.take()
            if name not in self.fields:
                self.refuse(f"the parameters have no {name[:40]!r}")
            return self.fields[name]
        if token in BUILT_IN or token in macros():
            return VALUE
        self.at -= 1
        self.refuse(f"{token[:40]!r} is not known")

    def cast(self, how: str) -> int:
        """``static_cast<const f16*>(pointer)``, ``reinterpret_cast<float*>(memory)``."""
        self.expect("<")
        self.accept("const")
        self.value_type()
        self.expect("*", ">", "(")
        if self.expression() != (POINTER if how == "static_cast" else SHARED):
            self.refuse(f"a {how} of something else than it is for")
        self.expect(")")
        return POINTER

    def call(self, name: str) -> None:
        """The arguments of a call, behind the opening bracket."""
        if name == "product_tile" and self.lookup("product_tile") is None:
            for wanted in (2, 1, MATRIX, MATRIX):
                if self.expression() != wanted:
                    self.refuse("product_tile gets something else than it takes")
                self.expect(",")
        elif self.lookup(name) is not None or not (
            name in FUNCTIONS or name == "narrow" or name in self.functions or any(name in s for s in self.lambdas)
        ):
            self.at -= 2
            self.refuse(f"{name[:40]!r} is no function that kernels call")
        self.values(")")

    def behind(self, kind: int) -> int:
        """Indices, members and steps behind an operand."""
        while True:
            if self.accept("["):
                self.value()
                self.expect("]")
                if kind not in (POINTER,) and kind < 1:
                    self.refuse(f"an index of {_name_of(kind)}")
                kind = VALUE if kind == POINTER else kind - 1
            elif self.token == ".":
                if kind != VALUE:
                    self.refuse(f"a member of {_name_of(kind)}")
                self.at += 1
                member = self.take()
                if member == "lane":
                    kind = 1
                elif member == "store":
                    self.expect("(")
                    self.pointer()
                    self.expect(")")
                elif member not in MEMBERS:
                    self.refuse(f"{member[:40]!r} is no member")
            elif self.token in ("++", "--"):
                if kind != VALUE:
                    self.refuse(f"a step of {_name_of(kind)}")
                self.at += 1
            else:
                return kind


def _name_of(kind: int) -> str:
    return {VALUE: "a number", POINTER: "a pointer", SHARED: "shared memory", MATRIX: "a matrix"}.get(kind, "an array")
