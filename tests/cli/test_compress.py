"""``compress``: the table, rows of tenants, and a newcomer on the basis."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from shutil import copytree
from unittest.mock import Mock

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from frozencore import load_basis
from frozencore.tune.pocket import pocket_model_path
from input_files import write_rows
from small_runs import DIVERGES, adapter_in

Command = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def loras(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("loras")
    for seed, name in enumerate(("anna", "ben", "cleo")):
        model = AutoModelForCausalLM.from_pretrained(pocket_model_path())
        lora = get_peft_model(model, LoraConfig(r=4, lora_alpha=4, target_modules=["q_proj", "v_proj"]))
        generator = torch.Generator().manual_seed(seed)
        for key, parameter in lora.named_parameters():
            if "lora_" in key:
                parameter.data = 0.05 * torch.randn(parameter.shape, generator=generator)
        lora.save_pretrained(str(folder / name))
    (folder / "rows").mkdir()
    sums = [{"prompt": f"How many is {i} and 2?", "completion": f" {i + 2}"} for i in range(24)]
    for name in ("anna", "empty"):
        write_rows(folder / f"rows/{name}.jsonl", sums)
    return folder


def test_what_is_kept_is_told_and_a_larger_rank_is_asked_for(command: Command, loras: Path, tmp_path: Path) -> None:
    adapters = [loras / name for name in ("anna", "ben", "cleo")]
    status, out, err = command("compress", *adapters, "--rank", 4, "--bits", 32, "--out", tmp_path / "few")
    assert status == 0, err
    assert "give a larger --rank" in out
    status, out, err = command("compress", *adapters, "--rank", 12, "--bits", 32, "--out", tmp_path / "all")
    assert status == 0, err
    assert out.count("100.0%") == 8
    assert "larger" not in out
    sizes = json.loads((tmp_path / "all/compress.json").read_text())["sizes"]
    assert sizes["after"] > sizes["before"]
    assert f"Warning: one basis for 3 adapters does not pay; it pays from {sizes['pays_from']} adapters" in out
    kept = json.loads((tmp_path / "few/compress.json").read_text())["adapters"]
    assert kept.keys() == {"anna", "ben", "cleo"}
    assert all(0.1 < one["kept"] < 0.9 for one in kept.values())
    status, out, err = command("compress", *adapters, "--rank", 4, "--bits", 2, "--out", tmp_path / "small")
    assert status == 0, err
    small = json.loads((tmp_path / "small/compress.json").read_text())
    assert all(0 < small["adapters"][name]["kept"] < kept[name]["kept"] for name in kept)  # rounding counts too
    tenants = [
        json.loads((tmp_path / one / "compress.json").read_text())["sizes"]["tenant"] for one in ("few", "small")
    ]
    assert tenants[1] < tenants[0]
    status, _, err = command("merge", *adapters, "--out", tmp_path / "sum")
    assert (status, err.count("\n")) == (2, 1)
    assert "has a LORA adapter, not a frozen core. Read it with PEFT, or let `frozencore compress`" in err
    status, out, err = command("inspect", tmp_path / "few" / "basis")
    assert re.search(r"^Basis [0-9a-f]{32} of .*: the updates of 3 adapters, of which it keeps \d+%", out)
    assert all(f"  {name} {one['kept']:.1%}" in out for name, one in kept.items())
    status, out, err = command("inspect", tmp_path / "few")
    assert (status, err) == (0, "")
    assert all(f"{name} {one['kept']:.1%}" in out for name, one in kept.items())


def test_of_a_folder_with_other_things_the_adapters_are_taken_on_request(
    command: Command, loras: Path, tmp_path: Path
) -> None:
    shop = tmp_path / "many"
    for name in ("anna", "my lora"):
        copytree(loras / name.replace("my lora", "ben"), shop / name)
    for name in ("run.yaml", "compress.json"):
        (shop / name).write_text("{}\n")
    words = ["compress", *sorted(shop.iterdir()), "--rank", 4, "--out", tmp_path / "shop"]
    status, _, err = command(*words)
    assert (status, err.count("\n")) == (2, 1)
    status, out, err = command(*words, "--skip-bad")
    assert status == 0, err
    assert {path.name for path in (tmp_path / "shop").iterdir()} == {"anna", "basis", "compress.json"}
    assert out.count("Skipped ") == 3


def test_an_adapter_that_does_not_go_on_the_model_is_found_before_anything_is_written(
    command: Command, loras: Path, tmp_path: Path
) -> None:
    copytree(loras / "anna", tmp_path / "anna")
    file = tmp_path / "anna/adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"rank_pattern": None}))
    words = ["compress", tmp_path / "anna", "--rank", 4, "--out", tmp_path / "shop"]
    status, _, err = command(*words, "--model", "pocket", "--tenants", loras / "rows")
    assert (status, err.count("\n")) == (2, 1)
    assert not (tmp_path / "shop").exists()


def test_another_name_of_the_model_is_said(command: Command, loras: Path, tmp_path: Path) -> None:
    copytree(loras / "anna", tmp_path / "anna")
    file = tmp_path / "anna/adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"base_model_name_or_path": "lab/other"}))
    status, out, err = command(
        "compress", tmp_path / "anna", "--rank", 4, "--out", tmp_path / "shop", "--model", "pocket"
    )
    assert status == 0, err
    assert "Warning: adapters name the base model lab/other, not pocket" in out


@pytest.mark.parametrize("rate", [DIVERGES, 1e30, None])
def test_a_core_trained_on_is_saved_if_its_score_is_a_number_and_the_rest_is_shown(
    rate: float | None, command: Command, loras: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether the products of a core of 1e30 overflow depends on the processor; an infinite core diverges on each."""
    import frozencore.tune.compressed as compressed

    monkeypatch.setattr(compressed, "SHARE_OF_RATE", 1.0)
    monkeypatch.setattr("frozencore.tune.adapt.proposed_learning_rate", lambda *_, **__: rate)
    words = ["compress", loras / "anna", "--rank", 4, "--out", tmp_path / "shop", "--model", "pocket"]
    (rows := tmp_path / "rows").mkdir()
    (rows / "anna.jsonl").write_bytes((loras / "rows/anna.jsonl").read_bytes())
    status, out, err = command(*words, "--tenants", rows)
    assert status == 0, err
    why = re.search("anna, trained on: (Training diverged|No rate is known)", out)
    assert why or rate == 1e30
    assert ("Trained on: " in out) == (tmp_path / "shop/anna/trained-on").exists() == (why is None)


def test_ctrl_c_while_cores_are_scored_leaves_what_is_written_and_has_shown_it(
    command: Command, loras: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("frozencore.tune.compressed.score_cores", Mock(side_effect=KeyboardInterrupt))
    words = ["compress", loras / "anna", "--rank", 4, "--out", tmp_path / "shop", "--model", "pocket"]
    (rows := tmp_path / "rows").mkdir()
    (rows / "anna.jsonl").write_bytes((loras / "rows/anna.jsonl").read_bytes())
    status, out, err = command(*words, "--tenants", rows)
    assert (status, err.count("\n")) == (130, 1)
    assert err.endswith("unless --out is there, which is then whole\n")
    assert "1 adapter on one basis of rank 4" in out
    adapter_in(tmp_path / "shop/anna")


def test_a_core_with_trained_modules_is_scored_with_them(command: Command, loras: Path, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(pocket_model_path())
    config = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], modules_to_save=["norm"], init_lora_weights=False)
    lora = get_peft_model(model, config)
    lora.base_model.model.model.norm.modules_to_save["default"].weight.data.mul_(1.5)
    lora.save_pretrained(str(tmp_path / "loras/anna"))
    (tmp_path / "rows").mkdir()
    (tmp_path / "rows/anna.jsonl").write_bytes((loras / "rows/anna.jsonl").read_bytes())
    adapters = [tmp_path / "loras/anna", loras / "ben"]
    options = ["--rank", 8, "--bits", 32, "--model", "pocket", "--tenants", tmp_path / "rows"]
    status, out, err = command("compress", *adapters, *options, "--out", tmp_path / "shop")
    assert status == 0, err
    assert "anna, trained on: Only cores are trained on, and this adapter has other trained modules." in out
    (line,) = (line for line in out.splitlines() if "anna" in line and "no core" in line)
    before, own, compressed = re.findall(r"\d+\.\d{3}", line)
    assert own != before
    assert abs(float(own) - float(compressed)) < 0.01


def test_a_chat_template_beside_an_adapter_that_its_core_does_not_keep_is_said(
    command: Command, loras: Path, tmp_path: Path
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(pocket_model_path())
    adapters = [Path(copytree(loras / name, tmp_path / name)) for name in ("anna", "ben", "cleo")]
    tokenizer.save_pretrained(adapters[0])  # the model's own, as trainers save it
    (adapters[2] / "tokenizer_config.json").write_text("{")
    words = ("compress", *adapters, "--model", "pocket", "--out")
    assert command(*words, tmp_path / "one")[::2] == (0, "")
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    tokenizer.save_pretrained(adapters[1])
    (adapters[2] / "tokenizer_config.json").unlink()
    status, _, err = command(*words, tmp_path / "two")
    assert (status, err.count("\n")) == (0, 1)
    assert "another chat template beside ben than pocket has" in err


def test_tenants_are_scored_and_trained_on_and_a_newcomer_trains_on_the_basis(
    command: Command, loras: Path, tmp_path: Path
) -> None:
    (loras / "empty").mkdir(exist_ok=True)
    words = ["compress", loras / "anna", loras / "ben", loras / "empty", "--rank", 8, "--out", tmp_path / "shop"]
    model = ["--model", "pocket"]
    status, _, err = command(*words, *model)
    assert (status, err.count("\n")) == (2, 1)
    assert not (tmp_path / "shop").exists()
    copytree(loras / "rows", tmp_path / "rows")
    with (tmp_path / "rows/anna.jsonl").open("a") as file:
        file.write('{"prompt": "How many?", "completion": ""}\n')
    status, out, err = command(*words, *model, "--tenants", tmp_path / "rows", "--skip-bad")
    assert status == 0, err
    assert "Skipped empty" in out
    assert all(arm in out for arm in ("base", "own", "compressed", "trained on"))
    cores = [adapter_in(tmp_path / "shop/anna", name) for name in ("adapter", "trained-on")]
    assert cores[0].peft_config["default"].basis_id == load_basis(tmp_path / "shop/basis").id
    assert re.search(r"anna, own: \d+ in .* \(loss\)", out)
    few = ["--epochs", 1, "--basis", tmp_path / "shop/basis", "--out", tmp_path / "dora"]
    status, said, err = command("tune", *model, "--data", loras / "rows/anna.jsonl", *few)
    assert status == 0, err
    kept = json.loads((tmp_path / "shop/compress.json").read_text())["adapters"].values()
    limit = f"the updates of 2 adapters, of which it keeps {sum(one['kept'] for one in kept) / 2:.0%} "
    assert said.count("Warning: The basis in ") == said.count(limit) == 1
    record = json.loads((tmp_path / "dora/result.json").read_text())
    assert (record["config"]["method"], record["config"]["rank"]) == ("compressed", 8)
    assert f"{record['held_out_loss_before']:.3f}, " in out, "the base model is scored without an adapter"
    assert command("inspect", tmp_path / "dora/adapter")[0] == 0
    status, _, err = command("tune", *model, "--data", loras / "rows/anna.jsonl", "--method", "compressed", *few[:2],
                             "--out", tmp_path / "none")  # fmt: skip
    assert (status, err.count("\n")) == (2, 1)
    assert "frozencore compress" in err
