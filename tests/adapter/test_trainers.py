"""The user's own ``transformers.Trainer`` with a frozen core: what LoRA users do with it, without our lab."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerate import FullyShardedDataParallelPlugin
from accelerate.utils.fsdp_utils import fsdp2_prepare_model
from opacus import PrivacyEngine
from opacus.grad_sample import wrap_model
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset
from transformers import Trainer, TrainerCallback, TrainingArguments

from adapted import EXAMPLES, adapted, cores_of, logits
from forked import as_ranks, ended
from frozencore import FrozenCoreConfig, calibrate, get_bases, set_bases
from frozencore.errors import CalibrationError
from tiny import batch_of, tiny_gpt2, tiny_qwen2

STEPS = 6


class StopAt(TrainerCallback):
    """Ends the process, as far as the Trainer can see, at the start of a step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == self.step:
            raise KeyboardInterrupt


def trainer_of(
    model: nn.Module, folder: Path, *, callbacks: list[TrainerCallback] | None = None, **changes: Any
) -> Trainer:
    settings = {
        "max_steps": STEPS, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "learning_rate": 5e-3,
        "save_steps": 2, "logging_steps": 1, "report_to": "none", "disable_tqdm": True, "use_cpu": True,
        "remove_unused_columns": False,
    }  # fmt: skip
    arguments = TrainingArguments(str(folder), **{**settings, **changes})
    return Trainer(
        model, arguments, train_dataset=EXAMPLES, eval_dataset=EXAMPLES, data_collator=batch_of, callbacks=callbacks
    )


def losses_of(trainer: Trainer) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def factors_of(model: nn.Module) -> list[Tensor]:
    return [factor.detach().clone() for layer in cores_of(model) for factor in layer.factors("default")]


def all_equal(one: list[Tensor], other: list[Tensor]) -> bool:
    return len(one) == len(other) and all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def with_dropout(*, calibrated: bool = True) -> PeftModel:
    """GPT-2 with dropout 0.3, so that a resumed run must also find the random state."""
    return adapted("fcca", model=tiny_gpt2(), target_modules=["c_attn", "c_proj"], calibrated=calibrated)


@pytest.mark.parametrize("calibrated", [True, False], ids=["calibrated-again", "not-calibrated"])
def test_a_resumed_run_is_bit_equal_to_an_uninterrupted_one(calibrated: bool, tmp_path: Path) -> None:
    whole = trainer_of(with_dropout(), tmp_path / "whole")
    whole.train()

    with pytest.raises(KeyboardInterrupt):
        trainer_of(with_dropout(), tmp_path / "cut", callbacks=[StopAt(5)]).train()
    resumed = trainer_of(with_dropout(calibrated=calibrated), tmp_path / "cut")  # the checkpoint holds the bases
    resumed.train(resume_from_checkpoint=True)
    assert resumed.state.global_step == STEPS
    assert losses_of(resumed) == losses_of(whole)
    assert all_equal(factors_of(resumed.model), factors_of(whole.model))


def test_only_the_cores_change_and_the_loss_falls(tmp_path: Path) -> None:
    model = adapted("fcca")
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    trainer = trainer_of(model, tmp_path, max_steps=30, learning_rate=2e-2, save_strategy="no")
    trainer.train()
    changed = {name for name, tensor in model.state_dict().items() if not torch.equal(tensor, before[name])}
    assert changed == {name for name, p in model.named_parameters() if p.requires_grad}
    assert all("frozencore_R" in name for name in changed)
    losses = losses_of(trainer)
    assert sum(losses[-5:]) < sum(losses[:5])
    assert all(math.isfinite(loss) for loss in losses)


def test_what_the_trainer_saves_reloads_equal(tmp_path: Path) -> None:
    trainer = trainer_of(adapted("fcca"), tmp_path)
    trainer.train()
    trainer.save_model(str(tmp_path / "final"))
    expected = logits(trainer.model.eval())
    assert not torch.equal(expected, logits(tiny_qwen2()))
    for folder in ("final", f"checkpoint-{STEPS}"):
        assert torch.equal(logits(PeftModel.from_pretrained(tiny_qwen2(), tmp_path / folder)), expected)


def test_the_best_checkpoint_comes_back_at_the_end(tmp_path: Path) -> None:
    model = adapted("fcca")
    trainer = trainer_of(
        model, tmp_path, eval_strategy="steps", eval_steps=2, load_best_model_at_end=True, learning_rate=50.0,
        max_grad_norm=1e9, lr_scheduler_type="constant",
    )  # fmt: skip
    trainer.train()
    assert not trainer.state.best_model_checkpoint.endswith(str(STEPS))
    best = PeftModel.from_pretrained(tiny_qwen2(), trainer.state.best_model_checkpoint)
    assert torch.equal(logits(model.eval()), logits(best))


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_gradient_checkpointing_trains_the_same_cores(use_reentrant: bool, tmp_path: Path) -> None:
    plain, checkpointed = adapted("fcca"), adapted("fcca")
    trainer_of(plain, tmp_path, save_strategy="no").train()
    trainer_of(
        checkpointed, tmp_path, save_strategy="no", gradient_checkpointing=True,
        gradient_checkpointing_kwargs={"use_reentrant": use_reentrant},
    ).train()  # fmt: skip
    assert all_equal(factors_of(checkpointed), factors_of(plain))
    assert any(layer.factors("default")[2].any() for layer in cores_of(plain))


CALIBRATIONS: dict[str, Callable[[PeftModel, Trainer], object]] = {
    "whole loader": lambda model, trainer: calibrate(model, trainer.get_train_dataloader(), progress=False),
    "part of the loader": lambda model, trainer: calibrate(
        model, trainer.get_train_dataloader(), num_examples=6, progress=False
    ),
    "dataset": lambda model, trainer: calibrate(
        model, trainer.train_dataset, collator=trainer.data_collator, progress=False
    ),
}


@pytest.mark.parametrize("way", CALIBRATIONS)
def test_calibrating_on_the_trainers_own_data_changes_nothing_but_the_bases(way: str, tmp_path: Path) -> None:
    first = get_peft_model(tiny_qwen2(), FrozenCoreConfig(r=3))
    trainer = trainer_of(first, tmp_path, save_strategy="no")
    CALIBRATIONS[way](first, trainer)
    bases = get_bases(first)
    trainer.train()

    second = get_peft_model(tiny_qwen2(), FrozenCoreConfig(r=3))
    set_bases(second, bases)
    trainer_of(second, tmp_path, save_strategy="no").train()
    assert all_equal(factors_of(first), factors_of(second))


@pytest.mark.filterwarnings("error:.*never calibrated")
def test_training_without_calibration_stops_at_the_first_step_and_saves_nothing(tmp_path: Path) -> None:
    with pytest.raises(CalibrationError, match=r"Call frozencore.calibrate\(model, dataloader\) first"):
        trainer_of(adapted("fcca", calibrated=False), tmp_path, save_steps=1).train()
    assert not list(tmp_path.glob("checkpoint-*"))


class LastToken(nn.Module):
    """The logits of a batch's last tokens, from tensors by position, as Opacus calls a model."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        return self.model(input_ids=input_ids, attention_mask=attention_mask).logits[:, -1]


def rows_for_opacus() -> tuple[tuple[Tensor, Tensor], Tensor]:
    batch = batch_of(EXAMPLES[:4])
    return (batch["input_ids"], batch["attention_mask"]), batch["input_ids"][:, 0]


def gradient_of_each_row(model: nn.Module) -> list[Tensor]:
    (ids, mask), labels = rows_for_opacus()
    trained = [p for p in model.parameters() if p.requires_grad]
    rows = [
        torch.autograd.grad(cross_entropy(model(ids[i : i + 1], mask[i : i + 1]), labels[i : i + 1]), trained)
        for i in range(len(ids))
    ]
    return [torch.stack(each) for each in zip(*rows, strict=True)]


@pytest.mark.parametrize("mode", ["hooks", "functorch"])
def test_opacus_gives_each_rows_gradient_of_a_core(mode: str) -> None:
    model = LastToken(adapted("fcca", trained=True).train())
    expected = gradient_of_each_row(model)
    inputs, labels = rows_for_opacus()
    wrapped = wrap_model(model, grad_sample_mode=mode)
    cross_entropy(wrapped(*inputs), labels).backward()
    found = [p.grad_sample for p in wrapped.parameters() if p.requires_grad]
    for mine, right in zip(found, expected, strict=True):
        assert float((mine - right).norm() / right.norm()) < 1e-5


@pytest.mark.parametrize("mode", ["hooks", "ghost"])
@pytest.mark.parametrize("method", ["lora", "core"])
def test_opacus_makes_a_step_of_clipped_rows(method: str, mode: str) -> None:
    """Without noise, the mean of the rows' gradients, each at most 0.1 long over all trained values."""
    lora = get_peft_model(tiny_qwen2(), LoraConfig(r=3, init_lora_weights=False)) if method == "lora" else None
    model = LastToken((lora or adapted("fcca", trained=True)).train())
    rows = gradient_of_each_row(model)
    lengths = torch.stack([each.flatten(1).square().sum(1) for each in rows]).sum(0).sqrt()
    inputs, labels = rows_for_opacus()
    data = DataLoader(TensorDataset(*inputs, labels), batch_size=len(labels))
    trained = [p for p in model.parameters() if p.requires_grad]
    wrapped, optimizer, *rest, _ = PrivacyEngine().make_private(
        module=model, optimizer=torch.optim.SGD(trained, lr=1.0), data_loader=data, noise_multiplier=0.0,
        max_grad_norm=0.1, poisson_sampling=False, grad_sample_mode=mode,
        **({"criterion": nn.CrossEntropyLoss()} if mode == "ghost" else {}),
    )  # fmt: skip
    before = [p.detach().clone() for p in trained]
    (rest[0] if rest else cross_entropy)(wrapped(*inputs), labels).backward()
    optimizer.step()
    for old, new, each in zip(before, trained, rows, strict=True):
        clipped = torch.einsum("b,b...->...", (0.1 / lengths).clamp(max=1), each) / len(labels)
        torch.testing.assert_close(old - new, clipped, rtol=1e-3, atol=1e-6)


def shard_by_accelerate(method: str, out: Path) -> None:
    """As ``accelerate launch`` with TRL's fsdp2.yaml: the model goes to the meta device, and comes back sharded."""
    dist.init_process_group("gloo")
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, cpu_ram_efficient_loading=True, auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["Qwen2DecoderLayer"],
    )  # fmt: skip
    accelerator = SimpleNamespace(
        state=SimpleNamespace(fsdp_plugin=plugin), mixed_precision="no", is_main_process=True,
        torch_device_mesh=init_device_mesh("cpu", (1,), mesh_dim_names=("shard",)), device=torch.device("cpu"),
        parallelism_config=SimpleNamespace(fsdp_dim_names=("shard",)),
    )  # fmt: skip
    if method == "lora":
        model = get_peft_model(tiny_qwen2(), LoraConfig(r=3, init_lora_weights=False))
    else:
        model = adapted("fcca", trained=True)
        model.add_adapter("ref", model.peft_config["default"])
    batch = batch_of(EXAMPLES[:4])
    expected, names = model.train()(**batch).loss, model.state_dict().keys()
    sharded = fsdp2_prepare_model(accelerator, model)
    loss = sharded(**batch).loss
    loss.backward()
    torch.testing.assert_close(loss, expected)
    state = get_model_state_dict(sharded, options=StateDictOptions(full_state_dict=True))
    assert state.keys() == names
    set_model_state_dict(sharded, state, options=StateDictOptions(full_state_dict=True))
    torch.testing.assert_close(sharded(**batch).loss, expected)
    out.write_text("done")
    dist.destroy_process_group()


@pytest.mark.parametrize("method", ["lora", "core"])
def test_accelerates_fsdp2_shards_a_model_that_waits_on_the_meta_device(method: str, tmp_path: Path) -> None:
    done = ended(lambda: as_ranks(1, lambda _: shard_by_accelerate(method, tmp_path / "done")), tmp_path, timeout_s=120)
    assert done.status == 0, done.err[-2000:]
    assert (tmp_path / "done").exists()
