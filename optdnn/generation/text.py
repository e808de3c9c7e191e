"""Text around tokens: a tokenizer's file, and the text of a stream of tokens."""

from __future__ import annotations

import os
from typing import Any

from optdnn.errors import MissingDependency, UsageError
from optdnn.regular_file import check_regular


def read_tokenizer(path: str | os.PathLike[str]) -> Any:
    """The tokenizer of a ``tokenizer.json``. Raises MissingDependency (extra ``text``), UsageError for another file."""
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        raise MissingDependency("tokenizers", "text", "to turn text into tokens") from error
    try:
        check_regular(path)
        return Tokenizer.from_file(os.fspath(path))
    except Exception as error:  # the package raises plain Exceptions
        raise UsageError(f"{path} is not a tokenizer: {error}", hint="use the tokenizer.json of the model") from error


class TextStream:
    """The text of a stream of tokens. ``push`` returns the text that a token adds.

    The text of a token may depend on the previous ones (spaces), and a character may have several tokens. So all tokens are decoded
    together, and an unfinished character is held back.
    """

    def __init__(self, tokenizer: Any):
        self._tokenizer = tokenizer
        self._tokens: list[int] = []
        self._shown = 0

    def push(self, token: int) -> str:
        """The text that this token adds."""
        self._tokens.append(token)
        text: str = self._tokenizer.decode(self._tokens)
        return "" if text.endswith("\ufffd") else self._advance(text)

    def end(self) -> str:
        """The text that was held back."""
        return self._advance(self._tokenizer.decode(self._tokens))

    def _advance(self, text: str) -> str:
        new = text[self._shown :]
        self._shown = max(self._shown, len(text))
        return new
