"""`python -m symbiosis audit`: the demo model's first layers, real text, each setting, each attack; a table.

One rule: a setting is audited as it is used. A client runs real text through a real server, whose traffic is
recorded on the way. Two things are not as used, and both favour the attacker: masks are without the memory that
keeps rows from being sent again, and the repetition is simulated.
"""

from __future__ import annotations

import argparse
import copy
import warnings
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch

from symbiosis.config import ActivationNoise, ClientOptions, Masking, PrivacyOptions, ServerOptions
from symbiosis.connection import Connection
from symbiosis.errors import MissingExtraError
from symbiosis.flight.base_model import BaseModel
from symbiosis.flight.channel import FlightChannel
from symbiosis.flight.replicas import Replicas
from symbiosis.flight.server import Server
from symbiosis.privacy import audit
from symbiosis.privacy.audit import Candidates, Finding, Report
from symbiosis.privacy.draws import DOUBLE, SINGLE
from symbiosis.privacy.gaussian import mu_of
from symbiosis.privacy.traffic import Tap

LAYERS = 2
RANK = 8
BARE: dict[str, Any] = {"remember_bytes": 0, "row_budget": 1e9}  # masks alone, without memory of rows that come again
REPETITIONS = (1, 100, 1000)
REUSED = 64  # masks in the pool that is used again, to show why none is
CLIP = 8.0  # the median norm of the first layer's inputs of the demo model
NOISES = {
    f"noise, epsilon {epsilon:g}": ActivationNoise(epsilon=epsilon, delta=1e-5, clip=CLIP) for epsilon in (1, 1e5)
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the audit; 0 if masking held and plain traffic did not."""
    parser = argparse.ArgumentParser(prog="python -m symbiosis audit", description=__doc__.splitlines()[0])
    parser.add_argument("--sequences", type=int, default=16, help="how many sequences of text [default: 16]")
    parser.add_argument("--length", type=int, default=128, help="tokens of each [default: 128]")
    options = parser.parse_args(argv)
    model, public, private = demo_parts(options.sequences, options.length)
    report = run(model, public, private)
    print(report)
    masked = [f for f in report.findings if f.setting in ("dealer", "shares", "exact") and f.attack != "lengths"]
    held = all(f.success <= f.chance + 2 * f.margin for f in masked)  # of so many, one is above its margin by luck
    return 0 if held and report.of("plain", "tokens").success > 0.95 else 1


def run(model: Any, public: torch.Tensor, private: torch.Tensor) -> Report:
    """Audit a Llama-like model.

    Args:
        model: with a gated MLP; a few layers are enough.
        public: token ids for word frequencies.
        private: token ids [B, T] that the client runs.
    """
    candidates = Candidates(audit.first_layer_rows(model), public)
    findings: list[Finding] = []
    with ExitStack() as stack:
        options = ServerOptions(model="audited", port=0)
        server, dealer = (stack.enter_context(Server(BaseModel(model), options)) for _ in range(2))
        settings: dict[str, PrivacyOptions | None] = {
            "plain": None,
            "weak": Masking(**BARE),
            "dealer, single": Masking(dealer=dealer.url, precision="single", **BARE),
            "shares": Masking(dealer=dealer.url, mode="shares", **BARE),
            "dealer": Masking(dealer=dealer.url, **BARE),
            "exact": Masking(dealer=dealer.url, mode="exact"),
            **NOISES,
        }
        for name, privacy in settings.items():
            known = candidates.clipped(privacy.clip) if isinstance(privacy, ActivationNoise) else candidates
            findings += _audit(name, privacy, server.url, model, known, private)
    distinct = private.unique()[:40]
    for name, noise in NOISES.items():
        sigma, known = 2 * noise.clip / mu_of(noise.epsilon, noise.delta), candidates.clipped(noise.clip)
        findings += [
            audit.repetition_of_noise(name, known, distinct, times, sigma) for times in (*REPETITIONS, 100_000)
        ]
    for name, grid, strength in (("dealer, single", SINGLE, 4.0), ("dealer", DOUBLE, 256.0)):
        for times in REPETITIONS:
            findings.append(audit.repetition(name, candidates, distinct, times, grid, strength))
    findings += [audit.repetition_in_integers("exact", candidates, distinct, times) for times in REPETITIONS]
    return Report(tuple(findings))


def recorded(url: str, privacy: PrivacyOptions | None = None) -> tuple[Connection, Tap]:
    """Connect, and keep what the server sees: each of its requests is in the Tap's `exchanges`, tensors and all.

    Raises:
        SymbiosisError: as `symbiosis.connect`.
    """
    tap = Tap(FlightChannel(url))
    return Connection(Replicas([tap], 0.0), ClientOptions(), privacy), tap


def _audit(
    name: str, privacy: PrivacyOptions | None, url: str, model: Any, candidates: Candidates, private: torch.Tensor
) -> list[Finding]:
    """One client's session under one setting, and the attacks on its traffic."""
    client = copy.deepcopy(model)
    mlp = client.get_decoder().layers[0].mlp
    gate, up = mlp.gate_proj.weight.detach().clone(), mlp.up_proj.weight.detach().clone()
    update = 0.05 * torch.randn(up.shape[0], RANK) @ torch.randn(RANK, up.shape[1]) / up.shape[1] ** 0.5
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that weak is weak is what this shows
        connection, tap = recorded(url, privacy)
    with connection, torch.no_grad():
        connection.wrap(client, granularity="linear")
        up_proj = client.get_decoder().layers[0].mlp.up_proj
        up_proj.register_forward_hook(lambda module, args, output: output + args[0] @ update.t())  # an adapter
        for ids in private:
            client(input_ids=ids[None])
        exchanges = list(tap.exchanges)
        prefix = next(e.modules[0] for e in exchanges if e.tensors).rsplit(".self_attn", 1)[0]
        query = f"{prefix}.self_attn.q_proj"
        found = []
        if name == "plain":
            call = connection._caller.call
            found.append(
                audit.extract_weights(lambda x: call("forward", [query], [x]), model.get_submodule(query).weight)
            )
    new = _first_of_each(private)  # a row that comes again in one call is not sent again
    truth = private[new]
    seen = audit.sent_to(exchanges, query)[new.flatten()]
    looked_up = audit.identify_tokens(name, seen, truth, candidates)
    found.append(looked_up)
    taken_off = audit.unmasked(exchanges, query)[new.flatten()]
    same = torch.equal(taken_off, seen)  # no masks that this server drew: nothing more to look up
    again = replace(looked_up, attack="unmask")
    found.append(again if same else audit.identify_tokens(name, taken_off, truth, candidates, "unmask"))
    inputs, outputs = (audit.unmasked(exchanges, f"{prefix}.mlp.{end}_proj") for end in ("gate", "down"))
    directions = min(REUSED, seen.shape[1] // 4)
    found.append(audit.project_out(name, seen, truth, candidates, directions))
    if name == "plain":  # what was sent, as it would look under masks that are used again
        under = audit.reused(seen, directions, 256.0)
        found.append(audit.project_out(f"{directions} masks again", under, truth, candidates, directions))
    found.append(audit.regress_adapter(name, inputs, outputs, gate, up, update))
    found.append(audit.infer_lengths(name, exchanges, query, [len(ids) for ids in private]))
    return found


def _first_of_each(ids: torch.Tensor) -> torch.Tensor:
    """Where a token [B, T] stands for the first time in its sequence: [B, T]."""
    alike = ids[:, :, None] == ids[:, None, :]  # [B, T, T]
    return ~torch.tril(alike, diagonal=-1).any(2)


def demo_parts(sequences: int, length: int) -> tuple[Any, torch.Tensor, torch.Tensor]:
    """The first layers of the demo model, public text, and sequences [B, T] of other text.

    Raises:
        MissingExtraError: what the demo needs is not installed.
    """
    import transformers

    from symbiosis.flight.demo_model import demo_model_path
    from symbiosis.integrations.demo_data import load_pairs

    folder = demo_model_path()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    text = " ".join(f"{pair.question} {pair.answer}" for pair in load_pairs())
    ids = torch.tensor(tokenizer(text, verbose=False).input_ids)
    wanted = sequences * length
    if len(ids) < 2 * wanted:
        raise MissingExtraError(f"the demo's text has {len(ids):,} tokens; ask for at most {len(ids) // 2:,}")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    del model.model.layers[LAYERS:]  # enough for the attacks, and a fifteenth of the time
    model.config.num_hidden_layers = LAYERS
    return model, ids[wanted:], ids[:wanted].view(sequences, length)
