"""Trainer and those of TRL, for the compatibility table: each trains as it does locally."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import peft
import torch
import transformers

from tests.conformance.harness import Section
from tests.conformance.training import (
    BITS8,
    LORA,
    STEPS,
    Loop,
    Training,
    Wrap,
    adapted,
    dataset,
    tokenizer,
    trained,
    without_adapter,
    words,
)


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
    start = trained(model)
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


# --- TRL --------------------------------------------------------------------------------------------------------

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


TRAINERS: tuple[Training, ...] = (
    Training("Trainer", loop=trainer()),
    Training("Trainer, accumulation and clipping", loop=trainer(gradient_accumulation_steps=2, max_grad_norm=0.1)),
    Training("Trainer, evaluate, predict, best checkpoint", loop=evaluated),
    Training(
        "Trainer, resume_from_checkpoint", loop=resumed, note="the losses of the run that was not interrupted, to 1e-4"
    ),
    Training("Trainer, bf16", loop=trainer(bf16=True), tolerance=1e-2, note=BITS8),
    Training("TRL SFT", loop=sft()),
    Training("TRL SFT, which makes the adapter", loop=sft(peft_config=True), make=without_adapter),
    Training("TRL DPO, reference by `disable_adapter`", loop=dpo(peft_config=True), make=without_adapter),
    Training("TRL DPO, of a PEFT model", loop=dpo(peft_config=False)),
    Training("TRL reward model", loop=reward, make=scored),
)

SECTIONS = (Section("Training: trainers", TRAINERS),)
