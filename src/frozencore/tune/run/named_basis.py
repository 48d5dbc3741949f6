"""A run on a saved basis: what the basis decides, the configuration says too."""

from __future__ import annotations

from typing import Any

from frozencore.adapter.saved.basis import read_header
from frozencore.errors import ConfigError
from frozencore.tune.run.config import RunConfig, make_config
from frozencore.words import flag_of

DECIDED = {"method": "constructor", "rank": "r", "rank_budget": "rank_budget", "targets": "target_modules"}


def on_named_basis(config: RunConfig) -> RunConfig:
    """The configuration with method, rank, targets and options of its basis; as it is where it names none.

    Raises:
        ConfigError: It asks for another method, rank or option than the basis has.
        ArtifactError: There is no such basis, or it is damaged.
    """
    if config.basis is None:
        return config
    options = read_header(config.basis)["options"]
    core = {name: options.get(name, value) for name, value in config.core.model_dump(mode="json").items()}
    decided = {own: options.get(theirs) for own, theirs in DECIDED.items()}
    if isinstance(decided["targets"], str) and decided["targets"] != "all-linear":
        decided["targets"] = None  # a regular expression, which a run cannot name; the basis does
    asked = {name: getattr(config, name) for name in DECIDED} | config.core.model_dump(mode="json")
    for name, value in {**decided, **core}.items():
        if asked[name] not in (_default(config, name), value, _as_asked(value)):
            raise ConfigError(
                f"The basis in {config.basis} has {name.replace('_', '-')} {value}, but {asked[name]} came. Leave "
                f"{flag_of(name)} out."
            )
    return make_config(**{**config.model_dump(exclude={"core"}), **decided, "core": core})


def _default(config: RunConfig, name: str) -> Any:
    fields = RunConfig.model_fields if name in DECIDED else type(config.core).model_fields
    return fields[name].default


def _as_asked(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value
