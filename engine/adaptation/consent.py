"""Whether a draft may learn from a request.

Owns the rule only. Keys are known by their owners' names; a server without keys has clients without a name.
"""

from __future__ import annotations

from engine.config import AdaptationConfig
from engine.messages import Submit


def consents(config: AdaptationConfig, submit: Submit) -> bool:
    """Whether the settings and the request allow it.

    The owner of the request's key must be listed, and the request must not opt out. A request without a client comes
    from a server without keys. A request of an adapter is never learned from: its features are not the base model's.
    """
    if not config.enabled or not submit.speculative.learn or submit.adapter is not None:
        return False
    return not submit.client or submit.client in config.keys
