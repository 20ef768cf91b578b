#!/usr/bin/env python3
"""Trains GPT-2 as modules of PyTorch: by a loop of PyTorch, or by Hydra. Prints one line of JSON.

modules_torch.py loop|hydra [--threads 1] [--checkpointing] [--device-memory 2GiB] [--tasks 12] [--devices 2] ..

The weights are random, the tokens too. Without --tasks one configuration is trained, and `step_s` is the median of the seconds of a
minibatch after the first --warmup ones; with it, configurations with different rates, one after another in the loop, at once with
Hydra, and `tokens_per_s` is that of all. The process's own packages decide which Hydra runs: hydra_train must be importable.
"""
import argparse, json, os, resource, statistics, tempfile, time

p = argparse.ArgumentParser()
p.add_argument("how", choices=["loop", "hydra"])
p.add_argument("--layers", type=int, default=12)
p.add_argument("--embd", type=int, default=768)
p.add_argument("--heads", type=int, default=12)
p.add_argument("--ctx", type=int, default=512)
p.add_argument("--batch", type=int, default=1)
p.add_argument("--steps", type=int, default=8)
p.add_argument("--warmup", type=int, default=2)
p.add_argument("--tasks", type=int, default=0)
p.add_argument("--devices", type=int, default=1)
p.add_argument("--threads", type=int, default=1, help="of the process in the loop, of each device with Hydra")
p.add_argument("--checkpointing", action="store_true", help="recompute activations of each block, in the loop")
p.add_argument("--device-memory", default="3GiB")
p.add_argument("--host-memory")
a = p.parse_args()
for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ[name] = str(a.threads * (a.devices if a.how == "hydra" else 1))
os.environ.update(CUDA_VISIBLE_DEVICES="", HF_HUB_OFFLINE="1")

import torch, transformers
from transformers import GPT2Config, GPT2LMHeadModel

transformers.logging.set_verbosity_error()
torch.set_num_threads(a.threads)
config = GPT2Config(n_positions=a.ctx, n_embd=a.embd, n_layer=a.layers, n_head=a.heads, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
                    use_cache=False)
generator = torch.Generator().manual_seed(1)
tokens = torch.randint(0, config.vocab_size, (a.steps * a.batch, a.ctx), generator=generator)
rows = [{"input_ids": row, "attention_mask": torch.ones_like(row), "labels": row} for row in tokens]
rates = [1e-4 * (1 + i) / 12 for i in range(max(1, a.tasks))]


def fresh():
    torch.manual_seed(0)
    return GPT2LMHeadModel(config)


def loop(rate):
    """Returns when each minibatch ended, and the losses."""
    model = fresh().train()
    if a.checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.0, fused=True)
    ends, losses = [], []
    for step in range(a.steps):
        batch = torch.utils.data.default_collate(rows[step * a.batch : (step + 1) * a.batch])
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        ends.append(time.perf_counter())
    return ends, losses


def hydra():
    """Returns the run, when each minibatch of the first task ended, and the losses."""
    import hydra_train
    from hydra_train.torch import chain

    given = {"host_memory": a.host_memory} if a.host_memory else {}
    run = hydra_train.select(
        model=chain(fresh(), threads=a.threads), data=rows, batch=a.batch, steps=a.steps, lr=rates, no_shuffle=True, weight_decay=0,
        devices=f"cpu:{a.devices}x{a.threads}", device_memory=a.device_memory, checkpoint_every="never", out=tempfile.mkdtemp(), force=True,
        **given,
    ).wait()
    task = next(iter(run.tasks.values()))
    events = map(json.loads, open(os.path.join(run.directory, "metrics.jsonl")))
    ends = [event["at_s"] for event in events if event["event"] == "minibatch" and event["task"] == task.name]
    return run, ends, task.losses


begun = time.perf_counter()
if a.how == "loop":
    for rate in rates:
        ends, losses = loop(rate)
    whole, of_run = time.perf_counter() - begun, {}
else:
    run, ends, losses = hydra()
    whole = run.report["makespan_s"]
    of_run = {"prepared_s": round(time.perf_counter() - begun - whole, 3), "memory": [
        {name: device[name] for name in ("budget_bytes", "peak_bytes") if name in device} for device in run.report["devices"]]}
steps = [after - before for before, after in zip(ends, ends[1:])][a.warmup - 1 :]
result = dict(
    how=a.how, threads=a.threads, devices=a.devices, checkpointing=a.checkpointing, torch=torch.__version__, transformers=transformers.__version__,
    parameters=sum(each.numel() for each in fresh().parameters()), whole_s=round(whole, 3), losses=[round(loss, 6) for loss in losses],
    peak_rss_mib=round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024), **of_run,
)
if a.tasks:
    result.update(tasks=a.tasks, tokens_per_s=round(len(rates) * a.steps * a.batch * a.ctx / whole, 1))
else:
    result.update(step_s=round(statistics.median(steps), 4), tokens_per_s=round(a.batch * a.ctx / statistics.median(steps), 1))
print(json.dumps(result))
