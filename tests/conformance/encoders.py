"""Rows of encoders, of encoder-decoders, and of heads that a client puts on them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import peft
import torch
import transformers
from torch import nn

from tests.conformance.architectures import DECODER, LOUD, SLOW, SPECIAL, UNTIED, tiny
from tests.conformance.harness import Adapt, Batch, Row, Section, adapter, lora, text_batch

BERT = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 56, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": 64, "pad_token_id": 0, **LOUD,
}  # fmt: skip
ROBERTA = {**BERT, "pad_token_id": 1}
DISTIL = {"vocab_size": 96, "dim": 32, "hidden_dim": 56, "n_layers": 2, "n_heads": 4, "max_position_embeddings": 64}


def encoder(
    name: str, model: str, calls: tuple[int, int], adapt: Any = None, /, row: Any = None, **settings: Any
) -> Row:
    """A row of this class, which does not generate, with LoRA on query and value, unless told."""
    adapt = adapt or lora("query", "value")
    return Row(name, tiny(model, **settings), adapt, calls=calls, **{"prompt": None, **(row or {})})


ENCODERS = (
    encoder("BERT", "BertForMaskedLM", (9, 5), **BERT),
    encoder("RoBERTa", "RobertaForMaskedLM", (9, 5), **ROBERTA),
    encoder("XLM-RoBERTa", "XLMRobertaForMaskedLM", (17, 5), row=SLOW, **ROBERTA),
    encoder("DistilBERT", "DistilBertForMaskedLM", (5, 3), lora("q_lin", "v_lin"), **DISTIL, **LOUD),
    encoder(
        "ModernBERT",
        "ModernBertForMaskedLM",
        (5, 3),
        lora("Wqkv"),
        **BERT,
        global_attn_every_n_layers=2,
        local_attention=8,
        cls_token_id=1,
        sep_token_id=2,
    ),
    encoder("ELECTRA, discriminator", "ElectraForPreTraining", (12, 7), **BERT, embedding_size=24),
    encoder("ELECTRA, generator", "ElectraForMaskedLM", (18, 6), row=SLOW, **BERT, embedding_size=24),
    encoder("ALBERT", "AlbertForMaskedLM", (10, 6), **BERT, embedding_size=24),
    encoder(
        "DeBERTa-v3",
        "DebertaV2ForMaskedLM",
        (11, 7),
        lora("query_proj", "value_proj"),
        **BERT,
        relative_attention=True,
        pos_att_type=["p2c", "c2p"],
        norm_rel_ebd="layer_norm",
        position_biased_input=False,
    ),
    encoder("MPNet", "MPNetForMaskedLM", (17, 5), lora("q", "v"), row=SLOW, **ROBERTA),
    encoder("ERNIE", "ErnieForMaskedLM", (17, 5), row=SLOW, **BERT),
)


def with_head(model: str, **settings: Any) -> Callable[[nn.Module], nn.Module]:
    """A client's model on the served base: the same weights, and a new head of another class."""

    def make(base: Any) -> nn.Module:
        config = copy.deepcopy(base.config)
        for key, value in settings.items():
            setattr(config, key, value)
        made: Any = getattr(transformers, model)(config)
        theirs = getattr(base, base.base_model_prefix, base)
        _, unexpected = made.base_model.load_state_dict(theirs.state_dict(), strict=False)
        if unexpected:
            raise ValueError(f"{model} has no {unexpected}")
        return made

    return make


def labelled(*labels: Any) -> Callable[[Any], Batch]:
    """The text, and these labels for its sequences or tokens."""

    def batch(model: Any) -> Batch:
        return text_batch(model) | {"labels": torch.tensor(labels)}

    return batch


def spans(model: Any) -> Batch:
    """The text, and where an answer begins and ends in each sequence."""
    batch = {key: value for key, value in text_batch(model).items() if key != "labels"}
    return batch | {"start_positions": torch.tensor([1, 4]), "end_positions": torch.tensor([3, 6])}


def tuned(task: str, *targets: str) -> Adapt:
    """LoRA, and a head that is trained whole, as peft does for this task type."""
    return adapter(lambda: peft.LoraConfig(r=4, target_modules=list(targets), task_type=task))


TWO = {"orders": ("wrap first", "peft first"), "prompt": None}
TOKEN_LABELS = labelled([0, 1, 2, 0, 1, 2, 0, 1, 2], [2, 1, 0, 2, 1, 0, 2, -100, -100])
HEADS = (
    Row(
        "Llama, sequence classification",
        tiny("LlamaForCausalLM", **DECODER, **UNTIED),
        tuned("SEQ_CLS", "q_proj", "v_proj"),
        with_head("LlamaForSequenceClassification", num_labels=3),
        labelled(0, 2),
        calls=(5, 3),
        local={"score": "not served"},
        **TWO,
    ),
    Row(
        "BERT, sequence classification",
        tiny("BertForMaskedLM", **BERT),
        tuned("SEQ_CLS", "query", "value"),
        with_head("BertForSequenceClassification", num_labels=3),
        labelled(0, 2),
        calls=(9, 5),
        local={"bert.pooler.dense": "not served", "classifier": "not served"},
        **TWO,
    ),
    Row(
        "DistilBERT, token classification",
        tiny("DistilBertModel", **DISTIL, **LOUD),
        tuned("TOKEN_CLS", "q_lin", "v_lin"),
        with_head("DistilBertForTokenClassification", num_labels=3),
        TOKEN_LABELS,
        calls=(5, 3),
        local={"classifier": "not served"},
        **TWO,
    ),
    Row(
        "RoBERTa, questions",
        tiny("RobertaForMaskedLM", **ROBERTA),
        tuned("QUESTION_ANS", "query", "value"),
        with_head("RobertaForQuestionAnswering"),
        spans,
        no_gradient=(
            "modules_to_save.default.bias",
        ),  # a constant for all positions of a softmax: zero but for rounding
        calls=(9, 5),
        local={"qa_outputs": "not served"},
        **TWO,
    ),
    Row(
        "BERT, the served head trained on",
        tiny("BertForSequenceClassification", **BERT, num_labels=3),
        tuned("SEQ_CLS", "query", "value"),
        None,
        labelled(0, 2),
        calls=(11, 6),
        orders=("peft first",),
        prompt=None,
    ),
    Row(
        "BERT, the served head trained on, made on a wrapped model",
        tiny("BertForSequenceClassification", **BERT, num_labels=3),
        tuned("SEQ_CLS", "query", "value"),
        None,
        labelled(0, 2),
        orders=("wrap first", "skeleton"),
        prompt=None,
        refused="modules_to_save asks for a trainable copy of classifier.*Instead",
    ),
)

T5 = {
    "vocab_size": 96, "d_model": 32, "d_kv": 8, "d_ff": 56, "num_layers": 2, "num_heads": 4, "initializer_factor": 1.0,
    "pad_token_id": 0, "eos_token_id": 2, "decoder_start_token_id": 0,
}  # fmt: skip
BART = {
    "vocab_size": 96, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 56, "decoder_ffn_dim": 56, "max_position_embeddings": 64,
    **SPECIAL, "decoder_start_token_id": 1, "forced_eos_token_id": None, "init_std": 0.15,
}  # fmt: skip
ENCODER_DECODERS = (
    Row("T5", tiny("T5ForConditionalGeneration", **T5), lora("q", "v"), calls=(22, 12)),
    Row(
        "T5 1.1, FLAN-T5",
        tiny("T5ForConditionalGeneration", **T5, feed_forward_proj="gated-gelu", **UNTIED),
        lora("q", "v"),
        calls=(42, 12),
        slow=True,
    ),
    Row("mT5", tiny("MT5ForConditionalGeneration", **T5), lora("q", "v"), calls=(42, 12), slow=True),
    Row("BART", tiny("BartForConditionalGeneration", **BART), calls=(24, 13)),
    Row("mBART", tiny("MBartForConditionalGeneration", **BART), calls=(42, 14), slow=True),
    Row("Pegasus", tiny("PegasusForConditionalGeneration", **BART), calls=(42, 14), slow=True),
    Row("Marian", tiny("MarianMTModel", **BART), calls=(42, 13), slow=True),
    Row("M2M-100, NLLB", tiny("M2M100ForConditionalGeneration", **BART), calls=(42, 14), slow=True),
)

SECTIONS = (
    Section("Encoders", ENCODERS),
    Section("Heads of the client's own", HEADS, "The head is not the server's, or is trained here: `modules_to_save`."),
    Section("Encoder-decoders", ENCODER_DECODERS),
)
