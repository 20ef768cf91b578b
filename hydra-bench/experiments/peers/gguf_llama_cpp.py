#!/usr/bin/env python3
"""Compares GGUF files that Hydra writes in llama.cpp: the tokens of prompts, and the greedy tokens after them.

usage: gguf_llama_cpp.py HYDRA DIR.. [--tokens 12]

Each DIR is a Hugging Face directory with a tokenizer.json. It is exported in F32, llama.cpp reads it through llama-cpp-python, with its
key-value cache in F32, and `hydra generate` continues the same prompts. llama.cpp computes Mistral without its sliding window: texts
have to be shorter. Ends with status 1 if something differs.
"""
import argparse, json, os, subprocess, sys, tempfile
from llama_cpp import GGML_TYPE_F32, Llama
from tokenizers import Tokenizer

PROMPTS = ["the cat sat on the mat", "a bird in the old garden and", "dog", "Héllo, 42 wörlds!"]
p = argparse.ArgumentParser()
p.add_argument("hydra")
p.add_argument("directories", nargs="+")
p.add_argument("--tokens", type=int, default=12)
a = p.parse_args()


def hydra(*arguments):
    return subprocess.run([a.hydra, *arguments], check=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True).stdout


differs = False
for directory in a.directories:
    with tempfile.TemporaryDirectory() as folder:
        file, prompts = os.path.join(folder, "model.gguf"), os.path.join(folder, "prompts.jsonl")
        with open(prompts, "w") as rows:
            rows.writelines(json.dumps({"prompt": prompt}) + "\n" for prompt in PROMPTS)
        hydra("export", "--model", directory, "--format", "gguf", "--dtype", "f32", "--out", file)
        devices = ["--devices", "cpu:1x1", "--device-memory", "1GiB"]
        given = ["--prompts", prompts, "--max-new-tokens", str(a.tokens), "--temperature", "0", "--json"]
        ours = [json.loads(line) for line in hydra("generate", "--model", directory, *given, *devices).splitlines()]
        model = Llama(file, n_ctx=256, type_k=GGML_TYPE_F32, type_v=GGML_TYPE_F32, flash_attn=False, verbose=False)
        tokenizer, equal = Tokenizer.from_file(os.path.join(directory, "tokenizer.json")), []
        for prompt, found in zip(PROMPTS, ours, strict=True):
            ids, theirs = model.tokenize(prompt.encode(), special=True), []
            model.reset()
            for token in model.generate(ids, temp=0.0, top_k=1, repeat_penalty=1.0):
                theirs.append(token)
                if len(theirs) == len(found["token_ids"]):
                    break
            equal.append((ids == tokenizer.encode(prompt).ids, theirs == found["token_ids"]))
    differs |= not all(map(all, equal))
    print(json.dumps({"directory": directory, "prompts": len(equal), "equal_prompts": sum(ids for ids, _ in equal), "equal_answers": sum(tokens for _, tokens in equal)}))
sys.exit(differs)
