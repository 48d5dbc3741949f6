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
from frozencore import CoreBank, swap_core
from frozencore.errors import ArtifactError
from tiny import tiny_qwen2

PROMPT = {key: BATCHES[0][key] for key in ("input_ids", "attention_mask")}


def one_block() -> nn.Module:
    return tiny_qwen2(num_hidden_layers=1, layer_types=None)


@pytest.fixture(autouse=True)
def _without_old_graphs() -> None:
    torch._dynamo.reset()


def logits_and_gradients(model: nn.Module, call: Callable[..., Any]) -> list[Tensor]:
    model.zero_grad()
    output = call(**BATCHES[0])
    output.loss.backward()
    return [output.logits.detach(), *(layer.core("default").grad.clone() for layer in cores_of(model))]


@pytest.mark.parametrize(
    ("checkpointed", "backend"),
    [
        (False, "aot_eager"),
        pytest.param(True, "aot_eager", marks=pytest.mark.slow),
        pytest.param(False, "inductor", marks=pytest.mark.slow),  # the C++ compiler takes a minute on one core
    ],
)
def test_a_model_in_training_is_one_graph_with_eagers_logits_and_gradients(checkpointed: bool, backend: str) -> None:
    model = adapted("fcca", model=one_block(), trained=True)
    model.add_adapter("other", model.peft_config["default"])
    expected = logits_and_gradients(model.train(), model)
    if checkpointed:
        model.config.use_cache = False  # transformers' warning about it is a graph break of its own
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.disable_input_require_grads()  # only reentrant checkpointing needs it, and its hook is a graph break too
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    for one, other in zip(logits_and_gradients(model, compiled), expected, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-4)
        assert one.any()


@pytest.mark.parametrize("fullgraph", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_model_without_a_basis_says_so_when_it_is_compiled(fullgraph: bool) -> None:
    model = adapted("fcca", model=one_block(), calibrated=False).train()
    with pytest.raises(Exception, match=r"Call frozencore.calibrate\(model, dataloader\) first"):
        torch.compile(model, fullgraph=fullgraph, backend="aot_eager")(**BATCHES[0])


@torch.no_grad()
def test_a_swapped_core_and_other_tenants_of_a_bank_need_no_new_graph() -> None:
    model, counter = adapted("fcca", model=one_block(), trained=True), CompileCounter()
    cores = {layer.name: layer.core("default").detach().clone() for layer in cores_of(model)}
    compiled = torch.compile(model, fullgraph=True, backend=counter)
    for scale in (1, 2):
        swap_core(model, {name: scale * R for name, R in cores.items()})
        assert torch.equal(compiled(**PROMPT).logits, model(**PROMPT).logits)
    assert counter.frame_count == 1
    bank = CoreBank(model, 3)
    bank.put("a", cores)
    for names, scale in ((["a", None, "b", "a"], 2), (["b", "b", None, "a"], -1)):
        bank.put("b", {name: scale * R for name, R in cores.items()})
        with bank.rows(names):
            torch.testing.assert_close(compiled(**PROMPT).logits, model(**PROMPT).logits, atol=1e-6, rtol=1e-5)
    assert counter.frame_count == 2


def test_an_adapter_of_a_compiled_base_reloads_there_and_says_so_on_a_plain_one(tmp_path: Path) -> None:
    model = adapted("random", model=torch.compile(one_block(), backend="eager"), trained=True)
    model.save_pretrained(str(tmp_path))
    compiled = PeftModel.from_pretrained(torch.compile(one_block(), backend="eager"), str(tmp_path)).eval()
    assert torch.equal(compiled(**PROMPT).logits, model(**PROMPT).logits)
    with pytest.raises(ArtifactError, match="was added to a compiled model, there or here"):
        PeftModel.from_pretrained(one_block(), str(tmp_path))
