"""Signing an engine file (:mod:`optdnn.runtime.file.signatures` checks the signature)."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from optdnn.errors import EngineError, OptdnnError, UsageError
from optdnn.regular_file import open_regular
from optdnn.runtime.file.atomic import check_writable, write_atomic
from optdnn.runtime.file.format import decode, reading_engine
from optdnn.runtime.file.signatures import NEW_KEY, Contents, check_curve, package, read_pem, signature_path
from optdnn.temporary import temporary_folder

PathLike = str | os.PathLike[str]


def sign(
    engine: PathLike,
    key: PathLike | None = None,
    *,
    password: str | None = None,
    certificate: PathLike | None = None,
    chain: Sequence[PathLike] = (),
    sigstore: bool = False,
) -> str:
    """Sign an engine file in the OpenSSF model-signing format, and write ENGINE.sig next to it. Returns the path of that file.

    ``key`` is a PEM file with a private key of P-256 (or P-384, P-521); ``password`` opens it if it is encrypted. With
    ``certificate`` (PEM, for that key; ``chain``: the certificates between it and the root) it is checked by the root's
    certificate. ``sigstore=True`` signs without a key, by the identity of the CI job or of a login in the browser; this needs the
    network. Raises EngineError for a file that is not an engine, UsageError for unusable keys or a missing file, OutputError
    if the signature cannot be written, MissingDependency without the extra ``sign``.
    """
    path = os.fspath(engine)
    if sigstore == (key is not None):
        hint = "give --key FILE or --sigstore (in Python: key=FILE or sigstore=True)"
        raise UsageError("an engine is signed with a key or by Sigstore", hint=hint)
    if (certificate is None and chain) or (certificate is not None and (key is None or password is not None)):
        raise UsageError("a certificate goes with its key, without a password; a chain goes with a certificate")
    config = package("model_signing.signing").Config()
    check_writable(signature_path(path))
    with reading_engine(path), open(path, "rb", opener=open_regular) as f:
        data = memoryview(f.read())
    try:
        decode(data)
    except EngineError as error:
        raise EngineError(f"{path} is not signed: {error.message}", hint=error.hint) from error
    _choose(config, key, password, certificate, chain)
    config.set_hashing_config(Contents(path, data))
    # The package writes in place: an existing signature stays complete until the new one is complete.
    with temporary_folder("optdnn-sign-") as folder:
        made = Path(folder, "signature")
        try:
            config.sign(path, made)
        except Exception as error:  # errors of several libraries, and of the network
            raise OptdnnError(f"{path} cannot be signed: {str(error) or type(error).__name__}") from error
        write_atomic(signature_path(path), [made.read_bytes()])
    return signature_path(path)


def _choose(
    config: Any, key: PathLike | None, password: str | None, certificate: PathLike | None, chain: Sequence[PathLike]
) -> None:
    """Configure the package's signer. Raises UsageError for unusable keys."""
    if key is None:
        try:
            config.use_sigstore_signer(use_ambient_credentials=True)
        except Exception as error:  # the network
            raise OptdnnError(f"Sigstore cannot be reached: {str(error) or type(error).__name__}") from error
        return
    secret = None if password is None else password.encode()
    load = package("cryptography.hazmat.primitives.serialization").load_pem_private_key
    try:
        found = load(read_pem(os.fspath(key)), secret)
    except TypeError as error:
        if password is None:
            hint = "give its password: optdnn sign --password-file FILE, optdnn.sign(..., password=)"
            raise UsageError(f"{os.fspath(key)} is encrypted", hint=hint) from error
        raise UsageError(f"{os.fspath(key)} is not encrypted", hint="leave the password out") from error
    except UsageError:
        raise
    except Exception as error:
        text = f"{os.fspath(key)} is not a private key in PEM form that can be opened: {error}"
        raise UsageError(text, hint=NEW_KEY) from error
    check_curve(os.fspath(key), found)
    if certificate is None:
        config.use_elliptic_key_signer(private_key=key, password=secret)
        return
    for one in (certificate, *chain):
        read_pem(os.fspath(one))
    between = chain or [certificate]  # the package refuses an empty chain; a duplicate certificate does no harm
    try:
        config.use_certificate_signer(private_key=key, signing_certificate=certificate, certificate_chain=between)
    except Exception as error:
        raise UsageError(f"{os.fspath(certificate)} cannot be used with {os.fspath(key)}: {error}") from error
