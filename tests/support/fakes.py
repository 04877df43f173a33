"""Small real objects with a known distribution, shared by the tests.

`ToyModel` is a model of a few tokens. Its logits depend on the last tokens of the context, which it reads from a paged
cache through the block tables of the forward: wrong blocks, slots or rollbacks give wrong logits. `LoopbackEndpoint`
serves draft requests in this process.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
import torch
import xgrammar
from reference import Generated, Spelling

from engine.core.acceptance import AcceptanceKind
from engine.core.block_pool import BlockPool
from engine.core.committer import Committer
from engine.core.drafter import Drafter
from engine.core.engine import Engine
from engine.core.pacing import KChoice, Prediction, SpeculationPlan
from engine.core.request import Request
from engine.core.scheduler import Scheduler
from engine.core.stats import StepStats
from engine.core.step import DeviceDrafts, ForwardInput, ForwardResult
from engine.core.verifier import Verifier
from engine.draft.architectures import PlainArchitecture
from engine.draft.messages import DraftRequestRow, DraftResponse
from engine.draft.proposer import OnDevice, Proposer
from engine.draft.remote import RemoteDrafter
from engine.messages import Delta, Submit
from engine.sampling.grammar import Grammars
from engine.sampling.staging import to_host


class ToyModel:
    """Logits of a token are a fixed random function of it and the `order - 1` tokens before it.

    Args:
        vocab_size: tokens it can read.
        columns: tokens it can score; default all.
        num_blocks, block_size: its paged cache, which holds token ids in place of K and V.
        seed: selects the distribution. A `blend` below 1 keeps it close to that of seed 0.
        order: tokens of context that the logits depend on.
        sharpness: factor of the logits.
    """

    def __init__(
        self,
        *,
        vocab_size: int,
        columns: int | None = None,
        num_blocks: int = 64,
        block_size: int = 4,
        seed: int = 0,
        blend: float = 0.0,
        order: int = 2,
        sharpness: float = 1.5,
    ) -> None:
        self.vocab_size = vocab_size
        self.columns = columns or vocab_size
        self.block_size = block_size
        self._order = order
        shape = (vocab_size + 1,) * order + (self.columns,)
        base = np.random.default_rng(0).normal(size=shape)
        other = np.random.default_rng(seed).normal(size=shape)
        self._table = (((1 - blend) * base + blend * other) * sharpness).astype(np.float32)
        self._cache = np.full(num_blocks * block_size, -1, dtype=np.int64)
        self.num_rows = 0

    def logits_after(self, tokens: Sequence[int]) -> np.ndarray:
        """[columns] float32 logits of the next token."""
        context = [*([self.vocab_size] * self._order), *tokens][-self._order :]
        row: np.ndarray = self._table[tuple(context)]
        return row

    def forward(self, plan: ForwardInput) -> ForwardResult:
        """Logits [R, columns] float32 of the wanted rows; moves slots, then writes every row's token to the cache."""
        self.num_rows += len(plan.token_ids)
        for source, target in () if plan.moves is None else plan.moves.tolist():
            self._cache[target] = self._cache[source]
        self._cache[plan.slots] = tokens_of_rows(plan)
        wanted = set(plan.logit_rows.tolist())
        out = []
        row = 0
        for span, (q_len, kv_len) in enumerate(zip(plan.q_lens, plan.kv_lens, strict=True)):
            for slot in range(kv_len - q_len, kv_len):
                where = seen_slots(plan, span, row, slot)
                assert plan.positions[row] == len(where) - 1
                if row in wanted:
                    slots = plan.block_tables[span, where // self.block_size] * self.block_size
                    out.append(self.logits_after(self._cache[slots + where % self.block_size].tolist()))
                row += 1
        return ForwardResult(torch.from_numpy(np.stack(out)) if out else torch.zeros(0, self.columns))


def seen_slots(plan: ForwardInput, span: int, row: int, slot: int) -> np.ndarray:
    """The slots of a span that a row in one of them sees."""
    first = plan.kv_lens[span] if plan.tree is None else plan.kv_lens[span] - plan.tree.num_slots[span]
    if plan.tree is None or slot < first:
        return np.arange(slot + 1)
    word = int(plan.tree.ancestors[row])
    return np.array([*range(first), *(first + j for j in range(64) if word >> j & 1)])


def tokens_of_rows(forward_input: ForwardInput) -> np.ndarray:
    """[N] token of each row of a forward, those in device memory included."""
    known = forward_input.device_tokens
    if known is None:
        return forward_input.token_ids
    return np.where(known.places >= 0, known.ids.numpy()[np.maximum(known.places, 0)], forward_input.token_ids)


class LoopbackEndpoint:
    """The target's endpoint of a draft buffer whose draft runs in this process.

    Args:
        proposer: the draft.
        max_rows, max_k, draft_vocab: capacities of the buffer.
        features: that the draft reads.
        on_device: drafted tokens stay in the buffer, as over CUDA IPC.
    """

    def __init__(
        self,
        proposer: Proposer,
        *,
        max_rows: int,
        max_k: int,
        draft_vocab: int,
        features: torch.Tensor | None = None,
        on_device: bool = False,
    ) -> None:
        self._proposer = proposer
        self.num_reads = 0
        self._on_device: OnDevice | None = None
        if on_device:
            ids, new_tokens = torch.zeros(max_rows, max_k, dtype=torch.int32), torch.zeros(4096, dtype=torch.int32)
            self._on_device = OnDevice(ids, torch.zeros(max_rows, max_k), new_tokens, self._read)
        self.probs = torch.zeros(max_rows, max_k, draft_vocab)
        self.features = features
        self.num_requests = 0

    def ask(self, rows: Sequence[DraftRequestRow], released: Sequence[int] = (), *, deadline_s: float) -> DraftResponse:
        self.num_requests += 1
        self.probs.fill_(float("nan"))
        if self._on_device is not None:
            self._on_device.token_ids.fill_(-7)
            tokens = [token for row in rows for token in row.new_tokens]
            self._on_device.new_tokens[: len(tokens)] = torch.tensor(tokens, dtype=torch.int32)
        response_rows = self._proposer.propose(rows, released, self.probs, self.features, self._on_device)
        return DraftResponse(epoch=1, seq=self.num_requests, rows=response_rows, draft_s=0.0)

    def drafted(self, num_rows: int) -> DeviceDrafts:
        assert self._on_device is not None
        ids = self._on_device.token_ids[:num_rows].long().clamp(min=0)
        return DeviceDrafts(ids, self._on_device.confidences[:num_rows], self.probs[:num_rows])

    def _read(self, tensors: Sequence[torch.Tensor]) -> list[np.ndarray]:
        self.num_reads += 1
        return to_host([tensor.clone() for tensor in tensors])

    def mark_step(self, *, runs: bool) -> None:
        return None

    def close(self) -> None:
        return None


class RandomPacer:
    """A new random K for every request in every step."""

    def __init__(self, seed: int, max_k: int) -> None:
        self._random = np.random.default_rng(seed)
        self._max_k = max_k

    def choose(self, plan: SpeculationPlan, decodes: Sequence[Request], num_prefill_rows: int) -> list[KChoice]:
        return [KChoice(int(k), "plan") for k in self._random.integers(0, self._max_k + 1, size=len(decodes))]

    def observe(self, stats: StepStats) -> Prediction:
        return Prediction()


class FixedPacer:
    """The same K for every request in every step; keeps the statistics of each step."""

    def __init__(self, k: int) -> None:
        self._k = k
        self.stats: list[StepStats] = []

    def choose(self, plan: SpeculationPlan, decodes: Sequence[Request], num_prefill_rows: int) -> list[KChoice]:
        return [KChoice(self._k, "plan")] * len(decodes)

    def observe(self, stats: StepStats) -> Prediction:
        self.stats.append(stats)
        return Prediction()


def toy_grammars(spelling: Spelling) -> Grammars:
    """Grammars over a toy vocabulary."""
    words = [text.encode() for text in spelling.of_token]
    ends = list(spelling.end_ids)
    return Grammars(lambda: xgrammar.TokenizerInfo(words, vocab_size=len(words), stop_token_ids=ends))


def toy_drafter(
    draft: ToyModel,
    *,
    num_blocks: int = 64,
    vocab: torch.Tensor | None = None,
    max_request_tokens: int = 64,
    spelling: Spelling | None = None,
    grammars: Grammars | None = None,
    on_device: bool = False,
    width: int = 1,
) -> RemoteDrafter:
    """A RemoteDrafter whose draft model is a toy in this process.

    Args:
        spelling: makes the draft compile grammars by itself, while its requests run.
        grammars: the engine's own grammars: the draft finds each one compiled, because a request starts after that.
        on_device: drafted tokens stay in the draft buffer, as over CUDA IPC.
        width: of draft trees.
    """
    pool = BlockPool(num_blocks, draft.block_size, prefix_cache=True)
    if grammars is None and spelling is not None:
        grammars = toy_grammars(spelling)
    proposer = Proposer(PlainArchitecture(draft.forward), pool, vocab=vocab, max_model_len=10_000, grammars=grammars)
    drafter = RemoteDrafter(
        max_request_tokens=max_request_tokens, max_released=64, deadline_s=1.0, on_down=print, width=width
    )
    drafter.set_vocab(vocab)
    endpoint = LoopbackEndpoint(proposer, max_rows=64, max_k=16, draft_vocab=draft.columns, on_device=on_device)
    drafter.attach(endpoint)
    return drafter


class ToyEngine:
    """An engine over a toy target. The test steps it; it collects every delta."""

    def __init__(
        self,
        target: ToyModel,
        drafter: Drafter,
        pacer: RandomPacer | FixedPacer,
        *,
        num_blocks: int = 64,
        prefix_cache: bool = True,
        max_num_requests: int = 16,
        max_step_tokens: int = 32,
        max_model_len: int = 128,
        grammars: Grammars | None = None,
        acceptance: AcceptanceKind = "auto",
    ) -> None:
        self.pool = BlockPool(num_blocks, target.block_size, prefix_cache=prefix_cache)
        self.deltas: dict[str, list[Delta]] = {}
        scheduler = Scheduler(
            self.pool,
            pacer=pacer,
            plan=SpeculationPlan,
            max_num_requests=max_num_requests,
            max_step_tokens=max_step_tokens,
            max_model_len=max_model_len,
        )
        self.engine = Engine(
            scheduler=scheduler,
            drafter=drafter,
            verifier=Verifier(target.forward, block_size=target.block_size, acceptance=acceptance),
            committer=Committer(self.pool, scheduler, max_model_len=max_model_len),
            publish=self._collect,
            pacer=pacer,
            grammars=grammars,
        )

    def _collect(self, deltas: tuple[Delta, ...]) -> None:
        for delta in deltas:
            self.deltas.setdefault(delta.request_id, []).append(delta)

    def step(self) -> None:
        self.engine.drain()
        self.engine.step()
        self.pool.check()

    def run(self, submits: Sequence[Submit], *, max_steps: int = 100_000) -> dict[str, list[int]]:
        """Submit all, step until every request has ended, return the generated tokens by request id."""
        for submit in submits:
            self.engine.submit(submit)
        self.engine.drain()
        for _ in range(max_steps):
            if not self.engine.has_work:
                break
            if not self.engine.scheduler.has_work:
                time.sleep(0.001)  # a grammar is being compiled
            self.step()
        assert not self.engine.has_work, "the engine did not finish"
        return {s.request_id: self.tokens_of(s.request_id) for s in submits}

    def tokens_of(self, request_id: str) -> list[int]:
        return [token for delta in self.deltas.get(request_id, []) for token in delta.token_ids]

    def result_of(self, request_id: str) -> Generated:
        """Everything that a finished request got."""
        deltas = self.deltas[request_id]
        assert [delta.finish_reason for delta in deltas[:-1]] == [None] * (len(deltas) - 1)
        assert all(not delta.prompt_logprobs for delta in deltas[1:])
        assert deltas[-1].finish_reason is not None
        return Generated(
            self.tokens_of(request_id),
            deltas[-1].finish_reason,
            [logprob for delta in deltas for logprob in delta.logprobs],
            list(deltas[0].prompt_logprobs),
        )
