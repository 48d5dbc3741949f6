"""The options of the constructors as fields of a configuration, which PEFT wants flat."""

from __future__ import annotations

from dataclasses import make_dataclass

from frozencore.adapter.lora_names import refusing_lora_names
from frozencore.constructors import constructor_options, described


def add_option_fields(config: type) -> None:
    """Give a dataclass a field for each option of the table of constructors that it has none for yet, in place.

    A dataclass gets its fields when it is made, so it takes over those of one that inherits from it and has more.
    """
    held = config.__dataclass_fields__  # type: ignore[attr-defined]  # of every dataclass
    new = [option for name, option in constructor_options().items() if name not in held]
    grown = make_dataclass(
        config.__name__,
        [(option.name, option.plain, option.default) for option in new],
        bases=(config,),
        namespace={"__module__": config.__module__},
    )
    for part in ("__dataclass_fields__", "__repr__", "__eq__"):
        setattr(config, part, getattr(grown, part))
    config.__init__ = refusing_lora_names(grown.__init__)  # type: ignore[misc]  # with more fields, as dataclass sets it
    for option in new:
        setattr(config, option.name, option.default)
    config.__annotations__ = {**config.__annotations__, **{option.name: option.plain for option in new}}
    said = (f"{option.name}: {described(option)}" for option in new)
    config.__doc__ = "\n        ".join([(config.__doc__ or "").rstrip(), *said])
