"""Loops of people's own, for the compatibility table: each trains as it does locally."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import accelerate
import torch
import transformers
from torch import nn
from torch.utils.data import DataLoader

from symbiosis.telemetry import CallEvent
from tests.conformance.harness import Section
from tests.conformance.training import (
    BITS8,
    BITS11,
    STEPS,
    Loop,
    Training,
    Wrap,
    adapted,
    dataset,
    token_rows,
    tokenizer,
    trained,
    words,
)


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


def compiled(model: Any, folder: Path) -> list[float]:
    """Remote calls are opaque to dynamo, which compiles what lies between them; eager, for no C compiler is needed."""
    with warnings.catch_warnings():
        # Dynamo itself looks at .grad of what it gets between two opaque calls.
        warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf", UserWarning)
        torch._dynamo.reset()
        return steps(torch.compile(model, backend="eager"), batches())


def masked_gradients(model: Any, folder: Path) -> list[float]:
    """As in RoSA: a fixed sparse mask on each gradient, by a hook; what it covers must not move."""
    masks = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            masks[name] = torch.rand(parameter.shape, generator=torch.Generator().manual_seed(3)) < 0.3
            parameter.register_hook(lambda grad, mask=masks[name]: grad * mask)
    before = trained(model)
    model.train()
    optimizer = torch.optim.SGD(trainable(model), lr=0.5)
    losses = []
    for batch in batches():
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    for name, value in trained(model).items():
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
    Training("Autocast, bfloat16", loop=autocast(torch.bfloat16), tolerance=1e-2, note=BITS8),
    Training("Autocast, float16, GradScaler", loop=autocast(torch.float16), tolerance=5e-3, note=BITS11),
    Training("torch.compile", loop=compiled, slow=True, note="calls are opaque to it: it compiles what lies between"),
    Training("accelerate: prepare, accumulate, clip, schedule", loop=with_accelerate),
    Training("DataLoader workers", loop=with_workers, note="forked after `connect`"),
    Training("datasets: map, filter, shuffle, collator", loop=with_datasets),
)

INTRO = """\
LoRA on a Llama of two layers, the same loop run locally: each loss and metric, and the trained parameters in the end.
Numbers agree to a relative 1e-3 unless a line says otherwise, and parameters to ten times a line's tolerance, since
AdamW divides by the size of each gradient; every line makes calls."""

SECTIONS = (Section("Training: loops", LOOPS, INTRO),)
