"""Whether the hub can be asked, found out at once: its client retries for up to a minute before it says no."""

from __future__ import annotations

from typing import Literal

from huggingface_hub import HfApi
from huggingface_hub.errors import HfHubHTTPError

HUB_TIMEOUT_S = 10.0


def hub_answers(kind: Literal["model", "dataset"], name: str) -> bool:
    """Whether the hub answers when asked about a repository; what it says is for the loader to report."""
    api = HfApi()
    try:
        (api.model_info if kind == "model" else api.dataset_info)(name, timeout=HUB_TIMEOUT_S)
    except HfHubHTTPError:
        return True
    except Exception:  # every way in which a network can fail
        return False
    return True
