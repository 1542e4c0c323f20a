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
# # Where does the time go?
#
# Four tools, from the quickest to the most exact: the cell magic, the difference of two stats, the dashboard, and the events themselves.

# %%
# %load_ext symbiosis
# %symbiosis serve demo
# %symbiosis connect

# %%
import torch

model = conn.load_model()
tokens = torch.randint(10, 1000, (2, 64))

# %% [markdown]
# **A cell.** *local* is this notebook's own work, *compute* the server's, *queue* waiting for others there, *network* what lies between,
# *serialise* packing and unpacking.

# %%
# %%symbiosis
with torch.no_grad():
    model(input_ids=tokens)

# %% [markdown]
# **A piece of code**: stats are sums since connect, and can be subtracted.

# %%
before = conn.stats()
model(input_ids=tokens, labels=tokens)  # with gradients to come, more and smaller calls
conn.stats() - before

# %% [markdown]
# **Everything, live**: `conn.dashboard()` as the last line of a cell, or `%symbiosis dashboard`. It also draws what other threads do, and stays
# below 1% of the time.

# %%
conn.dashboard()

# %%
import os

for _ in range(1 if os.environ.get("NOTEBOOKS_SHORT") else 4):
    with torch.no_grad():
        model(input_ids=tokens)

# %% [markdown]
# **Every call** is an event on `conn.bus`. A handler sees what was called, with how many tokens and bytes, and how long each part took.

# %%
from collections import defaultdict

seen = defaultdict(list)
stop = conn.bus.subscribe(
    lambda event: seen[event.modules[-1].split(".")[-1]].append(event)
)
model(input_ids=tokens, labels=tokens)
stop()

for name, events in sorted(
    seen.items(), key=lambda item: -sum(e.elapsed_s for e in item[1])
):
    total_ms = 1e3 * sum(e.elapsed_s for e in events)
    compute_ms = 1e3 * sum(e.compute_s for e in events)
    megabytes = sum(e.bytes_out + e.bytes_in for e in events) / 1e6
    print(
        f"{name:12}{len(events):>4} calls {total_ms:>8,.0f} ms, of which computing {compute_ms:>7,.0f} ms {megabytes:>8,.1f} MB"
    )

# %% [markdown]
# **Try a variant.** `granularity="module"` sends a frozen MLP as one call: fewer bytes, half as many products again in the backward pass.

# %%
coarse = conn.load_model(granularity="module")
for name, variant in (("auto", model), ("module", coarse)):
    variant(
        input_ids=tokens, labels=tokens
    )  # the first pass learns which layers share an input
    before = conn.stats()
    variant(input_ids=tokens, labels=tokens)
    took = conn.stats() - before
    print(
        f"{name:8}{took.calls:>5} calls {(took.bytes_out + took.bytes_in) / 1e6:>8,.1f} MB"
    )

# %%
# %symbiosis disconnect
# %symbiosis stop
