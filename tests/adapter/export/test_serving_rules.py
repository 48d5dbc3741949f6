"""The check of LoRA directories: one directory for each rule that breaks it and nothing else."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from torch import Tensor

from frozencore import check_lora_directory, export_lora
from frozencore.adapter.export.serving import ENGINES, RULES
from frozencore.errors import ArtifactError
from tiny import adapted, tiny_qwen2

Q = "base_model.model.model.layers.0.self_attn.q_proj"
MLP = "base_model.model.model.layers.0.mlp"
Tensors = dict[str, Tensor]


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory that every engine takes."""
    folder = tmp_path_factory.mktemp("good") / "lora"
    export_lora(adapted("random", trained=True, target_modules="all-linear"), folder)
    return folder


def _drop(tensors: Tensors, part: str) -> None:
    for key in [key for key in tensors if part in key]:
        del tensors[key]


def _widen(tensors: Tensors) -> None:
    tensors[f"{Q}.lora_A.weight"] = torch.zeros(5, 32)
    tensors[f"{Q}.lora_B.weight"] = torch.zeros(32, 5)


def _too_wide(config: dict[str, Any], tensors: Tensors) -> None:
    config["r"] = config["lora_alpha"] = 513
    for key, X in tensors.items():
        tensors[key] = torch.zeros(513, X.shape[1]) if "lora_A" in key else torch.zeros(X.shape[0], 513)


Change = Callable[[dict[str, Any], Tensors], Any]
BROKEN: dict[str, Change] = {
    "is_lora": lambda config, tensors: config.update(peft_type="LOHA"),
    "rank_fits_vllm": _too_wide,
    "alpha_is_a_number": lambda config, tensors: config.update(lora_alpha="8"),
    "alpha_is_not_zero": lambda config, tensors: config.update(lora_alpha=0),
    "one_alpha": lambda config, tensors: config.update(alpha_pattern={"q_proj": 9}),
    "one_rank": lambda config, tensors: config.update(rank_pattern={"q_proj": 9}),
    "plain_scale": lambda config, tensors: config.update(use_rslora=True),
    "no_dora": lambda config, tensors: config.update(use_dora=True),
    "no_bias": lambda config, tensors: config.update(bias="all"),
    "no_whole_modules": lambda config, tensors: config.update(modules_to_save=["lm_head"]),
    "plain_start": lambda config, tensors: config.update(init_lora_weights="pissa_niter_4"),
    "targets_listed": lambda config, tensors: config.update(target_modules=".*_proj"),
    "targets_known_to_sglang": lambda config, tensors: config["target_modules"].append("fc1"),
    "targets_name_all": lambda config, tensors: _name_as_parameters(config),
    "no_variant": lambda config, tensors: config.update(layer_replication=[[0, 2], [1, 2]]),
    "no_activation": lambda config, tensors: config.update(alora_invocation_tokens=[5]),
    "no_conv1d": lambda config, tensors: config.update(fan_in_fan_out=True),
    "some_factors": lambda config, tensors: tensors.clear(),
    "only_factors": lambda config, tensors: tensors.update({f"{Q}.lora_magnitude_vector": torch.ones(3)}),
    "factors_in_pairs": lambda config, tensors: _drop(tensors, "layers.1.mlp.down_proj.lora_B"),
    "factors_fit": lambda config, tensors: tensors.update({f"{Q}.lora_B.weight": torch.ones(32, 4)}),
    "ranks_are_r": lambda config, tensors: _widen(tensors),
    "packed_qkv": lambda config, tensors: _drop(tensors, "layers.0.self_attn.v_proj"),
    "packed_gate_up": lambda config, tensors: _drop(tensors, "layers.0.mlp.gate_proj"),
    "no_tenant": lambda config, tensors: _move_to_cores(config, tensors),
    "types_are_plain": lambda config, tensors: tensors.update(
        {f"{MLP}.down_proj.lora_A.weight": torch.ones(3, 48, dtype=torch.int8)}
    ),
    "all_finite": lambda config, tensors: tensors.update({f"{Q}.lora_A.weight": torch.full((3, 32), torch.nan)}),
}
# These cannot be broken alone: no file has zero rows in every factor, and one rule is about a file beside them.
SPECIAL = {"rank_is_positive", "no_added_tokens"}


def _name_as_parameters(config: dict[str, Any]) -> None:
    """As an export names layers that PEFT takes for fused experts."""
    config["target_modules"].remove("down_proj")
    config["target_parameters"] = [f"model.layers.{i}.mlp.down_proj.weight" for i in range(2)]


def _move_to_cores(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    config["target_modules"] = ["core"]
    for key in list(tensors):
        tensors[key.replace(".lora_", ".core.lora_")] = tensors.pop(key)


def _write(folder: Path, good: Path, change: Change) -> Path:
    config = json.loads((good / "adapter_config.json").read_text())
    tensors = load_file(good / "adapter_model.safetensors")
    change(config, tensors)
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


@pytest.mark.parametrize("rule", [rule for rule in RULES if rule.name not in SPECIAL], ids=lambda rule: rule.name)
def test_a_directory_that_breaks_one_rule_is_told_so_and_nothing_else(rule: Any, good: Path, tmp_path: Path) -> None:
    report = check_lora_directory(_write(tmp_path / "lora", good, BROKEN[rule.name]))
    assert [problem.rule for problem in report.problems] == [rule.name]
    assert report.engines == tuple(engine for engine in ENGINES if engine not in rule.engines)
    assert rule.remedy in str(report.problems[0])


def test_a_rank_of_zero_and_added_tokens_are_found(good: Path, tmp_path: Path) -> None:
    report = check_lora_directory(_write(tmp_path / "zero", good, lambda config, _: config.update(r=0)))
    assert {problem.rule for problem in report.problems} == {"rank_is_positive", "ranks_are_r"}
    assert report.vllm_max_rank is None
    folder = _write(tmp_path / "one", good, lambda config, tensors: config.update(rank_pattern={"q_proj": 0}))
    assert "rank_is_positive" in {problem.rule for problem in check_lora_directory(folder).problems}
    folder = _write(tmp_path / "tokens", good, lambda config, tensors: None)
    (folder / "added_tokens.json").write_text("{}")
    assert [problem.rule for problem in check_lora_directory(folder).problems] == ["no_added_tokens"]


def test_every_rule_says_why_and_is_broken_by_one_directory() -> None:
    assert {rule.name for rule in RULES} == BROKEN.keys() | SPECIAL
    assert all(rule.why and rule.engines for rule in RULES)


def test_the_good_directory_is_taken_by_all(good: Path) -> None:
    report = check_lora_directory(good)
    assert (report.engines, report.problems, report.rank) == (ENGINES, (), 3)


@pytest.mark.parametrize(("rank", "admitted"), [(1, 1), (3, 8), (16, 16), (257, 320), (512, 512), (600, None)])
def test_vllm_is_told_the_smallest_maximum_rank_that_admits_the_largest_rank(
    rank: int, admitted: int | None, good: Path, tmp_path: Path
) -> None:
    folder = _write(tmp_path / "lora", good, lambda config, tensors: config.update(r=rank))
    assert check_lora_directory(folder).vllm_max_rank == admitted
    folder = _write(tmp_path / "one", good, lambda config, tensors: config.update(r=1, rank_pattern={"q_proj": rank}))
    assert check_lora_directory(folder).vllm_max_rank == admitted


def test_a_plain_lora_of_peft_passes_and_its_default_targets_pass_without_k(tmp_path: Path) -> None:
    model = get_peft_model(tiny_qwen2(), LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"]))
    model.save_pretrained(tmp_path / "lora")
    assert check_lora_directory(tmp_path / "lora").engines == ENGINES


def test_a_native_frozen_core_is_no_lora(tmp_path: Path) -> None:
    adapted("random").save_pretrained(tmp_path / "core")
    report = check_lora_directory(tmp_path / "core")
    assert report.engines == ()
    assert {"is_lora", "some_factors", "only_factors"} <= {problem.rule for problem in report.problems}


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("adapter_config.json", b"{", "damaged"),
        ("adapter_config.json", b"[]", "no JSON object"),
        ("adapter_config.json", b"\xff\xfe\x00", "damaged"),
        ("adapter_model.safetensors", b"", "damaged"),
        ("adapter_model.safetensors", b"garbage" * 9, "damaged"),
        ("adapter_model.safetensors", b"cut", "damaged"),
        ("adapter_model.safetensors", None, "has no adapter_model.safetensors"),
    ],
)
def test_a_damaged_directory_is_one_line(
    name: str, content: bytes | None, message: str, good: Path, tmp_path: Path
) -> None:
    folder = _write(tmp_path / "lora", good, lambda config, tensors: None)
    if content is None:
        (folder / name).unlink()
    else:
        (folder / name).write_bytes((folder / name).read_bytes()[:-100] if content == b"cut" else content)
    with pytest.raises(ArtifactError, match=message):
        check_lora_directory(folder)


def test_odd_values_in_the_configuration_do_not_crash_the_check(good: Path, tmp_path: Path) -> None:
    names = ("r", "lora_alpha", "target_modules", "rank_pattern", "alpha_pattern", "bias", "modules_to_save")
    for i, odd in enumerate((None, "text", 1.5, [1], {"a": None}, True, 10**400)):
        folder = _write(tmp_path / str(i), good, lambda config, _, odd=odd: config.update(dict.fromkeys(names, odd)))
        assert check_lora_directory(folder).engines != ENGINES
