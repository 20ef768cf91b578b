"""Written models, loaded with Transformers and PEFT: their generated texts, outputs, metrics and rewards are those of Hydra."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import hydra_train as hydra
from conftest import ROOT, pairs

transformers = pytest.importorskip("transformers", reason="Transformers is not installed")
torch = pytest.importorskip("torch", reason="PyTorch is not installed")
peft = pytest.importorskip("peft", reason="PEFT is not installed")

SHORT: dict[str, Any] = {"batch": 4, "context": 32, "steps": 3, "lr": 3e-3, "devices": "cpu:1x1", "device_memory": "64MiB"}


def greedy(model: Any, prompt: list[int]) -> list[int]:
    """Returns the five most likely tokens after a prompt."""
    made = model.generate(input_ids=torch.tensor([prompt]), max_new_tokens=5, min_new_tokens=5, do_sample=False)
    return [int(token) for token in made[0, len(prompt) :]]


@pytest.mark.parametrize("model", ["bytes-tiny", "bytes-llama-tiny"])
def test_a_task_loads_its_model(model: str, tmp_path: Path) -> None:
    task = hydra.train(model=model, **SHORT, out=tmp_path / "base").wait().best
    loaded = task.load()
    assert type(loaded).__name__.endswith("ForCausalLM") or type(loaded).__name__ == "GPT2LMHeadModel"
    assert greedy(loaded, [72, 105]) == task.generate([[72, 105]], max_new_tokens=5)[0]["token_ids"]
    assert task.load(torch_dtype=torch.float64).dtype == torch.float64
    adapted = hydra.train(model=task.model_dir, lora=4, **SHORT, out=tmp_path / "adapters").wait().best
    loaded = adapted.load()
    assert type(loaded).__name__.startswith("PeftModel")
    assert greedy(loaded, [72, 105]) == adapted.generate([[72, 105]], max_new_tokens=5)[0]["token_ids"]


def predictions(program: Path, task: hydra.Task, rows: list[dict[str, Any]], folder: Path) -> list[dict[str, Any]]:
    """Returns what the command line predicts for rows with the written model of a task."""
    file = folder / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    command = [program, "predict", "--model", str(task.model_dir), "--data", str(file), "--devices", "cpu:1x1"]
    printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return [json.loads(line) for line in printed.splitlines()]


# Classifiers.

SINGLE, SEVERAL, NUMBERS = "single_label_classification", "multi_label_classification", "regression"
CLASSES = ("bad", "dull", "good")
OTHERS = ("film", "meal", "song", "the", "was", "a", "quite", "so")


def texts(labels: str, count: int, first: int = 0) -> list[dict[str, Any]]:
    """Returns different texts, every third one with a second text, and every fifth one with a label that does not fit it."""
    rows = []
    for at in range(first, first + count):
        kind = at * 7 % 3
        found = kind if at % 5 else (kind + 1) % 3
        label: Any = {
            SINGLE: CLASSES[found],
            SEVERAL: [CLASSES[kind] for kind in range(3) if kind == found or at % (kind + 3) == 0],
            NUMBERS: 2.0 * found + 0.5 * (at % 3) - 2.5,
        }[labels]
        words = [OTHERS[at % 8], CLASSES[kind], OTHERS[at // 8 % 8], CLASSES[at % 3]][: 2 + at % 3]
        row = {"text": " ".join(words), "label": label}
        rows.append(row | {"text_pair": f"the {CLASSES[kind]} {OTHERS[at // 3 % 8]}"} if at % 3 == 0 else row)
    return rows


def words_of_bert(folder: Path) -> dict[str, int]:
    """Writes a vocabulary of BERT's kind, and returns its size and its padding token."""
    letters = "abcdefghijklmnopqrstuvwxyz"
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *letters, *(f"##{letter}" for letter in letters), *CLASSES, *OTHERS]
    (folder / "vocab.txt").write_text("".join(f"{word}\n" for word in dict.fromkeys(words)))
    return {"vocab_size": len(set(words)), "pad_token_id": 0}


def words_of_roberta(folder: Path) -> dict[str, int]:
    """Writes a vocabulary of RoBERTa's kind: bytes, and merges of some."""
    from tokenizers.pre_tokenizers import ByteLevel

    merges = ["o o", "Ġ t", "Ġt h", "Ġth e"]
    made = [merge.replace(" ", "") for merge in merges]
    words = ["<s>", "<pad>", "</s>", "<unk>", *sorted(ByteLevel.alphabet()), *made, "<mask>"]
    (folder / "vocab.json").write_text(json.dumps({word: at for at, word in enumerate(words)}))
    (folder / "merges.txt").write_text("#version: 0.2\n" + "".join(f"{merge}\n" for merge in merges))
    return {"vocab_size": len(words), "pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2}


def words_of_modernbert(folder: Path) -> dict[str, int]:
    """Writes a tokenizer of ModernBERT's kind."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

    special = ["[PAD]", "[CLS]", "[SEP]"]
    words = [*special, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    made = Tokenizer(models.BPE(vocab={word: at for at, word in enumerate(words)}, merges=[]))
    made.add_special_tokens(special)
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    ends = [("[CLS]", 1), ("[SEP]", 2)]
    made.post_processor = processors.TemplateProcessing("[CLS] $A [SEP]", "[CLS] $A [SEP] $B [SEP]", ends)
    names = {"pad_token": "[PAD]", "cls_token": "[CLS]", "sep_token": "[SEP]", "model_input_names": ["input_ids", "attention_mask"]}
    transformers.PreTrainedTokenizerFast(tokenizer_object=made, **names).save_pretrained(folder)
    return {"vocab_size": len(words), "pad_token_id": 0, "cls_token_id": 1, "sep_token_id": 2, "bos_token_id": 1, "eos_token_id": 2}


LAYERS = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
BERT = {**LAYERS, "max_position_embeddings": 66}
ENCODERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "bert": (words_of_bert, BERT),
    "distilbert": (words_of_bert, {"dim": 16, "hidden_dim": 24, "n_layers": 2, "n_heads": 2, "max_position_embeddings": 64}),
    "roberta": (words_of_roberta, {**BERT, "type_vocab_size": 1}),
    "modernbert": (words_of_modernbert, {**LAYERS, "num_hidden_layers": 4, "max_position_embeddings": 64, "local_attention": 8}),
}


def base_of(kind: str, folder: Path) -> Path:
    """Writes a small pretrained model: an encoder with the head of its pretraining, or a language model over bytes."""
    if kind not in ENCODERS:
        rows = ["a good film", "a bad meal", "a dull song"] * 4
        found = hydra.train(model=kind, data=rows, **SHORT, out=folder / "base").wait().best.model_dir
        assert found is not None
        return found
    words, sizes = ENCODERS[kind]
    base = folder / kind
    base.mkdir()
    config = transformers.AutoConfig.for_model(kind, **sizes, **words(base))
    torch.manual_seed(7)
    model = (transformers.AutoModelForPreTraining if kind == "bert" else transformers.AutoModelForMaskedLM).from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn(parameter.shape))
    model.save_pretrained(base)
    # The class of the tokenizer is among its files.
    transformers.AutoTokenizer.from_pretrained(base).save_pretrained(base)
    return base


@dataclass
class Classifier:
    """A task that trained a classifier, its validation rows, and what Transformers computes of them."""

    labels: str
    adapters: bool
    task: hydra.Task
    rows: list[dict[str, Any]]
    model: Any
    #: What the written tokenizer makes of each row.
    encoded: list[dict[str, Any]]
    #: The outputs for each row, computed in 64 bits of the written weights.
    logits: Any

    def targets(self) -> Any:
        """Returns the labels as Transformers takes them."""
        if self.labels == SINGLE:
            return torch.tensor([CLASSES.index(row["label"]) for row in self.rows])
        if self.labels == SEVERAL:
            return torch.tensor([[float(name in row["label"]) for name in CLASSES] for row in self.rows], dtype=torch.float64)
        return torch.tensor([row["label"] for row in self.rows], dtype=torch.float64)


KINDS = {"bytes-tiny": SINGLE, "bytes-llama-tiny": SEVERAL, "bert": SINGLE, "roberta": SINGLE, "distilbert": SEVERAL, "modernbert": NUMBERS}
CASES = [pytest.param((kind, adapters), id=f"{kind}-{'adapters' if adapters else 'full'}") for kind in KINDS for adapters in (False, True)]


@pytest.fixture(scope="module", params=CASES)
def classifier(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Classifier:
    """A classifier, trained once for all tests of it."""
    (kind, adapters), folder = request.param, tmp_path_factory.mktemp("classifier")
    labels = KINDS[kind]
    with pytest.MonkeyPatch.context() as patch:
        # No machine-wide memory reservations, so that it does not wait for other runs.
        patch.setenv("HYDRA_RESERVATIONS", "")
        base = base_of(kind, folder)
        validation = texts(labels, 20, first=60)
        data = {"train": texts(labels, 48), "validation": validation, "test": validation[:4]}
        settings = {**SHORT, "context": 64, "batch": 8, "lr": 2e-2 if adapters else 3e-3, "steps": 48, "lora": 4 if adapters else None}
        task = hydra.train(model=base, task="classify", data=data, **settings, out=folder / "run").wait().best
    model = task.load(**({} if kind in ENCODERS or not adapters else {"pad_token_id": 0})).double()
    tokenizer = transformers.AutoTokenizer.from_pretrained(task.model_dir)
    encoded = [dict(tokenizer(row["text"], row.get("text_pair"), return_tensors="pt")) for row in validation]
    with torch.no_grad():
        logits = torch.cat([model(**each).logits for each in encoded])
    return Classifier(labels, adapters, task, validation, model, encoded, logits)


def test_a_classifier_computes_what_hydra_predicts(classifier: Classifier, hydra_program: Path, tmp_path: Path) -> None:
    rows, logits, found = classifier.rows, classifier.logits, classifier.task.validation
    targets = classifier.targets()
    if classifier.labels == SINGLE:
        loss, outputs = torch.nn.functional.cross_entropy(logits, targets), logits.softmax(-1)
    elif classifier.labels == SEVERAL:
        loss, outputs = torch.nn.functional.binary_cross_entropy_with_logits(logits, targets), logits.sigmoid()
    else:
        loss, outputs = torch.nn.functional.mse_loss(logits[:, 0], targets), logits[:, 0]
    assert found is not None and found["predicted_tokens"] == len(rows)
    assert found["loss"] == pytest.approx(float(loss), abs=1e-5)
    unlabelled = [{name: row[name] for name in row if name != "label"} for row in rows]
    predicted = predictions(hydra_program, classifier.task, unlabelled, tmp_path)
    if classifier.labels == NUMBERS:
        assert [row["prediction"] for row in predicted] == pytest.approx(outputs.tolist(), abs=1e-4)
    else:
        assert [list(row["probabilities"]) for row in predicted] == [list(CLASSES)] * len(rows)
        probabilities = [[row["probabilities"][name] for name in CLASSES] for row in predicted]
        assert probabilities == [pytest.approx(each, abs=1e-4) for each in outputs.tolist()]


def test_texts_in_one_batch_have_the_outputs_of_each_alone(classifier: Classifier) -> None:
    model, encoded = classifier.model, classifier.encoded
    if not classifier.adapters:
        assert model.config.problem_type == classifier.labels
        names = ["LABEL_0"] if classifier.labels == NUMBERS else list(CLASSES)
        assert [model.config.id2label[at] for at in range(model.config.num_labels)] == names
    fill = {"input_ids": model.config.pad_token_id, "attention_mask": 0, "token_type_ids": 0}
    pad = torch.nn.utils.rnn.pad_sequence
    batch = {name: pad([each[name][0] for each in encoded], batch_first=True, padding_value=fill[name]) for name in encoded[0]}
    assert len({each["input_ids"].shape for each in encoded}) > 1
    with torch.no_grad():
        assert torch.allclose(model(**batch).logits, classifier.logits, rtol=0, atol=1e-6)


def test_the_metrics_of_a_classifier_are_those_of_scikit_learn(classifier: Classifier) -> None:
    metrics = pytest.importorskip("sklearn.metrics", reason="scikit-learn is not installed")
    stats = pytest.importorskip("scipy.stats", reason="SciPy is not installed")
    logits, targets = classifier.logits, classifier.targets()
    assert classifier.task.validation is not None
    found = classifier.task.validation["metrics"]
    if classifier.labels == NUMBERS:
        outputs = logits[:, 0].numpy()
        expected = {
            "mse": metrics.mean_squared_error(targets, outputs),
            "pearson": stats.pearsonr(outputs, targets).statistic,
            "spearman": stats.spearmanr(outputs, targets).statistic,
        }
    else:
        predicted = logits.argmax(-1) if classifier.labels == SINGLE else (logits > 0).long()
        expected = {"accuracy": metrics.accuracy_score(targets, predicted)}
        for kind in ("macro", "micro"):
            expected[f"f1_{kind}"] = metrics.f1_score(targets, predicted, average=kind, zero_division=0)
        if classifier.labels == SINGLE:
            expected["matthews_correlation"] = metrics.matthews_corrcoef(targets, predicted)
            assert len(set(predicted.tolist())) > 1, "the model tells texts apart"
        rows = len(classifier.rows)
        assert found["accuracy"] * rows == pytest.approx(round(expected["accuracy"] * rows), abs=1e-12)
    assert found == pytest.approx(expected, rel=1e-6, abs=1e-6)


# Preferences and reward models.

#: Language models of some thousand parameters with a tokenizer, over the words of the pairs.
PREFERENCES = ROOT / "hydra-bench/tests/fixtures/preferences"


def trained(model: str, folder: Path, **settings: Any) -> tuple[hydra.Task, list[dict[str, str]], Any, Any]:
    """Trains on pairs, and returns the task, its validation rows, and what Transformers loads: the model in 64 bits and the tokenizer."""
    held_out = pairs(8, first=20)
    data = {"train": pairs(20), "validation": held_out, "test": held_out[:4]}
    settings = {**SHORT, "context": 64, "lr": 1e-2, **settings}
    task = hydra.train(model=PREFERENCES / model, data=data, **settings, out=folder / "run").wait().best
    return task, held_out, task.load().double(), transformers.AutoTokenizer.from_pretrained(task.model_dir)


def log_probability(model: Any, tokenizer: Any, prompt: str, answer: str, first: tuple[int, ...] = ()) -> tuple[float, int]:
    """Returns the log-probability of an answer with its end token after a prompt, which ``first`` precedes, and its number of tokens."""
    start, whole = [*first, *tokenizer(prompt).input_ids], [*first, *tokenizer(prompt + answer).input_ids, tokenizer.eos_token_id]
    assert whole[: len(start)] == start
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([whole])).logits[0].log_softmax(-1)
    ends = range(len(start), len(whole))
    return sum(float(logits[at - 1, whole[at]]) for at in ends), len(ends)


def assert_rewards(found: Any, chosen: list[float], rejected: list[float]) -> None:
    """Compares the metrics of rewards with those of an evaluation."""
    margins = [better - worse for better, worse in zip(chosen, rejected)]
    count = len(margins)
    metrics = dict(found["metrics"])
    assert metrics.pop("reward_accuracy") == sum(margin > 0 for margin in margins) / count
    expected = {"reward_margin": sum(margins), "chosen_reward": sum(chosen), "rejected_reward": sum(rejected)}
    assert metrics == pytest.approx({name: total / count for name, total in expected.items()}, abs=1e-4)
    assert found["predicted_tokens"] == count


@pytest.mark.parametrize(("model", "loss"), [("llama", "dpo"), ("gpt2", "simpo")])
def test_rewards_are_those_of_the_written_model(model: str, loss: str, hydra_program: Path, tmp_path: Path) -> None:
    lora = 4 if loss == "dpo" else None
    task, rows, loaded, tokenizer = trained(model, tmp_path, task="preference", loss=loss, beta=0.3, lora=lora)
    answers = [(row["prompt"], row[of]) for row in rows for of in ("chosen", "rejected")]
    scored = [log_probability(loaded, tokenizer, *answer) for answer in answers]
    if loss == "dpo":
        with loaded.disable_adapter():
            before = [log_probability(loaded, tokenizer, *answer)[0] for answer in answers]
        rewards = [0.3 * (total - reference) for (total, _), reference in zip(scored, before)]
        gamma = 0.0
    else:
        # As in TRL, SimPO's texts begin with the start token.
        started = [log_probability(loaded, tokenizer, *answer, first=(tokenizer.bos_token_id,)) for answer in answers]
        rewards = [0.3 * total / count for total, count in started]
        gamma = 0.5
    chosen, rejected = rewards[::2], rewards[1::2]
    assert task.validation is not None
    assert_rewards(task.validation, chosen, rejected)
    losses = [math.log1p(math.exp(gamma - better + worse)) for better, worse in zip(chosen, rejected)]
    assert task.validation["loss"] == pytest.approx(sum(losses) / len(losses), abs=1e-5)
    # The scores of the answers are those of the command line too.
    found = predictions(hydra_program, task, [{"prompt": prompt, "completion": answer} for prompt, answer in answers], tmp_path)
    assert [row["tokens"] for row in found] == [count for _, count in scored]
    assert [row["logprob"] for row in found] == pytest.approx([total for total, _ in scored], abs=1e-4)


@pytest.mark.parametrize(("model", "lora"), [("gpt2", None), ("llama", 4)])
def test_a_reward_model_has_the_rewards_of_transformers(model: str, lora: int | None, tmp_path: Path) -> None:
    task, rows, loaded, tokenizer = trained(model, tmp_path, task="reward", lora=lora)

    def reward(text: str) -> float:
        with torch.no_grad():
            return float(loaded(input_ids=torch.tensor([[*tokenizer(text).input_ids, tokenizer.eos_token_id]])).logits)

    chosen, rejected = ([reward(row["prompt"] + row[of]) for row in rows] for of in ("chosen", "rejected"))
    assert task.validation is not None
    assert_rewards(task.validation, chosen, rejected)
    losses = [math.log1p(math.exp(worse - better)) for better, worse in zip(chosen, rejected)]
    assert task.validation["loss"] == pytest.approx(sum(losses) / len(losses), abs=1e-5)


def test_what_cannot_be_loaded_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = hydra.train(model="bytes-tiny", lora=4, **SHORT, out=tmp_path / "drawn").wait().best
    with pytest.raises(hydra.HydraError, match="which is no directory"):
        drawn.load()
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(hydra.HydraError, match="needs the package `transformers`"):
        drawn.load()
