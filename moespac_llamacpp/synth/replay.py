"""A planted chain as steps for the simulator: what a target and its draft would decode, without either of them.

No token of it comes twice, so that a policy's memory of tokens says nothing and what counts is how often an expert is used.
"""

from __future__ import annotations

import numpy as np

from moespac_llamacpp.planning import Batch
from moespac_llamacpp.simulate import Step
from moespac_llamacpp.synth.plan import Plan
from moespac_llamacpp.synth.weights import successors


def verify_steps(
    plan: Plan, width: int, n_text: int, *, acceptance: float = 0.75, n_prompt: int = 512, first: int = 0
) -> list[Step]:
    """A prompt as one batch, then verify batches of `width` tokens until n_text are accepted; only these are measured.

    The draft is wrong where a planted draft of that acceptance is, and goes on among the decoys. first: where in the chain the
    prompt begins. ValueError: the chain is too short."""
    end = first + n_prompt + n_text
    if end + width > len(plan.chain):
        raise ValueError(f"the chain has {len(plan.chain)} words, {end + width} are needed")
    words, follows = successors(plan, plan.misses(acceptance))
    believed = np.zeros(len(plan.base_of), np.int32)
    believed[words] = follows
    prompt = plan.chain[first : first + n_prompt]
    steps = [Step(Batch.from_ids(plan.experts(prompt), plan.n_expert, tokens=prompt, starts=True), False)]
    at = first + n_prompt
    while at < end:
        tokens = [int(plan.chain[at])]
        while len(tokens) < width:
            tokens.append(int(believed[tokens[-1]]))
        right = np.cumprod(np.array(tokens) == plan.chain[at : at + width]).astype(bool)
        batch = np.array(tokens, np.int32)
        steps.append(Step(Batch.from_ids(plan.experts(batch), plan.n_expert, tokens=batch, accepted=right), True))
        at += int(right.sum())
    return steps
