"""Cores of 8, 4 and 2 bits: saved, read, loaded and used as every other core, against a float64 reference."""

from __future__ import annotations

import base64
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file

from frozencore import CONSTRUCTORS, CoreBank, get_core, merge_adapters, save_basis, swap_core
from frozencore.adapter.core import Core
from frozencore.adapter.export.link import core_fragment
from frozencore.adapter.folders import read_adapter
from frozencore.errors import ArtifactError, ConfigError
from frozencore.maths.quantise import BITS, quantise
from tiny import BATCHES, adapted, cores_of, logits, tiny_qwen2

WEIGHTS = "adapter_model.safetensors"


def saved(tmp_path: Path, *, on_a_basis: bool, constructor: str = "fcca", **options: object) -> Path:
    model = adapted(constructor, trained=True, **options)
    with torch.no_grad():
        cores_of(model)[1].core("default").zero_()
    if on_a_basis:
        save_basis(model, tmp_path / "basis")
    model.save_pretrained(str(tmp_path / "whole"))
    return tmp_path / "whole"


def few(whole: Path, bits: int) -> Path:
    read, out = read_adapter(whole), whole.with_name(f"{bits}-bit")
    read.write(out, read.core.in_bits(bits, read.ranks), overwrite=True)
    return out


def rounded(model: PeftModel, bits: int) -> dict[str, np.ndarray]:
    """Each R at its nearest level, of the scale that maths.quantise finds, in float64."""
    found = {}
    for layer in cores_of(model):
        R = layer.core("default").detach().double().numpy()
        grid = float(quantise(torch.from_numpy(R.flatten()), bits)[1]) * (np.arange(2**bits) + 0.5 - 2 ** (bits - 1))
        found[layer.name] = grid[np.abs(R[..., None] - grid).argmin(-1)]
    return found


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("on_a_basis", [True, False])
@pytest.mark.parametrize("constructor", CONSTRUCTORS)
def test_a_core_loads_at_its_nearest_levels(constructor: str, on_a_basis: bool, bits: int, tmp_path: Path) -> None:
    whole = saved(tmp_path, on_a_basis=on_a_basis, constructor=constructor)
    loaded = PeftModel.from_pretrained(tiny_qwen2(), few(whole, bits)).eval()
    expected = rounded(PeftModel.from_pretrained(tiny_qwen2(), whole), bits)
    for layer in cores_of(loaded):
        np.testing.assert_allclose(layer.core("default").detach().numpy(), expected[layer.name], rtol=1e-5, atol=1e-12)
    assert not cores_of(loaded)[1].core("default").any()  # zeros stay zero


@pytest.mark.parametrize("bits", BITS)
def test_its_file_has_so_many_bits_a_value(bits: int, tmp_path: Path) -> None:
    whole = saved(tmp_path, on_a_basis=True, rank_pattern={"q_proj": 2})
    core = read_adapter(whole).core
    tensors = load_file(few(whole, bits) / WEIGHTS)
    num_layers = len(cores_of(adapted()))
    sizes = sorted(X.nbytes for X in tensors.values())
    assert sizes == sorted([-(-len(core.values) * bits // 8), 2 * num_layers, 2 * num_layers])


def test_banks_swaps_sums_and_further_saves_take_it(tmp_path: Path) -> None:
    whole = saved(tmp_path, on_a_basis=True)
    small = few(whole, 4)
    direct = PeftModel.from_pretrained(tiny_qwen2(), small).eval()
    model = PeftModel.from_pretrained(tiny_qwen2(), whole).eval()
    bank = CoreBank(model, 2)
    bank.put("anna", small)
    assert torch.equal(bank.get("anna").values, get_core(direct).values)
    swap_core(model, small)
    assert torch.equal(logits(model), logits(direct))
    direct.save_pretrained(str(tmp_path / "again"))
    assert torch.equal(read_adapter(tmp_path / "again").core.values, read_adapter(small).core.values)  # in 32 bits
    merge_adapters([whole, small], tmp_path / "mean")
    halves = (read_adapter(whole).core.values + read_adapter(small).core.values) / 2
    torch.testing.assert_close(read_adapter(tmp_path / "mean").core.values, halves)


def without_scales(tensors: dict[str, torch.Tensor]) -> None:
    del tensors[next(key for key in tensors if key.endswith("-bit"))]


def without_ranks(tensors: dict[str, torch.Tensor]) -> None:
    del tensors[next(key for key in tensors if key.endswith(".ranks"))]


def with_fewer_codes(tensors: dict[str, torch.Tensor]) -> None:
    key = min(tensors, key=len)
    tensors[key] = tensors[key][:-1].clone()


def of_other_bits(tensors: dict[str, torch.Tensor]) -> None:
    key = next(key for key in tensors if key.endswith(".4-bit"))
    tensors[key.replace(".4-bit", ".2-bit")] = tensors.pop(key)


@pytest.mark.parametrize("damage", [without_scales, without_ranks, with_fewer_codes, of_other_bits])
def test_codes_without_what_gives_their_values_are_refused(
    damage: Callable[[dict[str, torch.Tensor]], None], tmp_path: Path
) -> None:
    folder = few(saved(tmp_path, on_a_basis=True), 4)
    tensors = load_file(folder / WEIGHTS)
    damage(tensors)
    save_file(tensors, folder / WEIGHTS)
    with pytest.raises(ArtifactError) as refused:
        read_adapter(folder)
    assert "\n" not in str(refused.value)


def test_values_beyond_every_scale_are_refused_and_those_below_are_zero() -> None:
    for bits in BITS:
        with pytest.raises(ConfigError, match="with 32 bits"):
            Core("0" * 32, torch.tensor([1e8, 1.0, 0.0, 0.0])).in_bits(bits, {"layer": 2})
        assert not Core("0" * 32, torch.full((4,), 1e-9)).in_bits(bits, {"layer": 2}).values.any()


def test_a_core_travels_in_a_link_as_its_folder_has_it(tmp_path: Path) -> None:
    """Rounded twice, one core of a hundred would be another."""
    folder = few(saved(tmp_path, on_a_basis=True), 4)
    content = base64.urlsafe_b64decode(core_fragment(folder, 4).removeprefix("#core=") + "==")
    packed = read_adapter(folder).core.packed
    assert packed is not None
    assert content[19:-4] == b"".join(X.numpy().tobytes() for X in (packed.ranks, packed.scales, packed.codes))


def test_codes_that_were_averaged_are_refused(tmp_path: Path) -> None:
    codes = load_file(few(saved(tmp_path, on_a_basis=True), 4) / WEIGHTS)
    mean = {name: (X.float() + X.float()) / 2 for name, X in codes.items()}
    with pytest.raises(ArtifactError, match="codes cannot be cast or averaged.*`frozencore merge`"):
        swap_core(adapted("fcca"), mean)


def test_training_goes_on_from_it(tmp_path: Path) -> None:
    small = few(saved(tmp_path, on_a_basis=True), 2)
    model = PeftModel.from_pretrained(tiny_qwen2(), small, is_trainable=True)
    model(**BATCHES[0]).loss.backward()
    assert all(layer.core("default").grad.any() for layer in cores_of(model))


def test_export_writes_it_and_says_its_bytes(command: Callable[..., tuple[int, str, str]], tmp_path: Path) -> None:
    whole, out = saved(tmp_path, on_a_basis=True), tmp_path / "small"
    status, said, _ = command("export", whole, "--to", "core", "--bits", 4, "--out", out)
    size = (out / WEIGHTS).stat().st_size
    assert (status, f"72 values of 4 bits, {size:,} bytes" in said) == (0, True), said
    assert load_file(out / WEIGHTS).keys() == load_file(few(whole, 4) / WEIGHTS).keys()
    assert "values of 4 bits" in command("inspect", out)[1]


@pytest.mark.parametrize(
    ("words", "rule"),
    [
        (("--to", "lora", "--bits", 4), "--to lora takes no --bits, but --bits 4 was given"),
        (("--to", "core", "--bits", 3), "--to core takes --bits 32, 8, 4, 2, but --bits 3 was given"),
    ],
)
def test_bits_are_of_cores_alone(
    words: tuple[object, ...], rule: str, command: Callable[..., tuple[int, str, str]], tmp_path: Path
) -> None:
    status, _, error = command("export", saved(tmp_path, on_a_basis=True), *words, "--out", tmp_path / "out")
    assert (status, rule in error) == (2, True), error


@pytest.mark.parametrize("source", ["a folder of as many bits", "a core in float32"])
@pytest.mark.parametrize("rank", [2, 3])  # 9 codes of 4 bits end within a byte
@pytest.mark.parametrize("bits", BITS)
def test_a_bank_of_few_bits_answers_as_one_of_the_dequantised_cores(
    bits: int, rank: int, source: str, tmp_path: Path
) -> None:
    whole = saved(tmp_path, on_a_basis=True, r=rank)
    model = PeftModel.from_pretrained(tiny_qwen2(), whole).eval()
    core = read_adapter(few(whole, bits)).core
    banks = CoreBank(model, 3), CoreBank(model, 3, bits=bits)
    banks[0].put("anna", core)
    banks[1].put("anna", few(whole, bits) if source.startswith("a folder") else get_core(model))
    assert torch.equal(banks[1].get("anna").values, core.values)
    outputs = []
    for bank in banks:
        with bank.rows(["anna", None, "anna", None]):
            outputs.append(logits(model))
    assert torch.equal(*outputs)
    stored = sum(X[0].nbytes for X in (*banks[1].packed.codes.values(), *banks[1].packed.scales.values()))
    assert stored == len(cores_of(model)) * (-(-rank * rank * bits // 8) + 2)
