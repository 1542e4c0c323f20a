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
# # Reading the time breakdown
#
# "Why is it slow?" has five answers, and `conn.stats()` tells them apart. Here each of them is provoked on purpose, with a small model, so that you
# recognise it when you meet it.
#
# | part | is | grows with |
# |---|---|---|
# | local | your side: adapters, attention, loss, optimizer, data | context length, adapter size, slow data |
# | serialise | tensors to bytes and back | tokens x width |
# | network | what neither end accounts for | distance, bytes, number of calls |
# | queue | waiting at the server for others, or to be batched with them | other clients |
# | compute | products with the base | tokens x parameters |

# %%
import threading
import time

import torch
import transformers

import symbiosis

config = transformers.LlamaConfig(
    hidden_size=256,
    intermediate_size=688,
    num_hidden_layers=4,
    num_attention_heads=4,
    vocab_size=96,
)
server = symbiosis.serve(transformers.LlamaForCausalLM(config), port=0)
conn = symbiosis.connect(server.url)
model = conn.load_model()
PARTS = ("local", "serialise", "network", "queue", "compute")


def measure(name, work):
    work()  # the first pass learns which layers share a call
    before = conn.stats()
    work()
    took = conn.stats() - before
    total = sum(getattr(took, f"{part}_s") for part in PARTS)
    shares = "  ".join(
        f"{part} {getattr(took, f'{part}_s') / total:4.0%}" for part in PARTS
    )
    print(f"{name:22}{took.calls:>4} calls  {shares}")
    return took


def step(batch, length):
    ids = torch.randint(0, 96, (batch, length))
    return lambda: model(input_ids=ids, labels=ids).loss


# %% [markdown]
# **Few tokens: the calls cost more than the products.** What to do: larger batches; without gradients, calls are fused by themselves.

# %%
few = measure("2 x 4 tokens", step(2, 4))

# %% [markdown]
# **Many tokens: computing.** This is where you want to be. More speed is a matter of the server's hardware.

# %%
many = measure("8 x 256 tokens", step(8, 256))

# %% [markdown]
# **Local: your own side.** A slow data loader is played by a pause. What to do: it is the usual PyTorch tuning; the server has nothing to do with it.


# %%
def with_slow_data():
    step(2, 64)()
    time.sleep(0.3)
    step(2, 64)()


slow = measure("slow data", with_slow_data)

# %% [markdown]
# **Queue: others.** Two threads play other clients. What to do: nothing, if *requests per batch* rises: your products are computed together, and
# each costs less. If it does not rise, the server is simply full.

# %%
others_go_on = True


def other():
    with symbiosis.connect(server.url) as theirs:
        theirs_model = theirs.load_model()
        ids = torch.randint(0, 96, (4, 128))
        while others_go_on:
            theirs_model(input_ids=ids, labels=ids)


threads = [threading.Thread(target=other) for _ in range(2)]
for thread in threads:
    thread.start()
time.sleep(2)
crowd = measure("with two others", step(4, 128))
others_go_on = False
for thread in threads:
    thread.join()
print(f"requests per batch: {crowd.mean_batch:.2f}")

# %% [markdown]
# **Network** needs distance, which one machine does not have. A rule: every call pays one round trip, so `calls x round trip` is what you lose per
# step. The round trip is the time of the smallest call:

# %%
start = time.perf_counter()
conn.health()
round_trip = time.perf_counter() - start
print(
    f"{1e3 * round_trip:.1f} ms; a step of {few.calls} calls over a line of 20 ms would wait {few.calls * 0.020:.1f} s"
)

# %%
conn.close()
print("drained:", server.close())
