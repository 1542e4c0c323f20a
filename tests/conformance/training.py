"""The loops that people train with, for the compatibility table: each trains as it does locally.

One rule: a loop takes a model and knows nothing of us. It runs twice with the same seeds, on the local model and on the
wrapped one; what it returns and what it trained is compared, both in float32 unless the line says otherwise.

Tolerance: some ten steps of an optimizer that divides by the size of each gradient take two runs apart a little more
each step; 1e-3 of each loss, and of each trained parameter.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import accelerate
import peft
import torch
import transformers
from torch import nn
from torch.utils.data import DataLoader

import symbiosis
from symbiosis.connection import Connection
from symbiosis.telemetry import CallEvent
from tests.client.conftest import difference, remote_layers
from tests.conformance.architectures import DECODER, UNTIED, tiny
from tests.conformance.harness import Bench, Build, Line, Section, perturb

LOOP_TOLERANCE = 1e-3
STEPS = 6

Wrap = Callable[[nn.Module], Any]
Loop = Callable[[Any, Path], Sequence[float]]
Make = Callable[[nn.Module, Wrap], Any]

llama = tiny("LlamaForCausalLM", **DECODER, **UNTIED)
LORA = {"r": 4, "target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM"}


def adapted(model: nn.Module, **options: Any) -> Any:
    """The same LoRA each time, every matrix of it off its initial value."""
    made = peft.get_peft_model(model, peft.LoraConfig(**{**LORA, **options}))
    perturb(made)
    return made


def wrap_first(model: nn.Module, wrap: Wrap) -> Any:
    return adapted(wrap(model))


def without_adapter(model: nn.Module, wrap: Wrap) -> Any:
    """For loops that add it themselves."""
    return wrap(model)


@dataclass(frozen=True)
class Training(Line):
    """A loop.

    Args:
        loop: trains the model that it is given, in a folder of its own; its losses and metrics, in order.
        make: the model it is given, from the base and from what wraps it (locally nothing).
        build: the base.
        options: of `make`, when it is `wrap_first`.
        tolerance: of each number and each trained parameter; the note says why where it is another.
        watch: gets the calls of the wrapped run, and raises AssertionError if they are not what they should be.
    """

    loop: Loop | None = None
    make: Make = wrap_first
    build: Build = llama
    tolerance: float = LOOP_TOLERANCE
    watch: Callable[[list[CallEvent]], None] = field(default=lambda calls: None)


def check(line: Training, bench: Bench, folder: Path) -> None:
    """Prove a line.

    Raises:
        AssertionError: the two runs differ, or prove nothing.
    """
    assert line.loop is not None
    base, url = bench.serve(line.build)
    calls: list[CallEvent] = []
    with symbiosis.connect(url) as connection:
        remote, there = _run(line, base, connection.wrap, folder / "remote", connection, calls)
        local, here = _run(line, base, lambda model: model, folder / "local")
    assert calls, "nothing was asked of the server"
    layers = remote_layers(remote)
    assert layers
    assert all(layer.weight.numel() == 0 for layer in layers), "base weights are here"
    assert len(there) == len(here)
    for number, (got, expected) in enumerate(zip(there, here, strict=True)):
        far = abs(got - expected)
        assert far <= line.tolerance * max(abs(expected), 0.1), f"number {number} is {got!r}, not {expected!r}"
    _same_parameters(remote, local, line.tolerance)
    line.watch(calls)


def _run(
    line: Training, base: nn.Module, wrap: Wrap, folder: Path, connection: Connection | None = None, calls: Any = None
) -> tuple[Any, Sequence[float]]:
    assert line.loop is not None
    folder.mkdir(parents=True, exist_ok=True)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(11)
        model = line.make(copy.deepcopy(base), wrap)
        before = _trained(model)
        if connection is not None:
            connection.bus.subscribe(calls.append)
        torch.manual_seed(12)
        numbers = line.loop(model, folder)
    after = _trained(model)
    assert any(name not in before or not torch.equal(before[name], value) for name, value in after.items())
    assert all(value.any() for name, value in after.items() if "lora_B" in name), "an adapter was not trained"
    return model, numbers


def _trained(model: nn.Module) -> dict[str, torch.Tensor]:
    return {n: p.detach().clone() for n, p in model.named_parameters() if p.requires_grad and p.numel()}


def _same_parameters(remote: nn.Module, local: nn.Module, tolerance: float) -> None:
    there, here = _trained(remote), _trained(local)
    assert there.keys() == here.keys(), f"{sorted(there.keys() ^ here.keys())} trained on one side only"
    assert here, "nothing is trained in the end"
    for name, expected in here.items():
        far = difference(there[name], expected)
        assert far <= 10 * tolerance, f"{name} is {far:.1e} away after training"


# --- data -----------------------------------------------------------------------------------------------------


def token_rows(count: int = 8, length: int = 10) -> torch.Tensor:
    return torch.randint(3, 96, (count, length), generator=torch.Generator().manual_seed(0))


def dataset(count: int = 8) -> list[dict[str, torch.Tensor]]:
    return [{"input_ids": row, "labels": row} for row in token_rows(count)]


def tokenizer() -> Any:
    """One word, one token: `w0` to `w89`."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace

    words = {word: i for i, word in enumerate(["<pad>", "<s>", "</s>", *(f"w{i}" for i in range(90))])}
    inner = Tokenizer(WordLevel(words, unk_token="<s>"))
    inner.pre_tokenizer = Whitespace()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="<pad>", bos_token="<s>", eos_token="</s>"
    )


def words(start: int, count: int = 8) -> str:
    return " ".join(f"w{(3 * start + i) % 90}" for i in range(count))


# --- plain loops ----------------------------------------------------------------------------------------------


def trainable(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


def steps(
    model: Any, batches: Iterator[dict[str, torch.Tensor]], before_step: Callable[[int], None] = lambda number: None
) -> list[float]:
    """AdamW on each batch, in training mode; the loss of each."""
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)  # whatever it is given: frozen ones have no gradient
    losses = []
    for number, batch in enumerate(batches):
        before_step(number)
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def batches(count: int = STEPS) -> Iterator[dict[str, torch.Tensor]]:
    for number in range(count):
        ids = token_rows()[2 * number % 8 :][:2]
        yield {"input_ids": ids, "labels": ids}


def plain(model: Any, folder: Path) -> list[float]:
    return steps(model, batches())


def autocast(dtype: torch.dtype) -> Loop:
    """Under autocast; in float16 with its scaler."""

    def loop(model: Any, folder: Path) -> list[float]:
        model.train()
        optimizer = torch.optim.AdamW(trainable(model), lr=1e-2)
        scaler = torch.amp.GradScaler("cpu", enabled=dtype is torch.float16)
        losses = []
        for batch in batches():
            with torch.autocast("cpu", dtype=dtype):
                loss = model(**batch).loss
            scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    return loop


def masked_gradients(model: Any, folder: Path) -> list[float]:
    """As in RoSA: a fixed sparse mask on each gradient, by a hook; what it covers must not move."""
    masks = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            masks[name] = torch.rand(parameter.shape, generator=torch.Generator().manual_seed(3)) < 0.3
            parameter.register_hook(lambda grad, mask=masks[name]: grad * mask)
    before = _trained(model)
    model.train()
    optimizer = torch.optim.SGD(trainable(model), lr=0.5)
    losses = []
    for batch in batches():
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    for name, value in _trained(model).items():
        assert torch.equal(value[~masks[name]], before[name][~masks[name]])
        assert not torch.equal(value[masks[name]], before[name][masks[name]])
    return losses


def sparse_and_low_rank(model: nn.Module, wrap: Wrap) -> Any:
    """RoSA itself: beside LoRA, a sparse matrix on the same layer."""

    class Sparse(nn.Module):
        def __init__(self, inner: Any) -> None:
            super().__init__()
            self.inner = inner
            shape = (inner.out_features, inner.in_features)
            self.index = torch.randperm(shape[0] * shape[1])[:40]
            self.shape = shape
            self.values = nn.Parameter(0.05 * torch.randn(40))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            delta = x.new_zeros(self.shape[0] * self.shape[1]).index_put((self.index,), self.values.to(x.dtype))
            y: torch.Tensor = self.inner(x)
            return y + nn.functional.linear(x, delta.view(self.shape))

    made = adapted(wrap(model))
    for layer in made.get_base_model().model.layers:
        layer.self_attn.q_proj = Sparse(layer.self_attn.q_proj)
    return made


def switching(model: Any, folder: Path) -> list[float]:
    """requires_grad changed in place between steps: A only, B only, the last layer, the first, all."""
    parts = ("lora_A", "lora_B", "layers.1.", "layers.0.", "lora", "lora_A")
    adapters = [(name, parameter) for name, parameter in model.named_parameters() if "lora" in name]

    def switch(number: int) -> None:
        for name, parameter in adapters:
            parameter.requires_grad_(parts[number] in name)

    losses = steps(model, batches(), switch)
    for _, parameter in adapters:
        parameter.requires_grad_(True)
    return losses


def frozen_below(model: nn.Module, wrap: Wrap) -> Any:
    """Adapters on both layers, those of the first one frozen."""
    made = adapted(wrap(model), target_modules="all-linear")
    for name, parameter in made.named_parameters():
        if "layers.0." in name:
            parameter.requires_grad_(False)
    return made


def no_gradient_below(calls: list[CallEvent]) -> None:
    """Below the first trained layer nothing has a gradient, and nobody asks for one."""
    backward = [name for call in calls if call.op == "grad_input" for name in call.modules]
    forward = [name for call in calls if call.op == "forward" for name in call.modules]
    assert any("layers.0." in name for name in forward)
    assert any("layers.1." in name for name in backward)
    assert not [name for name in backward if "layers.0." in name]
    # Of the layer itself: q, k and v have an input that needs none either.
    assert not [name for name in backward if "layers.1.self_attn.q_proj" in name]


def with_accelerate(model: Any, folder: Path) -> list[float]:
    """The loop of accelerate's documentation: prepare, accumulate, clip."""
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
    loader = DataLoader(dataset(), batch_size=2)  # type: ignore[arg-type]
    optimizer = torch.optim.AdamW(trainable(model), lr=1e-2)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=4)
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    model.train()
    losses = []
    for _ in range(2):
        for batch in loader:
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            losses.append(loss.item())
    return losses


def with_workers(model: Any, folder: Path) -> list[float]:
    """Worker processes, forked while the connection is open; batches pass between them and calls."""
    loader = DataLoader(dataset(), batch_size=2, num_workers=2, multiprocessing_context="fork")  # type: ignore[arg-type]
    return steps(model, (batch for _ in range(2) for batch in loader))


def with_datasets(model: Any, folder: Path) -> list[float]:
    """datasets: batched map, filter, shuffle, a column format, a collator that pads."""
    import datasets

    encode = tokenizer()
    raw = datasets.Dataset.from_dict({"text": [words(i, 5 + i % 4) for i in range(12)]})
    rows = raw.map(lambda batch: encode(batch["text"]), batched=True, remove_columns=["text"])
    rows = rows.filter(lambda row: len(row["input_ids"]) > 5).shuffle(seed=1)
    collate = transformers.DataCollatorForLanguageModeling(encode, mlm=False)
    loader = DataLoader(rows.with_format("torch"), batch_size=3, collate_fn=collate)  # type: ignore[arg-type]
    return steps(model, (batch for _ in range(2) for batch in loader))


# --- checkpointing --------------------------------------------------------------------------------------------


def checkpoint(model: Any, use_reentrant: bool) -> None:
    model.enable_input_require_grads()
    model.activation_checkpointing_enable({"use_reentrant": use_reentrant})


def checkpointed(enabled: str, use_reentrant: bool) -> Make:
    """Checkpointing enabled at this place of the making."""

    def make(model: Any, wrap: Wrap) -> Any:
        if enabled == "first":
            checkpoint(model, use_reentrant)
        model = wrap(model)
        if enabled == "after wrap":
            checkpoint(model, use_reentrant)
        model = adapted(model)
        if enabled == "last":
            checkpoint(model, use_reentrant)
        return model

    return make


def peft_first(use_reentrant: bool) -> Make:
    """On the PEFT model, which is wrapped last."""

    def make(model: Any, wrap: Wrap) -> Any:
        model = adapted(model)
        checkpoint(model, use_reentrant)
        return wrap(model)

    return make


def twice_forward(calls: list[CallEvent]) -> None:
    """A layer that is checkpointed is computed twice a step: else nothing was shown."""
    found = [
        call
        for call in calls
        if call.op == "forward" and any(name.endswith("layers.1.self_attn.q_proj") for name in call.modules)
    ]
    assert len(found) == 2 * STEPS, f"{len(found)} calls of the last layer's q"


# --- Trainer --------------------------------------------------------------------------------------------------


def arguments(folder: Path, **options: Any) -> transformers.TrainingArguments:
    return transformers.TrainingArguments(
        str(folder),
        **{
            "per_device_train_batch_size": 2, "max_steps": STEPS, "learning_rate": 1e-2, "logging_steps": 1,
            "save_strategy": "no", "report_to": "none", "disable_tqdm": True, "use_cpu": True, "seed": 1,
            "dataloader_pin_memory": False, **options,
        },
    )  # fmt: skip


def losses_of(run: transformers.Trainer) -> list[float]:
    return [entry["loss"] for entry in run.state.log_history if "loss" in entry]


def trainer(**options: Any) -> Loop:
    def loop(model: Any, folder: Path) -> list[float]:
        run = transformers.Trainer(model, arguments(folder, **options), train_dataset=dataset())  # type: ignore[arg-type]
        run.train()
        return losses_of(run)

    return loop


def evaluated(model: Any, folder: Path) -> list[float]:
    """evaluate() while training and after it, predict() and its logits, the best checkpoint loaded at the end."""
    options = arguments(
        folder, save_strategy="steps", save_steps=3, eval_strategy="steps", eval_steps=3, load_best_model_at_end=True
    )
    run = transformers.Trainer(model, options, train_dataset=dataset(), eval_dataset=dataset(4))  # type: ignore[arg-type]
    run.train()
    predicted = run.predict(dataset(4))  # type: ignore[arg-type]
    assert predicted.predictions.shape == (4, 10, 96)
    evals = [entry["eval_loss"] for entry in run.state.log_history if "eval_loss" in entry]
    assert len(evals) == 2
    metric = predicted.metrics["test_loss"]  # type: ignore[index]
    return [*losses_of(run), *evals, run.evaluate()["eval_loss"], metric, float(abs(predicted.predictions).mean())]


def resumed(model: Any, folder: Path) -> list[float]:
    """Half a run, then a second Trainer and an adapter that is to be overwritten; the losses of an unbroken run."""
    start = _trained(model)
    options = {"save_strategy": "steps", "save_steps": 3, "warmup_steps": 2}
    whole = trainer(**options)(model, folder / "whole")
    for name, parameter in model.named_parameters():
        if name in start:
            parameter.data.copy_(torch.zeros_like(parameter))
    second = transformers.Trainer(model, arguments(folder / "second", **options), train_dataset=dataset())  # type: ignore[arg-type]
    second.train(resume_from_checkpoint=str(folder / "whole" / "checkpoint-3"))
    again = losses_of(second)
    assert len(again) == STEPS
    assert max(abs(a - b) for a, b in zip(again, whole, strict=True)) <= 1e-4, f"{again} is not {whole}"
    return again


# --- TRL ------------------------------------------------------------------------------------------------------

TRL_SETTINGS: dict[str, Any] = {
    "max_steps": 4, "per_device_train_batch_size": 2, "learning_rate": 1e-2, "logging_steps": 1, "report_to": "none",
    "disable_tqdm": True, "use_cpu": True, "bf16": False, "activation_checkpointing": False, "save_strategy": "no",
    "dataloader_pin_memory": False,
}  # fmt: skip


def rows(**columns: Any) -> Any:
    import datasets

    return datasets.Dataset.from_dict(columns)


def sft(peft_config: bool = False, **options: Any) -> Loop:
    def loop(model: Any, folder: Path) -> list[float]:
        import trl

        run = trl.SFTTrainer(
            model,
            trl.SFTConfig(str(folder), **{**TRL_SETTINGS, **options}),
            train_dataset=rows(text=[words(i) for i in range(12)]),
            processing_class=tokenizer(),
            peft_config=peft.LoraConfig(**LORA) if peft_config else None,
        )
        assert any(p.requires_grad for n, p in run.model.named_parameters() if "lora" in n), "the adapter is frozen"
        run.train()
        return losses_of(run)

    return loop


def dpo(peft_config: bool) -> Loop:
    """The reference is the base, which is the model with its adapter off: no second model is made."""

    def loop(model: Any, folder: Path) -> list[float]:
        import trl

        data = {
            "prompt": [words(i, 4) for i in range(8)],
            "chosen": [words(i + 1, 4) for i in range(8)],
            "rejected": [words(i + 7, 4) for i in range(8)],
        }
        run = trl.DPOTrainer(
            model,
            args=trl.DPOConfig(str(folder), **TRL_SETTINGS),
            train_dataset=rows(**data),
            processing_class=tokenizer(),
            peft_config=peft.LoraConfig(**LORA) if peft_config else None,
        )
        assert run.ref_model is None, "a second model was made"
        run.train()
        log = [entry for entry in run.state.log_history if "loss" in entry]
        margins = [entry["rewards/margins"] for entry in log]
        return [*losses_of(run), *margins, *(entry["logps/chosen"] for entry in log)]

    return loop


def reward(model: Any, folder: Path) -> list[float]:
    import trl

    data = {"chosen": [words(i) for i in range(8)], "rejected": [words(i + 5) for i in range(8)]}
    run = trl.RewardTrainer(
        model,
        trl.RewardConfig(str(folder), **TRL_SETTINGS),
        train_dataset=rows(**data),
        processing_class=tokenizer(),
    )
    run.train()
    return losses_of(run)


def scored(model: Any, wrap: Wrap) -> Any:
    """A classifier on top of the decoder that is served: LoRA, and a head of its own that is trained here."""
    model.config.num_labels, model.config.pad_token_id = 1, 0
    classifier: Any = transformers.LlamaForSequenceClassification(model.config)
    classifier.model = model.model
    return adapted(wrap(classifier), task_type="SEQ_CLS", modules_to_save=["score"])


# --- number types ---------------------------------------------------------------------------------------------


def base_in(dtype: torch.dtype) -> Build:
    """The base in this type; peft keeps its adapter in float32."""

    def build() -> nn.Module:
        return llama().to(dtype)

    return build


in_bfloat16, in_float16 = base_in(torch.bfloat16), base_in(torch.float16)


# --- the table ------------------------------------------------------------------------------------------------

REENTRANT = {True: "reentrant", False: "not reentrant"}
PLACES = {"first": "enabled first", "after wrap": "enabled after wrap", "last": "enabled after get_peft_model"}
BITS8, BITS11 = "bfloat16 has 8 bits: 3e-2", "float16 has 11 bits: 5e-3"

LOOPS: tuple[Training, ...] = (
    Training("Plain loop, AdamW over all parameters", loop=plain),
    Training("Sparse masks on gradients, by hooks", loop=masked_gradients, note="as in RoSA; what is masked stays"),
    Training("RoSA: sparse values beside LoRA", loop=plain, make=sparse_and_low_rank),
    Training("`requires_grad` changed between steps", loop=switching),
    Training(
        "Lower half frozen",
        loop=plain,
        make=frozen_below,
        watch=no_gradient_below,
        note="nothing below the first trained layer is asked for a gradient",
    ),
    Training("Autocast, bfloat16", loop=autocast(torch.bfloat16), tolerance=3e-2, note=BITS8),
    Training("Autocast, float16, GradScaler", loop=autocast(torch.float16), tolerance=5e-3, note=BITS11),
    Training("accelerate: prepare, accumulate, clip, schedule", loop=with_accelerate),
    Training("DataLoader workers", loop=with_workers, note="forked after `connect`"),
    Training("datasets: map, filter, shuffle, collator", loop=with_datasets),
)

CHECKPOINTING: tuple[Training, ...] = (
    *(
        Training(
            f"{REENTRANT[form].capitalize()}, {PLACES[place]}",
            loop=plain,
            make=checkpointed(place, form),
            watch=twice_forward,
        )
        for form in (True, False)
        for place in PLACES
    ),
    *(
        Training(
            f"{REENTRANT[form].capitalize()}, on a PEFT model, then wrap",
            loop=plain,
            make=peft_first(form),
            watch=twice_forward,
        )
        for form in (True, False)
    ),
    *(
        Training(
            f"{REENTRANT[form].capitalize()}, by Trainer",
            loop=trainer(activation_checkpointing=True, activation_checkpointing_kwargs={"use_reentrant": form}),
            watch=twice_forward,
        )
        for form in (True, False)
    ),
)

TRAINERS: tuple[Training, ...] = (
    Training("Trainer", loop=trainer()),
    Training("Trainer, accumulation and clipping", loop=trainer(gradient_accumulation_steps=2, max_grad_norm=0.1)),
    Training("Trainer, evaluate, predict, best checkpoint", loop=evaluated),
    Training(
        "Trainer, resume_from_checkpoint", loop=resumed, note="the losses of the run that was not interrupted, to 1e-4"
    ),
    Training("Trainer, bf16", loop=trainer(bf16=True), tolerance=3e-2, note=BITS8),
    Training("TRL SFT", loop=sft()),
    Training("TRL SFT, which makes the adapter", loop=sft(peft_config=True), make=without_adapter),
    Training("TRL DPO, reference by `disable_adapter`", loop=dpo(peft_config=True), make=without_adapter),
    Training("TRL DPO, of a PEFT model", loop=dpo(peft_config=False)),
    Training("TRL reward model", loop=reward, make=scored),
)

DTYPES: tuple[Training, ...] = (
    Training("float32 base", loop=plain),
    Training("bfloat16 base, adapter in float32", loop=plain, build=in_bfloat16, tolerance=3e-2, note=BITS8),
    Training("float16 base, adapter in float32", loop=plain, build=in_float16, tolerance=5e-3, note=BITS11),
)

INTRO = """\
LoRA on a Llama of two layers, the same loop run locally: each loss and metric, and the trained parameters in the end.
Numbers agree to a relative 1e-3, parameters to 1e-2, unless a line says otherwise; every line makes calls."""

SECTIONS = (
    Section("Training: loops", LOOPS, INTRO),
    Section("Training: activation checkpointing", CHECKPOINTING),
    Section("Training: trainers", TRAINERS),
    Section("Training: number types of the base", DTYPES),
)
