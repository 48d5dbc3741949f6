"""The code of docs/many-cores.md runs as it stands."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from adapted import BATCHES, adapted, cores_of, train_at_random
from frozencore import frozen_core_layers
from places import ROOT
from tiny import tiny_qwen2

PAGE = (ROOT / "docs" / "many-cores.md").read_text(encoding="utf-8")


def test_the_code_of_the_page_runs_and_rows_are_their_tenants_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    batch = {key: BATCHES[0][key] for key in ("input_ids", "attention_mask")}
    model = adapted("fcca").eval()
    folder, sharing, serving, summing, federated = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)
    rows = [[{key: X[i : i + 1] for key, X in BATCHES[0].items()} for i in of] for of in ((0, 1, 2), (3,))]
    names = {
        "model": model, "batch": batch, "frozen_core_layers": frozen_core_layers, "torch": torch,
        "base": tiny_qwen2(), "another_base": tiny_qwen2(), "new_base": tiny_qwen2, "rows_of_clients": rows,
    }  # fmt: skip
    model.generation_config.pad_token_id = 0

    def run(code: str) -> None:
        exec(compile(code, "many-cores.md", "exec"), names)

    run(folder)
    run(sharing)
    for seed, tenant in enumerate(("anna", "ben")):
        train_at_random(model, tenant, seed=seed)
    model.save_pretrained("adapters", selected_adapters=["anna"])
    run(serving)
    alone = model.generate(**batch, max_new_tokens=8, adapter_names=["anna", "__base__", "ben", "anna"])
    assert torch.equal(names["tokens"], alone)
    assert list(names["bank"]) == ["ben"]
    run(summing)
    layer = cores_of(model, "both")[0]
    R = {name: layer.factors(name)[2] for name in ("anna", "ben", "both")}
    assert torch.allclose(R["both"], 0.7 * R["anna"] + 0.3 * R["ben"])
    run(federated)
    one, other = (cores_of(client)[0].factors("default")[2] for client in names["clients"])
    assert torch.equal(one, other)
    assert bool(one.any())
