"""Worker for this project: the same operations as stock.py, through the decoder that users have."""

from __future__ import annotations

import gc
import time
from collections.abc import Sequence
from typing import Any

import llama_cpp

from moespac_llamacpp import native
from moespac_llamacpp.bench import hardware, stock
from moespac_llamacpp.decoder import Decoder
from moespac_llamacpp.draft import DRAFT_WIDTHS, Drafter, GgufDraft, NgramDraft, NoDraft
from moespac_llamacpp.engine import WARM_UP_SECONDS, widths_to_come
from moespac_llamacpp.memory import slots_for_bytes
from moespac_llamacpp.models import Context, Model
from moespac_llamacpp.policies import make as make_policy
from moespac_llamacpp.residency import Residency, block_sizes


class Worker:
    """One target, attached; drafts by name. Every run starts cold: the first experts of each layer, an empty policy."""

    def __init__(self) -> None:
        self.device: native.Device = native.default_device()
        self.target: Context | None = None
        self.drafts: dict[str, Context] = {}
        self.wrong_guesses = 0.0

    def hello(self, device: str | None) -> dict[str, Any]:
        found = {d.name: d for d in native.devices()}
        if device is not None and device not in found:
            raise ValueError(f"there is no device {device}: {', '.join(found)}")
        self.device = found[device] if device else native.default_device()
        return {
            "llama_cpp": llama_cpp.__version__,
            "patched": True,
            "device": self.device.name,
            "description": self.device.description,
            "is_cpu": self.device.kind == "cpu",
            "kernels": native.kernel_isa(),
        }

    def bandwidths(self, threads: Sequence[int], seconds: float) -> dict[str, Any]:
        return hardware.measure(self.device, threads, seconds)

    def load(
        self, path: str, n_ctx: int, n_batch: int, execution: str = "auto", wrong_guesses: float = 0.0
    ) -> dict[str, Any]:
        """The target, with its experts in host memory. wrong_guesses: see native.Experts.set_look_ahead."""
        self.wrong_guesses = wrong_guesses
        del stock._log[:]
        free = self.device.memory[0]
        start = time.perf_counter()
        model = Model(path, experts_device=self.device)
        self.target = Context(model, n_ctx=n_ctx, n_batch=n_batch, device=self.device, execution=execution)
        answer = {
            "seconds": time.perf_counter() - start,
            "buffers": stock.buffers(),
            "device_bytes": free - self.device.memory[0],
            "rows": [[r.il, r.n_expert, r.expert_bytes, r.hybrid, r.fallback] for r in self.experts.rows()],
        }
        stock.warm_up(self.target.decode, n_ctx)
        return answer

    def load_draft(self, name: str, path: str, n_ctx: int, n_batch: int) -> dict[str, Any]:
        del stock._log[:]
        free = self.device.memory[0]
        start = time.perf_counter()
        model = Model(path, experts_device=self.device)
        self.drafts[name] = Context(model, n_ctx=n_ctx, n_batch=n_batch, attach=False, keep_graphs=DRAFT_WIDTHS)
        answer = {
            "seconds": time.perf_counter() - start,
            "buffers": stock.buffers(),
            "device_bytes": free - self.device.memory[0],
        }
        stock.warm_up(self.drafts[name].decode, n_ctx)
        return answer

    def unload_draft(self, name: str) -> dict[str, Any]:
        context = self.drafts.pop(name)
        context.close()
        context.model.close()
        return {}

    def tokenize(self, messages: list[str]) -> dict[str, Any]:
        assert self.target is not None
        model = self.target.model
        return {"tokens": [model.tokenize(model.chat_prompt(message)) for message in messages]}

    @property
    def experts(self) -> native.Experts:
        assert self.target is not None and self.target.experts is not None
        return self.target.experts

    def _slots(self, expert_bytes: int) -> None:
        """Sets slots that take so many bytes together with the buffers of their lane, unless all experts fit.

        Where the lane alone would take half of the bytes, as in tiny models, it comes on top: the ledger shows it."""
        experts, sizes = self.experts, block_sizes(self.experts)
        experts.set_slots([0] * experts.n_rows)
        slots = slots_for_bytes(sizes, expert_bytes)
        experts.set_slots(slots)
        lane = experts.device_bytes() - sum(n * b.expert_bytes for n, b in zip(slots, sizes, strict=True))
        if 0 < lane < expert_bytes // 2 and slots != [b.n_expert for b in sizes]:
            slots = slots_for_bytes(sizes, expert_bytes - lane)
            experts.set_slots(slots)

    def _cold(self, policy: str, expert_bytes: int, max_moves: int | None, sync_moves: bool = False) -> Residency:
        """Slots for so many bytes, filled with the first experts of each layer. max_moves None: as users have it."""
        experts = self.experts
        self._slots(expert_bytes)
        made = make_policy(policy, experts.n_rows, experts.n_expert)
        how: dict[str, Any] = {"max_moves": max_moves, "sync_moves": sync_moves, "wrong_guesses": self.wrong_guesses}
        residency = Residency(experts, made, **how)
        residency.fill()  # which also measures the link, as it does for users
        return residency

    def _settle(self, residency: Residency) -> None:
        """Lets uploads land, so that they do not disturb whoever runs next, and ends the policy's thread."""
        residency.close()
        self.experts.sync()

    def _threads(self, n: int) -> None:
        for context in (self.target, *self.drafts.values()):
            assert context is not None
            llama_cpp.llama_set_n_threads(context.pointer, n, n)

    def _drafter(self, draft: str | None) -> Drafter:
        assert self.target is not None
        if draft is None:
            return NoDraft()
        return NgramDraft() if draft == "ngram" else GgufDraft(self.drafts[draft], self.target.model)

    def run(
        self,
        draft: str | None,
        threads: int,
        prompt: list[int],
        n_generate: int,
        n_draft: int,
        fixed: bool,
        expert_bytes: int,
        policy: str,
        max_moves: int | None,
        sync_moves: bool,
        clocks: bool,
    ) -> dict[str, Any]:
        """draft: a loaded one's name, "ngram", or None. clocks: take the layers' times, which costs a little."""
        assert self.target is not None
        self._threads(threads)
        begin = time.perf_counter()
        self.experts.set_slots([0] * self.experts.n_rows)
        del stock._log[:]
        free = self.device.memory[0]
        residency = self._cold(policy, expert_bytes, max_moves, sync_moves)
        if self.device.kind != "cpu":  # as for users
            with residency.undisturbed():
                n_guesses = min(n_draft, self.target.max_guesses) if draft else 0
                self.target.warm_up(widths_to_come(n_guesses, fixed), WARM_UP_SECONDS)
        decoder = Decoder(
            self.target, residency, drafter=self._drafter(draft), draft_max=n_draft if draft else 0, draft_fixed=fixed
        )
        gc.collect()
        gc.disable()
        set_up = time.perf_counter() - begin
        try:
            tokens = decoder.generate(prompt, n_generate)
            first = next(tokens)
            self.experts.reset_perf(times=clocks)
            moved = residency.n_moves
            start = time.perf_counter()
            text = [first, *tokens]
            seconds = time.perf_counter() - start
        finally:
            gc.enable()
            decoder.close()
            self._settle(residency)
        report, perf = decoder.report, self.experts.perf_total()
        used = free - self.device.memory[0]
        return {
            "tokens": text,
            "ttft": report.prompt_seconds,
            "seconds": seconds,
            "set_up_seconds": set_up,
            "n_steps": report.n_steps,
            "n_drafted": report.n_drafted,
            "n_accepted": report.n_accepted,
            "n_draft_evaluated": report.n_draft_evaluated,
            "draft_seconds": report.draft_seconds,
            "verify_seconds": report.verify_seconds,
            "accept_seconds": report.accept_seconds,
            "hit_rate": perf.hit_rate,
            "moves": residency.n_moves - moved,
            "load_bytes": perf.n_load_bytes,
            "layer_calls": perf.n_calls,
            "streamed": perf.n_streamed_experts,
            "ahead": perf.n_ahead_experts,
            "ahead_right": perf.n_ahead_right,
            "two_passes": any(r.two_passes for r in self.experts.rows()),
            "slot_bytes": sum(r.n_slots * r.expert_bytes for r in self.experts.rows()),
            "device_bytes": self.experts.device_bytes(),
            "device_reading": used,
            "in_stream": any(r.in_stream for r in self.experts.rows()),
            "whole": all(r.whole for r in self.experts.rows()),
            "buffers": stock.buffers(),
            "us": {name[3:]: value for name, value in vars(perf).items() if name.startswith("us_")},
            **self._expert_bytes(),
        }

    def _expert_bytes(self) -> dict[str, int]:
        """Bytes of the distinct experts that the run's decodes used, by where they were computed."""
        perfs = [(self.experts.perf(r.row), r.expert_bytes) for r in self.experts.rows()]
        return {
            "cold_bytes": sum(p.n_cold_experts * size for p, size in perfs),
            "hot_bytes": sum(p.n_hot_experts * size for p, size in perfs),
        }

    def steps(
        self,
        threads: int,
        prompt: list[int],
        text: list[int],
        width: int,
        expert_bytes: int,
        policy: str,
        max_moves: int | None,
    ) -> dict[str, Any]:
        """Seconds of each step of `width` tokens: the decode, and what the policy takes with it."""
        assert self.target is not None
        self._threads(threads)
        context = self.target
        context.clear()
        seconds = []
        residency = self._cold(policy, expert_bytes, max_moves)
        try:
            for i in range(0, len(prompt), context.n_batch):
                part = prompt[i : i + context.n_batch]
                context.decode(part)
                residency.observe(part, starts=i == 0)
            self.experts.reset_perf()
            for i in range(0, len(text) - width + 1, width):
                part = text[i : i + width]
                start = time.perf_counter()
                residency.plan()
                residency.publish()
                context.decode(part, all_logits=True)
                residency.observe(part)
                seconds.append(time.perf_counter() - start)
        finally:
            self._settle(residency)
        return {"seconds": seconds, "hit_rate": self.experts.perf_total().hit_rate} | self._expert_bytes()

    def close(self) -> None:
        contexts = [*self.drafts.values(), *([self.target] if self.target else [])]
        for context in contexts:
            context.close()
            context.model.close()


def main() -> None:
    llama_cpp.llama_log_set(stock._keep_log, None)
    llama_cpp.llama_backend_init()
    stock.serve(Worker())


if __name__ == "__main__":
    main()
