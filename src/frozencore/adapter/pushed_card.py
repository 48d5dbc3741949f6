"""The card that ``push_to_hub`` uploads beside an adapter.

transformers' ``push_to_hub`` lets a model save itself into a folder, lays the repository's card over the one that was
written there (a template, where the repository is new), and then looks up one thing more on the model: what uploads
the folder. Python looks on the instance first, so what saves an adapter leaves that there; no class of others changes.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from huggingface_hub import ModelCard
from torch import nn
from transformers.utils import PushToHubMixin

from frozencore.adapter.seal.card import CARD_FILE, write_model_card
from frozencore.files.adapter_folder import CONFIG_FILE, PEFT_TYPE, read_config

if TYPE_CHECKING:
    from frozencore.adapter.config import FrozenCoreConfig

DEFAULT = "default"  # the adapter that PEFT saves at the top of a folder, beside the card


def keep_card_when_pushed(model: nn.Module, config: FrozenCoreConfig, adapter_name: str) -> None:
    """Let a model that saves an adapter upload the adapter's card, if it is pushed."""
    if isinstance(model, PushToHubMixin) and adapter_name == DEFAULT:
        model._upload_modified_files = ModelUpload(config)._upload_modified_files


class ModelUpload(PushToHubMixin):
    """Uploads the folder of a model as transformers does, with its adapter's card in it.

    Holds no model: one that held itself would keep its memory until Python looks for cycles.

    Args:
        config: Has just been saved there.
    """

    def __init__(self, config: FrozenCoreConfig) -> None:
        self.config = config

    def _upload_modified_files(self, working_dir: str, *args: Any, **kwargs: Any) -> Any:
        folder = Path(working_dir)
        if (folder / CONFIG_FILE).exists() and read_config(folder).get("peft_type") == PEFT_TYPE:
            _put_card(folder, self.config.written_card)
        return super()._upload_modified_files(working_dir, *args, **kwargs)


def _put_card(folder: Path, written: str | None) -> None:
    """Make the repository's card the adapter's: someone's text and metadata stay, ours are added."""
    card = ModelCard.load(folder / CARD_FILE)
    ours = ModelCard(written).data.to_dict() if written else {}
    theirs = card.data.to_dict()
    for name, value in {**ours, **theirs, "tags": [*ours.get("tags", []), *(theirs.get("tags") or [])]}.items():
        card.data[name] = value
    card.save(folder / CARD_FILE)
    write_model_card(folder)
