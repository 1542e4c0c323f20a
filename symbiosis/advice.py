"""What to do instead: whoever asks for base weights is told the name of the method that asked, and a way out.

One rule: the call stack is read for a message only. Nothing is decided by who asked.
"""

from __future__ import annotations

import inspect

ACTIVATIONS = "choose a method that works on activations, such as LoRA or IA3 (docs/compatibility.md)"
PLAIN_INIT = "use init_lora_weights=True, 'gaussian' or 'eva'"
WRAP_LATER = (
    "add the adapter where the base weights are, then call conn.wrap(peft_model): training needs them no more"
)

# By a word in the name of the peft function, file or folder that asked; the innermost that matches wins.
ADVICE = {
    "pissa": ("PiSSA initialisation", PLAIN_INIT),
    "olora": ("OLoRA initialisation", PLAIN_INIT),
    "loftq": ("LoftQ initialisation", PLAIN_INIT),
    "corda": ("CorDA initialisation", PLAIN_INIT),
    "lora_ga": ("LoRA-GA initialisation", PLAIN_INIT),
    "loraga": ("LoRA-GA initialisation", PLAIN_INIT),
    "mica": ("MiCA initialisation", PLAIN_INIT),
    "unmerge": ("unmerging adapters", "keep the adapter apart; nothing was merged here"),
    "merge": (
        "merging adapters into the base",
        "save the adapter with save_pretrained() and merge it where the base weights are, with plain peft",
    ),
    "dora": ("DoRA", "use LoRA or rsLoRA (use_dora=False), or symbiosis.connect(url, reveal_adapter=True)"),
}


def who_asked() -> tuple[str, str]:
    """(the peft method on the call stack, what to do instead)."""
    for frame in inspect.stack(context=0)[2:]:
        path = frame.filename.replace("\\", "/")
        if "/peft/" not in path:
            continue
        for word, advice in ADVICE.items():
            if word in frame.function.lower() or word in path.rpartition("/")[2]:
                return advice
    return "this operation", ACTIVATIONS


def refusal(operation: str, module_name: str) -> str:
    """The message for an operation that needs the values of a base weight."""
    what, instead = who_asked()
    module = f" of {module_name}" if module_name else ""
    return (
        f"{what} needs the values of the base weight{module} (called {operation}), which stays on the server. "
        f"Instead, {instead}"
    )
