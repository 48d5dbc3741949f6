"""Moments of models of every kind against autograd's gradients: images, sound, rewards, encoders and decoders."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from peft import get_peft_model
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, logsigmoid, normalize
from transformers import (
    BertConfig,
    BertForQuestionAnswering,
    BertForTokenClassification,
    BertModel,
    Qwen2Config,
    Qwen2ForSequenceClassification,
    ViTConfig,
    ViTForImageClassification,
    Wav2Vec2Config,
    Wav2Vec2ForSequenceClassification,
)

from families import make
from frozencore import FrozenCoreConfig, calibrate, collect_moments
from frozencore.maths.capture import CAPTURE_NEEDS
from frozencore.maths.moments import LayerMoments
from tiny import batch_of, draw_examples

SMALL = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
LossFn = Callable[[nn.Module, Any], Tensor]


@dataclass(frozen=True)
class Case:
    """A model, batches of it, its loss (None: its own), adapted layers, and the rows that count in the first."""

    model: nn.Module
    batches: list[Any]
    loss_fn: LossFn | None
    targets: tuple[str, ...]
    num_rows: int


def made(kind: type[nn.Module], config: Any) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = kind(config).eval()
        for parameter in model.parameters():
            parameter.data += 0.1 * torch.randn_like(parameter)
    return model


def images() -> Case:
    model = made(ViTForImageClassification, ViTConfig(**SMALL, image_size=8, patch_size=4, num_labels=3))
    batches = [{"pixel_values": torch.randn(n, 3, 8, 8), "labels": torch.arange(n) % 3} for n in (4, 3)]
    return Case(model, batches, None, ("q_proj", "v_proj"), 7 * (1 + 4))


def images_as_pairs() -> Case:
    """Batches as torchvision's loaders give them."""
    plain = images()
    batches = [(batch["pixel_values"], batch["labels"]) for batch in plain.batches]
    return Case(
        plain.model, batches, lambda model, batch: cross_entropy(model(pixel_values=batch[0]).logits, batch[1]),
        plain.targets, plain.num_rows,
    )  # fmt: skip


def sound() -> Case:
    """The mask is of samples, the layers see frames: ten of each sound, six of the first."""
    config = Wav2Vec2Config(
        **SMALL, conv_dim=(8, 8), conv_kernel=(4, 4), conv_stride=(4, 4), num_feat_extract_layers=2, num_labels=3,
        num_conv_pos_embeddings=4, num_conv_pos_embedding_groups=2, classifier_proj_size=8,
    )  # fmt: skip
    mask = torch.ones(3, 160, dtype=torch.long)
    mask[0, 96:] = 0
    batch = {"input_values": torch.randn(3, 160), "attention_mask": mask, "labels": torch.arange(3)}
    return Case(made(Wav2Vec2ForSequenceClassification, config), [batch], None, ("q_proj", "v_proj"), 6 + 2 * 10)


def tagged_words() -> Case:
    config = BertConfig(**SMALL, vocab_size=40, num_labels=3, max_position_embeddings=32)
    batch = sides_batch(EXAMPLES)
    batch["labels"] = torch.where(batch["attention_mask"].bool(), batch["input_ids"] % 3, -100)
    return Case(made(BertForTokenClassification, config), [batch], None, ("query", "value"), 11)


def sentences() -> Case:
    """Two towers of one model: each call has a mask of its own."""
    model = made(BertModel, BertConfig(**SMALL, vocab_size=40))

    def embedded(model: nn.Module, text: dict[str, Tensor]) -> Tensor:
        mask = text["attention_mask"]
        states = model(input_ids=text["input_ids"], attention_mask=mask).last_hidden_state
        return normalize((states * mask[..., None]).sum(1) / mask.sum(1, keepdim=True), dim=-1)

    def contrastive(model: nn.Module, batch: dict[str, dict[str, Tensor]]) -> Tensor:
        scores = 5 * embedded(model, batch["anchor"]) @ embedded(model, batch["positive"]).T
        return cross_entropy(scores, torch.arange(len(scores)))

    sides = [batch_of(draw_examples(4, seed=seed, longest=longest)) for seed, longest in ((1, 6), (2, 9))]
    texts = [{name: side[name] for name in ("input_ids", "attention_mask")} for side in sides]
    shown = sum(int(text["attention_mask"].sum()) for text in texts)
    return Case(model, [dict(zip(("anchor", "positive"), texts, strict=True))], contrastive, ("query", "value"), shown)


def rewards() -> Case:
    config = Qwen2Config(
        **SMALL, vocab_size=40, num_key_value_heads=1, num_labels=1, pad_token_id=0, max_position_embeddings=64
    )

    def preference(model: nn.Module, batch: dict[str, Any]) -> Tensor:
        chosen, rejected = (model(**batch[name]).logits for name in ("chosen", "rejected"))
        return -logsigmoid(chosen - rejected).mean()

    sides = [batch_of(draw_examples(3, seed=seed), padding_id=0) for seed in (1, 2)]
    texts = [{name: side[name] for name in ("input_ids", "attention_mask")} for side in sides]
    shown = sum(int(text["attention_mask"].sum()) for text in texts)
    batch = {"note": "pairs", **dict(zip(("chosen", "rejected"), texts, strict=True))}
    shown -= 2 * 3  # the first query of a text has one key, so that no gradient reaches it
    return Case(made(Qwen2ForSequenceClassification, config), [batch], preference, ("q_proj", "o_proj"), shown)


def answers() -> Case:
    config = BertConfig(**SMALL, vocab_size=40)
    batch = batch_of(draw_examples(3, seed=4), padding_id=0)
    shown = int(batch["attention_mask"].sum())
    batches = [{name: batch[name] for name in ("input_ids", "attention_mask")}]
    batches[0] |= {"start_positions": torch.tensor([0, 1, 2]), "end_positions": torch.tensor([1, 1, 3])}
    return Case(made(BertForQuestionAnswering, config), batches, None, ("query", "value"), shown)


CASES = (images, images_as_pairs, sound, tagged_words, sentences, rewards, answers)


class Rows:
    """The inputs and output errors of each call of a layer of the plain model."""

    def __init__(self, layer: nn.Module) -> None:
        self.calls: list[tuple[Tensor, Tensor]] = []
        layer.register_forward_hook(self.see)

    def see(self, _: nn.Module, args: tuple[Tensor], y: Tensor) -> None:
        x = args[0].detach().flatten(0, -2)
        y.register_hook(lambda delta: self.calls.append((x, delta.flatten(0, -2))))

    def counted(self) -> Tensor:
        """Those with an error."""
        sizes = [(x, delta.abs().amax(1)) for x, delta in self.calls]
        return torch.cat([x[size > 1e-6 * size.max()] for x, size in sizes])


@pytest.mark.parametrize("case_of", CASES)
def test_the_moments_are_autograds_gradient_and_the_rows_that_it_reaches(case_of: Callable[[], Case]) -> None:
    case = case_of()
    names = [name for name, _ in case.model.named_modules() if name.rsplit(".", 1)[-1] in case.targets]
    assert len(names) == 4
    found = collect_moments(case.model, case.batches, names, needs=CAPTURE_NEEDS, loss_fn=case.loss_fn)
    model = copy.deepcopy(case.model)
    rows = {name: Rows(model.get_submodule(name)) for name in names}
    for batch in case.batches:
        loss = model(**batch).loss if case.loss_fn is None else case.loss_fn(model, batch)
        (loss * rows_of(batch)).backward()
    assert found[names[0]].num_tokens == case.num_rows
    for name, moments in found.items():
        expected, counted = model.get_submodule(name).weight.grad, rows[name].counted()
        assert moments.num_tokens == len(counted)
        torch.testing.assert_close(moments.input_square, counted.square().sum(0), rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(moments.cross, expected, rtol=1e-4, atol=1e-5 * float(expected.abs().max()))


def rows_of(batch: Any) -> int:
    parts = batch.values() if isinstance(batch, dict) else batch
    return next(len(part) if isinstance(part, Tensor) else rows_of(part) for part in parts if not isinstance(part, str))


def test_a_batch_stays_whole_under_a_loss_of_the_user_which_may_compare_its_rows() -> None:
    case = images_as_pairs()
    model = get_peft_model(case.model, FrozenCoreConfig(r=2, constructor="eva", target_modules=["q_proj"]))
    found = calibrate(model, case.batches, num_examples=5, loss_fn=case.loss_fn, progress=False)
    # the last layer's queries of the patches do not reach the loss
    assert [layer.num_tokens for layer in found.layers.values()] == [7 * (1 + 4), 7]


NEEDS = frozenset({"cross", "input_square", "error_square"})
# Source and target of each example. Batch 0 has longest source = longest target: shapes cannot tell the sides apart.
EXAMPLES = [((5, 6, 7, 8, 9, 3), (11, 12, 3)), ((4, 9, 3), (13, 14, 15, 16, 17, 3)), ((21, 3), (22, 23, 3))]
PADDING = 7  # a real token, so that padding has x ≠ 0


def sides_batch(examples: list[tuple[tuple[int, ...], tuple[int, ...]]]) -> dict[str, Tensor]:
    longest = [max(len(example[side]) for example in examples) for side in (0, 1)]
    pads = [[longest[side] - len(example[side]) for example in examples] for side in (0, 1)]
    return {
        "input_ids": torch.tensor([[*e[0], *[PADDING] * p] for e, p in zip(examples, pads[0], strict=True)]),
        "attention_mask": torch.tensor([[*[1] * len(e[0]), *[0] * p] for e, p in zip(examples, pads[0], strict=True)]),
        "labels": torch.tensor([[*e[1], *[-100] * p] for e, p in zip(examples, pads[1], strict=True)]),
    }


def linear_layers(model: nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if isinstance(module, nn.Linear) and name != "lm_head"]


def assert_same(one: dict[str, LayerMoments], other: dict[str, LayerMoments]) -> None:
    assert one.keys() == other.keys()
    for name in one:
        assert one[name].num_tokens == other[name].num_tokens, name
        for moment in NEEDS:
            left, right = getattr(one[name], moment), getattr(other[name], moment)
            torch.testing.assert_close(left, right, rtol=1e-9, atol=1e-12, msg=f"{moment} of {name}")


@pytest.mark.parametrize("checkpointing", [None, False, True], ids=["plain", "non-reentrant", "reentrant"])
@pytest.mark.parametrize("family", ["bart", "t5"])
def test_padding_on_either_side_changes_no_moment(family: str, checkpointing: bool | None) -> None:
    """A padded batch sums to what its examples give one by one, without padding."""
    model = make(family).double().train()  # blocks checkpoint only in training mode
    if checkpointing is not None:
        model.gradient_checkpointing_enable({"use_reentrant": checkpointing})
    layers = linear_layers(model)
    padded = collect_moments(model, [sides_batch(EXAMPLES)], layers, needs=NEEDS)
    alone = [sides_batch([example]) for example in EXAMPLES]
    assert_same(padded, collect_moments(make(family).double(), alone, layers, needs=NEEDS))


@pytest.mark.parametrize("family", ["bart", "t5"])
def test_each_layer_counts_the_tokens_of_its_own_side(family: str) -> None:
    model = make(family).double()
    moments = collect_moments(model, [sides_batch(EXAMPLES)], linear_layers(model), needs=NEEDS)
    source, target = (sum(len(example[side]) for example in EXAMPLES) for side in (0, 1))
    assert source != target
    for name, found in moments.items():
        cross_attention = "EncDecAttention" in name or "encoder_attn" in name
        reads_source = "encoder." in name.replace("decoder.", "") or (
            cross_attention and name.split(".")[-1] in ("k", "v", "k_proj", "v_proj")
        )
        has_one_key = not cross_attention and "decoder" in name and name.endswith((".q", "self_attn.q_proj"))
        expected = source if reads_source else target - len(EXAMPLES) * has_one_key  # the first query of the decoder
        assert found.num_tokens == expected, name
