"""What to do instead: whoever asks for base weights is told the name of the method that asked, and a way out.

One rule: the call stack is read for a message only. Nothing is decided by who asked.
"""

from __future__ import annotations

import inspect
import re

ACTIVATIONS = "choose a method that works on activations, such as LoRA or IA3 (docs/compatibility.md)"
PLAIN_INIT = "use init_lora_weights=True, 'gaussian' or 'eva'"
WRAP_LATER = (
    "make the adapter on a model that has its weights and call conn.wrap(model) after that, which serves methods that "
    "read the weights only once; or " + ACTIVATIONS
)
# By a word in the qualified name of a peft function, or in its file's name; the innermost that matches wins.
ADVICE = {
    "pissa": ("PiSSA initialisation", PLAIN_INIT),
    "olora": ("OLoRA initialisation", PLAIN_INIT),
    "loftq": ("LoftQ initialisation", PLAIN_INIT),
    "corda": ("CorDA initialisation", PLAIN_INIT),
    "lora_ga": ("LoRA-GA initialisation", PLAIN_INIT),
    "loraga": ("LoRA-GA initialisation", PLAIN_INIT),
    "mica": ("MiCA initialisation", f"{PLAIN_INIT}, or {WRAP_LATER}"),
    "kasa": ("KaSA", "use LoRA without kasa_config"),
    "unmerge": ("unmerging adapters", "keep the adapter apart; nothing was merged here"),
    "merge": (
        "merging adapters into the base",
        "save the adapter with save_pretrained() and merge it where the base weights are, with plain peft",
    ),
    "dora": ("DoRA", "use LoRA or rsLoRA (use_dora=False)"),
    "paramwrapper": (
        "LoRA on experts that are one parameter (target_parameters)",
        'target the attention layers, or keep the experts here: conn.wrap(model, local=["*experts*"])',
    ),
}
METHODS = frozenset(what for what, _ in ADVICE.values())
TUNER = re.compile(r"/peft/tuners/(\w+)/")


def who_asked() -> tuple[str, str]:
    """(the peft method on the call stack, what to do instead)."""
    peft = [frame for frame in inspect.stack(context=0) if "/peft/" in frame.filename.replace("\\", "/")]
    for frame in peft:
        names = f"{frame.frame.f_code.co_qualname} {frame.filename.replace(chr(92), '/').rpartition('/')[2]}".lower()
        for word, advice in ADVICE.items():
            if word in names:
                return advice
    found = next((match for frame in peft if (match := TUNER.search(frame.filename.replace("\\", "/")))), None)
    what = f"peft's {found[1]}" if found else "this operation"
    return what, ACTIVATIONS if any(frame.function == "forward" for frame in peft) else WRAP_LATER


def refusal(operation: str, module_name: str) -> str:
    """The message for an operation that needs the values of a base weight."""
    what, instead = who_asked()
    module = f" of {module_name}" if module_name else ""
    return (
        f"{what} needs the values of the base weight{module} (called {operation}), which stays on the server. "
        f"Instead, {instead}"
    )
