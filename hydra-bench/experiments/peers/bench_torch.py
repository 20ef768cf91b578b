#!/usr/bin/env python3
"""HF GPT-2 or Llama train-step benchmark (fwd + loss + bwd + AdamW), CPU, whole or with PEFT's LoRA. Prints one JSON line.

tokens/s = batch*ctx / step time, for examples without padding.  Dropout 0, random init, labels = inputs shifted by HF, or those of the
examples in a file, each batch padded to its longest example, as HF's and TRL's collators do.
"""
import argparse, json, os, sys, time, statistics, resource

p = argparse.ArgumentParser()
p.add_argument("--model", choices=["gpt2", "smollm2-135m"], default="gpt2", help="smollm2-135m sets --layers, --embd, --heads and --vocab")
p.add_argument("--lora", type=int, default=0, help="train only PEFT adapters of this rank, on q_proj and v_proj (c_attn of GPT-2)")
p.add_argument("--nf4", action="store_true", help="the base of --lora in bitsandbytes' NF4, computed in --dtype")
p.add_argument("--layers", type=int, default=4)
p.add_argument("--embd", type=int, default=256)
p.add_argument("--heads", type=int, default=4)
p.add_argument("--ctx", type=int, default=128)
p.add_argument("--batch", type=int, default=8)
p.add_argument("--vocab", type=int, default=50257)
p.add_argument("--examples", help="JSONL file with input_ids and labels, trained on in order; random ids of --ctx tokens by default")
p.add_argument("--threads", type=int, default=2)
p.add_argument("--attn", choices=["eager", "sdpa"], default="sdpa")
p.add_argument("--steps", type=int, default=10)
p.add_argument("--warmup", type=int, default=2)
p.add_argument("--dtype", choices=["fp32", "bf16", "bf16pure"], default="fp32",
               help="bf16 = autocast with fp32 weights; bf16pure = weights/grads/opt in bf16")
p.add_argument("--compile", action="store_true")
p.add_argument("--checkpointing", action="store_true", help="recompute activations of each block")
p.add_argument("--opt", choices=["fused", "foreach", "forloop", "none"], default="fused")
p.add_argument("--set-to-none", type=int, default=1)
p.add_argument("--tag", default="")
a = p.parse_args()
for v in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ[v] = str(a.threads)
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
if a.threads == 1 and hasattr(os, "sched_setaffinity"):
    pass  # not pinned

import torch
torch.set_num_threads(a.threads)
import transformers
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM
transformers.logging.set_verbosity_error()

def rss_now():
    for l in open("/proc/self/status"):
        if l.startswith("VmRSS"):
            return int(l.split()[1]) / 1024
def busy():
    """(own cpu s, whole-box busy cpu s)"""
    f = open("/proc/stat").readline().split()[1:]
    b = sum(int(f[i]) for i in (0, 1, 2, 5, 6, 7)) / os.sysconf("SC_CLK_TCK")
    t = os.times()
    return t.user + t.system + t.children_user + t.children_system, b
def rss_peak():
    for l in open("/proc/self/status"):
        if l.startswith("VmHWM"):
            return int(l.split()[1]) / 1024

base_rss = rss_now()
torch.manual_seed(0)
if a.model == "gpt2":
    cfg = GPT2Config(vocab_size=a.vocab, n_positions=a.ctx, n_embd=a.embd, n_layer=a.layers, n_head=a.heads,
                     resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False,
                     bos_token_id=0, eos_token_id=0)
    build = GPT2LMHeadModel
else:
    # As the preset of the same name.
    a.layers, a.embd, a.heads, a.vocab = 30, 576, 9, 49152
    cfg = LlamaConfig(vocab_size=a.vocab, hidden_size=a.embd, intermediate_size=1536, num_hidden_layers=a.layers,
                      num_attention_heads=a.heads, num_key_value_heads=3, head_dim=64, max_position_embeddings=8192,
                      rms_norm_eps=1e-5, rope_theta=100000.0, tie_word_embeddings=True, use_cache=False,
                      bos_token_id=0, eos_token_id=0)
    build = LlamaForCausalLM
cfg._attn_implementation = a.attn
model = build(cfg)
if a.nf4:
    import tempfile
    from transformers import BitsAndBytesConfig
    computed = torch.float32 if a.dtype == "fp32" else torch.bfloat16
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        del model
        model = build.from_pretrained(folder, dtype=computed, attn_implementation=a.attn, device_map="cpu", quantization_config=BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=computed))
    # The peak is that of training: making the checkpoint does not count.
    with open("/proc/self/clear_refs", "w") as peak:
        peak.write("5")
impl = model.config._attn_implementation
assert impl == a.attn, impl
model.train()
if a.checkpointing:
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
if a.dtype == "bf16pure" and not a.nf4:
    model.to(torch.bfloat16)
if a.lora:
    from peft import LoraConfig, get_peft_model
    targets = ["c_attn"] if a.model == "gpt2" else ["q_proj", "v_proj"]
    model = get_peft_model(model, LoraConfig(r=a.lora, lora_alpha=8, lora_dropout=0.0, target_modules=targets,
                                             fan_in_fan_out=a.model == "gpt2", task_type="CAUSAL_LM"))
    model.train()
nparams = sum(q.numel() for q in model.parameters())
trained = [q for q in model.parameters() if q.requires_grad]
opt = None
if a.opt != "none":
    opt = torch.optim.AdamW(trained, lr=1e-4, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01,
                            fused=(a.opt == "fused") or None, foreach=(a.opt == "foreach") or (False if a.opt == "forloop" else None))
fwd = torch.compile(model) if a.compile else model
if a.examples:
    rows = [json.loads(line) for line in open(a.examples)]
    batches = [rows[i:i + a.batch] for i in range(0, len(rows) // a.batch * a.batch, a.batch)]
    longest = [max(len(row["input_ids"]) for row in batch) for batch in batches]
    of = lambda name, filler: [torch.tensor([row[name] + [filler] * (most - len(row[name])) for row in batch])
                               for batch, most in zip(batches, longest)]
    data, labels = of("input_ids", 0), of("labels", -100)
    masks = [torch.tensor([[1] * len(row["input_ids"]) + [0] * (most - len(row["input_ids"])) for row in batch])
             for batch, most in zip(batches, longest)]
    learned = sum((of[:, 1:] >= 0).sum().item() for of in labels) / sum(of.sum().item() for of in masks)
else:
    g = torch.Generator().manual_seed(1)
    data = labels = torch.randint(0, a.vocab, (64, a.batch, a.ctx), generator=g)
    masks, learned = [None] * 64, (a.ctx - 1) / a.ctx
tokens_of = lambda i: a.batch * a.ctx if masks[i % len(data)] is None else int(masks[i % len(data)].sum())

def step(i, timing=None):
    x, y = data[i % len(data)], labels[i % len(data)]
    t0 = time.perf_counter()
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=(a.dtype == "bf16")):
        loss = fwd(input_ids=x, labels=y, attention_mask=masks[i % len(data)]).loss
    t1 = time.perf_counter()
    loss.backward()
    t2 = time.perf_counter()
    if opt is not None:
        opt.step()
        opt.zero_grad(set_to_none=bool(a.set_to_none))
    else:
        model.zero_grad(set_to_none=bool(a.set_to_none))
    t3 = time.perf_counter()
    return float(loss.detach()), (t3 - t0, t1 - t0, t2 - t1, t3 - t2)

tc0 = time.perf_counter()
first = None
for i in range(a.warmup):
    first_l, _ = step(i)
    first = first if first is not None else first_l
warm_s = time.perf_counter() - tc0
rs, last, oth, cpu = [], None, [], []
c0 = busy(); w0 = time.perf_counter()
for i in range(a.steps):
    cb = busy()
    pc = time.process_time()
    last, t = step(a.warmup + i)
    cpu.append(time.process_time() - pc)
    ce = busy()
    rs.append(t)
    oth.append(max(0.0, (ce[1] - cb[1]) - (ce[0] - cb[0])) / t[0])
c1 = busy(); wall = time.perf_counter() - w0
tot = [r[0] for r in rs]
toks = [tokens_of(a.warmup + i) for i in range(a.steps)]
speeds, per_cpu = [n / t for n, t in zip(toks, tot)], [n / t for n, t in zip(toks, cpu)]
tok = a.batch * a.ctx
med = lambda k: statistics.median(r[k] for r in rs)
best = min(rs, key=lambda r: r[0])
# matmul FLOPs of GPT-2, whole: 6*(12*L*d^2 + V*d)*tok + 12*L*d*T*tok (full, non-causal attention), fwd+bwd
d, L, T, V = a.embd, a.layers, a.ctx, a.vocab
flops = 6 * (12 * L * d * d + V * d) * tok + 12 * L * d * T * tok
out = dict(tag=a.tag, model=a.model, lora=a.lora, trained=sum(q.numel() for q in trained), learned=round(learned, 4), tokens=sum(toks), computed=sum(data[(a.warmup + i) % len(data)].numel() for i in range(a.steps)), layers=L, embd=d, heads=a.heads, ctx=T, batch=a.batch, vocab=V, threads=a.threads,
           attn=impl, checkpointing=a.checkpointing, dtype=a.dtype, compile=a.compile, opt=a.opt, steps=a.steps, params=nparams,
           min_s=round(min(tot), 5), med_s=round(statistics.median(tot), 5), max_s=round(max(tot), 5),
           tok_s_best=round(max(speeds), 1), tok_s_med=round(statistics.median(speeds), 1), tok_s_all=round(sum(toks) / sum(tot), 1),
           fwd_med_s=round(med(1), 5), bwd_med_s=round(med(2), 5), opt_med_s=round(med(3), 5),
           best_fwd_bwd_opt=[round(best[1], 5), round(best[2], 5), round(best[3], 5)],
           gflops_best=round(flops / min(tot) / 1e9, 1) if a.model == "gpt2" and not a.lora else None,
           cpu_s_min=round(min(cpu), 5), cpu_s_med=round(statistics.median(cpu), 5),
           tok_per_cpu_s_best=round(max(per_cpu), 1), tok_per_cpu_s_med=round(statistics.median(per_cpu), 1),
           own_cores=round((c1[0] - c0[0]) / wall, 2), others_cores=round(max(0.0, (c1[1] - c0[1]) - (c1[0] - c0[0])) / wall, 2),
           others_at_best=round(oth[tot.index(min(tot))], 2),
           peak_rss_mb=round(rss_peak(), 1), base_rss_mb=round(base_rss, 1), warm_s=round(warm_s, 2),
           loss_first=first, loss_last=last, torch=torch.__version__, transformers=transformers.__version__)
print(json.dumps(out), flush=True)
