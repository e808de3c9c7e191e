"""The expressions of generated kernel texts: tokens, names in scope, and the kind of each expression (see
:mod:`optdnn.runtime.cuda.kernel_text.check`)."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import cache
from typing import NoReturn

from optdnn.runtime.cuda.compile.nvrtc import template_files

VALUE, POINTER, SHARED, MATRIX = 0, -1, -2, -3
"""Kinds of an expression: a number, or a small struct of numbers; a pointer; untyped shared memory; a ``Matrix`` of
matmul_fp32.cuh. A positive kind is an array with this number of axes."""


def words(text: str) -> frozenset[str]:
    return frozenset(text.split())


TYPES = words("""
    float double bool int u8 i8 u16 i16 u32 i32 u64 i64 f16 bf16 f32 f64 boolean e4m3 e5m2 e4m3fnuz e5m2fnuz e2m3 e3m2 e2m1 e8m0
    i4 u4 i2 u2 uint4 float2 float4 Size
""")
FUNCTIONS = words("""
    widen byte_to_float quotient quantized max_nan min_nan floor_mod integer_power max2_f16 max2_bf16 min max pow powf fmod sqrt
    exp expf expm1 expm1f log log1p log1pf sin cos tan asin acos atan sinh cosh tanh tanhf asinh acosh atanh erf erff fabs fabsf
    ceil floor rint rintf isinf fmaxf fminf fmaf saturated_fma tanh_fast silu_pair pack2 row_of __expf __sinf __cosf __fdividef
    __saturatef __int_as_float __shfl_xor_sync __shfl_up_sync __shfl_sync __syncthreads launch_dependents wait_for_predecessor
    own_row own_column column_of fmax fmin
""")
"""Functions of numbers, barriers, and the two calls of dependent launch."""
MEETINGS = words("meet arrives_last add_to")
"""Calls with a pointer as first argument: synchronization of blocks, with a pointer to counters, and additions of threads to one
number, at a pointer."""
BUILT_IN = words("threadIdx blockIdx gridDim")
MEMBERS = words("x y z w from to")
"""Numbers within a small struct; ``lane`` is an array of them."""
RESERVED = words("""
    asm auto bool break case catch char class const constexpr continue default delete do double else enum explicit extern false
    float for friend goto if inline int long mutable namespace new operator private protected public register return short signed
    sizeof static struct switch template this throw true try typedef typeid typename union unsigned using virtual void volatile
    while
""")
DEBUGGING = words("SEEDED_FAULT PROFILE RACECHECK INITCHECK BARRIER_TRAP")
"""Macros of the templates that only tests and benchmarks define."""
DEPTH_LIMIT = 200
"""Deepest nesting."""

_ASSIGN = frozenset(("=", "+=", "-=", "*=", "/=", "%=", "&=", "|=", "^=", "<<=", ">>="))
_BINARY = frozenset(("+", "-", "*", "/", "%", "<<", ">>", "<", ">", "<=", ">=", "==", "!=", "&", "|", "^", "&&", "||"))
_TOKEN = re.compile(
    r"""(?:\s+|//[^\n]*)*(?P<token> "C" | [A-Za-z_]\w*
    | (?:0x[0-9a-f]+ | \d+(?:\.\d*)?(?:e[+-]?\d+)?) (?:f|u|ull|LL|ULL)? (?![\w.])
    | <<= | >>= | [-+*/%&|^=!<>]= | && | \|\| | << | >> | \+\+ | -- | -> | [-+*/%&|^=!<>~?:;,.(){}\[\]] | (?P<strange>.) | \Z )""",
    re.VERBOSE | re.DOTALL,
)


class TextRefused(Exception):
    """A text is not in the language; the message gives the position and the reason."""


@cache
def macros() -> frozenset[str]:
    """The macros that the templates leave open: names in capitals, except those that a template defines as anything but an
    integer."""
    texts = [re.sub(r"//[^\n]*", "", path.read_text(encoding="utf-8")) for path in template_files().values()]
    used = {name for text in texts for name in re.findall(r"\b[A-Z][A-Z0-9_]+\b", text)}
    defined = {name for text in texts for name in re.findall(r"#\s*define\s+(\w+)\b(?! -?\d+\b)", text)}
    return frozenset(used - defined - DEBUGGING)


class Expressions:
    """A recursive-descent parser. It builds no tree; it tracks only the kind of each expression and the names in scope."""

    def __init__(self, text: str):
        self.text = text
        self.tokens: list[str] = []
        self.starts: list[int] = []
        self.at, self.depth = 0, 0
        for found in _TOKEN.finditer(text):
            self.tokens.append(found["token"])
            self.starts.append(found.start("token"))
            if found["strange"] is not None:
                self.at = len(self.tokens) - 1
                self.refuse(f"{found['strange']!r} is not part of the language")
        self.scopes: list[dict[str, int]] = []
        self.fields: dict[str, int] = {}
        self.types = TYPES
        self.functions: set[str] = set()
        self.lambdas: list[set[str]] = [set()]

    # ---------------------------------------------------------------- tokens

    @property
    def token(self) -> str:
        return self.tokens[self.at]

    def ahead(self) -> str:
        return self.tokens[min(self.at + 1, len(self.tokens) - 1)]

    def take(self) -> str:
        token = self.tokens[self.at]
        if token == "":
            self.refuse("it ends too soon")
        self.at += 1
        return token

    def accept(self, *tokens: str) -> bool:
        """Skip these tokens if they come next."""
        if tuple(self.tokens[self.at : self.at + len(tokens)]) != tokens:
            return False
        self.at += len(tokens)
        return True

    def expect(self, *tokens: str) -> None:
        for token in tokens:
            if self.token != token:
                self.refuse(f"{token!r} is expected, not {self.token!r}")
            self.at += 1

    def separated(self) -> Iterator[None]:
        """Yields once, and again after each following comma."""
        yield
        while self.accept(","):
            yield

    def enclosed(self, part: Callable[[], object]) -> None:
        self.expect("(")
        part()
        self.expect(")")

    def refuse(self, why: str) -> NoReturn:
        line = self.text.count("\n", 0, self.starts[min(self.at, len(self.starts) - 1)]) + 1
        raise TextRefused(f"line {line}: {why}")

    # ---------------------------------------------------------------- names

    def new_name(self) -> str:
        name = self.take()
        if not re.fullmatch(r"[a-z][a-z0-9_]{0,40}", name) or name in RESERVED:
            self.refuse(f"{name[:40]!r} is not a valid variable name")
        return name

    def declare(self, name: str, kind: int) -> None:
        self.scopes[-1][name] = kind

    def lookup(self, name: str) -> int | None:
        return next((scope[name] for scope in reversed(self.scopes) if name in scope), None)

    def is_type(self, token: str) -> bool:
        """Whether a token names a number type and is not hidden by a variable (``i2`` may be either)."""
        return token in self.types and self.lookup(token) is None

    def number(self) -> int:
        token = self.take()
        if not token.isdecimal() or len(token) > 10:
            self.refuse(f"a whole number is expected, not {token!r}")
        return int(token)

    def value_type(self) -> None:
        """Parse a number type, or a type of several numbers together."""
        if self.accept("Pack", "<"):
            self.value_type()
            self.expect(",")
            self.number()
            self.expect(">")
        elif self.take() not in self.types:
            self.at -= 1
            self.refuse(f"{self.token!r} is no type")

    def nest(self) -> None:
        self.depth += 1
        if self.depth > DEPTH_LIMIT:
            self.refuse("it is nested too deeply")

    # ---------------------------------------------------------------- expressions

    def value(self) -> None:
        if (kind := self.expression()) != VALUE:
            self.refuse(f"a number is expected, not {name_of(kind)}")

    def pointer(self) -> None:
        if (kind := self.expression()) != POINTER:
            self.refuse(f"a pointer is expected, not {name_of(kind)}")

    def values(self, end: str) -> None:
        """Parse numbers up to a closing bracket."""
        while not self.accept(end):
            self.value()
            if self.token != end:
                self.expect(",")

    def expression(self) -> int:
        """Parse an expression, with assignments and conditional operators; returns its kind."""
        self.nest()
        kind = self.operand_or_sum()
        if self.token in _ASSIGN:
            plain = self.take() == "="
            if (kind == POINTER and not plain) or kind not in (VALUE, POINTER) or self.expression() != kind:
                self.refuse("the assigned expression is of another kind")
        while self.token == "?":
            if kind != VALUE:
                self.refuse("a condition is not a number")
            self.at += 1
            self.value()
            self.expect(":")
            if self.operand_or_sum() != VALUE:
                self.refuse("a choice is not a number")
        self.depth -= 1
        return kind

    def operand_or_sum(self) -> int:
        """Parse operands between binary operators. A pointer comes first, and numbers are added to it."""
        kind = self.operand()
        while self.token in _BINARY:
            operator = self.take()
            allowed = kind == VALUE or (kind == POINTER and operator in "+-*/%")
            if not allowed or self.operand() != VALUE:
                self.refuse(f"{operator!r} of operands that are not numbers")
        return kind

    def operand(self) -> int:
        token = self.take()
        if token in ("-", "!", "~", "++", "--", "*"):
            wanted = POINTER if token == "*" else VALUE
            if self.operand() != wanted:
                self.refuse(f"{token!r} of an operand that is not {name_of(wanted)}")
            return VALUE
        if token == "(":
            if self.is_type(self.token) and self.ahead() == ")":  # a conversion: (int)(-x)
                self.at += 2
                if self.operand() != VALUE:
                    self.refuse("a conversion of an operand that is not a number")
                return VALUE
            kind = self.expression()
            self.expect(")")
            return self.behind(kind)
        if token[0].isdigit() or token in ("true", "false"):
            return VALUE
        self.at -= 1
        return self.behind(self.named())

    def named(self) -> int:
        """Parse an operand that begins with a name."""
        token = self.token
        if self.is_type(token) or token == "Pack":
            self.value_type()
            self.enclosed(self.pointer if token == "Pack" else self.value)
            return VALUE
        self.at += 1
        if token in ("static_cast", "reinterpret_cast"):
            return self.cast(token)
        if token == "sizeof":
            self.enclosed(self.value_type)
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
        if token not in BUILT_IN and token not in macros():
            self.at -= 1
            self.refuse(f"{token[:40]!r} is not known")
        return VALUE

    def cast(self, how: str) -> int:
        """Parse ``static_cast<const f16*>(pointer)``, ``reinterpret_cast<float*>(memory)``."""
        self.expect("<")
        self.accept("const")
        self.value_type()
        self.expect("*", ">", "(")
        if self.expression() != (POINTER if how == "static_cast" else SHARED):
            self.refuse(f"a {how} of an operand of another kind")
        self.expect(")")
        return POINTER

    def call(self, name: str) -> None:
        """Parse the arguments of a call, after the opening bracket."""
        if name == "product_tile" and self.lookup("product_tile") is None:
            for wanted in (2, 1, MATRIX, MATRIX):
                if self.expression() != wanted:
                    self.refuse("product_tile gets operands of other kinds")
                self.expect(",")
        elif name in MEETINGS and self.lookup(name) is None:
            self.pointer()
            self.accept(",")
        elif self.lookup(name) is not None or not (
            name in FUNCTIONS or name == "narrow" or name in self.functions or any(name in s for s in self.lambdas)
        ):
            self.at -= 2
            self.refuse(f"{name[:40]!r} is not a function that kernels may call")
        self.values(")")

    def behind(self, kind: int) -> int:
        """Parse indices, members and increments after an operand."""
        while True:
            if self.accept("["):
                self.value()
                self.expect("]")
                if kind != POINTER and kind < 1:
                    self.refuse(f"an index of {name_of(kind)}")
                kind = VALUE if kind == POINTER else kind - 1
            elif self.token == ".":
                if kind != VALUE:
                    self.refuse(f"a member of {name_of(kind)}")
                self.at += 1
                member = self.take()
                if member == "lane":
                    kind = 1
                elif member == "store":
                    self.enclosed(self.pointer)
                elif member not in MEMBERS:
                    self.refuse(f"{member[:40]!r} is no member")
            elif self.token in ("++", "--"):
                if kind != VALUE:
                    self.refuse(f"a step of {name_of(kind)}")
                self.at += 1
            else:
                return kind


def name_of(kind: int) -> str:
    return {VALUE: "a number", POINTER: "a pointer", SHARED: "shared memory", MATRIX: "a matrix"}.get(kind, "an array")
