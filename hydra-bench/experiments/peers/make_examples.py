#!/usr/bin/env python3
"""Writes the instruction data of both sides of `../measure peft`: ids and labels of examples with lengths from a quarter of the context to
all of it. Ids and lengths are uniformly random. The first half to three quarters of an example is its prompt, which is masked.

usage: make_examples.py OUTDIR [EXAMPLES=40] [TOKENS=256] [VOCABULARY=49152]
"""
import json, os, random, sys

out = sys.argv[1]
examples, tokens, vocabulary = map(int, (sys.argv[2:] + ["40", "256", "49152"][len(sys.argv) - 2:]))
os.makedirs(out, exist_ok=True)
draw = random.Random(0)


def example():
    length = draw.randint(tokens // 4, tokens)
    ids = [draw.randrange(vocabulary) for _ in range(length)]
    prompt = draw.randint(length // 2, 3 * length // 4)
    return {"input_ids": ids, "labels": [-100] * prompt + ids[prompt:]}


for name, count in [("train", examples), ("validation", 1), ("test", 1)]:
    with open(f"{out}/{name}.jsonl", "w") as file:
        for _ in range(count):
            file.write(json.dumps(example()) + "\n")
