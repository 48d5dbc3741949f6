"""The code of docs/many-cores.md runs as it stands."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from adapted import BATCHES, adapted, train_at_random
from frozencore import frozen_core_layers
from places import ROOT

PAGE = (ROOT / "docs" / "many-cores.md").read_text(encoding="utf-8")


def test_the_code_of_the_page_runs_and_rows_are_their_tenants_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    batch = {key: BATCHES[0][key] for key in ("input_ids", "attention_mask")}
    model = adapted("fcca").eval()
    sharing, serving = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)
    names = {"model": model, "batch": batch, "frozen_core_layers": frozen_core_layers}
    model.generation_config.pad_token_id = 0
    exec(compile(sharing, "many-cores.md", "exec"), names)
    for seed, tenant in enumerate(("anna", "ben")):
        train_at_random(model, tenant, seed=seed)
    model.save_pretrained("adapters", selected_adapters=["anna"])
    exec(compile(serving, "many-cores.md", "exec"), names)
    alone = model.generate(**batch, max_new_tokens=8, adapter_names=["anna", "__base__", "ben", "anna"])
    assert torch.equal(names["tokens"], alone)
    assert list(names["bank"]) == ["ben"]
