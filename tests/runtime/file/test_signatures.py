"""Signed engines: only files signed by the trusted key are loaded, and the checked bytes are the ones that run."""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from programs import mlp, mlp_expected
from support.signing import certificates, key_pair, save_keys

import optdnn
from optdnn.errors import EngineError, MissingDependency, OptdnnError, OutputError, UsageError
from optdnn.lowering.cpu import trials as cpu_trials
from optdnn.lowering.cpu.trials import Trials
from optdnn.runtime.file import format as engine_format
from optdnn.runtime.file import signatures

pytestmark = pytest.mark.skipif(
    find_spec("model_signing") is None, reason="needs the extra sign"
)  # its import takes a second
X = np.random.default_rng(5).standard_normal((4, 5)).astype(np.float32)


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A private key and its public key."""
    return key_pair(tmp_path_factory.mktemp("keys"))


@pytest.fixture
def engine(tmp_path: Path, keys: tuple[Path, Path]) -> Path:
    """A signed engine."""
    path = tmp_path / "net.engine"
    engine_format.write(mlp(), path)
    assert optdnn.sign(path, keys[0]) == f"{path}.sig"
    return path


def changed(engine: Path) -> None:
    """Overwrite the file in place with another valid engine with other weights: the inode stays."""
    with engine.open("r+b") as f:
        f.write(b"".join(engine_format.encode(mlp(seed=1))))


def test_a_signed_engine_runs(engine: Path, keys: tuple[Path, Path]) -> None:
    np.testing.assert_array_equal(optdnn.load(engine, signed_by=keys[1]).run(X)["y"], mlp_expected(mlp(), X)["y"])


def test_the_file_may_be_renamed(engine: Path, keys: tuple[Path, Path]) -> None:
    other = engine.rename(engine.with_name("other.engine"))
    Path(f"{engine}.sig").rename(f"{other}.sig")
    optdnn.load(other, signed_by=keys[1])


def test_the_package_accepts_our_signature_and_we_accept_its(engine: Path, keys: tuple[Path, Path]) -> None:
    from model_signing import hashing, signing, verifying

    signature = Path(f"{engine}.sig")
    verifying.Config().use_elliptic_key_verifier(public_key=keys[1]).verify(engine, signature)
    signing.Config().use_elliptic_key_signer(private_key=keys[0]).sign(engine, signature)
    optdnn.load(engine, signed_by=keys[1])
    blake = hashing.Config().use_file_serialization(hashing_algorithm="blake3")
    signing.Config().use_elliptic_key_signer(private_key=keys[0]).set_hashing_config(blake).sign(engine, signature)
    with pytest.raises(EngineError, match=r"net\.engine\.sig hashes by files and blake3"):
        optdnn.load(engine, signed_by=keys[1])


@pytest.mark.parametrize("position", [0, 40, 200, -1])
def test_a_changed_byte(engine: Path, keys: tuple[Path, Path], position: int) -> None:
    data = bytearray(engine.read_bytes())
    data[position] ^= 1
    engine.write_bytes(data)
    with pytest.raises(EngineError, match=r"net\.engine was changed after it was signed"):
        optdnn.load(engine, signed_by=keys[1], verify=False)


def test_another_valid_engine_in_its_place(engine: Path, keys: tuple[Path, Path]) -> None:
    changed(engine)
    optdnn.load(engine)
    with pytest.raises(EngineError, match="was changed after it was signed"):
        optdnn.load(engine, signed_by=keys[1])


def test_no_signature(engine: Path, keys: tuple[Path, Path]) -> None:
    os.unlink(f"{engine}.sig")
    with pytest.raises(EngineError, match=r"there is no signature \(.*net\.engine\.sig\)") as found:
        optdnn.load(engine, signed_by=keys[1])
    assert found.value.hint == f"optdnn sign {engine} --key private.pem"


def test_another_key(engine: Path, tmp_path: Path) -> None:
    with pytest.raises(EngineError, match=r"signed with another key than .*other-public\.pem"):
        optdnn.load(engine, signed_by=key_pair(tmp_path, "other-")[1])


def test_the_signature_of_another_file(engine: Path, keys: tuple[Path, Path]) -> None:
    other = engine.with_name("other.engine")
    engine_format.write(mlp(seed=1), other)
    Path(f"{other}.sig").write_bytes(Path(f"{engine}.sig").read_bytes())
    with pytest.raises(EngineError, match=r"other\.engine\.sig is the signature of another file, 'net\.engine'"):
        optdnn.load(other, signed_by=keys[1])


def edited(change: Callable[[dict[str, Any]], Any]) -> Callable[[bytes], bytes]:
    """A change of the JSON in a signature file."""

    def edit(data: bytes) -> bytes:
        bundle = json.loads(data)
        change(bundle)
        return json.dumps(bundle).encode()

    return edit


def forge_name(bundle: dict[str, Any]) -> None:
    """Other contents of the signed statement."""
    payload = base64.b64decode(bundle["dsseEnvelope"]["payload"]).replace(b"net.engine", b"not.engine")
    bundle["dsseEnvelope"]["payload"] = base64.b64encode(payload).decode()


NOT = "is not a signature in the OpenSSF"
INVALID = "is not a valid signature by"
DAMAGE = {
    "empty": (lambda data: b"", NOT),
    "binary": (lambda data: b"\xff\x00" + data, NOT),
    "cut": (lambda data: data[:-20], NOT),
    "a list": (lambda data: b"[1]", NOT),
    "nested": (lambda data: b"[" * 100_000, NOT),
    "large": (lambda data: data + b" " * signatures.SMALL, NOT),
    "no material": (edited(lambda b: b.pop("verificationMaterial")), NOT),
    "material of text": (edited(lambda b: b.update(verificationMaterial="publicKey")), NOT),
    "no name of the key": (edited(lambda b: b["verificationMaterial"]["publicKey"].pop("hint")), "names no key"),
    "no envelope": (edited(lambda b: b.pop("dsseEnvelope")), INVALID),
    "no signatures": (edited(lambda b: b["dsseEnvelope"].update(signatures=[])), INVALID),
    "another statement": (edited(forge_name), INVALID),
    "another media type": (edited(lambda b: b.update(mediaType="text/plain")), INVALID),
    "another payload type": (edited(lambda b: b["dsseEnvelope"].update(payloadType="text/plain")), INVALID),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_signature_file(name: str, engine: Path, keys: tuple[Path, Path]) -> None:
    damage, said = DAMAGE[name]
    signature = Path(f"{engine}.sig")
    signature.write_bytes(damage(signature.read_bytes()))
    with pytest.raises(EngineError, match=said):
        optdnn.load(engine, signed_by=keys[1])


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes here")
def test_a_pipe_is_no_signature_and_no_key(engine: Path, keys: tuple[Path, Path], tmp_path: Path) -> None:
    os.unlink(f"{engine}.sig")
    os.mkfifo(f"{engine}.sig")
    with pytest.raises(EngineError, match="it is not a regular file"):
        optdnn.load(engine, signed_by=keys[1])
    with pytest.raises(UsageError, match="not a regular file"):
        optdnn.load(engine, signed_by=f"{engine}.sig")


# ---------------------------------------------------------------- what was checked is what runs


def test_a_change_between_the_check_and_the_use(
    engine: Path, keys: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def check(*arguments: Any) -> None:
        signatures.check_signatures(*arguments)
        changed(engine)

    monkeypatch.setattr(engine_format, "check_signatures", check)
    loaded = optdnn.load(engine, signed_by=keys[1])
    np.testing.assert_array_equal(loaded.run(X)["y"], mlp_expected(mlp(), X)["y"])


def test_a_change_after_loading(engine: Path, keys: tuple[Path, Path]) -> None:
    loaded = optdnn.load(engine, signed_by=keys[1], mmap=True)
    changed(engine)
    np.testing.assert_array_equal(loaded.run(X)["y"], mlp_expected(mlp(), X)["y"])


# ---------------------------------------------------------------- the policy of a process


def test_the_policy_holds_for_every_reader(
    engine: Path, keys: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPTDNN_SIGNED_BY", str(keys[1]))
    optdnn.load(engine)
    os.unlink(f"{engine}.sig")
    readers = [optdnn.load, engine_format.read, optdnn.verify, optdnn.InferenceSession]
    for read in readers:
        with pytest.raises(EngineError, match="there is no signature"):
            read(engine)


def test_an_argument_does_not_replace_the_policy(
    engine: Path, keys: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPTDNN_SIGNED_BY", str(key_pair(tmp_path, "policy-")[1]))
    with pytest.raises(EngineError, match=r"another key than .*policy-public\.pem"):
        optdnn.load(engine, signed_by=keys[1])


@pytest.mark.parametrize("empty", ["", "  "])
def test_an_empty_policy_is_no_policy_but_a_mistake(engine: Path, empty: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPTDNN_SIGNED_BY", empty)
    with pytest.raises(UsageError, match="OPTDNN_SIGNED_BY is set and empty"):
        optdnn.load(engine)


def test_a_build_tries_its_own_programs_under_a_policy(monkeypatch: pytest.MonkeyPatch) -> None:
    """The programs go through files that this process writes for its workers, without signatures."""
    monkeypatch.setenv("OPTDNN_SIGNED_BY", "nobody.pem")
    monkeypatch.setattr(cpu_trials, "_kept", None)  # earlier workers have no policy
    with Trials(1) as trials:
        found = trials.open(mlp(), 1).run({"x": X})
    np.testing.assert_array_equal(found["y"], mlp_expected(mlp(), X)["y"])


# ---------------------------------------------------------------- keys


def test_keys_that_cannot_be_used(engine: Path, keys: tuple[Path, Path], tmp_path: Path) -> None:
    from cryptography.hazmat.primitives.asymmetric import rsa

    rsa_keys = save_keys(tmp_path, "rsa-", rsa.generate_private_key(65537, 2048))
    koblitz = key_pair(tmp_path, "koblitz-", "SECP256K1")
    nothing = tmp_path / "nothing.pem"
    nothing.write_text("no key")
    public = {
        tmp_path / "absent.pem": r"absent\.pem cannot be read: No such file",
        tmp_path: "cannot be read: it is not a regular file",
        nothing: "neither a public key nor a certificate",
        keys[0]: "holds a private key",
        rsa_keys[1]: "a key of another kind",
        koblitz[1]: r"another kind \(secp256k1\)",
        "": "signed_by is ''",
        "sigstore:me@example.com": "is not sigstore:IDENTITY,ISSUER",
    }
    for key, said in public.items():
        with pytest.raises(UsageError, match=said):
            optdnn.load(engine, signed_by=key)
    private = {
        tmp_path / "absent.pem": r"absent\.pem cannot be read: No such file",
        nothing: "not a private key",
        keys[1]: r"not a private key[\s\S]*\n  hint: make a key of P-256",
        rsa_keys[0]: "a key of another kind",
        koblitz[0]: r"another kind \(secp256k1\)",
    }
    for key, said in private.items():
        with pytest.raises(UsageError, match=said):
            optdnn.sign(engine, key)
    optdnn.load(engine, signed_by=keys[1])  # the signature is unchanged


def test_an_encrypted_key(engine: Path, tmp_path: Path) -> None:
    private, public = key_pair(tmp_path, "secret-", password=b"word")
    for wrong in (None, "other"):
        with pytest.raises(UsageError, match=r"secret-private\.pem"):
            optdnn.sign(engine, private, password=wrong)
    optdnn.sign(engine, private, password="word")
    optdnn.load(engine, signed_by=public)


def test_a_file_that_is_no_engine_is_not_signed(tmp_path: Path, keys: tuple[Path, Path]) -> None:
    path = tmp_path / "text.engine"
    with pytest.raises(UsageError, match="there is no engine file"):
        optdnn.sign(path, keys[0])
    path.write_text("text")
    with pytest.raises(EngineError, match="is not signed: this is not an optdnn engine"):
        optdnn.sign(path, keys[0])
    assert not Path(f"{path}.sig").exists()


def test_a_signature_that_cannot_be_written(engine: Path, keys: tuple[Path, Path]) -> None:
    os.unlink(f"{engine}.sig")
    os.mkdir(f"{engine}.sig")
    with pytest.raises(OutputError, match="not a regular file"):
        optdnn.sign(engine, keys[0])


def test_contradicting_options(engine: Path, keys: tuple[Path, Path]) -> None:
    for options in ({}, {"key": keys[0], "sigstore": True}, {"sigstore": True, "certificate": keys[1]},
                    {"key": keys[0], "chain": [keys[1]]}):  # fmt: skip
        with pytest.raises(UsageError, match=r"hint: give --key FILE or --sigstore|goes with"):
            optdnn.sign(engine, **options)


def test_certificates(engine: Path, keys: tuple[Path, Path], tmp_path: Path) -> None:
    root, key, issued = certificates(tmp_path)
    with pytest.raises(EngineError, match="signed by a key; required is a certificate"):
        optdnn.load(engine, signed_by=root)
    optdnn.sign(engine, key, certificate=issued["direct"])
    optdnn.load(engine, signed_by=root)
    optdnn.sign(engine, key, certificate=issued["indirect"])
    with pytest.raises(EngineError, match=INVALID):
        optdnn.load(engine, signed_by=root)
    optdnn.sign(engine, key, certificate=issued["indirect"], chain=[issued["between"]])
    optdnn.load(engine, signed_by=root)
    with pytest.raises(EngineError, match="signed by a certificate; required is a key"):
        optdnn.load(engine, signed_by=keys[1])
    other = certificates(tmp_path, "other-")[0]
    with pytest.raises(EngineError, match=INVALID):
        optdnn.load(engine, signed_by=other)
    with pytest.raises(UsageError, match="cannot be used with"):
        optdnn.sign(engine, keys[0], certificate=issued["direct"])
    changed(engine)
    with pytest.raises(EngineError, match="was changed after it was signed"):
        optdnn.load(engine, signed_by=root)


def test_sigstore_identities(engine: Path, keys: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """The identity and its issuer reach the package. Without the network, the engine is refused."""
    from model_signing import signing, verifying

    asked: list[Any] = []

    def unreachable(*_: object, **options: Any) -> None:
        asked.append(options)
        raise ConnectionError("no network")

    monkeypatch.setattr(verifying.Config, "use_sigstore_verifier", unreachable)
    monkeypatch.setattr(signing.Config, "use_sigstore_signer", unreachable)
    who = "sigstore:https://github.com/me/net/.github/workflows/a.yml@refs/heads/main,https://issuer.example"
    with pytest.raises(EngineError, match="signed by a key; required is a Sigstore identity"):
        optdnn.load(engine, signed_by=who)
    Path(f"{engine}.sig").write_text('{"verificationMaterial": {"certificate": {}}}')
    with pytest.raises(EngineError, match=r"net\.engine\.sig cannot be checked for sigstore:.*no network"):
        optdnn.load(engine, signed_by=who)
    identity = "https://github.com/me/net/.github/workflows/a.yml@refs/heads/main"
    assert asked == [{"identity": identity, "oidc_issuer": "https://issuer.example"}]
    with pytest.raises(OptdnnError, match="Sigstore cannot be reached: no network"):
        optdnn.sign(engine, sigstore=True)


# ---------------------------------------------------------------- the package


@pytest.mark.parametrize("missing", ["model_signing", "OpenSSL"])
def test_without_the_extra_the_command_is_named(missing: str, engine: Path, keys: tuple[Path, Path]) -> None:
    code = f"import sys; sys.modules[{missing!r}] = None; import optdnn; optdnn.load(sys.argv[1])"
    env = {**os.environ, "OPTDNN_SIGNED_BY": str(keys[1])}
    found = subprocess.run([sys.executable, "-c", code, engine], env=env, capture_output=True, text=True)
    assert found.returncode
    assert MissingDependency.__name__ in found.stderr
    assert "hint: pip install 'optdnn[sign]'" in found.stderr


def test_the_package_is_imported_only_for_signatures(engine: Path) -> None:
    code = "import sys, optdnn; optdnn.load(sys.argv[1]); sys.exit('model_signing' in sys.modules)"
    subprocess.run([sys.executable, "-c", code, engine], check=True)
