"""Answers in a form that a program can read, and what they cost.

python examples/structured.py [TARGET [DRAFT]]
"""

from __future__ import annotations

import json
import sys
from typing import Any

from moespac_llamacpp import Moespac

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"word": {"type": "string", "maxLength": 20}, "meanings": {"type": "integer", "maximum": 9}},
    "required": ["word", "meanings"],
}


def main(target: str | None = None, draft: str | None = None) -> None:
    # the bundled model is too small for several threads
    options: dict[str, Any] = {"model_path": target} if target else {"n_threads": 1}
    with Moespac(**options, draft_model=draft, n_ctx=512) as llm:
        messages = [{"role": "user", "content": 'What does "heron" mean?'}]
        for _ in range(2):  # the second time the prompt's KV is there already
            answer = json.loads(llm.generate(messages, max_tokens=100, json_schema=SCHEMA))
            print(f"{answer['word']!r} has {answer['meanings']} meanings; {llm.stats.last.status()}")


if __name__ == "__main__":
    main(*sys.argv[1:3])
