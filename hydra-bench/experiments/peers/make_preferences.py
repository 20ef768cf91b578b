#!/usr/bin/env python3
"""Writes hydra-bench/tests/fixtures/preferences: what TRL computes for preference losses and a reward model.

usage: make_preferences.py [OUTDIR=hydra-bench/tests/fixtures/preferences]
Made with TRL 1.16, Transformers 5.24, PEFT 0.21.2 and PyTorch 2.15 on a CPU, in f32. Weights are drawn. In OUTDIR:
  gpt2/, llama/        models of some thousand parameters with a tokenizer, written by save_pretrained; _reward: as sequence
                       classifiers with one output; _adapter: adapters of rank 4 whose B is zero
  pairs.jsonl          pairs of texts, one minibatch; chats.jsonl: the same as messages; rated.jsonl: single answers
  results.json         for each case the losses of twelve steps of AdamW, each over all pairs, and the evaluation of these pairs
                       after them: its loss and the metrics of the rewards
"""
import json, os, pathlib, random, sys
os.environ["CUDA_VISIBLE_DEVICES"] = ""; os.environ["HF_HUB_OFFLINE"] = "1"; os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
import torch, transformers
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer, GPT2Config, LlamaConfig,
    PreTrainedTokenizerFast)
from trl import DPOConfig, DPOTrainer, KTOConfig, KTOTrainer, RewardConfig, RewardTrainer
from trl.experimental.cpo import CPOConfig, CPOTrainer
from trl.experimental.orpo import ORPOConfig, ORPOTrainer

OUT = sys.argv[1] if len(sys.argv) > 1 else "hydra-bench/tests/fixtures/preferences"
transformers.logging.set_verbosity_error()
torch.set_num_threads(1); torch.use_deterministic_algorithms(True)
STEPS, LR, BETA = 12, 2e-3, 0.3
TEMPLATE = ("{% for m in messages %}<s>{{ m['role'] }}: {{ m['content'] }}</s>{% endfor %}"
            "{% if add_generation_prompt %}<s>assistant: {% endif %}")


def pairs():
    random.seed(3)
    subjects = ["the film", "a soup", "her song", "our trip", "the hotel"]
    good = ["made me smile", "was kind", "is worth a look", "shines"]
    bad = ["made me yawn", "was dull, dull, dull", "is loud", "fades away too soon"]
    rows = []
    for i in range(8):
        prompt = f"Praise {random.choice(subjects)}:"
        rows.append({"prompt": prompt, "chosen": " " + random.choice(good), "rejected": " " + random.choice(bad)})
    rows[3]["chosen"] += " and " + good[2]
    return rows


def chats(rows):
    turn = lambda role, text: [{"role": role, "content": text.strip()}]
    return [{"prompt": turn("user", r["prompt"]), "chosen": turn("assistant", r["chosen"]),
             "rejected": turn("assistant", r["rejected"])} for r in rows]


def rated(rows):
    answers = [{"prompt": r["prompt"], "completion": r[a], "label": a == "chosen"} for r in rows for a in ("chosen", "rejected")]
    return answers[:11]


def tokenizer(rows):
    tok = Tokenizer(models.BPE(unk_token=None))
    tok.pre_tokenizer, tok.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=96, special_tokens=["<s>", "</s>", "<pad>"], show_progress=False,
        initial_alphabet=[])
    texts = [t for r in rows for t in r.values()] + ["user: assistant: "]
    tok.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tok, bos_token="<s>", eos_token="</s>", pad_token="<pad>",
        chat_template=TEMPLATE)


def write_models(rows):
    tok = tokenizer(rows)
    ends = dict(vocab_size=len(tok), bos_token_id=0, eos_token_id=1, pad_token_id=2, use_cache=False)
    configs = {
        "gpt2": GPT2Config(**ends, n_embd=16, n_layer=2, n_head=2, n_positions=64),
        "llama": LlamaConfig(**ends, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
            num_key_value_heads=1, max_position_embeddings=64, tie_word_embeddings=True),
    }
    for name, config in configs.items():
        torch.manual_seed(7)
        model = AutoModelForCausalLM.from_config(config)
        generator = torch.Generator().manual_seed(5)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
        model.save_pretrained(f"{OUT}/{name}")
        tok.save_pretrained(f"{OUT}/{name}")


def train(trainer_class, config_class, model, data, lora=False, **options):
    # All items are one minibatch; KTO makes two of a pair.
    batch = len(data) * (2 if trainer_class is KTOTrainer and "chosen" in data[0] else 1)
    common = dict(output_dir="/tmp/preferences-of-trl", per_device_train_batch_size=batch, max_steps=STEPS, learning_rate=LR,
        lr_scheduler_type="constant", warmup_steps=0, weight_decay=0.0, max_grad_norm=0.0, logging_steps=1, report_to=[],
        save_strategy="no", bf16=False, fp16=False, use_cpu=True, gradient_checkpointing=False, disable_tqdm=True,
        per_device_eval_batch_size=batch, optim="adamw_torch", seed=1)
    if hasattr(config_class, "max_length"):
        common["max_length"] = 64
    tok = AutoTokenizer.from_pretrained(model)
    if trainer_class is RewardTrainer:
        net = AutoModelForSequenceClassification.from_pretrained(model, num_labels=1, dtype=torch.float32)
        generator = torch.Generator().manual_seed(9)
        with torch.no_grad():
            net.score.weight.copy_(0.1 * torch.randn(net.score.weight.shape, generator=generator))
        net.save_pretrained(f"{OUT}/{os.path.basename(model)}_reward"); tok.save_pretrained(f"{OUT}/{os.path.basename(model)}_reward")
    else:
        net = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    peft = None
    if lora:
        targets = ["c_attn"] if "gpt2" in model else ["q_proj", "v_proj"]
        peft = LoraConfig(r=4, lora_alpha=8, target_modules=targets, task_type="CAUSAL_LM", init_lora_weights=True)
    extra = dict(peft_config=peft) if peft else {}
    trainer = trainer_class(model=net, args=config_class(**common, **options), train_dataset=Dataset.from_list(data),
        eval_dataset=Dataset.from_list(data), processing_class=tok, **extra)
    if lora:
        # B begins at zero in both; A is drawn, so it is given values that the adapter directory keeps.
        generator = torch.Generator().manual_seed(13)
        with torch.no_grad():
            for name, parameter in trainer.model.named_parameters():
                if "lora_A" in name:
                    parameter.copy_(0.2 * torch.randn(parameter.shape, generator=generator))
        trainer.model.save_pretrained(f"{OUT}/{os.path.basename(model)}_adapter")
    trainer.train()
    logs = [log for log in trainer.state.log_history if "loss" in log]
    found = trainer.evaluate()
    keys = {"reward_accuracy": "accuracies", "reward_margin": "margins", "chosen_reward": "chosen", "rejected_reward": "rejected"}
    metrics = {ours: found[f"eval_rewards/{theirs}"] for ours, theirs in keys.items() if f"eval_rewards/{theirs}" in found}
    if "eval_accuracy" in found:
        metrics = {"reward_accuracy": found["eval_accuracy"], "reward_margin": found["eval_margin"]}
    return {"losses": [log["loss"] for log in logs], "eval_loss": found["eval_loss"], "metrics": metrics}


os.makedirs(OUT, exist_ok=True)
ROWS = pairs(); CHATS = chats(ROWS); RATED = rated(ROWS)
for name, rows in [("pairs", ROWS), ("chats", CHATS), ("rated", RATED)]:
    with open(f"{OUT}/{name}.jsonl", "w") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
write_models(ROWS)
GPT2, LLAMA = f"{OUT}/gpt2", f"{OUT}/llama"
CASES = {
    "gpt2 dpo pairs": lambda: train(DPOTrainer, DPOConfig, GPT2, ROWS, loss_type=["sigmoid"], beta=BETA),
    "llama dpo chats": lambda: train(DPOTrainer, DPOConfig, LLAMA, CHATS, loss_type=["sigmoid"], beta=BETA),
    "gpt2 ipo pairs": lambda: train(DPOTrainer, DPOConfig, GPT2, ROWS, loss_type=["ipo"], beta=BETA),
    "llama orpo pairs": lambda: train(ORPOTrainer, ORPOConfig, LLAMA, ROWS, beta=BETA),
    "gpt2 orpo chats": lambda: train(ORPOTrainer, ORPOConfig, GPT2, CHATS, beta=BETA),
    "gpt2 simpo pairs": lambda: train(CPOTrainer, CPOConfig, GPT2, ROWS, loss_type="simpo", cpo_alpha=0.0, beta=BETA, simpo_gamma=0.4),
    "gpt2 kto rated": lambda: train(KTOTrainer, KTOConfig, GPT2, RATED, beta=BETA),
    "llama kto pairs": lambda: train(KTOTrainer, KTOConfig, LLAMA, ROWS, beta=BETA),
    "llama dpo pairs lora": lambda: train(DPOTrainer, DPOConfig, LLAMA, ROWS, lora=True, loss_type=["sigmoid"], beta=BETA),
    "llama reward pairs": lambda: train(RewardTrainer, RewardConfig, LLAMA, ROWS),
    "gpt2 reward chats": lambda: train(RewardTrainer, RewardConfig, GPT2, CHATS),
}
results = {}
for name, run in CASES.items():
    results[name] = run()
    print(name, results[name], flush=True)
with open(f"{OUT}/results.json", "w") as file:
    json.dump(results, file, indent=1); file.write("\n")
# Files that are not read.
for path in pathlib.Path(OUT).rglob("*"):
    if path.name in ("generation_config.json", "README.md"):
        path.unlink()
