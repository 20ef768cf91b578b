#!/usr/bin/env python3
"""Writes the ResNet references in hydra-models/tests/fixtures/parity: results of Hugging Face transformers.

usage: make_resnets.py [OUTDIR=hydra-models/tests/fixtures/parity] [--seed N]
CPU, one thread; a batch by itself in f64, and training in f32. Every weight and every statistic is perturbed, so that a swapped or dropped one shows. In each folder:
  config.json, model.safetensors     written by save_pretrained, and a preprocessor_config.json
  inputs.safetensors                 pixel_values f32 [12, B, 3, S, S] and labels int64 [12, B]
  fwd.safetensors                    batch 0: logits by the running statistics, loss by those of the batch
  grads.safetensors                  batch 0: d loss / d p of every parameter, and the statistics of the batch under the names of
                                     the running ones
  train.json                         twelve steps of two microbatches each with AdamW (betas .9/.999, eps 1e-8, decoupled decay
                                     0.01) and with SGD (momentum 0.9), lr 1e-3 and 1e-2: the losses before each update, and the
                                     losses by the running statistics of all images after 6 and 12 steps
  adamw.safetensors, sgd.safetensors the running statistics after 12 steps
"""
import argparse, json, os
os.environ["CUDA_VISIBLE_DEVICES"] = ""; os.environ["HF_HUB_OFFLINE"] = "1"
import torch
from safetensors.torch import save_file
from transformers import ResNetConfig, ResNetForImageClassification

parser = argparse.ArgumentParser()
parser.add_argument("out", nargs="?", default="hydra-models/tests/fixtures/parity")
parser.add_argument("--seed", type=int, default=8765)
args = parser.parse_args()
torch.set_num_threads(1); torch.use_deterministic_algorithms(True)
STEPS, ITEMS, MICROBATCHES, SIDE, CLASSES = 12, 6, 2, 18, 5


def perturb(model):
    generator = torch.Generator().manual_seed(args.seed + 1)
    noise = lambda of: torch.randn(of.shape, generator=generator)
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.add_((0.2 if "normalization" in name else 0.1) * noise(p))
        for name, b in model.named_buffers():
            if name.endswith("running_mean"):
                b.add_(0.2 * noise(b))
            elif name.endswith("running_var"):
                b.mul_((0.3 * noise(b)).exp())
            else:
                b.fill_(7)


def states(model):
    return {name: b.clone() for name, b in model.named_buffers()}


def train(model, inputs, optimizer):
    losses, evaluations = [], []
    every = {name: values.flatten(0, 1) for name, values in inputs.items()}
    for k in range(STEPS):
        model.train()
        optimizer.zero_grad(set_to_none=True)
        total = 0.0
        for part in range(MICROBATCHES):
            size = ITEMS // MICROBATCHES
            batch = {name: values[k, part * size:(part + 1) * size] for name, values in inputs.items()}
            loss = model(**batch).loss / MICROBATCHES
            loss.backward()
            total += loss.item()
        losses.append(total)
        optimizer.step()
        if k + 1 in (STEPS // 2, STEPS):
            model.eval()
            with torch.no_grad():
                evaluations.append(model(**every).loss.item())
    return dict(losses=losses, evaluations=evaluations)


def record(name, **options):
    out = f"{args.out}/{name}"
    os.makedirs(out, exist_ok=True)
    torch.manual_seed(args.seed)
    model = ResNetForImageClassification(ResNetConfig(num_labels=CLASSES, **options))
    perturb(model)
    model.save_pretrained(out)
    with open(f"{out}/preprocessor_config.json", "w") as file:
        json.dump({"feature_extractor_type": "ConvNextFeatureExtractor", "size": {"shortest_edge": SIDE}, "crop_pct": 0.875}, file)
    generator = torch.Generator().manual_seed(args.seed + 2)
    inputs = {
        "pixel_values": torch.randn((STEPS, ITEMS, 3, SIDE, SIDE), generator=generator),
        "labels": torch.randint(0, CLASSES, (STEPS, ITEMS), generator=generator),
    }
    save_file(inputs, f"{out}/inputs.safetensors")
    first = {name: values[0] for name, values in inputs.items()}
    load = lambda: ResNetForImageClassification.from_pretrained(out)

    model = load().double().eval()
    first["pixel_values"] = first["pixel_values"].double()
    with torch.no_grad():
        logits = model(pixel_values=first["pixel_values"]).logits
    model.train()
    for module in model.modules():
        if isinstance(module, torch.nn.BatchNorm2d):
            module.momentum = 1.0
            module.num_batches_tracked.zero_()
    loss = model(**first).loss
    loss.backward()
    gradients = {n: p.grad.contiguous() for n, p in model.named_parameters()}
    gradients |= {n: b.double().reshape(-1).contiguous() for n, b in model.named_buffers()}
    save_file(gradients, f"{out}/grads.safetensors")
    save_file({"logits": logits.contiguous(), "loss": loss.detach()}, f"{out}/fwd.safetensors")

    trained = {}
    for optimizer, of in {
        "adamw": lambda ps: torch.optim.AdamW(ps, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01, foreach=False, fused=False),
        "sgd": lambda ps: torch.optim.SGD(ps, lr=1e-2, momentum=0.9, foreach=False, fused=False),
    }.items():
        model = load()
        trained[optimizer] = train(model, inputs, of(list(model.parameters())))
        save_file({n: b.float().reshape(-1).contiguous() for n, b in states(model).items()}, f"{out}/{optimizer}.safetensors")
    with open(f"{out}/train.json", "w") as file:
        json.dump(dict(steps=STEPS, microbatches=MICROBATCHES, **trained), file, indent=1)
    print(out, "parameters", sum(p.numel() for p in model.parameters()), trained)


record("resnet_basic", embedding_size=6, hidden_sizes=[6, 10], depths=[2, 1], layer_type="basic", downsample_in_first_stage=True)
record("resnet_bottleneck", embedding_size=6, hidden_sizes=[8, 16], depths=[1, 2], hidden_act="gelu", downsample_in_bottleneck=True)
