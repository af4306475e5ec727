"""A few hybrid decodes and prompts of tiny models, small enough for compute-sanitizer's slower tools:

    MOESPAC_TEST_DEVICE=CUDA0 compute-sanitizer --tool racecheck --report-api-errors no python tests/small_run.py

With --upstream also GroveMoE by upstream alone, on the CPU and on the device: its tokens repeat experts, for which upstream's
CUDA kernels race.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from families import FAMILIES, cached_model
from lowlevel import Capture, load_model, make_context
from moespac_llamacpp import native
from parity import CAPTURED, difference, pair
from test_prompt import compare, lane, tokens

TOKENS = list(range(5, 37))


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        for family, expert_type in (("qwen3moe", "Q4_K"), ("gpt-oss", "MXFP4")):
            with pair(cached_model(Path(folder), family, expert_type=expert_type), family) as p:
                p.experts.set_streaming(native.MAX_STREAMED, always=True)
                for n, ahead in ((1, 0), (9, 0), (1, 2), (9, 2)):
                    p.experts.set_look_ahead(ahead)
                    p.fill(0.5)
                    print(family, n, p.compare(TOKENS[:n]), p.experts.perf_total(), flush=True)
            with lane(cached_model(Path(folder), family, expert_type=expert_type), family) as p:
                for share in (0.0, 0.5):
                    p.fill(share)
                    compare(p, tokens(80))
                    print(family, "prompt", p.experts.prompt_bytes(), flush=True)
        if "--upstream" in sys.argv:
            path = cached_model(Path(folder), "grovemoe")
            with (
                load_model(path) as host,
                load_model(path, n_gpu_layers=99) as device,
                make_context(host, cb=Capture(*CAPTURED)) as a,
                make_context(device, cb=Capture(*CAPTURED)) as b,
            ):
                for n in (1, 4, 9, 17, 32):
                    print("upstream's GroveMoE", n, difference(a, b, TOKENS[:n], FAMILIES["grovemoe"]), flush=True)


if __name__ == "__main__":
    main()
