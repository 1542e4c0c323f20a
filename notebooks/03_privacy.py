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
# # Privacy: what the server sees
#
# Your adapter, optimizer and data stay here. What travels are activations and gradients, and they tell more than one might think. This
# notebook sits down in the server's chair and reads along: first without protection, then with masks. At the end, attacks are run on each
# setting, with figures.

# %%
# %load_ext symbiosis
# %symbiosis serve demo
# %symbiosis connect

# %% [markdown]
# Masks come from a second server, the *dealer*. It holds the same base, and it must be run by somebody who does not share logs with the
# first: here two processes play two hosts. A dealer is no special program; any server of the same base will do.

# %%
import os

import torch

from symbiosis.integrations.audit import recorded
from symbiosis.notebook.session import KernelServer
from symbiosis.privacy import Masking

SHORT = bool(os.environ.get("NOTEBOOKS_SHORT"))
SECRET = "My password is swordfish, and on Monday I shall hand in my notice."

dealer = KernelServer("demo", ())  # a process that ends with this kernel
dealer.wait(lambda: None)

# %% [markdown]
# ## Without masks
#
# `recorded` is `symbiosis.connect` with a tape on the wire: `tape.exchanges` is every request as it left this process.

# %%
plain, plain_tape = recorded(conn.url)
tokenizer = plain.tokenizer()
ids = tokenizer(SECRET, return_tensors="pt").input_ids
model = plain.load_model(granularity="linear")  # as under masks, to compare
with torch.no_grad():
    plain_logits = model(ids).logits
first = plain_tape.exchanges[0]
print(first.op, "of", ", ".join(first.modules), "got", list(first.tensors[0].shape))

# %% [markdown]
# **Reading along.** What the first layer gets is the token's embedding, normed: a function of the token alone. Embedding and norm are
# part of the base, so the server has both; it looks each row up among the rows of all tokens, and takes the likeliest.

# %%
from symbiosis.integrations.demo_data import load_pairs
from symbiosis.privacy import audit

public = " ".join(pair.answer for pair in load_pairs())  # to know common words
public_ids = torch.tensor(tokenizer(public, verbose=False).input_ids)
rows = audit.first_layer_rows(model)
candidates = audit.Candidates(rows, public_ids)


def read(tape):
    """What the server makes of the first rows that it was sent."""
    seen = tape.exchanges[0].tensors[0][: ids.numel()]
    found = candidates.identify(seen, max(seen.double().std().item(), 0.1))
    return tokenizer.decode(found)


read(plain_tape)

# %% [markdown]
# Every word. TLS does not help against this: the server is the one who reads.
#
# ## With masks
#
# Each row leaves with a random row added, and the server multiplies the sum. The dealer was told the seed of the random row beforehand, and
# gave its product; subtract it, and the answer is the one of the bare row. The server has seen noise, the dealer a seed.

# %%
masked, masked_tape = recorded(conn.url, Masking(dealer=dealer.url))
model = masked.load_model()
with torch.no_grad():
    masked_logits = model(ids).logits
read(masked_tape)

# %% [markdown]
# The attack now says the same for every row: what is likeliest in any text. And what has it cost in accuracy?

# %%
difference = (masked_logits - plain_logits).abs().max() / plain_logits.abs().max()
print(f"largest difference of a logit, relative: {difference:.1e}")
print("row of a token, as it is: ", [f"{v:.2f}" for v in rows[ids[0, 0], :4].tolist()])
sent = masked_tape.exchanges[0].tensors[0][0]
print("row of a token, as it left:", [f"{v:.0f}" for v in sent[:4].tolist()])

# %% [markdown]
# ## Fine-tuning under masks
#
# Gradients are masked in the same way. The same few steps, with and without:

# %%
from peft import LoraConfig, get_peft_model

STEPS = 1 if SHORT else 4


def fine_tune(connection):
    torch.manual_seed(0)
    adapted = get_peft_model(
        connection.load_model(), LoraConfig(r=8, target_modules=["q_proj", "v_proj"])
    )
    optimizer = torch.optim.AdamW(
        [p for p in adapted.parameters() if p.requires_grad], lr=1e-2
    )
    losses = []
    for step in range(STEPS):
        loss = adapted(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        connection.track(loss, step=step + 1, steps=STEPS)
        losses.append(loss.item())
    return losses


# %% [markdown]
# The dashboard of a masked connection has a panel for its masks.

# %%
masked.dashboard()

# %%
for name, connection in (("plain", plain), ("masked", masked)):
    print(f"{name:8}", " ".join(f"{loss:.4f}" for loss in fine_tune(connection)))

# %% [markdown]
# What it took, and what was given away all the same: rows that are longer than ordinary ones are under a larger mask, and that can be seen.
# Rows that come again bit for bit are not sent again, for the mean of many masked copies would be the row.

# %%
masked.privacy.stats()

# %%
masked.close()
plain.close()
dealer.stop()
# %symbiosis disconnect
# %symbiosis stop

# %% [markdown]
# ## The audit
#
# One sentence is no proof. The audit runs real text through each setting, records it as we did, and tries:
#
# | attack | |
# |---|---|
# | tokens | look rows up, as above |
# | unmask | first take off the masks that the server itself drew |
# | adapter | find a LoRA's update by least squares, from two layers' inputs |
# | lengths | read the number of tokens off the size of a message |
# | repetition | the mean of many maskings of one row, beyond any budget |
#
# *Chance* is what the same attack makes of noise. *weak* is masking without a dealer, where the server draws the masks itself. It takes
# the first two layers of the demo model, and servers within this process.

# %%
import logging

from symbiosis.integrations.audit import demo_parts, run

# They would say that a client has sent enough rows to solve for the weights.
logging.getLogger("symbiosis.flight").setLevel(logging.ERROR)
report = run(*(demo_parts(2, 32) if SHORT else demo_parts(16, 64)))
report

# %% [markdown]
# What to take along:
#
# - Plain traffic is an open letter to whoever runs the server; *weak* is one in an envelope that the reader sealed himself.
# - With a dealer, looking up and least squares find what they find in noise. It rests on one assumption: that server and dealer do not talk.
# - Lengths, times and which modules are used are hidden by nothing here.
# - Single precision halves the bytes, and pays for it: its masks are weak enough for a thousand repetitions to average them away.
#
# More: `docs/security.md`, and the tutorial on what noise can and cannot hide.
