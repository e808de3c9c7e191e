"""``optdnn sign``, and ``--signed-by`` of the commands that load an engine."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path

import pytest
from support.cli import Cli
from support.signing import certificates, key_pair
from support.small_models import mlp, save

import optdnn

pytestmark = pytest.mark.skipif(
    find_spec("model_signing") is None, reason="needs the extra sign"
)  # its import takes a second


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("built")
    optdnn.build(save(mlp(), folder), target="reference").save(folder / "net.engine")
    return folder / "net.engine"


@pytest.fixture
def engine(built: Path, tmp_path: Path) -> Path:
    path = tmp_path / "net.engine"
    path.write_bytes(built.read_bytes())
    return path


def test_sign_and_verify(cli: Cli, engine: Path, tmp_path: Path) -> None:
    private, public = key_pair(tmp_path)
    other = key_pair(tmp_path, "other-")[1]
    assert cli("sign", engine, "--key", private) == (0, f"{engine}.sig\n", "")
    checked = cli("verify", engine, "--signed-by", public)
    assert checked.code == 0
    assert checked.out.endswith(f"signed by {public}\n")
    assert json.loads(cli("verify", engine, "--signed-by", public, "--json").out)["signed_by"] == [str(public)]
    assert cli("run", engine, "--signed-by", public).code == 0
    for command in ("verify", "run"):
        refused = cli(command, engine, "--signed-by", other)
        assert (refused.code, refused.out) == (5, "")
        assert refused.err.startswith(f"error: {engine} is signed with another key")


def test_the_signature_is_checked_before_anything_else(cli: Cli, engine: Path, tmp_path: Path) -> None:
    """The error of a file that is no engine names the signature, so nothing of the file was parsed."""
    private, public = key_pair(tmp_path)
    cli("sign", engine, "--key", private)
    engine.write_bytes(b"text")
    assert "this is not an optdnn engine" in cli("verify", engine).err
    assert "was changed after it was signed" in cli("verify", engine, "--signed-by", public).err


def test_a_policy_holds_for_commands(cli: Cli, engine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPTDNN_SIGNED_BY", str(key_pair(tmp_path)[1]))
    for command in (["inspect"], ["explain", "*"], ["run"], ["bench"], ["verify"], ["compare"]):
        found = cli(command[0], engine, *command[1:])
        assert (found.code, "there is no signature" in found.err) == (5, True), (command, found)


def test_passwords_and_certificates(cli: Cli, engine: Path, tmp_path: Path) -> None:
    private, public = key_pair(tmp_path, password=b"word")
    password = tmp_path / "password"
    password.write_text("word\n")
    lacking = cli("sign", engine, "--key", private)
    assert (lacking.code, "is encrypted\n  hint: give its password: optdnn sign --password-file" in lacking.err) == (
        2,
        True,
    )
    assert cli("sign", engine, "--key", private, "--password-file", password).code == 0
    (tmp_path / "open").mkdir()
    plain, _ = key_pair(tmp_path / "open")
    needless = cli("sign", engine, "--key", plain, "--password-file", password)
    assert (needless.code, "is not encrypted\n  hint: leave the password out" in needless.err) == (2, True)
    assert cli("sign", engine, "--key", private, "--password-file", password).code == 0
    assert cli("run", engine, "--signed-by", public).code == 0
    root, key, issued = certificates(tmp_path)
    assert (
        cli("sign", engine, "--key", key, "--certificate", issued["indirect"], "--chain", issued["between"]).code == 0
    )
    assert cli("run", engine, "--signed-by", root).code == 0


def test_nothing_to_sign_with(cli: Cli, engine: Path) -> None:
    found = cli("sign", engine)
    assert found.code == 2
    assert "give --key FILE or --sigstore" in found.err
