#!/usr/bin/env python3
"""Writes labelled texts that are made up, and a tokenizer of their words: make_tweets.py DIR [ROWS [SHORTEST LONGEST]].

DIR/tweets.csv has the columns text and label (negative, neutral, positive). One to three words of a text decide its label, and one label
in twenty is wrong, as labels of people are. Lengths are drawn evenly from SHORTEST to LONGEST words. DIR/tokenizer.json has one token a
word, so that both sides of a comparison have the same ids. The files are a function of the arguments alone.
"""
import csv, json, os, random, sys

folder = sys.argv[1]
rows = int(sys.argv[2]) if len(sys.argv) > 2 else 480
shortest, longest = (int(sys.argv[3]), int(sys.argv[4])) if len(sys.argv) > 4 else (6, 22)
decisive = {
    "negative": "awful sad broken hate worst angry shame lie failed boring".split(),
    "neutral": "today report table meeting agenda monday draft committee session paper".split(),
    "positive": "great happy superb love best proud win hope brilliant thanks".split(),
}
rest = (
    "the a this that of on in at for with about from after before and but so we they she he it was is has had says said wants told "
    "debate minister tax school city train election budget law vote party bill reform plan speech house panel week year people town "
    "new old big small long short first last more less very really still again never always maybe now then here there"
).split()
draw = random.Random(7)
os.makedirs(folder, exist_ok=True)
with open(os.path.join(folder, "tweets.csv"), "w", newline="") as file:
    table = csv.writer(file, lineterminator="\n")
    table.writerow(["text", "label"])
    for _ in range(rows):
        label = draw.choice(sorted(decisive))
        words = [draw.choice(rest) for _ in range(draw.randint(shortest, longest))]
        for _ in range(draw.randint(1, 3)):
            words[draw.randrange(len(words))] = draw.choice(decisive[label])
        table.writerow([" ".join(words), draw.choice(sorted(decisive)) if draw.random() < 0.05 else label])

special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
words = special + sorted({word for group in decisive.values() for word in group} | set(rest))
tokenizer = {
    "version": "1.0",
    "truncation": None,
    "padding": None,
    "added_tokens": [
        {"id": i, "content": token, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
        for i, token in enumerate(special)
    ],
    "normalizer": None,
    "pre_tokenizer": {"type": "WhitespaceSplit"},
    "post_processor": None,
    "decoder": None,
    "model": {"type": "WordLevel", "vocab": {word: i for i, word in enumerate(words)}, "unk_token": "[UNK]"},
}
with open(os.path.join(folder, "tokenizer.json"), "w") as file:
    json.dump(tokenizer, file)
