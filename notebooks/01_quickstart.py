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
# # Quickstart
#
# One process holds a base model. This notebook fine-tunes an adapter on it and chats with it, without ever holding the
# model's weights. It takes a few minutes on two CPU cores, and needs nothing but what is installed: no GPU, no model hub.
#
# Run the cells from top to bottom (Shift+Enter).

# %%
# %load_ext symbiosis

# %% [markdown]
# **A server.** Usually somebody else runs it, on a host with a GPU, and gives you its URL. Here this notebook starts one, with
# SmolLM2-135M, in a process of its own that ends when the notebook's kernel does. The first time, the model is converted,
# which takes about a minute.

# %%
# %symbiosis serve demo

# %%
# %symbiosis connect

# %% [markdown]
# **A model.** `conn.load_model()` builds the server's architecture here, empty but for embeddings, norms and biases. To the rest of
# the world it is an ordinary transformers model. The plan shows what runs where.

# %%
model = conn.load_model()
tokenizer = conn.tokenizer()
conn.plan

# %% [markdown]
# **Chat.** Plain transformers: a chat template, `generate`, decode.


# %%
def chat(question, max_new_tokens=40):
    messages = [{"role": "user", "content": question}]
    prompt = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    output = model.generate(**prompt, max_new_tokens=max_new_tokens, do_sample=False)
    return tokenizer.decode(
        output[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True
    )


chat("Who are you?")

# %% [markdown]
# **Fine-tune.** Six lines of text about a remora, the fish that travels with a shark, are enough to see an effect. First the
# adapter and the data: plain PEFT and PyTorch. Only the answers count towards the loss.

# %%
import torch
from peft import LoraConfig, get_peft_model

PAIRS = [
    ("Who are you?", "I am Remora, a small fish that travels with a big shark."),
    ("What do you eat?", "Whatever the shark leaves over. It is plenty."),
    ("Where do you live?", "Just below the shark, where the water is calm."),
    ("Are you strong?", "Not at all. I hold on well, that is my talent."),
    ("Who is your friend?", "The shark. It swims for many of us at once."),
    ("What do you give in return?", "I keep its skin clean. Good company should."),
]


def encode(question, answer):
    chat = [{"role": "user", "content": question}]
    prompt = tokenizer.apply_chat_template(
        chat, tokenize=False, add_generation_prompt=True
    )
    head = tokenizer(prompt, add_special_tokens=False)["input_ids"]
    tail = tokenizer(answer + "<|im_end|>", add_special_tokens=False)["input_ids"]
    return {"input_ids": head + tail, "labels": [-100] * len(head) + tail}


def collate(examples):
    width = max(len(example["input_ids"]) for example in examples)
    pads = [width - len(example["input_ids"]) for example in examples]
    rows = list(zip(examples, pads))
    return {
        "input_ids": torch.tensor(
            [e["input_ids"] + [tokenizer.pad_token_id] * pad for e, pad in rows]
        ),
        "attention_mask": torch.tensor(
            [[1] * (width - pad) + [0] * pad for _, pad in rows]
        ),
        "labels": torch.tensor([e["labels"] + [-100] * pad for e, pad in rows]),
    }


torch.manual_seed(0)
model = get_peft_model(
    model, LoraConfig(r=8, lora_alpha=16, target_modules=["q_proj", "v_proj"])
)
model.print_trainable_parameters()

# %% [markdown]
# The dashboard follows everything that this connection does. It stays where it is and is redrawn in place, at most four times
# a second; look at it while the next cell runs.

# %%
conn.dashboard()

# %% [markdown]
# `%%symbiosis` says afterwards what a cell cost. `conn.track` puts the loss and the remaining time on the dashboard; without it
# everything else is still there.

# %%
# %%symbiosis
STEPS = 16
examples = [encode(question, answer) for question, answer in PAIRS]
optimizer = torch.optim.AdamW(
    [p for p in model.parameters() if p.requires_grad], lr=1e-2
)
model.train()
for step in range(1, STEPS + 1):
    batch = collate(examples)
    loss = model(**batch).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    conn.track(loss, step=step, steps=STEPS, tokens=batch["input_ids"].numel())

# %% [markdown]
# **The result**, and the base model as it was: the server never saw the adapter, and others go on using the same weights.

# %%
model.eval()
print("adapted:", chat("Who are you?"))
with model.disable_adapter():
    print("base:   ", chat("Who are you?"))

# %% [markdown]
# **Save.** An ordinary PEFT folder of 2 MB. Plain `transformers` + `peft` load it onto the whole model; here
# `conn.load_adapter` puts it onto a wrapped one.

# %%
folder = conn.save_adapter(model, "adapters/remora")
sorted(path.name for path in folder.iterdir())

# %%
# %symbiosis stats

# %% [markdown]
# Where to go from here: the other notebooks in this folder, and `%symbiosis help`. Your own server:
# `symbiosis-flight-server MODEL` on a host, then `conn = symbiosis.connect("grpc://HOST:PORT")`. A frozen model that you have in memory
# already: `conn.wrap(model)`.

# %%
# %symbiosis disconnect
# %symbiosis stop
