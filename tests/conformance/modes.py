"""Lines of generate(): what a user does with a model, and what it gives on a wrapped model and on a local one.

One rule: a line is a function of a model that returns what its user would look at, texts, scores and the cache among
it. It cannot know which model it was given.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

import symbiosis
from tests.client.conftest import difference, remote_layers
from tests.conformance.architectures import DECODER, UNTIED, tiny
from tests.conformance.harness import OUTPUT_TOLERANCE, Adapt, Bench, Build, Line, lora, needs_call

NEW_TOKENS = 10
BATCH = ((11, 42, 7, 63, 25), (0, 0, 88, 5, 31))  # the second is padded on the left
ADAPT = lora(r=8, lora_alpha=64)  # strong enough to change the text

llama = tiny("LlamaForCausalLM", **{**DECODER, **UNTIED, "max_position_embeddings": 8320})


@dataclass(frozen=True)
class Mode(Line):
    """Something that a user does with a model.

    Args:
        act: of a model: what its user would look at.
        build: the model that the server serves; lines that share it share a server.
        adapt: makes a PEFT model of it.
        tolerance: of floating-point results, relative.
        context: entered around the act.
    """

    act: Callable[[Any], object] = lambda model: None
    build: Build = llama
    adapt: Adapt = ADAPT
    tolerance: float = OUTPUT_TOLERANCE
    context: Callable[[], AbstractContextManager[Any]] = nullcontext


def check(mode: Mode, bench: Bench) -> None:
    """Prove a line.

    Raises:
        AssertionError: the wrapped model gives something else than the local one.
    """
    base, url = bench.serve(mode.build)
    expected = _acted(mode, mode.adapt(copy.deepcopy(base)))
    with symbiosis.connect(url) as connection:
        model = mode.adapt(connection.wrap(copy.deepcopy(base)))
        for _ in range(1 if mode.slow else 2):  # the first time learns which layers share calls
            before = connection.stats()
            found = _acted(mode, model)
            assert (connection.stats() - before).calls > 0
            same(found, expected, mode.tolerance)
    assert not any(layer.weight.numel() for layer in remote_layers(model))


def _acted(mode: Mode, model: Any) -> object:
    with torch.random.fork_rng(devices=[]), mode.context():
        torch.manual_seed(17)
        return mode.act(model.eval())


def same(got: Any, expected: Any, tolerance: float, path: str = "result") -> None:
    """Whole numbers, texts and names exactly; floating-point tensors to a relative tolerance; and so on inside."""
    if isinstance(expected, torch.Tensor):
        assert not needs_call(got), f"{path} is still to be computed"
        got, expected = got.detach().clone(), expected.detach().clone()
    assert type(got) is type(expected), f"{path} is a {type(got)}, not a {type(expected)}"
    if isinstance(expected, Mapping):
        assert got.keys() == expected.keys(), f"{path} has {list(got)}, not {list(expected)}"
        for key, value in expected.items():
            same(got[key], value, tolerance, f"{path}.{key}")
    elif isinstance(expected, (list, tuple)):
        assert len(got) == len(expected), f"{path} has {len(got)} entries, not {len(expected)}"
        for number, value in enumerate(expected):
            same(got[number], value, tolerance, f"{path}.{number}")
    elif isinstance(expected, torch.Tensor) and expected.is_floating_point():
        assert got.shape == expected.shape, f"{path} is {tuple(got.shape)}, not {tuple(expected.shape)}"
        finite = torch.isfinite(expected)  # processors of logits put -inf in the place of what they forbid
        assert torch.equal(got[~finite], expected[~finite]), f"{path} differs in what is infinite"
        far = difference(got[finite], expected[finite])
        assert far <= tolerance, f"{path} is {far:.1e} away, {tolerance:.0e} is allowed"
    elif isinstance(expected, torch.Tensor):
        assert torch.equal(got, expected), f"{path} is {got.tolist()}, not {expected.tolist()}"
    else:
        assert got == expected, f"{path} is {got!r}, not {expected!r}"


# --- what is generated from, and what is looked at ------------------------------------------------------------


def prompt(rows: Sequence[Sequence[int]] = BATCH) -> dict[str, torch.Tensor]:
    """Token ids [batch, length] and their mask."""
    ids = torch.tensor(rows)
    return {"input_ids": ids, "attention_mask": (ids != 0).long()}


def layers_of(cache: Any) -> list[tuple[str, Any]]:
    """The kind, keys and values of each layer of a cache."""
    pairs = [cache.self_attention_cache, cache.cross_attention_cache] if hasattr(cache, "cross_attention_cache") else []
    if pairs:
        return [layer for inner in pairs for layer in layers_of(inner)]
    return [(type(layer).__name__, [layer.keys.clone(), layer.values.clone()]) for layer in cache.layers]


def generated(model: Any, inputs: Mapping[str, Any] | None = None, **options: Any) -> dict[str, Any]:
    """What generate() gives: sequences, scores, and the cache that it leaves behind."""
    settings = {"max_new_tokens": NEW_TOKENS, "min_new_tokens": NEW_TOKENS, "do_sample": False, **options}
    output = model.generate(
        **(prompt() if inputs is None else inputs), **settings, return_dict_in_generate=True, output_scores=True
    )
    cache = output.get("cache", output.get("past_key_values"))
    return {
        "sequences": output.sequences,
        "scores": [scores.clone() for scores in output.scores or ()],
        "cache": layers_of(cache) if cache is not None else [],
    }


def mode(name: str, note: str = "", inputs: Mapping[str, Any] | None = None, **options: Any) -> Mode:
    """A line of one call of generate() with these options; `build` and `slow` are the line's own."""
    own = {key: options.pop(key) for key in ("build", "adapt", "slow", "tolerance") if key in options}
    return Mode(name, act=lambda model: generated(model, inputs, **options), note=note, **own)


def cached(name: str, kind: str, make: Callable[[Any], Any] | None = None, **options: Any) -> Mode:
    """A line of a cache; its layers must be of this kind, on both sides."""

    def act(model: Any) -> object:
        given = {} if make is None else {"cache": make(model.config)}
        found = generated(model, **given, **options)
        assert kind in {layer for layer, _ in found["cache"]}, f"{[layer for layer, _ in found['cache']]}"
        return found

    own = {key: options.pop(key) for key in ("build", "slow", "note", "tolerance", "context") if key in options}
    return Mode(name, act=act, **own)


def passes(model: Any, act: Callable[[], Any]) -> tuple[Any, int]:
    """What it gives, and how often the model was called."""
    calls: list[int] = []
    base = model.get_base_model()
    handle = base.register_forward_hook(lambda *_: calls.append(1))
    try:
        return act(), len(calls)
    finally:
        handle.remove()
