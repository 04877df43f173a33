"""lm_eval: scores and texts of a generation task and a log-likelihood task, equal with drafting and without."""

import os
import tempfile
from pathlib import Path
from typing import Any

os.environ["HF_HOME"] = tempfile.mkdtemp()
os.environ["HF_HUB_OFFLINE"] = "1"
import lm_eval
import requests

TASKS = Path(os.environ["TASKS"])
DRAFTED = "paceline_drafted_tokens_total{"
COMMON = {"dataset_path": "json", "test_split": "test", "num_fewshot": 0}
GENERATION = COMMON | {
    "task": "capitals",
    "dataset_kwargs": {"data_files": {"test": str(TASKS / "capitals.jsonl")}},
    "output_type": "generate_until",
    "doc_to_text": "Country: Turkey\nCapital: Ankara\nCountry: {{country}}\nCapital:",
    "doc_to_target": "{{capital}}",
    # The first line is scored. The text goes on, so that there is something to draft.
    "generation_kwargs": {"until": ["\n\n"], "max_gen_toks": 24, "do_sample": False, "temperature": 0.0},
    "filter_list": [
        {
            "name": "line",
            "filter": [{"function": "regex", "regex_pattern": r"^\s*([^\n]+)"}, {"function": "take_first"}],
        }
    ],
    "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
}
LIKELIHOOD = COMMON | {
    "task": "endings",
    "dataset_kwargs": {"data_files": {"test": str(TASKS / "endings.jsonl")}},
    "output_type": "multiple_choice",
    "doc_to_text": "{{start}}",
    "doc_to_choice": "endings",
    "doc_to_target": "gold",
    "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
}


def num_drafted() -> float:
    text = requests.get(f"{os.environ['BASE_URL'].removesuffix('/v1')}/metrics", timeout=30).text
    return sum(float(line.rpartition(" ")[2]) for line in text.splitlines() if line.startswith(DRAFTED))


def evaluate(speculative: dict[str, Any]) -> tuple[dict[str, float], dict[str, list[Any]], float]:
    """Scores, what the model answered, and how many tokens were drafted."""
    before = num_drafted()
    found = lm_eval.simple_evaluate(
        model="local-completions",
        model_args={
            "model": os.environ["MODEL"],
            "base_url": f"{os.environ['BASE_URL']}/completions",
            "tokenizer": os.environ["TOKENIZER"],
            "num_concurrent": 2,
            "max_retries": 1,
            "tokenized_requests": True,
        },
        tasks=[GENERATION, LIKELIHOOD],
        gen_kwargs={"speculative": speculative},
        bootstrap_iters=0,
        log_samples=True,
    )
    assert found is not None
    scores = {
        "capitals": found["results"]["capitals"]["exact_match,line"],
        "endings": found["results"]["endings"]["acc,none"],
    }
    answers = {task: [sample["resps"] for sample in samples] for task, samples in found["samples"].items()}
    return scores, answers, num_drafted() - before


with_drafts, drafted_answers, num_tokens = evaluate({"enabled": True})
without, plain_answers, none = evaluate({"enabled": False})
print(f"scores with drafting {with_drafts}, {num_tokens:.0f} tokens drafted; without {without}, {none:.0f} drafted")
assert num_tokens > 0
assert none == 0
assert with_drafts == without
assert drafted_answers["capitals"] == plain_answers["capitals"]
for drafted, plain in zip(drafted_answers["endings"], plain_answers["endings"], strict=True):
    for (one,), (other,) in zip(drafted, plain, strict=True):
        assert abs(float(one[0]) - float(other[0])) < 1e-3
        assert one[1] == other[1]
assert with_drafts["endings"] > 0.5, "worse than a guess"
assert with_drafts["capitals"] > 0.3, "the model knows more capitals than that"
