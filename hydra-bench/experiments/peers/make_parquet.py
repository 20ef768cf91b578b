#!/usr/bin/env python3
"""Writes the tables in hydra-models/tests/fixtures/parquet with pyarrow, and the same rows as lines of JSON.

usage: make_parquet.py [OUTDIR=hydra-models/tests/fixtures/parquet]
"""
import json, os, sys
import pyarrow as pa, pyarrow.parquet as pq

out = sys.argv[1] if len(sys.argv) > 1 else "hydra-models/tests/fixtures/parquet"
os.makedirs(out, exist_ok=True)


def table(name, rows, schema=None, lines=True, **options):
    pq.write_table(pa.Table.from_pylist(rows, schema=schema), f"{out}/{name}.parquet", **options)
    if lines:
        with open(f"{out}/{name}.jsonl", "w") as file:
            for row in rows:
                file.write(json.dumps(row, ensure_ascii=False) + "\n")


words = "the cat sees a dog and a bird in an old, green garden; é ü 漢字".split()
text = lambda i, n: " ".join(words[(i * 7 + k * k) % len(words)] for k in range(n))
say = lambda role, content: {"role": role, "content": content}
# Several row groups, dictionary pages, and the compressions of Hugging Face's files.
table("text", [{"text": text(i, 6 + i % 5)} for i in range(40)], compression="snappy", row_group_size=13)
table("completions", [{"prompt": text(i, 3), "completion": text(i + 1, 4)} for i in range(40)], compression="snappy")
chat = lambda i: [say("system", text(i, 2))] * (i % 2) + [say("user", text(i, 3)), say("assistant", text(i + 2, 4))] * (1 + i % 3)
table("chat", [{"id": i, "messages": chat(i)} for i in range(20)], compression="snappy", use_dictionary=False)
table("tokens", [{"input_ids": [i % 7, 3, 5], "labels": [-100, 3, 5]} for i in range(20)], compression="none")
table("zstandard", [{"text": text(i, 6)} for i in range(5)], lines=False, compression="zstd")
table("gzip", [{"text": text(i, 6)} for i in range(5)], lines=False, compression="gzip")
table("brotli", [{"text": "a"}], lines=False, compression="brotli")
wrong = dict(lines=False, compression="snappy")
table("columns", [{"question": "a", "answer": "b"}], **wrong)
table("missing", [{"prompt": "a", "completion": "b"}] * 2 + [{"prompt": "a", "completion": None}], **wrong)
table("numbers", [{"text": 3}], **wrong)
table("bytes", [{"text": b"\xff\xfe"}], **wrong)
table("roles", [{"messages": [say("user", "a"), say("assistant", "b")]}, {"messages": [{"role": None, "content": "a"}]}], **wrong)
