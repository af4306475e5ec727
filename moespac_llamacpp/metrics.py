"""What a server did, in Prometheus' text format (version 0.0.4)."""

from __future__ import annotations

from collections.abc import Mapping

from moespac_llamacpp.api import Stats

_COUNTERS = {
    "prompt_tokens": ("n_prompt", "Tokens of prompts."),
    "prompt_tokens_reused": ("n_reused", "Tokens of prompts whose KV was there already."),
    "prompt_seconds": ("prompt_seconds", "Seconds spent on prompts."),
    "generated_tokens": ("n_generated", "Tokens that were generated."),
    "generation_seconds": ("seconds", "Seconds spent on generation after the prompt."),
    "drafted_tokens": ("n_drafted", "Tokens that were drafted."),
    "accepted_tokens": ("n_accepted", "Drafted tokens that stayed."),
    "hot_pairs": ("n_hot_pairs", "Pairs of token and expert that the device computed from slots."),
    "cold_pairs": ("n_cold_pairs", "Pairs of token and expert whose expert had no slot."),
    "expert_uploads": ("n_loads", "Experts that were uploaded into slots."),
    "expert_streams": (
        "n_streamed_experts",
        "Experts that crossed the link in the middle of a decode, once their layer had chosen them.",
    ),
    "expert_look_aheads": (
        "n_ahead_experts",
        "Experts that crossed the link while the layer before theirs was computed.",
    ),
    "expert_upload_bytes": ("n_load_bytes", "Bytes of these."),
}


def text(stats: Stats, requests: Mapping[tuple[str, str], int], n_waiting: int) -> str:
    """requests: number by (endpoint, outcome). n_waiting: requests that wait for their turn."""
    lines = ["# HELP moespac_requests_total Requests by endpoint and outcome.", "# TYPE moespac_requests_total counter"]
    for (endpoint, outcome), n in sorted(requests.items()):
        lines.append(f'moespac_requests_total{{endpoint="{endpoint}",outcome="{outcome}"}} {n}')
    for name, (field, what) in _COUNTERS.items():
        lines += _metric(f"{name}_total", "counter", what, getattr(stats.total, field))
    lines += _metric("requests_waiting", "gauge", "Requests that wait for their turn.", n_waiting)
    lines += _metric("resident_expert_bytes", "gauge", "Bytes of experts in slots.", stats.total.resident_bytes)
    lines += _metric(
        "expert_device_bytes", "gauge", "Bytes of slots and their buffers on the device.", stats.device_bytes
    )
    lines += _metric("context_tokens", "gauge", "Tokens in the context.", stats.n_past)
    lines += _metric("context_size_tokens", "gauge", "Tokens that fit the context.", stats.n_ctx)
    return "\n".join(lines) + "\n"


def _metric(name: str, kind: str, what: str, value: float) -> list[str]:
    name = f"moespac_{name}"
    return [
        f"# HELP {name} {what}",
        f"# TYPE {name} {kind}",
        f"{name} {value:g}" if value < 1e5 else f"{name} {value:.0f}",
    ]
