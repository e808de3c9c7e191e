"""``optdnn sign``."""

from __future__ import annotations

from pathlib import Path

import click

from optdnn.cli.common import give_json, stdout
from optdnn.cli.options import FILE, Command, engine_argument, json_option, option


@click.command("sign", cls=Command)
@engine_argument
@option("--key", type=FILE, help="Private key in PEM form: ECDSA, P-256 (also P-384 and P-521).")
@option("--password-file", type=FILE, help="A file whose first line is the password of --key.")
@option("--certificate", type=FILE, help="Certificate of --key, in PEM form: engines are then checked by its root.")
@option("--chain", type=FILE, multiple=True, help="A certificate between --certificate and the root. Repeat.")
@option("--sigstore", is_flag=True,
        help="Sign without a key, by the identity of the CI job or of a login. Needs the network.")  # fmt: skip
@json_option
def command(
    engine: Path,
    key: Path | None,
    password_file: Path | None,
    certificate: Path | None,
    chain: tuple[Path, ...],
    sigstore: bool,
    json_file: Path | None,
) -> None:
    """Sign ENGINE in the OpenSSF model-signing format, and write ENGINE.sig next to it.

    optdnn verify ENGINE --signed-by public.pem checks it. The extra "sign" is needed.
    """
    from optdnn.runtime.file.signatures import read_pem
    from optdnn.runtime.file.signing import sign

    lines = None if password_file is None else read_pem(str(password_file)).decode(errors="replace").splitlines()
    password = None if lines is None else "".join(lines[:1])
    made = sign(engine, key, password=password, certificate=certificate, chain=chain, sigstore=sigstore)
    if not give_json({"engine": str(engine), "signature": made}, json_file):
        stdout.print(made)
