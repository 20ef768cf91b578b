"""Randomized runs: checks that no device's measured peak exceeds its budget, and that no bit differs from training without budgets.

    python budgets.py OUT [RUNS] [SEED]

Each run trains one to four tasks of a small model (GPT-2, Llama, Mistral, Qwen, ViT, ConvNeXt; full, partial or adapter training) with
random devices, device memory, links, host memory with masters on the disk, policies and schedules. Device memory is between the minimum
of the reference's plan and the size that needs no cut. The reference is the same training on one device without budgets. OUT is a file of
JSON lines, one per run: its flags, each device's peak over its budget, bytes in use beyond reservations, and the tasks that differ. The
last line of standard output counts them. The exit status is 1 if a peak exceeds its budget, a bit differs, or a run failed.
`HYDRA_PROGRAM` names the program; the default is this tree's build.
"""

from __future__ import annotations

import json
import os
import random
import struct
import subprocess
import sys
import tempfile
import zlib
from pathlib import Path

HERE = Path(__file__).resolve().parents[2]
HYDRA = os.environ.get("HYDRA_PROGRAM", str(HERE / "target/debug/hydra"))
POLICIES = "sharded-lrtf sharded-lrtf-eager fifo srtf random round-robin sharded-lrtf-local".split()
#: Attempts with increasing memory: the minimum depends on the number of threads and of tasks.
ATTEMPTS = 60


def language_model(draw: random.Random) -> tuple[dict, int]:
    """Returns a random configuration and its number of blocks."""
    blocks, heads, positions = draw.randint(1, 6), draw.choice([2, 4]), draw.choice([16, 32, 64])
    width, tied = heads * draw.choice([8, 16, 24, 32]), draw.random() < 0.5
    kind = draw.choice(["gpt2", "gpt2", "llama", "mistral", "qwen2", "qwen3"])
    if kind == "gpt2":
        return {"model_type": "gpt2", "vocab_size": 256, "n_positions": positions, "n_embd": width, "n_layer": blocks, "n_head": heads}, blocks
    config = {
        "model_type": kind, "vocab_size": 256, "max_position_embeddings": positions, "hidden_size": width, "num_hidden_layers": blocks,
        "num_attention_heads": heads, "num_key_value_heads": draw.choice([1, 2, heads]), "intermediate_size": 2 * width, "tie_word_embeddings": tied,
    }
    return config | ({"head_dim": width // heads} if kind == "qwen3" else {}), blocks


def image_model(draw: random.Random) -> tuple[dict, int]:
    blocks = draw.randint(1, 4)
    if draw.random() < 0.5:
        width = 4 * draw.choice([8, 16])
        return {
            "model_type": "vit", "hidden_size": width, "num_hidden_layers": blocks, "num_attention_heads": 4, "intermediate_size": 2 * width,
            "image_size": 16, "patch_size": 4,
        }, blocks
    sizes = [8 * 2**stage for stage in range(draw.choice([1, 2, 3]))]
    return {
        "model_type": "convnext", "image_size": 32, "patch_size": 4, "num_stages": len(sizes), "hidden_sizes": sizes, "depths": [blocks] + [1] * (len(sizes) - 1),
        "drop_path_rate": draw.choice([0.0, 0.1]),
    }, blocks


def text(folder: Path, draw: random.Random) -> None:
    words = ["".join(draw.choices("abcdefghij", k=draw.randint(1, 7))) for _ in range(60)]
    folder.write_text(" ".join(draw.choices(words, k=draw.randint(150, 400))) + "\n")


def conversations(file: Path, draw: random.Random) -> None:
    def words(most: int) -> str:
        return " ".join("".join(draw.choices("klmnopqrst", k=3)) for _ in range(draw.randint(1, most)))

    rows = [json.dumps({"prompt": words(2), "completion": words(6)}) for _ in range(draw.randint(40, 80))]
    file.write_text("\n".join(rows) + "\n")


def images(folder: Path, draw: random.Random) -> None:
    """Writes PNG files of noise, one colour range per class, in the splits that Hydra reads."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    for split, count in (("train", 8), ("validation", 3), ("test", 2)):
        for number in range(2):
            (folder / split / f"class-{number}").mkdir(parents=True)
            for index in range(count):
                rows = b"".join(b"\0" + bytes(draw.randrange(128) + 127 * number for _ in range(3 * 16)) for _ in range(16))
                header = struct.pack(">IIBBBBB", 16, 16, 8, 2, 0, 0, 0)
                png = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")
                (folder / split / f"class-{number}" / f"{index}.png").write_bytes(png)


def training(folder: Path, draw: random.Random) -> list[str]:
    """Writes a model and its data, and returns the flags on which the results depend."""
    of_images = draw.random() < 0.2
    config, blocks = (image_model if of_images else language_model)(draw)
    (folder / "model.json").write_text(json.dumps(config))
    batch = draw.randint(1, 8)
    accumulate = draw.choice([1, 1, min(2, batch), min(4, batch), batch])
    flags = [f"--model={folder / 'model.json'}", f"--batch={batch}", f"--accumulate={accumulate}", f"--steps={draw.randint(2, 12)}", f"--seed={draw.randrange(100)}"]
    if of_images:
        images(folder / "images", draw)
        flags.append(f"--data={folder / 'images'}")
    elif draw.random() < 0.25:
        conversations(folder / "data.jsonl", draw)
        positions = config.get("n_positions") or config["max_position_embeddings"]
        flags += [f"--data={folder / 'data.jsonl'}", f"--context={positions}"] + (["--pack"] if draw.random() < 0.4 else [])
    else:
        text(folder / "text.txt", draw)
        positions = config.get("n_positions") or config["max_position_embeddings"]
        flags += [f"--data={folder / 'text.txt'}", f"--context={draw.choice([positions // 2, positions])}"]
    rates = draw.sample(["2e-3", "1e-3", "5e-4", "3e-4"], draw.randint(1, 4))
    flags.append(f"--lr={','.join(rates)}")
    flags += draw.choice([[], ["--optimizer=sgd"], ["--optimizer=lion"], ["--optimizer=adamw8bit"]])
    flags += draw.choice([[], ["--schedule=cosine", "--warmup=1"]])
    flags += draw.choice([[], ["--clip=0.3"], ["--clip=1.0"]])
    flags += draw.choice([[], ["--eval-every=2"], ["--no-initial-validation"]])
    flags += draw.choice([[], [], ["--dtype=bf16"]])
    if not of_images:
        flags += [f"--dropout={draw.choice(['0', '0.1', '0.3'])}"]
        flags += draw.choice([[], [], [], ["--lora=2,4"], [f"--train=last:{draw.randint(1, blocks)}"]])
    return flags


def hardware(plans: list[dict], parameters: int, tasks: int, accumulate: int, draw: random.Random) -> tuple[list[str], int, int]:
    """Returns the device flags without memory, the memory of a device, and that of the host if the disk is used, else 0."""
    threads = draw.randint(1, 2)
    flags = [f"--devices=cpu:{draw.randint(1, 3)}x{threads}", f"--policy={draw.choice(POLICIES)}"]
    flags += draw.choice([[], [], ["--no-prefetch"]])
    flags += draw.choice([[], [], [], ["--no-cache"]])
    flags += draw.choice([[], [], ["--link=200MB/s"], ["--link=1GB/s"], ["--link=4GB/s"]])
    flags += draw.choice([[], [], [f"--microbatch-group={draw.randint(1, accumulate)}"]])
    least = max(plan["min_device_memory_bytes"] for plan in plans)
    whole = max(plan["single_shard_bytes"] for plan in plans)
    standing = (threads - 1) * max(plan["standing_bytes"] for plan in plans)
    memory = standing + least + int((whole - least) * draw.random() ** 3 * 0.7)
    host = int(12 * parameters * tasks * draw.uniform(0.3, 1.0)) if draw.random() < 0.25 else 0
    return flags, memory, host


def run(flags: list[str], out: Path) -> tuple[int, dict | None, str]:
    command = [HYDRA, "select", *flags, f"--out={out}", "--json", "--progress=none", "--checkpoint-every=never"]
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    report = json.loads(done.stdout) if done.returncode == 0 and done.stdout.strip() else None
    return done.returncode, report, done.stderr


def bits(report: dict) -> dict:
    keys = ["losses", "initial_validation", "evaluations", "best_step", "validation", "test", "weights_sha256", "state"]
    return {task["name"]: {key: task[key] for key in keys} for task in report["tasks"]}


def drawn(index: int, seed: int) -> dict:
    draw = random.Random(f"{seed}/{index}")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        flags = training(folder, draw)
        status, reference, error = run([*flags, "--devices=cpu:1"], folder / "reference")
        row = {"run": index, "flags": " ".join(flags).replace(f"{folder}/", "")}
        if reference is None:
            return row | {"failed": error.strip().splitlines()[-1]}
        plans = [json.loads(path.read_text()) for path in (folder / "reference/plans").glob("*.json")]
        parameters = max(task["parameters"] for task in reference["tasks"])
        accumulate = int(next(flag for flag in flags if flag.startswith("--accumulate")).split("=")[1])
        devices, memory, host = hardware(plans, parameters, len(reference["tasks"]), accumulate, draw)
        for attempt in range(ATTEMPTS):
            sizes = [f"--device-memory={memory}B"] + ([f"--host-memory={host}B", "--disk-memory=1GiB"] if host else [])
            status, report, error = run([*flags, *devices, *sizes], folder / f"run-{attempt}")
            if report is not None or (folder / f"run-{attempt}/report.json").exists():
                break
            memory, host = memory + memory // 32, host + host // 6
        row["flags"] += " " + " ".join([*devices, *sizes])
        if report is None:
            return row | {"failed": error.strip().splitlines()[-1]}
        return row | {
            "peaks": [round(device["peak_bytes"] / device["budget_bytes"], 4) for device in report["devices"]],
            "unreserved": [device["unreserved_bytes"] for device in report["devices"]],
            "shards": [task["shards"] for task in report["tasks"]],
            "differs": sorted(task for task, found in bits(report).items() if found != bits(reference)[task]),
        }


def main() -> int:
    out, runs, seed = Path(sys.argv[1]), int((sys.argv[2:] or ["500"])[0]), int((sys.argv[3:] or ["0"])[0])
    rows = []
    with out.open("w") as file:
        for index in range(runs):
            rows.append(drawn(index, seed))
            file.write(json.dumps(rows[-1]) + "\n")
            file.flush()
            print(f"{index}: {json.dumps({key: value for key, value in rows[-1].items() if key != 'flags'})}", file=sys.stderr)
    trained = [row for row in rows if "peaks" in row]
    above = sum(any(peak > 1 for peak in row["peaks"]) for row in trained)
    differ = sum(bool(row["differs"]) for row in trained)
    most = max((max(row["peaks"]) for row in trained), default=0)
    failed = len(rows) - len(trained)
    print(f"{len(trained)} runs, {failed} failed, {above} with a peak above the budget (highest peak: {most:.3f} of the budget), {differ} with different bits")
    return int(above + differ + failed > 0)


if __name__ == "__main__":
    sys.exit(main())
