"""A target shard in a process of its own and nothing else: what the engine gives without Serve and HTTP.

Owns the process started by `bench.engine_only.bare`: settings in its argument, the path of its socket on stdout; it
ends when stdin does.
"""

from __future__ import annotations

import sys
import threading

from autoscale.control.controller import initial_plan
from autoscale.policy.goodput import make_goodput
from autoscale.policy.policies import PolicyPacer
from engine.checkpoint.store import resolve_model
from engine.config import EngineConfig
from engine.core.pacing import Prediction
from engine.core.stats import StepStats
from engine.workers.target_shard import TargetShard


def main(settings: str) -> None:
    """Serve until stdin ends."""
    config = EngineConfig.model_validate_json(settings)
    shard = TargetShard(config, resolve_model(config.model, progress=False), rank=0, node_id="bare")
    ready = shard.load(None)
    num_tokens = (ready.num_blocks - 1) * config.kv_block_size
    shard.allocate(ready.num_blocks, min(ready.max_model_len, num_tokens))
    plan = initial_plan(config.speculative)
    chosen = config.speculative
    path = shard.listen(PolicyPacer(make_goodput(chosen.method, chosen.k)), lambda: plan, _ignore)
    print(path, flush=True)
    threading.Thread(target=_stop_at_end, args=(shard,), daemon=True).start()
    shard.run()


def _ignore(stats: StepStats, prediction: Prediction) -> None:
    del stats, prediction


def _stop_at_end(shard: TargetShard) -> None:
    sys.stdin.read()
    shard.stop()


if __name__ == "__main__":
    main(sys.argv[1])
