"""Every option of the server and of the client, declared once: name, type, default, bounds and help.

One rule: an options object holds exactly what it was given, plus defaults; `ServerOptions(...)` and
`ClientOptions(...)` read nothing from outside. Whoever wants the surroundings read asks for it by name:

    explicit  >  environment variable  >  TOML file  >  default

    who reads                    explicit is            environment          TOML file named by
    symbiosis-flight-server      its command line       SYMBIOSIS_*          --config or SYMBIOSIS_CONFIG
    symbiosis.connect(url, ...)  its keyword arguments  SYMBIOSIS_CLIENT_*   SYMBIOSIS_CLIENT_CONFIG
    symbiosis.serve(model, ...)  its keyword arguments  not read             not read

`serve()` runs inside somebody's program and does what that program says. `connect()` runs in a notebook whose
surroundings somebody else may own (JupyterHub, a container), so they may speak through the environment.
A file is flat: its keys are the field names below. An empty environment variable counts as not set.
How the layers are read, and how errors are worded, is in settings.py.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, ClassVar, Literal, Self

from pydantic import (
    AfterValidator,
    BeforeValidator,
    ByteSize,
    Field,
    SecretStr,
    TypeAdapter,
    ValidationError,
    model_validator,
)

from symbiosis.settings import ENV_PREFIX, Options, Setting

MIN_MESSAGE_BYTES = 1024
# The wire's own limits, from flight/protocol.py, which imports torch and so cannot be asked from here; a test
# keeps the two equal.
MAX_MESSAGE_BYTES = 2**30
MAX_REQUEST_TIMEOUT_S = 3600

TOKEN_REFUSAL = (
    "authentication does not exist yet, so a token would protect nothing and is refused; leave it out, "
    "and keep the server on a loopback host"
)


def _parse_bytes(value: object) -> object:
    if not isinstance(value, str):
        return value
    try:
        return int(TypeAdapter(ByteSize).validate_python(value))
    except ValidationError:
        raise ValueError("expected a number of bytes, such as 67108864 or 64MiB") from None


def _check_device(value: str) -> str:
    if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", value):
        raise ValueError("expected auto, cpu, cuda or cuda:N")
    return value


def _refuse_token(value: object) -> object:
    if value is not None:
        raise ValueError(TOKEN_REFUSAL)
    return value


def _check_fingerprint(value: str | None) -> str | None:
    if value is None:
        return None
    digits = value.lower().removeprefix("sha256:").replace(":", "")
    if not re.fullmatch(r"[0-9a-f]{64}", digits):
        raise ValueError("expected the SHA-256 of a certificate: sha256: and 64 hex digits, as the server prints it")
    return digits


def is_loopback(host: str) -> bool:
    """True for an address that only this machine can reach."""
    try:
        return host == "localhost" or ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


Fingerprint = Annotated[str | None, AfterValidator(_check_fingerprint)]
Bytes = Annotated[int, BeforeValidator(_parse_bytes)]
Device = Annotated[str, AfterValidator(_check_device)]
Token = Annotated[
    SecretStr | None,
    BeforeValidator(_refuse_token),
    Field(description="Refused in this version: authentication does not exist yet."),
]


class ServerOptions(Options):
    """Options of one server process, which holds one frozen base model."""

    model: str = Field(description="Base model: a Hugging Face id, a local directory, or demo.")
    revision: str | None = Field(default=None, description="Branch, tag or commit of the model on the hub.")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        default="auto", description="Number type of the weights; auto = the checkpoint's (demo: float32)."
    )
    device: Device = Field(default="auto", description="auto, cpu, cuda or cuda:N; auto = cuda if there is one.")
    host: str = Field(default="127.0.0.1", description="Address to bind; the default is this machine only.")
    port: int = Field(default=8815, ge=0, le=65535, description="TCP port; 0 = any free one.")
    tls: Literal["auto"] | None = Field(
        default=None,
        description="auto = make and keep a CA and a certificate; the default where other machines reach the server.",
    )
    tls_cert: Path | None = Field(default=None, description="PEM certificate, with its chain; needs tls_key.")
    tls_key: Path | None = Field(default=None, description="PEM private key of tls_cert, without a passphrase.")
    tls_client_ca: Path | None = Field(
        default=None, description="PEM CA; only clients with a certificate of it may connect (mTLS)."
    )
    tls_names: str | None = Field(
        default=None, description="More names and addresses for the certificate of --tls auto, with commas between."
    )
    insecure: bool = Field(
        default=False, description="Serve other machines without TLS: whoever is on the way reads and changes all."
    )
    port_file: Path | None = Field(
        default=None, description="Write the real port to this file, atomically, once the server answers."
    )
    threads: int = Field(default=0, ge=0, le=4096, description="CPU threads for computing; 0 = all cores.")
    max_message_bytes: Bytes = Field(
        default=64 * 2**20,
        ge=MIN_MESSAGE_BYTES,
        le=MAX_MESSAGE_BYTES,
        description="Largest message on the wire; tensors above it travel in parts.",
    )
    max_batch_tokens: int = Field(default=8192, ge=1, description="Most tokens computed in one batch.")
    max_queue_bytes: Bytes = Field(
        default=2**30,
        ge=MIN_MESSAGE_BYTES,
        description="Most bytes of waiting requests; above it new ones are refused with a retry-after.",
    )
    max_wait_us: int = Field(
        default=3_000_000,
        ge=0,
        le=10_000_000,
        description="Longest that a request is held for one foreseen to share its batch; 0 = never.",
    )
    drain_timeout_s: float = Field(
        default=10.0, ge=0, description="Longest time that requests under way get to finish at shutdown."
    )
    name: str | None = Field(default=None, description="Model name for clients; not set = the model's own.")
    cache_dir: Path | None = Field(
        default=None, description="Folder for what the server keeps; not set = the user's cache folder."
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        default="info", description="Least severe message that is logged to stderr."
    )
    local_files_only: bool = Field(
        default=False, description="Never ask the model hub; HF_HUB_OFFLINE=1 does the same."
    )
    token: Token = None

    @property
    def cache_path(self) -> Path:
        """`cache_dir`, or the user's cache folder where it is not set; it may not exist yet."""
        if self.cache_dir is not None:
            return self.cache_dir
        from platformdirs import user_cache_path

        return user_cache_path("symbiosis", appauthor=False)

    @property
    def tls_on(self) -> bool:
        """Whether the transport is encrypted: if asked for, and by default wherever other machines reach it."""
        asked = self.tls is not None or self.tls_cert is not None
        return asked or not (self.insecure or is_loopback(self.host))

    @model_validator(mode="after")
    def _check_tls(self) -> Self:
        if (self.tls_cert is None) != (self.tls_key is None):
            given, missing = ("tls_cert", "tls_key") if self.tls_cert else ("tls_key", "tls_cert")
            raise ValueError(f"{given} is given and {missing} is not: TLS needs both")
        if self.tls and self.tls_cert:
            raise ValueError("tls = auto makes a certificate, and tls_cert gives one; leave one out")
        if self.insecure and (self.tls or self.tls_cert or self.tls_client_ca):
            raise ValueError("insecure means no TLS, and tls_* options ask for it; leave one out")
        if (self.tls_client_ca or self.tls_names) and not self.tls_on:
            raise ValueError("tls_client_ca and tls_names need TLS, which is off on a loopback host; add tls = auto")
        if self.tls_names and self.tls_cert:
            raise ValueError("tls_names is for the certificate of tls = auto; tls_cert has its own names")
        return self

    @model_validator(mode="after")
    def _check_queue_holds_a_message(self) -> Self:
        if self.max_queue_bytes < self.max_message_bytes:
            raise ValueError(
                f"max_queue_bytes is {self.max_queue_bytes}, less than max_message_bytes, which is "
                f"{self.max_message_bytes}: a full message would never fit; raise one or lower the other"
            )
        return self


class ClientOptions(Options):
    """Options of one connection."""

    env_prefix: ClassVar[str] = ENV_PREFIX + "CLIENT_"

    url: str | None = Field(default=None, description="The server, where connect() is not given one.")
    request_timeout_s: float = Field(
        default=120.0, gt=0, le=MAX_REQUEST_TIMEOUT_S, description="Longest wait for the reply to a call."
    )
    connect_timeout_s: float = Field(default=10.0, gt=0, description="Longest wait for the server at connect.")
    retry_s: float = Field(
        default=120.0,
        ge=0,
        description="Longest time that a call is tried again, within its timeout, where the server is gone or busy.",
    )
    keepalive_s: float = Field(
        default=20.0,
        ge=1,
        description="Ask a server that has been silent for this long whether it lives; give it up after as long again.",
    )
    max_message_bytes: Bytes | None = Field(
        default=None,
        ge=MIN_MESSAGE_BYTES,
        le=MAX_MESSAGE_BYTES,
        description="Largest message to send; not set = as the server says, and never above that.",
    )
    max_streams: int = Field(default=8, ge=1, le=1024, description="Most streams kept open to the server.")
    lm_head: Literal["auto", "local", "remote"] = Field(
        default="auto", description="Where the output head runs; auto = local if tied to the embedding."
    )
    reveal_adapter: bool = Field(
        default=False,
        description="Let the server see values of adapters where a method needs that: DoRA shows the row space of A.",
    )
    tls_ca: Path | None = Field(
        default=None, description="PEM CA that signed the server's certificate; not set = those of this system."
    )
    tls_fingerprint: Fingerprint = Field(
        default=None, description="SHA-256 of the one certificate to trust, as the server prints it at start."
    )
    tls_hostname: str | None = Field(
        default=None, description="Name to expect in the server's certificate, if it is not the URL's."
    )
    tls_client_cert: Path | None = Field(default=None, description="PEM certificate to show (mTLS).")
    tls_client_key: Path | None = Field(
        default=None, description="PEM private key of tls_client_cert, without a passphrase."
    )
    token: Token = None

    @model_validator(mode="after")
    def _check_tls(self) -> Self:
        if (self.tls_client_cert is None) != (self.tls_client_key is None):
            raise ValueError("tls_client_cert and tls_client_key belong together; one is missing")
        if self.tls_ca and self.tls_fingerprint:
            raise ValueError("tls_ca trusts all certificates of a CA, tls_fingerprint only one; give one of them")
        return self


def load_client_options(explicit: Mapping[str, object], *, environ: Mapping[str, str] | None = None) -> ClientOptions:
    """The options of a connection: keyword arguments over environment over file over default.

    Args:
        explicit: the caller's keyword arguments; one that is None counts as not given.
        environ: os.environ when None.

    Raises:
        ConfigError: an unknown name, or a bad value, in any of the sources.
    """
    given = {name: Setting(value, f"argument {name}") for name, value in explicit.items() if value is not None}
    return ClientOptions.from_settings(ClientOptions.collect(given, environ=environ))
