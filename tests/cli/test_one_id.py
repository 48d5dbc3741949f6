"""One basis has one id, wherever a person or a program meets it."""

from __future__ import annotations

import json
import re
from pathlib import Path

from safetensors import safe_open
from transformers import AutoConfig

from fixtures import printed
from frozencore import basis_id, load_basis, save_basis, swap_core
from frozencore.errors import ArtifactError
from frozencore.tune.pocket import pocket_model_path
from input_files import write_rows
from small_runs import adapter_in
from tiny import adapted

WEIGHTS, POCKET = "adapter_model.safetensors", str(pocket_model_path())


def test_a_basis_has_one_id_in_a_run_inspect_an_error_a_tenant_a_basis_model_and_an_engine(tmp_path: Path) -> None:
    rows = tmp_path / "rows"
    rows.mkdir()
    for name in ("anna", "ben"):
        write_rows(rows / f"{name}.jsonl", [{"prompt": f"{name} {i} and", "completion": f" {i}"} for i in range(12)])
    short = ("--model", POCKET, "--epochs", 1, "--batch-size", 4)
    shop, run, tenant = tmp_path / "shop", tmp_path / "run", tmp_path / "many" / "ben"
    few = ("--rank", 4, "--calibration-size", 4)
    printed("calibrate", "--model", POCKET, *few, "--tenants", rows, "--out", shop)
    basis = shop / "basis"
    printed("tune", *short, "--data", rows / "anna.jsonl", "--basis", basis, "--out", run)
    printed("tune-many", *short, "--tenants", rows, "--basis", basis, "--out", tmp_path / "many")
    printed("merge", run, tenant, "--out", tmp_path / "mean")
    model = printed("export", basis, "--to", "basis-model", "--base", POCKET, "--out", tmp_path / "model")
    served = printed("export", tenant, "--to", "tenant", "--base", tmp_path / "model", "--out", tmp_path / "served")
    loaded = adapter_in(run)
    save_basis(adapted("random"), tmp_path / "other")
    other = adapted("random", basis=str(tmp_path / "other"))
    try:
        swap_core(other, tenant / "adapter")
    except ArtifactError as error:
        refused = str(error)
    with safe_open(tmp_path / "served" / WEIGHTS, "pt") as file:
        for_an_engine = file.metadata()["frozencore_basis"]
    recipes = [json.loads((one / "result.json").read_text())["resolved"]["recipe"] for one in (run, tenant)]
    rate = load_basis(basis).options["learning_rate"]  # which the calibration proposed
    assert [recipe["learning_rate"] for recipe in recipes] == [rate, rate] != [None, None]
    found = {
        "in the folder": json.loads((basis / "basis.json").read_text())["id"],
        "read": load_basis(basis).id,
        "in a model": basis_id(loaded),
        "in its configuration": loaded.peft_config["default"].basis_id,
        "in a run's record": json.loads((run / "result.json").read_text())["hashes"]["basis"],
        "in a tenant's record": json.loads((tenant / "result.json").read_text())["hashes"]["basis"],
        "in a tenant's configuration": json.loads((tenant / "adapter/adapter_config.json").read_text())["basis_id"],
        "of inspect": re.search(r"Basis: (\w+)", printed("inspect", run))[1],
        "of inspect --json": json.loads(printed("inspect", basis, "--json"))["basis"],
        "in an error": re.search(r"has a core on the basis (\w+), but the model has (\w+)\.", refused)[1],
        "on the screen of a basis model": re.search(r"basis (\w{16,})", model)[1],
        "on the screen of a tenant": re.search(r"on the basis (\w+)", served)[1],
        "that an engine reads": AutoConfig.from_pretrained(tmp_path / "model").frozencore_basis["basis_id"],
        "that a tenant tells the engine": for_an_engine,
    }
    for folder in (run / "adapter", tenant / "adapter", tmp_path / "mean"):
        with safe_open(folder / WEIGHTS, "pt") as file:
            (key,) = (key for key in file.keys() if "." not in key)  # noqa: SIM118
        found[f"in {folder.name} of {folder.parent.name}"] = key.removeprefix("frozencore_core_")
    assert set(found.values()) == {load_basis(basis).id}, found
