"""A process with a target of one shard and nothing else: the engine without Serve and HTTP.

Owns the process that `bench.engine_only.bare` starts. Its argument holds the settings as JSON, its stdout names the
socket, and it ends when its stdin is closed.
"""

from __future__ import annotations

import sys
import threading

from autoscale.control.controller import initial_plan
from autoscale.policy.goodput import make_goodput
from autoscale.policy.policies import PolicyPacer
from engine.checkpoint.store import resolve_model
from engine.config import EngineConfig
from engine.workers.bring_up import bring_up_locally
from engine.workers.leader import Leader
from engine.workers.target_shard import TargetShard


def main(settings: str) -> None:
    """Serve until stdin is closed."""
    config = EngineConfig.model_validate_json(settings)
    shard = TargetShard(config, resolve_model(config.model, progress=False), rank=0, node_id="bare")
    bring_up_locally([shard])
    plan, speculative = initial_plan(config.speculative), config.speculative
    leader = Leader(shard, pacer=PolicyPacer(make_goodput(speculative.method, speculative.k)), plan=lambda: plan)
    print(leader.path, flush=True)
    threading.Thread(target=_stop_at_end, args=(shard,), daemon=True).start()
    leader.run()


def _stop_at_end(shard: TargetShard) -> None:
    sys.stdin.read()
    shard.stop()


if __name__ == "__main__":
    main(sys.argv[1])
