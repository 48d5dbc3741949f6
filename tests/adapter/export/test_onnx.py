"""Cores in ONNX Runtime (extra ``onnx``): base rows bit for bit, tenants' tokens as CoreBank's, other bases refused."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import PeftModel
from torch import nn
from transformers import AutoModelForCausalLM, Phi3Config, Phi3ForCausalLM

from families import make
from frozencore import Core, CoreBank, load_basis, save_basis
from frozencore.adapter.core import CORE
from frozencore.adapter.export import onnx as exporting
from frozencore.adapter.folders import read_adapter
from frozencore.errors import ArtifactError, ConfigError, ModelError
from frozencore.tune.pocket import pocket_model_path
from tiny import adapted, tiny_llama, tiny_qwen2, train_at_random

ort = pytest.importorskip("onnxruntime", reason="pip install 'frozencore[onnx]'")
og = pytest.importorskip("onnxruntime_genai", reason="pip install 'frozencore[onnx]'")

pytestmark = pytest.mark.slow

TENANTS = ("anna", "ben", "cleo")
PROMPTS = [[random.Random(i).randrange(2, 800) for _ in range(3 + i % 9)] for i in range(20)]
NUM_TOKENS = 10


class Session:
    """A model in ONNX Runtime, with its cache; ``rows`` are prompts of one length."""

    def __init__(self, folder: Path) -> None:
        options = ort.SessionOptions()
        options.log_severity_level = 3  # that a core is no constant is meant
        self.session = ort.InferenceSession(folder / "model.onnx", options)
        self.inputs = {each.name: each.shape for each in self.session.get_inputs()}
        settings = json.loads((folder / "genai_config.json").read_text(encoding="utf-8"))
        self.head_size = settings["model"]["decoder"]["head_size"]
        self.outputs = [each.name for each in self.session.get_outputs()]

    def step(self, ids: Any, past: dict[str, Any], core: Any = None, adapter: Any = None) -> dict[str, Any]:
        """The outputs for new ids after a past.

        Args:
            core: Values under the core's name, as an input.
            adapter: A ``LoraAdapter`` that is active.
        """
        num_before = next(iter(past.values())).shape[2]
        feeds = {"input_ids": ids, "attention_mask": np.ones((len(ids), num_before + ids.shape[1]), np.int64), **past}
        if "position_ids" in self.inputs:
            feeds["position_ids"] = np.tile(np.arange(ids.shape[1]) + num_before, (len(ids), 1))
        options = ort.RunOptions()
        if adapter is not None:
            options.add_active_adapter(adapter)
        return dict(zip(self.outputs, self.session.run(None, feeds | (core or {}), options), strict=True))

    def greedy(self, rows: Sequence[Sequence[int]], **given: Any) -> tuple[list[list[int]], list[Any]]:
        """The greedy tokens of each row, and the logits of all steps."""
        ids, tokens, logits = np.array(rows), [list(row) for row in rows], []
        past = {
            name: np.zeros((len(rows), shape[1], 0, self.head_size), np.float32)
            for name, shape in self.inputs.items() if name.startswith("past_")
        }  # fmt: skip
        for _ in range(NUM_TOKENS):
            found = self.step(ids, past, **given)
            logits.append(found["logits"])
            ids = found["logits"][:, -1].argmax(-1)[:, None]
            past = {name: found[name.replace("past_key_values", "present")] for name in past}
            for row, new in zip(tokens, ids[:, 0], strict=True):
                row.append(int(new))
        return tokens, logits


@dataclass
class Case:
    """The pocket model with one basis and three tenants, in PyTorch and in ONNX Runtime."""

    folder: Path
    native: PeftModel
    plain: Session
    model: Session

    def core(self, tenant: str) -> Core:
        return read_adapter(self.folder / tenant).core

    def adapter(self, tenant: str) -> Any:
        opened = ort.LoraAdapter()
        opened.Load(str(self.folder / f"{tenant}.onnx_adapter"))
        return opened


def written(folder: Path, base: nn.Module, **options: object) -> PeftModel:
    """An adapter with a trained core and its ONNX model, in folders of those names."""
    base.save_pretrained(folder / "base")
    for file in pocket_model_path().glob("tokenizer*"):  # the builder wants one
        shutil.copy(file, folder / "base")
    model = adapted("random", model=base, trained=True, **options)
    model.save_pretrained(folder / "adapter")
    exporting.export_onnx(folder / "adapter", folder / "onnx", base=folder / "base")
    return model


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    folder, base = tmp_path_factory.mktemp("onnx"), pocket_model_path()
    native = adapted("random", model=AutoModelForCausalLM.from_pretrained(base), target_modules="all-linear", r=8)
    save_basis(native, folder / "basis")
    for seed, name in enumerate(TENANTS):
        train_at_random(native, seed=seed)
        native.save_pretrained(folder / name)
        exporting.export_onnx_adapter(folder / name, folder / f"{name}.onnx_adapter")
    exporting.export_onnx(folder / "basis", folder / "model", base=base)
    (folder / "plain").mkdir()
    exporting.build_base(base, folder / "plain", "fp32", folder, "pocket", fused=False)
    return Case(folder, native.eval(), Session(folder / "plain"), Session(folder / "model"))


def test_without_an_adapter_the_model_is_the_base_model_bit_for_bit(case: Case) -> None:
    for prompt in PROMPTS:
        tokens, logits = case.model.greedy([prompt])
        expected, its_logits = case.plain.greedy([prompt])
        assert tokens == expected
        assert all(np.array_equal(one, other) for one, other in zip(logits, its_logits, strict=True))


def banks_tokens(case: Case, names: Sequence[str | None], rows: Sequence[Sequence[int]]) -> list[list[int]]:
    bank = CoreBank(case.native, len(TENANTS))
    for name in TENANTS:
        bank.put(name, case.core(name))
    ids, settings = torch.tensor(rows), {"do_sample": False, "eos_token_id": None, "pad_token_id": 1}
    with bank.rows(names), torch.no_grad():
        found = case.native.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=NUM_TOKENS, **settings
        )
    return found.tolist()


def test_greedy_tokens_of_three_tenants_are_those_of_a_bank(case: Case) -> None:
    moved = 0
    for tenant in TENANTS:
        adapter = case.adapter(tenant)
        for prompt in PROMPTS:
            found, _ = case.model.greedy([prompt], adapter=adapter)
            assert found == banks_tokens(case, [tenant], [prompt])
            moved += found != case.plain.greedy([prompt])[0]
    assert moved > 50


def test_a_batch_takes_a_core_a_row(case: Case) -> None:
    rows = [PROMPTS[0], PROMPTS[9], PROMPTS[18], PROMPTS[0]]  # of one length
    cores = np.stack(
        [*(case.core(name).values.numpy() for name in TENANTS), np.zeros(len(case.core("anna").values), "f")]
    )
    name = f"{CORE}{load_basis(case.folder / 'basis').id}"
    found, _ = case.model.greedy(rows, core={name: cores})
    assert found == banks_tokens(case, [*TENANTS, None], rows)


def test_genai_gives_the_same_tokens(case: Case) -> None:
    model = og.Model(str(case.folder / "model"))
    adapters = og.Adapters(model)
    for tenant in TENANTS:
        adapters.load(str(case.folder / f"{tenant}.onnx_adapter"), tenant)
    for tenant in (*TENANTS, None):
        for prompt in PROMPTS[:4]:
            options = og.GeneratorParams(model)
            options.set_search_options(max_length=len(prompt) + NUM_TOKENS)
            generator = og.Generator(model, options)
            if tenant is not None:
                generator.set_active_adapter(adapters, tenant)
            generator.append_tokens(prompt)
            while not generator.is_done():
                generator.generate_next_token()
            (expected,), _ = case.model.greedy([prompt], adapter=None if tenant is None else case.adapter(tenant))
            found, end = generator.get_sequence(0).tolist(), case.native.config.eos_token_id
            assert found == expected[: len(found)]
            assert len(found) == len(prompt) + NUM_TOKENS or expected[len(found)] == end


def test_a_core_on_another_basis_is_refused_before_the_run(case: Case, tmp_path: Path) -> None:
    model = adapted("random", model=AutoModelForCausalLM.from_pretrained(pocket_model_path()), r=8, trained=True)
    model.save_pretrained(tmp_path / "other")
    exporting.export_onnx_adapter(tmp_path / "other", tmp_path / "other.onnx_adapter")
    other, opened = read_adapter(tmp_path / "other").core.basis_id, ort.LoraAdapter()
    opened.Load(str(tmp_path / "other.onnx_adapter"))
    with pytest.raises(Exception, match=f"Invalid input name: {CORE}{other}$"):
        case.model.greedy([PROMPTS[0]], adapter=opened)
    with pytest.raises(ArtifactError, match=other):
        exporting.export_onnx_adapter(tmp_path / "other", tmp_path / "file", model=case.folder / "model")
    assert not (tmp_path / "file").exists()


def test_a_thousand_adapters_opened_evicted_and_asked_in_any_order_answer_as_their_own_core(
    case: Case, tmp_path: Path
) -> None:
    from frozencore.adapter.export.onnx_graph import write_onnx_adapter

    drawn, basis = random.Random(0), load_basis(case.folder / "basis")
    size = sum(r * r for r in basis.ranks.values())
    for i in range(1000):
        values = 0.3 * torch.randn(size, generator=torch.Generator().manual_seed(i))
        write_onnx_adapter(Core(basis.id, values), tmp_path / f"{i}.onnx_adapter")
    opened: dict[int, Any] = {}
    for i in [*range(1000), *(drawn.randrange(1000) for _ in range(1000))]:
        if i not in opened:
            if len(opened) == 64:
                del opened[drawn.choice(list(opened))]
            opened[i] = ort.LoraAdapter()
            opened[i].Load(str(tmp_path / f"{i}.onnx_adapter"))
        if drawn.random() < 0.1:
            past = {
                n: np.zeros((1, s[1], 0, case.model.head_size), "f")
                for n, s in case.model.inputs.items()
                if n.startswith("past_")
            }
            ids = np.array([PROMPTS[i % 20]])
            values = 0.3 * torch.randn(size, generator=torch.Generator().manual_seed(i))
            expected = case.model.step(ids, past, core={f"{CORE}{basis.id}": values[None].numpy()})
            found = case.model.step(ids, past, adapter=opened[i])
            assert np.array_equal(found["logits"], expected["logits"])


def tiny_phi3() -> nn.Module:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2, "num_key_value_heads": 2}
    torch.manual_seed(0)
    return Phi3ForCausalLM(
        Phi3Config(vocab_size=40, num_hidden_layers=1, pad_token_id=0, initializer_range=0.2, **sizes)
    )


FAMILIES = {
    "llama": (tiny_llama, {"target_modules": "all-linear"}),
    "qwen2, ragged": (tiny_qwen2, {"rank_pattern": {"q_proj": 2, "v_proj": 5, "k_proj": 0}, "alpha": 7.0}),
    "qwen2, runs of equal ranks": (
        tiny_qwen2,
        {"target_modules": "all-linear", "rank_pattern": {"gate_proj": 2, "up_proj": 2, "v_proj": 5}},
    ),
    "phi3, q, k and v in one": (tiny_phi3, {"target_modules": ["qkv_proj", "o_proj"]}),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_families_compute_what_pytorch_computes(family: str, tmp_path: Path) -> None:
    base, options = FAMILIES[family]
    native = written(tmp_path, base(), **options).eval()
    session = Session(tmp_path / "onnx")
    core = read_adapter(tmp_path / "adapter").core
    rows, parts = [[3, 5, 8, 2]] * 2, torch.stack([core.values, torch.zeros_like(core.values)])
    _, logits = session.greedy(rows, core={f"{CORE}{core.basis_id}": parts.numpy()})
    with torch.no_grad():
        expected = native(torch.tensor(rows[:1])).logits
        with native.disable_adapter():
            plain = native(torch.tensor(rows[:1])).logits
    torch.testing.assert_close(torch.from_numpy(logits[0]), torch.cat([expected, plain]), rtol=1e-4, atol=1e-4)
    assert (expected - plain).abs().max() > 1e-2


def test_a_core_may_be_float16_and_the_base_weights_8_bits(case: Case, tmp_path: Path) -> None:
    half = torch.float16
    exporting.export_onnx(case.folder / "basis", tmp_path / "m", base=pocket_model_path(), bits=8, dtype=half)
    with pytest.raises(ConfigError, match="takes cores of torch.float16"):
        exporting.export_onnx_adapter(case.folder / "anna", tmp_path / "x", model=tmp_path / "m", dtype=torch.float32)
    exporting.export_onnx_adapter(case.folder / "anna", tmp_path / "anna.onnx_adapter", model=tmp_path / "m")
    opened = ort.LoraAdapter()
    opened.Load(str(tmp_path / "anna.onnx_adapter"))
    model, weights = Session(tmp_path / "m"), (tmp_path / "m" / "model.onnx.data").stat().st_size
    assert weights < 0.5 * (case.folder / "model" / "model.onnx.data").stat().st_size
    moved = model.greedy([PROMPTS[1]], adapter=opened)[1][0] - model.greedy([PROMPTS[1]])[1][0]
    expected = (
        case.model.greedy([PROMPTS[1]], adapter=case.adapter("anna"))[1][0] - case.model.greedy([PROMPTS[1]])[1][0]
    )
    assert np.linalg.norm(moved - expected) < 0.3 * np.linalg.norm(expected)


def test_what_cannot_be_written_is_refused_in_one_line_and_leaves_nothing(
    case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match="float32 or float16"):
        exporting.export_onnx_adapter(case.folder / "anna", tmp_path / "x", dtype=torch.bfloat16)
    with pytest.raises(ConfigError, match="8 or 4 bits.*bits=2"):
        exporting.export_onnx(case.folder / "anna", tmp_path / "x", bits=2)
    with pytest.raises(ArtifactError, match="has no model.onnx"):
        exporting.export_onnx_adapter(case.folder / "anna", tmp_path / "x", model=tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr(exporting, "find_spec", lambda _: None)
        with pytest.raises(ConfigError, match="not installed"):
            exporting.export_onnx_adapter(case.folder / "anna", tmp_path / "x")
    assert not list(tmp_path.iterdir())
    unknown = make("bloom")
    unknown.save_pretrained(tmp_path / "base")
    adapted("random", model=unknown, target_modules="all-linear", trained=True).save_pretrained(tmp_path / "adapter")
    with pytest.raises(ModelError, match="builder of onnxruntime-genai"):
        exporting.export_onnx(tmp_path / "adapter", tmp_path / "onnx", base=tmp_path / "base")
    assert not (tmp_path / "onnx").exists()
