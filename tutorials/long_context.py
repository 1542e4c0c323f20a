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
# # Long context on the client's memory
#
# The server holds weights, and nothing of your context: keys and values of attention are yours, and so is their memory. So it is you who decides
# how long a context may be, and one client's long context takes nothing from the others.

# %%
import os

import torch
import transformers

import symbiosis

SHORT = bool(os.environ.get("NOTEBOOKS_SHORT"))
config = transformers.LlamaConfig(
    hidden_size=256,
    intermediate_size=688,
    num_hidden_layers=4,
    num_attention_heads=8,
    num_key_value_heads=2,
    vocab_size=96,
    max_position_embeddings=8192,
)
server = symbiosis.serve(transformers.LlamaForCausalLM(config), port=0)
conn = symbiosis.connect(server.url)
model = conn.load_model()


# %% [markdown]
# ## What a token costs you
#
# Two vectors per layer and key-value head. That is all that grows while you generate.


# %%
def cache_bytes(cache):
    return sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)


LENGTH = 512 if SHORT else 2048
prompt = torch.randint(0, 96, (1, LENGTH))
with torch.no_grad():
    output = model(input_ids=prompt, use_cache=True, logits_to_keep=1)
head_dim = config.hidden_size // config.num_attention_heads
formula = 2 * config.num_hidden_layers * config.num_key_value_heads * head_dim * 4
print(
    f"{cache_bytes(output.cache) / LENGTH:,.0f} bytes per token; the formula says {formula:,}"
)

# %% [markdown]
# ## The server does not notice
#
# Its memory is weights and the batch in hand. Feeding the prompt in pieces bounds the second, and the peak of your own activations as well.

# %%
from transformers import DynamicCache


def prefill(model, prompt, piece):
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        for start in range(0, prompt.shape[1], piece):
            output = model(
                input_ids=prompt[:, start : start + piece],
                cache=cache,
                use_cache=True,
                logits_to_keep=1,
            )
    return output


whole = output.logits[:, -1]
pieces = prefill(model, prompt, piece=256)
print(
    "largest difference of the logits:",
    (pieces.logits[:, -1] - whole).abs().max().item(),
)
print("tokens in the cache:", pieces.cache.get_seq_length())

# %% [markdown]
# ## Less memory per token
#
# The cache is a transformers cache, so everything that transformers offers applies: a static or quantised cache, offloading to the CPU,
# a sliding window. In half precision, for instance, it is half:

# %%
half = conn.load_model(dtype=torch.bfloat16)
with torch.no_grad():
    small = half(input_ids=prompt, use_cache=True, logits_to_keep=1)
print(f"{cache_bytes(small.cache) / LENGTH:,.0f} bytes per token")

# %% [markdown]
# ## Training on long texts
#
# With gradients it is activations that grow, on your side only. `activation_checkpointing` (gradient checkpointing) keeps one tensor per layer and
# computes the rest again, which means asking the server again: half as many calls more, for a fraction of the memory.

# %%
ids = prompt[:, : LENGTH // 2]


def calls_of(step):
    before = conn.stats()
    step()
    return (conn.stats() - before).calls


def train_step():
    model.train()
    model(input_ids=ids, labels=ids, use_cache=False).loss.backward()


for parameter in model.model.norm.parameters():
    parameter.requires_grad_(True)
model.enable_input_require_grads()
train_step()
plain = calls_of(train_step)
model.activation_checkpointing_enable()
print(f"{plain} calls a step, {calls_of(train_step)} with checkpointing")

# %%
conn.close()
print("drained:", server.close())
