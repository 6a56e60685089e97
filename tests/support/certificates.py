"""A certificate that signs itself, for a server of the tests on the loopback."""

from __future__ import annotations

import datetime
import ipaddress
import subprocess
from importlib.util import find_spec
from pathlib import Path

HOST = "127.0.0.1"


def self_signed(at: Path) -> tuple[Path, Path]:
    """The files of a certificate of this host and of its key, made in `at`."""
    certificate, key = at / "certificate.pem", at / "key.pem"
    make = _by_cryptography if find_spec("cryptography") else _by_openssl
    make(certificate, key)
    return certificate, key


def _by_cryptography(certificate: Path, key: Path) -> None:
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import NameOID

    secret = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, HOST)])
    now = datetime.datetime.now(datetime.UTC)
    address = x509.IPAddress(ipaddress.ip_address(HOST))
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(secret.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([address]), critical=False)
        .sign(secret, hashes.SHA256())
    )
    certificate.write_bytes(made.public_bytes(serialization.Encoding.PEM))
    key.write_bytes(
        secret.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
    )


def _by_openssl(certificate: Path, key: Path) -> None:
    command = [
        *("openssl", "req", "-x509", "-nodes", "-days", "1"),
        *("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1"),
        *("-subj", f"/CN={HOST}", "-addext", f"subjectAltName=IP:{HOST}"),
        *("-keyout", str(key), "-out", str(certificate)),
    ]
    subprocess.run(command, check=True, capture_output=True)
