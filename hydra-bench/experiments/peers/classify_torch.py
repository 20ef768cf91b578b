#!/usr/bin/env python3
"""Trains classifiers of texts with Transformers' Trainer on the CPU, one configuration after another. Prints one line of JSON.

classify_torch.py DIR BASE --model gpt2|distilbert [--batch 8,16] [--optimizer adamw_torch_fused,sgd] [--lr 1e-4] [--epochs 1] ..

DIR is one of make_tweets.py. Batches are padded to their longest text (DataCollatorWithPadding); --group-by-length makes batches of
texts of similar length, as TrainingArguments(group_by_length=True) did. Tokens are those of the texts, without padding. `steps_s` has the
seconds of the configurations' training loops without evaluation and saving.
"""
import argparse, csv, itertools, json, os, resource, tempfile, time

p = argparse.ArgumentParser()
p.add_argument("data")
p.add_argument("base", help="the directory of a model; if there is none, the script writes one with random weights, and ends")
p.add_argument("--model", choices=["gpt2", "distilbert"], default="gpt2")
p.add_argument("--lr", default="1e-4")
p.add_argument("--optimizer", default="adamw_torch_fused")
p.add_argument("--batch", default="8")
p.add_argument("--epochs", type=int, default=1)
p.add_argument("--steps", type=int, default=-1)
p.add_argument("--threads", type=int, default=2)
p.add_argument("--group-by-length", action="store_true")
p.add_argument("--evaluate", action="store_true")
a = p.parse_args()
os.environ.update(OMP_NUM_THREADS=str(a.threads), MKL_NUM_THREADS=str(a.threads), HF_HUB_OFFLINE="1", CUDA_VISIBLE_DEVICES="")

import numpy, torch
torch.set_num_threads(a.threads)
import transformers
from tokenizers.processors import TemplateProcessing
from transformers import (
    AutoModelForSequenceClassification, DataCollatorWithPadding, DistilBertConfig, DistilBertForMaskedLM, GPT2Config, GPT2LMHeadModel,
    PreTrainedTokenizerFast, PrinterCallback, Trainer, TrainerCallback, TrainingArguments,
)
transformers.logging.set_verbosity_error()

tokenizer = PreTrainedTokenizerFast(tokenizer_file=os.path.join(a.data, "tokenizer.json"), pad_token="[PAD]", cls_token="[CLS]", sep_token="[SEP]")
if a.model == "distilbert":
    # The template of BERT's tokenizers, which the written base has too.
    ends = [(token, tokenizer.convert_tokens_to_ids(token)) for token in ("[CLS]", "[SEP]")]
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=ends)
rows = list(csv.DictReader(open(os.path.join(a.data, "tweets.csv"))))
classes = sorted({row["label"] for row in rows})
examples = []
for row in rows:
    ids = tokenizer(row["text"])["input_ids"]
    examples.append({"input_ids": ids, "attention_mask": [1] * len(ids), "label": classes.index(row["label"])})
# Hydra's splits of one file: the last tenth of the rows is for the test.
train, held = examples[: len(examples) * 8 // 10], examples[len(examples) * 8 // 10 : len(examples) * 9 // 10]


if not os.path.exists(os.path.join(a.base, "config.json")):
    torch.manual_seed(0)
    if a.model == "gpt2":
        fresh = GPT2LMHeadModel(GPT2Config(pad_token_id=0, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0))
    else:
        fresh = DistilBertForMaskedLM(DistilBertConfig(pad_token_id=0, dropout=0.0, attention_dropout=0.0, seq_classif_dropout=0.0))
    fresh.save_pretrained(a.base)
    tokenizer.save_pretrained(a.base)
    print(a.base, "has random weights")
    raise SystemExit


def model():
    torch.manual_seed(0)
    return AutoModelForSequenceClassification.from_pretrained(a.base, num_labels=len(classes), dtype=torch.float32)


def f1(prediction):
    guess, label = numpy.argmax(prediction.predictions, -1), prediction.label_ids
    of = lambda c: 2 * ((guess == c) & (label == c)).sum() / max(1, (guess == c).sum() + (label == c).sum())
    return {"f1_macro": float(numpy.mean([of(c) for c in range(len(classes))]))}


class Clock(TrainerCallback):
    """Notes when each step has ended."""

    def __init__(self):
        self.ends = []

    def on_train_begin(self, *_, **__):
        self.ends.append(time.perf_counter())

    def on_step_end(self, *_, **__):
        self.ends.append(time.perf_counter())


class GroupedTrainer(Trainer):
    """Batches of texts of similar length, in a drawn order: what `group_by_length` does."""

    def get_train_dataloader(self):
        size = self.args.per_device_train_batch_size
        order = sorted(range(len(train)), key=lambda i: len(train[i]["input_ids"]))
        batches = [order[i : i + size] for i in range(0, len(order), size)]
        batches = [batches[i] for i in torch.randperm(len(batches), generator=torch.Generator().manual_seed(0))]
        return torch.utils.data.DataLoader(train, batch_sampler=batches, collate_fn=self.data_collator)


begun, result = time.perf_counter(), []
for lr, optimizer, batch in itertools.product(a.lr.split(","), a.optimizer.split(","), map(int, a.batch.split(","))):
    clock, start = Clock(), time.perf_counter()
    trainer = (GroupedTrainer if a.group_by_length else Trainer)(
        model=model(),
        args=TrainingArguments(
            output_dir=tempfile.mkdtemp(), learning_rate=float(lr), optim=optimizer, per_device_train_batch_size=batch, num_train_epochs=a.epochs,
            max_steps=a.steps, lr_scheduler_type="constant", max_grad_norm=0.0, save_strategy="no", report_to=[], use_cpu=True, disable_tqdm=True,
            logging_strategy="no", weight_decay=0.0, seed=0, remove_unused_columns=False,
        ),
        train_dataset=train, eval_dataset=held, data_collator=DataCollatorWithPadding(tokenizer), compute_metrics=f1, callbacks=[clock],
    )
    trainer.remove_callback(PrinterCallback)
    seen, forward = [], trainer.model.forward
    def counted(*args, **named):
        if trainer.model.training:
            seen.append((int(named["attention_mask"].sum()), named["attention_mask"].numel()))
        return forward(*args, **named)
    trainer.model.forward = counted
    trainer.train()
    trained = time.perf_counter()
    steps = [after - before for before, after in zip(clock.ends, clock.ends[1:])]
    tokens, padded = (sum(pair[i] for pair in seen) for i in (0, 1))
    result.append(dict(lr=lr, optimizer=optimizer, batch=batch, steps=len(steps), steps_s=round(sum(steps), 3), tokens=tokens, padded=padded,
                       tokens_per_s=round(tokens / sum(steps), 1), whole_s=round(trained - start, 3)))
    if a.evaluate:
        result[-1].update(f1_macro=trainer.evaluate()["eval_f1_macro"], with_evaluation_s=round(time.perf_counter() - start, 3))
    del trainer
print(json.dumps(dict(
    model=a.model, threads=a.threads, torch=torch.__version__, transformers=transformers.__version__, seconds=round(time.perf_counter() - begun, 2),
    tokens=sum(r["tokens"] for r in result), peak_rss_mib=round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024),
    configurations=result,
)))
