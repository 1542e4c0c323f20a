"""TLS between a real server and a real client: what connects, and how each refusal reads."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow.flight as fl
import pytest
import torch

import symbiosis
from symbiosis.errors import ConfigError, ConnectError, SymbiosisError, TlsError
from symbiosis.flight.server import Server

Factory = Callable[..., Any]
NAME = "model.layers.0.self_attn.q_proj"


def _load_authority() -> Any:
    spec = importlib.util.spec_from_file_location("symbiosis_test_authority", Path(__file__).with_name("authority.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


authority = _load_authority()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tls")


@pytest.fixture(scope="module")
def ca(folder: Path) -> Any:
    return authority.make(folder, "ca")


@pytest.fixture(scope="module")
def other_ca(folder: Path) -> Any:
    return authority.make(folder, "other-ca")


@pytest.fixture
def auto(tiny_llama: Factory, start_server: Factory, tmp_path: Path) -> Server:
    return start_server(tiny_llama(), tls="auto", cache_dir=tmp_path)


@pytest.fixture
def bare() -> Iterator[Callable[..., str]]:
    """bare(pair): the URL of a Flight server with that certificate, however bad; ours would refuse to start."""
    servers: list[fl.FlightServerBase] = []

    def start(pair: Any) -> str:
        server = fl.FlightServerBase("grpc+tls://127.0.0.1:0", tls_certificates=[(pair.pem, pair.key_pem)])
        servers.append(server)
        return f"grpc+tls://127.0.0.1:{server.port}"

    yield start
    for server in servers:
        threading.Thread(target=server.shutdown, daemon=True).start()


def refusal(url: str, **options: Any) -> SymbiosisError:
    with pytest.raises(SymbiosisError) as caught:
        symbiosis.connect(url, connect_timeout_s=20, **options)
    return caught.value


# --- what connects -----------------------------------------------------------------------------------------------


def test_the_ca_of_the_server_is_trusted_and_the_results_are_the_same(
    auto: Server, tmp_path: Path, tiny_llama: Factory, tokens: Factory
) -> None:
    ids, expected = tokens(), tiny_llama()

    with symbiosis.connect(auto.url, tls_ca=tmp_path / "tls" / "ca.pem") as conn:
        remote = conn.load_model()
        with torch.no_grad():
            # fp32: a product differs in its last bits with what it is batched with
            torch.testing.assert_close(remote(ids).logits, expected(ids).logits, rtol=1e-4, atol=1e-4)

    assert auto.url.startswith("grpc+tls://127.0.0.1:")


@pytest.mark.parametrize("form", ["{0}", "sha256:{0}", "SHA256:{1}"])
def test_a_pinned_certificate_is_trusted_in_each_way_of_writing_it(auto: Server, form: str) -> None:
    assert auto.identity is not None
    digits = auto.identity.fingerprint
    colons = ":".join(digits[i : i + 2] for i in range(0, 64, 2)).upper()

    with symbiosis.connect(auto.url, tls_fingerprint=form.format(digits, colons)) as conn:
        assert conn.health().status == "serving"


def test_a_pin_needs_no_matching_name(folder: Path, ca: Any, tiny_llama: Factory, start_server: Factory) -> None:
    pair = authority.make(folder, "elsewhere", ca, address="10.9.9.9")
    server = start_server(tiny_llama(), tls_cert=pair.cert_path, tls_key=pair.key_path)

    with symbiosis.connect(server.url, tls_fingerprint=pair.fingerprint) as conn:
        assert conn.health().status == "serving"
    with symbiosis.connect(server.url, tls_ca=ca.cert_path, tls_hostname="10.9.9.9") as conn:
        assert conn.health().status == "serving"


def test_a_host_that_others_reach_gets_tls_by_default(
    tiny_llama: Factory, start_server: Factory, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    server = start_server(tiny_llama(), host="0.0.0.0", cache_dir=tmp_path)

    assert server.url.startswith("grpc+tls://0.0.0.0:")
    assert "INSECURE" not in caplog.text
    assert isinstance(refusal(f"grpc://127.0.0.1:{server.port}"), TlsError)


def test_insecure_is_loud(tiny_llama: Factory, start_server: Factory, caplog: pytest.LogCaptureFixture) -> None:
    server = start_server(tiny_llama(), host="0.0.0.0", insecure=True)

    assert "INSECURE: listening on 0.0.0.0 without TLS" in caplog.text
    with symbiosis.connect(f"grpc://127.0.0.1:{server.port}") as conn:
        assert conn.health().status == "serving"


def test_a_client_certificate_of_the_right_ca_connects(
    folder: Path, ca: Any, other_ca: Any, tiny_llama: Factory, start_server: Factory
) -> None:
    mine, client, stranger = (
        authority.make(folder, *of) for of in [("server", ca), ("client", other_ca), ("stranger", ca)]
    )
    options = {"tls_cert": mine.cert_path, "tls_key": mine.key_path, "tls_client_ca": other_ca.cert_path}
    url = start_server(tiny_llama(), **options).url

    def shown(pair: Any) -> dict[str, Any]:
        return {"tls_client_cert": pair.cert_path, "tls_client_key": pair.key_path}

    with symbiosis.connect(url, tls_ca=ca.cert_path, **shown(client)) as conn:
        assert conn.health().status == "serving"
    with symbiosis.connect(url, tls_fingerprint=mine.fingerprint, **shown(client)) as conn:
        assert conn.health().status == "serving"
    for refused in (refusal(url, tls_ca=ca.cert_path), refusal(url, tls_ca=ca.cert_path, **shown(stranger))):
        assert isinstance(refused, TlsError)
        assert "hung up after the handshake" in str(refused)
        assert "tls_client_cert" in str(refused)


# --- what does not -----------------------------------------------------------------------------------------------


def test_another_ca_is_not_trusted(auto: Server, other_ca: Any) -> None:
    error = refusal(auto.url, tls_ca=other_ca.cert_path)

    assert isinstance(error, TlsError)
    assert f"not signed by tls_ca {other_ca.cert_path}" in str(error)
    assert "not signed by a CA of this system" in str(refusal(auto.url))


def test_another_name_is_not_trusted(auto: Server, tmp_path: Path) -> None:
    error = refusal(auto.url, tls_ca=tmp_path / "tls" / "ca.pem", tls_hostname="other.example")

    assert isinstance(error, TlsError)
    assert "bears another name" in str(error)


def test_another_certificate_than_the_pinned_one_is_not_trusted(auto: Server) -> None:
    error = refusal(auto.url, tls_fingerprint="ab" * 32)

    assert isinstance(error, TlsError)
    assert auto.identity is not None
    assert auto.identity.fingerprint in str(error)
    assert not error.retryable


@pytest.mark.parametrize("pinned", [True, False])
def test_an_expired_certificate_is_not_trusted(pinned: bool, folder: Path, ca: Any, bare: Factory) -> None:
    old = authority.make(folder, "old", ca, days=-1)
    trust = {"tls_fingerprint": old.fingerprint} if pinned else {"tls_ca": ca.cert_path}

    error = refusal(bare(old), **trust)

    assert isinstance(error, TlsError)
    assert "has expired" in str(error)


def test_tls_to_a_server_without_it_says_so(llama_server: Server) -> None:
    url = llama_server.url.replace("grpc://", "grpc+tls://")

    for options in ({}, {"tls_fingerprint": "ab" * 32}):
        error = refusal(url, **options)
        assert isinstance(error, TlsError)
        assert "does not speak TLS" in str(error)


def test_nobody_there_is_no_matter_of_tls() -> None:
    for options in ({}, {"tls_fingerprint": "ab" * 32}):
        error = refusal("grpc+tls://127.0.0.1:9", **options)
        assert isinstance(error, ConnectError)
        assert error.retryable


def test_tls_options_without_tls_are_refused(llama_server: Server) -> None:
    assert "protect nothing without TLS" in str(refusal(llama_server.url, tls_fingerprint="ab" * 32))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"tls_ca": "missing.pem"}, "cannot be read"),
        ({"tls_ca": __file__}, "is no PEM certificate"),
        ({"tls_fingerprint": "abc"}, "expected the SHA-256 of a certificate"),
        ({"tls_client_cert": __file__}, "belong together"),
        ({"tls_client_cert": __file__, "tls_client_key": __file__}, "no pair of PEM files"),
        ({"tls_ca": __file__, "tls_fingerprint": "ab" * 32}, "give one of them"),
    ],
)
def test_what_a_client_cannot_use_is_refused_by_name(options: dict[str, str], words: str) -> None:
    error = refusal("grpc+tls://127.0.0.1:9", **options)

    assert isinstance(error, ConfigError)
    assert words in str(error)


# --- a server's own certificate ------------------------------------------------------------------------------------


def test_openssl_agrees_with_our_certificate(auto: Server, tmp_path: Path) -> None:
    files = tmp_path / "tls"
    command = ["openssl", "verify", "-x509_strict", "-purpose", "sslserver", "-CAfile", str(files / "ca.pem")]
    try:
        done = subprocess.run([*command, str(files / "server.pem")], capture_output=True, text=True, timeout=60)
    except FileNotFoundError:
        pytest.skip("this machine has no openssl")

    assert done.returncode == 0, done.stderr
