#!/usr/bin/env python3
"""Trains four learning rates of a PyTorch model at once, on two devices that are each too small for one model.

    python torch_models.py network|gpt2|gemma|bert|mixtral [--out DIR] [--steps 16] [--device-memory SIZE] [--devices cpu:2x1]

Weights and rows are random, and the models small, so that nothing is downloaded and a grid takes seconds. The same command again
continues a run that was stopped or killed, to the same weights.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import cross_entropy

import hydra_train as hydra
from hydra_train.torch import Chain, chain

RATES = [3e-3, 1e-3, 3e-4, 1e-4]
ITEMS, LENGTH, WORDS, BATCH = 40, 32, 256, 4
#: Memory of each device: less than one model needs with its gradients and activations.
DEVICE_MEMORY = {"network": "5MiB", "gpt2": "9MiB", "gemma": "9MiB", "bert": "9MiB", "mixtral": "9MiB"}


class Residual(torch.nn.Module):
    """A block of a network of one's own."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(width)
        self.inner, self.outer = torch.nn.Linear(width, 4 * width), torch.nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.outer(torch.relu(self.inner(self.norm(x))))


def network() -> Chain:
    """A network of one's own, which tells whether the sum of a row is positive."""

    def accuracy(outputs: torch.Tensor, batch: Any) -> torch.Tensor:
        return (outputs.argmax(-1) == batch["y"][:, 0]).sum()

    blocks = [Residual(LENGTH * 4) for _ in range(6)]
    modules = [torch.nn.Linear(LENGTH, LENGTH * 4), *blocks, torch.nn.Linear(LENGTH * 4, 2)]
    return Chain(modules, inputs="x", loss=lambda outputs, batch: cross_entropy(outputs, batch["y"][:, 0]), metrics={"accuracy": accuracy})


def transformer(name: str) -> torch.nn.Module:
    """A small model of Transformers, without dropout."""
    import transformers

    sizes: dict[str, Any] = {"vocab_size": WORDS, "hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 4}
    if name == "gpt2":
        sizes = {"vocab_size": WORDS, "n_positions": LENGTH, "n_embd": 128, "n_layer": 4, "n_head": 4}
        return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0))
    if name == "bert":
        config = transformers.BertConfig(**sizes, max_position_embeddings=LENGTH, hidden_dropout_prob=0, attention_probs_dropout_prob=0)
        return transformers.BertForSequenceClassification(config)
    sizes |= {"max_position_embeddings": LENGTH, "num_key_value_heads": 2, "head_dim": 32, "pad_token_id": 0}
    if name == "gemma":
        kinds = ["sliding_attention", "full_attention"] * 2
        return transformers.Gemma2ForCausalLM(transformers.Gemma2Config(**sizes, sliding_window=8, layer_types=kinds))
    sizes |= {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 128}
    return transformers.MixtralForCausalLM(transformers.MixtralConfig(**sizes))


def job(name: str) -> tuple[Chain, dict[str, list[dict[str, torch.Tensor]]]]:
    """Returns a chain with its first weights, and its rows by split."""
    generator = torch.Generator().manual_seed(1)
    torch.manual_seed(0)
    if name == "network":
        x = torch.randn(ITEMS, LENGTH, generator=generator)
        return network(), split([{"x": row, "y": (row.sum() > 0).long().reshape(1)} for row in x])
    tokens = torch.randint(1, WORDS, (ITEMS, LENGTH), generator=generator)
    # A text has a class, and a language model its own tokens to predict.
    rows = [{"input_ids": row, "attention_mask": torch.ones_like(row), "labels": row[:1] % 2 if name == "bert" else row} for row in tokens]
    return chain(transformer(name)), split(rows)


def split(rows: list[dict[str, torch.Tensor]]) -> dict[str, list[dict[str, torch.Tensor]]]:
    return {"train": rows[8:], "validation": rows[:8]}


def train(name: str, out: Path | str | None = None, **settings: Any) -> hydra.Run:
    """Starts the grid, or continues that of the directory `out`."""
    model, data = job(name)
    if out is not None and Path(out, "spec.toml").exists():
        return hydra.resume(out, model=model, data=data)
    chosen: dict[str, Any] = {"devices": "cpu:2x1", "device_memory": DEVICE_MEMORY[name], "steps": 16, "checkpoint_every": "4"} | settings
    # The rows are random. In their order they are those of a plain loop, with which a test compares the losses.
    return hydra.select(model=model, data=data, lr=RATES, batch=BATCH, weight_decay=0.01, no_shuffle=True, out=out, **chosen)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=DEVICE_MEMORY)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--device-memory")
    parser.add_argument("--devices", default="cpu:2x1")
    given = parser.parse_args()
    memory = given.device_memory or DEVICE_MEMORY[given.name]
    run = train(given.name, given.out, steps=given.steps, devices=given.devices, device_memory=memory).wait()
    for task in run.tasks.values():
        validation = task.validation or {}
        print(f"{task.name}: validation loss {validation['loss']:.4f}, {task.report['shards']} shards, weights {task.weights_sha256}")
    print(f"the best is {run.best.name}, in {run.best.model_dir}")


if __name__ == "__main__":
    main()
