"""Starting, telling, draining and refusing; inside this process, and as the process that users start."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow.flight as fl
import pytest
import tokenizers
import torch
import transformers
from torch import nn

import symbiosis
from symbiosis.config import ServerOptions
from symbiosis.errors import ConfigError, ServerBusyError, from_wire
from symbiosis.flight import loading, protocol
from symbiosis.flight.base_model import BaseModel
from symbiosis.flight.channel import FlightChannel
from symbiosis.flight.loading import load_base
from symbiosis.flight.protocol import Health, Manifest, ServerStats
from symbiosis.flight.server import Server, run

ROOT = Path(__file__).parents[2]
Factory = Callable[..., Any]
Q = "model.layers.0.self_attn.q_proj"


def act(url: str, name: str, kind: Any, body: bytes = b"") -> Any:
    with fl.FlightClient(url) as client:
        (answer,) = client.do_action(fl.Action(name, body))
        return protocol.decode_header(answer.body, kind)


def hello(url: str) -> Manifest:
    manifest: Manifest = act(url, "hello", Manifest, protocol.encode_header(protocol.Hello(protocol=protocol.VERSION)))
    return manifest


def forward(stream: Any, rows: int = 2) -> torch.Tensor:
    y: torch.Tensor = stream.forward(Q, torch.ones(rows, 32))
    return y


def refused(stream: Any) -> Any:
    """The error that answers a valid call."""
    specs = [{"dtype": "F32", "shape": [1, 32]}]
    request = {"type": "request", "id": 1, "op": "forward", "modules": [Q], "tensors": specs, "deadline_ms": 5000}
    header, _ = stream.send(request, protocol.encode_body([torch.ones(1, 32)]))
    return from_wire(header["code"], header["message"], header["retry_after_ms"])


# --- inside a process ----------------------------------------------------------------------------------------------


def test_port_0_becomes_a_real_port(llama_server: Server) -> None:
    assert llama_server.port > 0
    assert llama_server.url == f"grpc://127.0.0.1:{llama_server.port}"
    assert hello(llama_server.url).model == "tiny-llama"
    assert (
        repr(llama_server)
        == f"<Server {llama_server.url} serving tiny-llama: {len(llama_server.base.modules)} modules>"
    )


def test_a_server_listens_on_ipv6(tiny_llama: Factory, start_server: Factory) -> None:
    if not socket.has_ipv6 or not _binds("::1"):
        pytest.skip("this machine has no IPv6 loopback")
    server = start_server(tiny_llama(), host="::1")

    assert server.url == f"grpc://[::1]:{server.port}"
    assert hello(server.url).model == "tiny-llama"


def _binds(host: str) -> bool:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind((host, 0))
        return True
    except OSError:
        return False


@pytest.mark.parametrize("owner", ["another program", "another server"])
def test_a_taken_port_is_refused(owner: str, tiny_llama: Factory, start_server: Factory) -> None:
    # gRPC binds with SO_REUSEPORT: without a check, two servers would share a port and each get half of the calls.
    with socket.create_server(("127.0.0.1", 0)) as program:
        port = program.getsockname()[1] if owner == "another program" else start_server(tiny_llama()).port

        with pytest.raises(ConfigError, match=f"cannot listen on grpc://127.0.0.1:{port}.*--port"):
            start_server(tiny_llama(), port=port)


def test_an_address_of_another_machine_is_refused(tiny_llama: Factory, start_server: Factory) -> None:
    with pytest.raises(ConfigError, match=r"cannot listen on grpc://192\.0\.2\.1:18815"):
        start_server(tiny_llama(), host="192.0.2.1", port=18815, insecure=True)


def test_serve_takes_a_model_and_options(tiny_llama: Factory) -> None:
    model = tiny_llama()

    with symbiosis.serve(model, port=0, max_batch_tokens=16) as server:
        assert server.base.linears["lm_head"].weight.data_ptr() == model.lm_head.weight.data_ptr()
        assert server.options.max_batch_tokens == 16
        assert hello(server.url).model == "tiny-llama"


def test_serve_takes_a_name_over_the_models_own(tiny_llama: Factory) -> None:
    with symbiosis.serve(tiny_llama(), port=0, name="mine") as server:
        assert hello(server.url).model == "mine"


def test_serve_refuses_unknown_options(tiny_llama: Factory) -> None:
    with pytest.raises(ConfigError, match="max_batch_token"):
        symbiosis.serve(tiny_llama(), max_batch_token=16)


def test_what_is_done_to_a_model_later_does_not_reach_the_clients(
    tiny_llama: Factory, start_server: Factory, raw_stream: Factory
) -> None:
    model = tiny_llama()
    stream = raw_stream(start_server(model).url)
    before = forward(stream)

    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.weight = nn.Parameter(torch.empty(0))
    for layer in model.model.layers:
        layer.mlp = nn.Identity()

    torch.testing.assert_close(forward(stream), before, rtol=0, atol=1e-6)  # where memory lies may change rounding


def test_health_computes_and_tells_the_state(tiny_llama: Factory, start_server: Factory) -> None:
    server = start_server(tiny_llama())

    health = act(server.url, "health", Health)

    assert health.status == "serving"
    assert health.uptime_s > 0
    assert health.gemm_us >= 0


def test_health_does_not_answer_well_when_nothing_can_be_computed(
    tiny_llama: Factory, start_server: Factory, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    server = start_server(tiny_llama())

    def broken(*arguments: Any) -> torch.Tensor:
        raise RuntimeError("the device is gone")

    monkeypatch.setattr(server.base, "run", broken)

    error = act(server.url, "health", protocol.Error)
    assert error.code == "REMOTE_COMPUTE"


def test_stats_count_calls_tokens_and_clients(tiny_llama: Factory, start_server: Factory, raw_stream: Factory) -> None:
    server = start_server(tiny_llama())
    opened = protocol.encode_header(protocol.Open(protocol=1, client="one"))
    streams = [raw_stream(server.url, command=opened) for _ in range(2)]  # two streams of one client
    for stream in streams:
        forward(stream, 3)

    stats: ServerStats = act(server.url, "stats", ServerStats)

    assert (stats.requests, stats.tokens, stats.batches, stats.errors, stats.queued) == (2, 6, 2, 0, 0)
    assert stats.clients == 1
    assert stats.mean_batch == 1.0
    assert stats.compute_s > 0
    assert stats.memory_bytes > 50e6  # a Python process with torch in it


# --- closing -----------------------------------------------------------------------------------------------------


def test_close_frees_the_port(tiny_llama: Factory, start_server: Factory) -> None:
    server = start_server(tiny_llama())
    port = server.port

    assert server.close()

    assert start_server(tiny_llama(), port=port).port == port


def test_close_twice_is_fine(tiny_llama: Factory, start_server: Factory) -> None:
    server = start_server(tiny_llama())

    assert server.close()
    assert server.close()
    assert "draining" in repr(server)


def test_close_returns_although_clients_keep_streams_open(
    tiny_llama: Factory, start_server: Factory, raw_stream: Factory
) -> None:
    server = start_server(tiny_llama())
    streams = [raw_stream(server.url) for _ in range(3)]
    for stream in streams:
        forward(stream)
    started_s = time.monotonic()

    assert server.close(drain_timeout_s=1.0)

    assert time.monotonic() - started_s < 4.0
    error = refused(streams[0])
    assert isinstance(error, ServerBusyError)
    assert "draining" in str(error)


def test_a_call_under_way_is_finished_before_closing(
    tiny_llama: Factory, start_server: Factory, raw_stream: Factory, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = BaseModel(tiny_llama())
    server, entered, run = start_server(base), threading.Event(), base.run

    def slow(*arguments: Any) -> torch.Tensor:
        entered.set()
        time.sleep(0.5)
        return run(*arguments)

    monkeypatch.setattr(base, "run", slow)
    stream, answers = raw_stream(server.url), []
    caller = threading.Thread(target=lambda: answers.append(forward(stream)))
    caller.start()
    assert entered.wait(5)

    assert server.close(drain_timeout_s=10)

    caller.join(5)
    assert len(answers) == 1
    assert answers[0].shape == (2, 48)


def test_close_tells_when_work_was_left(
    tiny_llama: Factory, start_server: Factory, raw_stream: Factory, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = BaseModel(tiny_llama())
    server, entered, release, run = start_server(base), threading.Event(), threading.Event(), base.run

    def stuck(*arguments: Any) -> torch.Tensor:
        entered.set()
        release.wait(20)
        return run(*arguments)

    monkeypatch.setattr(base, "run", stuck)
    stream = raw_stream(server.url)
    caller = threading.Thread(target=lambda: forward(stream), daemon=True)
    caller.start()
    assert entered.wait(5)
    started_s = time.monotonic()

    assert not server.close(drain_timeout_s=0.2)

    assert time.monotonic() - started_s < 3.0
    release.set()
    caller.join(5)


# --- loading -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tiny_llama: Factory, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model and a tokenizer as they lie on disk."""
    path = tmp_path_factory.mktemp("tiny-model")
    tiny_llama().save_pretrained(path)
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"<unk>": 0, "<s>": 1, "</s>": 2, "hello": 3}, "<unk>"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=words, eos_token="</s>").save_pretrained(path)
    return path


@pytest.fixture
def options(folder: Path, tmp_path: Path) -> ServerOptions:
    return ServerOptions(model=str(folder), cache_dir=tmp_path, device="cpu", local_files_only=True)


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the modules that were hashed."""
    names: list[str] = []
    monkeypatch.setattr(loading, "tqdm", lambda modules, **_: (names.append(name) or name for name in modules))
    return names


def test_a_folder_is_loaded_as_it_was_saved(options: ServerOptions, tiny_llama: Factory) -> None:
    base = load_base(options)

    assert base.fingerprint == BaseModel(tiny_llama()).fingerprint
    assert base.architecture == "LlamaForCausalLM"
    assert base.name == options.model
    assert {"tokenizer.json", "tokenizer_config.json", "generation_config.json"} <= base.files().keys()


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_the_dtype_is_the_one_asked_for(dtype: str, options: ServerOptions, tiny_llama: Factory) -> None:
    base = load_base(options.model_copy(update={"dtype": dtype}))

    assert base.dtype == getattr(torch, dtype)
    assert base.hashes["lm_head"]["BF16"] == BaseModel(tiny_llama()).hashes["lm_head"]["BF16"]


def test_a_second_start_does_not_hash_again(options: ServerOptions, hashed: list[str]) -> None:
    first = load_base(options)
    assert set(hashed) == set(first.modules)
    hashed.clear()

    second = load_base(options)

    assert hashed == []
    assert second.fingerprint == first.fingerprint


def test_another_dtype_or_checkpoint_is_hashed(
    options: ServerOptions, hashed: list[str], tiny_llama: Factory, tmp_path: Path
) -> None:
    load_base(options)
    hashed.clear()
    load_base(options.model_copy(update={"dtype": "bfloat16"}))
    assert hashed
    hashed.clear()
    other = tmp_path / "other"
    tiny_llama(seed=1).save_pretrained(other)

    base = load_base(options.model_copy(update={"model": str(other)}))

    assert hashed
    assert base.fingerprint == BaseModel(tiny_llama(seed=1)).fingerprint


def test_weights_replaced_in_place_are_hashed(
    hashed: list[str], options: ServerOptions, tiny_llama: Factory, tmp_path: Path
) -> None:
    path = tmp_path / "model"
    tiny_llama().save_pretrained(path)
    mine = options.model_copy(update={"model": str(path)})
    load_base(mine)
    hashed.clear()

    tiny_llama(seed=1).save_pretrained(path)  # the same names and sizes

    assert load_base(mine).fingerprint == BaseModel(tiny_llama(seed=1)).fingerprint
    assert hashed


SPOILT = {
    "not JSON": b"{",
    "not a map": b"[1]",
    "another map": b'{"lm_head": 5}',
    "fewer modules": b'{"lm_head": {"F32": "0", "F16": "0", "BF16": "0"}}',
    "no bytes": b"",
}


@pytest.mark.parametrize("content", SPOILT.values(), ids=SPOILT)
def test_a_spoilt_cache_is_hashed_again_and_mended(
    content: bytes, options: ServerOptions, hashed: list[str], tmp_path: Path
) -> None:
    fingerprint = load_base(options).fingerprint
    (file,) = (tmp_path / "fingerprints").glob("*.json")
    file.write_bytes(content)
    hashed.clear()

    assert load_base(options).fingerprint == fingerprint
    assert hashed
    hashed.clear()
    assert load_base(options).fingerprint == fingerprint
    assert hashed == []


def test_hashes_without_their_dtypes_are_not_used(options: ServerOptions, tmp_path: Path) -> None:
    fingerprint = load_base(options).fingerprint
    (file,) = (tmp_path / "fingerprints").glob("*.json")
    file.write_text(json.dumps({name: {"F64": "0"} for name in json.loads(file.read_text())}))

    assert load_base(options).fingerprint == fingerprint


def test_a_cache_that_cannot_be_written_is_only_warned_about(
    options: ServerOptions, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "fingerprints").write_text("a file where a folder should be")

    load_base(options)

    assert "cannot keep the weight hashes" in caplog.text


def copied(folder: Path, path: Path) -> Path:
    path.mkdir()
    for file in folder.iterdir():
        (path / file.name).write_bytes(file.read_bytes())
    return path


def edit(file: Path, **changes: Any) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


BROKEN: dict[str, Callable[[Path], object]] = {
    "an empty folder": lambda path: [file.unlink() for file in path.iterdir()],
    "no weights": lambda path: (path / "model.safetensors").unlink(),
    "weights cut off": lambda path: os.truncate(path / "model.safetensors", 5000),
    "config cut off": lambda path: os.truncate(path / "config.json", 40),
    "an architecture of the future": lambda path: edit(path / "config.json", model_type="llama9", architectures=["L9"]),
    "other shapes than its config": lambda path: edit(path / "config.json", hidden_size=64),
    "more layers than weights": lambda path: edit(path / "config.json", num_hidden_layers=3),
}


@pytest.mark.parametrize("spoil", BROKEN.values(), ids=BROKEN)
def test_a_checkpoint_that_cannot_be_loaded_is_a_config_error(
    spoil: Callable[[Path], object], folder: Path, options: ServerOptions, tmp_path: Path
) -> None:
    path = copied(folder, tmp_path / "model")
    spoil(path)

    with pytest.raises(ConfigError, match=r"(?s)cannot load model '/.*Give a transformers id, a local"):
        load_base(options.model_copy(update={"model": str(path)}))


def test_code_from_a_checkpoint_is_never_run(folder: Path, options: ServerOptions, tmp_path: Path) -> None:
    path = copied(folder, tmp_path / "model")
    (path / "evil.py").write_text(f"open({str(tmp_path / 'run')!r}, 'w')\nclass EvilConfig: pass\n")
    edit(path / "config.json", model_type="evil", auto_map={"AutoConfig": "evil.EvilConfig"})

    with pytest.raises(ConfigError, match="cannot load model"):
        load_base(options.model_copy(update={"model": str(path)}))

    assert not (tmp_path / "run").exists()


def test_missing_weights_are_named_and_not_filled_in(folder: Path, options: ServerOptions, tmp_path: Path) -> None:
    path = copied(folder, tmp_path / "model")
    edit(path / "config.json", num_hidden_layers=3)

    with pytest.raises(ConfigError, match=r"9 weights are missing in the checkpoint, such as model\.layers\.2\."):
        load_base(options.model_copy(update={"model": str(path)}))


def test_a_tied_head_is_not_missing(options: ServerOptions, tiny_llama: Factory, tmp_path: Path) -> None:
    tiny_llama(tied=True).save_pretrained(tmp_path / "model")

    base = load_base(options.model_copy(update={"model": str(tmp_path / "model")}))

    assert base.linears["lm_head"].weight.data_ptr() == base.parameters["model.embed_tokens.weight"].data_ptr()


def test_no_such_model_is_a_config_error(options: ServerOptions) -> None:
    with pytest.raises(ConfigError, match="cannot load model '/nowhere/model'"):
        load_base(options.model_copy(update={"model": "/nowhere/model"}))


def test_a_device_that_is_not_there_is_a_config_error(options: ServerOptions, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)

    with pytest.raises(ConfigError, match=r"--device cuda:1.*use --device cpu"):
        load_base(options.model_copy(update={"device": "cuda:1"}))


def test_a_checkpoint_without_tokenizer_is_served_with_a_warning(
    folder: Path, options: ServerOptions, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = copied(folder, tmp_path / "model")
    for file in path.glob("tokenizer*"):
        file.unlink()

    base = load_base(options.model_copy(update={"model": str(path)}))

    assert "no tokenizer is published" in caplog.text
    assert not any("tokenizer" in name for name in base.files())


def test_a_name_may_be_given(options: ServerOptions) -> None:
    assert load_base(options.model_copy(update={"name": "ours"})).name == "ours"


def test_a_port_file_in_no_folder_is_refused_before_anything_is_loaded(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--port-file .*there is no folder"):
        run(ServerOptions(model="/nowhere/model", port_file=tmp_path / "missing" / "port"))


# --- as a process ------------------------------------------------------------------------------------------------

LISTENING = re.compile(
    r"listening on (?P<url>grpc://127\.0\.0\.1:(?P<port>\d+)) model=ours modules=(?P<modules>\d+) memory=\d+MB "
    r"dtype=float32 device=cpu fingerprint=[0-9a-f]{12} tokens=off\n"
)


class Process:
    def __init__(self, folder: Path, work: Path) -> None:
        self.port_file = work / "port"
        command = [sys.executable, "-m", "symbiosis.flight.cli", str(folder), "--port", "0", "--name", "ours"]
        command += ["--port-file", str(self.port_file), "--cache-dir", str(work), "--device", "cpu"]
        self.config = work / "server.toml"
        self.config.touch()
        command += ["--config", str(self.config)]
        environ = {**os.environ, "PYTHONPATH": str(ROOT)}
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, env=environ)
        assert self.process.stdout is not None
        self.line = self.process.stdout.readline()
        found = LISTENING.fullmatch(self.line)
        assert found, (self.line, self.process.stderr and self.process.stderr.read())
        self.url, self.port, self.modules = found["url"], int(found["port"]), int(found["modules"])

    def error_with(self, words: str) -> str:
        """The next line of its log that has these words."""
        assert self.process.stderr is not None
        return next(line for line in self.process.stderr if words in line)


@pytest.fixture(scope="module")
def process(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    """One server process for the tests below; the last one stops it."""
    server = Process(folder, tmp_path_factory.mktemp("server"))
    yield server
    server.process.kill()
    server.process.communicate()


def test_the_one_line_printed_tells_where_and_what(process: Process, tiny_llama: Factory) -> None:
    manifest = hello(process.url)

    assert len(manifest.modules) == process.modules
    assert manifest.fingerprint == BaseModel(tiny_llama()).fingerprint
    assert manifest.model == "ours"


def test_the_port_file_holds_the_real_port(process: Process) -> None:
    end_s = time.monotonic() + 5
    while not process.port_file.exists() and time.monotonic() < end_s:
        time.sleep(0.01)

    assert process.port_file.read_text() == f"{process.port}\n"
    assert not list(process.port_file.parent.glob("*.part"))


def test_a_process_computes_what_the_model_computes(process: Process, raw_stream: Factory, tiny_llama: Factory) -> None:
    expected = tiny_llama().get_submodule(Q)(torch.ones(2, 32)).detach()

    torch.testing.assert_close(forward(raw_stream(process.url)), expected, rtol=1e-5, atol=1e-5)


def test_a_second_process_on_its_port_is_refused(process: Process, folder: Path, tmp_path: Path) -> None:
    options = ServerOptions(model=str(folder), port=process.port, cache_dir=tmp_path)

    with pytest.raises(ConfigError, match="--port"):
        Server(load_base(options), options)


def test_sighup_changes_limits_and_no_call_is_lost(process: Process, raw_stream: Factory) -> None:
    stream = raw_stream(process.url)
    forward(stream)
    process.config.write_text('max_queue_tokens = 1\nwatchdog_s = "x"\n')
    process.process.send_signal(signal.SIGHUP)
    refused = process.error_with("reload: ")
    assert "watchdog_s" in refused
    assert "the options in force stay" in refused
    forward(stream)

    process.config.write_text('max_queue_tokens = 1\nlog_level = "debug"\ndtype = "float16"\n')
    process.process.send_signal(signal.SIGHUP)
    assert "max_queue_tokens = 1" in (line := process.error_with("reload: "))
    assert "log_level = debug" in line
    assert "dtype changed too, which takes a restart" in process.error_with("reload: ")
    forward(stream)  # the first is admitted into an empty queue, whatever its size

    process.config.write_text("")
    process.process.send_signal(signal.SIGHUP)
    assert f"max_queue_tokens = {2**20}" in process.error_with("reload: ")


def test_sigterm_drains_and_exits_with_0_although_a_stream_is_open(process: Process, raw_stream: Factory) -> None:
    # Last of its fixture: it stops the process.
    stream = raw_stream(process.url)
    forward(stream)
    idle = FlightChannel(process.url)
    idle.action("health", b"", 5.0)
    started_s = time.monotonic()

    process.process.send_signal(signal.SIGTERM)
    output, errors = process.process.communicate(timeout=20)

    assert process.process.returncode == 0, errors
    assert time.monotonic() - started_s < 10.0
    assert output == ""
    assert "SIGTERM: draining" in errors
    assert "Traceback" not in errors
    idle.close()
