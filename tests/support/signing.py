"""Keys and certificates for tests of signatures."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Any


def key_pair(
    folder: Path, name: str = "", curve: str = "SECP256R1", password: bytes | None = None
) -> tuple[Path, Path]:
    """A private key and its public key, as PEM files in ``folder``."""
    from cryptography.hazmat.primitives.asymmetric import ec

    return save_keys(folder, name, ec.generate_private_key(getattr(ec, curve)()), password)


def save_keys(folder: Path, name: str, key: Any, password: bytes | None = None) -> tuple[Path, Path]:
    """The PEM files of a key and of its public half."""
    from cryptography.hazmat.primitives.serialization import (
        BestAvailableEncryption,
        Encoding,
        NoEncryption,
        PrivateFormat,
        PublicFormat,
    )

    private, public = folder / f"{name}private.pem", folder / f"{name}public.pem"
    lock = BestAvailableEncryption(password) if password else NoEncryption()
    private.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, lock))
    public.write_bytes(key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo))
    return private, public


def certificates(folder: Path, name: str = "") -> tuple[Path, Path, dict[str, Path]]:
    """A root certificate, and a key with certificates for signatures: root, key, and the certificates "direct", which the root
    issued, and "indirect", which the certificate "between" issued."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.serialization import Encoding

    def certificate(subject: str, public: Any, issuer: str, by: Any, *, root: bool) -> bytes:
        start = datetime.datetime(2026, 1, 1)
        usage = dict.fromkeys(
            ("content_commitment", "key_encipherment", "data_encipherment", "key_agreement", "crl_sign",
             "encipher_only", "decipher_only"), False
        )  # fmt: skip
        builder = x509.CertificateBuilder(
            x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, issuer)]),
            x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, subject)]),
            public, x509.random_serial_number(), start, start + datetime.timedelta(365),
        )  # fmt: skip
        builder = builder.add_extension(x509.BasicConstraints(root, None), critical=True)
        builder = builder.add_extension(
            x509.KeyUsage(digital_signature=not root, key_cert_sign=root, **usage), critical=True
        )
        return builder.sign(by, hashes.SHA256()).public_bytes(Encoding.PEM)

    authority, middle, own = (ec.generate_private_key(ec.SECP256R1()) for _ in range(3))
    first, second = f"{name}root", f"{name}between"
    made = {
        "root": certificate(first, authority.public_key(), first, authority, root=True),
        "between": certificate(second, middle.public_key(), first, authority, root=True),
        "direct": certificate("engines", own.public_key(), first, authority, root=False),
        "indirect": certificate("engines", own.public_key(), second, middle, root=False),
    }
    files = {kind: folder / f"{name}{kind}.pem" for kind in made}
    for kind, path in files.items():
        path.write_bytes(made[kind])
    return files["root"], save_keys(folder, f"{name}leaf-", own)[0], files
