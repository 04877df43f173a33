"""A small engine that generates the same script for every prompt, in steps of random sizes.

The tokens are those of `script`, rotated by the request's seed if it has one, then EOS, repeated. Stop tokens before
min_tokens are left out; the response ends at the first later one, or at max_tokens.
Log-probabilities are a function of the token alone (`logprobs_of`). Step sizes come from `seed`, 1 to `max_step`. It
can be full, dead, slow, or fail after some tokens, and it records what was submitted, aborted and is running.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field

from deployments.engine_client import Health
from engine.errors import PacelineError
from engine.messages import Delta, FinishReason, Submit, TokenLogprobs


def logprobs_of(token_id: int, num_top: int) -> TokenLogprobs:
    """Log-probabilities of a token, independent of its prefix: the most likely ids are the next ones."""
    top = tuple((token_id + rank, -0.5 * rank - token_id / 1000) for rank in range(1, num_top + 1))
    return TokenLogprobs(logprob=-0.25 - token_id / 1000, top=top)


@dataclass
class FakeEngine:
    script: Sequence[int]
    eos_token_id: int
    seed: int = 0
    max_step: int = 5
    step_s: float = 0.0
    """Seconds before each step."""
    refusal: PacelineError | None = None
    """Raised before the first delta of every request; None raises nothing."""
    fail_after: int | None = None
    """Number of tokens after which `failure` ends the request."""
    failure: Exception | None = None
    """The exception that ends the request."""
    state: Health = field(default_factory=lambda: Health(status="ok", draft="ok"))
    submitted: list[Submit] = field(default_factory=list)
    running: set[str] = field(default_factory=set)
    aborted: list[str] = field(default_factory=list)
    peak_running: int = 0

    async def health(self) -> Health:
        return self.state

    async def generate(self, submit: Submit) -> AsyncGenerator[Delta, None]:
        if self.refusal is not None:
            raise self.refusal
        if submit.request_id in self.running:
            raise ValueError(f"{submit.request_id} runs already")
        self.submitted.append(submit)
        self.running.add(submit.request_id)
        self.peak_running = max(self.peak_running, len(self.running))
        is_finished = False
        try:
            async for delta in self._deltas(submit):
                is_finished = delta.finish_reason is not None
                yield delta
        except PacelineError:
            is_finished = True
            raise
        finally:
            self.running.discard(submit.request_id)
            if not is_finished:
                self.aborted.append(submit.request_id)

    async def _deltas(self, submit: Submit) -> AsyncGenerator[Delta, None]:
        tokens, finish_reason = self._answer(submit)
        sizes = random.Random(self.seed)
        done = num_steps = 0
        while done < len(tokens):
            await asyncio.sleep(self.step_s)
            end = min(len(tokens), done + sizes.randint(1, self.max_step))
            if self.failure is not None and self.fail_after is not None and end >= self.fail_after:
                raise self.failure
            num_steps += 1
            num_top, num_prompt_top = submit.sampling.num_logprobs, submit.sampling.num_prompt_logprobs
            yield Delta(
                request_id=submit.request_id,
                token_ids=tuple(tokens[done:end]),
                logprobs=() if num_top is None else tuple(logprobs_of(i, num_top) for i in tokens[done:end]),
                prompt_logprobs=()
                if num_prompt_top is None or done
                else tuple(logprobs_of(i, num_prompt_top) for i in submit.prompt[1:]),
                finish_reason=finish_reason if end == len(tokens) else None,
                num_cached=len(submit.prompt) // 2,
                num_drafted=num_steps * (self.max_step - 1),
                num_accepted=end - num_steps,
                num_accepted_now=end - done - 1,
                last="bonus" if end - done == self.max_step else "recovered",
            )
            done = end

    def _answer(self, submit: Submit) -> tuple[list[int], FinishReason]:
        sampling = submit.sampling
        start = 0 if sampling.seed is None else sampling.seed % max(1, len(self.script))
        cycle = [*self.script[start:], *self.script[:start], self.eos_token_id]
        tokens: list[int] = []
        for token_id in itertools.cycle(cycle):
            if token_id not in sampling.stop_token_ids:
                tokens.append(token_id)
            elif len(tokens) >= sampling.min_tokens:
                return [*tokens, token_id], "stop"
            if len(tokens) == sampling.max_tokens:
                return tokens, "length"
        raise AssertionError("a cycle has no end")
