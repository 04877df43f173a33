"""Which draft a name means, and what its folder says of itself: a user gives the name and nothing else.

Owns the names of drafts that ship with Paceline, and the drafting method that follows from a folder. Whether a draft
belongs to its target is `engine.draft_folder`'s question, asked here before anything is loaded.
"""

from __future__ import annotations

from pathlib import Path

from deployments.settings import AppSettings
from engine.config import EngineConfig
from engine.draft_folder import check_draft
from engine.errors import ConfigError
from engine.model_store import resolve_model

SHIPPED = Path(__file__).with_name("models")
"""A folder for each draft that ships."""


def resolve_draft(name: str, *, progress: bool = False) -> Path:
    """The folder of a draft: one that ships, a folder, or a Hugging Face id, as `resolve_model`.

    Raises:
        ConfigError: there is no such draft.
    """
    shipped = SHIPPED / name
    if Path(name).name == name and shipped.is_dir():
        return shipped
    return resolve_model(name, progress=progress)


def with_draft(settings: AppSettings, target_folder: Path) -> tuple[AppSettings, Path | None]:
    """The settings with the draft's own method, and its folder; unchanged and None without a draft.

    Raises:
        ConfigError: it does not belong to the target, or is not what `speculative.method` says.
    """
    speculative = settings.engine.speculative
    if speculative.draft is None:
        return settings, None
    folder = resolve_draft(speculative.draft)
    method = check_draft(folder, target_folder).architecture
    if speculative.method == "eagle" and method != "eagle":
        raise ConfigError(
            f"speculative.method: eagle given, but {folder} holds a {method}; leave speculative.method out"
        )
    engine = settings.engine.model_dump()
    engine["speculative"] |= {"method": method}
    return settings.model_copy(update={"engine": EngineConfig.parse(engine)}), folder
