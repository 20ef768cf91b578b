#!/usr/bin/env python3
"""PyTorch on one GPU: the baseline of Hydra's training steps. Needs only torch; `--configuration` also transformers.

  gpu_torch.py here                       the GPU's name, or an error if there is none (exit status 1)
  gpu_torch.py copies                     copies between page-locked memory and the GPU, in each direction and both concurrently
  gpu_torch.py products                   square matrix products in f32, TF32 and bf16
  gpu_torch.py train --mode MODE ...      full training steps of a GPT-2: forward, loss, backward, AdamW

Every command prints one line of JSON. `--mode plain` keeps everything on the GPU, `checkpointing` also recomputes each
block in the backward pass, and `offload` keeps parameters, gradients and optimizer on the host (FSDP2 with its CPU
offload policy on one rank, and checkpointing). Dropout is off, the head is tied to the embedding, and tokens are
random, as in `hydra step`. `--limit-gib` limits the GPU memory of PyTorch. With `--configuration FILE.json`, the model is
the causal language model that Transformers builds from that configuration, with its scaled dot-product attention.
"""
import argparse
import json
import os
import resource
import statistics
import sys
import time


def arguments():
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=["here", "copies", "products", "train"])
    parser.add_argument("--device", default="cuda", help="cpu, to try the script without a GPU")
    parser.add_argument("--mode", choices=["plain", "checkpointing", "offload"], default="plain")
    parser.add_argument("--precision", choices=["f32", "tf32", "bf16"], default="f32",
                        help="bf16 is autocast with f32 masters; with offload, parameters and gradients on the GPU")
    parser.add_argument("--configuration", help="a model of Transformers, in place of the GPT-2; only --mode plain")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--heads", type=int, default=12)
    parser.add_argument("--vocabulary", type=int, default=50257)
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--limit-gib", type=float, default=0.0)
    parser.add_argument("--mib", type=int, default=256)
    return parser.parse_args()


args = arguments()
try:
    import torch
    import torch.nn.functional as F
    from torch import nn
    from torch.utils.checkpoint import checkpoint
except (ImportError, OSError) as error:
    print(json.dumps({"problem": f"no PyTorch: {error}"}))
    sys.exit(1)

ON_GPU = args.device != "cpu"
if ON_GPU and not torch.cuda.is_available():
    print(json.dumps({"problem": f"PyTorch {torch.__version__} finds no GPU", "torch": torch.__version__}))
    sys.exit(1)
torch.backends.cuda.matmul.allow_tf32 = args.precision == "tf32"
torch.backends.cudnn.allow_tf32 = args.precision == "tf32"


def sync():
    if ON_GPU:
        torch.cuda.synchronize()


def seconds(work, repetitions=5):
    """Returns the shortest of some repetitions, after a warm-up: an idle GPU has slow clocks."""
    best = float("inf")
    warm_until = time.perf_counter() + (0.3 if ON_GPU else 0.0)
    while time.perf_counter() < warm_until:
        work()
        sync()
    for repetition in range(repetitions + 1):
        sync()
        since = time.perf_counter()
        work()
        sync()
        if repetition:
            best = min(best, time.perf_counter() - since)
    return best


def here():
    name = torch.cuda.get_device_name() if ON_GPU else "cpu"
    return {"device": name, "torch": torch.__version__, "cuda": torch.version.cuda}


def copies():
    elements = args.mib << 18
    host = [torch.ones(elements, pin_memory=ON_GPU) for _ in range(2)]
    there = [torch.ones(elements, device=args.device) for _ in range(2)]
    streams = [torch.cuda.Stream() for _ in range(2)] if ON_GPU else [None, None]
    times = 8

    def copy(directions):
        for _ in range(times):
            for direction in directions:
                into, source = (there[0], host[0]) if direction == 0 else (host[1], there[1])
                with torch.cuda.stream(streams[direction]):
                    into.copy_(source, non_blocking=True)

    rate = {}
    for name, directions in [("up", [0]), ("down", [1]), ("each_at_once", [0, 1])]:
        rate[f"{name}_gb_per_s"] = 4 * elements * times / seconds(lambda: copy(directions)) * 1e-9
    return {"mib": args.mib, "page_locked": ON_GPU, **rate}


def products():
    rows = []
    for side in (1024, 2048, 4096) if ON_GPU else (256,):
        for precision in ("f32", "tf32", "bf16"):
            torch.backends.cuda.matmul.allow_tf32 = precision == "tf32"
            kind = torch.bfloat16 if precision == "bf16" else torch.float32
            a, b = (torch.randn(side, side, device=args.device).to(kind) for _ in range(2))
            times = 10 if ON_GPU else 1
            took = seconds(lambda: [a @ b for _ in range(times)])
            rows.append({"side": side, "precision": precision, "tflops": 2 * side**3 * times / took * 1e-12})
    return {"products": rows}


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        batch, tokens, width = x.shape
        parts = self.qkv(self.first(x)).view(batch, tokens, 3, self.heads, width // self.heads)
        q, k, v = parts.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, tokens, width))
        return x + self.narrow(F.gelu(self.wide(self.second(x)), approximate="tanh"))


class Transformers(nn.Module):
    """The model of a configuration of Transformers, and the loss of `Gpt2`."""

    def __init__(self, path):
        super().__init__()
        from transformers import AutoConfig, AutoModelForCausalLM

        values = json.load(open(path))
        config = AutoConfig.for_model(values.pop("model_type"), **values)
        self.model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
        self.vocabulary = config.vocab_size

    def forward(self, ids):
        logits = self.model(input_ids=ids, use_cache=False).logits
        targets = F.pad(ids[:, 1:], (0, 1), value=-100)
        return F.cross_entropy(logits.view(-1, self.vocabulary).float(), targets.view(-1))


class Gpt2(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(args.vocabulary, args.width)
        self.positions = nn.Embedding(args.context, args.width)
        self.blocks = nn.ModuleList(Block(args.width, args.heads) for _ in range(args.layers))
        self.norm = nn.LayerNorm(args.width)

    def forward(self, ids):
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            again = {"use_reentrant": False, "preserve_rng_state": False}  # Nothing is drawn.
            x = block(x) if args.mode == "plain" else checkpoint(block, x, **again)
        logits = F.linear(self.norm(x), self.tokens.weight).view(-1, args.vocabulary)
        # The last position has no target: it is ignored by its label, which avoids a copy of the logits.
        targets = F.pad(ids[:, 1:], (0, 1), value=-100)
        return F.cross_entropy(logits.float(), targets.view(-1))


def offloaded(model):
    """Returns the model with its blocks copied to the GPU one by one.

    FSDP2 on one GPU copies parameters to the device in f32, whatever the compute precision, when a block is about to use
    them, without overlap with the block before (according to the source of PyTorch 2.15).
    """
    import torch.distributed as dist
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29511")
    if ON_GPU:
        torch.cuda.set_device(0)
    dist.init_process_group("cpu:gloo,cuda:nccl" if ON_GPU else "gloo", rank=0, world_size=1)
    # Without a GPU there is nothing to offload to.
    policy = CPUOffloadPolicy() if ON_GPU else OffloadPolicy()
    mesh = torch.distributed.init_device_mesh(args.device, (1,))
    narrow = torch.bfloat16 if args.precision == "bf16" else None
    options = {
        "mesh": mesh,
        "offload_policy": policy,
        "mp_policy": MixedPrecisionPolicy(param_dtype=narrow, reduce_dtype=narrow),
    }
    for block in model.blocks:
        fully_shard(block, **options)
    return fully_shard(model, **options)


def filled(model):
    """Initializes the weights, with random values from the GPU if there is one."""
    draw = torch.Generator(device=args.device).manual_seed(0)
    for name, parameter in model.named_parameters():
        local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
        with torch.no_grad():
            if name.endswith("bias"):
                local.zero_()
            elif local.dim() == 1:
                local.fill_(1.0)
            else:
                values = torch.empty(local.shape, device=args.device)
                local.copy_(values.normal_(0.0, 0.02, generator=draw))
    return model


def built():
    if args.configuration:
        model = Transformers(args.configuration).to(args.device)
        args.vocabulary = model.vocabulary
        return model
    with torch.device("meta"):
        model = Gpt2()
    if args.mode == "offload":
        model = offloaded(model)
        model.to_empty(device="cpu")
    else:
        model.to_empty(device=args.device)
    return filled(model)


def train():
    if args.limit_gib and ON_GPU:
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, args.limit_gib * 2**30 / total))
    since = time.perf_counter()
    model = built()
    parameters = sum(parameter.numel() for parameter in model.parameters())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.01, fused=True)
    draw = torch.Generator().manual_seed(1)
    built_s, took, losses = time.perf_counter() - since, [], []
    for _ in range(args.warmup + args.steps):
        ids = torch.randint(0, args.vocabulary, (args.batch, args.context), generator=draw).to(args.device)
        sync()
        since = time.perf_counter()
        with torch.autocast(args.device, dtype=torch.bfloat16, enabled=args.precision == "bf16"):
            loss = model(ids)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(float(loss.detach()))
        sync()
        took.append(time.perf_counter() - since)
    took = took[args.warmup:]
    tokens = args.batch * args.context
    return {
        "mode": args.mode, "precision": args.precision, "configuration": args.configuration, "layers": args.layers,
        "width": args.width, "heads": args.heads, "context": args.context, "batch": args.batch, "parameters": parameters,
        "limit_gib": args.limit_gib, "step_s": took, "tokens_per_s_best": tokens / min(took),
        "tokens_per_s_median": tokens / statistics.median(took), "built_s": built_s,
        "device_peak_bytes": torch.cuda.max_memory_reserved() if ON_GPU else 0,
        "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024, "losses": losses,
        "torch": torch.__version__,
    }


def main():
    try:
        result = {"here": here, "copies": copies, "products": products, "train": train}[args.what]()
    except Exception as error:  # A failure of PyTorch is a result too.
        problem = f"{type(error).__name__}: {error}".splitlines()[0]
        print(json.dumps({"problem": problem, "what": args.what, "mode": args.mode}), flush=True)
        # Exits without destroying the process group, which would block or warn.
        os._exit(1)
    print(json.dumps(result), flush=True)
    os._exit(0)


main()
