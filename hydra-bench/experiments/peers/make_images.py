#!/usr/bin/env python3
"""Writes the image references in hydra-models/tests/fixtures/parity: results of Hugging Face transformers and PEFT.

usage: make_images.py [OUTDIR=hydra-models/tests/fixtures/parity] [--seed N]
fp32, CPU, one thread. Every weight is perturbed, so that a swapped or dropped bias, norm or scale shows.
convnext_tiny is a ConvNextForImageClassification, vit_lora_tiny a ViTForImageClassification with adapters. In each:
  config.json, model.safetensors     written by save_pretrained; for LoRA in base/, and the adapters in adapter/
  inputs.safetensors                 pixel_values f32 [10, B, 3, S, S] and labels int64 [10, B]
  fwd.safetensors                    batch 0: logits, loss
  grads.safetensors                  d loss / d p of every trained parameter, batch 0
  train.json                         ten AdamW steps (step k uses batch k; betas .9/.999, eps 1e-8, decoupled decay 0.01 on all
                                     trained parameters, clip 1.0, warmup 3 of 10, cosine to 0, lr 1e-3): losses before each
                                     update, learning rates, gradient norms before clipping, loss of batch 0 afterwards
"""
import argparse, json, os
os.environ["CUDA_VISIBLE_DEVICES"] = ""; os.environ["HF_HUB_OFFLINE"] = "1"
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import save_file
from transformers import (ConvNextConfig, ConvNextForImageClassification, ViTConfig, ViTForImageClassification,
    get_cosine_schedule_with_warmup)

parser = argparse.ArgumentParser()
parser.add_argument("out", nargs="?", default="hydra-models/tests/fixtures/parity")
parser.add_argument("--seed", type=int, default=4321)
args = parser.parse_args()
torch.set_num_threads(1); torch.use_deterministic_algorithms(True)
STEPS, ITEMS, SIDE, CLASSES = 10, 2, 16, 5


def perturb(model):
    generator = torch.Generator().manual_seed(args.seed + 1)
    with torch.no_grad():
        for name, p in model.named_parameters():
            r = torch.randn(p.shape, generator=generator)
            if "layer_scale" in name:
                p.copy_(0.5 + 0.2 * r)
            else:
                p.add_((0.2 if "norm" in name else 0.1 if name.endswith("bias") else 0.12) * r)


def record(out, model):
    """Writes the results of `model` on ten batches."""
    model.train()
    generator = torch.Generator().manual_seed(args.seed + 2)
    inputs = {
        "pixel_values": torch.randn((STEPS, ITEMS, 3, SIDE, SIDE), generator=generator),
        "labels": torch.randint(0, CLASSES, (STEPS, ITEMS), generator=generator),
    }
    run = lambda k: model(**{name: values[k] for name, values in inputs.items()})
    save_file(inputs, f"{out}/inputs.safetensors")
    model.zero_grad(set_to_none=True)
    first = run(0)
    first.loss.backward()
    save_file({"logits": first.logits.detach().contiguous(), "loss": first.loss.detach()}, f"{out}/fwd.safetensors")
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
    save_file({n: p.grad.contiguous() for n, p in trained.items()}, f"{out}/grads.safetensors")

    ps = list(trained.values())
    optimizer = torch.optim.AdamW(ps, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01, foreach=False, fused=False)
    schedule = get_cosine_schedule_with_warmup(optimizer, num_warmup_steps=3, num_training_steps=STEPS)
    losses, rates, norms = [], [], []
    for k in range(STEPS):
        optimizer.zero_grad(set_to_none=True)
        loss = run(k).loss
        loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(ps, 1.0).item())
        losses.append(loss.item())
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    with torch.no_grad():
        after = run(0).loss.item()
    with open(f"{out}/train.json", "w") as file:
        json.dump(dict(steps=STEPS, optimizer="AdamW", lr=1e-3, weight_decay=0.01, clip_grad_norm=1.0, schedule="cosine",
                       warmup_steps=3, losses=losses, lrs=rates, grad_norms_preclip=norms, loss_batch0_after=after), file, indent=1)
    print(out, "parameters", sum(p.numel() for p in ps), "loss", losses[0], "->", losses[-1], "after", after)


out = f"{args.out}/convnext_tiny"
os.makedirs(out, exist_ok=True)
torch.manual_seed(args.seed)
config = ConvNextConfig(hidden_sizes=[8, 12, 16], depths=[1, 2, 1], num_stages=3, patch_size=2, image_size=SIDE, num_labels=CLASSES)
model = ConvNextForImageClassification(config)
perturb(model)
model.save_pretrained(out)
record(out, ConvNextForImageClassification.from_pretrained(out))

out = f"{args.out}/vit_lora_tiny"
os.makedirs(out, exist_ok=True)
torch.manual_seed(args.seed)
config = ViTConfig(hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=24, image_size=SIDE, patch_size=8,
    num_labels=CLASSES, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
config._attn_implementation = "eager"
model = ViTForImageClassification(config)
perturb(model)
model.save_pretrained(f"{out}/base")
model = ViTForImageClassification.from_pretrained(f"{out}/base", attn_implementation="eager")
model = get_peft_model(model, LoraConfig(r=2, lora_alpha=8, lora_dropout=0.0, target_modules=["q_proj", "v_proj", "fc2"], bias="none"))
generator = torch.Generator().manual_seed(args.seed + 3)
with torch.no_grad():
    for name, p in model.named_parameters():
        if "lora_B" in name:
            p.add_(0.1 * torch.randn(p.shape, generator=generator))
model.save_pretrained(f"{out}/adapter")
record(out, model)
