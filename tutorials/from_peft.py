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
# # From plain PEFT to symbiosis in three lines
#
# You have a script that fine-tunes with PEFT. This is what changes, and what does not. The base model is a tiny random Llama, so that both
# versions run here side by side.

# %%
import tempfile

import torch
import transformers
from peft import LoraConfig, PeftModel, get_peft_model

config = transformers.LlamaConfig(
    hidden_size=32,
    intermediate_size=56,
    num_hidden_layers=2,
    num_attention_heads=4,
    vocab_size=96,
)
folder = tempfile.mkdtemp()
transformers.LlamaForCausalLM(config).save_pretrained(folder)
ids = torch.randint(0, 96, (4, 12))


def train(model):
    torch.manual_seed(0)
    model = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(5):
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"{loss.item():.6f}")
    return model


# %% [markdown]
# ## Before

# %%
before = train(transformers.AutoModelForCausalLM.from_pretrained(folder))

# %% [markdown]
# ## After
#
# Three lines: import, connect, and `conn.load_model()` instead of `from_pretrained`. (The server is usually there already; here we start one.)

# %%
server_model = transformers.AutoModelForCausalLM.from_pretrained(folder)

# %%
import symbiosis  # 1

server = symbiosis.serve(server_model, port=0)
conn = symbiosis.connect(server.url)  # 2
after = train(conn.load_model())  # 3

# %% [markdown]
# The losses are the same numbers. Everything in `train` stayed as it was: the adapter, the optimizer, the loop; `Trainer` and TRL are no
# different.
#
# ## The adapter is an ordinary one

# %%
out = tempfile.mkdtemp()
after.save_pretrained(out)
plain = PeftModel.from_pretrained(
    transformers.AutoModelForCausalLM.from_pretrained(folder), out
)
with torch.no_grad():
    print(
        (plain(input_ids=ids).logits - after(input_ids=ids).logits).abs().max().item()
    )

# %% [markdown]
# ## If you have the model in memory
#
# `conn.wrap(model)` makes it remote in place, before or after `get_peft_model`, and frees its frozen weights. It compares hashes with the server
# first, so that an adapter is never trained against another base.

# %%
model = conn.wrap(transformers.AutoModelForCausalLM.from_pretrained(folder))
sum(p.numel() for p in model.parameters()), sum(p.numel() for p in plain.parameters())

# %% [markdown]
# ## What is different
#
# - Methods that read the values of base weights (PiSSA, OLoRA, LoftQ, merging) are refused by name: the weights are not here.
# - Speed depends on where the server is. The tutorial *Reading the time breakdown* says how to see what you pay.

# %%
try:
    after.merge_and_unload()
except symbiosis.SymbiosisError as error:
    print(error.code, "-", error)

# %%
conn.close()
print("drained:", server.close())
