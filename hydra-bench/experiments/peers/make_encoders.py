#!/usr/bin/env python3
"""Writes the text encoders in hydra-models/tests/fixtures: results of Hugging Face transformers and PEFT.

usage: make_encoders.py [FIXTURES=hydra-models/tests/fixtures]
Made with Transformers 5.24, PEFT 0.21.2 and PyTorch 2.15 on a CPU. Weights and ids are drawn; there is no text in them. Every
weight is perturbed, so that a swapped or dropped bias, norm or scale shows. In each folder `parity/encoder_*`:
  config.json, model.safetensors     written by save_pretrained
  inputs.safetensors                 input_ids int64 [1, B, T], padded on the right with pad_token_id; lengths int64 [1, B];
                                     lasts int64 [1, B], the last token of each; labels [1, B] int64, or [1, B, outputs] f32;
                                     for BERT token_type_ids int64 [1, B, T]
  fwd.safetensors                    logits [B, outputs] and loss, computed in f64
  grads.safetensors                  d loss / d p of every parameter, computed in f64
  train.json                         losses before each of 12 steps of AdamW on the same batch, and after them, computed in f64
In each folder `peft/ENCODER-*` the files of make_adapters.py with train.json, and in `peft/bases` the models that they adapt. `tokenizers/unigram`
is a tokenizer of XLM-RoBERTa's form, with a map of characters made by SentencePiece.
"""
import json, os, sys, tempfile
os.environ["CUDA_VISIBLE_DEVICES"] = ""; os.environ["HF_HUB_OFFLINE"] = "1"
from pathlib import Path
import torch, transformers
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import save_file
from steps_of_adamw import train
from transformers import (AutoModelForSequenceClassification as Auto, BertConfig, DistilBertConfig, ModernBertConfig,
    RobertaConfig, XLMRobertaConfig)

OUT = Path(sys.argv[1] if len(sys.argv) > 1 else "hydra-models/tests/fixtures")
transformers.logging.set_verbosity_error()
torch.set_num_threads(1); torch.use_deterministic_algorithms(True)
VOCABULARY, LENGTHS = 20, (7, 1, 4, 9, 3)
SIZES = dict(vocab_size=VOCABULARY, hidden_size=8, intermediate_size=12, num_hidden_layers=2, num_attention_heads=2)
BERT = dict(**SIZES, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, use_cache=False)
DISTILBERT = dict(vocab_size=VOCABULARY, dim=8, hidden_dim=12, n_layers=2, n_heads=2, dropout=0.0, attention_dropout=0.0,
    seq_classif_dropout=0.0, max_position_embeddings=16)
SPECIAL = dict(pad_token_id=0, bos_token_id=2, eos_token_id=3, cls_token_id=2, sep_token_id=3)
MODERNBERT = dict(**{**SIZES, "num_hidden_layers": 4}, **SPECIAL, max_position_embeddings=64, local_attention=4)
SINGLE, MULTI, NUMBERS = "single_label_classification", "multi_label_classification", "regression"
CASES = {
    "bert": (BertConfig(**BERT, max_position_embeddings=16, num_labels=3), SINGLE),
    "roberta": (RobertaConfig(**BERT, max_position_embeddings=18, type_vocab_size=1, layer_norm_eps=1e-5, num_labels=3), MULTI),
    "xlm_roberta": (XLMRobertaConfig(**BERT, max_position_embeddings=18, type_vocab_size=1, layer_norm_eps=1e-5, num_labels=1),
        NUMBERS),
    "distilbert": (DistilBertConfig(**DISTILBERT, num_labels=2), SINGLE),
    "modernbert": (ModernBertConfig(**MODERNBERT, classifier_pooling="mean", num_labels=3), SINGLE),
    "modernbert_first": (ModernBertConfig(**MODERNBERT, classifier_pooling="cls", norm_bias=True, attention_bias=True, mlp_bias=True,
        classifier_bias=True, num_labels=2), NUMBERS),
}
ADAPTED = {
    "bert-classifier": ("bert", dict(target_modules=None)),
    "bert-all-linear": ("bert", dict(target_modules="all-linear")),
    "roberta-classifier": ("roberta", dict(target_modules=None)),
    "distilbert-classifier": ("distilbert", dict(target_modules=["q_lin", "v_lin", "lin2"])),
    "modernbert-classifier": ("modernbert", dict(target_modules=["Wqkv"], modules_to_save=["head"])),
}


def perturb(parameters, seed, size=0.3):
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in parameters:
            parameter.add_(size * torch.randn(parameter.shape, generator=generator))


def inputs_of(config, problem):
    """Sequences of several lengths without the padding token."""
    generator, lengths = torch.Generator().manual_seed(5), torch.tensor(LENGTHS)
    ids = torch.randint(2, VOCABULARY, (len(LENGTHS), max(LENGTHS)), generator=generator)
    ids[torch.arange(max(LENGTHS))[None] >= lengths[:, None]] = config.pad_token_id
    outputs = config.num_labels
    labels = {
        SINGLE: torch.randint(0, outputs, (len(LENGTHS),), generator=generator),
        MULTI: torch.randint(0, 2, (len(LENGTHS), outputs), generator=generator).float(),
        NUMBERS: torch.randn((len(LENGTHS), outputs), generator=generator),
    }[problem]
    inputs = {"input_ids": ids, "lengths": lengths, "lasts": lengths - 1, "labels": labels}
    if config.model_type == "bert":
        inputs["token_type_ids"] = (torch.arange(max(LENGTHS))[None] >= (lengths // 2)[:, None]).long()
    return {name: value[None].contiguous() for name, value in inputs.items()}


def forward(model, inputs, problem):
    """What Transformers computes of a padded batch."""
    inputs = {name: value[0] for name, value in inputs.items()}
    lengths, _ = inputs.pop("lengths"), inputs.pop("lasts")
    mask = (torch.arange(max(LENGTHS))[None] < lengths[:, None]).long()
    labels = inputs.pop("labels")
    return model(**inputs, attention_mask=mask, labels=labels if problem == SINGLE else labels.double())


def new_model(config, problem):
    torch.manual_seed(11)
    config.problem_type = problem
    model = Auto.from_config(config)
    perturb(model.parameters(), 5)
    return model


def read(path):
    return Auto.from_pretrained(path, dtype=torch.float32).double()


def make(name, config, problem):
    out = OUT / f"parity/encoder_{name}"
    new_model(config, problem).save_pretrained(out)
    model, inputs = read(out), inputs_of(config, problem)
    found = forward(model, inputs, problem)
    found.loss.backward()
    save_file(inputs, out / "inputs.safetensors")
    save_file({"logits": found.logits.detach().contiguous(), "loss": found.loss.detach().reshape(1)}, out / "fwd.safetensors")
    save_file({n: p.grad.float().contiguous() for n, p in model.named_parameters()}, out / "grads.safetensors")
    (out / "train.json").write_text(train(model, lambda model: forward(model, inputs, problem).loss))
    print(name, problem, found.loss.item())


def adapt(name, kind, settings):
    folder, base = OUT / "peft" / name, OUT / "peft/bases" / kind
    config = LoraConfig(**{"r": 2, "lora_alpha": 4, "task_type": "SEQ_CLS", **settings})
    model = get_peft_model(Auto.from_pretrained(base, dtype=torch.float32), config)
    perturb([p for p in model.parameters() if p.requires_grad], 9, 0.2)
    model.save_pretrained(folder)
    (folder / "README.md").unlink()
    path = folder / "adapter_config.json"
    text = json.loads(path.read_text())
    text["base_model_name_or_path"] = f"../bases/{kind}"
    path.write_text(json.dumps(text, indent=1, sort_keys=True) + "\n")
    model = PeftModel.from_pretrained(Auto.from_pretrained(base, dtype=torch.float32), folder, is_trainable=True).double()
    inputs = inputs_of(model.config, SINGLE)
    loss = forward(model, inputs, SINGLE).loss
    loss.backward()
    short = lambda n: n.replace(".default", "").replace(".modules_to_save", "").replace(".base_layer", "")
    grads = {short(n): p.grad.contiguous() for n, p in model.named_parameters() if p.requires_grad and p.grad is not None}
    save_file({"loss": loss.detach().reshape(1)}, folder / "fwd.safetensors")
    save_file(grads, folder / "grads.safetensors")
    save_file(inputs, folder / "inputs.safetensors")
    (folder / "train.json").write_text(train(model, lambda model: forward(model, inputs, SINGLE).loss))
    print(name, loss.item(), len(grads), sorted(config.modules_to_save))


def unigram():
    """A tokenizer of the form of XLM-RoBERTa's."""
    import sentencepiece
    from sentencepiece import sentencepiece_model_pb2
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        (path / "rule.tsv").write_text("FF21\t41\n2460\t31\n")
        (path / "text.txt").write_text("\n".join(["a b ab A1 the film"] * 50))
        sentencepiece.SentencePieceTrainer.train(input=str(path / "text.txt"), model_prefix=str(path / "m"), vocab_size=20,
            normalization_rule_tsv=str(path / "rule.tsv"), hard_vocab_limit=False, minloglevel=2)
        model = sentencepiece_model_pb2.ModelProto()
        model.ParseFromString((path / "m.model").read_bytes())
    pieces = [("<s>", 0.0), ("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("\u2581", -2.0), ("a", -3.0), ("b", -3.0), ("ab", -3.5),
        ("\u2581ab", -4.0), ("A", -5.0), ("1", -5.0), ("\u2581film", -6.0)]
    tokenizer = transformers.XLMRobertaTokenizer(vocab=pieces,
        _spm_precompiled_charsmap=model.normalizer_spec.precompiled_charsmap)
    out = OUT / "tokenizers/unigram"
    tokenizer.save_pretrained(out)
    for text in ("ab ab film", "\uff21\u2460 ab", "x  ab ", "a<mask>b", ""):
        print(repr(text), tokenizer(text).input_ids)
    print(tokenizer("ab", "film a").input_ids)


unigram()
for name, (config, problem) in CASES.items():
    make(name, config, problem)
for kind in ("bert", "roberta", "distilbert", "modernbert"):
    new_model(CASES[kind][0], SINGLE).save_pretrained(OUT / "peft/bases" / kind)
for name, case in ADAPTED.items():
    adapt(name, *case)
