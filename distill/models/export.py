"""Draft folders, which the engine and the evaluation read.

Owns the format (safetensors in bfloat16 or int8 storage, `config.json`, a card) and the checks that a draft belongs to
a target. Knows nothing of training.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from distill.models.decoder import DecoderConfig, FrozenTarget, fingerprint
from distill.models.draft_model import SmallDraft
from distill.models.eagle import EagleDraft
from distill.models.eagle3 import Eagle3Draft
from distill.models.layers import DraftLayer, copy_layer
from distill.models.medusa import MedusaDraft, from_stored, is_stored_medusa, stored_config, stored_tensors
from distill.models.parallel import ParallelDraft
from distill.models.public_layout import own_config, public_config, public_name, public_tensors

LAYER_NAMES = {
    "input_norm": "input_layernorm.weight",
    "post_norm": "post_attention_layernorm.weight",
    "q.weight": "self_attn.q_proj.weight",
    "k.weight": "self_attn.k_proj.weight",
    "v.weight": "self_attn.v_proj.weight",
    "o.weight": "self_attn.o_proj.weight",
    "gate.weight": "mlp.gate_proj.weight",
    "up.weight": "mlp.up_proj.weight",
    "down.weight": "mlp.down_proj.weight",
}
"""Names of the parameters of a layer: in this package, and in Hugging Face's format."""
TOP_NAMES = {
    "final_norm": "model.norm.weight",
    "head.weight": "lm_head.weight",
    "vocabulary.draft_vocab": "draft_vocab",
    "feature_norm": "eagle.feature_norm.weight",
    "fuse.weight": "eagle.fuse.weight",
    "token_norm": "eagle.token_norm.weight",
    "token.weight": "eagle.token.weight",
    "carry_norm": "eagle.carry_norm.weight",
    "carry.weight": "eagle.carry.weight",
    "mask_state": "eagle.mask_state",
    "mask_embedding": "eagle.mask_embedding",
}
SCALE_SUFFIX = ".int8_scale"

AnyDraft = EagleDraft | Eagle3Draft | SmallDraft | MedusaDraft
"""A draft of any architecture."""


PUBLIC_K = 3
"""Number of drafted tokens that the public layout names as default; every engine lets users choose another."""


class DraftMismatchError(ValueError):
    """A draft folder does not belong to the target; the message names the field and both values."""


def stored_name(name: str) -> str:
    """The stored name of a parameter of this package."""
    if name.startswith("layers."):
        _, index, rest = name.split(".", 2)
        return f"model.layers.{index}.{LAYER_NAMES[rest]}"
    return TOP_NAMES[name]


def read_config(folder: Path) -> dict[str, Any]:
    """The `config.json` of a draft folder, under the keys of this module."""
    return own_config(json.loads((folder / "config.json").read_text()))


def export_draft(draft: AnyDraft, target_folder: Path, out: Path, *, card: str, int8: bool = False) -> None:
    """Write `model.safetensors`, `config.json` and `README.md` into `out`, `eagle3` and `medusa` in a public layout.

    With `int8` each matrix is stored as int8 rows with a float32 scale per row (`<name>.int8_scale` [rows]).

    Raises:
        ValueError: `int8` with an `eagle3` or `medusa` draft, whose layout does not have it.
    """
    out.mkdir(parents=True, exist_ok=True)
    if isinstance(draft, Eagle3Draft | MedusaDraft):
        if int8:
            raise ValueError(f"int8: the public layout of {draft.architecture} drafts has bfloat16 matrices only")
        if isinstance(draft, Eagle3Draft):
            config, stored = _public_config(draft, target_folder), public_tensors(draft)
        else:
            config, stored = _medusa_config(draft, target_folder), stored_tensors(draft)
        save_file(stored, out / "model.safetensors", metadata={"format": "pt"})
        (out / "config.json").write_text(json.dumps(config, indent=1) + "\n")
        (out / "README.md").write_text(card)
        return
    tensors: dict[str, Tensor] = {"draft_vocab": draft.vocabulary.draft_vocab.cpu()}
    for name, value in draft.named_parameters():
        own_name, plain = stored_name(name), value.detach().cpu()
        if int8 and plain.ndim == 2 and not name.endswith("norm"):
            tensors[own_name], tensors[own_name + SCALE_SUFFIX] = quantise_rows(plain)
        else:
            tensors[own_name] = plain.to(torch.bfloat16).contiguous()
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    (out / "config.json").write_text(json.dumps(draft_config(draft, target_folder, int8=int8), indent=1) + "\n")
    (out / "README.md").write_text(card)


def _public_config(draft: Eagle3Draft, target_folder: Path) -> dict[str, Any]:
    """The layout's config, and the target's fingerprint as one more key, which other engines ignore."""
    given = json.loads((target_folder / "config.json").read_text())
    verifier = {"name_or_path": None, "architectures": given.get("architectures") or []}
    max_len = int(given.get("max_position_embeddings", 2048))
    return {
        **public_config(draft, verifier=verifier, max_len=max_len, k=PUBLIC_K),
        "target": fingerprint(target_folder),
    }


def _medusa_config(draft: MedusaDraft, target_folder: Path) -> dict[str, Any]:
    """The layout's config, and keys that other engines ignore."""
    own = {"feature_layers": list(draft.feature_layers), "target": fingerprint(target_folder)}
    return stored_config(draft) | own


def draft_config(draft: EagleDraft | SmallDraft, target_folder: Path, *, int8: bool) -> dict[str, Any]:
    """The `config.json` of a draft: Hugging Face names, and the fields of drafts."""
    config = asdict(draft.config)
    given = json.loads((target_folder / "config.json").read_text())
    parallel = {"positions_per_pass": draft.positions} if isinstance(draft, ParallelDraft) else {}
    return {
        "model_type": "llama",
        **config,
        "architecture": draft.architecture,
        "draft_vocab_size": len(draft.vocabulary.draft_vocab),
        "feature_layers": list(draft.feature_layers),
        **parallel,
        "max_position_embeddings": int(given.get("max_position_embeddings", 2048)),
        "tie_word_embeddings": False,
        "embed_tokens": "shared with the target",
        "hidden_act": "silu",
        "torch_dtype": "bfloat16",
        "storage": "int8_rows" if int8 else "bfloat16",
        "target": fingerprint(target_folder),
    }


def quantise_rows(weight: Tensor) -> tuple[Tensor, Tensor]:
    """weight [R, C] -> int8 [R, C] and float32 scales [R]; symmetric, round to nearest."""
    weight = weight.float()
    scale = weight.abs().amax(1).clamp(min=1e-12) / 127.0
    return (weight / scale[:, None]).round().clamp(-127, 127).to(torch.int8), scale


def read_tensors(folder: Path, dtype: torch.dtype = torch.bfloat16) -> dict[str, Tensor]:
    """The stored tensors; int8 ones are dequantised to `dtype`."""
    raw = load_file(folder / "model.safetensors")
    tensors = {}
    for name, value in raw.items():
        if name.endswith(SCALE_SUFFIX):
            continue
        scale = raw.get(name + SCALE_SUFFIX)
        tensors[name] = value if scale is None else (value.float() * scale[:, None]).to(dtype)
    return tensors


def load_draft(folder: Path, target: FrozenTarget, *, dtype: torch.dtype = torch.bfloat16) -> AnyDraft:
    """Load a draft folder as a module and check that it belongs to `target`; int8 rows are dequantised to `dtype`.

    Raises:
        DraftMismatchError: it does not; the message names the field and both values.
    """
    config = read_config(folder)
    tensors = read_tensors(folder, dtype)
    if is_stored_medusa(config):
        medusa = from_stored(config, tensors, target)
        check_fits(config | {"feature_layers": []}, medusa.vocabulary.draft_vocab, target)
        return medusa
    if "d2t" in tensors:
        tensors["draft_vocab"] = tensors["d2t"] + torch.arange(len(tensors["d2t"]))
    check_fits(config, tensors["draft_vocab"], target)
    shape, count = DecoderConfig.from_dict(config), int(config["num_hidden_layers"])
    draft: AnyDraft
    architecture = config.get("architecture", "draft_model")
    if architecture in ("eagle", "eagle3"):
        draft = make_feature_draft(
            architecture,
            shape,
            tuple(config["feature_layers"]),
            tensors["draft_vocab"],
            target.embed,
            num_layers=count,
            positions=int(config.get("positions_per_pass", 1)),
        )
    else:
        draft = SmallDraft(shape, tensors["draft_vocab"], target.embed, num_layers=count)
    load_parameters(draft, tensors)
    return draft


def make_feature_draft(
    architecture: str,
    config: DecoderConfig,
    feature_layers: tuple[int, ...],
    draft_vocab: Tensor,
    embed: Tensor,
    *,
    num_layers: int,
    positions: int = 1,
) -> EagleDraft | Eagle3Draft:
    """A new `eagle` or `eagle3` draft; with `positions` above 1 a parallel `eagle` draft of that many positions."""
    if architecture == "eagle3":
        return Eagle3Draft(config, feature_layers, draft_vocab, embed, num_layers=num_layers)
    if positions > 1:
        return ParallelDraft(config, feature_layers, draft_vocab, embed, num_layers=num_layers, positions=positions)
    return EagleDraft(config, feature_layers, draft_vocab, embed, num_layers=num_layers)


@torch.no_grad()
def start_from(draft: AnyDraft, folder: Path, target: FrozenTarget) -> None:
    """Copy the weights of an earlier draft into `draft`, which may have another output vocabulary.

    A parallel draft may start from a chain; its mask then stays as it was initialised. It may also have more layers:
    those begin as copies of the target's last layer that add nothing to the residual stream.
    A head row that the earlier draft lacks starts as its mean row plus 0.7 times the target's centred row. This does
    not reduce the acceptance of the trained rows.

    Raises:
        DraftMismatchError: another target, another architecture or another shape.
    """
    earlier = load_draft(folder, target)
    given, expected = (
        {name: tuple(value.shape) for name, value in each.named_parameters() if name != "head.weight"}
        for each in (earlier, draft)
    )
    added = _added_names(draft, earlier) - given.keys()
    expected = {name: shape for name, shape in expected.items() if name not in added}
    if given != expected or earlier.architecture != draft.architecture:
        raise DraftMismatchError(
            f"start_from: {folder} is {earlier.architecture} of {earlier.config.num_hidden_layers} layers, "
            f"expected is {draft.architecture} of {draft.config.num_hidden_layers}"
        )
    state = dict(earlier.named_parameters())
    for name, value in draft.named_parameters():
        if name != "head.weight" and name not in added:
            value.copy_(state[name])
    for layer in draft.layers[len(earlier.layers) :]:
        assert isinstance(layer, DraftLayer)
        copy_layer(layer, target, target.config.num_hidden_layers - 1)
        layer.o.weight.zero_()
        layer.down.weight.zero_()
    rows = target.head_weight.float()
    mean, centre = earlier.head.weight.float().mean(0), rows.mean(0)
    known = earlier.vocabulary.to_draft[draft.vocabulary.draft_vocab]
    fresh = mean + 0.7 * (rows[draft.vocabulary.draft_vocab] - centre)
    draft.head.weight.copy_(torch.where((known >= 0)[:, None], earlier.head.weight[known.clamp(min=0)].float(), fresh))


def _added_names(draft: AnyDraft, earlier: AnyDraft) -> set[str]:
    """Parameters of `draft` that a chain with fewer layers lacks; none unless `draft` is parallel."""
    if not isinstance(draft, ParallelDraft):
        return set()
    new = tuple(f"layers.{index}." for index in range(len(earlier.layers), len(draft.layers)))
    return {name for name, _ in draft.named_parameters() if name.startswith(("mask_", *new))}


@torch.no_grad()
def load_parameters(draft: nn.Module, tensors: dict[str, Tensor]) -> None:
    """Copy stored tensors into a module of the same shape."""
    rename = public_name if isinstance(draft, Eagle3Draft) else stored_name
    for name, value in draft.named_parameters():
        value.copy_(tensors[rename(name)])


def check_fits(config: dict[str, Any], draft_vocab: Tensor, target: FrozenTarget) -> None:
    """Check fingerprint, feature layers and vocabulary range of a draft against the target.

    Raises:
        DraftMismatchError: one differs; the message names the field and both values.
    """
    expected = fingerprint(target.folder)
    for name, given in {**config.get("target", {}), "vocab_size": config["vocab_size"]}.items():
        if given != expected.get(name):
            raise DraftMismatchError(f"{name}: the draft was made for {given!r}, the target has {expected.get(name)!r}")
    if config["hidden_size"] != target.config.hidden_size:
        raise DraftMismatchError(
            f"hidden_size: the draft has {config['hidden_size']}, the target whose embedding it shares "
            f"{target.config.hidden_size}"
        )
    features = tuple(config.get("feature_layers", ()))
    if features and features != target.feature_layers:
        raise DraftMismatchError(
            f"feature_layers: the draft needs {features}, the target yields {target.feature_layers}"
        )
    if int(draft_vocab.max()) >= target.config.vocab_size or int(draft_vocab.min()) < 0:
        raise DraftMismatchError(
            f"draft_vocab: tokens {int(draft_vocab.min())}..{int(draft_vocab.max())}, "
            f"the target has 0..{target.config.vocab_size - 1}"
        )
