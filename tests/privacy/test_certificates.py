"""Certificates that a server makes and keeps, and pairs that it refuses at start."""

from __future__ import annotations

import datetime
import stat
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509

from symbiosis.config import ServerOptions
from symbiosis.errors import ConfigError
from symbiosis.privacy import certificates


def options(tmp_path: Path, **values: Any) -> ServerOptions:
    return ServerOptions(**{"model": "demo", "cache_dir": tmp_path, "tls": "auto", **values})


def leaf(identity: certificates.Identity) -> x509.Certificate:
    return x509.load_pem_x509_certificates(identity.certificate)[0]


def test_a_certificate_is_made_once_and_kept(tmp_path: Path) -> None:
    first, second = (certificates.identity(options(tmp_path)) for _ in range(2))

    assert first == second
    assert first is not None
    assert repr(first) == f"<Identity {first.fingerprint}>"


def test_keys_are_readable_by_their_owner_only(tmp_path: Path) -> None:
    certificates.identity(options(tmp_path))

    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "tls").iterdir()}
    assert modes["ca.key"] == modes["server.key"] == 0o600
    assert stat.S_IMODE((tmp_path / "tls").stat().st_mode) == 0o700


def test_a_key_that_others_can_read_is_refused(tmp_path: Path) -> None:
    certificates.identity(options(tmp_path))
    (tmp_path / "tls" / "server.key").chmod(0o644)

    with pytest.raises(ConfigError, match="chmod 600"):
        certificates.identity(options(tmp_path))


def test_new_names_make_a_new_certificate_of_the_same_ca(tmp_path: Path) -> None:
    first = certificates.identity(options(tmp_path))
    second = certificates.identity(options(tmp_path, tls_names="gpu.example.org, 10.1.2.3", host="10.0.0.7"))

    assert first is not None
    assert second is not None
    assert leaf(first).issuer == leaf(second).issuer
    names = leaf(second).extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert "gpu.example.org" in names.get_values_for_type(x509.DNSName)
    assert {"10.1.2.3", "10.0.0.7", "127.0.0.1"} <= {str(ip) for ip in names.get_values_for_type(x509.IPAddress)}


def test_a_certificate_is_renewed_in_time_and_a_spoilt_one_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = certificates.identity(options(tmp_path))
    late = certificates._now() + datetime.timedelta(days=certificates.SERVER_DAYS - certificates.RENEW_DAYS + 1)
    monkeypatch.setattr(certificates, "_now", lambda: late)
    second = certificates.identity(options(tmp_path))
    (tmp_path / "tls" / "server.pem").write_text("spoilt")
    third = certificates.identity(options(tmp_path))

    assert first is not None
    assert second is not None
    assert third is not None
    assert len({first.fingerprint, second.fingerprint, third.fingerprint}) == 3


def test_half_a_ca_is_refused_and_not_replaced(tmp_path: Path) -> None:
    certificates.identity(options(tmp_path))
    (tmp_path / "tls" / "ca.pem").unlink()

    with pytest.raises(ConfigError, match=r"ca\.pem cannot be read"):
        certificates.identity(options(tmp_path))


def test_a_name_that_no_certificate_can_bear_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no certificate can be made"):
        certificates.identity(options(tmp_path, tls_names="müller.example"))


def test_a_client_certificate_is_signed_by_the_kept_ca(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has no CA yet"):
        certificates.issue_client(tmp_path / "tls", "alice", tmp_path)
    certificates.identity(options(tmp_path))

    path, key_path = certificates.issue_client(tmp_path / "tls", "alice", tmp_path / "out")

    ca = x509.load_pem_x509_certificate((tmp_path / "tls" / "ca.pem").read_bytes())
    x509.load_pem_x509_certificate(path.read_bytes()).verify_directly_issued_by(ca)
    assert stat.S_IMODE(key_path.stat().st_mode) == 0o600


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"tls_cert": "c"}, "tls_cert is given and tls_key is not"),
        ({"tls_key": "k"}, "tls_key is given and tls_cert is not"),
        ({"tls": "auto", "tls_cert": "c", "tls_key": "k"}, "leave one out"),
        ({"insecure": True, "tls": "auto"}, "insecure means no TLS"),
        ({"insecure": True, "host": "0.0.0.0", "tls_client_ca": "c"}, "insecure means no TLS"),
        ({"tls_client_ca": "c"}, "need TLS, which is off on a loopback host"),
        ({"tls_names": "x"}, "need TLS"),
    ],
)
def test_a_half_given_configuration_is_refused(values: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        ServerOptions(model="demo", **values)


def test_tls_is_on_by_default_off_loopback_only() -> None:
    assert not ServerOptions(model="demo").tls_on
    assert not ServerOptions(model="demo", host="::1").tls_on
    assert not ServerOptions(model="demo", host="0.0.0.0", insecure=True).tls_on
    assert ServerOptions(model="demo", host="0.0.0.0").tls_on
    assert ServerOptions(model="demo", host="gpu.example.org").tls_on


def test_files_that_are_no_pair_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    certificates.identity(options(tmp_path))
    kept = tmp_path / "tls"

    def given(cert: Path, key: Path, **more: Any) -> ServerOptions:
        return options(tmp_path, tls=None, tls_cert=cert, tls_key=key, **more)

    assert certificates.identity(given(kept / "server.pem", kept / "server.key")) is not None
    with pytest.raises(ConfigError, match="does not belong to"):
        certificates.identity(given(kept / "server.pem", kept / "ca.key"))
    with pytest.raises(ConfigError, match="is no PEM certificate"):
        certificates.identity(given(kept / "server.key", kept / "server.key"))
    with pytest.raises(ConfigError, match="is no PEM private key"):
        certificates.identity(given(kept / "server.pem", kept / "server.pem"))
    with pytest.raises(ConfigError, match=r"tls_client_ca .* cannot be read"):
        certificates.identity(given(kept / "server.pem", kept / "server.key", tls_client_ca=kept / "none.pem"))
    late = certificates._now() + datetime.timedelta(days=certificates.SERVER_DAYS + 1)
    monkeypatch.setattr(certificates, "_now", lambda: late)
    with pytest.raises(ConfigError, match=r"expired at .*renew it"):
        certificates.identity(given(kept / "server.pem", kept / "server.key"))
