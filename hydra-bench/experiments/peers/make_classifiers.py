#!/usr/bin/env python3
"""Writes the text classifiers in hydra-models/tests/fixtures/parity: results of Hugging Face transformers.

usage: make_classifiers.py [OUTDIR=hydra-models/tests/fixtures/parity]
Made with Transformers 5.24 and PyTorch 2.15 on a CPU. Weights and ids are drawn; there is no text in them. Every weight is
perturbed, so that a swapped or dropped bias, norm or scale shows. In each folder `classifier_*`:
  config.json, model.safetensors     written by save_pretrained
  inputs.safetensors                 input_ids int64 [1, B, T], padded on the right with pad_token_id; lengths int64 [1, B];
                                     lasts int64 [1, B], the last token that is not the padding; labels [1, B] int64, or [1, B, outputs] f32
  fwd.safetensors                    logits [B, outputs] and loss, computed in f64
  grads.safetensors                  d loss / d p of every parameter, computed in f64
  train.json                         losses before each of 12 steps of AdamW on the same batch, and after them, computed in f64
metrics.json has drawn logits and labels for each problem type, and their metrics as scikit-learn 1.9.1 and SciPy 1.17.1 compute them in f64.
"""
import json, os, sys
os.environ["CUDA_VISIBLE_DEVICES"] = ""; os.environ["HF_HUB_OFFLINE"] = "1"
import torch, transformers
from safetensors.torch import save_file
from scipy import stats
from sklearn import metrics
from steps_of_adamw import train
from transformers import AutoModelForSequenceClassification, GPT2Config, LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

OUT = sys.argv[1] if len(sys.argv) > 1 else "hydra-models/tests/fixtures/parity"
transformers.logging.set_verbosity_error()
torch.set_num_threads(1); torch.use_deterministic_algorithms(True)
PAD, VOCABULARY = 1, 20
ENDS = dict(vocab_size=VOCABULARY, bos_token_id=0, eos_token_id=2, pad_token_id=PAD, use_cache=False)
SIZES = dict(**ENDS, hidden_size=8, intermediate_size=12, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
    head_dim=4, max_position_embeddings=16)
SINGLE, MULTI, NUMBERS = "single_label_classification", "multi_label_classification", "regression"
CASES = {
    "gpt2": (GPT2Config(**ENDS, n_embd=8, n_layer=2, n_head=2, n_positions=16, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        id2label={0: "owl", 1: "cat", 2: "dog"}, label2id={"owl": 0, "cat": 1, "dog": 2}), SINGLE),
    "llama": (LlamaConfig(**SIZES, num_labels=3, attention_bias=True, tie_word_embeddings=True), MULTI),
    "mistral": (MistralConfig(**SIZES, num_labels=1, sliding_window=3), NUMBERS),
    "qwen2": (Qwen2Config(**SIZES, tie_word_embeddings=True), SINGLE),
    "qwen3": (Qwen3Config(**SIZES, num_labels=2), NUMBERS),
}


def labels_of(problem, items, outputs, generator):
    if problem == SINGLE:
        return torch.randint(0, outputs, (items,), generator=generator)
    if problem == MULTI:
        return torch.randint(0, 2, (items, outputs), generator=generator).float()
    return torch.randn((items, outputs), generator=generator)


def ids_of(generator):
    """Sequences of several lengths; one ends with tokens that are also the padding, and one has no others."""
    rows = [torch.randint(2, VOCABULARY, (length,), generator=generator) for length in (7, 1, 4, 6)]
    rows.append(torch.cat([rows[2], torch.tensor([PAD, PAD])]))
    rows.append(torch.tensor([PAD, PAD, PAD]))
    lengths = torch.tensor([len(row) for row in rows])
    padded = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=PAD)
    return padded, lengths


def last_of(ids):
    """The token that Transformers reads of each sequence."""
    return (torch.arange(ids.shape[1]) * (ids != PAD)).argmax(-1)


def metrics_of(problem, logits, labels):
    """The metrics that Hydra reports, by their names, of f32 logits and labels [items, outputs], or the classes [items]."""
    if problem == NUMBERS:
        columns = list(zip(logits.double().numpy().T, labels.double().numpy().T))
        mean = lambda correlation: sum(correlation(*column).statistic for column in columns) / len(columns)
        mse = metrics.mean_squared_error(labels.double().numpy(), logits.double().numpy())
        return {"mse": mse, "pearson": mean(stats.pearsonr), "spearman": mean(stats.spearmanr)}
    # Of equal logits the first is predicted; a probability has to be above a half.
    predicted = logits.numpy().argmax(-1) if problem == SINGLE else (logits.double().sigmoid() > 0.5).int().numpy()
    pair = (labels.int().numpy(), predicted)
    f1 = {f"f1_{kind}": metrics.f1_score(*pair, labels=range(logits.shape[1]), average=kind, zero_division=0) for kind in ("macro", "micro")}
    found = {"accuracy": metrics.accuracy_score(*pair), **f1}
    return {**found, "matthews_correlation": metrics.matthews_corrcoef(*pair)} if problem == SINGLE else found


def digits(values):
    """Nested lists with the fewest digits that identify each f32."""
    return [digits(value) for value in values] if values.ndim else json.loads(str(values))


def write_metrics():
    generator = torch.Generator().manual_seed(3)
    draw = lambda *shape: torch.randn(shape, generator=generator)
    # Classes of 60, 25, 10 and 5 parts in a hundred. Class 3 is never predicted, and class 4 is neither predicted nor a label.
    labels = torch.multinomial(torch.tensor([0.60, 0.25, 0.10, 0.05]), 97, True, generator=generator)
    logits = draw(97, 5) + 1.5 * torch.nn.functional.one_hot(labels, 5)
    logits[:, 3:] -= 20.0
    # Of four classes the second is rare, and the third is never predicted.
    several = (draw(83, 4) > torch.tensor([0.0, 1.8, 0.5, 0.5])).float()
    above = draw(83, 4) + 2.0 * several - 1.0
    above[:, 2] = -above[:, 2].abs()
    # Numbers of one decimal place tie.
    rounded = lambda values: (values * 10).round() / 10
    numbers = draw(71, 2)
    cases = {
        "single_label": (SINGLE, rounded(logits[:, :4]), labels),
        "absent_class": (SINGLE, rounded(logits), labels),
        "multi_label": (MULTI, rounded(above), several),
        "regression": (NUMBERS, rounded(0.7 * numbers + 0.5 * draw(71, 2)), (numbers * 4).round() / 4),
        "one_number": (NUMBERS, draw(40, 1) * 1e-3 + 5.0, draw(40, 1)),
    }
    for case, (problem, logits, labels) in cases.items():
        found = {name: float(value) for name, value in metrics_of(problem, logits, labels).items()}
        values = {name: digits(tensor.numpy()) for name, tensor in (("logits", logits), ("labels", labels))}
        cases[case] = {"problem_type": problem, "metrics": found, **values}
        print(case, found)
    with open(f"{OUT}/metrics.json", "w") as file:
        file.write(json.dumps(cases, separators=(",", ":")) + "\n")


write_metrics()
for name, (config, problem) in CASES.items():
    torch.manual_seed(11)
    out = f"{OUT}/classifier_{name}"
    config.problem_type = problem
    model = AutoModelForSequenceClassification.from_config(config)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
    model.save_pretrained(out)
    model = AutoModelForSequenceClassification.from_pretrained(out, dtype=torch.float32, attn_implementation="eager").double()
    # PyTorch leaves out the padding's row of this gradient, also where the token is not padding.
    model.get_input_embeddings().padding_idx = None
    ids, lengths = ids_of(generator)
    labels = labels_of(problem, len(ids), config.num_labels, generator)
    inputs = {"input_ids": ids, "lengths": lengths, "lasts": last_of(ids), "labels": labels}
    save_file({name: value[None].contiguous() for name, value in inputs.items()}, f"{out}/inputs.safetensors")
    # A window within the padding leaves a token nothing to attend to, and its NaN spreads; causal attention needs no mask.
    mask = None if name == "mistral" else (torch.arange(ids.shape[1])[None] < lengths[:, None]).long()
    forward = lambda model: model(input_ids=ids, attention_mask=mask, labels=labels if problem == SINGLE else labels.double())
    found = forward(model)
    found.loss.backward()
    save_file({"logits": found.logits.detach().contiguous(), "loss": found.loss.detach().reshape(1)}, f"{out}/fwd.safetensors")
    save_file({n: p.grad.float().contiguous() for n, p in model.named_parameters()}, f"{out}/grads.safetensors")
    with open(f"{out}/train.json", "w") as file:
        file.write(train(model, lambda model: forward(model).loss))
    print(name, problem, found.loss.item(), found.logits.dtype)
