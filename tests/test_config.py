"""Options: what they accept, which source wins, and how a refusal reads."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from symbiosis import config
from symbiosis.config import ClientOptions, ServerOptions, load_client_options
from symbiosis.errors import ConfigError
from symbiosis.settings import Options, Setting, to_toml

ROOT = Path(__file__).parents[1]
SECRET = "s3cret-word"
BOTH = pytest.mark.parametrize("cls", [ServerOptions, ClientOptions])


@pytest.fixture
def toml(tmp_path: Path):
    """Write a config file and return its path."""

    def write(text: str) -> Path:
        path = tmp_path / "server.toml"
        path.write_text(text, encoding="utf-8")
        return path

    return write


def read_server(explicit: dict[str, object], **sources: Any) -> ServerOptions:
    given = {name: Setting(value, f"--{name} on the command line") for name, value in explicit.items()}
    return ServerOptions.from_settings(ServerOptions.collect(given, **{"environ": {}, **sources}))


def minimal(cls: type[Options], **values: object) -> Options:
    return cls(**({"model": "demo"} if cls is ServerOptions else {}), **values)


# ------------------------------------------------------------------------------------- value objects


def test_the_only_option_without_a_default_is_the_model() -> None:
    assert [name for name, field in ServerOptions.model_fields.items() if field.is_required()] == ["model"]
    assert not any(field.is_required() for field in ClientOptions.model_fields.values())


@BOTH
def test_every_option_has_a_help_text(cls: type[Options]) -> None:
    assert [name for name, field in cls.model_fields.items() if not field.description] == []


@BOTH
def test_every_default_is_within_its_own_bounds(cls: type[Options]) -> None:
    options = minimal(cls)

    assert type(options)(**options.model_dump()) == options  # defaults are not validated on their own


@BOTH
def test_options_are_frozen_and_hashable(cls: type[Options]) -> None:
    options = minimal(cls)

    with pytest.raises(ValueError, match="frozen"):
        options.max_message_bytes = 4096  # type: ignore[attr-defined]
    assert hash(options) == hash(minimal(cls))


@BOTH
def test_options_survive_pickle_and_copy(cls: type[Options]) -> None:
    options = minimal(cls, max_message_bytes=4096)

    assert pickle.loads(pickle.dumps(options)) == copy.deepcopy(options) == options


def test_there_is_no_way_to_trust_remote_code() -> None:
    with pytest.raises(ConfigError, match="trust_remote_code: unknown option of ServerOptions"):
        ServerOptions(model="demo", trust_remote_code=True)  # type: ignore[call-arg]


@BOTH
def test_direct_construction_reads_nothing_from_outside(
    cls: type[Options], monkeypatch: pytest.MonkeyPatch, toml: Any
) -> None:
    expected = minimal(cls)
    monkeypatch.setenv(cls.env_name("max_message_bytes"), "4096")
    monkeypatch.setenv(cls.env_name("config"), str(toml("max_message_bytes = 8192")))
    monkeypatch.setenv("SYMBIOSIS_PROT", "1")

    assert minimal(cls) == expected


@pytest.mark.parametrize(("text", "size"), [("4096", 4096), ("64KiB", 65536), ("1 mib", 2**20), (5000, 5000)])
def test_sizes_may_carry_a_unit(text: object, size: int) -> None:
    assert ServerOptions(model="demo", max_message_bytes=text).max_message_bytes == size  # type: ignore[arg-type]


@pytest.mark.parametrize("device", ["auto", "cpu", "cuda", "cuda:0", "cuda:13"])
def test_devices(device: str) -> None:
    assert ServerOptions(model="demo", device=device).device == device


def test_the_cache_is_in_the_users_cache_folder_unless_set(tmp_path: Path) -> None:
    assert ServerOptions(model="demo").cache_path.name == "symbiosis"
    assert ServerOptions(model="demo", cache_dir=tmp_path).cache_path == tmp_path


def test_limits_agree_with_the_wire() -> None:
    from symbiosis.flight import protocol

    assert config.MAX_MESSAGE_BYTES == protocol.MAX_MESSAGE_BYTES
    assert config.MAX_REQUEST_TIMEOUT_S * 1000 == protocol.MAX_DEADLINE_MS
    assert ServerOptions(model="demo").max_message_bytes == protocol.DEFAULT_MAX_MESSAGE_BYTES


# ------------------------------------------------------------------------------------------ refusals


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"port": "x"}, "port: got 'x', expected a valid integer"),
        ({"port": 65536}, "port: got 65536, expected less than or equal to 65535"),
        ({"port": -1}, "port: got -1, expected greater than or equal to 0"),
        ({"dtype": "bf16"}, "dtype: got 'bf16', expected 'auto', .*; did you mean 'bfloat16'?"),
        ({"log_level": "DEBUG"}, "did you mean 'debug'?"),
        ({"device": "gpu"}, "device: got 'gpu', expected auto, cpu, cuda or cuda:N"),
        ({"device": "cuda:0\n"}, "expected auto, cpu, cuda or cuda:N"),
        ({"max_message_bytes": "64 apples"}, "got '64 apples', expected a number of bytes, such as"),
        ({"max_message_bytes": "2GiB"}, "got 2147483648, expected less than or equal to 1073741824"),
        ({"drain_timeout_s": float("nan")}, "drain_timeout_s: got nan, expected a finite number"),
        ({"port_file": ""}, "port_file: got '', expected a value; leave the option out for its default"),
        ({"local_files_only": "perhaps"}, "local_files_only: got 'perhaps', expected a valid boolean"),
        ({"max_queue_bytes": 4096}, "max_queue_bytes is 4096, less than max_message_bytes"),
        ({"prot": 1}, "prot: unknown option of ServerOptions; did you mean port?"),
        ({"qqqq": 1}, "unknown option of ServerOptions; known are: audit_log, audit_log_bytes, "),
    ],
)
def test_a_bad_value_is_named_with_what_was_expected(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message.replace("?", r"\?")):
        ServerOptions(model="demo", **values)


def test_a_missing_model_is_one_line() -> None:
    with pytest.raises(ConfigError, match=r"^model is required$"):
        ServerOptions()  # type: ignore[call-arg]


def test_all_problems_are_told_at_once_one_per_line() -> None:
    with pytest.raises(ConfigError) as caught:
        ServerOptions(model="demo", port="x", dtype="int8", prot=1)  # type: ignore[call-arg, arg-type]
    assert [line.split(":")[0] for line in str(caught.value).splitlines()] == ["dtype", "port", "prot"]


def test_a_long_value_is_shortened() -> None:
    with pytest.raises(ConfigError) as caught:
        ServerOptions(model="demo", device="x" * 10_000)
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize("value", [f"{SECRET} and more", f"{SECRET}\n", f"{SECRET}é", "", 1])
def test_a_token_that_is_none_is_refused_and_not_repeated(value: object) -> None:
    with pytest.raises(ConfigError, match=r"^token: expected") as caught:
        ClientOptions(token=value)  # type: ignore[arg-type]
    assert_unsaid(caught.value)


def test_a_token_comes_from_an_argument_the_environment_or_a_file(tmp_path: Path, toml: Any) -> None:
    (tmp_path / "token").write_text(f"{SECRET}\n")
    environ = {"SYMBIOSIS_CLIENT_TOKEN_FILE": str(tmp_path / "token")}

    for options in (
        load_client_options({"token": SECRET}, environ=environ | {"SYMBIOSIS_CLIENT_TOKEN": "another"}),
        load_client_options({}, environ={"SYMBIOSIS_CLIENT_TOKEN": SECRET}),
        load_client_options({}, environ=environ),
        load_client_options({"token_file": tmp_path / "token"}, environ={}),
        load_client_options({}, environ={"SYMBIOSIS_CLIENT_CONFIG": str(toml(f'token = "{SECRET}"'))}),
    ):
        secret = options.secret()
        assert secret is not None
        assert secret.get_secret_value() == SECRET
        assert SECRET not in repr(options) + str(options) + to_toml(options, {})
    assert load_client_options({}, environ={}).secret() is None


@pytest.mark.parametrize("content", [f"{SECRET} {SECRET}", "", f"{SECRET}é"])
def test_a_file_without_a_token_is_refused_and_not_repeated(tmp_path: Path, content: str) -> None:
    (tmp_path / "token").write_text(content)

    with pytest.raises(ConfigError, match=r"token_file .*token: expected a token") as caught:
        ClientOptions(token_file=tmp_path / "token").secret()
    assert SECRET not in repr(caught.value)
    with pytest.raises(ConfigError, match="cannot be read"):
        ClientOptions(token_file=tmp_path / "none").secret()


def test_a_server_takes_no_token_and_does_not_repeat_it(toml: Any) -> None:
    with pytest.raises(ConfigError, match="token: unknown option") as caught:
        ServerOptions(model="demo", token=SECRET)  # type: ignore[call-arg]
    assert_unsaid(caught.value)
    with pytest.raises(ConfigError, match="did you mean SYMBIOSIS_TOKENS") as caught:
        read_server({}, environ={"SYMBIOSIS_TOKEN": SECRET})
    assert_unsaid(caught.value)
    with pytest.raises(ConfigError, match=r"token in .*server.toml: unknown key") as caught:
        read_server({}, config=toml(f'token = "{SECRET}"'))
    assert_unsaid(caught.value)


def assert_unsaid(error: BaseException) -> None:
    """A traceback prints the chain of causes too, and a debugger shows what they hold."""
    assert SECRET not in repr(error)
    assert error.__cause__ is None
    assert error.__context__ is None


# ------------------------------------------------------------------------------------------- sources


def test_each_source_wins_over_the_next(toml: Any) -> None:
    path = toml('model = "file"\nhost = "file"\nport = 1')
    environ = {"SYMBIOSIS_MODEL": "environment", "SYMBIOSIS_HOST": "environment"}

    options = read_server({"model": "explicit"}, config=path, environ=environ)

    assert (options.model, options.host, options.port) == ("explicit", "environment", 1)
    assert options.max_batch_tokens == 8192  # no source speaks: the default


def test_the_environment_may_name_the_file(toml: Any) -> None:
    environ = {"SYMBIOSIS_CONFIG": str(toml('model = "file"'))}

    assert read_server({}, environ=environ).model == "file"


def test_an_explicit_file_wins_over_the_one_that_the_environment_names(toml: Any) -> None:
    path = toml('model = "file"')

    assert read_server({}, config=path, environ={"SYMBIOSIS_CONFIG": "/nowhere"}).model == "file"


def test_an_empty_variable_counts_as_not_set() -> None:
    assert read_server({"model": "demo"}, environ={"SYMBIOSIS_PORT": ""}).port == 8815


def test_a_value_that_loses_is_not_checked(toml: Any) -> None:
    assert read_server({"model": "demo", "port": "7"}, environ={"SYMBIOSIS_PORT": "x"}).port == 7


@pytest.mark.parametrize(
    ("variable", "nearest"),
    [
        ("SYMBIOSIS_PROT", "SYMBIOSIS_PORT"),
        ("SYMBIOSIS_MAX_BATCH_TOKEN", "SYMBIOSIS_MAX_BATCH_TOKENS"),
        ("SYMBIOSIS_CLIENT_REQUEST_TIMEOUT", "SYMBIOSIS_CLIENT_REQUEST_TIMEOUT_S"),
        ("SYMBIOSIS_CONF", "SYMBIOSIS_CONFIG"),
    ],
)
@BOTH
def test_an_unknown_variable_is_refused_with_the_nearest_name(cls: type[Options], variable: str, nearest: str) -> None:
    with pytest.raises(ConfigError, match=rf"{variable} in the environment: .*mean {nearest}\?") as caught:
        cls.collect({}, environ={variable: SECRET})
    assert SECRET not in str(caught.value)


def test_client_and_server_share_one_environment_without_meeting() -> None:
    environ = {
        "SYMBIOSIS_MAX_MESSAGE_BYTES": "4096",
        "SYMBIOSIS_CLIENT_MAX_MESSAGE_BYTES": "8192",
        "HOME": "x",
    }

    assert read_server({"model": "demo"}, environ=environ).max_message_bytes == 4096
    assert load_client_options({}, environ=environ).max_message_bytes == 8192


def test_no_variable_means_two_things() -> None:
    names = [cls.env_name(name) for cls in (ServerOptions, ClientOptions) for name in cls.model_fields]

    assert len(names) == len(set(names))


def test_an_unknown_key_in_the_file_is_refused_with_the_nearest_name(toml: Any) -> None:
    path = toml(f'max-batch-tokens = 1\ntokn = "{SECRET}"')

    with pytest.raises(ConfigError) as caught:
        read_server({"model": "demo"}, config=path)
    assert str(caught.value).splitlines() == [
        f"max-batch-tokens in {path}: unknown key; did you mean max_batch_tokens?",
        f"tokn in {path}: unknown key; did you mean tokens?",
    ]


def test_a_bad_value_is_told_with_the_source_that_won(toml: Any) -> None:
    path = toml('port = "x"')

    with pytest.raises(ConfigError, match=r"port in .*server.toml: got 'x', expected a valid integer"):
        read_server({"model": "demo"}, config=path)
    with pytest.raises(ConfigError, match="SYMBIOSIS_PORT in the environment: got 'y', expected"):
        read_server({"model": "demo"}, config=path, environ={"SYMBIOSIS_PORT": "y"})


@pytest.mark.parametrize(
    ("text", "message"),
    [("port = x", "not valid TOML: .*line 1"), ("[port]\nx = 1", "port in .*: got {'x': 1}, expected")],
)
def test_a_malformed_file_is_refused(toml: Any, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_server({"model": "demo"}, config=toml(text))


def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"absent.toml: cannot be read: No such file"):
        read_server({"model": "demo"}, config=tmp_path / "absent.toml")
    with pytest.raises(ConfigError, match="cannot be read: Is a directory"):
        read_server({"model": "demo"}, config=tmp_path)


def test_a_missing_model_says_where_it_may_be_given() -> None:
    with pytest.raises(ConfigError, match=r"model is required: .*SYMBIOSIS_MODEL in the environment"):
        read_server({})


def test_keyword_arguments_of_a_client_win_and_none_counts_as_not_given() -> None:
    environ = {"SYMBIOSIS_CLIENT_REQUEST_TIMEOUT_S": "7", "SYMBIOSIS_CLIENT_MAX_STREAMS": "3"}

    options = load_client_options({"request_timeout_s": 5, "max_streams": None}, environ=environ)

    assert (options.request_timeout_s, options.max_streams) == (5.0, 3)


def test_a_client_reads_the_environment_of_its_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SYMBIOSIS_CLIENT_LM_HEAD", "remote")

    assert load_client_options({}).lm_head == "remote"


def test_a_client_is_told_of_a_misspelt_argument() -> None:
    with pytest.raises(ConfigError, match=r"argument timeout_s: unknown option .*mean request_timeout_s\?"):
        load_client_options({"timeout_s": 5}, environ={})


# ---------------------------------------------------------------------------------------------- TOML


def test_printed_options_are_a_file_that_gives_the_same_options(toml: Any, tmp_path: Path) -> None:
    values = {"model": 'a "quoted" \\ näme', "port_file": str(tmp_path), "local_files_only": True}
    settings = {name: Setting(value, "test") for name, value in values.items()}
    options = ServerOptions.from_settings(settings)

    text = to_toml(options, settings)

    assert read_server({}, config=toml(text)) == options
    assert set(tomllib.loads(text)) == {name for name, value in options if value is not None}


def test_printed_options_name_the_source_of_each_value() -> None:
    settings = {"model": Setting("demo", "MODEL on the command line")}

    lines = to_toml(ServerOptions.from_settings(settings), settings).splitlines()

    assert 'model = "demo"  # MODEL on the command line' in lines
    assert "port = 8815  # default" in lines
    assert "# tokens is not set" in lines


def test_reading_options_does_not_import_torch() -> None:
    code = "import sys, symbiosis.config as c; c.load_client_options({}); print('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, env={}, timeout=60, check=True
    )
    assert done.stdout.strip() == "False"
