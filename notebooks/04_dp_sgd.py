# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # DP-SGD: an adapter that does not tell on its data
#
# Masks hide your data from the server. This notebook is about somebody else: whoever gets the *finished adapter*, and asks it about a record
# that it was trained on. DP-SGD bounds what he can learn, whatever he does: each record's gradient is clipped, and noise is added, so
# that training with the record and without it look alike. How alike is a number, epsilon; less is better.
#
# It takes a few minutes on two CPU cores.

# %%
# %load_ext symbiosis
# %symbiosis serve demo
# %symbiosis connect

# %% [markdown]
# ## Records
#
# Real questions and answers. One pair is one record, and a record is what is protected: a pair that stood in the data twice would have half
# the protection.

# %%
import os
import random

import torch
from torch.utils.data import DataLoader

from symbiosis.integrations.demo_data import Example, load_pairs, pad, split_pairs

SHORT = bool(os.environ.get("NOTEBOOKS_SHORT"))
RECORDS, BATCH, HELD_OUT = (64, 16, 8) if SHORT else (320, 40, 48)
tokenizer = conn.tokenizer()


def encode(pair):
    head = tokenizer(f"Question: {pair.question}\nAnswer:").input_ids
    tail = tokenizer(f" {pair.answer}<|im_end|>").input_ids
    return {"input_ids": head + tail, "labels": [-100] * len(head) + tail}


def short(pairs, count):
    examples = [encode(pair) for pair in pairs]
    examples = [e for e in examples if len(e["input_ids"]) <= 22]  # to be quick
    return random.Random(0).sample(examples, count)


def collate(examples):
    return pad([Example(**e) for e in examples], tokenizer.pad_token_id)


mine, others = split_pairs(load_pairs(), held_out=0.2)
records, held_out = short(mine, RECORDS), collate(short(others, HELD_OUT))
print(tokenizer.decode(records[0]["input_ids"]))

# %% [markdown]
# ## An adapter, small on purpose
#
# The noise is added to every parameter, the signal is shared by all. So under DP fewer parameters and larger batches learn more: LoRA on two
# layers will do here.

# %%
from peft import LoraConfig, get_peft_model

from symbiosis.privacy.dp import record_loss

CONFIG = LoraConfig(
    r=4,
    lora_alpha=8,
    target_modules=["q_proj", "v_proj"],
    layers_to_transform=[28, 29],
    task_type="CAUSAL_LM",
)


def fresh():
    torch.manual_seed(0)
    model = get_peft_model(conn.load_model(), CONFIG).train()
    return model, optimizer_of(model)


def optimizer_of(model):
    return torch.optim.AdamW(
        [p for p in model.parameters() if p.requires_grad], lr=2e-2
    )


def loss_of(model, batch):
    """A mean over records of each record's mean over its tokens."""
    inputs = {key: value for key, value in batch.items() if key != "labels"}
    return record_loss(model(**inputs).logits, batch["labels"])


def held_out_loss(model):
    model.eval()
    with torch.no_grad():
        loss = loss_of(model, held_out).item()
    model.train()
    return loss


model, _ = fresh()
model.print_trainable_parameters()
before = held_out_loss(model)
print(f"loss on pairs that it is not trained on: {before:.3f}")

# %%
conn.dashboard()

# %% [markdown]
# ## Without privacy, to compare

# %%
EPOCHS = 2
model, optimizer = fresh()
loader = DataLoader(records, batch_size=BATCH, shuffle=True, collate_fn=collate)
plain_losses = []
for epoch in range(EPOCHS):
    for batch in loader:
        optimizer.zero_grad()
        loss = loss_of(model, batch)
        loss.backward()
        optimizer.step()
        plain_losses.append(loss.item())
        conn.track(loss, step=len(plain_losses), steps=EPOCHS * len(loader))
plain = held_out_loss(model)
print(f"{plain_losses[0]:.3f} -> {plain_losses[-1]:.3f}, held out {plain:.3f}")

# %% [markdown]
# ## With it
#
# `make_private` takes what a training loop has anyway, and a budget: epsilon 8 after two epochs. It returns the same model, an optimizer that
# clips and adds noise, and a loader that draws each record by chance. The model's loss becomes the mean over records. The loop stays as it was.

# %%
import warnings

from symbiosis.privacy import make_private

# PyTorch remarks at each step that the first adapter's input needs no gradient. It does not: what lies below is frozen.
warnings.filterwarnings("ignore", "Full backward hook is firing")

BUDGET = {"target_epsilon": 8.0, "target_delta": 1e-4, "epochs": EPOCHS}
model, optimizer = fresh()
model, optimizer, loader = make_private(
    model,
    optimizer,
    DataLoader(records, batch_size=BATCH, collate_fn=collate),
    max_grad_norm=1.0,
    **BUDGET,
)
print(f"chance of a record to be in a batch: {1 / len(loader):.3f}")
print(f"noise: {optimizer.spent().noise_multiplier:.2f} times the clipping norm")

# %% [markdown]
# The first epoch. With `spent=`, the dashboard shows epsilon as well. Batches differ in size, which is part of the bound; epsilon grows fast at first and slowly later.

# %%
private_losses, epsilons = [], []


def train_one_epoch():
    print("step  records   loss  epsilon")
    for batch in loader:
        optimizer.zero_grad()
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()  # checked, clipped, with noise
        spent = optimizer.spent()
        private_losses.append(loss.item())
        epsilons.append(spent.epsilon)
        conn.track(loss, step=spent.steps, steps=EPOCHS * len(loader), spent=spent)
        size = len(batch["labels"])
        print(f"{spent.steps:4} {size:8} {loss.item():6.3f} {spent.epsilon:8.2f}")


train_one_epoch()

# %% [markdown]
# ## Stop, and go on another day
#
# What was spent is part of the optimizer's state: save both, and the count goes on where it was. A state that does not say what was spent
# is refused, for it would start from zero again.

# %%
conn.save_adapter(model, "adapters/private")
torch.save(optimizer.state_dict(), "private-optimizer.pt")

# %%
model = conn.load_adapter(conn.load_model(), "adapters/private", is_trainable=True)
optimizer = optimizer_of(model.train())
model, optimizer, loader = make_private(
    model,
    optimizer,
    DataLoader(records, batch_size=BATCH, collate_fn=collate),
    max_grad_norm=1.0,
    **BUDGET,
)
optimizer.load_state_dict(torch.load("private-optimizer.pt", weights_only=True))
optimizer.spent()

# %%
train_one_epoch()
private = held_out_loss(model)
optimizer.spent()

# %% [markdown]
# ## What it cost
#
# Loss on the pairs that neither was trained on. With so few records the noise is felt; it shrinks with the size of a batch, and a
# hundred times as many records allow a hundred times larger ones for the same epsilon.

# %%
from IPython.display import HTML

from symbiosis.notebook.charts import line_chart

print(f"before            {before:.3f}")
print(f"without privacy   {plain:.3f}")
print(f"epsilon {epsilons[-1]:.1f}       {private:.3f}")
words = "training loss over steps: without privacy in blue, with it in orange"
steps = [list(enumerate(losses, 1)) for losses in (plain_losses, private_losses)]
growth = f"epsilon over steps, up to {epsilons[-1]:.2f}"
HTML(
    f"<p>{words}</p>{line_chart(steps, words, floor=None)}"
    f"<p>{growth}</p>{line_chart([list(enumerate(epsilons, 1))], growth)}"
)

# %% [markdown]
# ## What it refuses
#
# The bound holds only if each record's gradient is really its own. For some methods the hooks that find them find nothing, or something wrong,
# and without an error. These are refused by name.

# %%
from peft import IA3Config

from symbiosis.errors import UnsupportedMethodError

model = get_peft_model(conn.load_model(), IA3Config(task_type="CAUSAL_LM"))
loader = DataLoader(records, batch_size=BATCH, collate_fn=collate)
try:
    make_private(model, optimizer_of(model), loader, **BUDGET)
except UnsupportedMethodError as error:
    print(error)

# %%
# %symbiosis disconnect
# %symbiosis stop

# %% [markdown]
# What to take along:
#
# - Epsilon bounds what the *adapter* tells about *one record*. It does not hide activations from the server while you train: that is
#   what masks are for (notebook 03), and both go together.
# - Look at the loss without DP first, then spend the budget once: each further run on the same records adds to what is given away.
# - With transformers' `Trainer`, `PrivacyCallback` from `symbiosis.integrations.private_trainer` does the same.
#
# More: `docs/security.md`.
