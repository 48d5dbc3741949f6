"""Trainers with a frozen core: transformers', Opacus, FSDP, TRL; and what may train beside the cores."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import trl
from accelerate import FullyShardedDataParallelPlugin
from accelerate.utils.fsdp_utils import fsdp2_prepare_model
from datasets import Dataset
from opacus import PrivacyEngine
from opacus.grad_sample import wrap_model
from peft import PeftModel, get_peft_model
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    BitsAndBytesConfig,
    PreTrainedTokenizerBase,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from forked import as_ranks, ended
from frozencore import FrozenCoreConfig, calibrate, get_basis, save_basis, set_basis
from frozencore.tune.cost import num_trainable
from frozencore.tune.pocket import pocket_model_path
from frozencore.tune.rows.row import TokenRow
from frozencore.tune.training.recipe import Recipe
from frozencore.tune.training.train import train
from tiny import (
    EXAMPLES,
    adapted,
    all_equal,
    batch_of,
    cores_of,
    draw_examples,
    factors_of,
    logits,
    tiny_gpt2,
    tiny_qwen2,
    train_at_random,
)

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


def with_dropout(*, calibrated: bool = True) -> PeftModel:
    """GPT-2 with dropout 0.3, so that a resumed run must also find the random state."""
    return adapted("fcca", model=tiny_gpt2(), target_modules=["c_attn", "c_proj"], calibrated=calibrated)


def loaded(checkpoint: Path) -> PeftModel:
    return PeftModel.from_pretrained(tiny_gpt2(), checkpoint, is_trainable=True)


def not_calibrated(_: Path) -> PeftModel:
    return with_dropout(calibrated=False)


@pytest.mark.parametrize("way", [lambda _: with_dropout(), not_calibrated, loaded])
def test_a_resumed_run_is_bit_equal_to_an_uninterrupted_one(way: Callable[[Path], PeftModel], tmp_path: Path) -> None:
    whole = trainer_of(with_dropout(), tmp_path / "whole")
    whole.train()

    with pytest.raises(KeyboardInterrupt):
        trainer_of(with_dropout(), tmp_path / "cut", callbacks=[StopAt(5)]).train()
    resumed = trainer_of(way(tmp_path / "cut" / "checkpoint-4"), tmp_path / "cut")  # the checkpoint holds the bases
    is_without = way is not_calibrated
    with pytest.warns(UserWarning, match="tell nothing of how they were made") if is_without else nullcontext():
        resumed.train(resume_from_checkpoint=True)
    assert resumed.state.global_step == STEPS
    assert losses_of(resumed) == losses_of(whole)
    assert all_equal(factors_of(resumed.model), factors_of(whole.model))
    made, known = (one.model.peft_config["default"] for one in (whole, resumed))
    assert made.learning_rate is not None
    assert known.learning_rate == (None if is_without else made.learning_rate)
    assert known.calibration_tokens == (None if is_without else made.calibration_tokens)


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


def test_calibrating_on_a_part_of_the_trainers_own_data_changes_nothing_but_the_bases(tmp_path: Path) -> None:
    first, second = (get_peft_model(tiny_qwen2(), FrozenCoreConfig(r=3)) for _ in range(2))
    trainer = trainer_of(first, tmp_path, save_strategy="no")
    calibrate(first, trainer.get_train_dataloader(), num_examples=6, progress=False)
    set_basis(second, get_basis(first))
    trainer.train()
    trainer_of(second, tmp_path, save_strategy="no").train()
    assert all_equal(factors_of(first), factors_of(second))


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
def test_opacus_makes_a_step_of_clipped_rows(mode: str) -> None:
    """Without noise, the mean of the rows' gradients, each at most 0.1 long over all trained values."""
    model = LastToken(adapted("fcca", trained=True).train())
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


def shard_by_accelerate(out: Path, rank: int) -> None:
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


def test_accelerates_fsdp2_shards_a_model_that_waits_on_the_meta_device(tmp_path: Path) -> None:
    done = ended(partial(as_ranks, 1, partial(shard_by_accelerate, tmp_path / "done")), tmp_path, timeout_s=120)
    assert done.status == 0, done.err[-2000:]
    assert (tmp_path / "done").exists()


# ------------------------------------------------------------------------------------------------------------ TRL

PAIRS = [(f"tom has {i} apples and", f" tom has {i % 3} .") for i in range(16)]
PROMPTS = [{"prompt": prompt, "completion": completion} for prompt, completion in PAIRS]
CHATS = [
    [{"role": "user", "content": prompt}, {"role": "assistant", "content": completion}] for prompt, completion in PAIRS
]
DATA: dict[str, tuple[list[dict[str, Any]], dict[str, Any]]] = {
    "prompt and completion": (PROMPTS, {}),
    "prompt and completion in bf16": (PROMPTS, {"bf16": None}),  # the default, which is on
    "chat, loss on the assistant": ([{"messages": chat} for chat in CHATS], {"assistant_only_loss": True}),
}
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] + ': ' }}{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + eos_token }}{% endgeneration %}"
    "{% else %}{{ message['content'] + eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)


def base_model() -> nn.Module:
    return AutoModelForCausalLM.from_pretrained(pocket_model_path(), dtype=torch.float32)


def pocket_core(constructor: str = "fcca") -> PeftModel:
    return get_peft_model(base_model(), FrozenCoreConfig(r=4, constructor=constructor))


Sft = Callable[..., trl.SFTTrainer]


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    tokenizer = AutoTokenizer.from_pretrained(pocket_model_path())
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


@pytest.fixture
def sft(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> Sft:
    """Makes a trainer with TRL's defaults, checkpointing included, but for size and place."""

    def make(model: nn.Module, data: str = "prompt and completion", **options: Any) -> trl.SFTTrainer:
        rows, changes = DATA[data]
        settings = {
            "max_steps": 12, "per_device_train_batch_size": 8, "learning_rate": 5e-3, "logging_steps": 1,
            "bf16": False, "use_cpu": True, "report_to": "none", "disable_tqdm": True, "save_strategy": "no",
        }  # fmt: skip
        return trl.SFTTrainer(
            model,
            trl.SFTConfig(str(tmp_path / "run"), **{**settings, **changes}),
            train_dataset=Dataset.from_list(rows),
            processing_class=tokenizer,
            **options,
        )

    return make


@torch.no_grad()
def pocket_logits(model: nn.Module) -> Tensor:
    return model(input_ids=torch.arange(1, 25).reshape(2, 12)).logits


@pytest.mark.parametrize("data", ["prompt and completion", "chat, loss on the assistant"])
def test_only_cores_train_the_loss_falls_and_the_adapter_reloads_equal(data: str, sft: Sft, tmp_path: Path) -> None:
    model = pocket_core()
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
    assert torch.equal(pocket_logits(reloaded), pocket_logits(model.eval()))


def test_the_bases_are_the_same_before_and_after_the_trainer_changed_the_forward(sft: Sft) -> None:
    model = pocket_core()
    trainer = sft(model)  # puts a fused head on the model and turns checkpointing on
    batches = list(trainer.get_train_dataloader())
    calibrate(model, batches, progress=False)
    plain = pocket_core()
    calibrate(plain, batches, progress=False)
    assert get_basis(model).id == get_basis(plain).id


def projectors(model: nn.Module) -> dict[str, Tensor]:
    spans = {key: torch.linalg.qr(basis.double())[0] for key, basis in get_basis(model).tensors.items()}
    return {key: X @ X.mT for key, X in spans.items()}


def test_trls_packed_batches_give_the_bases_of_its_padded_ones(
    tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    rows = Dataset.from_list([{**row, "completion": row["completion"] * (i % 3 + 1)} for i, row in enumerate(PROMPTS)])

    def calibrated(num_examples: int | None = None, **options: Any) -> dict[str, Tensor]:
        few = {"bf16": False, "use_cpu": True, "report_to": "none", "per_device_train_batch_size": 4}
        arguments = trl.SFTConfig(str(tmp_path), **few, **options)
        trainer = trl.SFTTrainer(pocket_core(), arguments, train_dataset=rows, processing_class=tokenizer)
        calibrate(trainer.model, trainer.get_train_dataloader(), num_examples=num_examples, progress=False)
        return projectors(trainer.model)

    for num_examples, options in (
        (None, {"padding_free": True, "max_length": None}), (None, {"packing": True, "max_length": 64}),
        (6, {"padding_free": True, "max_length": None}),
    ):  # fmt: skip
        wanted = calibrated(num_examples)
        for key, found in calibrated(num_examples, **options).items():
            assert float((found - wanted[key]).norm()) < 1e-3, (key, options)
    with pytest.warns(UserWarning, match="each row counts as one example.*token_sum"):
        calibrated(packing=True, packing_strategy="wrapped", max_length=32)


def test_cores_stay_float32_under_trls_own_bf16(sft: Sft) -> None:
    model = pocket_core("random")
    trainer = sft(model, "prompt and completion in bf16")
    trainer.args.max_steps = 2  # on a CPU without bf16 each takes a second
    trainer.train()
    assert trainer.args.bf16
    assert {layer.factors("default")[2].dtype for layer in cores_of(model)} == {torch.float32}


def test_trl_rounds_the_cores_of_a_quantised_base_and_one_line_takes_it_back(sft: Sft) -> None:
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


def start(source: str, folder: Path) -> PeftModel:
    """A trained adapter on the pocket model: made here, loaded, or loaded on a named basis."""
    model = get_peft_model(
        base_model(), FrozenCoreConfig(r=4, constructor="random", target_modules=["q_proj", "v_proj"])
    )
    train_at_random(model)
    if source == "fresh":
        return model
    if source == "named basis":
        save_basis(model, folder / "basis")
    model.save_pretrained(folder / "adapter")
    return PeftModel.from_pretrained(base_model(), folder / "adapter", is_trainable=True)


QUIET = {
    "per_device_train_batch_size": 4, "per_device_eval_batch_size": 4, "max_steps": 1, "learning_rate": 1e-12,
    "logging_steps": 1, "report_to": "none", "disable_tqdm": True, "use_cpu": True, "bf16": False,
    "save_strategy": "no",
}  # fmt: skip
PREFERENCES = [{"prompt": p, "chosen": c, "rejected": " tom has 7 ."} for p, c in PAIRS[:4]]
RATED = [{**row, "label": i % 2 == 0} for i, row in enumerate(PROMPTS[:4])]
SAMPLED = {"beta": 0.1, "num_generations": 2, "max_completion_length": 4}
TRAINERS: dict[str, tuple[type, type, list[dict[str, Any]], dict[str, Any], str, float]] = {
    "DPO": (trl.DPOTrainer, trl.DPOConfig, PREFERENCES, {}, "loss", math.log(2)),
    "KTO": (trl.KTOTrainer, trl.KTOConfig, RATED, {}, "rewards/chosen", 0.0),
    "GRPO": (trl.GRPOTrainer, trl.GRPOConfig, PROMPTS[:4], SAMPLED, "kl", 0.0),
    "RLOO": (trl.RLOOTrainer, trl.RLOOConfig, PROMPTS[:4], SAMPLED, "kl", 0.0),
}


def lengths(completions: list[str], **_: Any) -> list[float]:
    return [float(len(text)) for text in completions]


@pytest.mark.parametrize(
    ("trainer", "source"), [("DPO", "fresh"), ("DPO", "named basis"), *((trainer, "loaded") for trainer in TRAINERS)]
)
def test_the_reference_is_the_adapter_that_training_starts_from(
    trainer: str, source: str, tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    """Nothing has been learned yet, so the loss of preferences is log 2, and rewards and divergences are 0."""
    make, settings, rows, options, measured, expected = TRAINERS[trainer]
    rewards = {"reward_funcs": lengths} if trainer in ("GRPO", "RLOO") else {"eval_dataset": Dataset.from_list(rows)}
    made = make(
        start(source, tmp_path / "start"), args=settings(str(tmp_path / "run"), **{**QUIET, **options}),
        train_dataset=Dataset.from_list(rows), processing_class=tokenizer, **rewards,
    )  # fmt: skip
    if "eval_dataset" in rewards:
        assert made.evaluate()[f"eval_{measured}"] == pytest.approx(expected, abs=1e-6)
    made.train()
    logged = [entry[measured] for entry in made.state.log_history if "grad_norm" in entry]
    assert logged == pytest.approx([expected], abs=1e-6)
    made.save_model(str(tmp_path / "end"))
    again = PeftModel.from_pretrained(base_model(), tmp_path / "end")
    assert torch.equal(pocket_logits(again), pocket_logits(made.model.eval()))


def test_a_merged_adapter_that_is_to_train_is_named(tmp_path: Path) -> None:
    model = adapted("fcca", trained=True)
    model.merge_adapter()
    with pytest.warns(UserWarning, match=r"no parameter trains that it uses.*unmerge_adapter"):
        trainer_of(model, tmp_path, gradient_checkpointing=True, max_steps=1, save_strategy="no").train()


@pytest.mark.parametrize("trainer", ["SFT", "GRPO"])
def test_an_adapter_that_was_loaded_frozen_is_named_once_when_it_is_to_train(
    trainer: str, tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    """With checkpointing, TRL's default, neither trainer fails, and GRPO even logs a gradient."""
    start("fresh", tmp_path).save_pretrained(tmp_path / "adapter")
    make, settings, rows, options, *_ = {**TRAINERS, "SFT": (trl.SFTTrainer, trl.SFTConfig, PROMPTS, {})}[trainer]
    for is_trainable in (False, True):
        made = make(
            PeftModel.from_pretrained(base_model(), tmp_path / "adapter", is_trainable=is_trainable),
            args=settings(str(tmp_path / "run"), **{**QUIET, **options, "max_steps": 2}),
            train_dataset=Dataset.from_list(rows), processing_class=tokenizer,
            **({"reward_funcs": lengths} if trainer == "GRPO" else {}),
        )  # fmt: skip
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            made.train()
        named = [one for one in caught if "no parameter trains that it uses" in str(one.message)]
        assert len(named) == (0 if is_trainable else 1)


def test_an_uncalibrated_adapter_and_its_reference_get_one_basis(
    tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    trainer = trl.DPOTrainer(
        get_peft_model(base_model(), FrozenCoreConfig(r=4)), args=trl.DPOConfig(str(tmp_path), **QUIET),
        train_dataset=Dataset.from_list(PREFERENCES), processing_class=tokenizer,
    )  # fmt: skip
    calibrate(trainer.model, trainer.get_train_dataloader(), loss_fn=trainer.compute_loss, progress=False)
    for layer in cores_of(trainer.model):
        assert layer.frozencore_P["default"] is layer.frozencore_P["ref"]
        assert layer.frozencore_P["ref"].any()
    trainer.train()
    assert trainer.state.log_history[0]["loss"] == pytest.approx(math.log(2), abs=1e-6)


# --------------------------------------------------------------------------------------- what trains beside the cores

ROWS = [TokenRow(f"row-{i}", list(e.ids), e.num_prompt) for i, e in enumerate(draw_examples(4, seed=5))]
RECIPE = Recipe(learning_rate=5e-3, warmup=0.03, batch_size=2, accumulation=1)


@pytest.mark.parametrize("options", [{}, {"modules_to_save": ["lm_head"]}, {"trainable_token_indices": [1, 2]}])
def test_what_the_configuration_names_trains(options: dict) -> None:
    model = adapted("random", model=tiny_qwen2(tie_word_embeddings=False), **options)
    assert (num_trainable(model) > 8 * 3**2) == bool(options)
    assert train(model, ROWS, RECIPE, pad_id=0).training.num_steps == 2


def test_a_second_adapter_trains_alone_once_it_is_the_active_one() -> None:
    model = adapted("random")
    model.add_adapter("other", FrozenCoreConfig(r=2, constructor="random"))
    model.set_adapter("other")
    assert num_trainable(model) == 8 * 2**2
