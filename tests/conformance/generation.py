"""The modes of generation of the compatibility table.

One rule: one table. What people do with generate() is a line here, and nowhere else.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import transformers
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import DynamicCache, PreTrainedTokenizerFast, QuantizedCache, StaticCache
from transformers.generation.streamers import BaseStreamer

from symbiosis.flight.demo_model import demo_model_path
from tests.conformance.architectures import DECODER, GPT, UNTIED, WIDE, WINDOW, tiny
from tests.conformance.encoders import T5 as T5_CONFIG
from tests.conformance.harness import Section, lora
from tests.conformance.modes import BATCH, NEW_TOKENS, Mode, cached, generated, layers_of, mode, passes, prompt
from tests.conformance.real_models import smollm2

mistral = tiny("MistralForCausalLM", **DECODER, **UNTIED, **WINDOW)
gemma3 = tiny("Gemma3ForCausalLM", **WIDE, **WINDOW, layer_types=["sliding_attention", "full_attention"])
gpt2 = tiny("GPT2LMHeadModel", **GPT)
t5 = tiny("T5ForConditionalGeneration", **T5_CONFIG)
SMALL = {**DECODER, **UNTIED, "hidden_size": 16, "num_hidden_layers": 1}
assistant = tiny("LlamaForCausalLM", **SMALL)
stranger = tiny("LlamaForCausalLM", **{**SMALL, "vocab_size": 90})


# --- assisted -------------------------------------------------------------------------------------------------


def assisted(name: str, note: str = "", **options: Any) -> Mode:
    """A line in which several tokens are proposed and checked in one pass; the text is that of plain decoding."""

    def act(model: Any) -> object:
        inputs = prompt([[11, 42, 7, 63, 25, 42, 7]])
        settings = {key: value() if callable(value) else value for key, value in options.items()}
        found, count = passes(model, lambda: generated(model, inputs, **settings))
        if not settings.get("do_sample"):
            assert torch.equal(found["sequences"], generated(model, inputs)["sequences"])
        return found["sequences"], count

    return Mode(name, act=act, note=note)


def own_base(model: Any) -> object:
    """The wrapped model without its adapter proposes, with it decides."""
    proposer = copy.deepcopy(model.get_base_model())
    inputs = prompt(BATCH[:1])
    found = generated(model, inputs, assistant_model=proposer)["sequences"]
    assert torch.equal(found, generated(model, inputs)["sequences"])
    return found


def letters(vocabulary: int = 96) -> PreTrainedTokenizerFast:
    """A tokenizer of single letters; the first three tokens are special."""
    tokens = ["<pad>", "<s>", "</s>", *map(chr, range(32, 29 + vocabulary))]
    backend = Tokenizer(models.WordLevel({token: number for number, token in enumerate(tokens)}, unk_token="!"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    backend.decoder = decoders.Fuse()
    made = PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="!"
    )
    made.padding_side = "left"
    made.chat_template = (
        "{% for message in messages %}<s>{{ message.role }}:{{ message.content }}</s>{% endfor %}"
        "{% if add_generation_prompt %}<s>assistant:{% endif %}"
    )
    return made


# --- streams, criteria and processors -------------------------------------------------------------------------


class Seen(BaseStreamer):
    """What a streamer is given, in its order."""

    def __init__(self) -> None:
        self.tokens: list[int] = []

    def put(self, value: torch.Tensor) -> None:
        self.tokens.extend(value.flatten().tolist())

    def end(self) -> None:
        self.tokens.append(-1)


class LongEnough(transformers.StoppingCriteria):
    """Each sequence stops by itself: the second earlier."""

    def __call__(self, ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        return ids.shape[1] >= torch.tensor([9, 7])


def streamed(model: Any) -> object:
    seen = Seen()
    sequences = generated(model, prompt(BATCH[:1]), streamer=seen)["sequences"]
    assert seen.tokens == [*sequences[0].tolist(), -1]
    return seen.tokens


def streamed_from_a_thread(model: Any) -> object:
    """As chat front ends do: generate() in a thread, the text read here as it comes."""
    tokenizer = letters()
    streamer = transformers.TextIteratorStreamer(tokenizer, timeout=60)  # type: ignore[arg-type]
    thread = threading.Thread(target=generated, args=(model, prompt(BATCH[:1])), kwargs={"streamer": streamer})
    thread.start()
    pieces = list(streamer)
    thread.join(60)
    assert not thread.is_alive()
    return pieces


def stopped_by_words(model: Any) -> object:
    tokenizer = letters()
    plain = generated(model, prompt(BATCH[:1]))["sequences"][0, len(BATCH[0]) :]
    word = tokenizer.decode(plain[4:5])
    found = generated(model, prompt(BATCH[:1]), stop_strings=[word], tokenizer=tokenizer, min_new_tokens=0)
    return found["sequences"]


def two_threads(model: Any) -> object:
    """Two conversations at once over one connection."""
    answers: dict[int, list[int]] = {}

    def talk(number: int) -> None:
        answers[number] = generated(model, prompt([[number, 42, 7]]))["sequences"][0].tolist()

    threads = [threading.Thread(target=talk, args=(number,)) for number in (11, 63)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return dict(sorted(answers.items()))


@contextmanager
def without_cuda() -> Iterator[None]:
    """Let a cache that asks for CUDA streams run on a CPU, where there is nothing to wait for."""
    with mock.patch.object(torch.cuda, "default_stream"), mock.patch.object(torch, "Stream", mock.MagicMock):
        yield


# --- caches across calls --------------------------------------------------------------------------------------


def conversation(model: Any) -> object:
    """Three turns with one cache; each is what it would be without."""
    cache, ids, lengths = DynamicCache(config=model.config), torch.tensor(BATCH[:1]), []
    for turn in range(3):
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        answer = generated(model, inputs, cache=cache)["sequences"]
        assert torch.equal(answer, generated(model, inputs)["sequences"])
        lengths.append(cache.get_seq_length())
        ids = torch.cat([answer, torch.tensor([[20 + turn, 50]])], dim=1)
    assert lengths == sorted(set(lengths))
    return ids, layers_of(cache)


def shared_beginning(model: Any) -> object:
    """One prefilled cache, copied for each question."""
    start = torch.tensor([[11, 42, 7, 63, 25]])
    cache = StaticCache(config=model.config, max_cache_len=32)
    with torch.no_grad():
        model(input_ids=start, cache=cache)
    answers = []
    for question in ([70, 71], [80, 81, 82]):
        ids = torch.cat([start, torch.tensor([question])], dim=1)
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        answer = generated(model, inputs, cache=copy.deepcopy(cache), disable_compile=True)
        assert torch.equal(answer["sequences"], generated(model, inputs)["sequences"])
        answers.append(answer)
    return answers


def taken_back(model: Any) -> object:
    """The last turn is taken back and said differently."""
    cache, ids = DynamicCache(config=model.config), torch.tensor(BATCH[:1])
    generated(model, {"input_ids": ids, "attention_mask": torch.ones_like(ids)}, cache=cache)
    cache.crop(len(BATCH[0]) - cache.get_seq_length())
    again = torch.cat([ids, torch.tensor([[70, 71]])], dim=1)
    inputs = {"input_ids": again, "attention_mask": torch.ones_like(again)}
    answer = generated(model, inputs, cache=cache)
    assert torch.equal(answer["sequences"], generated(model, inputs)["sequences"])
    return answer


# --- other ways in --------------------------------------------------------------------------------------------


def from_embeddings(model: Any) -> object:
    inputs = prompt()
    embeddings = model.get_input_embeddings()(inputs.pop("input_ids")).detach()
    return generated(model, {**inputs, "inputs_embeds": embeddings})


def by_hand(model: Any) -> object:
    """A loop of the user's own."""
    cache, ids, logits = DynamicCache(config=model.config), torch.tensor(BATCH[:1]), []
    with torch.inference_mode():
        for _ in range(NEW_TOKENS):
            output = model(input_ids=ids, cache=cache, use_cache=True)
            logits.append(output.logits[:, -1].clone())
            ids = output.logits[:, -1:].argmax(dim=-1)
    return logits, layers_of(cache)


def everything(model: Any) -> object:
    output = model.generate(
        **prompt(),
        max_new_tokens=4,
        do_sample=False,
        output_scores=True,
        output_logits=True,
        output_hidden_states=True,
        return_dict_in_generate=True,
    )
    return output.sequences, list(output.scores), list(output.logits), list(output.hidden_states)


def attentions(model: Any) -> object:
    model.get_base_model().set_attn_implementation("eager")
    output = model.generate(
        **prompt(), max_new_tokens=4, do_sample=False, output_attentions=True, return_dict_in_generate=True
    )
    return output.sequences, list(output.attentions)


def in_bfloat16(model: Any) -> object:
    """The first logits: texts part where two tokens are as close as bfloat16's three digits."""
    with torch.autocast("cpu", torch.bfloat16):
        return generated(model)["scores"][0]


def without_adapter(model: Any) -> object:
    with model.disable_adapter():
        plain = generated(model)
    assert not torch.equal(plain["scores"][0], generated(model)["scores"][0])
    return plain


def piped(model: Any) -> object:
    pipe = transformers.pipeline("text-generation", model=model, tokenizer=letters())
    options = {"max_new_tokens": NEW_TOKENS, "do_sample": False}
    texts = pipe(["the first", "second"], batch_size=2, **options)
    chat = pipe([{"role": "user", "content": "How are you?"}], **options)
    return texts, chat


def chat(model: Any) -> object:
    """Two turns with the demo model, in its own template."""
    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(demo_model_path())
    pipe = transformers.pipeline("text-generation", model=model.get_base_model(), tokenizer=tokenizer)
    messages = [{"role": "user", "content": "Name a colour."}]
    for question in ("Another one.", "Thank you."):
        messages = pipe(messages, max_new_tokens=12, do_sample=False)[0]["generated_text"]
        messages.append({"role": "user", "content": question})
    return messages


def continuous(**config: Any) -> Callable[[Any], object]:
    """transformers' own continuous batching, with requests of several lengths."""

    def act(model: Any) -> object:
        prompts = [[11, 42, 7, 63, 25], [88, 5, 31], list(range(20, 60)), [9]]
        settings = transformers.GenerationConfig(
            max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=-1, pad_token_id=0
        )
        batching = transformers.ContinuousBatchingConfig(num_blocks=16, max_batch_tokens=32, page_size=16, **config)
        outputs = model.generate_batch(prompts, settings, batching)
        found = [outputs[name].generated_tokens for name in sorted(outputs, key=lambda name: outputs[name].prompt_ids)]
        alone = [
            generated(model, prompt([ids]), eos_token_id=-1)["sequences"][0, len(ids) :] for ids in sorted(prompts)
        ]
        assert found == [text.tolist() for text in alone]
        return found

    return act


def long_prompt(tokens: int, vocabulary: int = 96) -> dict[str, torch.Tensor]:
    ids = torch.randint(3, vocabulary, (1, tokens), generator=torch.Generator().manual_seed(0))
    return prompt(ids.tolist())


def chunked(tokens: int, chunk: int, vocabulary: int) -> Callable[[Any], object]:
    """A long prompt, prefilled by chunks; the cache is here, and holds it all."""

    def act(model: Any) -> object:
        found, count = passes(
            model,
            lambda: generated(
                model, long_prompt(tokens, vocabulary), prefill_chunk_size=chunk, cache_implementation="dynamic"
            ),
        )
        assert count == -(-tokens // chunk) + NEW_TOKENS - 1, f"{count} passes"
        assert found["cache"][0][1][0].shape[2] == tokens + NEW_TOKENS - 1
        return found

    return act


# --- the lines ------------------------------------------------------------------------------------------------

SAMPLING = {"do_sample": True, "temperature": 0.7, "top_k": 40, "top_p": 0.9}
DECODING = (
    mode("Greedy"),
    mode("Greedy, GPT-2", build=gpt2, adapt=lora("c_attn", fan_in_fan_out=True)),
    mode("Greedy, encoder-decoder", build=t5, adapt=lora("q", "v")),
    mode("Sampling", "with a seed: the same tokens", **SAMPLING),
    mode("Sampling, min_p and typical_p", do_sample=True, min_p=0.01, typical_p=0.9),
    mode("num_return_sequences", num_return_sequences=3, **SAMPLING),
    mode("Beam search", num_beams=3, length_penalty=0.8, early_stopping=True),
    mode("Beam search, encoder-decoder", num_beams=3, build=t5, adapt=lora("q", "v")),
    mode("Beam sampling", num_beams=3, num_return_sequences=2, **SAMPLING),
    assisted("Assisted by a smaller model", "the smaller one is the client's", assistant_model=assistant),
    assisted("Assisted, sampling", assistant_model=assistant, do_sample=True),
    Mode("Assisted by the same base", act=own_base, note="wrapped, without the adapter"),
    assisted(
        "Assisted by a model with another tokenizer",
        assistant_model=stranger,
        tokenizer=letters,
        assistant_tokenizer=lambda: letters(90),
    ),
    assisted("Assisted, prompt lookup", prompt_lookup_num_tokens=3),
    assisted("Assisted, early exit", assistant_early_exit=1),
    Mode("Assisted by heads of its own (use_mtp)", untried="transformers loads their weights from a checkpoint folder"),
    Mode(
        "Contrastive, DoLa, group and constrained beam search",
        untried="transformers 5 loads their code from a model hub",
    ),
)
STEERING = (
    mode(
        "Left padding, alone and in a batch", inputs=prompt([[0, 0, 0, 0, 9], [11, 42, 7, 63, 25], [0, 8, 88, 5, 31]])
    ),
    mode("Penalties and bans", repetition_penalty=1.5, no_repeat_ngram_size=2, bad_words_ids=[[20], [30, 31]]),
    mode("prefix_allowed_tokens_fn", prefix_allowed_tokens_fn=lambda batch, ids: [20, 30, 40, 50]),
    mode("Classifier-free guidance", guidance_scale=1.5),
    mode("Watermark", watermarking_config=transformers.WatermarkingConfig(bias=2.5)),
    mode("Stopping criteria", stopping_criteria=[LongEnough()], min_new_tokens=0),
    Mode("Stop words", act=stopped_by_words),
    Mode("Streamer", act=streamed),
    Mode("TextIteratorStreamer, from a thread", act=streamed_from_a_thread),
    Mode("Scores, logits and hidden states", act=everything),
    Mode("Attentions", act=attentions),
    Mode("From inputs_embeds", act=from_embeddings),
    Mode("A loop of one's own", act=by_hand, note="in inference mode"),
    Mode("In bfloat16 by autocast", act=in_bfloat16, tolerance=2e-2, note="the first logits, to 2e-2"),
    Mode("Within disable_adapter()", act=without_adapter),
    Mode("Two threads", act=two_threads),
)
ON_CUDA = {
    "context": without_cuda,
    "note": "transformers needs CUDA for it; tested on a CPU, with its streams replaced",
}
CACHES = (
    cached("Dynamic cache", "DynamicLayer", lambda config: DynamicCache(config=config)),
    cached("Static cache", "StaticLayer", cache_implementation="static", disable_compile=True),
    cached("Offloaded cache", "DynamicLayer", cache_implementation="offloaded", **ON_CUDA),
    cached(
        "Offloaded static cache",
        "StaticLayer",
        cache_implementation="offloaded_static",
        disable_compile=True,
        **ON_CUDA,
    ),
    cached("Quantized cache, fp8", "Fp8QuantizedLayer", lambda config: QuantizedCache("fp8", config)),
    Mode("Quantized cache, quanto or HQQ", untried="packages of their own, not installed; the cache is the client's"),
    cached("Sliding window", "DynamicSlidingWindowLayer", build=mistral),
    cached(
        "Sliding window, static cache",
        "StaticSlidingWindowLayer",
        cache_implementation="static",
        disable_compile=True,
        build=mistral,
    ),
    cached("Sliding and full layers", "DynamicSlidingWindowLayer", build=gemma3),
    cached(
        "Beam search in a static cache", "StaticLayer", cache_implementation="static", disable_compile=True, num_beams=3
    ),
    mode("No cache", use_cache=False),
    Mode("A conversation in one cache", act=conversation),
    Mode("A turn taken back (crop)", act=taken_back),
    Mode("A shared beginning, its cache copied", act=shared_beginning),
    Mode("8,192 tokens, prefilled in chunks", act=chunked(8192, 1024, 96)),
    Mode("8,192 tokens, the demo model", act=chunked(8192, 512, 49152), build=smollm2, slow=True),
)
FRONTS = (
    Mode('pipeline("text-generation")', act=piped, note="a batch, and a conversation through a chat template"),
    Mode("Chat template, the demo model", act=chat, build=smollm2, adapt=lora(r=8), slow=True),
    Mode("generate_batch", act=continuous(), note="continuous batching"),
    Mode("generate_batch, without shared prefixes", act=continuous(allow_block_sharing=False), slow=True),
)
INTRO = (
    "Of a Llama of two layers with LoRA on q and v, unless the line says otherwise. The tokens are the same; scores, "
    "hidden states and all keys and values in the cache, which is the client's, agree to relative 1e-5."
)
SECTIONS = (Section("Generation", (*DECODING, *STEERING, *CACHES, *FRONTS), INTRO),)
