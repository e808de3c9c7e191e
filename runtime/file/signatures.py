"""Checks the signatures of engine files: the OpenSSF model-signing format, in ENGINE.sig next to the engine.

A signature is a Sigstore bundle: a signed statement with the SHA-256 of the whole file. The package ``model-signing`` checks it.
It is imported when the first signature is checked.

The bytes that are checked are the bytes that are used: the package gets the digest of memory that the caller then decodes. It
never opens the engine.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
from collections.abc import Iterable, Sequence
from importlib import import_module
from typing import Any, NamedTuple

from optdnn.errors import EngineError, MissingDependency, UsageError
from optdnn.regular_file import read_small

POLICY = "OPTDNN_SIGNED_BY"
"""The environment variable that requires a signature of every engine file that the process reads."""
SIGSTORE = "sigstore:"
SMALL = 1 << 20
"""Largest signature or key file, in bytes."""
CURVES = ("secp256r1", "secp384r1", "secp521r1")
"""The curves of the format: P-256, P-384, P-521."""
WHY = "to sign engines and to check signatures"
KINDS = {"publicKey": "a key", "x509CertificateChain": "a certificate", "certificate": "a Sigstore identity"}
"""The verification material in a bundle -> the kind of signer."""

SignedBy = str | os.PathLike[str]
"""A required signer: a PEM file with a public key or with root certificates, or ``sigstore:IDENTITY,ISSUER``."""


class Signer(NamedTuple):
    """A required signature: ``text`` as given, one of :data:`KINDS`, and the parts of its identity or key."""

    text: str
    kind: str
    parts: tuple[str, ...]


def signature_path(engine: str | os.PathLike[str]) -> str:
    """The path of an engine's signature: next to it."""
    return f"{os.fspath(engine)}.sig"


def signers(asked: Iterable[SignedBy]) -> tuple[str, ...]:
    """The required signers of a file: the requested ones, and the process's policy. None: no signature is required.

    Raises UsageError for an empty name: a variable that was forgotten must not disable the check.
    """
    policy = os.environ.get(POLICY)
    if policy is not None and not policy.strip():
        raise UsageError(f"{POLICY} is set and empty", hint="name a public key in it, or unset it")
    found = [*asked, *([] if policy is None else [policy])]
    for one in found:
        if not isinstance(one, str | os.PathLike) or not os.fspath(one):
            raise UsageError(f"signed_by is {one!r}", hint="give the PEM file of a public key")
    return tuple(dict.fromkeys(os.fspath(one) for one in found))


def check_signatures(engine: str, data: memoryview, wanted: Sequence[str]) -> None:
    """Raise EngineError unless ENGINE.sig is a signature of exactly ``data`` by each of ``wanted``.

    Raises UsageError for a key that cannot be used, MissingDependency without the package.
    """
    verifying = package("model_signing.verifying")
    contents = Contents(engine, data)
    for signer in map(_signer, wanted):
        bundle = _bundle(engine, signer)
        config = verifying.Config().set_hashing_config(contents)
        contents.hashed = False
        try:
            _choose(config, signer)
        except Exception as error:  # errors of several libraries, and of the network
            why = str(error) or type(error).__name__
            raise EngineError(f"{signature_path(engine)} cannot be checked for {signer.text}: {why}") from error
        try:
            config.verify(engine, signature_path(engine))
        except Exception as error:  # of several libraries, about a hostile file: any error refuses the engine
            raise _refusal(engine, signer, bundle, contents, error) from error


def _choose(config: Any, signer: Signer) -> None:
    """Configure the package for the required signature. Sigstore's root of trust may come from the network."""
    if signer.kind == "publicKey":
        config.use_elliptic_key_verifier(public_key=signer.text)
    elif signer.kind == "x509CertificateChain":
        config.use_certificate_verifier(certificate_chain=[signer.text])
    else:
        identity, issuer = signer.parts
        config.use_sigstore_verifier(identity=identity, oidc_issuer=issuer)


class Contents:
    """Takes the engine file's place in a hashing configuration of the package: returns the digest of ``data``."""

    def __init__(self, engine: str, data: memoryview):
        self._name = os.path.basename(engine)
        self._sha256 = hashlib.sha256(data).digest()
        self.hashed = False
        """Whether the digest was read. A check reads it only after the signature was found to be its signer's."""

    def hash(self, path: object, *, files_to_hash: object = None) -> Any:
        """The manifest of the single signed file."""
        self.hashed = True
        manifest, hashing = package("model_signing.manifest"), package("model_signing.hashing").hashing
        plain = {"method": "files", "hash_type": "sha256", "allow_symlinks": False}
        item = manifest.FileManifestItem(path=".", digest=hashing.Digest("sha256", self._sha256))
        return manifest.Manifest(self._name, [item], manifest.SerializationType.from_args(plain))

    def add_ignored_paths(self, *, model_path: object, paths: object) -> None:
        """Does nothing: no part of a single file is ignored."""


def package(name: str) -> Any:
    """A module of the extra ``sign``. Raises MissingDependency."""
    try:
        return import_module(name)
    except ImportError as error:
        raise MissingDependency("model-signing", "sign", WHY) from error


def read_pem(path: str) -> bytes:
    """The contents of a key or certificate file. Raises UsageError."""
    try:
        return read_small(path, SMALL)
    except (OSError, ValueError) as error:
        text = error.strerror if isinstance(error, OSError) else str(error)
        raise UsageError(f"the key file {path} cannot be read: {text}") from error


NEW_KEY = "make a key of P-256: openssl ecparam -name prime256v1 -genkey -noout -out private.pem"
"""The hint where a key cannot sign."""


def check_curve(path: str, key: Any) -> None:
    """Raise UsageError for a key that is not on one of the format's elliptic curves."""
    curve = getattr(getattr(key, "curve", None), "name", type(key).__name__.lstrip("_"))
    if curve not in CURVES:
        raise UsageError(f"{path} holds a key of another kind ({curve})", hint=NEW_KEY)


def _signer(text: str) -> Signer:
    """The signer that the text names. Raises UsageError if it is not a key, certificate or identity."""
    if text.startswith(SIGSTORE):
        identity, _, issuer = text.removeprefix(SIGSTORE).rpartition(",")
        if not identity or not issuer:
            raise UsageError(f"{text!r} is not {SIGSTORE}IDENTITY,ISSUER", hint=f"{SIGSTORE}me@example.com,https://…")
        return Signer(text, "certificate", (identity, issuer))
    pem = read_pem(text)
    serialization = package("cryptography.hazmat.primitives.serialization")
    if b"PRIVATE KEY-----" in pem:
        hint = f"openssl pkey -in {text} -pubout -out public.pem"
        raise UsageError(f"{text} holds a private key; a signature is checked with the public one", hint=hint)
    try:
        if b"-----BEGIN CERTIFICATE-----" in pem:
            package("cryptography.x509").load_pem_x509_certificates(pem)
            return Signer(text, "x509CertificateChain", ())
        key = serialization.load_pem_public_key(pem)
    except Exception as error:
        raise UsageError(f"{text} is neither a public key nor a certificate in PEM form") from error
    check_curve(text, key)
    form = serialization.PublicFormat.SubjectPublicKeyInfo
    known = hashlib.sha256(key.public_bytes(serialization.Encoding.PEM, form)).hexdigest()
    return Signer(text, "publicKey", (known,))


def _bundle(engine: str, signer: Signer) -> dict[str, Any]:
    """The contents of the signature file, before verification. Raises EngineError if it cannot be the signer's."""
    path = signature_path(engine)
    try:
        bundle = json.loads(str(read_small(path, SMALL), "utf-8"))
        material = bundle["verificationMaterial"]
        kind = next(k for k in KINDS if k in material)
        hint = material[kind].get("hint")
    except FileNotFoundError as error:
        said = f"{engine}: there is no signature ({path}), and a signature by {signer.text} is required"
        raise EngineError(said, hint=f"optdnn sign {engine} --key private.pem") from error
    except OSError as error:
        raise EngineError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, TypeError, LookupError, StopIteration, AttributeError, RecursionError) as error:
        raise EngineError(f"{path} is not a signature in the OpenSSF model-signing format") from error
    if kind != signer.kind:
        raise EngineError(f"{engine} is signed by {KINDS[kind]}; required is {KINDS[signer.kind]}, {signer.text}")
    if kind == "publicKey" and hint is None:
        raise EngineError(f"{path} names no key: it has the form from before model-signing 1.0", hint="sign it again")
    if kind == "publicKey" and hint != signer.parts[0]:
        raise EngineError(f"{engine} is signed with another key than {signer.text}")
    return dict(bundle)


def _refusal(engine: str, signer: Signer, bundle: dict[str, Any], contents: Contents, error: Exception) -> EngineError:
    """The error with the reason why a signature is invalid."""
    if not contents.hashed:
        why = str(error) or type(error).__name__
        return EngineError(f"{signature_path(engine)} is not a valid signature by {signer.text}: {why}")
    # From here on the statement is the signer's own.
    statement = json.loads(base64.b64decode(bundle["dsseEnvelope"]["payload"]))
    name, plain = statement["subject"][0]["name"], statement.get("predicate", {}).get("serialization", {})
    if (plain.get("method"), plain.get("hash_type")) != ("files", "sha256"):
        said = f"{signature_path(engine)} hashes by {plain.get('method')} and {plain.get('hash_type')}"
        return EngineError(said, hint="sign whole files by sha256, as optdnn sign does")
    if name != os.path.basename(engine):
        return EngineError(f"{signature_path(engine)} is the signature of another file, {name!r}")
    return EngineError(f"{engine} was changed after it was signed", hint="sign it again if you rebuilt or retuned it")
