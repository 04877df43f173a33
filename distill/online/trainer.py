"""Continued training of a serving draft on recent requests, and the choice of the weights that replace it.

Owns the draft in training, the weights that serve beside it, and their comparison on held-out documents: a candidate
must emit more tokens per verify step, by more than chance. Knows no process and no socket.
"""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass
from pathlib import Path
from weakref import WeakKeyDictionary

import numpy as np
import torch

from distill.data.shards import length_batches
from distill.models.decoder import DecoderConfig
from distill.models.eagle import EagleDraft
from distill.models.export import export_draft, load_parameters, read_config, read_tensors
from distill.online.replay import Example, Replay, collate, read_document
from distill.online.target_head import TargetHead
from distill.settings import Objective, TrainConfig
from distill.training.evaluate import answer_hits, walk
from distill.training.trainer import Masters, step_loss
from engine.adaptation.messages import Candidate, Document, Progress, Setup
from engine.adaptation.versions import Versions

MIN_TRAINING, MIN_HELD_OUT = 16, 6
"""Documents that training and a comparison need."""
MAX_COMPARED = 24
"""Latest held-out documents of a comparison."""
STEPS_PER_COMPARISON = 40
MAX_READS = 12
"""Times that a document is read at most, on average, before others must come."""
SIGMAS = 2.0
"""Standard errors of the mean difference by which a candidate must be better."""
MIN_GAIN = 0.01
"""Relative gain that a swap is worth."""

CONFIG = TrainConfig(
    steps=3,
    chain_every=2,
    batch_tokens=768,
    lr=2e-4,
    head_lr_scale=1.0,
    muon=False,
    weight_decay=0.0,
    average=0.98,
    objective=Objective(ce_weight=0.5),
)
"""A small step from weights that are good already, by AdamW: the optimiser starts anew with each process."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """Tokens per verify step on held-out documents."""

    served: float
    trained: float
    error: float
    """Standard error of the mean difference."""
    num_documents: int

    @property
    def is_better(self) -> bool:
        """Whether the trained weights should serve."""
        gain = self.trained - self.served
        return gain > max(SIGMAS * self.error, MIN_GAIN * self.served)


class OnlineTrainer:
    """Trains one draft.

    Args:
        setup: folders and bounds.
        config: of the training.
        compute_dtype: in which weights compute; their masters are float32.

    Raises:
        ConfigError: the target's head cannot be read.
    """

    def __init__(
        self, setup: Setup, *, config: TrainConfig = CONFIG, compute_dtype: torch.dtype = torch.bfloat16
    ) -> None:
        self._setup = setup
        self._config = config
        self._dtype = compute_dtype
        self._versions = Versions(Path(setup.versions_folder))
        self._target_folder = Path(setup.target_folder)
        folder = Path(setup.draft_folder)
        self._feature_layers = tuple(read_config(folder)["feature_layers"])
        self._target = TargetHead(self._target_folder, self._feature_layers)
        self.replay = Replay(setup.buffer_bytes)
        self._rng = np.random.default_rng(config.seed)
        self._offsets = torch.Generator().manual_seed(config.seed)
        self._batches: list[list[Example]] = []
        self._credit = 0.0  # positions that may still be read before new documents come
        self._num_steps = self._num_tokens = self._num_documents = 0
        self._compared: Comparison | None = None
        self._scores: WeakKeyDictionary[Example, float] = WeakKeyDictionary()  # of the serving weights
        self.load(folder)

    def load(self, folder: Path) -> None:
        """Serve and train from the weights of a folder."""
        self._served = self._read(folder)
        self._trained, self._average = (self._copy(self._served) for _ in range(2))
        self._masters = Masters(self._trained, self._config)
        self._scores.clear()
        self._steps_since = 0

    def serve(self, folder: Path) -> None:
        """Compare with the weights of a folder from now on, and go on training."""
        self._served = self._read(folder)
        self._scores.clear()

    def add(self, document: Document) -> None:
        """Take a document into the buffer."""
        tokens, features = read_document(document, len(self._feature_layers))
        first = document.first_generated - 1
        ids, logprobs = self._target.choices(tokens, features, first)
        self.replay.add(Example(tokens, features, ids, logprobs, document.first_generated))
        self._num_documents += 1
        self._credit += MAX_READS * len(tokens)

    @property
    def has_work(self) -> bool:
        """Whether there is enough to learn from that has not been read too often."""
        return (
            self._credit > 0 and len(self.replay.training) >= MIN_TRAINING and len(self.replay.held_out) >= MIN_HELD_OUT
        )

    def step(self) -> Candidate | None:
        """Train on one batch. After some of them, compare, and write the weights if they are better."""
        if not self._batches:
            self._batches = self._shuffled()
        batch = collate(self._batches.pop())
        offset = int(torch.randint(self._config.chain_every, (), generator=self._offsets))
        loss, *_ = step_loss(self._trained, batch, self._config, offset)
        loss.backward()  # type: ignore[no-untyped-call]
        self._masters.step(min(1.0, (self._masters.num_steps + 1) / 20))
        num_tokens = int((batch.weight > 0).sum())
        self._num_tokens += num_tokens
        self._credit -= batch.tokens.numel()
        self._num_steps += 1
        self._steps_since += 1
        if self._steps_since < STEPS_PER_COMPARISON:
            return None
        self._steps_since = 0
        return self._compare()

    def progress(self) -> Progress:
        """Counts and the latest comparison."""
        compared = self._compared
        return Progress(
            num_steps=self._num_steps,
            num_tokens=self._num_tokens,
            num_documents=self._num_documents,
            buffer_bytes=self.replay.num_bytes,
            num_held_out=len(self.replay.held_out),
            served=compared.served if compared is not None else 0.0,
            trained=compared.trained if compared is not None else 0.0,
        )

    def compare(self) -> Comparison:
        """Serving weights against the running average of those in training, on the latest held-out documents."""
        with torch.no_grad():
            for name, value in self._average.named_parameters():
                value.copy_(self._masters.average[name])
        examples = list(self.replay.held_out)[-MAX_COMPARED:]
        served = np.array([self._served_score(example) for example in examples])
        trained = np.array([self._score(self._average, example) for example in examples])
        error = float((trained - served).std(ddof=1) / math.sqrt(len(examples)))
        return Comparison(float(served.mean()), float(trained.mean()), error, len(examples))

    def _compare(self) -> Candidate | None:
        self._compared = found = self.compare()
        if not found.is_better:
            return None
        facts = {"served": found.served, "trained": found.trained, "num_documents": found.num_documents}
        folder = self._versions.add(
            lambda path: export_draft(self._average, self._target_folder, path, card=_CARD), facts
        )
        return Candidate(
            folder=str(folder), served=found.served, trained=found.trained, num_documents=found.num_documents
        )

    def _shuffled(self) -> list[list[Example]]:
        """All training documents in random batches of about `batch_tokens` positions."""
        examples = list(self.replay.training)
        groups = length_batches([len(each.tokens) for each in examples], self._config.batch_tokens, self._rng)
        return [[examples[index] for index in group] for group in groups]

    def _served_score(self, example: Example) -> float:
        score = self._scores.get(example)
        if score is None:
            score = self._scores[example] = self._score(self._served, example)
        return score

    def _score(self, draft: EagleDraft, example: Example) -> float:
        """Tokens per verify step of chains over one document, greedy."""
        first_root = max(example.first_generated - 1, 0)
        hits, _ = answer_hits(draft, collate([example]), first_root, self._setup.k, 1.0)
        lengths, emitted = walk(hits[:, : max(hits.shape[1] - 1, 1)])
        return emitted / len(lengths)

    def _copy(self, draft: EagleDraft) -> EagleDraft:
        """The same weights once more, with the same embedding."""
        return copy.deepcopy(draft, {id(draft.embed): draft.embed})

    def _read(self, folder: Path) -> EagleDraft:
        config = read_config(folder)
        tensors = read_tensors(folder, torch.float32)
        draft = EagleDraft(
            DecoderConfig.from_dict(config),
            self._feature_layers,
            tensors["draft_vocab"],
            self._target.embed,
            num_layers=int(config["num_hidden_layers"]),
        )
        load_parameters(draft, tensors)
        return draft.to(self._dtype)


_CARD = "# Adapted weights of a draft\n\nMade while it served, from the requests that it drafted for.\n"
