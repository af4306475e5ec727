"""What would a target and a draft take on this machine, and how many experts would find a slot? Loads no weights.

python examples/plan_memory.py target.gguf draft.gguf 8G
"""

from __future__ import annotations

import sys
from pathlib import Path

from moespac_llamacpp import native
from moespac_llamacpp.memory import parse_bytes
from moespac_llamacpp.models import LoadError, capture_log
from moespac_llamacpp.plan import Wishes
from moespac_llamacpp.planner import Pair, plan_pair


def main() -> None:
    if len(sys.argv) != 4:
        raise SystemExit("usage: python examples/plan_memory.py target.gguf draft.gguf 8G")
    target, draft, vram = sys.argv[1:]
    capture_log()
    try:
        plan = plan_pair(Pair(Path(target), Path(draft)), native.default_device(), Wishes(vram=parse_bytes(vram)))
    except (LoadError, ValueError) as error:  # the sentence says what does not fit, and what would help
        raise SystemExit(str(error)) from None
    print(plan.describe())
    print(f"{plan.share:.0%} of the experts have a slot")


if __name__ == "__main__":
    main()
