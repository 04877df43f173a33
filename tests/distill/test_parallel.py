"""A parallel draft: the one forward of training equals a forward per root as in serving, and its mask is learned."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from distill_fakes import VOCAB, open_target, random_batch, write_shards, write_target
from fakes import FixedPacer
from local_engine import LocalEngine
from tiny_tokenizer import byte_level

from distill.cli import new_draft
from distill.data.shards import Batch, token_mass
from distill.models.costs import CONTEXT, measure
from distill.models.decoder import FrozenTarget, rms_norm, rope_tables
from distill.models.eagle import EagleDraft
from distill.models.export import DraftMismatchError, export_draft, load_draft, start_from
from distill.models.parallel import ParallelDraft
from distill.options import add_distill_parser
from distill.settings import TrainConfig
from distill.training.evaluate import evaluate
from distill.training.trainer import step_loss, train
from engine.errors import ConfigError
from engine.messages import SamplingParams, Submit

VOCABULARY = torch.arange(3, 63)
POSITIONS = 4


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> FrozenTarget:
    return open_target(write_target(tmp_path_factory.mktemp("target")))


def parallel(target: FrozenTarget, num_layers: int = 1, positions: int = POSITIONS) -> ParallelDraft:
    torch.manual_seed(num_layers)
    draft = ParallelDraft(target.config, (0, 1), VOCABULARY, target.embed, num_layers=num_layers, positions=positions)
    for parameter in draft.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return draft


def states_alone(draft: ParallelDraft, batch: Batch, root: int) -> torch.Tensor:
    """[POSITIONS, H] of one root of row 0, as in serving: committed and masked positions are one causal sequence."""
    eps, config = draft.config.rms_norm_eps, draft.config
    features = F.rms_norm(batch.features[:1].float(), (32,), eps=eps) * draft.feature_norm
    tokens = draft.token(rms_norm(draft.embed[batch.tokens[:1]], draft.token_norm, eps))
    committed = (draft.fuse(features.flatten(2))[:, :-1] + tokens[:, 1:])[:, : root + 1]
    carried = draft.carry(rms_norm(committed[:, -1:], draft.carry_norm, eps)) + draft.mask_state
    masked = carried + draft.token(rms_norm(draft.mask_embedding, draft.token_norm, eps))
    x = torch.cat((committed, masked.expand(-1, draft.positions - 1, -1)), dim=1)
    cos, sin = (table[1 : 1 + x.shape[1]][None, :, None] for table in rope_tables(config, 64, x.device))
    for layer in draft.layers:
        x = layer(x, cos, sin, [])
    return rms_norm(x[0, root:], draft.final_norm, eps)


@pytest.mark.parametrize("num_layers", [1, 2])
@pytest.mark.parametrize("first_root", [0, 4])
def test_one_forward_equals_a_forward_per_root(target: FrozenTarget, num_layers: int, first_root: int) -> None:
    draft, batch = parallel(target, num_layers), random_batch(2, 14)
    with torch.no_grad():
        found = draft.unroll(batch, POSITIONS, first_root).hidden
        assert [hidden.shape[1] for hidden in found] == [13 - first_root - step for step in range(POSITIONS)]
        for root in (first_root, 6, 9):
            alone = states_alone(draft, batch, root)
            for step in range(POSITIONS):
                torch.testing.assert_close(found[step][0, root - first_root], alone[step], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("offset", [0, 1, 2])
@pytest.mark.parametrize("length", [3, 5, 14])
def test_sampled_roots_are_those_of_all_roots(target: FrozenTarget, length: int, offset: int) -> None:
    draft, batch = parallel(target, 2), random_batch(2, length)
    with torch.no_grad():
        first, *later = draft.unroll(batch, POSITIONS).hidden
        sampled, *sampled_later = draft.unroll(batch, POSITIONS, offset, every=3).hidden
    torch.testing.assert_close(sampled, first)
    for all_roots, some in zip(later, sampled_later, strict=False):
        torch.testing.assert_close(some, all_roots[:, offset::3])


def test_no_position_sees_later_tokens_or_features(target: FrozenTarget) -> None:
    """Position j after root t is drawn before the tokens of the positions before it are known."""
    draft, batch, root = parallel(target, 2), random_batch(1, 14), 5
    tokens, features = batch.tokens.clone(), batch.features.clone()
    tokens[:, root + 2 :] = 0
    features[:, root + 1 :] += 1
    changed = Batch(tokens, features, batch.top_ids, batch.top_logprobs, batch.weight)
    with torch.no_grad():
        before, after = (draft.unroll(each, POSITIONS).hidden for each in (batch, changed))
    for one, other in zip(before, after, strict=True):
        torch.testing.assert_close(one[0, root], other[0, root])


@pytest.mark.parametrize("every", [1, 3])
def test_gradients_reach_every_parameter_and_the_mask_only_through_masked_positions(
    target: FrozenTarget, every: int
) -> None:
    draft, batch = parallel(target, 2), random_batch(2, 14)
    step_loss(draft, batch, TrainConfig(steps=POSITIONS, chain_every=every))[0].backward()
    for name, parameter in draft.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.abs().max() > 0, name
    draft.zero_grad()
    step_loss(draft, batch, TrainConfig(steps=1, chain_every=every))[0].backward()
    assert draft.head.weight.grad is not None
    assert draft.head.weight.grad.abs().max() > 0
    for mask in (draft.mask_state, draft.mask_embedding):
        assert mask.grad is None or mask.grad.abs().max() == 0


@pytest.mark.parametrize("num_layers", [1, 2])
def test_it_starts_from_a_chain_with_its_first_position(target: FrozenTarget, tmp_path: Path, num_layers: int) -> None:
    torch.manual_seed(0)
    chain = EagleDraft(target.config, (0, 1), VOCABULARY, target.embed)
    chain.initialise(target, residual_size=1.0)
    export_draft(chain, target.folder, tmp_path, card="")
    draft = parallel(target, num_layers)
    mask = draft.mask_state.detach().clone()
    start_from(draft, tmp_path, target)
    loaded, batch = load_draft(tmp_path, target), random_batch(2, 9)
    with torch.no_grad():
        first, *_ = draft.unroll(batch, POSITIONS).hidden
        expected = loaded.unroll(batch, 1).hidden[0]
    torch.testing.assert_close(draft.head(first), loaded.head(expected), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(draft.mask_state, mask)


def test_the_first_position_stays_where_only_the_mask_is_trained(target: FrozenTarget, tmp_path: Path) -> None:
    shards = write_shards(target, tmp_path / "data", count=60, shard_tokens=1000)
    draft, batch = parallel(target), random_batch(2, 9)
    draft.freeze_shared()
    with torch.no_grad():
        before = [each.clone() for each in draft.unroll(batch, POSITIONS).hidden]
    config = TrainConfig(steps=POSITIONS, row_len=64, batch_tokens=512, budget_tokens=2_000)
    train(draft, [shards[0].parent], tmp_path / "train", config, compute_dtype=torch.float32)
    with torch.no_grad():
        after = draft.unroll(batch, POSITIONS).hidden
    assert torch.equal(before[0], after[0])
    for one, other in zip(before[1:], after[1:], strict=True):
        assert (one - other).abs().max() > 1e-3


def test_a_chain_does_not_start_from_a_parallel_draft(target: FrozenTarget, tmp_path: Path) -> None:
    export_draft(parallel(target), target.folder, tmp_path, card="")
    with pytest.raises(DraftMismatchError, match="start_from"):
        start_from(EagleDraft(target.config, (0, 1), VOCABULARY, target.embed), tmp_path, target)


@pytest.mark.parametrize("int8", [False, True])
def test_export_round_trip(target: FrozenTarget, tmp_path: Path, int8: bool) -> None:
    draft = parallel(target, 2)
    export_draft(draft, target.folder, tmp_path, card="", int8=int8)
    assert json.loads((tmp_path / "config.json").read_text())["positions_per_pass"] == POSITIONS
    loaded = load_draft(tmp_path, target)
    assert isinstance(loaded, ParallelDraft)
    assert loaded.positions == POSITIONS
    for (name, value), (_, again) in zip(draft.named_parameters(), loaded.named_parameters(), strict=True):
        bound = 0.02 * value.abs().max().item() if int8 else 0.005 * value.abs().max().item()
        assert (value - again).abs().max().item() <= bound, name


def test_one_position_is_not_parallel(target: FrozenTarget) -> None:
    with pytest.raises(ValueError, match="parallel: 1 positions given"):
        parallel(target, positions=1)


@pytest.mark.parametrize(("k", "num_passes"), [(1, 1), (POSITIONS, 1), (POSITIONS + 1, 2)])
def test_a_step_costs_one_pass_up_to_the_trained_positions(target: FrozenTarget, k: int, num_passes: int) -> None:
    target = FrozenTarget(target.folder, feature_layers=(0, 1), dtype=torch.float32, max_len=2 * CONTEXT)
    assert measure(target, parallel(target), k, repeats=1).num_passes == num_passes
    chain = EagleDraft(target.config, (0, 1), VOCABULARY, target.embed)
    assert measure(target, chain, k, repeats=1).num_passes == k


def test_later_positions_are_learned(target: FrozenTarget, tmp_path: Path) -> None:
    """Held-out responses: the masked positions agree with the target several times as often as before training."""
    shards = write_shards(target, tmp_path / "data", count=500, shard_tokens=3000)
    vocab = token_mass(shards, VOCAB).topk(64).indices.sort().values
    torch.manual_seed(2)
    draft = ParallelDraft(target.config, (0, 1), vocab, target.embed, positions=3)
    draft.initialise(target)
    before = evaluate(draft, shards[:1], k=3)["all"]
    config = TrainConfig(
        steps=3, chain_every=2, row_len=64, batch_tokens=512, lr=3e-3, muon_lr=0.03, budget_tokens=120_000, seed=1
    )
    skip = frozenset({shards[0].name})
    train(draft, [shards[0].parent], tmp_path / "train", config, skip=skip, compute_dtype=torch.float32)
    after = evaluate(draft, shards[:1], k=3)["all"]
    assert after.first > max(0.15, 2 * before.first)
    assert after.sampled[1] > before.sampled[1] + 0.05
    assert after.tokens_per_step > before.tokens_per_step + 0.1


def parsed(command: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_distill_parser(parser.add_subparsers())
    return parser.parse_args(command.split())


def test_a_parallel_draft_made_by_the_command_from_a_chain_drafts_in_the_engine(tmp_path: Path) -> None:
    """Tokens do not change, and drafts are accepted more often than by chance."""
    tokenizer = byte_level()
    folder = write_target(tmp_path / "target", vocab_size=len(tokenizer))
    tokenizer.save_pretrained(folder)
    common = f"distill run {folder} --chat-share 1 --generate 8000 --slots 16 --max-len 96 --draft-vocab 128"
    common += " --dtype float32 --device cpu --batch-tokens 512 --row-len 96"
    chain, parallel = tmp_path / "chain", tmp_path / "parallel"
    args = parsed(f"{common} --out {chain} --tokens 20000 --unroll 2")
    assert args.run(args) == 0
    args = parsed(f"{common} --out {parallel} --tokens 20000 --parallel 3 --start-from {chain}")
    assert args.run(args) == 0
    assert json.loads((parallel / "config.json").read_text())["positions_per_pass"] == 3
    submits = [
        Submit(request_id=str(i), prompt=(5 + i, 9), sampling=SamplingParams(temperature=1.0, seed=i, max_tokens=40))
        for i in range(8)
    ]
    with LocalEngine(folder) as engine:
        plain = engine.generate(submits)
    with LocalEngine(folder, draft_folder=parallel, pacer=FixedPacer(3), speculative={"k": 3}) as engine:
        assert engine.generate(submits) == plain
        drafted = sum(stats.num_drafted for stats in engine.stats)
        assert drafted > 100
        # A guess out of 256 tokens is right once in 256 times, and a later token counts only after right ones.
        assert sum(stats.num_accepted for stats in engine.stats) > 10 * drafted / 256


def test_mask_only_keeps_head_and_vocabulary_of_the_chain(target: FrozenTarget, tmp_path: Path) -> None:
    """Whatever the data: a row of the head that is new would never be trained."""
    chain = EagleDraft(target.config, (0, 1), VOCABULARY, target.embed)
    chain.initialise(target)
    export_draft(chain, target.folder, tmp_path / "chain", card="")
    shards = write_shards(target, tmp_path / "data", count=20, shard_tokens=3000)
    command = f"distill run {target.folder} --out {tmp_path} --parallel 3 --draft-vocab 16"
    kept, chosen = (
        new_draft(parsed(command + options), target, shards[0].parent, tmp_path / name)
        for name, options in (("a", f" --mask-only --start-from {tmp_path / 'chain'}"), ("b", ""))
    )
    assert torch.equal(kept.vocabulary.draft_vocab, VOCABULARY)
    torch.testing.assert_close(kept.head.weight, chain.head.weight, rtol=1e-2, atol=1e-3)
    assert {name for name, value in kept.named_parameters() if value.requires_grad} == {
        *("mask_state", "mask_embedding", "carry.weight", "carry_norm"),
    }
    assert len(chosen.vocabulary.draft_vocab) == 16


@pytest.mark.parametrize("options", ["--parallel 1", "--parallel 4 --architecture draft_model"])
def test_options_that_make_no_parallel_draft_are_refused_before_any_work(tmp_path: Path, options: str) -> None:
    args = parsed(f"distill run {tmp_path} --out {tmp_path}/draft {options}")
    with pytest.raises(ConfigError, match=r"parallel: \d given .* allowed are numbers from 2, with eagle only"):
        args.run(args)
    args = parsed(f"distill run {tmp_path} --out {tmp_path}/draft --mask-only")
    with pytest.raises(ConfigError, match="mask_only: given without --parallel"):
        args.run(args)
