#!/usr/bin/env python3
"""CPU checks of train_tiny_pair.py: experts against a plain loop (values and gradients), cached generation
against the full forward, checkpoint round trip."""

import tempfile

import torch
import torch.nn.functional as F
from train_tiny_pair import DRAFT, Config, Experts, Model, generate, load_pair, save_pair

torch.manual_seed(0)
CFG = Config(vocab=97, ctx=40, n_layer=3, n_embd=64, n_head=4, n_kv=2, head_dim=16, n_ff=32, n_expert=8, n_used=3)


def plain(e, x):
    p = F.softmax(x @ e.router.t(), -1)
    w, idx = p.topk(e.cfg.n_used, -1)
    w = w / w.sum(-1, keepdim=True)
    rows = []
    for t in range(len(x)):
        y = 0
        for k in range(e.cfg.n_used):
            i = idx[t, k]
            y = y + w[t, k] * (e.down[i] @ (F.silu(e.gate[i] @ x[t]) * (e.up[i] @ x[t])))
        rows.append(y)
    return torch.stack(rows)


def main():
    e = Experts(CFG)
    for p in e.parameters():
        torch.nn.init.normal_(p, std=0.3)
    x = torch.randn(50, CFG.n_embd)
    for training in (True, False):
        e.train(training)
        e.capacity = 8.0
        grads = []
        for f in (e, lambda v: plain(e, v)):
            e.zero_grad()
            v = x.clone().requires_grad_()
            y = f(v)
            (y * torch.arange(y.numel()).view_as(y).sin()).sum().backward()
            grads.append([y.detach(), v.grad] + [p.grad.clone() for p in e.parameters()])
        for a, b in zip(*grads):
            assert torch.allclose(a, b, rtol=1e-3, atol=1e-3 * float(b.abs().max())), (a - b).abs().max()
    e.train()
    e.capacity = 0.5  # drops entries: still finite
    v = torch.randn(400, CFG.n_embd, requires_grad=True)
    e(v).sum().backward()
    assert e.dropped > 0 and torch.isfinite(v.grad).all()

    m = Model(CFG).eval()
    seq = generate(m, torch.randint(0, 97, (5, 7)), 20, torch.device("cpu"))
    with torch.no_grad():
        assert (m(seq)[:, 6:-1].argmax(-1) == seq[:, 7:]).float().mean() > 0.98

    d = Model(DRAFT)
    with tempfile.TemporaryDirectory() as out:
        save_pair(out, m, d)
        m2, d2 = load_pair(out)
        save_pair(out, m2, d2)
        m3, _ = load_pair(out)
    for (n, a), b, c in zip(m.state_dict().items(), m2.state_dict().values(), m3.state_dict().values()):
        assert (a - b).abs().max() <= 0.01 * a.abs().max(), n
        assert (b - c).abs().max() <= 1e-3 * a.abs().max(), n
    assert m2.cfg == CFG and d2.cfg == DRAFT
    print("ok")


if __name__ == "__main__":
    main()
