#!/usr/bin/env python3
"""Instruction data that both sides of `../measure peft` read: ids and labels of examples that have a quarter of the context up to
all of it. Ids and lengths are drawn evenly; nothing is learned from the first half to three quarters of an example, which stand
for its prompt.

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
