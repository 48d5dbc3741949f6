"""Sums of adapters on one basis are sums of what they do."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from peft import PeftModel, get_peft_model_state_dict, set_peft_model_state_dict

from adapted import adapted, cores_of, logits, train_at_random
from frozencore import get_bases, load_basis, merge_adapters, save_basis, set_bases
from frozencore.errors import ArtifactError, ConfigError
from tiny import tiny_qwen2

NAMES, WEIGHTS = ("a", "b", "d"), (0.5, 0.75, -0.25)


def with_three(tmp_path: Path, *, named: bool = True) -> PeftModel:
    """Three adapters of trained cores on one basis, by its name or each with a copy."""
    model = adapted("fcca", alpha=6.0)
    first, bases = model.peft_config["default"], get_bases(model)
    if named:
        save_basis(model, tmp_path / "basis")
    for seed, name in enumerate(NAMES):
        model.add_adapter(name, copy.deepcopy(first))
        set_bases(model, load_basis(tmp_path / "basis") if named else bases, adapter_name=name)
        train_at_random(model, name, seed=seed)
    model.delete_adapter("default")
    model.set_adapter("a")
    return model.eval()


def deltas(model: PeftModel, name: str) -> list[torch.Tensor]:
    return [layer.get_delta_weight(name).detach().double() for layer in cores_of(model, name)]


def largest_error(model: PeftModel, name: str, names: tuple[str, ...] = NAMES) -> float:
    """The error of an adapter's updates against the weighted sum of the others', relative to the largest value."""
    wanted = [
        sum(w * delta for w, delta in zip(WEIGHTS, of_layer, strict=True))
        for of_layer in zip(*(deltas(model, other) for other in names), strict=True)
    ]
    return max(
        float((own - want).abs().max() / want.abs().max())
        for own, want in zip(deltas(model, name), wanted, strict=True)
    )


@pytest.mark.parametrize("named", [True, False])
def test_a_weighted_adapter_does_the_weighted_sum_of_what_the_others_do(named: bool, tmp_path: Path) -> None:
    model = with_three(tmp_path, named=named)
    before = logits(model)
    model.add_weighted_adapter(list(NAMES), list(WEIGHTS), "sum", combination_type="linear")
    assert largest_error(model, "sum") < 1e-6
    assert torch.equal(logits(model), before)  # it is there, not active
    first = cores_of(model, "sum")[0]
    assert first.frozencore_P["sum"] is first.frozencore_P["a"]


@pytest.mark.parametrize("named", [True, False])
def test_saved_adapters_are_summed_to_one_that_loads(named: bool, tmp_path: Path) -> None:
    model = with_three(tmp_path, named=named)
    model.save_pretrained(str(tmp_path / "out"))
    merge_adapters([tmp_path / "out" / name for name in NAMES], tmp_path / "out" / "sum", weights=WEIGHTS)
    model.load_adapter(str(tmp_path / "out" / "sum"), "sum")
    assert largest_error(model, "sum") < 1e-6


def test_without_weights_it_is_the_mean(tmp_path: Path) -> None:
    model = with_three(tmp_path)
    model.save_pretrained(str(tmp_path / "out"))
    merge_adapters([tmp_path / "out" / name for name in NAMES], tmp_path / "mean")
    model.add_weighted_adapter(list(NAMES), [1 / 3] * 3, "mean")
    model.load_adapter(str(tmp_path / "mean"), "loaded")
    for mine, theirs in zip(deltas(model, "mean"), deltas(model, "loaded"), strict=True):
        assert torch.allclose(mine, theirs, atol=1e-7)


def test_averaged_state_dicts_are_averaged_updates(tmp_path: Path) -> None:
    model = with_three(tmp_path)
    states = [get_peft_model_state_dict(model, adapter_name=name) for name in NAMES]
    assert all(state.keys() == {"frozencore_cores", "frozencore_basis"} for state in states)
    average = {key: sum(w * state[key] for w, state in zip(WEIGHTS, states, strict=True)) for key in states[0]}
    wanted = with_three(tmp_path / "other")
    set_peft_model_state_dict(model, average, adapter_name="a")
    wanted.add_weighted_adapter(list(NAMES), list(WEIGHTS), "sum")
    for mine, theirs in zip(deltas(model, "a"), deltas(wanted, "sum"), strict=True):
        assert float((mine - theirs).abs().max()) <= 1e-6 * float(theirs.abs().max())


def test_what_cannot_be_summed_says_so_and_changes_nothing(tmp_path: Path) -> None:
    model = with_three(tmp_path)
    model.add_adapter("own", adapted("rawgrad", alpha=6.0).peft_config["default"])
    set_bases(model, get_bases(adapted("rawgrad")), adapter_name="own")
    names = set(model.peft_config)
    for adapters, weights, options, message in (
        (["a", "own"], [1.0, 1.0], {}, "differ in basis, rank or scale at layer"),
        (["a", "nobody"], [1.0, 1.0], {}, "nobody"),
        ([], [], {}, "none"),
        (["a", "b"], [1.0], {}, "as many finite weights"),
        (["a", "b"], [1.0, float("nan")], {}, "as many finite weights"),
        (["a", "b"], [1.0, 1.0], {"combination_type": "svd"}, "'svd'"),
        (["a", "b"], [1.0, 1.0], {"combination_type": "ties", "density": 0.5}, "'ties', density came"),
    ):
        with pytest.raises((ArtifactError, ConfigError), match=message) as caught:
            model.add_weighted_adapter(adapters, weights, "sum", **options)
        assert "\n" not in str(caught.value)
        assert set(model.peft_config) == names


def test_folders_that_cannot_be_summed_say_so_and_nothing_is_written(tmp_path: Path) -> None:
    with_three(tmp_path).save_pretrained(str(tmp_path / "out"))
    other = adapted("rawgrad", alpha=6.0, trained=True)
    other.save_pretrained(str(tmp_path / "other"))
    beside = adapted("fcca", alpha=6.0, modules_to_save=["lm_head"])
    beside.save_pretrained(str(tmp_path / "beside"))
    a = tmp_path / "out" / "a"
    for adapters, weights, message in (
        ([a, tmp_path / "other"], None, "differ in basis, rank or scale"),
        ([a, tmp_path / "beside"], None, "other modules too"),
        ([a, a], [1.0], "as many finite weights"),
        ([], None, "none was named"),
    ):
        with pytest.raises((ArtifactError, ConfigError), match=message):
            merge_adapters(adapters, tmp_path / "sum", weights=weights)
        assert not (tmp_path / "sum").exists()


def test_the_command_writes_the_sum(command, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    model = with_three(tmp_path)
    model.save_pretrained(str(tmp_path / "out"))
    folders = [tmp_path / "out" / name for name in NAMES]
    weights = ",".join(map(str, WEIGHTS))
    status, out, err = command("merge", *folders, f"--weights={weights}", "--output", tmp_path / "sum")
    assert status == 0, err
    assert "bytes" in out
    model.load_adapter(str(tmp_path / "sum"), "sum")
    assert largest_error(model, "sum") < 1e-6
    status, _, err = command("merge", *folders, "--weights=1,x,2", "--output", tmp_path / "other")
    assert status == 2
    assert "numbers separated by commas" in err
    status, _, err = command("merge", *folders, "--output", tmp_path / "sum")
    assert status == 2
    assert err.endswith("sum is there already. Choose another folder.\n")  # it has no option to overwrite it


def test_a_sum_of_one_is_that_one(tmp_path: Path) -> None:
    with_three(tmp_path).save_pretrained(str(tmp_path / "out"))
    merge_adapters([tmp_path / "out" / "b"], tmp_path / "again")
    one, again = (
        PeftModel.from_pretrained(tiny_qwen2(), str(folder)).eval()
        for folder in (tmp_path / "out" / "b", tmp_path / "again")
    )
    assert torch.equal(logits(one), logits(again))
