"""Calibration data in every form that people have it: the same bases, or one line that says what to pass."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from datasets import Dataset, DatasetDict
from torch.utils.data import DataLoader, IterableDataset
from transformers import DataCollatorForSeq2Seq, DataCollatorWithPadding

from adapted import EXAMPLES, adapted
from frozencore import calibrate, get_bases
from frozencore.errors import CalibrationError, ConfigError, DataError, FrozenCoreError
from frozencore.tune.pocket import pocket_model_path
from tiny import batch_of, batches_of

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


class Stream(IterableDataset):
    """Data without a known end."""

    def __iter__(self) -> Iterator[Any]:
        yield from itertools.cycle(EXAMPLES)


class MapStyle(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return len(ROWS)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return ROWS[index % len(ROWS)]


def calibrated(data: Any, **options: Any) -> dict[str, torch.Tensor]:
    model = adapted("fcca", calibrated=False)
    calibrate(model, data, progress=False, **options)
    return get_bases(model)


def assert_equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    assert all(torch.equal(X, other[key]) for key, X in one.items())


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
    assert_equal(calibrated(data, **options), expected)


def test_a_dataset_is_read_once_per_layer_group_in_the_same_order(expected: dict[str, torch.Tensor]) -> None:
    from frozencore import CalibrationOptions

    options = CalibrationOptions(group_size=3)
    assert_equal(calibrated(Dataset.from_list(ROWS), collator=stacked, batch_size=4, options=options), expected)


def test_the_progress_of_a_dataset_knows_its_end() -> None:
    told: list[tuple[str, int, int | None]] = []
    model = adapted("fcca", calibrated=False)
    calibrate(model, Dataset.from_list(ROWS), collator=stacked, progress=lambda *step: told.append(step))
    assert told[0] == ("calibration", 8, 8)


@pytest.mark.parametrize("num_examples", [None, 4])
def test_a_shuffling_loader_leaves_the_random_state_alone(num_examples: int | None) -> None:
    loader = DataLoader(EXAMPLES, batch_size=2, shuffle=True, collate_fn=batch_of)
    before = torch.get_rng_state()
    calibrated(loader, num_examples=num_examples)
    assert torch.equal(torch.get_rng_state(), before)


def test_the_collators_of_transformers_work(expected: dict[str, torch.Tensor]) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(pocket_model_path())
    collator = DataCollatorForSeq2Seq(tokenizer)
    for key, basis in calibrated(Dataset.from_list(ROWS), collator=collator, batch_size=4).items():
        torch.testing.assert_close(basis, expected[key], atol=1e-4, rtol=0)  # another padding token
    with pytest.raises(DataError, match="tokenised rows, but these have 'prompt' and the collator cannot read them"):
        calibrated(Dataset.from_list([{"prompt": "a"}]), collator=DataCollatorWithPadding(tokenizer))


WRONG: dict[str, tuple[Callable[[], Any], dict[str, Any], type[FrozenCoreError], str]] = {
    "rows without a collator": (lambda: Dataset.from_list(ROWS), {}, DataError, "Pass collator=DataCollator"),
    "text without a collator": (
        lambda: Dataset.from_list([{"prompt": "a", "completion": "b"}]),
        {}, DataError, "rows \\('prompt', 'completion'\\).*Tokenise its rows first",
    ),
    "list of rows": (lambda: ROWS, {}, DataError, "number 0 is 'input_ids': list, .*rows with a collator"),
    "list of rows, cut": (lambda: ROWS, {"num_examples": 2}, DataError, "number 0 is 'input_ids': list"),
    "a row of tensors": (
        lambda: [{key: value[0] for key, value in batch_of(EXAMPLES).items()}], {}, DataError, "number 0 is",
    ),
    "text": (lambda: ["a", "b"], {}, DataError, "number 0 is str"),
    "splits": (lambda: DatasetDict(train=Dataset.from_list(ROWS)), {}, DataError, "one split, such as"),
    "one batch": (lambda: batch_of(EXAMPLES), {}, DataError, "a single batch: pass \\[batch\\]"),
    "endless batches": (lambda: itertools.cycle(batches_of(EXAMPLES, 4)), {}, ConfigError, "num_examples=128"),
    "one batch for ever": (lambda: itertools.repeat(batch_of(EXAMPLES)), {}, ConfigError, "num_examples=128"),
    "a stream": (Stream, {"collator": batch_of}, ConfigError, "this Stream has no known end"),
    "a loader of a stream": (lambda: DataLoader(Stream()), {}, ConfigError, "this DataLoader has no known end"),
    "a stream of datasets": (
        lambda: Dataset.from_list(ROWS).to_iterable_dataset(), {"collator": stacked}, ConfigError, "num_examples=128",
    ),
    "a collator for batches": (
        lambda: DataLoader(EXAMPLES, collate_fn=batch_of), {"collator": stacked}, ConfigError, "Leave the collator out",
    ),
    "a size without a collator": (lambda: ROWS, {"batch_size": 2}, ConfigError, "Pass a collator as well"),
    "no rows in a batch": (lambda: ROWS, {"batch_size": 0, "collator": stacked}, ConfigError, "but 0 came"),
    "no rows": (lambda: [], {"collator": stacked}, CalibrationError, "the data gave none"),
}  # fmt: skip


@pytest.mark.usefixtures("as_a_user")
@pytest.mark.parametrize("case", WRONG)
def test_what_cannot_be_read_is_one_line_that_says_what_to_pass(case: str) -> None:
    data, options, error, message = WRONG[case]
    with pytest.raises(error, match=message) as caught:
        calibrated(data(), **options)
    assert "\n" not in str(caught.value)


def test_a_finite_repetition_is_not_endless(expected: dict[str, torch.Tensor]) -> None:
    assert calibrated(itertools.repeat(batch_of(EXAMPLES), 2)).keys() == expected.keys()


def test_what_a_collator_says_of_tokenised_rows_is_not_ours_to_replace() -> None:
    def refuses(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        raise ValueError("the third label is beyond the vocabulary")

    with pytest.raises(ValueError, match=r"^the third label is beyond the vocabulary$") as caught:
        calibrated(Dataset.from_list(ROWS), collator=refuses)
    assert not isinstance(caught.value, FrozenCoreError)
