"""``torch.compile`` of a model with a frozen core: one graph, and eager's numbers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter

from adapted import BATCHES, adapted, cores_of
from frozencore import CoreBank, frozen_core_layers, swap_core
from tiny import tiny_qwen2


@pytest.fixture(autouse=True)
def _without_old_graphs() -> None:
    torch._dynamo.reset()


def logits_and_gradients(model: nn.Module, call: Callable[..., Any]) -> list[Tensor]:
    model.zero_grad()
    output = call(**BATCHES[0])
    output.loss.backward()
    cores = [layer.factors("default")[2] for layer in cores_of(model)]
    return [output.logits.detach(), *(core.grad.clone() for core in cores)]


def saved_and_reloaded(folder: Path) -> PeftModel:
    adapted("fcca", trained=True).save_pretrained(str(folder))
    return PeftModel.from_pretrained(tiny_qwen2(), folder, is_trainable=True)


MODELS: dict[str, Callable[[Path], PeftModel]] = {
    "calibrated": lambda _: adapted("fcca", trained=True),
    "reloaded": saved_and_reloaded,
    "two adapters": lambda folder: with_another(adapted("fcca", trained=True)),
}


def with_another(model: PeftModel) -> PeftModel:
    model.add_adapter("other", model.peft_config["default"])
    return model


@pytest.mark.parametrize(
    "kind", ["calibrated", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("two adapters", "reloaded"))]
)
def test_a_model_in_training_is_one_graph_with_eagers_logits_and_gradients(kind: str, tmp_path: Path) -> None:
    model = MODELS[kind](tmp_path).train()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    for one, other in zip(logits_and_gradients(model, compiled), logits_and_gradients(model, model), strict=True):
        torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-5)
        assert one.any()


@pytest.mark.slow
def test_gradient_checkpointing_stays_one_graph() -> None:
    model = adapted("fcca", trained=True).train()
    expected = logits_and_gradients(model, model)
    model.config.use_cache = False  # transformers' warning about it is a graph break of its own
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.disable_input_require_grads()  # only reentrant checkpointing needs it, and its hook is a graph break too
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    for one, other in zip(logits_and_gradients(model, compiled), expected, strict=True):
        torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("fullgraph", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_model_without_a_basis_says_so_when_it_is_compiled(fullgraph: bool) -> None:
    model = adapted("fcca", calibrated=False).train()
    with pytest.raises(Exception, match=r"Call frozencore.calibrate\(model, dataloader\) first"):
        torch.compile(model, fullgraph=fullgraph, backend="aot_eager")(**BATCHES[0])


def test_a_swapped_core_needs_no_new_graph(tmp_path: Path) -> None:
    adapted("fcca", trained=True).save_pretrained(str(tmp_path))
    model = adapted("fcca")
    graphs: list[object] = []

    def counting(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(model, fullgraph=True, backend=counting)
    with torch.no_grad():
        before = compiled(input_ids=BATCHES[0]["input_ids"]).logits
        swap_core(model, tmp_path)
        after = compiled(input_ids=BATCHES[0]["input_ids"]).logits
    assert len(graphs) == 1
    assert not torch.equal(before, after)
    assert torch.equal(after, model(input_ids=BATCHES[0]["input_ids"]).logits)


@pytest.mark.slow  # the C++ compiler takes a minute on one core
def test_inductor_gives_eagers_numbers_to_rounding(tmp_path: Path) -> None:
    model = saved_and_reloaded(tmp_path).train()
    compiled = torch.compile(model, fullgraph=True)
    for one, other in zip(logits_and_gradients(model, compiled), logits_and_gradients(model, model), strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-4)


def test_other_tenants_of_a_bank_need_no_new_graph() -> None:
    model = adapted("fcca", trained=True).eval()
    trained = {
        name: layer.factors("default")[2].detach().clone()
        for name, layer in frozen_core_layers(model, "default").items()
    }
    bank = CoreBank(model, 3)
    bank.put("a", trained)
    bank.put("b", {name: 2 * R for name, R in trained.items()})
    counter = CompileCounter()
    compiled = torch.compile(model, fullgraph=True, backend=counter)
    batch = {key: BATCHES[0][key] for key in ("input_ids", "attention_mask")}
    for names in (["a", None, "b", "a"], ["b", "b", None, "a"]):
        with torch.no_grad(), bank.rows(names):
            torch.testing.assert_close(compiled(**batch).logits, model(**batch).logits, atol=1e-6, rtol=1e-5)
        bank.put("b", {name: -R for name, R in trained.items()})
    assert counter.frame_count == 1
