"""Calibration data in every form that people have it: the same bases, or one line that says what to pass."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from datasets import Dataset
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import AutoTokenizer, DataCollatorForSeq2Seq

from frozencore import CalibrationOptions, calibrate, get_basis
from frozencore.calibration.batches import (
    batches_from,
    example_of_tokens,
    num_examples_of,
    require_examples_apart,
    take_examples,
    targets_of,
)
from frozencore.errors import DataError
from frozencore.tune.pocket import pocket_model_path
from tiny import EXAMPLES, Stream, adapted, batch_of, batches_of, draw_examples, same_tensors

ROWS = [
    {"input_ids": list(e.ids), "labels": [-100] * e.num_prompt + list(e.ids[e.num_prompt :]), "text": "raw"}
    for e in EXAMPLES
]


def stacked(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """A collator that pads, and fails on text as those of transformers do."""
    longest = max(len(row["input_ids"]) for row in rows)
    fillers = {"input_ids": 7, "labels": -100, "attention_mask": 0}
    rows = [{"attention_mask": [1] * len(row["input_ids"]), **row} for row in rows]
    return {
        key: torch.tensor([[*row[key], *[fillers.get(key, 0)] * (longest - len(row[key]))] for row in rows])
        for key in rows[0]
    }


class MapStyle(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return len(ROWS)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return ROWS[index % len(ROWS)]


def calibrated(data: Any, **options: Any) -> dict[str, torch.Tensor]:
    model = adapted("fcca", calibrated=False)
    calibrate(model, data, progress=False, **options)
    return get_basis(model).tensors


@pytest.fixture(scope="module")
def expected() -> dict[str, torch.Tensor]:
    return calibrated(batches_of(EXAMPLES, 4))


FORMS: dict[str, Callable[[], tuple[Any, dict[str, Any]]]] = {
    "loader": lambda: (DataLoader(EXAMPLES, batch_size=4, collate_fn=batch_of), {}),
    "generator": lambda: ((batch for batch in batches_of(EXAMPLES, 4)), {}),
    "dataset": lambda: (Dataset.from_list(ROWS), {"collator": stacked, "batch_size": 4}),
    "dataset of tensors": lambda: (
        Dataset.from_list(ROWS).with_format("torch", columns=["input_ids", "labels"]),
        {"collator": stacked, "batch_size": 4},
    ),
    "map-style dataset": lambda: (MapStyle(), {"collator": stacked, "batch_size": 4}),
    "list of rows": lambda: (ROWS, {"collator": stacked, "batch_size": 4}),
    "stream of rows": lambda: (
        Dataset.from_list(ROWS).to_iterable_dataset(),
        {"collator": stacked, "batch_size": 4, "num_examples": 8},
    ),
    "endless loader": lambda: (DataLoader(Stream(), batch_size=4, collate_fn=batch_of), {"num_examples": 8}),
    "endless batches": lambda: (itertools.cycle(batches_of(EXAMPLES, 4)), {"num_examples": 8}),
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_the_same_examples_gives_the_same_bases(form: str, expected: dict[str, torch.Tensor]) -> None:
    data, options = FORMS[form]()
    assert same_tensors(calibrated(data, **options), expected)


@pytest.mark.parametrize("num_examples", [None, 4])
def test_a_shuffling_loader_leaves_the_random_state_alone(num_examples: int | None) -> None:
    loader = DataLoader(EXAMPLES, batch_size=2, shuffle=True, collate_fn=batch_of)
    before = torch.get_rng_state()
    calibrated(loader, num_examples=num_examples)
    assert torch.equal(torch.get_rng_state(), before)


def test_the_collators_of_transformers_work(expected: dict[str, torch.Tensor]) -> None:
    tokenizer = AutoTokenizer.from_pretrained(pocket_model_path())
    collator = DataCollatorForSeq2Seq(tokenizer)
    for key, basis in calibrated(Dataset.from_list(ROWS), collator=collator, batch_size=4).items():
        torch.testing.assert_close(basis, expected[key], atol=1e-4, rtol=0)  # another padding token


class OnAGpu(Tensor):
    """Its values can be read on the CPU alone."""

    def to(self, *_: Any, **__: Any) -> Tensor:
        return self.as_subclass(Tensor)

    def __bool__(self) -> bool:
        raise AssertionError("waits for the GPU")

    __int__ = tolist = __bool__  # type: ignore[assignment]


def test_batches_on_a_gpu_are_moved_to_the_cpu_before_they_are_read() -> None:
    batch = batch_of(EXAMPLES)
    batch["position_ids"] = torch.arange(batch["input_ids"].shape[1]).expand_as(batch["input_ids"])
    moved = batches_from([{key: X.as_subclass(OnAGpu) for key, X in batch.items()}], num_examples=2)
    assert {key: type(X) for key, X in moved[0].items()} == dict.fromkeys(batch, Tensor)
    assert torch.equal(moved[0]["input_ids"], batch["input_ids"][:2])


SEVEN = draw_examples(num_examples=7, seed=3)


@pytest.mark.parametrize("num_examples", [1, 3, 4, 7, 100])
def test_take_examples_stops_at_the_number_and_asks_for_no_batch_more(num_examples: int) -> None:
    asked = 0

    def loader() -> Iterable[dict[str, torch.Tensor]]:
        nonlocal asked
        for batch in batches_of(SEVEN, 3):
            asked += 1
            yield batch

    taken = torch.cat([batch["labels"][:, 0] for batch in take_examples(loader(), num_examples)])
    assert len(taken) == min(num_examples, 7)
    assert asked == min(-(-num_examples // 3), 3)


SAYS_BEGINNINGS = {  # of examples of 3, 4 and 2 tokens
    "position_ids": torch.tensor([[0, 1, 2, 0, 1, 2, 3, 0, 1]]),
    "positions from 2 on": torch.tensor([[2, 3, 4, 2, 3, 4, 5, 2, 3]]),
    "seq_idx": torch.tensor([[0, 0, 0, 1, 1, 1, 1, 2, 2]], dtype=torch.int32),
    "cu_seq_lens_q": torch.tensor([0, 3, 7, 9], dtype=torch.int32),
}


@pytest.mark.parametrize("says", SAYS_BEGINNINGS)
def test_examples_of_a_packed_row_are_counted_and_cut(says: str) -> None:
    ids = torch.arange(9)[None]
    key = "position_ids" if says.startswith("pos") else says
    batch = {"input_ids": ids, "labels": ids, "max_length_q": 4, key: SAYS_BEGINNINGS[says]}
    assert num_examples_of(batch) == 3
    for num_examples, length in ((1, 3), (2, 7), (3, 9), (4, 9)):
        (taken,) = take_examples([batch], num_examples)
        assert (taken["labels"].shape, num_examples_of(taken)) == ((1, length), min(num_examples, 3))
    assert sum(map(num_examples_of, take_examples([batch] * 3, 7))) == 7
    assert example_of_tokens(batch, ids).tolist() == [[0, 0, 0, 1, 1, 1, 1, 2, 2]]
    assert targets_of(batch).tolist() == [[1, 2, -100, 4, 5, 6, -100, 8, -100]]


def joined(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """A collator that lays rows end to end and does not say where they begin."""
    return {key: torch.tensor([[x for row in rows for x in row[key]]]) for key in ("input_ids", "labels")}


def test_rows_that_were_joined_without_saying_where_they_begin_need_token_sum() -> None:
    loader = DataLoader(ROWS, batch_size=4, collate_fn=joined)
    for data, options in ((loader, {}), (ROWS, {"collator": joined, "batch_size": 8})):
        with pytest.raises(DataError, match="[48] rows were joined to one.*token_sum"):
            calibrated(data, **options)
        calibrated(data, **options, options=CalibrationOptions(weighting="token_sum"))
    calibrated(DataLoader(ROWS, batch_size=1, collate_fn=joined))
    calibrated(DataLoader(ROWS[:1], batch_size=4, collate_fn=joined))
    whole = [{name: values for name, values in row.items() if name != "text"} for row in ROWS]
    calibrated(DataLoader(whole, batch_size=4, collate_fn=stacked), num_examples=1)  # the first row of four


def test_chats_cut_at_one_length_are_not_taken_for_joined_rows() -> None:
    chats = torch.randint(3, 40, (8, 6), generator=torch.Generator().manual_seed(0))
    chats[:, 0], chats[:, 3] = 1, 2  # all begin with one token, and hold the end of a turn
    loader = DataLoader([{"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids} for ids in chats], 4)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        require_examples_apart(loader, list(loader), None, {2})
    chats[:, 0] = torch.arange(3, 11)
    with pytest.warns(UserWarning, match="as packing_strategy='wrapped' makes"):
        require_examples_apart(loader, list(loader), None, {2})


@pytest.mark.parametrize("num_rows", [2, 3, 4])
def test_a_batch_with_positions_on_three_axes_stays_whole(num_rows: int) -> None:
    """M-RoPE's are (3, rows, tokens), which three rows do not tell from rows."""
    batch = {"input_ids": torch.ones(num_rows, 5), "position_ids": torch.arange(5).expand(3, num_rows, 5)}
    assert [taken["input_ids"].shape[0] for taken in take_examples([batch], 1)] == [num_rows]


@pytest.mark.parametrize("patches", [1, 4, 2048])
def test_take_examples_cuts_rows_and_no_patches(patches: int) -> None:
    """Patches of all images are one tensor, as in the vision models of transformers."""
    batch = {"pixel_values": torch.ones(patches, 8), "input_ids": torch.ones(3, 5), "labels": torch.ones(3, 5)}
    for num_examples, expected in ((128, 3), (3, 3), (2, 3)):
        (taken,) = take_examples([batch], num_examples)
        assert (len(taken["pixel_values"]), len(taken["input_ids"])) == (patches, expected)
    assert sum(len(taken["input_ids"]) for taken in take_examples([batch] * 5, 6)) == 6
