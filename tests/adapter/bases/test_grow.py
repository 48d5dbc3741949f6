"""Widened bases: cores of the narrower basis mean what they meant, and new groups find what they want."""

from __future__ import annotations

import json
import shutil
from copy import deepcopy
from pathlib import Path
from statistics import fmean

import pytest
import torch
from peft import PeftModel, get_peft_model, get_peft_model_state_dict
from torch import nn
from transformers import AutoModelForCausalLM

from adapted import BATCHES, adapted, cores_of, logits, train_at_random
from frozencore import (
    CoreBank,
    FrozenCoreConfig,
    calibrate,
    collect_moments,
    export_basis_model,
    export_tenant,
    get_bases,
    grow_basis,
    load_basis,
    pack_adapter,
    save_basis,
    swap_core,
    unpack_adapter,
)
from frozencore.adapter.saved.tensors import by_layer
from frozencore.adapter.swap import filled_up
from frozencore.errors import ArtifactError, CalibrationError, ConfigError
from frozencore.files.fingerprint import fingerprint_options
from frozencore.maths.basis import known_basis
from frozencore.maths.capture import CAPTURE_NEEDS, share_held
from tiny import batches_of, draw_examples, tiny_qwen2

NEW = {name: batches_of(draw_examples(6, seed=seed), 3) for seed, name in enumerate(("cleo", "dora"), start=7)}
ONE = {"cleo": NEW["cleo"]}


class Shop:
    """A basis with an adapter "anna" on it, whose logits are known, and the basis widened by 2, with "cleo" on it."""

    def __init__(self, folder: Path, **options: object) -> None:
        self.folder = folder
        model = adapted(**{"alpha": "auto", "coordinates": "fisher", **options})  # type: ignore[arg-type]
        self.narrow = save_basis(model, folder / "basis")
        self.bits = get_bases(model)
        train_at_random(model)
        model.save_pretrained(folder / "anna")
        self.anna = logits(model)
        self.state = {key: X.clone() for key, X in get_peft_model_state_dict(model).items()}
        self.by_layer = {layer.name: layer.core("default").detach().clone() for layer in cores_of(model)}
        self.model = model
        self.found = grow_basis(model, ONE, by=2, progress=False)
        self.kept = logits(model)
        self.wide = save_basis(model, folder / "wide" / "basis", calibrated_on="and cleo")
        train_at_random(model, seed=1)
        model.save_pretrained(folder / "wide" / "cleo")
        self.cleo = logits(model)


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Shop:
    return Shop(tmp_path_factory.mktemp("shop"))


def base() -> nn.Module:
    return tiny_qwen2().float()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "options",
    [{}, {"coordinates": "qr", "alpha": None}, {"coordinates": "qr", "alpha": 5.0}, {"constructor": "rawgrad"}],
)
def test_an_old_core_on_the_widened_basis_gives_its_old_bits(
    options: dict[str, object], dtype: torch.dtype, tmp_path: Path
) -> None:
    shop = Shop(tmp_path, dtype=dtype, **options)
    shutil.rmtree(tmp_path / "basis")
    wide = tmp_path / "wide" / "basis"
    loaded = PeftModel.from_pretrained(tiny_qwen2().to(dtype), tmp_path / "anna", basis=str(wide)).eval()
    assert torch.equal(logits(loaded), shop.anna)
    older = load_basis(wide).older
    assert [one.identity for one in older] == [shop.narrow]
    now = load_basis(wide).tensors
    assert now.keys() == shop.bits.keys()
    for name, before in shop.bits.items():
        assert now[name].shape[1] == before.shape[1] + 2
        assert torch.equal(now[name][:, : before.shape[1]], before)
    assert load_basis(wide).scales == older[0].scales
    torch.testing.assert_close(shop.kept, shop.anna, rtol=0.02, atol=1e-4 if dtype == torch.float32 else 0.05)


def test_a_core_that_is_filled_up_is_the_same_update_where_arithmetic_is_exact() -> None:
    """P' R' Q'ᵀ of whole numbers: no order of summing can hide a misplaced entry."""
    draw = torch.Generator().manual_seed(0)
    own, ranks, flat = {"a": 3, "b": 2}, {"a": 5, "b": 2}, torch.randint(-4, 5, (13,), generator=draw).float()
    before, after = by_layer(flat, own), by_layer(filled_up(flat, own, ranks), ranks)
    for name, r in ranks.items():
        P, Q = (torch.randint(-4, 5, (size, r), generator=draw).float() for size in (7, 6))
        assert torch.equal(P @ after[name] @ Q.mT, P[:, : own[name]] @ before[name] @ Q[:, : own[name]].mT)


def test_a_bank_on_the_widened_basis_serves_both_widths_and_old_cores_to_the_bit(shop: Shop) -> None:
    train_at_random(shop.model, seed=1)
    old = PeftModel.from_pretrained(base(), shop.folder / "anna").eval()
    banks = {"old": CoreBank(old, 2), "new": CoreBank(shop.model, 4)}
    banks["old"].put("anna", shop.folder / "anna")
    for name, source in (
        ("anna", shop.folder / "anna"),
        ("cleo", shop.folder / "wide" / "cleo"),
        ("state", shop.state),
    ):
        banks["new"].put(name, source)
    banks["new"].put("by layer", shop.by_layer)
    with banks["old"].rows(["anna", None, "anna", None]):
        before = logits(old)
    with banks["new"].rows(["anna", None, "state", "cleo"]):
        now = logits(shop.model)
    assert torch.equal(now[:3], before[:3])
    torch.testing.assert_close(now[3], shop.cleo[3], rtol=1e-4, atol=1e-4)
    assert all(torch.equal(R[:3, :3], shop.by_layer[name]) for name, R in banks["new"].get("by layer").items())
    swap_core(shop.model, shop.folder / "anna")
    torch.testing.assert_close(logits(shop.model), shop.anna, rtol=1e-4, atol=1e-4)


def test_the_new_directions_hold_far_more_of_the_new_group_than_random_ones(shop: Shop) -> None:
    wide, told, model = load_basis(shop.folder / "wide" / "basis"), shop.found.shares["cleo"], base()
    layers = {name: model.get_submodule(name) for name in wide.layers}
    draw, shares = torch.Generator().manual_seed(0), []
    for name, moments in collect_moments(model, NEW["cleo"], layers, needs=CAPTURE_NEEDS).items():
        P, Q = wide.layers[name]
        narrow = P[:, :3], Q[:, :3]
        at_random = [torch.cat([X, torch.randn(len(X), 2, generator=draw)], dim=1) for X in narrow]
        shares.append([share_held(deepcopy(moments), known_basis(*X)).held for X in ((P, Q), at_random, narrow)])
    held, with_random, before = (fmean(each) for each in zip(*shares, strict=True))
    assert held == pytest.approx(told.held, rel=1e-3)
    assert before < with_random < 0.8 * held
    assert held < told.own <= 1


def test_it_grows_again_and_every_version_is_known(shop: Shop, tmp_path: Path) -> None:
    model = get_peft_model(base(), FrozenCoreConfig(basis=str(shop.folder / "wide" / "basis"))).eval()
    assert {layer.frozencore_scale["default"] for layer in cores_of(model)} == {16 / 3}
    grow_basis(model, NEW, by=1, progress=False)
    save_basis(model, tmp_path / "basis")
    widest = load_basis(tmp_path / "basis")
    assert [one.identity for one in widest.older] == [shop.wide, shop.narrow]
    assert set(widest.scales.values()) == {16 / 3}
    again = load_basis(tmp_path / "basis")
    assert save_basis(model, tmp_path / "copy") == again.identity
    for name, expected in (("anna", shop.anna), ("wide/cleo", shop.cleo)):
        loaded = PeftModel.from_pretrained(base(), shop.folder / name, basis=str(tmp_path / "basis")).eval()
        assert torch.equal(logits(loaded), expected)
    bank, wide = CoreBank(model, 2), PeftModel.from_pretrained(base(), shop.folder / "wide" / "cleo").eval()
    bank.put("anna", shop.folder / "anna")
    bank.put("cleo", shop.folder / "wide" / "cleo")
    before = CoreBank(wide, 2)
    before.put("anna", shop.folder / "anna")
    before.put("cleo", shop.folder / "wide" / "cleo")
    seen = []
    for each, served in ((before, wide), (bank, model)):
        with each.rows(["anna", "cleo", None, "cleo"]):
            seen.append(logits(served))
    assert torch.equal(*seen)


def test_an_old_adapter_is_unpacked_from_the_widened_basis_and_packed_beside_it(shop: Shop, tmp_path: Path) -> None:
    wide = shop.folder / "wide" / "basis"
    unpack_adapter(shop.folder / "anna", tmp_path / "whole", basis=wide)
    pack_adapter(tmp_path / "whole", wide, tmp_path / "packed")
    assert json.loads((tmp_path / "packed" / "adapter_config.json").read_text())["basis_id"] == shop.narrow
    for name in ("whole", "packed"):
        assert torch.equal(logits(PeftModel.from_pretrained(base(), tmp_path / name).eval()), shop.anna)
    bank = CoreBank(shop.model, 1)
    bank.put("anna", tmp_path / "whole")  # its own P and Q are the first columns
    unpack_adapter(shop.folder / "wide" / "cleo", tmp_path / "cleo")
    assert torch.equal(logits(PeftModel.from_pretrained(base(), tmp_path / "cleo").eval()), shop.cleo)


def test_a_basis_model_serves_tenants_of_both_widths(shop: Shop, tmp_path: Path) -> None:
    base().save_pretrained(tmp_path / "base")
    wide = shop.folder / "wide"
    export_basis_model(wide / "basis", tmp_path / "model", base=tmp_path / "base")
    for folder, expected in ((shop.folder / "anna", shop.anna), (wide / "cleo", shop.cleo)):
        tenant = tmp_path / f"tenant-{folder.name}"
        export_tenant(folder, tenant, basis_model=tmp_path / "model")
        model = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
        served = logits(PeftModel.from_pretrained(model, tenant).eval())
        torch.testing.assert_close(served, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.usefixtures("as_a_user")
def test_a_foreign_basis_and_a_forged_chain_are_refused_in_one_line(shop: Shop, tmp_path: Path) -> None:
    shutil.copytree(shop.folder / "anna", tmp_path / "a" / "b" / "anna")
    other = adapted(alpha="auto", coordinates="fisher", constructor="rawgrad")
    save_basis(other, tmp_path / "other")
    grow_basis(other, ONE, by=2, progress=False)
    save_basis(other, tmp_path / "foreign")
    with pytest.raises(ArtifactError, match="on another basis they mean nothing"):
        PeftModel.from_pretrained(base(), tmp_path / "a" / "b" / "anna", basis=str(tmp_path / "foreign"))
    with pytest.raises(ArtifactError, match="works on its own basis only|is not beside it|they mean nothing"):
        CoreBank(other, 1).put("anna", shop.folder / "anna")
    header = json.loads((tmp_path / "foreign" / "basis.json").read_text())
    header["grown_from"]["identity"] = shop.narrow  # says that anna's basis is in it
    header["identity"] = fingerprint_options({key: value for key, value in header.items() if key != "identity"})
    (tmp_path / "foreign" / "basis.json").write_text(json.dumps(header))
    with pytest.raises(ArtifactError, match="is damaged") as caught:
        PeftModel.from_pretrained(base(), tmp_path / "a" / "b" / "anna", basis=str(tmp_path / "foreign"))
    assert "\n" not in str(caught.value)


@pytest.mark.usefixtures("as_a_user")
def test_a_bank_whose_basis_was_widened_meanwhile_is_refused_in_one_line(tmp_path: Path) -> None:
    shop_model = adapted()
    train_at_random(shop_model)
    bank = CoreBank(shop_model, 1)
    own = {layer.name: layer.core("default").detach().clone() for layer in cores_of(shop_model)}
    bank.put("anna", own)
    grow_basis(shop_model, ONE, by=1, progress=False)
    for refused in (lambda: bank.put("ben", own), lambda: bank.rows(["anna"] * 4).__enter__()):
        with pytest.raises(ConfigError, match=r"was set, widened or moved since. Make a new CoreBank") as caught:
            refused()
        assert "\n" not in str(caught.value)


@pytest.mark.usefixtures("as_a_user")
@pytest.mark.parametrize(
    ("options", "by", "error", "message"),
    [
        ({}, 0, ConfigError, "grows by one direction at least, but by=0"),
        ({}, True, ConfigError, "by=True"),
        ({}, 99, ConfigError, r"at most min\(m, n\) directions, but layer .* and 3 \+ 99 were asked for"),
        ({"constructor": "eva"}, 1, ConfigError, "'eva' here reads others. Use fcca"),
        ({"coordinates": "raw"}, 1, ConfigError, "grows in the coordinates fisher, qr, but this one has 'raw'"),
        ({"rank_pattern": {"q_proj": 2}}, 1, ConfigError, "has ranks of its own in some"),
        ({"calibrated": False}, 1, CalibrationError, "none. Call frozencore.calibrate"),
    ],
)
def test_what_cannot_grow_is_refused_in_one_line_and_stays(
    options: dict[str, object], by: int, error: type[Exception], message: str
) -> None:
    model = adapted(**options)  # type: ignore[arg-type]
    before = [X.clone() for layer in cores_of(model) for X in layer.factors("default")]
    with pytest.raises(error, match=message) as caught:
        grow_basis(model, ONE, by=by, progress=False)
    assert "\n" not in str(caught.value)
    after = [X for layer in cores_of(model) for X in layer.factors("default")]
    assert all(torch.equal(X, Y) for X, Y in zip(before, after, strict=True))


def test_an_adapter_that_was_widened_trains_and_a_second_calibration_starts_anew() -> None:
    model = adapted(trained=True)
    grow_basis(model, ONE, by=1, progress=False)
    model.train()(**BATCHES[0]).loss.backward()
    gradients = [layer.core("default").grad for layer in cores_of(model)]
    assert all(g is not None and bool(g[3:].any()) and bool(g[:, 3:].any()) for g in gradients)
    calibrate(model, BATCHES, reset=True, progress=False)
    assert model.peft_config["default"].grown_from() is None
