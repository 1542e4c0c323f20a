"""What breaks beside the network: damaged weights, full disks, clocks that jump, certificates that have expired."""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import os
import random
import re
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import pytest
import torch
import transformers

import symbiosis
from symbiosis.config import ServerOptions
from symbiosis.connection import Connection
from symbiosis.errors import ConfigError, TlsError
from symbiosis.flight.base_model import BaseModel
from symbiosis.flight.loading import load_base
from symbiosis.flight.server import Server
from symbiosis.flight.tokens import TokenBook, TokenFile
from symbiosis.private_files import write_private
from tests.faults.nursery import tiny_model

ROOT = Path(__file__).parents[2]
Q = "model.layers.0.self_attn.q_proj"
COMMIT = "c" * 40


def product(conn: Connection) -> torch.Tensor:
    return conn._caller.call("forward", [Q], [torch.ones(3, 32)])


# --- weights that are not those that were published ------------------------------------------------------------------


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A hub cache with one model, as the hub's client lays it out; the folder of its files."""
    cache, plain = tmp_path / "hub", tmp_path / "plain"
    tiny_model().save_pretrained(plain)
    repo = cache / "models--org--tiny"
    snapshot = repo / "snapshots" / COMMIT
    for folder in (repo / "blobs", repo / "refs", snapshot):
        folder.mkdir(parents=True)
    (repo / "refs" / "main").write_text(COMMIT)
    for file in plain.iterdir():
        content = file.read_bytes()
        large = file.suffix == ".safetensors"
        blob = repo / "blobs" / (hashlib.sha256(content).hexdigest() if large else hashlib.sha1(content).hexdigest())
        blob.write_bytes(content)
        (snapshot / file.name).symlink_to(blob)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(cache))
    return snapshot


def flip_a_bit(file: Path) -> str:
    """Change one weight, in place, and leave the size and the time as they were; the new hash."""
    blob = file.resolve()
    before = blob.stat()
    content = bytearray(blob.read_bytes())
    content[-5] ^= 4
    blob.write_bytes(content)
    os.utime(blob, ns=(before.st_atime_ns, before.st_mtime_ns))
    return hashlib.sha256(content).hexdigest()


def options(model: object, folder: Path, **fields: Any) -> ServerOptions:
    return ServerOptions(model=str(model), cache_dir=folder, device="cpu", local_files_only=True, **fields)


def test_a_model_of_the_hub_is_served_as_it_was_published(hub: Path, tmp_path: Path) -> None:
    base = load_base(options("org/tiny", tmp_path))

    assert base.revision == COMMIT
    torch.testing.assert_close(base.linears[Q].weight, tiny_model().get_submodule(Q).weight.detach())


def test_a_damaged_file_of_the_hub_is_refused_with_its_hash_and_what_to_do(hub: Path, tmp_path: Path) -> None:
    found = flip_a_bit(hub / "model.safetensors")

    with pytest.raises(ConfigError, match=f"(?s)model.safetensors is not .* SHA-256 is {found}.*delete .*start again"):
        load_base(options("org/tiny", tmp_path))
    assert not (tmp_path / "fingerprints").exists()  # nothing of it is believed later


def test_a_server_that_expects_a_fingerprint_hashes_weights_at_each_start(hub: Path, tmp_path: Path) -> None:
    folder = tmp_path / "plain"
    good = load_base(options(folder, tmp_path)).fingerprint
    assert load_base(options(folder, tmp_path, expect_fingerprint=good[:12].upper())).fingerprint == good

    flip_a_bit(folder / "model.safetensors")

    with pytest.raises(ConfigError, match=f"have the fingerprint [0-9a-f]{{64}}, and expect_fingerprint is {good}"):
        load_base(options(folder, tmp_path, expect_fingerprint=good))


@pytest.mark.parametrize("value", ["0123456789a", "x" * 12, "0" * 65])
def test_a_fingerprint_to_expect_that_is_none_is_refused(value: str) -> None:
    with pytest.raises(ConfigError, match=r"expect_fingerprint.*12 to 64 hex digits"):
        ServerOptions(model="m", expect_fingerprint=value)


# --- full disks ------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def full_disk(room_bytes: int = 100) -> Iterator[None]:
    """No file of this process grows beyond that in here. Python ignores SIGXFSZ, so writing fails."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk_under_the_audit_log_is_reported_once_and_stops_no_call(
    tiny_llama: Any, start_server: Callable[..., Server], caplog: pytest.LogCaptureFixture
) -> None:
    server = start_server(tiny_llama(), audit_log="/dev/full")
    with symbiosis.connect(server.url) as conn:
        for _ in range(5):
            product(conn)

    assert caplog.text.count("audit log /dev/full cannot be written; events are being lost") == 1
    assert server.stats().requests == 5


def test_a_full_disk_under_the_cache_costs_only_the_hashing(
    hub: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with full_disk():
        base = load_base(options("org/tiny", tmp_path), bars=False)
    transformers.utils.logging.enable_progress_bar()

    assert "cannot keep the weight hashes" in caplog.text
    assert base.fingerprint
    assert not list((tmp_path / "fingerprints").glob("*.json"))


def test_a_full_disk_leaves_the_file_of_tokens_as_it_was(tmp_path: Path) -> None:
    file = TokenFile(tmp_path / "tokens.json")
    file.create("alice")
    before = file.path.read_bytes()

    with full_disk(), pytest.raises(ConfigError, match=r"tokens.json cannot be written: File too large"):
        file.create("bob")

    assert file.path.read_bytes() == before
    assert not list(tmp_path.glob("*.part"))


@pytest.mark.parametrize("fields", [{"tls": "auto"}, {"payload": "offer"}], ids=str)
def test_keys_that_cannot_be_kept_stop_the_start(fields: dict[str, str], tmp_path: Path) -> None:
    base = BaseModel(tiny_model())
    base.files()  # which are read once, and need room for temporary files

    with full_disk(10), pytest.raises(ConfigError, match=r"cannot be written: File too large"):
        Server(base, ServerOptions(model="m", port=0, cache_dir=tmp_path, **fields))

    assert not [path for path in tmp_path.rglob("*") if path.is_file() and not path.name.endswith(".lock")]


def test_no_room_for_temporary_files_is_a_config_error() -> None:
    with full_disk(), pytest.raises(ConfigError, match="set TMPDIR to another folder"):
        symbiosis.serve(tiny_model(), port=0)


LOGGING_TO_A_FULL_DISK = """
import logging, sys
from symbiosis.flight import cli
cli._configure_logging("debug", sys.argv[1])
for _ in range(100):
    logging.getLogger("symbiosis").error("nobody reads this", exc_info=ValueError("x"))
print("went on")
"""


@pytest.mark.parametrize("form", ["text", "json"])
def test_a_full_disk_under_the_log_stops_nothing(form: str) -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-c", LOGGING_TO_A_FULL_DISK, form],
            stdout=subprocess.PIPE, stderr=full, text=True, timeout=60, env={**os.environ, "PYTHONPATH": str(ROOT)},
        )  # fmt: skip

    assert (done.stdout, done.returncode) == ("went on\n", 0)


def test_an_adapter_that_does_not_fit_on_the_disk_is_an_error_and_no_half_of_one(
    tmp_path: Path, tiny_llama: Any, start_server: Callable[..., Server]
) -> None:
    import peft

    with symbiosis.connect(start_server(tiny_llama()).url) as conn:
        model = peft.get_peft_model(conn.load_model(), peft.LoraConfig(target_modules=["q_proj"]))
        with full_disk(), pytest.raises(OSError, match="File too large"):
            conn.save_adapter(model, tmp_path / "adapter")

    assert not (tmp_path / "adapter" / "adapter_model.safetensors").exists()


# --- clocks that jump ------------------------------------------------------------------------------------------------


@pytest.fixture
def jumping(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The wall clock is up to ten years off, another amount at each reading; how far it was off."""
    chance, real, offs = random.Random(6), time.time, []

    def jumped() -> float:
        offs.append(chance.uniform(-3e8, 3e8))
        return real() + offs[-1]

    monkeypatch.setattr(time, "time", jumped)
    return offs


def test_clock_jumps_reach_no_call_no_deadline_and_no_quota(
    tmp_path: Path, tiny_llama: Any, start_server: Callable[..., Server], jumping: list[float]
) -> None:
    token = TokenFile(tmp_path / "tokens.json").create("alice")
    server = start_server(tiny_llama(), tokens=str(tmp_path / "tokens.json"), watchdog_s=5.0, idle_timeout_s=5.0)
    expected = tiny_llama().get_submodule(Q)(torch.ones(3, 32)).detach()
    with symbiosis.connect(server.url, token=token, request_timeout_s=5.0) as conn:
        for _ in range(20):
            torch.testing.assert_close(product(conn), expected, rtol=1e-5, atol=1e-6)
        server._caretaker.look()
        stats = conn.stats()

    assert len(jumping) > 0
    assert (stats.retries, server._streams.cut_off, server._caretaker.stuck) == (0, 0, False)
    assert 0.0 <= server.stats().uptime_s < 100.0


def test_only_what_expires_on_a_date_reads_the_wall_clock() -> None:
    readers = {
        str(path.relative_to(ROOT / "symbiosis"))
        for path in (ROOT / "symbiosis").rglob("*.py")
        if re.search(r"time\.time\(|datetime\.now\(|utcnow\(", path.read_text(encoding="utf-8"))
    }

    assert readers == {
        "flight/admin.py", "flight/tokens.py", "privacy/certificates.py",  # expiry
        "flight/audit_log.py", "integrations/demo_client.py",  # when it happened, for people
    }  # fmt: skip


def test_a_token_that_expired_when_the_clock_jumped_is_good_again_when_it_jumps_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, real = TokenFile(tmp_path / "tokens.json"), time.time
    token = file.create("alice", expires_s=real() + 1000)
    book = TokenBook(file.path)
    for off_s, good in ((0.0, True), (2000.0, False), (-1e8, True)):
        monkeypatch.setattr(time, "time", lambda off_s=off_s: real() + off_s)
        assert (book.grant(token) is not None) is good


# --- certificates that have expired ----------------------------------------------------------------------------------


def test_a_certificate_that_expires_while_a_server_runs_stops_new_clients_by_name(tmp_path: Path) -> None:
    certificate, key = short_lived(tmp_path, seconds=2)
    server = symbiosis.serve(tiny_model(), port=0, tls_cert=certificate, tls_key=key)
    with server:
        trust = {"tls_ca": certificate, "retry_s": 0, "connect_timeout_s": 5}
        with symbiosis.connect(server.url, **trust) as conn:
            product(conn)
            time.sleep(2.5)
            product(conn)  # a connection that stands goes on
            with pytest.raises(TlsError, match="expired"):
                symbiosis.connect(server.url, **trust)


def test_an_expired_certificate_stops_the_start(tmp_path: Path) -> None:
    certificate, key = short_lived(tmp_path, seconds=-5)

    with pytest.raises(ConfigError, match="expired"):
        symbiosis.serve(tiny_model(), port=0, tls_cert=certificate, tls_key=key)


def short_lived(folder: Path, seconds: float) -> tuple[str, str]:
    """A self-signed certificate for 127.0.0.1 that is good for so long, and its key."""
    import ipaddress

    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key, now = ec.generate_private_key(ec.SECP256R1()), datetime.datetime.now(datetime.UTC)
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "127.0.0.1")])
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(seconds=seconds))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, hashes.SHA256())
    )
    pem, none = serialization.Encoding.PEM, serialization.NoEncryption()
    write_private(folder / "c.pem", certificate.public_bytes(pem))
    write_private(folder / "c.key", key.private_bytes(pem, serialization.PrivateFormat.PKCS8, none))
    return str(folder / "c.pem"), str(folder / "c.key")
