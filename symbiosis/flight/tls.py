"""The client's side of TLS: whom a channel trusts, and why a handshake failed.

One rule: standard library only, so that the base install can use TLS, and no secret of a connection in any message.

gRPC reports a failed handshake as an unreachable server, in words that change. So after a failure the handshake is
repeated with `ssl`, whose errors have codes; nothing else is ever sent on that second connection.
"""

from __future__ import annotations

import contextlib
import hashlib
import socket
import ssl
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from symbiosis.errors import ConfigError, SymbiosisError, TlsError
from symbiosis.private_files import read_file

PREFIX = "grpc+tls://"
PROBE_TIMEOUT_S = 5.0
GREETING_S = 2.0  # TLS 1.3: a server looks at a client's certificate only after the client's handshake is done
# OpenSSL's X509_V_ERR_*
EXPIRED, NOT_YET_VALID = 10, 9
WRONG_NAME = (62, 64)


@dataclass(frozen=True)
class Tls:
    """Whom to trust and what to show, as the options tls_* say; nothing given means the system's CAs."""

    ca: Path | None = None
    fingerprint: str | None = None
    hostname: str | None = None
    client_cert: Path | None = None
    client_key: Path | None = None

    @property
    def given(self) -> bool:
        return self != Tls()


def address(url: str) -> tuple[str, int]:
    """Host and port of a server URL."""
    host, _, port = url.partition("://")[2].rpartition(":")
    return host.strip("[]"), int(port)


def client_arguments(url: str, tls: Tls, timeout_s: float = PROBE_TIMEOUT_S) -> dict[str, Any]:
    """Keyword arguments for a FlightClient; asks the server for its certificate if that is to be pinned.

    Raises:
        ConfigError: a file that cannot be used, or TLS options for a URL without TLS.
        TlsError: the server shows another certificate than the pinned one.
        OSError: the server cannot be reached.
    """
    if not url.startswith(PREFIX):
        if tls.given:
            raise ConfigError(f"{url}: tls_* options protect nothing without TLS; use {PREFIX}HOST:PORT")
        return {}
    arguments: dict[str, Any] = {}
    _context(tls)  # refuses files that are none, before gRPC does so in its own words
    if tls.client_cert and tls.client_key:
        arguments["cert_chain"] = read_file(tls.client_cert, "tls_client_cert")
        arguments["private_key"] = read_file(tls.client_key, "tls_client_key")
    if tls.ca:
        arguments["tls_root_certs"] = read_file(tls.ca, "tls_ca")
    if tls.hostname:
        arguments["override_hostname"] = tls.hostname
    if tls.fingerprint:
        arguments.update(_pinned(url, tls, timeout_s))
    return arguments


def certificate_of(url: str, tls: Tls, timeout_s: float = PROBE_TIMEOUT_S) -> bytes | None:
    """The certificate that a server shows, DER, trusted or not; None where there is none to see."""
    if not url.startswith(PREFIX):
        return None
    try:
        with _handshake(url, _unverified(tls), timeout_s) as connection:
            return connection.getpeercert(binary_form=True)
    except OSError:  # ssl's errors, too: whoever cannot be reached has shown none
        return None


def explain(url: str, tls: Tls, timeout_s: float = PROBE_TIMEOUT_S) -> SymbiosisError | None:
    """Why no connection came about, if TLS is the reason; None if it is another."""
    try:
        if not url.startswith(PREFIX):
            with _handshake(url, _unverified(Tls()), timeout_s):
                return TlsError(f"the server at {url} speaks TLS; use {PREFIX}, with tls_ca or tls_fingerprint")
        with _handshake(url, _context(tls), timeout_s, tls.hostname) as connection:
            return None if _greets(connection) else _client_refused(url)
    except ssl.SSLEOFError:
        return None  # hung up: nothing about trust
    except ssl.SSLError as error:
        return _explained(url, tls, error) if url.startswith(PREFIX) else None
    except OSError:
        return None


def _greets(connection: ssl.SSLSocket) -> bool:
    """Whether the server speaks after the handshake, or at least stays; one that refused us hangs up."""
    connection.settimeout(GREETING_S)
    try:
        return bool(connection.recv(1))
    except TimeoutError:
        return True
    except OSError:  # an alert, or a reset
        return False


def _client_refused(url: str) -> TlsError:
    return TlsError(
        f"{url} hung up after the handshake, as a server does that trusts only clients with a certificate (mTLS); give "
        "tls_client_cert and tls_client_key, signed by the CA that the server was started with"
    )


def _pinned(url: str, tls: Tls, timeout_s: float) -> dict[str, Any]:
    """Trust exactly the certificate with the pinned hash, whatever names it bears."""
    try:
        with _handshake(url, _unverified(tls), timeout_s) as connection:
            found = connection.getpeercert(binary_form=True) or b""
    except ssl.SSLEOFError:
        raise
    except ssl.SSLError as error:
        raise _explained(url, tls, error) from None
    actual = hashlib.sha256(found).hexdigest()
    if actual != tls.fingerprint:
        raise TlsError(
            f"{url} shows the certificate sha256:{actual}, pinned is sha256:{tls.fingerprint}: either the server has a "
            "new certificate, or somebody is between you and it. Ask its operator for the fingerprint that it prints "
            "at start"
        )
    trusted = {"tls_root_certs": ssl.DER_cert_to_PEM_cert(found).encode()}
    name = tls.hostname or _name_in(url, tls, found, timeout_s)
    return {**trusted, "override_hostname": name} if name else trusted


def _name_in(url: str, tls: Tls, certificate: bytes, timeout_s: float) -> str | None:
    """A name that the certificate bears. `ssl` parses only what it verified, so this shakes hands again."""
    context = _unverified(tls)
    context.load_verify_locations(cadata=certificate)
    context.verify_mode = ssl.CERT_REQUIRED
    try:
        with _handshake(url, context, timeout_s) as connection:
            names: Any = (connection.getpeercert() or {}).get("subjectAltName", ())
    except ssl.SSLEOFError:
        raise
    except ssl.SSLError as error:
        raise _explained(url, tls, error) from None
    usable = sorted((kind, name) for kind, name in names if kind in ("DNS", "IP Address"))
    return usable[0][1] if usable else None


def _unverified(tls: Tls) -> ssl.SSLContext:
    """A context that takes any certificate: for looking at it, and for nothing else."""
    context = _base_context(tls)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


def _context(tls: Tls) -> ssl.SSLContext:
    context = _base_context(tls)
    if tls.ca:
        content = read_file(tls.ca, "tls_ca")
        try:
            context.load_verify_locations(cadata=content.decode("ascii"))
        except (ssl.SSLError, ValueError):
            raise ConfigError(f"tls_ca {tls.ca} is no PEM certificate; ask the operator for the server's CA") from None
    else:
        context.load_default_certs()
    return context


def _base_context(tls: Tls) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.set_alpn_protocols(["h2"])  # a gRPC server hangs up without
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # as gRPC does: a trusted certificate need not be a CA's
    if tls.client_cert and tls.client_key:
        for what, path in (("tls_client_cert", tls.client_cert), ("tls_client_key", tls.client_key)):
            read_file(path, what)
        try:
            context.load_cert_chain(tls.client_cert, tls.client_key, password=_no_passphrase)
        except (ssl.SSLError, ValueError):
            raise ConfigError(
                f"tls_client_cert {tls.client_cert} and tls_client_key {tls.client_key} are no pair of PEM files "
                "without a passphrase"
            ) from None
    return context


def _no_passphrase() -> str:
    raise ValueError("the key has a passphrase")  # else OpenSSL would ask at the terminal


@contextlib.contextmanager
def _handshake(
    url: str, context: ssl.SSLContext, timeout_s: float, hostname: str | None = None
) -> Iterator[ssl.SSLSocket]:
    host, port = address(url)
    with (
        socket.create_connection((host, port), timeout_s) as raw,
        context.wrap_socket(raw, server_hostname=hostname or host) as connection,
    ):
        yield connection


def _explained(url: str, tls: Tls, error: ssl.SSLError) -> TlsError:
    if isinstance(error, ssl.SSLCertVerificationError):
        return TlsError(f"{url}: {_bad_certificate(tls, error)}")
    reason = (error.reason or "handshake failed").lower().replace("_", " ")
    if "alert" in reason and "certificate" in reason:
        return _client_refused(url)
    if "wrong version" in reason or "record layer" in reason:
        return TlsError(f"{url} does not speak TLS; use grpc://, on loopback or through a tunnel only")
    return TlsError(f"{url}: the TLS handshake failed ({reason}); check what listens there")


def _bad_certificate(tls: Tls, error: ssl.SSLCertVerificationError) -> str:
    if error.verify_code == EXPIRED:
        return "the server's certificate has expired; its operator must renew it (--tls auto does so at a restart)"
    if error.verify_code == NOT_YET_VALID:
        return "the server's certificate is not valid yet; compare the clocks of both machines"
    if error.verify_code in WRONG_NAME:
        return "the server's certificate bears another name; check the URL, or give the name in it as tls_hostname"
    source = f"tls_ca {tls.ca}" if tls.ca else "a CA of this system"
    return (
        f"the server's certificate is not signed by {source} ({error.verify_message}); give the server's CA as tls_ca, "
        "or the fingerprint that it prints at start as tls_fingerprint"
    )
