"""Frozen cores as a PEFT method: config, layer, tuner, and the calibration that fixes their bases.

Importing anything from here registers the method with PEFT and the architecture of basis models with transformers.
"""

from importlib.metadata import version

from frozencore.quiet import quiet_imports

OLDEST_PEFT = (0, 21)  # the tuner overrides methods that earlier versions do not have

_installed = version("peft")
if tuple(int(part) for part in _installed.split(".")[:2]) < OLDEST_PEFT:
    raise ImportError(
        f"frozencore needs peft {'.'.join(map(str, OLDEST_PEFT))} or newer, but {_installed} is installed. "
        "Run: pip install -U peft"
    )

with quiet_imports():
    import frozencore_basis_model
    from frozencore.adapter.model import register_with_peft

register_with_peft()
frozencore_basis_model.register()
