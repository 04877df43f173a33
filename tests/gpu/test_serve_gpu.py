"""SmolLM2 on one GPU through the whole engine: the same code path as on CPU, with the draft in a process of its own."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest
import torch
from cut_draft import cut_draft
from local_engine import LocalEngine
from near_tie import assert_same_or_near_tie
from serving import serving
from transformers import AutoModelForCausalLM, AutoTokenizer

from engine.checkpoint.store import resolve_model
from engine.messages import SamplingParams, Submit

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine"),
]

EOS = 2
BF16_BOUND = 0.25
"""Logits of SmolLM2 in bf16 carry rounding of this order; a first divergence beyond it is an error."""


@pytest.mark.parametrize(("method", "graphs"), [("none", "off"), ("ngram", "off"), ("none", "on"), ("ngram", "on")])
def test_greedy_on_a_gpu_parts_from_transformers_only_at_near_ties(method: str, graphs: str) -> None:
    folder = resolve_model("smollm2")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    texts = ["What is the capital of France?", "Name three rivers in Europe.", "Count from 1 to 20."]
    prompts = [
        tokenizer.apply_chat_template([{"role": "user", "content": t}], add_generation_prompt=True, return_dict=False)
        for t in texts
    ]
    greedy = SamplingParams(temperature=0.0, max_tokens=32, stop_token_ids=(EOS,))
    submits = [Submit(request_id=str(i), prompt=tuple(p), sampling=greedy) for i, p in enumerate(prompts)]
    settings = {"device": "cuda", "dtype": "bfloat16", "block_size": 256, "cuda_graphs": graphs}
    with LocalEngine(folder, **settings, speculative={"method": method}) as engine:
        got = engine.generate(submits)
    for i, prompt in enumerate(prompts):
        with torch.inference_mode():
            expected = model.generate(
                torch.tensor([prompt]), do_sample=False, max_new_tokens=32, eos_token_id=EOS, pad_token_id=EOS
            )[0, len(prompt) :].tolist()
        assert_same_or_near_tie(model, prompt, expected, got[str(i)], f"gpu {method} {i}", bound=BF16_BOUND)


@pytest.mark.parametrize("kind", ["draft_model", "eagle"])
def test_a_draft_over_cuda_ipc(kind: str, tmp_path: Path) -> None:
    """CUDA IPC cannot open memory of its own process, so this one runs the real deployment."""
    draft = "smollm2-eagle" if kind == "eagle" else str(cut_draft(resolve_model("smollm2"), tmp_path / "draft"))
    options = ("--device", "cuda", "--draft", draft, "--k", "3", "--policy", "fixed")
    with serving(tmp_path / "log", *options) as server:
        body = {"model": "smollm2", "prompt": "The capital of France is", "max_tokens": 16, "temperature": 0}
        answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60).raise_for_status().json()
        assert answer["usage"]["speculative"]["drafted"] > 0
        assert "Paris" in answer["choices"][0]["text"]
