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
# # Many adapters on one base
#
# Three people fine-tune three kinds of adapter at the same time, on weights that exist once. Here the people are processes that
# this notebook starts; they could as well be notebooks on other machines.

# %%
# %load_ext symbiosis
# %symbiosis serve demo
# %symbiosis connect

# %% [markdown]
# **A client** is a script of ours below: connect, load, adapt, train, say what it took. Nothing in it knows of the others.

# %%
# %%writefile client.py
import json
import sys

import peft
import torch

import symbiosis
from symbiosis.integrations import memory
from symbiosis.integrations.demo_data import Pair, encode, pad

method, url, steps = sys.argv[1], sys.argv[2], int(sys.argv[3])
CONFIGS = {
    "LoRA": (peft.LoraConfig(r=8, target_modules=["q_proj", "v_proj"]), 1e-2),
    "IA3": (peft.IA3Config(task_type="CAUSAL_LM"), 5e-2),
    "VeRA": (peft.VeraConfig(r=64, target_modules=["q_proj"]), 5e-2),
}
config, rate = CONFIGS[method]
before = memory.resident_bytes()
conn = symbiosis.connect(url)
tokenizer = conn.tokenizer()
torch.manual_seed(0)
model = peft.get_peft_model(conn.load_model(), config)
pairs = [
    Pair("Who are you?", f"I am {method}."),
    Pair("Are you alone?", "No, we are three."),
]
batch = pad([encode(pair, tokenizer) for pair in pairs], tokenizer.pad_token_id)
optimizer = torch.optim.AdamW(
    [p for p in model.parameters() if p.requires_grad], lr=rate
)
losses = []
for step in range(steps):
    loss = model(**batch).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
trainable = sum(p.numel() for p in model.parameters() if p.requires_grad)
stats = conn.stats()
print(
    json.dumps(
        {
            "method": method,
            "trainable": trainable,
            "first": losses[0],
            "last": losses[-1],
            "mb": (memory.peak_bytes() - before) / 1e6,
            "batch": stats.mean_batch,
        }
    )
)

# %% [markdown]
# **All at once.**

# %%
import json
import os
import subprocess
import sys

STEPS = 2 if os.environ.get("NOTEBOOKS_SHORT") else 10
METHODS = ["LoRA", "IA3", "VeRA"]
processes = [
    subprocess.Popen(
        [sys.executable, "client.py", method, conn.url, str(STEPS)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    for method in METHODS
]
results = [
    json.loads(process.communicate()[0].splitlines()[-1]) for process in processes
]

# %% [markdown]
# **What it took.** Each client holds an embedding, norms, its adapter and its activations; the base model is there once. With a
# copy each, the last column would be needed as often as there are clients.

# %%
base = conn.manifest.base_bytes / 1e6
print(f"{'':8}{'trainable':>10}{'loss':>16}{'requests/batch':>16}{'memory':>10}")
for r in results:
    loss = f"{r['first']:.2f} -> {r['last']:.2f}"
    print(
        f"{r['method']:8}{r['trainable']:>10,}{loss:>16}{r['batch']:>16.2f}{r['mb']:>7,.0f} MB  {'#' * int(r['mb'] / 20)}"
    )
print(
    f"{'base':8}{'':>10}{'':>16}{'':>16}{base:>7,.0f} MB  {'#' * int(base / 20)}  once, on the server"
)

# %% [markdown]
# *requests/batch* says how often the clients met: the server computes requests for the same layer as one product, whatever adapter
# they are for. What the server saw of all this:

# %%
server = conn.server_stats()
print(
    f"{server.requests:,} requests in {server.batches:,} batches, {server.tokens:,} tokens"
)

# %%
# %symbiosis disconnect
# %symbiosis stop
