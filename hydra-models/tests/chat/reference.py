"""What Transformers and TRL make of conversations, as JSON on standard output.

    python reference.py                    the templates of this folder; what expected.json has
    python reference.py FOLDER             those of another folder, such as `trl/chat_templates` of an installed TRL
    python reference.py --tokenizer        a new tokenizer.json for this folder

For each template and conversation: the text, a checksum of the ids, and the places of those that are learned, or the error.
Learned is what a template marks (`assistant_only_loss` of TRL), else, of a conversation that ends with its one answer, the
completion as TRL's SFTTrainer finds it; elsewhere it is null. `expected.json` was written with Transformers 5.24.0 and
TRL 1.16.0.
"""
import datetime
import json
import sys
from pathlib import Path

HERE = Path(__file__).parent
SPECIAL = ["<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|eot_id|>", "<|end|>", "<end_of_turn>", "<|user|>", "<|assistant|>"]


def write_tokenizer():
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=420, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False)
    texts = [path.read_text() for path in [*(HERE / "templates").glob("*.jinja"), HERE / "conversations.json"]]
    tokenizer.train_from_iterator(sorted(texts), trainer)
    tokenizer.save(str(HERE / "tokenizer.json"))


def runs(learned):
    """The places of ones, as `from-to`; the first place is never learned."""
    edges = [0] + [int(one and at > 0) for at, one in enumerate(learned)] + [0]
    starts = [at for at in range(len(learned)) if edges[at + 1] and not edges[at]]
    ends = [at for at in range(1, len(learned) + 1) if edges[at] and not edges[at + 1]]
    return " ".join(f"{start}-{end}" for start, end in zip(starts, ends))


def main():
    from transformers import PreTrainedTokenizerFast
    from transformers.utils import chat_template_utils
    from trl.data_utils import common_prefix_length

    class Day(datetime.datetime):
        @classmethod
        def now(cls, tz=None):
            return cls(2024, 7, 26)

    chat_template_utils.datetime = Day
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(HERE / "tokenizer.json"), bos_token="<s>", eos_token="</s>")
    conversations = json.loads((HERE / "conversations.json").read_text())

    def rendered(template, row):
        messages, tools = row["messages"], row.get("tools")
        tools = json.loads(tools) if isinstance(tools, str) else tools
        options = {"tools": tools, **row.get("chat_template_kwargs", {})}
        tokenizer.chat_template = template
        text = tokenizer.apply_chat_template(messages, tokenize=False, **options)
        marked = "generation %}" in template
        found = tokenizer.apply_chat_template(messages, return_assistant_tokens_mask=marked, **options)
        ids, learned = found["input_ids"], found.get("assistant_masks")
        answers = [at for at, message in enumerate(messages) if message["role"] == "assistant"]
        if learned is None and answers == [len(messages) - 1]:
            prompt = tokenizer.apply_chat_template(messages[:-1], add_generation_prompt=True, **options)["input_ids"]
            start = common_prefix_length(prompt, ids)
            learned = [int(at >= start) for at in range(len(ids))]
        total = 0
        for token in ids:
            total = (total * 31 + token + 1) % 2**32
        return {"text": text, "ids": total, "learned": learned and runs(learned)}

    def outcome(template, row):
        try:
            return rendered(template, row)
        except Exception as error:
            return {"error": f"{type(error).__name__}: {error}"}

    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else HERE / "templates"
    found = {
        path.stem: {name: outcome(path.read_text(), row) for name, row in conversations.items()}
        for path in sorted(folder.glob("*.jinja"))
    }
    for stem, of in found.items():
        of = ",\n".join(f"  {json.dumps(name)}: {json.dumps(one, ensure_ascii=False)}" for name, one in of.items())
        found[stem] = f" {json.dumps(stem)}: {{\n{of}\n }}"
    print("{", ",\n".join(found.values()), "}", sep="\n")


if sys.argv[1:] == ["--tokenizer"]:
    write_tokenizer()
else:
    main()
