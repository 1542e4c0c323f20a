"""What users reported of generation elsewhere, and what must therefore hold here: each test says which report.

peft #2821 is in test_peft_reports.py. transformers #22576 and petals #571 could not be found in any store that we can
search, and have no test.
"""

from __future__ import annotations

import threading
from typing import Any

import torch
import transformers

from tests.conformance.generation import letters, without_cuda
from tests.conformance.harness import Bench
from tests.conformance.modes import NEW_TOKENS, Mode, check, generated, mode, prompt


def test_petals_503_several_beams_are_returned(bench: Bench) -> None:
    """Only greedy decoding worked: beams are reordered between steps, of which the servers' caches knew nothing."""
    report: dict[str, Any] = {"num_beams": 5, "num_return_sequences": 5, "early_stopping": True}

    check(mode("beams", **report), bench)
    check(mode("sampled beams", **report, do_sample=True, temperature=0.01, top_p=0.5), bench)


def test_transformers_34327_an_offloaded_static_cache_made_by_hand(bench: Bench) -> None:
    """OffloadedStaticCache did not take the arguments that generate() gave it."""

    def act(model: Any) -> object:
        cache = transformers.StaticCache(config=model.config, max_cache_len=32, offloading=True)
        return generated(model, cache=cache, disable_compile=True)

    check(Mode("offloaded static", act, context=without_cuda), bench)


def test_transformers_23552_a_pipeline_streams(bench: Bench) -> None:
    """The text generation pipeline made a deep copy of its arguments, and so of the streamer's queue."""

    def act(model: Any) -> object:
        tokenizer: Any = letters()
        streamer = transformers.TextIteratorStreamer(tokenizer, timeout=60)
        pipe = transformers.pipeline("text-generation", model=model.get_base_model(), tokenizer=tokenizer)
        options = {"streamer": streamer, "max_new_tokens": NEW_TOKENS, "do_sample": False}
        thread = threading.Thread(target=pipe, args=("a text",), kwargs=options)
        thread.start()
        text = "".join(streamer)
        thread.join(60)
        assert len(text) > len("a text")
        return text

    check(Mode("streaming pipeline", act), bench)


def test_transformers_25921_a_padded_batch_says_what_each_sequence_says_alone(bench: Bench) -> None:
    """Results changed with the size of the batch: in float32 they must not, padded or not."""
    rows = ([11, 42, 7, 63, 25], [0, 0, 88, 5, 31], [0, 0, 0, 0, 9], [0, 17, 70, 3, 44])

    def act(model: Any) -> object:
        alone = [generated(model, prompt([[token for token in row if token]]))["sequences"] for row in rows]
        for size in range(1, len(rows) + 1):
            together = generated(model, prompt(rows[:size]))["sequences"][:, len(rows[0]) :]
            assert torch.equal(together, torch.cat([one[:, -NEW_TOKENS:] for one in alone[:size]]))
        return together

    check(Mode("batches", act), bench)
