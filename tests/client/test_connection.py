"""A connection: agreed once, shown without asking the server, closed without surprises."""

from __future__ import annotations

import copy
import threading
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import torch

import symbiosis
from symbiosis.connection import Connection
from symbiosis.errors import ClosedError, ConfigError, ConnectError, MessageTooLargeError
from symbiosis.telemetry import Stats
from tests.client.conftest import Served, adapt, assert_same_step, run_step


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("", "grpc://HOST:PORT"),
        ("localhost", "grpc://HOST:PORT"),
        ("http://localhost:1", "grpc://HOST:PORT"),
        ("grpc://localhost", "no host and port"),
        ("grpc://:8815", "no host and port"),
        ("grpc://localhost:port", "no host and port"),
    ],
)
def test_urls_that_are_none(url: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        symbiosis.connect(url)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"token": "a secret"}, "token: expected a token"),
        ({"request_timeout_s": 0}, "request_timeout_s"),
        ({"max_streams": 0}, "max_streams"),
        ({"lm_head": "server"}, "lm_head"),
        ({"max_message_bytes": 10}, "max_message_bytes"),
    ],
)
def test_options_that_are_refused(served: Served, options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        symbiosis.connect(served.server.url, **options)

    assert "secret" not in str(caught.value)


def test_nothing_listens_there() -> None:
    with pytest.raises(ConnectError, match="symbiosis-flight-server") as caught:
        symbiosis.connect("grpc://127.0.0.1:9", connect_timeout_s=5)

    assert caught.value.retryable


def test_closing_twice_and_using_after(served: Served) -> None:
    conn = symbiosis.connect(served.server.url)
    model = conn.wrap(served.model())
    conn.close()
    conn.close()

    for use in (conn.health, conn.server_stats, conn.load_model, lambda: model(input_ids=torch.tensor([[3]]))):
        with pytest.raises(ClosedError, match=r"call symbiosis\.connect again"):
            use()
    assert conn.stats() == conn.stats()
    assert "closed" in repr(conn)
    assert "closed" in conn._repr_html_()


def test_a_context_manager_closes(served: Served) -> None:
    with symbiosis.connect(served.server.url) as conn:
        assert conn.health().status == "serving"
    with pytest.raises(ClosedError):
        conn.health()


def test_copies_are_the_connection_itself(connection: Connection) -> None:
    assert copy.deepcopy(connection) is connection
    assert copy.deepcopy({"conn": connection})["conn"] is connection


# --- what it shows ----------------------------------------------------------------------------------


@pytest.fixture
def no_io(connection: Connection, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a repr must not ask the server")

    for name in ("exchange", "action", "download"):
        monkeypatch.setattr(connection._channel, name, refuse)


def shown(value: Any) -> tuple[str, str]:
    text, page = str(value), value._repr_html_()
    ElementTree.fromstring(page)  # valid XML
    return text, " ".join(ElementTree.fromstring(page).itertext())


def test_text_and_html_agree(served: Served, connection: Connection, tokens: Any, no_io: None) -> None:
    connection.wrap(served.model())
    plan = connection.plan
    assert plan is not None

    text, page = shown(connection)
    assert text == f"<Connection {connection.url} open tiny-llama: 0 calls>"
    for word in (connection.url, "tiny-llama", "LlamaForCausalLM"):
        assert word in page
    for word in ("remote", "2 x", "model.layers.*.self_attn.q_proj", "frozen linear"):
        assert word in shown(plan)[0]
    assert "model.layers.*.self_attn.q_proj" in shown(plan)[1]
    for word in ("calls", "serialise", "network", "queue", "compute", "mean batch"):
        assert all(word in kind for kind in shown(connection.stats()))


def test_names_from_the_server_are_escaped(served: Served, connection: Connection, no_io: None) -> None:
    evil = "<script>alert('x')</script>&amp;\"]]>"
    connection.manifest = msgspec.structs.replace(connection.manifest, model=evil, architecture=evil)
    connection.wrap(served.model())
    assert connection.plan is not None
    entry = connection.plan.entries[0]
    object.__setattr__(entry, "name", evil)
    object.__setattr__(entry, "reason", evil)

    for value in (connection, connection.plan):
        assert evil in shown(value)[1]
        assert "<script" not in value._repr_html_()


def test_the_plan_says_who_shares_calls(served: Served, connection: Connection, tokens: Any) -> None:
    model = connection.wrap(served.model(), granularity="linear")
    assert "one call each" not in str(connection.plan)

    model(input_ids=tokens())

    assert "one call each: gate_proj + up_proj, q_proj + k_proj + v_proj" in str(connection.plan)


# --- what it counts ---------------------------------------------------------------------------------


def counted(connection: Connection, run: Callable[[], Any]) -> Stats:
    before = connection.stats()
    run()
    return connection.stats() - before


def test_calls_tokens_and_bytes(served: Served, connection: Connection) -> None:
    layer = connection.wrap(served.model(), granularity="linear").model.layers[0].mlp.down_proj
    x = torch.randn(2, 5, 56, requires_grad=True)

    forward = counted(connection, lambda: layer(x))
    both = counted(connection, lambda: layer(x).sum().backward())

    assert (forward.calls, both.calls) == (1, 2)
    assert (forward.tokens, both.tokens) == (10, 20)
    body_out, body_in = 10 * 56 * 4, 10 * 32 * 4
    assert body_out < forward.bytes_out < body_out + 500  # the body and a header
    assert body_in < forward.bytes_in < body_in + 500
    assert forward.wall_s >= forward.serialise_s + forward.queue_s + forward.compute_s
    assert forward.compute_s > 0
    assert forward.mean_batch == 1


def test_siblings_go_in_one_call_after_the_first_pass(served: Served, connection: Connection, tokens: Any) -> None:
    model = adapt(connection.wrap(served.model(), granularity="linear"), served.config("lora-all"))

    first = counted(connection, lambda: model(input_ids=tokens()))
    second = counted(connection, lambda: model(input_ids=tokens()))

    assert first.calls == 2 * 7 + 1  # two layers of q, k, v, o, gate, up, down; the head
    assert second.calls == 2 * 4 + 1


@pytest.mark.parametrize("granularity", ["linear", "auto"])
def test_no_gradient_is_asked_below_the_first_trainable(
    served: Served, connection: Connection, tokens: Any, granularity: Any
) -> None:
    import peft

    events: list[Any] = []
    connection.bus.subscribe(events.append)
    options: dict[str, Any] = {"target_modules": ["v_proj"], "task_type": "CAUSAL_LM"}
    top = peft.LoraConfig(layers_to_transform=[1], **options)
    local, remote = adapt(served.model(), top), adapt(connection.wrap(served.model(), granularity=granularity), top)

    for _ in range(3):
        assert_same_step(run_step(remote, tokens()), run_step(local, tokens()))

    backward = [name for event in events if event.op.startswith("grad") for name in event.modules]
    # v itself is where the trained branch starts: its input needs no gradient.
    assert {name.removeprefix("model.layers.1.").partition(".")[0] for name in backward} <= {
        *("lm_head", "mlp", "self_attn", "post_attention_layernorm")
    }
    assert "model.layers.1.self_attn.q_proj" not in backward


def test_stats_survive_threads(served: Served, connection: Connection, tokens: Any) -> None:
    model = connection.wrap(served.model(), granularity="linear")
    with torch.no_grad():
        calls = counted(connection, lambda: model(input_ids=tokens())).calls

        def run() -> None:
            with torch.no_grad():
                model(input_ids=tokens())

        threads = [threading.Thread(target=run) for _ in range(4)]

        def together() -> None:
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()

        assert counted(connection, together).calls == 4 * calls


# --- limits ---------------------------------------------------------------------------------------


def test_large_tensors_travel_in_parts(served: Served, tokens: Any) -> None:
    with symbiosis.connect(served.server.url, max_message_bytes=2048) as conn:
        local = adapt(served.model(), served.config("lora-all"))
        remote = adapt(conn.wrap(served.model(), granularity="linear"), served.config("lora-all"))
        assert_same_step(run_step(remote, tokens(3, 20)), run_step(local, tokens(3, 20)))
        parts = counted(conn, lambda: run_step(remote, tokens(3, 20))).calls
    with symbiosis.connect(served.server.url) as conn:
        remote = adapt(conn.wrap(served.model(), granularity="linear"), served.config("lora-all"))
        run_step(remote, tokens(3, 20))
        assert parts > 5 * counted(conn, lambda: run_step(remote, tokens(3, 20))).calls


def test_a_token_that_fits_no_message(tiny_llama: Any, start_server: Any) -> None:
    wide = tiny_llama(seed=6, intermediate_size=512)
    with symbiosis.connect(start_server(wide).url, max_message_bytes=1024) as conn:
        model = conn.wrap(wide, granularity="linear")
        with pytest.raises(MessageTooLargeError, match=r"one token .* limit of a message is 1,024"):
            model(input_ids=torch.tensor([[3, 4]]))


def test_the_sum_and_difference_of_stats() -> None:
    early, late = Stats(calls=2, tokens=10, mean_batch=1.0), Stats(calls=6, tokens=30, mean_batch=2.0)

    assert (late - early).calls == 4
    assert (late - early).mean_batch == pytest.approx((6 * 2 - 2 * 1) / 4)
    assert (late - late).mean_batch == 0
