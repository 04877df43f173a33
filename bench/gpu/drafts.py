"""The part of `paceline bench gpu` about drafts: trees in the target's forward, and recorded chains of the draft.

Each check compares a fast path with its slow twin on the same device and raises `CheckFailed` where they differ.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from bench.gpu.lab import CheckFailed, Lab
from bench.gpu.planted import LocalLink, planted_pair
from engine.core.block_pool import BlockPool
from engine.core.packing import SpanRows, pack_spans
from engine.draft.architectures import PlainArchitecture
from engine.draft.messages import DraftRequestRow
from engine.draft.proposer import Proposer
from engine.graphs.buckets import make_buckets, row_sizes
from engine.graphs.chain import ChainModel, RecordedChain
from engine.graphs.forward import GraphedForward
from engine.model.decoder import Decoder
from engine.model.runner import ModelRunner
from engine.sampling.row_sampling import RowSampling
from engine.tree import ancestor_masks, depths

K = 5
PARENTS = (-1, 0, 0, -1, 3)
"""Two paths, the first of which branches."""
PROMPT = 9


def drafts(lab: Lab) -> dict[str, Any]:
    """Trees against their paths as chains; recorded chains against eager ones, with the seconds of each."""
    target, draft = planted_pair(lab)
    return {"trees": _trees(lab, target), "chains": [_chain(lab, draft, rows) for rows in lab.pick((1, 8, 64), (1, 3))]}


def _trees(lab: Lab, target: Decoder) -> dict[str, Any]:
    num = lab.pick(8, 2)
    runner = ModelRunner(target, num_blocks=1 + num + len(PARENTS), block_size=lab.block_size)
    buckets = make_buckets(max_requests=num, max_k=K, trees=True)
    graphs = GraphedForward(runner, buckets, lab.capture(), max_kv=lab.block_size, max_ids=num * K)
    texts = [[(11 * request + 5 * place) % 61 for place in range(PROMPT)] for request in range(num)]
    nodes = [[(17 * request + 3 * node) % 59 for node in range(K)] for request in range(num)]
    runner.forward(pack_spans([SpanRows(text[:-1], 0, [1 + i], 0) for i, text in enumerate(texts)], lab.block_size))
    tree = pack_spans(
        [_tree_rows([text[-1], *tokens], 1 + i) for i, (text, tokens) in enumerate(zip(texts, nodes, strict=True))],
        lab.block_size,
    )
    expected = _paths(lab, runner, texts, nodes, first_block=1 + num)
    found = {"eager": runner.forward(tree).require_logits().clone(), "recorded": graphs.forward(tree).require_logits()}
    report: dict[str, Any] = {"rows": len(tree.token_ids)}
    for name, logits in found.items():
        difference = (logits - expected).abs().max().item()
        if not difference <= 0.05 * expected.abs().max().item():
            raise CheckFailed(f"{name} trees differ from their paths as chains by {difference:g}")
        report[f"{name}_difference"] = difference
    chain = pack_spans([SpanRows([1] * (1 + K), PROMPT - 1, [1 + i], 1 + K) for i in range(num)], lab.block_size)
    for name, plan in (("tree", tree), ("chain", chain)):
        report[f"{name}_eager_s"] = lab.seconds(partial(runner.forward, plan))
        report[f"{name}_recorded_s"] = lab.seconds(partial(graphs.forward, plan))
    return report


def _tree_rows(tokens: list[int], block: int) -> SpanRows:
    """The last committed token and the nodes after it."""
    positions = [PROMPT - 1, *(PROMPT + depth for depth in depths(PARENTS))]
    masks = ancestor_masks(PARENTS)
    return SpanRows(tokens, PROMPT - 1, [block], 1 + K, positions, num_tree_slots=K, ancestors=masks)


def _paths(
    lab: Lab, runner: ModelRunner, texts: list[list[int]], nodes: list[list[int]], *, first_block: int
) -> torch.Tensor:
    """[requests * (1 + K), vocab] logits of the root position and of each node, from its own text as a prompt."""
    masks, rows = ancestor_masks(PARENTS), []
    for text, tokens in zip(texts, nodes, strict=True):
        paths = [text, *([*text, *(tokens[j] for j in range(K) if mask >> j & 1)] for mask in masks)]
        for path in paths:
            single = pack_spans([SpanRows(path, 0, [first_block], 1)], lab.block_size)
            rows.append(runner.forward(single).require_logits().clone())
    return torch.cat(rows)


def _chain(lab: Lab, draft: Decoder, num: int) -> dict[str, Any]:
    links = {}
    for name in ("eager", "recorded"):
        runner = ModelRunner(draft, num_blocks=1 + num, block_size=lab.block_size)
        recorded = None
        if name == "recorded":
            recorded = RecordedChain(
                row_sizes(make_buckets(max_requests=num, max_k=0)),
                lab.capture(),
                max_k=K,
                columns=draft.logit_width,
                vocab=None,
                device=lab.device,
                model=ChainModel(runner, lab.block_size),
            )
        pool = BlockPool(1 + num, lab.block_size, prefix_cache=False)
        proposer = Proposer(
            PlainArchitecture(runner.forward), pool, vocab=None, max_model_len=lab.block_size, recorded=recorded
        )
        links[name] = LocalLink(lab, proposer, max_rows=num, max_k=K, vocab=draft.logit_width)
    rows = [
        DraftRequestRow(
            *(key, 0, tuple((7 * key + 3 * place) % 61 for place in range(PROMPT)), K),
            RowSampling((0.0, 0.8)[key % 2], 1.0, key, 0, key % 2 == 1),
        )
        for key in range(num)
    ]
    tokens = {}
    for name, link in links.items():
        link.ask(rows, deadline_s=60.0)
        tokens[name] = link.drafted(num).token_ids.clone()
    same = tokens["eager"] == tokens["recorded"]
    # On a GPU padding changes the order of additions, so a chain may part at a near-tie; not at its first token, which
    # both choose from the same logits.
    if not bool(same[:, 0].all()) or (lab.dry and not bool(same.all())):
        raise CheckFailed(f"{num} rows: a recorded chain drafts other tokens than the eager one")
    return {
        "rows": num,
        "same_tokens": same.float().mean().item(),
        **{f"{name}_s": lab.seconds(partial(link.ask, rows, deadline_s=60.0)) for name, link in links.items()},
    }
