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
# # How a remote linear works
#
# From a matrix product in numpy to the layer that this project puts into your model, in six steps. Each step runs, and each is checked against
# the one before.

# %% [markdown]
# ## 1. A frozen linear is a function
#
# Fine-tuning with an adapter never changes the base matrix `W`. So all that a model needs of it is two functions of activations: the product
# going forward, and the product with the transposed matrix coming back.

# %%
import numpy as np

rng = np.random.default_rng(0)
d_in, d_out, n_tokens = 6, 4, 3
W = rng.normal(size=(d_out, d_in))


def forward(x):  # [N, d_in] -> [N, d_out]
    return x @ W.T


def grad_input(dy):  # [N, d_out] -> [N, d_in]
    return dy @ W


# %% [markdown]
# Is `grad_input` right? The gradient of any loss with respect to `x` can be had by wiggling `x`. Take the loss `sum(forward(x) * dy)`:

# %%
x, dy = rng.normal(size=(n_tokens, d_in)), rng.normal(size=(n_tokens, d_out))
wiggled = np.zeros_like(x)
for i in np.ndindex(*x.shape):
    up, down = x.copy(), x.copy()
    up[i] += 1e-6
    down[i] -= 1e-6
    wiggled[i] = ((forward(up) - forward(down)) * dy).sum() / 2e-6
np.abs(wiggled - grad_input(dy)).max()

# %% [markdown]
# Note what is *not* needed: `x`. The backward pass of a frozen linear does not look at what went in. Nothing has to be kept by whoever holds
# `W`, so a server of such functions has no memory of its clients.
#
# ## 2. Somebody else holds W
#
# Put the two functions behind a pipe, in another process. The client below has no `W`.

# %%
# %%writefile holder.py
import pickle
import sys

import numpy as np

W = np.random.default_rng(0).normal(size=(4, 6))
while True:
    try:
        op, value = pickle.load(sys.stdin.buffer)
    except EOFError:
        break
    result = value @ W.T if op == "forward" else value @ W
    pickle.dump(result, sys.stdout.buffer)
    sys.stdout.buffer.flush()

# %%
import pickle
import subprocess
import sys

holder = subprocess.Popen(
    [sys.executable, "holder.py"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
)


def call(op, value):
    pickle.dump((op, value), holder.stdin)
    holder.stdin.flush()
    return pickle.load(holder.stdout)


assert np.array_equal(call("forward", x), forward(x))

# %% [markdown]
# ## 3. Teach it to autograd
#
# PyTorch lets us say what a function's backward pass is. Ours is one more call; and `None` is saved.

# %%
import torch


class Remote(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return torch.from_numpy(call("forward", x.detach().numpy()))

    @staticmethod
    def backward(ctx, dy):
        return torch.from_numpy(call("grad_input", dy.numpy()))


xt = torch.from_numpy(x).requires_grad_()
(Remote.apply(xt) * torch.from_numpy(dy)).sum().backward()
np.abs(xt.grad.numpy() - wiggled).max()

# %% [markdown]
# ## 4. An adapter around it
#
# LoRA adds `B A x` to the product. `A` and `B` are here, the optimizer is here, the data is here. Only `x` and `y` travel.

# %%
A = torch.nn.Parameter(torch.randn(2, d_in, dtype=torch.float64) * 0.3)
B = torch.nn.Parameter(torch.zeros(d_out, 2, dtype=torch.float64))
target = torch.randn(
    n_tokens, d_out, dtype=torch.float64, generator=torch.Generator().manual_seed(0)
)
optimizer = torch.optim.Adam([A, B], lr=0.1)
for step in range(60):
    y = Remote.apply(xt) + xt @ A.T @ B.T
    loss = (y - target).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 20 == 0:
        print(f"{loss.item():.4f}")
holder.stdin.close()
holder.wait()

# %% [markdown]
# That is the whole idea. The rest is making it fast, safe and invisible.
#
# ## 5. Ours
#
# `symbiosis.serve` is the holder, with a wire format, limits, batching over clients and errors that speak; `conn.wrap` puts a `RemoteLinear`
# in the place of every frozen linear of a model. A tiny random Llama is enough to see it.

# %%
import copy

import transformers

import symbiosis

config = transformers.LlamaConfig(
    hidden_size=32,
    intermediate_size=56,
    num_hidden_layers=2,
    num_attention_heads=4,
    vocab_size=96,
)
local = transformers.LlamaForCausalLM(config)
server = symbiosis.serve(local, port=0)
conn = symbiosis.connect(server.url)
remote = conn.wrap(copy.deepcopy(local))
remote.model.layers[0].self_attn.q_proj

# %%
ids = torch.randint(0, 96, (2, 9))
(remote(input_ids=ids).logits - local(input_ids=ids).logits).abs().max().item()

# %% [markdown]
# ## 6. What it adds to step 3
#
# Layers that are given the same tensor share one call (q, k and v; gate and up). Which ones do is learnt in the first pass, not looked up in a
# table of architectures. And where no gradient is needed, all between two attentions goes out as one call.

# %%
print(conn.plan)
for name, grad in (("with gradients", True), ("without", False)):
    with torch.set_grad_enabled(grad):
        remote(input_ids=ids)  # learns
        before = conn.stats()
        remote(input_ids=ids)
    print(
        f"{name}: {(conn.stats() - before).calls} calls for {config.num_hidden_layers} layers and a head"
    )

# %%
conn.close()
print("drained:", server.close())

# %% [markdown]
# To read on: `symbiosis/remote.py` is step 3, `symbiosis/sharing.py` and `symbiosis/lazy.py` are step 6, `docs/architecture.md` says why.
