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
# # Trainer and TRL, unchanged
#
# A wrapped model is a transformers model, so the trainers take it as they are. The only line of ours in a training script is the one that
# brings the model. A callback, if you like, shows the training on the dashboard.

# %%
# %load_ext symbiosis
# %symbiosis serve demo
# %symbiosis connect

# %%
import os

from symbiosis.integrations.demo_data import Pair, encode

STEPS = 2 if os.environ.get("NOTEBOOKS_SHORT") else 6
tokenizer = conn.tokenizer()
PAIRS = [
    Pair("Who are you?", "I am Remora, a small fish that travels with a big shark."),
    Pair("What do you eat?", "Whatever the shark leaves over. It is plenty."),
    Pair("Where do you live?", "Just below the shark, where the water is calm."),
    Pair("Are you strong?", "Not at all. I hold on well, that is my talent."),
]

# %%
conn.dashboard()

# %% [markdown]
# ## The transformers Trainer

# %%
import torch
from peft import LoraConfig, get_peft_model
from transformers import DataCollatorForSeq2Seq, Trainer, TrainingArguments

from symbiosis.integrations.trainer import DashboardCallback

model = conn.load_model()  # <- the line of ours; from_pretrained(...) elsewhere
torch.manual_seed(0)
model = get_peft_model(model, LoraConfig(r=8, target_modules=["q_proj", "v_proj"]))
examples = [encode(pair, tokenizer) for pair in PAIRS]
rows = [
    {"input_ids": example.input_ids, "labels": example.labels} for example in examples
]
args = TrainingArguments(
    "runs/trainer",
    max_steps=STEPS,
    per_device_train_batch_size=4,
    learning_rate=1e-2,
    logging_steps=1,
    report_to="none",
    save_strategy="no",
    disable_tqdm=True,
    use_cpu=True,
    dataloader_pin_memory=False,
)
trainer = Trainer(
    model,
    args,
    train_dataset=rows,
    data_collator=DataCollatorForSeq2Seq(tokenizer),
    callbacks=[DashboardCallback(conn)],
)
trainer.train().training_loss

# %% [markdown]
# ## TRL's SFTTrainer
#
# It makes the adapter itself, and the chat template turns messages into tokens.

# %%
from datasets import Dataset
from trl import SFTConfig, SFTTrainer

data = Dataset.from_list(
    [
        {
            "messages": [
                {"role": "user", "content": pair.question},
                {"role": "assistant", "content": pair.answer},
            ]
        }
        for pair in PAIRS
    ]
)
args = SFTConfig(
    "runs/sft",
    max_steps=STEPS,
    per_device_train_batch_size=4,
    learning_rate=1e-2,
    logging_steps=1,
    report_to="none",
    save_strategy="no",
    disable_tqdm=True,
    use_cpu=True,
    bf16=False,
    activation_checkpointing=False,
    dataloader_pin_memory=False,
)
sft = SFTTrainer(
    conn.load_model(),  # <- again
    args,
    train_dataset=data,
    processing_class=tokenizer,
    peft_config=LoraConfig(
        r=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"
    ),
    callbacks=[DashboardCallback(conn)],
)
sft.train().training_loss

# %% [markdown]
# What comes out is an ordinary PEFT model either way.

# %%
conn.save_adapter(sft.model, "adapters/sft")

# %%
# %symbiosis disconnect
# %symbiosis stop
