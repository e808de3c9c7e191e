"""``optdnn generate``: tokens and text as they are generated, JSON, and refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.cli import Cli
from support.growing import growing

import optdnn
from optdnn.generation.text import TextStream


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("generate") / "model.engine"
    optdnn.build(growing(), target="reference", sample="logits").save(path)
    return path


def test_tokens(cli: Cli, engine: Path) -> None:
    wanted = optdnn.Generator(engine).generate([3, 4], max_new_tokens=5, temperature=0.9, top_k=9, top_p=0.9, seed=2)
    words = [
        "generate",
        str(engine),
        "--prompt-ids",
        "3,4",
        "-n",
        "5",
        "--temperature",
        "0.9",
        "--top-k",
        "9",
        "--top-p",
        "0.9",
    ]
    code, out, err = cli(*words, "--seed", "2")
    assert (code, [int(n) for n in out.split()]) == (0, wanted)
    assert "5 tokens" in err
    code, out, _ = cli(*words, "--seed", "2", "--json")
    assert (code, json.loads(out)["tokens"], json.loads(out)["text"]) == (0, wanted, None)
    code, out, _ = cli(*words, "--seed", "2", "--stop", str(wanted[1]))
    assert [int(n) for n in out.split()] == wanted[: wanted.index(wanted[1]) + 1]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "give either --prompt or --prompt-ids"), (["--prompt", "a"], "--prompt needs --tokenizer"),
        (["--prompt-ids", "1,x"], "is not a list of tokens"), (["--prompt-ids", "50"], "the vocabulary has 50"),
    ],
)  # fmt: skip
def test_refusals(cli: Cli, engine: Path, words: list[str], message: str) -> None:
    code, _, err = cli("generate", str(engine), *words)
    assert code in (2, 6)
    assert message in err


def test_an_error_has_a_line_of_its_own(cli: Cli, engine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stream(self: Any, *prompt: Any, **choice: Any) -> Any:
        yield 7
        raise optdnn.InputError("input 'positions' holds 64")

    monkeypatch.setattr(optdnn.Generator, "stream", stream)
    code, out, err = cli("generate", str(engine), "--prompt-ids", "3")
    assert (code, out) == (6, "7 \n")
    assert err == "error: input 'positions' holds 64\n"


def test_text(cli: Cli, engine: Path, tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers", reason="the extra text is not installed")
    words = {f"w{k}": k for k in range(50)}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w0"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.save(str(tmp_path / "tokenizer.json"))
    code, out, _ = cli(
        "generate", str(engine), "--tokenizer", str(tmp_path / "tokenizer.json"), "--prompt", "w3 w4", "-n", "3"
    )
    found = optdnn.Generator(engine).generate([3, 4], max_new_tokens=3)
    assert (code, out) == (0, " ".join(f"w{t}" for t in found) + "\n")
    (tmp_path / "bad.json").write_text("{}")
    code, _, err = cli("generate", str(engine), "--tokenizer", str(tmp_path / "bad.json"), "--prompt", "w3")
    assert code == 2
    assert "is not a tokenizer" in err


def test_characters_of_several_tokens_are_held_back() -> None:
    """In these tests, tokens are bytes."""

    class Bytes:
        def decode(self, tokens: list[int]) -> Any:
            return bytes(tokens).decode("utf-8", errors="replace")

    text = TextStream(Bytes())
    assert [text.push(t) for t in "aé€".encode()] == ["a", "", "é", "", "", "€"]
    assert text.push(0xC3) == ""
    assert text.end() == "\ufffd"
