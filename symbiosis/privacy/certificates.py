"""Certificates of a server: its own CA and certificate, made once and kept, or files that an operator gives.

One rule: what is half given, does not belong together or has expired is refused at start, not at the first client.

`--tls auto` keeps a CA and a certificate that it signed in `tls/` of the cache folder. Clients trust either the CA
(`tls_ca=`, across renewals) or exactly the certificate (`tls_fingerprint=`, nothing to copy but a line of text).
"""

from __future__ import annotations

import datetime
import hashlib
import ipaddress
import logging
import os
import socket
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from symbiosis.config import ServerOptions
from symbiosis.errors import ConfigError
from symbiosis.private_files import check_owned, locked, private_folder, read_file, write_private

logger = logging.getLogger(__name__)
CA_DAYS = 3650
SERVER_DAYS = 730
CLIENT_DAYS = 365
RENEW_DAYS = 30  # a certificate of ours with less left is made anew at start
MADE = "made the certificate %s for %s; a client that pinned another one (tls_fingerprint) must pin this one now"
ANY_HOST = ("0.0.0.0", "::")
PrivateKey = ec.EllipticCurvePrivateKey


@dataclass(frozen=True)
class Identity:
    """What a server proves itself with, and what it asks of clients.

    Attributes:
        certificate: PEM, with the chain that clients need.
        key: PEM, not encrypted.
        client_ca: PEM; clients must have a certificate of it. None asks for none.
    """

    certificate: bytes
    key: bytes
    client_ca: bytes | None = None

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the certificate itself, in hex: what `tls_fingerprint=` takes."""
        return fingerprint(x509.load_pem_x509_certificates(self.certificate)[0])

    def __repr__(self) -> str:
        return f"<Identity {self.fingerprint}>"


def identity(options: ServerOptions) -> Identity | None:
    """The identity that options ask for; None where the transport stays in the clear.

    Raises:
        ConfigError: a file that cannot be used, or a pair that is none.
    """
    if not options.tls_on:
        return None
    client_ca = _client_ca(options.tls_client_ca) if options.tls_client_ca else None
    if options.tls_cert and options.tls_key:
        certificate, key = _given(options.tls_cert, options.tls_key)
    else:
        certificate, key = kept(options.cache_path / "tls", _names(options))
    return Identity(certificate, key, client_ca)


def fingerprint(certificate: x509.Certificate) -> str:
    """SHA-256 of a certificate, in hex."""
    return hashlib.sha256(certificate.public_bytes(serialization.Encoding.DER)).hexdigest()


def kept(folder: Path, names: Iterable[str]) -> tuple[bytes, bytes]:
    """The certificate (with its CA) and key kept in a folder, for these names; made if they are missing or stale."""
    private_folder(folder)
    names = list(names)
    with locked(folder / "ca.pem"):
        ca, ca_key = _kept_ca(folder)
        certificate_path, key_path = folder / "server.pem", folder / "server.key"
        if not _usable(certificate_path, key_path, ca, names):
            replaced = certificate_path.exists()
            certificate, key = _issue(ca, ca_key, names[0], SERVER_DAYS, names=names)
            write_private(key_path, _key_pem(key))
            write_private(certificate_path, _pem(certificate) + _pem(ca), 0o644)
            logger.log(logging.WARNING if replaced else logging.INFO, MADE, certificate_path, ", ".join(names))
        check_owned(key_path, "TLS key", secret=True)
        return read_file(certificate_path, "certificate"), read_file(key_path, "TLS key")


def issue_client(folder: Path, name: str, out: Path) -> tuple[Path, Path]:
    """Make a client certificate for mTLS, signed by the CA kept in a folder; paths of certificate and key.

    Raises:
        ConfigError: no CA is kept there, or the files cannot be written.
    """
    if not (folder / "ca.pem").exists():
        raise ConfigError(f"{folder} has no CA yet; start the server once with --tls auto, which makes it")
    certificate, key = _issue(*_kept_ca(folder), name, CLIENT_DAYS)
    private_folder(out)
    paths = out / f"{name}.pem", out / f"{name}.key"
    write_private(paths[1], _key_pem(key))
    write_private(paths[0], _pem(certificate), 0o644)
    return paths


def _names(options: ServerOptions) -> list[str]:
    """Names and addresses that a client may reach this server by, the nicest first."""
    given = [name.strip() for name in (options.tls_names or "").split(",") if name.strip()]
    bound = [] if options.host in ANY_HOST else [options.host]
    return list(dict.fromkeys([*given, socket.gethostname(), "localhost", "127.0.0.1", "::1", *bound]))


def _given(certificate_path: Path, key_path: Path) -> tuple[bytes, bytes]:
    certificate_pem, key_pem = read_file(certificate_path, "tls_cert"), read_file(key_path, "tls_key")
    certificate = _parse(certificate_pem, f"tls_cert {certificate_path}")[0]
    try:
        key = serialization.load_pem_private_key(key_pem, password=None)
    except (ValueError, TypeError):
        # The reason could quote the file; what matters is that it is no key that we can read.
        raise ConfigError(f"tls_key {key_path} is no PEM private key without a passphrase") from None
    if key.public_key() != certificate.public_key():
        raise ConfigError(f"tls_key {key_path} does not belong to tls_cert {certificate_path}; give the pair")
    _check_dates(certificate, f"tls_cert {certificate_path}")
    return certificate_pem, key_pem


def _client_ca(path: Path) -> bytes:
    pem = read_file(path, "tls_client_ca")
    for certificate in _parse(pem, f"tls_client_ca {path}"):
        _check_dates(certificate, f"tls_client_ca {path}")
    return pem


def _parse(pem: bytes, what: str) -> list[x509.Certificate]:
    try:
        return x509.load_pem_x509_certificates(pem)
    except ValueError:
        raise ConfigError(f"{what} is no PEM certificate; expected -----BEGIN CERTIFICATE-----") from None


def _check_dates(certificate: x509.Certificate, what: str) -> None:
    now = _now()
    if now >= certificate.not_valid_after_utc:
        raise ConfigError(f"{what} expired at {certificate.not_valid_after_utc:%Y-%m-%d %H:%M} UTC; renew it")
    if now < certificate.not_valid_before_utc:
        raise ConfigError(f"{what} is valid from {certificate.not_valid_before_utc:%Y-%m-%d %H:%M} UTC on only")


def _usable(certificate_path: Path, key_path: Path, ca: x509.Certificate, names: list[str]) -> bool:
    """Whether the kept certificate is of this CA, for its key, for all these names, and lasts a while."""
    try:
        certificate = x509.load_pem_x509_certificates(certificate_path.read_bytes())[0]
        key = serialization.load_pem_private_key(key_path.read_bytes(), password=None)
        certificate.verify_directly_issued_by(ca)
        covered = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except (OSError, ValueError, TypeError, x509.ExtensionNotFound, InvalidSignature) as error:
        logger.debug("no usable certificate in %s: %s", certificate_path, type(error).__name__)
        return False
    lasts = certificate.not_valid_after_utc > _now() + datetime.timedelta(days=RENEW_DAYS)
    return lasts and key.public_key() == certificate.public_key() and set(_alternatives(names)) <= set(covered)


def _kept_ca(folder: Path) -> tuple[x509.Certificate, PrivateKey]:
    path, key_path = folder / "ca.pem", folder / "ca.key"
    if not path.exists() and not key_path.exists():
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"symbiosis CA {os.urandom(4).hex()}")])
        ca = _sign(subject, key.public_key(), subject, key, CA_DAYS, ca=True)
        write_private(key_path, _key_pem(key))
        write_private(path, _pem(ca), 0o644)
    check_owned(key_path, "key of the CA", secret=True)
    ca = _parse(read_file(path, "CA"), f"CA {path}")[0]
    _check_dates(ca, f"CA {path}")
    key_of_ca = serialization.load_pem_private_key(read_file(key_path, "key of the CA"), password=None)
    if not isinstance(key_of_ca, PrivateKey) or key_of_ca.public_key() != ca.public_key():
        raise ConfigError(f"{key_path} is not the key of {path}; remove both, and a new CA is made at the next start")
    return ca, key_of_ca


def _issue(
    ca: x509.Certificate, ca_key: PrivateKey, name: str, days: int, names: list[str] | None = None
) -> tuple[x509.Certificate, PrivateKey]:
    """A certificate for a server (with the names it has) or for a client (without)."""
    key = ec.generate_private_key(ec.SECP256R1())
    try:
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        alternatives = _alternatives(names) if names else None
    except ValueError as error:
        raise ConfigError(f"no certificate can be made for {name!r}: {error}") from None
    return _sign(subject, key.public_key(), ca.subject, ca_key, days, alternatives=alternatives), key


def _sign(
    subject: x509.Name,
    public_key: ec.EllipticCurvePublicKey,
    issuer: x509.Name,
    issuer_key: PrivateKey,
    days: int,
    *,
    ca: bool = False,
    alternatives: list[x509.GeneralName] | None = None,
) -> x509.Certificate:
    now = _now()
    usage = ExtendedKeyUsageOID.SERVER_AUTH if alternatives else ExtendedKeyUsageOID.CLIENT_AUTH
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(public_key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))  # clocks differ
        .not_valid_after(now + datetime.timedelta(days=days))
        .add_extension(x509.BasicConstraints(ca=ca, path_length=0 if ca else None), critical=True)
        .add_extension(_key_usage(ca), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public_key), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer_key.public_key()), critical=False)
    )
    if not ca:
        builder = builder.add_extension(x509.ExtendedKeyUsage([usage]), critical=False)
    if alternatives:
        builder = builder.add_extension(x509.SubjectAlternativeName(alternatives), critical=False)
    return builder.sign(issuer_key, hashes.SHA256())


def _key_usage(ca: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not ca,
        key_cert_sign=ca,
        crl_sign=ca,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _alternatives(names: list[str]) -> list[x509.GeneralName]:
    return [_alternative(name) for name in names]


def _alternative(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)


def _key_pem(key: PrivateKey) -> bytes:
    form = serialization.PrivateFormat.PKCS8
    return key.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption())


def _now() -> datetime.datetime:
    return datetime.datetime.now(datetime.UTC)
