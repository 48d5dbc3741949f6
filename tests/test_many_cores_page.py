"""The code of docs/many-cores.md runs as it stands."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel, get_peft_model
from typer.main import get_command

from adapted import BATCHES, adapted, cores_of, train_at_random
from frozencore import CoreBank, FrozenCoreConfig, frozen_core_layers, load_basis, save_basis
from frozencore.cli.app import program
from frozencore.tune.run.models import load_model
from places import ROOT
from tiny import tiny_qwen2

PAGE = (ROOT / "docs" / "many-cores.md").read_text(encoding="utf-8")

BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)


@pytest.mark.parametrize("num_tenants", [4, pytest.param(32, marks=pytest.mark.slow)])
def test_the_lines_that_train_many_run_and_save_true_sizes(
    num_tenants: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    base, tokenizer = load_model("pocket", device="cpu")
    on_basis = get_peft_model(base, FrozenCoreConfig(r=8, constructor="random", task_type="CAUSAL_LM"))
    save_basis(on_basis, "shop/basis")
    rows = {
        name: [{"prompt": f"{name} and {number}", "completion": f" {number}"} for number in range(8)]
        for name in ("anna", "ben", *(f"tenant-{i}" for i in range(num_tenants - 2)))
    }
    batch = tokenizer(["anna and 3", "ben and 3x", "no one and"], padding=True, return_tensors="pt")
    names = {"base": on_basis.unload(), "tokenizer": tokenizer, "rows_of_tenants": rows, "batch": batch}
    exec(compile(BLOCKS[3], "many-cores.md", "exec"), names)
    for name in rows:
        folder = Path("shop") / name
        assert (folder / "adapter_model.safetensors").stat().st_size < 4 * 16 * 8**2 + 1024
    reloaded = PeftModel.from_pretrained(load_model("pocket", device="cpu")[0], "shop/ben")
    layer = cores_of(reloaded)[0]
    assert torch.equal(layer.factors("default")[2], names["trained"]["ben"].cores[layer.name])
    assert names["tokens"].shape == (3, batch["input_ids"].shape[1] + 8)
    losses = [names["trained"][name].report.losses for name in rows]
    assert sum(last < first for first, *_, last in losses) > num_tenants / 2


def test_ten_lines_choose_a_basis_train_tenants_add_one_say_how_well_it_fits_and_serve_all(
    command: Callable[..., tuple[int, str, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("rows").mkdir()
    for more, file in enumerate(("rows/anna", "rows/ben", "dora")):
        rows = [{"prompt": f"How many is {i} and {i}?", "completion": f" {2 * i + more}"} for i in range(10)]
        Path(f"{file}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    lines = re.findall(r"^frozencore (.* (?:chosen|wider)\b.*)$", PAGE, flags=re.MULTILINE)
    few = {"calibrate": "--calibration-size 4", "tune": "--epochs 1", "tune-many": "--epochs 1", "inspect": ""}
    told = []
    for line in lines:
        words = shlex.split(line.partition(" #")[0].replace("MODEL", "pocket"))
        status, out, err = command(*words, *few[words[0]].split())
        assert status == 0, (line, err)
        told.append(" ".join(out.split()))
    assert [line.split()[0] for line in lines] == ["calibrate", "tune-many", "inspect", "calibrate", "tune"]
    assert re.search(r"the basis holds [\d.]+%, the best basis of its rank [\d.]+%, a random one", told[2])
    assert len([line for line in BLOCKS[1].splitlines() if line]) + len(lines) == 10
    base, tokenizer = load_model("pocket", device="cpu")
    batch = tokenizer(["How many is 3 and 3?"] * 3, return_tensors="pt")
    names = {"base": base, "batch": batch, "PeftModel": PeftModel, "CoreBank": CoreBank}
    exec(compile(BLOCKS[1], "many-cores.md", "exec"), names)
    assert names["tokens"].shape == (3, batch["input_ids"].shape[1] + 8)
    assert list(names["bank"]) == ["anna", "ben", "dora"]
    before = PeftModel.from_pretrained(load_model("pocket", device="cpu")[0], "served/anna/adapter").eval()
    old = CoreBank(before, 1)
    old.put("anna", "served/anna/adapter")
    with old.rows(["anna"] * 3), names["bank"].rows(["anna", "anna", "anna"]), torch.no_grad():
        one, other = (model(**batch).logits for model in (before, names["bank"].model.eval()))
    assert torch.equal(one, other)


def test_the_code_of_the_page_runs_and_rows_are_their_tenants_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    batch = {key: BATCHES[0][key] for key in ("input_ids", "attention_mask")}
    model = adapted("fcca").eval()
    folder, _, growing, _, sharing, serving, summing, federated = BLOCKS
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
    names |= {"base": tiny_qwen2(), "batches": BATCHES}
    run(growing)
    assert load_basis("wider/basis").older[0].identity == load_basis("shop/basis").identity


def test_the_options_of_tune_that_tune_many_lacks_are_those_of_the_list() -> None:
    verbs: Any = get_command(program(["tune", "tune-many"]))
    tune, many = ({flag for one in verbs.commands[verb].params for flag in one.opts} for verb in ("tune", "tune-many"))
    (told,) = re.findall(r"- `tune-many` takes the options of `tune`.*?afterwards\.", PAGE, flags=re.DOTALL)
    told = told.partition("`frozencore evaluate")[0]
    named = set(re.findall(r"`(--[a-z-]+)`", told))
    lacking = tune - many - {"--data"}  # which is --tenants
    assert {flag for flag in lacking if not flag.startswith(tuple(named))} == set()
    assert named <= lacking
