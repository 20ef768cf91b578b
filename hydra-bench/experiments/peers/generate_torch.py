#!/usr/bin/env python3
"""Generates texts with Transformers, greedily, in f32. Prints one line of JSON.

generate_torch.py DIR PROMPTS [--new 65] [--threads 2]

DIR is a model with its tokenizer, and PROMPTS a file with a prompt in each line. The prompts are one batch, padded on the left. No end
token ends a text. `seconds` are those of a call of `generate`, and `seconds_of_one` those of a call for one token.
"""
import argparse, json, os, resource, time

p = argparse.ArgumentParser()
p.add_argument("directory")
p.add_argument("prompts")
p.add_argument("--new", type=int, default=65)
p.add_argument("--threads", type=int, default=2)
a = p.parse_args()
for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ[name] = str(a.threads)
os.environ.update(CUDA_VISIBLE_DEVICES="", HF_HUB_OFFLINE="1")

import torch, transformers
from transformers import AutoModelForCausalLM, AutoTokenizer

transformers.logging.set_verbosity_error()
torch.set_num_threads(a.threads)
model = AutoModelForCausalLM.from_pretrained(a.directory, dtype=torch.float32).eval()
tokenizer = AutoTokenizer.from_pretrained(a.directory, padding_side="left")
tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
prompts = open(a.prompts).read().splitlines()
given = tokenizer(prompts, return_tensors="pt", padding=True)
settings = dict(do_sample=False, eos_token_id=None, pad_token_id=tokenizer.pad_token_id)
model.generation_config.eos_token_id = None
with torch.inference_mode():
    model.generate(**given, max_new_tokens=2, **settings)
    seconds = {}
    for tokens in (1, a.new):
        begun = time.perf_counter()
        made = model.generate(**given, max_new_tokens=tokens, **settings)
        seconds[tokens] = time.perf_counter() - begun
new = made[:, given["input_ids"].shape[1] :].tolist()
print(json.dumps(dict(
    torch=torch.__version__, transformers=transformers.__version__, threads=a.threads, prompts=len(prompts), prompt_tokens=given["attention_mask"].sum().item(),
    new_tokens=sum(map(len, new)), seconds=round(seconds[a.new], 3), seconds_of_one=round(seconds[1], 3),
    peak_rss_mib=round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024), token_ids=new,
)))
