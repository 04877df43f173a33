"""Which drafts can be adapted.

Owns the rule only.
"""

from __future__ import annotations

from engine.checkpoint.model_config import ModelConfig
from engine.config import EngineConfig
from engine.errors import ConfigError


def check_adaptable(config: EngineConfig, draft: ModelConfig) -> None:
    """Check that the draft can learn, if the settings ask for it.

    Raises:
        ConfigError: it cannot; names the field.
    """
    if not config.speculative.adaptation.enabled:
        return
    if draft.architecture != "eagle":
        problem = f"the draft is a {draft.architecture}"
    elif draft.is_published:
        problem = "the draft has a public layout"
    elif draft.positions_per_pass > 1:
        problem = f"the draft is parallel, with positions_per_pass {draft.positions_per_pass}"
    elif config.device == "cuda":
        problem = "device is cuda"
    else:
        return
    raise ConfigError(
        f"speculative.adaptation.enabled: true given, but {problem}; allowed with an eagle chain that `paceline "
        "distill` trained, on cpu"
    )
