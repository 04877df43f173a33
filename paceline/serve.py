"""`paceline serve`: its options, and how they change a deployment file.

Knows the options' names and nothing of how a server starts; `deployments.local.server` does that.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

NGRAM, NO_DRAFT = "ngram", "none"
DEFAULT_FILE = "deployments/smollm2.yaml"


def add_serve_parser(commands: Any) -> None:
    """Add `serve` to the command's subparsers."""
    serve = commands.add_parser(
        "serve",
        help="serve a model on this machine until Ctrl-C",
        description="Start a Ray head on loopback, deploy the model, wait until it is healthy, and serve until Ctrl-C. "
        f"Without options it serves {DEFAULT_FILE}.",
    )
    serve.add_argument("--config", type=Path, help=f"deployment file to start from (default: {DEFAULT_FILE})")
    add_model_options(serve)
    serve.add_argument("--host", help="address to listen on (default: 127.0.0.1); others need API keys")
    serve.add_argument("--port", type=int, help="port (default: 8000)")
    serve.add_argument("--start-timeout", type=float, default=600.0, metavar="S", help="seconds until healthy")
    serve.set_defaults(run=_serve)


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that `overridden` reads."""
    parser.add_argument("--model", help="target model: folder, .gguf file, Hugging Face id, or smollm2")
    parser.add_argument("--draft", help="none, ngram, or folder or id of a draft (default: the file's)")
    parser.add_argument("--k", type=int, help="upper bound of draft tokens per request and step")
    parser.add_argument("--policy", help="policy that chooses K: off, fixed, threshold or goodput")
    parser.add_argument("--tp", type=int, metavar="N", help="tensor-parallel target shards")
    parser.add_argument("--dtype", help="auto, bfloat16 or float32")
    parser.add_argument("--device", help="auto, cpu or cuda")
    parser.add_argument("--max-model-len", type=int, metavar="TOKENS", help="longest prompt + output")
    parser.add_argument("--model-name", help="name that clients send (default: from --model)")
    parser.add_argument("--api-keys", type=Path, metavar="FILE", help="key file; see `paceline key`")


def _serve(options: argparse.Namespace) -> int:
    from deployments.local import yaml_config
    from deployments.local.server import serve

    values = yaml_config.load(options.config or yaml_config.DEFAULT_FILE)
    args = overridden(yaml_config.only_application(values).get("args") or {}, options)
    return serve(
        yaml_config.with_overrides(values, args=args, host=options.host, port=options.port),
        start_timeout_s=options.start_timeout,
    )


def overridden(args: dict[str, Any], options: argparse.Namespace) -> dict[str, Any]:
    """The `args` of a deployment file, with the command line's options in place of the file's values."""
    engine = dict(args.get("engine") or {})
    speculative = dict(engine.get("speculative") or {})
    draft = options.draft
    if draft is None and options.model not in (None, engine.get("model")) and speculative.get("draft"):
        draft = NGRAM  # the file's draft imitates the file's model
    if draft is not None:
        speculative.pop("method", None)
        speculative |= {"method": draft, "draft": None} if draft in (NGRAM, NO_DRAFT) else {"draft": draft}
    speculative |= _given(k=options.k, policy=options.policy)
    engine |= _given(
        model=options.model,
        tensor_parallel_size=options.tp,
        dtype=options.dtype,
        device=options.device,
        max_model_len=options.max_model_len,
    )
    changed = args | {"engine": engine | {"speculative": speculative}}
    if options.model is not None:
        changed["model_name"] = None
    keys = str(options.api_keys.resolve()) if options.api_keys is not None else None
    return changed | _given(model_name=options.model_name, api_keys_file=keys)


def _given(**values: Any) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}
