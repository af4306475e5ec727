#!/usr/bin/env python3
"""Train a tiny MoE target (llama.cpp `qwen3moe`) and a dense draft for it (`qwen3`), one GPU, minutes.

  python3 train_tiny_pair.py --data DIR --out DIR --minutes 8.0

1. the target: next-token loss on three domains in equal parts, plus the load-balance loss;
2. its experts are rounded to Q8_0 (so that the checkpoint is small), the rounded target is saved and
   is the teacher from here on; it writes sequences of its own from training prompts;
3. the draft: distilled from the target on corpus text and on the target's own text;
4. evaluation: held-out loss per domain, greedy acceptance of the draft, router statistics.

The schedule follows the clock: each phase gets a share of --minutes. Plain torch, bf16 autocast on
CUDA, fp32 on a CPU (--smoke rehearses every phase in little time). Output (each file below 15 MiB):
target-core.safetensors, target-experts-*.safetensors, draft.safetensors, metrics.json.
"""

import argparse
import contextlib
import json
import math
import os
import time
from dataclasses import asdict, dataclass

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

DOMAINS = ("dict", "prose", "code")


@dataclass
class Config:
    arch: str = "qwen3moe"
    vocab: int = 4096
    ctx: int = 512
    n_layer: int = 6
    n_embd: int = 256
    n_head: int = 4
    n_kv: int = 2
    head_dim: int = 64
    n_ff: int = 256  # per expert when n_expert > 0
    n_expert: int = 32  # 0: dense (arch qwen3)
    n_used: int = 4
    rope_base: float = 10000.0
    eps: float = 1e-6
    dropout: float = 0.0


TARGET = Config()
DRAFT = Config(arch="qwen3", n_layer=3, n_embd=192, n_head=3, n_kv=1, n_ff=512, n_expert=0, n_used=0)


# ------------------------------------------------------------------ model


class RMSNorm(nn.Module):
    def __init__(self, dim, eps):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(dim)), eps

    def forward(self, x):
        y = F.rms_norm(x.float(), (x.shape[-1],), self.weight, self.eps)
        kind = x.device.type  # the residual stream stays fp32, the matrices get bf16
        return y.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else y


def rope_table(cfg, device):
    inv = cfg.rope_base ** (-torch.arange(0, cfg.head_dim, 2, device=device).float() / cfg.head_dim)
    angle = torch.arange(cfg.ctx, device=device).float()[:, None] * inv[None]
    return torch.cat((angle.cos(), angle.cos()), -1), torch.cat((angle.sin(), angle.sin()), -1)


def rope(x, cos, sin):
    """NEOX style: dimension i is rotated with i + head_dim/2. x [B, H, T, D]; cos, sin [T, D]."""
    a, b = x.chunk(2, -1)
    return (x * cos + torch.cat((-b, a), -1) * sin).to(x.dtype)


class Attention(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.cfg = cfg
        self.q = nn.Linear(cfg.n_embd, cfg.n_head * cfg.head_dim, bias=False)
        self.k = nn.Linear(cfg.n_embd, cfg.n_kv * cfg.head_dim, bias=False)
        self.v = nn.Linear(cfg.n_embd, cfg.n_kv * cfg.head_dim, bias=False)
        self.o = nn.Linear(cfg.n_head * cfg.head_dim, cfg.n_embd, bias=False)
        self.q_norm, self.k_norm = RMSNorm(cfg.head_dim, cfg.eps), RMSNorm(cfg.head_dim, cfg.eps)

    def forward(self, x, cos, sin, cache=None, pos=0):
        B, T, _ = x.shape
        c = self.cfg
        q = rope(self.q_norm(self.q(x).view(B, T, c.n_head, c.head_dim)).transpose(1, 2), cos, sin)
        k = rope(self.k_norm(self.k(x).view(B, T, c.n_kv, c.head_dim)).transpose(1, 2), cos, sin)
        v = self.v(x).view(B, T, c.n_kv, c.head_dim).transpose(1, 2)
        if cache is not None:  # [2, B, n_kv, ctx, D]
            cache[0][:, :, pos : pos + T], cache[1][:, :, pos : pos + T] = k, v
            k, v = cache[0][:, :, : pos + T], cache[1][:, :, : pos + T]
        rep = c.n_head // c.n_kv
        k, v = k.repeat_interleave(rep, 1).to(q.dtype), v.repeat_interleave(rep, 1).to(q.dtype)
        assert T == 1 or pos == 0  # a prompt in one piece, then token by token
        y = F.scaled_dot_product_attention(q, k, v, is_causal=T > 1)
        return self.o(y.transpose(1, 2).reshape(B, T, -1))


class Dense(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.gate = nn.Linear(cfg.n_embd, cfg.n_ff, bias=False)
        self.up = nn.Linear(cfg.n_embd, cfg.n_ff, bias=False)
        self.down = nn.Linear(cfg.n_ff, cfg.n_embd, bias=False)

    def forward(self, x):
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Move(torch.autograd.Function):
    """out[i] = src[take[i]], rows with take == len(src) become zero; `back` is the inverse map, so that
    the gradient is a gather too (no atomics)."""

    @staticmethod
    def forward(ctx, src, take, back):
        ctx.save_for_backward(back)
        return Move.gather(src, take)

    @staticmethod
    def backward(ctx, grad):
        return Move.gather(grad.contiguous(), ctx.saved_tensors[0]), None, None

    @staticmethod
    def gather(src, take):
        n = src.shape[0]
        out = src.index_select(0, take.clamp(max=n - 1))
        return out.masked_fill_((take == n)[:, None], 0)


class Experts(nn.Module):
    """softmax over all experts -> top k -> weights normalised to sum 1 (llama.cpp qwen3moe).
    Tokens are sorted by expert into [expert, capacity] slots and run as batched matmuls; in training an
    expert's tokens past its capacity are dropped, in evaluation the capacity is what is needed."""

    def __init__(self, cfg):
        super().__init__()
        E, d, f = cfg.n_expert, cfg.n_embd, cfg.n_ff
        self.cfg = cfg
        self.router = nn.Parameter(torch.empty(E, d))
        self.gate = nn.Parameter(torch.empty(E, f, d))
        self.up = nn.Parameter(torch.empty(E, f, d))
        self.down = nn.Parameter(torch.empty(E, d, f))
        self.capacity = 2.0
        self.aux = self.dropped = self.chosen = None
        self.keep_choice = False

    def forward(self, x):
        cfg, shape = self.cfg, x.shape
        x = x.reshape(-1, cfg.n_embd)
        N, E, K, dev = x.shape[0], cfg.n_expert, cfg.n_used, x.device
        with torch.autocast(dev.type, enabled=False):
            prob = F.softmax(x.float() @ self.router.float().t(), -1)
            w, idx = prob.topk(K, -1)
            w = w / w.sum(-1, keepdim=True)
        flat = idx.reshape(-1)
        counts = (
            torch.bincount(flat, minlength=E)
            if dev.type == "cpu"
            else torch.zeros(E, dtype=torch.long, device=dev).scatter_add_(0, flat, torch.ones_like(flat))
        )
        if self.keep_choice:
            self.chosen = idx.reshape(*shape[:-1], K)
        if self.training:
            self.aux = E * ((counts.float() / (N * K)) * prob.mean(0)).sum()
            C = min(N, 32 * math.ceil(self.capacity * N * K / E / 32))
        else:
            C = int(counts.max())
        order = flat.argsort(stable=True)
        expert = flat[order]
        rank = torch.arange(N * K, device=dev) - (counts.cumsum(0) - counts)[expert]
        slot = torch.where(rank < C, expert * C + rank, E * C)  # of sorted entries; E*C: dropped
        if self.training:
            self.dropped = (rank >= C).float().mean()
        slot_of = torch.empty_like(slot).scatter_(0, order, slot)  # entry -> slot
        entry_of = torch.full((E * C + 1,), N * K, dtype=torch.long, device=dev).scatter_(0, slot, order)[: E * C]
        h = Move.apply(x[:, None].expand(N, K, x.shape[-1]).reshape(N * K, -1), entry_of, slot_of)
        h = h.view(E, C, -1)
        h = F.silu(torch.bmm(h, self.gate.transpose(1, 2).to(h.dtype))) * torch.bmm(
            h, self.up.transpose(1, 2).to(h.dtype)
        )
        h = torch.bmm(h, self.down.transpose(1, 2).to(h.dtype)).reshape(E * C, -1)
        y = Move.apply(h, slot_of, entry_of).view(N, K, -1)
        return (y * w[..., None]).sum(1).view(shape)


class Block(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.attn_norm, self.attn = RMSNorm(cfg.n_embd, cfg.eps), Attention(cfg)
        self.ffn_norm, self.ffn = RMSNorm(cfg.n_embd, cfg.eps), (Experts if cfg.n_expert else Dense)(cfg)
        self.drop = nn.Dropout(cfg.dropout)

    def forward(self, x, cos, sin, cache=None, pos=0):
        x = x + self.drop(self.attn(self.attn_norm(x), cos, sin, cache, pos))
        return x + self.drop(self.ffn(self.ffn_norm(x)))


class Model(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.cfg = cfg
        self.embed = nn.Embedding(cfg.vocab, cfg.n_embd)
        self.blocks = nn.ModuleList(Block(cfg) for _ in range(cfg.n_layer))
        self.norm = RMSNorm(cfg.n_embd, cfg.eps)
        self.head = nn.Linear(cfg.n_embd, cfg.vocab, bias=False)
        for name, p in self.named_parameters():
            if p.dim() > 1:
                out = name.endswith(("attn.o.weight", "ffn.down", "ffn.down.weight"))
                nn.init.normal_(
                    p,
                    std=0.02
                    if "embed" in name
                    else p.shape[-1] ** -0.5 * (1 / math.sqrt(2 * cfg.n_layer) if out else 1) * 0.8,
                )
        self.tables = None

    def experts(self):
        return [b.ffn for b in self.blocks if isinstance(b.ffn, Experts)]

    def forward(self, ids, cache=None, pos=0, hidden=False):
        if self.tables is None or self.tables[0].device != ids.device:
            self.tables = rope_table(self.cfg, ids.device)
        T = ids.shape[1]
        x = self.embed(ids)
        cos, sin = (t[pos : pos + T] for t in self.tables)
        for i, block in enumerate(self.blocks):
            x = block(x, cos, sin, None if cache is None else cache[i], pos)
        x = self.norm(x)
        return x if hidden else self.head(x)


# ------------------------------------------------------------------ data


class Corpus:
    """uint16 streams on the device; windows start at a document (always in `dict`, else half the time)."""

    def __init__(self, path, split, meta, cfg, device, seed=0):
        self.ctx, self.device, self.eot = cfg.ctx, device, meta["eot"]
        self.data, self.starts = {}, {}
        self.rng = np.random.default_rng(seed)
        for name in DOMAINS:
            raw = np.fromfile(f"{path}/{name}_{split}.bin", dtype=np.uint16)
            starts = np.concatenate(([0], np.flatnonzero(raw == self.eot) + 1))
            self.starts[name] = starts[starts < len(raw) - cfg.ctx - 1]
            self.data[name] = torch.from_numpy(raw.astype(np.int32)).to(device)

    def batch(self, n):
        rows = []
        for i, name in enumerate(DOMAINS):
            m = (n + i) // len(DOMAINS)
            at = self.rng.choice(self.starts[name], m)
            if name != "dict":
                free = self.rng.integers(0, len(self.data[name]) - self.ctx - 1, m)
                at = np.where(self.rng.random(m) < 0.5, at, free)
            idx = torch.from_numpy(at)[:, None] + torch.arange(self.ctx + 1)[None]
            rows.append(self.data[name][idx.to(self.device, non_blocking=True)])
        return torch.cat(rows).long()

    def windows(self, name, n):
        """The first n windows of a stream, back to back."""
        d = self.data[name]
        n = min(n, (len(d) - 1) // self.ctx)
        idx = torch.arange(n)[:, None] * self.ctx + torch.arange(self.ctx + 1)[None]
        return d[idx.to(self.device)].long()

    def prompts(self, name, n, meta, length=48):
        """At most n prompts of one length -> [m, length]. `dict`: questions up to the assistant's header,
        all of one length that is drawn by its frequency; else any place without a document's end."""
        if name == "dict":
            groups = self.questions(meta)
            sizes = np.array([len(v) for v in groups.values()], dtype=float)
            length = self.rng.choice(list(groups), p=sizes / sizes.sum())
            rows = self.rng.permutation(groups[length])[:n]
            idx = torch.from_numpy(rows)[:, None] + torch.arange(int(length))[None]
        else:
            at = self.rng.permutation(len(self.data[name]) - length)[: 2 * n]
            idx = torch.from_numpy(at)[:, None] + torch.arange(length)[None]
        p = self.data[name][idx.to(self.device)].long()
        return p[(p != self.eot).all(1)][:n]

    def questions(self, meta):
        """Starts of the `dict` documents by the length of their prompt."""
        if not hasattr(self, "_questions"):
            d, header, self._questions = self.data["dict"].cpu().numpy(), meta["assistant_header"], {}
            ends = np.flatnonzero((d[:-2] == header[0]) & (d[1:-1] == header[1]) & (d[2:] == header[2])) + 3
            assert len(header) == 3
            at = np.searchsorted(ends, self.starts["dict"])
            for s, e in zip(self.starts["dict"][at < len(ends)], ends[at[at < len(ends)]]):
                self._questions.setdefault(int(e - s), []).append(s)
        return self._questions


# ------------------------------------------------------------------ training


def autocast(device):
    return torch.autocast("cuda", torch.bfloat16) if device.type == "cuda" else contextlib.nullcontext()


def optimizer(model, lr, wd, device):
    decay = [p for n, p in model.named_parameters() if p.dim() > 1 and "embed" not in n]
    rest = [p for n, p in model.named_parameters() if not (p.dim() > 1 and "embed" not in n)]
    return torch.optim.AdamW(
        [{"params": decay, "weight_decay": wd}, {"params": rest, "weight_decay": 0.0}],
        lr=lr,
        betas=(0.9, 0.95),
        eps=1e-8,
        fused=device.type == "cuda",
    )


class Clock:
    """Learning-rate factor by elapsed time: linear warm-up, then cosine to 3 %."""

    def __init__(self, seconds, max_steps):
        self.t0, self.seconds, self.max_steps, self.step = time.time(), seconds, max_steps, 0

    def done(self):
        return time.time() - self.t0 >= self.seconds or (self.max_steps and self.step >= self.max_steps)

    def factor(self):
        x = (time.time() - self.t0) / self.seconds
        if self.max_steps:
            x = max(x, self.step / self.max_steps)
        warm = min(1.0, (self.step + 1) / 200) if not self.max_steps else 1.0
        return warm * (0.03 + 0.97 * 0.5 * (1 + math.cos(math.pi * min(1.0, x))))


def ce(model, x, y):
    """Mean next-token loss."""
    logits = model(x)
    return F.cross_entropy(logits.float().view(-1, logits.shape[-1]), y.reshape(-1))


@torch.no_grad()
def heldout(model, corpus, device, windows):
    model.eval()
    out = {}
    for name in DOMAINS:
        w = corpus.windows(name, windows)
        with autocast(device):
            out[name] = float(torch.stack([ce(model, b[:, :-1], b[:, 1:]) for b in w.split(32)]).mean())
    return out


def step(opt, model, loss, lr):
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for g in opt.param_groups:
        g["lr"] = lr
    opt.step()
    opt.zero_grad(set_to_none=True)


def train_target(model, train, held, args, device, seconds):
    opt, clock = optimizer(model, args.lr, args.wd, device), Clock(seconds, args.max_steps)
    log = time.time()
    while not clock.done():
        model.train()
        b = train.batch(args.batch)
        with autocast(device):
            loss = ce(model, b[:, :-1], b[:, 1:])
        aux = torch.stack([e.aux for e in model.experts()]).mean()
        step(opt, model, loss + args.aux * aux, args.lr * clock.factor())
        clock.step += 1
        if time.time() - log > args.log_every or clock.step == 1:
            log = time.time()
            dropped = torch.stack([e.dropped for e in model.experts()]).mean()
            t = time.time() - clock.t0
            rate = clock.step * args.batch * model.cfg.ctx / t
            print(
                f"target step {clock.step} {t:.0f}s loss {loss:.3f} aux {aux:.3f} dropped {dropped:.4f} "
                f"{rate / 1e3:.0f}k tok/s heldout "
                + " ".join(f"{k} {v:.3f}" for k, v in heldout(model, held, device, 32).items()),
                flush=True,
            )
    return clock.step


def train_draft(draft, target, train, written, args, device, seconds, held):
    """KL to the target plus its greedy token; `written`: [n, ctx + 1] sequences of the target's own."""
    opt, clock = optimizer(draft, args.draft_lr, args.draft_wd, device), Clock(seconds, args.max_steps)
    target.eval()
    log, rng = time.time(), np.random.default_rng(7)
    while not clock.done():
        draft.train()
        n_own = int(args.batch * args.own)
        pick = torch.from_numpy(rng.integers(0, len(written), n_own)).to(device)
        b = torch.cat((train.batch(args.batch - n_own), written[pick]))
        x = b[:, :-1]
        with autocast(device):
            with torch.no_grad():
                ht = target(x, hidden=True)
            hd = draft(x, hidden=True)
            loss, agree = 0.0, 0.0
            parts = max(1, len(x) // 32)
            for a, c in zip(ht.chunk(parts), hd.chunk(parts)):
                with torch.no_grad():
                    lt = target.head(a).float()
                    p, top = F.softmax(lt, -1), lt.argmax(-1)
                lq = F.log_softmax(draft.head(c).float(), -1)
                kl = -(p * lq).sum(-1).mean()
                hard = F.nll_loss(lq.reshape(-1, lq.shape[-1]), top.reshape(-1))
                loss = loss + (kl + args.hard * hard) * (len(a) / len(x))
                agree = agree + (lq.argmax(-1) == top).float().mean() * (len(a) / len(x))
        step(opt, draft, loss, args.draft_lr * clock.factor())
        clock.step += 1
        if time.time() - log > args.log_every or clock.step == 1:
            log = time.time()
            t = time.time() - clock.t0
            print(
                f"draft step {clock.step} {t:.0f}s loss {loss:.3f} agreement {agree:.3f} "
                f"{clock.step * args.batch * draft.cfg.ctx / t / 1e3:.0f}k tok/s heldout "
                + " ".join(f"{k} {v:.3f}" for k, v in heldout(draft, held, device, 32).items()),
                flush=True,
            )
    return clock.step


# ------------------------------------------------------------------ generation and evaluation


@torch.no_grad()
def generate(model, prompt, n, device, temperature=0.0, seed=0):
    """[B, T] -> [B, T + n]; temperature 0 is greedy."""
    model.eval()
    cfg, (B, T) = model.cfg, prompt.shape
    n = min(n, cfg.ctx - T)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    cache = torch.zeros(cfg.n_layer, 2, B, cfg.n_kv, T + n, cfg.head_dim, dtype=dtype, device=device)
    gen = torch.Generator(device=device).manual_seed(seed)
    out, x, pos = [prompt], prompt, 0
    for _ in range(n):
        with autocast(device):
            logits = model(x, cache, pos)[:, -1].float()
        pos += x.shape[1]
        x = (
            logits.argmax(-1, keepdim=True)
            if temperature <= 0
            else torch.multinomial(F.softmax(logits / temperature, -1), 1, generator=gen)
        )
        out.append(x)
    return torch.cat(out, 1)


def own_text(target, train, meta, args, device, seconds):
    """Text by the target from training prompts, by turns greedy and sampled -> [n, ctx + 1]."""
    t0, rows, flow, i, ctx = time.time(), [], [], 0, target.cfg.ctx
    while time.time() - t0 < seconds and not (args.max_steps and i >= 3):
        name, temperature = DOMAINS[i % 3], (0.0, 0.7)[i // 3 % 2]
        p = train.prompts(name, args.gen_batch, meta)
        tokens = 160 if name == "dict" else ctx - p.shape[1]
        seq = generate(target, p, tokens, device, temperature, i)
        if name == "dict":  # short documents: packed one after another
            for s in seq.cpu().numpy():
                end = np.flatnonzero(s == meta["eot"])
                flow.append(s[: end[0] + 1] if len(end) else s)
        else:
            rows.append(F.pad(seq, (0, 1), value=meta["eot"]))
        i += 1
    if flow:
        flat = np.concatenate(flow)
        n = len(flat) // (ctx + 1)
        rows.append(torch.from_numpy(flat[: n * (ctx + 1)].reshape(n, ctx + 1)).long().to(device))
    out = torch.cat(rows)
    print(f"own text: {i} batches, {out.numel() / 1e6:.2f} M tokens, {time.time() - t0:.0f}s", flush=True)
    return out


@torch.no_grad()
def acceptance(target, draft, corpus, meta, device, n, tokens, n_draft=4):
    """The draft's share of right tokens along the target's greedy text, held-out prompts, per domain;
    and tokens per target pass of greedy speculative decoding with n_draft drafted tokens."""
    out = {}
    for name in DOMAINS:
        hit = total = passes = made = 0
        for p in (corpus.prompts(name, n // 4, meta) for _ in range(4)):
            length = p.shape[1]
            seq = generate(target, p, tokens, device)
            with autocast(device):
                guess = draft(seq[:, :-1]).argmax(-1)[:, length - 1 :]
            want = seq[:, length:]
            end = ((want == meta["eot"]) | (want == meta["im_end"])).int()
            live = end.cumsum(1) - end == 0  # up to the first end of turn or text, it included
            ok = guess == want
            hit += int((ok & live).sum())
            total += int(live.sum())
            for row, m in zip(ok.cpu().numpy(), live.sum(1).tolist()):
                at = 0
                while at < m:
                    k = 0
                    while k < n_draft and at + k < m and row[at + k]:
                        k += 1
                    at += k + 1
                    passes += 1
                made += m
        out[name] = {"acceptance": hit / total, "tokens_per_pass": made / passes, "tokens": total}
    return out


@torch.no_grad()
def router_stats(target, corpus, device, windows):
    """Per domain and layer: expert load, its coefficient of variation, how often the next token reuses an expert."""
    target.eval()
    for e in target.experts():
        e.keep_choice = True
    out = {}
    for name in DOMAINS:
        w = corpus.windows(name, windows)[:, :-1]
        with autocast(device):
            target(w)
        layers = []
        for e in target.experts():
            c = e.chosen
            load = torch.bincount(c.reshape(-1), minlength=target.cfg.n_expert).float()
            reuse = (c[:, 1:, :, None] == c[:, :-1, None, :]).any(-1).float().mean()
            layers.append(
                {
                    "load": [round(v, 5) for v in (load / load.sum()).tolist()],
                    "cv": float(load.std() / load.mean()),
                    "reuse_next_token": float(reuse),
                }
            )
        out[name] = layers
    for e in target.experts():
        e.keep_choice, e.chosen = False, None
    return out


# ------------------------------------------------------------------ checkpoints


def q8_0(w):
    """ggml's Q8_0 along the last dimension: int8 values and fp16 scales per 32."""
    b = w.float().reshape(*w.shape[:-1], w.shape[-1] // 32, 32)
    d = b.abs().amax(-1, keepdim=True) / 127
    q = torch.where(d > 0, b / d.clamp(min=1e-30), torch.zeros_like(b)).round().clamp(-127, 127).to(torch.int8)
    return q.reshape(w.shape), d.squeeze(-1).to(torch.float16)


def un_q8_0(q, d):
    return (q.float().reshape(*d.shape, 32) * d.float()[..., None]).reshape(q.shape)


def save_pair(out, target=None, draft=None):
    def info(model):
        return {"config": json.dumps(asdict(model.cfg))}

    if target is not None:
        core = {}
        parts = [{} for _ in range(3)]
        for name, p in target.state_dict().items():
            layer = int(name.split(".")[1]) if name.startswith("blocks.") else 0
            if p.dim() == 3:
                part = parts[layer * len(parts) // target.cfg.n_layer]
                part[name + ".q"], part[name + ".d"] = (t.cpu().contiguous() for t in q8_0(p))
            elif p.dim() == 1 or name.endswith("router"):
                core[name] = p.float().cpu()
            else:
                core[name] = p.to(torch.float16).cpu()
        save_file(core, f"{out}/target-core.safetensors", metadata=info(target))
        for i, part in enumerate(parts):
            save_file(part, f"{out}/target-experts-{i}.safetensors", metadata=info(target))
    if draft is not None:
        save_file(
            {k: (p.float() if p.dim() == 1 else p.to(torch.float16)).cpu() for k, p in draft.state_dict().items()},
            f"{out}/draft.safetensors",
            metadata=info(draft),
        )


def load_pair(out):
    """-> (target, draft) in fp32, as saved (experts from Q8_0, the other matrices from fp16)."""
    from safetensors import safe_open

    models = {}
    for which, first in (("target", "target-core"), ("draft", "draft")):
        path = f"{out}/{first}.safetensors"
        if not os.path.exists(path):
            models[which] = None
            continue
        with safe_open(path, "pt") as f:
            cfg = Config(**json.loads(f.metadata()["config"]))
        state = load_file(path)
        if which == "target":
            for i in range(3):
                part = load_file(f"{out}/target-experts-{i}.safetensors")
                for name in [n[:-2] for n in part if n.endswith(".q")]:
                    state[name] = un_q8_0(part[name + ".q"], part[name + ".d"])
        cfg.dropout = 0.0
        model = Model(cfg)
        model.load_state_dict({k: v.float() for k, v in state.items()})
        models[which] = model.eval()
    return models["target"], models["draft"]


# ------------------------------------------------------------------ main


def main():
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--data", required=True)
    ap.add_argument("--out", required=True)
    ap.add_argument("--minutes", type=float, default=8.0, help="wall time of the whole script")
    ap.add_argument(
        "--share",
        type=float,
        nargs=3,
        default=(0.55, 0.06, 0.31),
        help="shares of the time: target, its own text, draft; the rest is for evaluation",
    )
    ap.add_argument("--batch", type=int, default=96, help="sequences per step")
    ap.add_argument("--lr", type=float, default=1.5e-3)
    ap.add_argument("--wd", type=float, default=0.1)
    ap.add_argument("--dropout", type=float, default=0.1, help="of the target, in training")
    ap.add_argument("--aux", type=float, default=0.01, help="weight of the load-balance loss")
    ap.add_argument("--draft-lr", type=float, default=3e-3)
    ap.add_argument("--draft-wd", type=float, default=0.02)
    ap.add_argument("--hard", type=float, default=0.3, help="weight of the target's greedy token in the draft's loss")
    ap.add_argument("--own", type=float, default=0.35, help="share of the target's own text in the draft's batches")
    ap.add_argument("--gen-batch", type=int, default=3072, help="sequences that the target writes at once")
    ap.add_argument("--eval-windows", type=int, default=256)
    ap.add_argument("--eval-prompts", type=int, default=192)
    ap.add_argument("--eval-tokens", type=int, default=128)
    ap.add_argument("--log-every", type=float, default=20)
    ap.add_argument("--max-steps", type=int, default=0, help="stop each phase after so many steps")
    ap.add_argument(
        "--smoke", action="store_true", help="a rehearsal of every phase: small batches, 20 steps (or --max-steps)"
    )
    args = ap.parse_args()
    begin = time.time()
    if args.smoke:
        args.batch, args.max_steps, args.gen_batch, args.eval_windows, args.eval_prompts = (
            6,
            args.max_steps or 20,
            4,
            4,
            4,
        )
        args.eval_tokens, args.log_every = 16, 10
    os.makedirs(args.out, exist_ok=True)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(1)
    if device.type == "cuda":
        torch.backends.cuda.matmul.allow_tf32 = True
        print(torch.cuda.get_device_name(), torch.__version__, flush=True)
    meta = json.load(open(f"{args.data}/meta.json"))
    TARGET.vocab = DRAFT.vocab = meta["vocab"]
    TARGET.dropout = args.dropout
    total = args.minutes * 60
    train, held = (
        Corpus(args.data, "train", meta, TARGET, device),
        Corpus(args.data, "heldout", meta, TARGET, device, 1),
    )
    target, draft = Model(TARGET).to(device), Model(DRAFT).to(device)
    sizes = {k: sum(p.numel() for p in m.parameters()) for k, m in (("target", target), ("draft", draft))}
    print("parameters", sizes, flush=True)

    metrics = {"args": vars(args), "torch": torch.__version__, "parameters": sizes}
    metrics["target_steps"] = train_target(target, train, held, args, device, total * args.share[0])
    with torch.no_grad():  # from here on the target is exactly what is saved
        save_pair(args.out, target=target)
        target = load_pair(args.out)[0].to(device).requires_grad_(False)
    metrics["target_heldout"] = heldout(target, held, device, args.eval_windows)
    print("target held-out loss", metrics["target_heldout"], f"{time.time() - begin:.0f}s", flush=True)

    written = own_text(target, train, meta, args, device, total * args.share[1])
    until = begin + total * sum(args.share)
    metrics["draft_steps"] = train_draft(
        draft, target, train, written, args, device, max(1.0, until - time.time()), held
    )
    save_pair(args.out, draft=draft)
    draft = load_pair(args.out)[1].to(device)
    print(f"saved {time.time() - begin:.0f}s", flush=True)
    metrics["draft_heldout"] = heldout(draft, held, device, args.eval_windows)
    metrics["router"] = router_stats(target, held, device, min(64, args.eval_windows))
    json.dump(metrics, open(f"{args.out}/metrics.json", "w"))
    metrics["greedy"] = acceptance(target, draft, held, meta, device, args.eval_prompts, args.eval_tokens)
    metrics["seconds"] = time.time() - begin
    json.dump(metrics, open(f"{args.out}/metrics.json", "w"))

    print(
        "held-out loss: target",
        {k: round(v, 3) for k, v in metrics["target_heldout"].items()},
        "draft",
        {k: round(v, 3) for k, v in metrics["draft_heldout"].items()},
    )
    for name, r in metrics["greedy"].items():
        print(
            f"greedy acceptance {name}: {r['acceptance']:.3f}, {r['tokens_per_pass']:.2f} tokens per target pass "
            f"(4 drafted), {r['tokens']} tokens"
        )
    for name, layers in metrics["router"].items():
        print(
            f"router {name}: load cv "
            + " ".join(f"{l['cv']:.2f}" for l in layers)
            + ", next-token reuse "
            + " ".join(f"{l['reuse_next_token']:.2f}" for l in layers)
        )
    print(f"done in {metrics['seconds']:.0f}s", flush=True)


if __name__ == "__main__":
    main()
