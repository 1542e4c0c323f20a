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

import base64
import ipaddress
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import (
    AfterValidator,
    BeforeValidator,
    ByteSize,
    Field,
    SecretStr,
    TypeAdapter,
    ValidationError,
    field_validator,
    model_validator,
)

from symbiosis.errors import ConfigError
from symbiosis.private_files import read_file
from symbiosis.settings import ENV_PREFIX, Options, Setting

MIN_MESSAGE_BYTES = 1024
# The wire's own limits, from flight/protocol.py, which imports torch and so cannot be asked from here; a test
# keeps the two equal.
MAX_MESSAGE_BYTES = 2**30
MAX_REQUEST_TIMEOUT_S = 3600


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


def _check_token(value: SecretStr | None) -> SecretStr | None:
    if value is not None and not re.fullmatch(r"[\x21-\x7e]{1,512}", value.get_secret_value()):
        raise ValueError("expected a token as symbiosis-flight-server token create prints it: one word of ASCII")
    return value


def _check_fingerprint(value: str | None) -> str | None:
    if value is None:
        return None
    digits = value.lower().removeprefix("sha256:").replace(":", "")
    if not re.fullmatch(r"[0-9a-f]{64}", digits):
        raise ValueError("expected the SHA-256 of a certificate: sha256: and 64 hex digits, as the server prints it")
    return digits


def _check_prefix(value: str | None) -> str | None:
    if value is not None and not re.fullmatch(r"[0-9a-f]{12,64}", value.lower()):
        raise ValueError("expected 12 to 64 hex digits, as the server prints them after fingerprint=")
    return value if value is None else value.lower()


KEY_PREFIX = "x25519:"


def format_key(key: bytes) -> str:
    """A public key for payload encryption as people see it."""
    return KEY_PREFIX + base64.urlsafe_b64encode(key).decode().rstrip("=")


def parse_key(text: str) -> bytes:
    """The 32 bytes of such a key.

    Raises:
        ValueError: it is none.
    """
    digits = text.removeprefix(KEY_PREFIX)
    if not re.fullmatch(r"[A-Za-z0-9_-]{43}", digits):
        raise ValueError("expected x25519: and 43 letters and digits, as the server prints it")
    return base64.urlsafe_b64decode(digits + "=")


def _check_key(value: str | None) -> str | None:
    return value if value is None else format_key(parse_key(value))


def is_loopback(host: str) -> bool:
    """True for an address that only this machine can reach."""
    try:
        return host == "localhost" or ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


Fingerprint = Annotated[str | None, AfterValidator(_check_fingerprint)]
PublicKey = Annotated[str | None, AfterValidator(_check_key)]
Bytes = Annotated[int, BeforeValidator(_parse_bytes)]
Device = Annotated[str, AfterValidator(_check_device)]
Token = Annotated[
    SecretStr | None,
    AfterValidator(_check_token),
    Field(description="Token that the operator gave you; better in the environment or a file than in a notebook."),
]


class ServerOptions(Options):
    """Options of one server process, which holds one frozen base model."""

    model: str = Field(description="Base model: a Hugging Face id, a local directory, or demo.")
    revision: str | None = Field(default=None, description="Branch, tag or commit of the model on the hub.")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        default="auto", description="Number type of the weights; auto = the checkpoint's (demo: float32)."
    )
    quantize: Literal["none", "int8", "int4"] = Field(
        default="none",
        description="Keep linears in fewer bits, weights only; int4 = NF4, by bitsandbytes; none = as they are.",
    )
    prepack: bool = Field(
        default=False,
        description="Lay float32 linears out for oneDNN once, on a CPU: products of a few tokens take half the time.",
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
    max_queue_tokens: int = Field(
        default=2**20, ge=1, description="Most tokens of waiting requests; above it new ones are refused as well."
    )
    max_streams_per_client: int = Field(
        default=64, ge=1, description="Most streams that one client may hold open; calls on further ones are refused."
    )
    idle_timeout_s: float = Field(
        default=3600.0, gt=0, description="A connection that asks for nothing for this long is closed."
    )
    write_timeout_s: float = Field(
        default=60.0, gt=0, description="A connection whose client does not read a reply for this long is closed."
    )
    same_host: bool = Field(
        default=True, description="Offer shared memory to clients on this machine, beside the wire."
    )
    watchdog_s: float = Field(
        default=60.0,
        ge=0,
        description="A batch that takes longer is reported with the stacks of all threads; 0 = never.",
    )
    soft_cache_bytes: Bytes = Field(
        default=2 * 2**30,
        ge=0,
        description="Most bytes kept of forward passes for the gradients that follow; what is gone is computed again.",
    )
    metrics_port: int | None = Field(
        default=None,
        ge=0,
        le=65535,
        description="Serve /metrics, /livez and /readyz over HTTP here; 0 = any free port.",
    )
    metrics_host: str = Field(default="127.0.0.1", description="Address of metrics_port.")
    log_format: Literal["text", "json"] = Field(
        default="text", description="Log lines for people, or as JSON objects for collectors."
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
    expect_fingerprint: Annotated[str | None, AfterValidator(_check_prefix)] = Field(
        default=None,
        description="Refuse to start with other weights: the fingerprint printed at an earlier start, or its first 12 "
        "digits or more.",
    )
    payload: Literal["off", "offer", "require"] = Field(
        default="off",
        description="Encryption of calls inside the transport, for when a proxy ends TLS: offer it, or take no other.",
    )
    tokens: str | None = Field(
        default=None,
        description="File of tokens that clients must have one of; off = none; not set = tokens.json in the cache "
        "folder, if there is one.",
    )
    audit_log: Path | None = Field(
        default=None, description="Append a JSON line for each call to this file: who, when, what, never data."
    )
    audit_log_bytes: Bytes = Field(default=64 * 2**20, ge=4096, description="Size at which a new audit log is begun.")
    audit_log_files: int = Field(default=8, ge=1, le=10_000, description="Full audit logs that are kept.")
    extraction_budget: float | None = Field(
        default=None,
        gt=0,
        description="Most rows that a tenant may send to a module, as a multiple of what determines its weights.",
    )

    @property
    def quantized(self) -> Literal["int8", "int4"] | None:
        """`quantize`, None where it says none."""
        return None if self.quantize == "none" else self.quantize

    @property
    def cache_path(self) -> Path:
        """`cache_dir`, or the user's cache folder where it is not set; it may not exist yet."""
        if self.cache_dir is not None:
            return self.cache_dir
        from platformdirs import user_cache_path

        return user_cache_path("symbiosis", appauthor=False)

    @property
    def tokens_path(self) -> Path | None:
        """The file of tokens, whether it exists or not; None where authentication is off."""
        if self.tokens == "off":
            return None
        return Path(self.tokens) if self.tokens is not None else self.cache_path / "tokens.json"

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
    same_host: bool = Field(
        default=True, description="Send calls through shared memory where the server is on this machine and offers it."
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
    server_key: PublicKey = Field(
        default=None,
        description="The server's key for payload encryption, as it prints it at start; not set = none.",
    )
    token: Token = None
    token_file: Path | None = Field(default=None, description="File that holds the token; token wins over it.")

    def secret(self) -> SecretStr | None:
        """The token, wherever it was given; None if it was not.

        Raises:
            ConfigError: the file cannot be read, or holds no token.
        """
        if self.token is not None or self.token_file is None:
            return self.token
        content = SecretStr(read_file(self.token_file, "token_file").decode("utf-8", "replace").strip())
        try:
            return _check_token(content)
        except ValueError as error:
            raise ConfigError(f"token_file {self.token_file}: {error}") from None

    @model_validator(mode="after")
    def _check_tls(self) -> Self:
        if (self.tls_client_cert is None) != (self.tls_client_key is None):
            raise ValueError("tls_client_cert and tls_client_key belong together; one is missing")
        if self.tls_ca and self.tls_fingerprint:
            raise ValueError("tls_ca trusts all certificates of a CA, tls_fingerprint only one; give one of them")
        return self


STATISTICAL = frozenset({"precision", "strength", "row_budget", "remember_bytes"})  # what masks need that are not exact


class PrivacyOptions(Options):
    """Base of what `connect(privacy=...)` takes. Given in the program only: its environment may be somebody else's."""

    env_prefix: ClassVar[str] = ClientOptions.env_prefix


class Masking(PrivacyOptions):
    """Hide activations and gradients from the server under masks that a second server takes off (docs/security.md).

    The dealer is any other server of the same base whose host does not work together with the first one's.
    """

    dealer: Any = Field(
        default=None,
        description="URL of the second server, or a Connection to it; not set = the same server: weak, for comparison.",
    )
    mode: Literal["dealer", "shares", "exact"] = Field(
        default="dealer",
        description="dealer = masks are dealt ahead of time; shares = the second server computes along with each call; "
        "exact = as dealer, in whole numbers, whose masks hide rows completely, however often they come again.",
    )
    precision: Literal["double", "single"] = Field(
        default="double",
        description="Of masked traffic and its products; single = half the bytes, for much weaker masks.",
    )
    strength: float | None = Field(
        default=None,
        ge=1.0,
        le=65536.0,
        description="Standard deviation of a mask's elements over the norm of the longest ordinary row; "
        "not set = 256 in double precision, 4 in single.",
    )
    row_budget: float = Field(
        default=0.25,
        gt=0,
        description="Largest sum of exposures, (norm / standard deviation)², of one row that is sent again and again.",
    )
    remember_bytes: Bytes = Field(
        default=256 * 2**20, ge=0, description="Memory for answers to rows that come again, which are not sent again."
    )
    pool_bytes: Bytes = Field(default=256 * 2**20, ge=0, description="Memory for masks that are dealt ahead of time.")
    verify: bool = Field(
        default=False,
        description="Check each reply against the dealer's weights (needs a dealer and double precision).",
    )
    when_empty: Literal["wait", "raise"] = Field(
        default="wait", description="What a call does while there are too few masks; it is never sent without."
    )

    @field_validator("dealer")
    @classmethod
    def _check_dealer(cls, value: object) -> object:
        if value is None or isinstance(value, str) or hasattr(value, "manifest"):
            return value
        raise ValueError("expected a URL, such as grpc://HOST:PORT, or what symbiosis.connect returns")

    @model_validator(mode="after")
    def _check_exact(self) -> Self:
        if self.mode != "exact":
            return self
        if self.dealer is None:
            raise ValueError("mode='exact' hides rows from each of two servers; give the second one as dealer=URL")
        if without_use := sorted(self.model_fields_set & STATISTICAL):
            raise ValueError(
                f"mode='exact' has no use for {', '.join(without_use)}: its masks are as large as can be, and rows may "
                "come again as often as they like; leave it out"
            )
        return self

    @model_validator(mode="after")
    def _check_verify(self) -> Self:
        if self.verify and (self.dealer is None or self.precision != "double"):
            raise ValueError(
                f"verify=True needs a dealer, which knows the weights, and precision='double'; got "
                f"dealer={self.dealer}, precision={self.precision!r}"
            )
        return self


class ActivationNoise(PrivacyOptions):
    """Clip each row that goes to the server and add Gaussian noise that stays (docs/security.md).

    The guarantee is of one row of one call: whoever sees it can tell it from any other row only as well as
    (epsilon, delta) allows. Rows that depend on the same token compose.
    """

    epsilon: float = Field(gt=0, le=1e6, description="Of one row of one call; above some 10 it promises little.")
    delta: float = Field(gt=0, lt=1, description="Of one row of one call: 1e-5, or less where more rows are sent.")
    clip: float = Field(gt=0, le=1e30, description="Largest norm of a row of activations; longer ones are scaled down.")
    grad_clip: float | None = Field(
        default=None, gt=0, le=1e30, description="The same for rows of gradients; not set = clip."
    )


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
