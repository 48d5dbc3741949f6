"""Which options of a run would tell about its rows without being counted, where its training is to be private."""

from __future__ import annotations

from typing import TYPE_CHECKING

from frozencore.errors import ConfigError
from frozencore.words import flag_of

if TYPE_CHECKING:
    from frozencore.tune.run.config import RunConfig

UNCOUNTED = {
    "refresh": "chooses bases by the rows that are trained on",
    "rank_budget": "chooses ranks by rows",
    "select_checkpoint": "chooses a step by rows",
    "report_to": "tells losses that no noise was added to",
    "packing": "puts a text into several rows, and the promise is for one row",
}
"""Why an option that came is refused beside a budget."""


def refuse_uncounted(config: RunConfig) -> None:
    """Refuse half a budget, and what a budget does not cover.

    Raises:
        ConfigError: The first such option, and the way out.
    """
    if config.private_epsilon is None or config.private_delta is None:
        given = [name for name in ("private_epsilon", "private_delta", "private_clip") if getattr(config, name)]
        if given:
            raise ConfigError(
                f"A private training has an epsilon and a delta, but {flag_of(given[0])} came without the rest. Give "
                "--private-epsilon 8 --private-delta 1e-5, for instance."
            )
        return
    assert config.private_budget  # made, so that its bounds are checked
    if not config.method_entry.has_bases:
        raise ConfigError(
            f"Private training is of cores, but the method {config.method!r} has none. Use one that has, such as "
            "random or lora_xs, or --basis with a basis of public rows."
        )
    for name, why in UNCOUNTED.items():
        if getattr(config, name) != type(config).model_fields[name].default:
            raise ConfigError(
                f"{flag_of(name)} {why}, and private training does not count that. Leave {flag_of(name)} out."
            )
    if config.basis is None and config.calibration_task is None and config.moments_needed:
        raise ConfigError(
            f"The method {config.method!r} calibrates its bases on the rows that are to be private, which is not "
            "counted. Give --basis with a basis of public rows, --calibration-task, or --method random or lora_xs."
        )
