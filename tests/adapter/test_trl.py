"""TRL's trainers with a frozen core: fine-tuning on every form of rows, and references that start equal."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, PeftConfig, PeftModel, get_peft_model
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig, PreTrainedTokenizerBase
from trl import (
    DPOConfig,
    DPOTrainer,
    GRPOConfig,
    GRPOTrainer,
    KTOConfig,
    KTOTrainer,
    RLOOConfig,
    RLOOTrainer,
    SFTConfig,
    SFTTrainer,
)

from adapted import cores_of
from frozencore import FrozenCoreConfig, calibrate, get_bases, save_basis, set_bases
from frozencore.errors import CalibrationError
from frozencore.tune.pocket import pocket_model_path

PAIRS = [(f"tom has {i} apples and", f" tom has {i % 3} .") for i in range(16)]
PROMPTS = [{"prompt": prompt, "completion": completion} for prompt, completion in PAIRS]
CHATS = [
    [{"role": "user", "content": prompt}, {"role": "assistant", "content": completion}] for prompt, completion in PAIRS
]
DATA: dict[str, tuple[list[dict[str, Any]], dict[str, Any]]] = {
    "prompt and completion": (PROMPTS, {}),
    "prompt and completion in bf16": (PROMPTS, {"bf16": None}),  # the default, which is on
    "chat": ([{"messages": chat} for chat in CHATS], {}),
    "chat, loss on the assistant": ([{"messages": chat} for chat in CHATS], {"assistant_only_loss": True}),
    "chat prompt and completion": ([{"prompt": chat[:1], "completion": chat[1:]} for chat in CHATS], {}),
}
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] + ': ' }}{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + eos_token }}{% endgeneration %}"
    "{% else %}{{ message['content'] + eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)


def base_model() -> nn.Module:
    return AutoModelForCausalLM.from_pretrained(pocket_model_path(), dtype=torch.float32)


def adapted(constructor: str = "fcca") -> PeftModel:
    return get_peft_model(base_model(), FrozenCoreConfig(r=4, constructor=constructor))


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    tokenizer = AutoTokenizer.from_pretrained(pocket_model_path())
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


@pytest.fixture
def sft(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> Callable[..., SFTTrainer]:
    """Makes a trainer with TRL's defaults, checkpointing included, but for size and place."""

    def make(model: nn.Module, data: str = "prompt and completion", **options: Any) -> SFTTrainer:
        rows, changes = DATA[data]
        settings = {
            "max_steps": 12, "per_device_train_batch_size": 8, "learning_rate": 5e-3, "logging_steps": 1,
            "bf16": False, "use_cpu": True, "report_to": "none", "disable_tqdm": True, "save_strategy": "no",
        }  # fmt: skip
        return SFTTrainer(
            model,
            SFTConfig(str(tmp_path / "run"), **{**settings, **changes}),
            train_dataset=Dataset.from_list(rows),
            processing_class=tokenizer,
            **options,
        )

    return make


def losses_of(trainer: SFTTrainer) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


@torch.no_grad()
def logits(model: nn.Module) -> Tensor:
    return model(input_ids=torch.arange(1, 25).reshape(2, 12)).logits


@pytest.mark.parametrize(
    "data",
    ["prompt and completion", "chat, loss on the assistant"]
    + [pytest.param(name, marks=pytest.mark.slow) for name in ("chat", "chat prompt and completion")],
)
def test_only_cores_train_the_loss_falls_and_the_adapter_reloads_equal(
    data: str, sft: Callable[..., SFTTrainer], tmp_path: Path
) -> None:
    model = adapted()
    trainer = sft(model, data)
    calibrate(model, trainer.get_train_dataloader(), progress=False)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    trainer.train()

    changed = {name for name, tensor in model.state_dict().items() if not torch.equal(tensor, before[name])}
    assert changed == {name for name, p in model.named_parameters() if p.requires_grad}
    assert all("frozencore_R" in name for name in changed)
    losses = losses_of(trainer)
    assert sum(losses[-4:]) < 0.95 * sum(losses[:4])

    trainer.save_model(str(tmp_path / "adapter"))
    reloaded = PeftModel.from_pretrained(base_model(), tmp_path / "adapter")
    assert torch.equal(logits(reloaded), logits(model.eval()))


def test_calibration_sees_the_completions_that_the_trainer_trains_on(sft: Callable[..., SFTTrainer]) -> None:
    for data, masked in (("prompt and completion", True), ("chat", False), ("chat, loss on the assistant", True)):
        batch = next(iter(sft(adapted(), data).get_train_dataloader()))
        text = batch["attention_mask"].bool()
        assert bool((batch["labels"][text] == -100).any()) == masked


def test_the_bases_are_the_same_before_and_after_the_trainer_changed_the_forward(
    sft: Callable[..., SFTTrainer],
) -> None:
    model = adapted()
    trainer = sft(model)  # puts a fused head on the model and turns checkpointing on
    batches = list(trainer.get_train_dataloader())
    calibrate(model, batches, progress=False)
    plain = adapted()
    calibrate(plain, batches, progress=False)
    expected = get_bases(plain)
    assert all(torch.equal(basis, expected[key]) for key, basis in get_bases(model).items())


def test_a_configuration_without_data_trains_at_once(sft: Callable[..., SFTTrainer]) -> None:
    trainer = sft(base_model(), peft_config=FrozenCoreConfig(r=4, constructor="lora_xs"))
    trainer.train()
    assert any(layer.factors("default")[2].any() for layer in cores_of(trainer.model))


def test_a_configuration_that_reads_data_says_what_to_call_and_then_trains(sft: Callable[..., SFTTrainer]) -> None:
    trainer = sft(base_model(), peft_config=FrozenCoreConfig(r=4))
    with pytest.raises(CalibrationError, match=r"Call frozencore.calibrate\(model, dataloader\) first"):
        trainer.train()
    calibrate(trainer.model, trainer.get_train_dataloader(), num_examples=8, progress=False)
    trainer.train()

    again = sft(base_model(), peft_config=FrozenCoreConfig(r=4))
    set_bases(again.model, get_bases(trainer.model))
    again.train()
    for layer, other in zip(cores_of(trainer.model), cores_of(again.model), strict=True):
        assert torch.equal(layer.factors("default")[2], other.factors("default")[2])
        assert layer.factors("default")[2].any()


def test_cores_stay_float32_under_trls_own_bf16(sft: Callable[..., SFTTrainer]) -> None:
    model = adapted("random")
    trainer = sft(model, "prompt and completion in bf16")
    trainer.args.max_steps = 2  # on a CPU without bf16 each takes a second
    trainer.train()
    assert trainer.args.bf16
    assert {layer.factors("default")[2].dtype for layer in cores_of(model)} == {torch.float32}


def test_trl_rounds_the_cores_of_a_quantised_base_and_one_line_takes_it_back(sft: Callable[..., SFTTrainer]) -> None:
    quantised = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
    base = AutoModelForCausalLM.from_pretrained(pocket_model_path(), quantization_config=quantised, device_map="cpu")
    model = get_peft_model(base, FrozenCoreConfig(r=4, constructor="random"))
    trainer = sft(model)
    cores = [layer.factors("default")[2] for layer in cores_of(model)]
    assert {core.dtype for core in cores} == {torch.bfloat16}
    for parameter in trainer.model.parameters():  # the lines of docs/from-lora.md
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
    trainer.train()
    assert {core.dtype for core in cores} == {torch.float32}
    assert all(core.any() for core in cores)


def trained_at_random(model: PeftModel) -> PeftModel:
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
    return model


def wrapped(config: PeftConfig) -> PeftModel:
    return trained_at_random(get_peft_model(base_model(), config))


def loaded(config: PeftConfig, folder: Path) -> PeftModel:
    wrapped(config).save_pretrained(folder)
    return PeftModel.from_pretrained(base_model(), folder, is_trainable=True)


def on_a_named_basis(config: PeftConfig, folder: Path) -> PeftModel:
    if isinstance(config, LoraConfig):
        return loaded(config, folder)
    save_basis(get_peft_model(base_model(), config), folder / "basis")
    return loaded(FrozenCoreConfig(basis=str(folder / "basis")), folder / "adapter")


REFERENCES: dict[str, Callable[[PeftConfig, Path], PeftModel]] = {
    "fresh": lambda config, _: wrapped(config), "loaded": loaded, "named basis": on_a_named_basis,
}  # fmt: skip
QUIET = {
    "per_device_train_batch_size": 4, "per_device_eval_batch_size": 4, "max_steps": 1, "learning_rate": 1e-12,
    "logging_steps": 1, "report_to": "none", "disable_tqdm": True, "use_cpu": True, "bf16": False,
    "save_strategy": "no",
}  # fmt: skip
PREFERENCES = [{"prompt": p, "chosen": c, "rejected": " tom has 7 ."} for p, c in PAIRS[:4]]
RATED = [{**row, "label": i % 2 == 0} for i, row in enumerate(PROMPTS[:4])]
SAMPLED = {"beta": 0.1, "num_generations": 2, "max_completion_length": 4}
TRAINERS: dict[str, tuple[type, type, list[dict[str, Any]], dict[str, Any], str, float]] = {
    "DPO": (DPOTrainer, DPOConfig, PREFERENCES, {}, "loss", math.log(2)),
    "KTO": (KTOTrainer, KTOConfig, RATED, {}, "rewards/chosen", 0.0),
    "GRPO": (GRPOTrainer, GRPOConfig, PROMPTS[:4], SAMPLED, "kl", 0.0),
    "RLOO": (RLOOTrainer, RLOOConfig, PROMPTS[:4], SAMPLED, "kl", 0.0),
}


def lengths(completions: list[str], **_: Any) -> list[float]:
    return [float(len(text)) for text in completions]


@pytest.mark.parametrize("method", ["lora", "core"])
@pytest.mark.parametrize(
    ("trainer", "source"), [("DPO", "fresh"), ("DPO", "named basis"), *((trainer, "loaded") for trainer in TRAINERS)]
)
def test_the_reference_is_the_adapter_that_training_starts_from(
    trainer: str, source: str, method: str, tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    """Nothing has been learned yet, so the loss of preferences is log 2, and rewards and divergences are 0."""
    targets = ["q_proj", "v_proj"]
    config = (
        LoraConfig(r=4, target_modules=targets)
        if method == "lora"
        else FrozenCoreConfig(r=4, constructor="random", target_modules=targets)
    )
    make, settings, rows, options, measured, expected = TRAINERS[trainer]
    rewards = {"reward_funcs": lengths} if trainer in ("GRPO", "RLOO") else {"eval_dataset": Dataset.from_list(rows)}
    made = make(
        REFERENCES[source](config, tmp_path / "start"), args=settings(str(tmp_path / "run"), **{**QUIET, **options}),
        train_dataset=Dataset.from_list(rows), processing_class=tokenizer, **rewards,
    )  # fmt: skip
    if "eval_dataset" in rewards:
        assert made.evaluate()[f"eval_{measured}"] == pytest.approx(expected, abs=1e-6)
    made.train()
    logged = [entry[measured] for entry in made.state.log_history if "grad_norm" in entry]
    assert logged == pytest.approx([expected], abs=1e-6)
    made.save_model(str(tmp_path / "end"))
    again = PeftModel.from_pretrained(base_model(), tmp_path / "end")
    assert torch.equal(logits(again), logits(made.model.eval()))


def test_an_uncalibrated_adapter_and_its_reference_get_one_basis(
    tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    trainer = DPOTrainer(
        get_peft_model(base_model(), FrozenCoreConfig(r=4)), args=DPOConfig(str(tmp_path), **QUIET),
        train_dataset=Dataset.from_list(PREFERENCES), processing_class=tokenizer,
    )  # fmt: skip
    calibrate(trainer.model, trainer.get_train_dataloader(), loss_fn=trainer.compute_loss, progress=False)
    for layer in cores_of(trainer.model):
        assert layer.frozencore_P["default"] is layer.frozencore_P["ref"]
        assert layer.frozencore_P["ref"].any()
    trainer.train()
    assert trainer.state.log_history[0]["loss"] == pytest.approx(math.log(2), abs=1e-6)
