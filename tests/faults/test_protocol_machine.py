"""A hypothesis state machine for the protocol: streams opened, used well and badly, cut and dropped, in any order.

Whatever was done before, an honest call gets the right answer, and every bad one an error with its own id.
"""

from __future__ import annotations

import contextlib
from typing import Any, ClassVar

import hypothesis.strategies as st
import msgspec
import pyarrow as pa
import pyarrow.flight as fl
import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from symbiosis.flight import protocol
from symbiosis.flight.server import Server

Q = "model.layers.0.self_attn.q_proj"


class Wire(RuleBasedStateMachine):
    """One server, and up to four streams to it."""

    server: ClassVar[Server]

    def __init__(self) -> None:
        super().__init__()
        self.client = fl.FlightClient(self.server.url)
        self.streams: list[tuple[Any, Any]] = []
        self.ids = 0

    @precondition(lambda self: len(self.streams) < 4)
    @rule()
    def open(self) -> None:
        command = protocol.encode_header(protocol.Open(protocol=protocol.VERSION, client="machine"))
        writer, reader = self.client.do_exchange(fl.FlightDescriptor.for_command(command))
        writer.begin(protocol.SCHEMA)
        self.streams.append((writer, reader))

    @precondition(lambda self: self.streams)
    @rule(which=st.integers(0, 3), tokens=st.integers(0, 40), op=st.sampled_from(["forward", "grad_input"]))
    def call(self, which: int, tokens: int, op: str) -> None:
        weight = self.server.base.linears[Q].weight
        x = torch.randn(tokens, weight.shape[1 if op == "forward" else 0])
        header, body = self._send(which, self._request(op=op, tensors=[protocol.spec_of(x)]), x)

        assert (header["type"], header["id"]) == ("reply", self.ids)
        (y,) = protocol.decode_body(body, msgspec.convert(header["tensors"], list[protocol.TensorSpec]))
        torch.testing.assert_close(y, x @ (weight.T if op == "forward" else weight), rtol=1e-4, atol=1e-5)

    @precondition(lambda self: self.streams)
    @rule(
        which=st.integers(0, 3),
        wrong=st.sampled_from(
            [
                {"op": "backward"},
                {"modules": ["no.such"]},
                {"modules": []},
                {"deadline_ms": 0},
                {"tensors": [{"dtype": "F32", "shape": [2, 31]}]},
                {"tensors": [{"dtype": "I64", "shape": [2, 32]}]},
                {"tensors": [{"dtype": "F32", "shape": [2**31 - 1, 32]}]},
                {"unknown": 1},
                {"outputs": [0]},
            ]
        ),
    )
    def bad_call(self, which: int, wrong: dict[str, Any]) -> None:
        x = torch.zeros(2, 32)
        fields = msgspec.to_builtins(self._request(tensors=[protocol.spec_of(x)]))
        header, _ = self._send(which, {**fields, **wrong}, x)

        assert (header["type"], header["id"]) == ("error", self.ids)
        assert "Traceback" not in header["message"]

    @precondition(lambda self: self.streams)
    @rule(which=st.integers(0, 3), noise=st.binary(min_size=1, max_size=40))
    def noise(self, which: int, noise: bytes) -> None:
        header, _ = self._send(which, b"\xc1" + noise, torch.zeros(2, 32))

        assert (header["type"], header["id"]) == ("error", 0)

    @precondition(lambda self: self.streams)
    @rule(which=st.integers(0, 3), reading=st.booleans())
    def drop(self, which: int, reading: bool) -> None:
        """Leave a stream, with or without a call under way."""
        writer, reader = self.streams.pop(which % len(self.streams))
        if not reading:
            x = torch.zeros(30, 32)
            request = self._request(tensors=[protocol.spec_of(x)])
            writer.write_with_metadata(protocol.encode_body([x]), protocol.encode_header(request))
        _end(writer, reader)

    @rule()
    def ask_for_health(self) -> None:
        (result,) = self.client.do_action(fl.Action("health", b""))
        assert msgspec.msgpack.decode(bytes(result.body))["status"] == "serving"

    def teardown(self) -> None:
        for writer, reader in self.streams:
            _end(writer, reader)
        self.client.close()

    def _request(self, **fields: Any) -> protocol.Request:
        self.ids += 1
        return protocol.Request(**{"id": self.ids, "op": "forward", "modules": [Q], "deadline_ms": 60_000, **fields})

    def _send(self, which: int, header: Any, x: torch.Tensor) -> tuple[Any, Any]:
        writer, reader = self.streams[which % len(self.streams)]
        data = header if isinstance(header, bytes) else msgspec.msgpack.encode(header)
        writer.write_with_metadata(protocol.encode_body([x]), data)
        reply = reader.read_chunk()
        return msgspec.msgpack.decode(reply.app_metadata), reply.data


def _end(writer: Any, reader: Any) -> None:
    with contextlib.suppress(pa.ArrowException, OSError):
        reader.cancel()
        writer.close()


@pytest.mark.timeout(300)
def test_no_sequence_of_good_and_bad_calls_confuses_a_server(llama_server: Server) -> None:
    Wire.server = llama_server
    wire = Wire.TestCase
    wire.settings = settings(
        max_examples=15, stateful_step_count=20, deadline=None, suppress_health_check=list(HealthCheck)
    )
    wire("runTest").runTest()

    assert llama_server.stats().queued == 0
