"""The step with the most activations that the scheduler may build, which a shard runs at start to measure them.

Owns the shape of that step: decodes that verify drafts in the dearest way to sample, then prompts that are scored.
Knows no model. All spans share one KV block, so that the step needs no cache to speak of, however long its context is.
"""

from __future__ import annotations

import torch

from engine.checkpoint.model_config import ModelConfig
from engine.config import DRAFT_METHODS, EngineConfig
from engine.core.packing import Forward, pack_step
from engine.core.request import Request
from engine.core.step import Batch, Draft, DraftRow, Span
from engine.core.verifier import Verifier
from engine.messages import SamplingParams, Submit
from engine.sampling.logits_processor import LogitsProcessor
from engine.sampling.penalties import TokenOptions
from engine.sampling.readback import StepClock
from engine.workers.memory_plan import SAMPLED_LOGIT_BYTES, SCORED_LOGIT_BYTES

NUM_BLOCKS = 2
"""Blocks of the cache that the step needs, the scratch block included."""
BLOCK = 1
TOP_LOGPROBS = 20


class LargestStep:
    """A step of `max_step_tokens` rows, all of them with logits.

    Args:
        engine: the settings.
        config: of the target.
        device: of the distributions of drafts, which are made here where there is a draft model.
        rank: of the shard that computes it.
    """

    batch: Batch
    draft: Draft

    def __init__(self, engine: EngineConfig, config: ModelConfig, device: torch.device, *, rank: int) -> None:
        self._rank = rank
        num_top = min(TOP_LOGPROBS, config.vocab_size)
        self._sampling = SamplingParams(
            temperature=0.7,
            top_p=0.9,
            top_k=2 * num_top,
            min_p=0.01,
            presence_penalty=0.5,
            repetition_penalty=1.2,
            num_logprobs=num_top,
            num_prompt_logprobs=num_top,
        )
        self._block_size = engine.kv_block_size
        longest = min(engine.max_model_len or config.max_model_len, config.max_model_len)
        k = 0 if engine.speculative.method == "none" else min(engine.speculative.k, longest - 2)
        rows, requests, width = engine.max_step_tokens, engine.max_num_requests, k + 1
        decodes = min(requests, rows // width)
        left = rows - decodes * width
        if decodes == requests and SCORED_LOGIT_BYTES * (left + width) > SAMPLED_LOGIT_BYTES * width:
            decodes, left = decodes - 1, left + width  # One request fewer decodes, so that one is left for a prompt.
        # One span has the longest context. Attention takes no more memory for several, and the host would.
        spans = [self._span(index, 1 if index else longest - width, 1, k) for index in range(decodes)]
        while left > 0 and len(spans) < requests:
            num_tokens = min(left, longest - 1)
            spans.append(self._span(len(spans), longest - 1 - num_tokens, num_tokens, 0))
            left -= num_tokens
        probs = None
        if rank == 0 and engine.speculative.method in DRAFT_METHODS and decodes and k:
            probs = torch.full((decodes, k, config.vocab_size), 1.0 / config.vocab_size, device=device)
        drafts = [DraftRow((1,) * k, None if probs is None else probs[index]) for index in range(decodes)]
        self.batch = Batch(1, tuple(spans), 0)
        self.draft = Draft((*drafts, *(DraftRow() for _ in spans[decodes:])))

    def run(self, forward: Forward, clock: StepClock) -> None:
        """Compute the step: on rank 0 with sampling and acceptance, on the others the forward alone.

        Args:
            forward: of this shard, over a cache of at least `NUM_BLOCKS` blocks.
            clock: of the shard.

        Raises:
            ShardDown: another shard does not take part.
        """
        if self._rank == 0:
            Verifier(forward, block_size=self._block_size, clock=clock).verify(self.batch, self.draft)
            return
        clock.begin()
        forward(pack_step(self.batch, self.draft, self._block_size))
        clock.forwarded()
        clock.read([])

    def _span(self, key: int, start: int, num_tokens: int, k: int) -> Span:
        """The last tokens of a request: of a decode, or of a prompt of which all these tokens are scored."""
        length = start + num_tokens
        prompt = (1,) * (length if num_tokens > 1 else 1)
        request = Request(
            submit=Submit(request_id=str(key), prompt=prompt, sampling=self._sampling),
            key=key,
            stream_key=key,
            tokens=[1] * length,
            num_computed=start,
            block_ids=[BLOCK] * -(-(length + k) // self._block_size),
        )
        options = TokenOptions.of(self._sampling, len(prompt))
        if options is not None:
            request.logits_processor = LogitsProcessor.make(options, None)
        return Span(request, start, num_tokens, k, True, "plan")
