"""Rows of a run: of its own task, of files of the user, or of another task to calibrate on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from frozencore.errors import ConfigError, DataError, NoRowsError
from frozencore.tune.config import RunConfig, make_config
from frozencore.tune.rows.prompts import PromptEncoder
from frozencore.tune.rows.row import Row
from frozencore.tune.run_rows import RowCache, RunRows, encoded, prepare_rows
from input_files import write_rows, write_task

ASKED = {"role": "user", "content": "Is it?"}


def config_of(**options: Any) -> RunConfig:
    return make_config(**{"model": "any", "calibration_size": 5, **options})


def rows_of(config: RunConfig, encoder: PromptEncoder, kept: RowCache | None = None) -> RunRows:
    encoder.too_long = config.rows.too_long  # as of the encoder that a run makes
    return prepare_rows(config.rows, config.scoring, encoder, kept)


def write_texts(path: Path, texts: Iterable[str]) -> str:
    return str(write_rows(path, ({"text": text} for text in texts)))


def write_counts(path: Path, count: int, kind: str = "cats") -> str:
    return str(write_rows(path, ({"prompt": f"{i} {kind}?", "completion": f" {i}"} for i in range(count))))


def counts(config: RunConfig, encoder: PromptEncoder) -> tuple[int, int, str]:
    rows = rows_of(config, encoder)
    return len(rows.train), len(rows.held_out), rows.used.validation_from


def test_trials_hold_out_a_tenth_where_final_runs_train_on_all_rows(encoder: PromptEncoder, tmp_path: Path) -> None:
    final = config_of(task=write_task(tmp_path, num_train=20), paper_steps=True)
    trial = final.replaced(evaluate_on="validation")
    assert counts(final, encoder) == (20, 3, "none")
    assert counts(trial, encoder) == (18, 2, "10% of train")
    plain = trial.replaced(paper_steps=False)
    assert rows_of(trial, encoder).fingerprints == rows_of(plain, encoder).fingerprints


def test_rows_by_seed_vary_with_the_seed_and_are_otherwise_the_same(encoder: PromptEncoder, tmp_path: Path) -> None:
    task = write_task(tmp_path, num_train=40)
    few = {"task": task, "num_train": 8, "num_evaluation": 2}
    fixed = [rows_of(config_of(**few, seed=seed), encoder).fingerprints for seed in (1, 2)]
    drawn = [rows_of(config_of(**few, seed=seed, rows_by_seed=True), encoder).fingerprints for seed in (1, 2, 2)]
    assert (fixed[0]["train"], fixed[0]["evaluation"]) == (fixed[1]["train"], fixed[1]["evaluation"])
    assert drawn[0]["train"] != drawn[1]["train"]
    assert drawn[0]["evaluation"] != drawn[1]["evaluation"]
    assert drawn[1] == drawn[2]


def test_a_task_without_a_row_to_validate_on_says_so(encoder: PromptEncoder, tmp_path: Path) -> None:
    one_row = config_of(task=write_task(tmp_path, num_train=1), evaluate_on="validation")
    with pytest.raises(NoRowsError, match=r"task:.* leaves no validation rows beside its 1 to train on\. Give it more"):
        rows_of(one_row, encoder)


def test_own_rows_to_validate_on_are_neither_trained_on_nor_evaluated(encoder: PromptEncoder, tmp_path: Path) -> None:
    path = write_texts(tmp_path / "rows.jsonl", (f"Tom has {i} cats." for i in range(50)))
    final = rows_of(config_of(data=path), encoder)
    trial = rows_of(config_of(data=path, evaluate_on="validation"), encoder)
    evaluated, trained, scored = ({row.id for row in rows} for rows in (final.held_out, trial.train, trial.held_out))
    assert (len(evaluated), len(trained), len(scored)) == (5, 41, 4)
    assert evaluated | trained | scored == {row.id for row in (*final.train, *final.held_out)}
    assert (final.used.validation_from, trial.used.validation_from) == ("none", "10% of train")
    choosing = rows_of(config_of(data=path, select_checkpoint="epoch"), encoder)
    assert choosing.validation is not None
    sets = [{row.id for row in part} for part in (choosing.train, choosing.validation.tokens, choosing.held_out)]
    assert sets == [trained, scored, evaluated]


def test_rows_that_are_too_long_are_left_out_and_counted_where_that_is_allowed(
    byte_tokenizer: Callable[..., Any], tmp_path: Path
) -> None:
    rows = [{"prompt": f"Tom has {i} cats", "completion": " and one"} for i in range(30)]
    rows += [{"prompt": "Tom " * 40 + str(i), "completion": " ends"} for i in range(3)]
    rows += [{"prompt": f"Tell me {i}", "completion": " all" * 40} for i in range(2)]
    path = write_rows(tmp_path / "rows.jsonl", rows)
    encoder = PromptEncoder(byte_tokenizer(), max_length=60)
    with pytest.raises(DataError, match=r"Rows are longer than the limit of 60"):
        rows_of(config_of(data=path), encoder)
    for too_long, expected in (("cut", (33, 3, 2)), ("skip", (30, 0, 5))):
        found = rows_of(config_of(data=path, too_long=too_long), encoder)
        assert (len(found.train) + len(found.held_out), found.used.cut or 0, found.used.skipped) == expected
        assert max(len(row.input_ids) for row in (*found.train, *found.held_out)) <= 60
        assert {row.input_ids[-1] for row in (*found.train, *found.held_out)} == {encoder.eos_id}
    task = config_of(task=write_task(tmp_path, num_train=20), too_long="skip")
    with pytest.raises(NoRowsError, match="--too-long left none of 18 rows"):
        rows_of(task, PromptEncoder(byte_tokenizer(), max_length=5))


def test_a_long_row_that_is_scored_and_also_chooses_the_step_is_counted_once(
    byte_tokenizer: Callable[..., Any], tmp_path: Path
) -> None:
    task = write_task(tmp_path, num_train=20)
    rows = [{"count": i, "things": "cats" * (9 if i % 2 else 1), "sum": i} for i in range(20)]
    write_rows(tmp_path / "train.jsonl", rows)
    trial = {"task": task, "too_long": "skip", "evaluate_on": "validation"}
    plain, choosing = (
        rows_of(config_of(**trial, select_checkpoint=every), PromptEncoder(byte_tokenizer(), max_length=70))
        for every in ("none", "epoch")
    )
    assert choosing.used == plain.used
    assert plain.used.skipped == 10
    assert choosing.validation == choosing.scored == plain.scored


def test_every_row_that_was_read_is_trained_on_held_out_or_said_to_be_left_out(
    encoder: PromptEncoder, tmp_path: Path
) -> None:
    texts = [*(f"Tom has {i} cats." for i in range(30)), "long " * 200, ""]
    path = write_texts(tmp_path / "rows.jsonl", texts)
    for options, why in (
        ({}, {}),
        ({"num_train": 20}, {"beyond --num-train": 7}),
        ({"evaluate_on": "validation"}, {"kept to evaluate on": 3}),
    ):
        found = rows_of(config_of(data=path, skip_bad=True, too_long="skip", **options), encoder)
        assert found.used.left_out == {"column 'text' must hold text": 1, "too long": 1} | why
        used = len(found.train) + len(found.held_out)
        assert found.used.read == len(texts) == used + sum(found.used.left_out.values())
    assert rows_of(config_of(task=write_task(tmp_path, num_train=20)), encoder).used.left_out == {}


def test_rows_that_are_left_out_beside_the_rows_of_the_run_are_counted_too(
    encoder: PromptEncoder, tmp_path: Path
) -> None:
    for name, texts in (
        ("train", ["a b", "a  b", "A b", "c1ccccc1", "C1CCCCC1", "🙂", "🙃"]),
        ("eval", ["a b", "x", "y"]),
    ):
        write_texts(tmp_path / f"{name}.jsonl", (*texts, "long " * 200, ""))
    given = {"eval_data": str(tmp_path / "eval.jsonl"), "num_evaluation": 2}
    found = rows_of(config_of(data=tmp_path / "train.jsonl", skip_bad=True, too_long="skip", **given), encoder)
    assert (len(found.train), len(found.held_out)) == (5, 2)
    bad = "column 'text' must hold text"
    assert found.used.left_out == {
        bad: 1, "too long": 1, "also in --eval-data": 2,
        f"{bad} (--eval-data)": 1, "too long (--eval-data)": 1, "beyond --num-evaluation": 1,
    }  # fmt: skip


def test_rows_of_a_task_that_are_also_evaluated_are_counted_in_the_record(
    encoder: PromptEncoder, tmp_path: Path
) -> None:
    config = config_of(task=write_task(tmp_path, num_train=20))
    with (tmp_path / "train.jsonl").open("a") as file:
        file.write((tmp_path / "evaluation.jsonl").read_text())
    rows = rows_of(config, encoder)
    assert rows.used.left_out == {"also evaluation rows": 3}


@pytest.mark.parametrize("evaluate_on", ["evaluation", "validation"])
def test_rows_of_another_task_are_those_that_its_own_run_calibrates_on_and_only_calibrate(
    evaluate_on: str, encoder: PromptEncoder, tmp_path: Path
) -> None:
    same = {"paper_steps": True, "evaluate_on": evaluate_on, "calibration_size": 16}
    sums, few = write_task(tmp_path, num_train=20), {"task": "pocket-sentiment", "num_train": 16, "num_evaluation": 3}
    other, own, across, of_file = (
        rows_of(config_of(**options, **same), encoder)
        for options in (
            {"task": sums}, few, {**few, "calibration_task": sums},
            {"data": write_counts(tmp_path / "rows.jsonl", 9), "calibration_task": sums},
        )
    )  # fmt: skip
    assert (across.train, across.held_out) == (own.train, own.held_out)
    assert across.calibration == of_file.calibration == other.calibration != own.calibration


def test_rows_that_are_kept_are_those_that_would_be_read_and_are_read_once(
    encoder: PromptEncoder, tmp_path: Path
) -> None:
    final = config_of(task=write_task(tmp_path, num_train=20), paper_steps=True)
    runs = [
        final.replaced(**changes)
        for changes in ({}, {"evaluate_on": "validation"}, {"seed": 7}, {"calibration_size": 3}, {"num_train": 10})
    ]

    def read(kept: RowCache | None) -> list[Any]:
        found = [rows_of(run, encoder, kept) for run in runs]
        return [(rows.scored, rows.train, rows.calibration, rows.used.validation_from) for rows in found]

    fresh, kept = read(None), RowCache()
    assert read(kept) == fresh
    (tmp_path / "train.jsonl").unlink()
    assert read(kept) == fresh


def test_conversations_of_a_source_are_kept_by_their_messages(byte_tokenizer: Callable[..., Any]) -> None:
    encoder, kept = PromptEncoder(byte_tokenizer(chat=True)), RowCache()
    rows = [[Row("row-1", messages=(ASKED, {"role": "assistant", "content": text}))] for text in ("yes", "no")]
    for _ in range(2):
        assert [encoded(one, encoder, kept) for one in rows] == [encoder.encode(one) for one in rows]


def test_what_was_not_asked_for_the_longest_makes_room() -> None:
    kept, made = RowCache(most_rows=5), []

    def ask(key: str) -> str:
        def make() -> str:
            made.append(key)
            return key

        return kept.get(key, make, len)

    for key in ("aa", "bb", "aa", "cc", "aa", "bb", "tooo long", "bb"):
        assert ask(key) == key
    assert made == ["aa", "bb", "cc", "bb", "tooo long", "bb"]


def test_a_run_may_answer_in_fewer_tokens_than_its_task_allows(encoder: PromptEncoder, tmp_path: Path) -> None:
    config = config_of(task=write_task(tmp_path, num_train=5))
    few = config.replaced(max_new_tokens=2)
    assert [rows_of(run, encoder).scored.max_new_tokens for run in (config, few)] == [8, 2]


@pytest.fixture
def files(tmp_path: Path) -> tuple[str, str]:
    return write_counts(tmp_path / "a.jsonl", 300), write_counts(tmp_path / "b.jsonl", 50, "dogs")


def own_rows(encoder: PromptEncoder, data: Any, **options: Any) -> RunRows:
    return rows_of(make_config(model="any", data=data, **options), encoder)


def kinds(encoder: PromptEncoder, rows: RunRows) -> Counter[str]:
    texts = [encoder.tokenizer.decode(row.input_ids) for row in (*rows.train, *rows.held_out)]
    return Counter("cats" if "cats" in text else "dogs" for text in texts)


def test_all_rows_of_all_files_are_taken_and_the_rows_of_each_are_reported(
    files: tuple[str, str], encoder: PromptEncoder
) -> None:
    rows = own_rows(encoder, list(files))
    assert kinds(encoder, rows) == {"cats": 300, "dogs": 50}
    assert len(rows.held_out) == 35
    assert len({row.id for row in (*rows.train, *rows.held_out)}) == 350
    assert [one.content() for one in rows.used.sources] == [
        {"source": files[0], "read": 300, "drawn": 300},
        {"source": files[1], "read": 50, "drawn": 50},
    ]


def test_one_file_in_a_list_is_the_file(files: tuple[str, str], encoder: PromptEncoder) -> None:
    assert make_config(model="any", data=[files[0]]) == make_config(model="any", data=files[0])
    assert own_rows(encoder, [files[0]]).fingerprints == own_rows(encoder, files[0]).fingerprints


def test_each_file_has_its_own_form_and_an_error_names_the_file(
    tmp_path: Path, files: tuple[str, str], encoder: PromptEncoder
) -> None:
    reading = own_rows(encoder, (files[0], write_texts(tmp_path / "t.jsonl", ["plain"]))).used
    assert reading.columns == ("prompt", "completion", "text")
    bad = write_rows(tmp_path / "bad.jsonl", ({"text": "plain"}, {"text": 3}))
    with pytest.raises(DataError, match=r"Row 2:bad.jsonl:row-2: column 'text' must hold text, but holds 3"):
        own_rows(encoder, (files[0], bad))


def test_rows_to_evaluate_on_come_from_a_file_of_their_own_and_are_never_trained_on(
    tmp_path: Path, files: tuple[str, str], encoder: PromptEncoder
) -> None:
    held = write_counts(tmp_path / "held.jsonl", 20)  # read like the first 20 of a.jsonl
    rows = own_rows(encoder, files[0], eval_data=held)
    assert (len(rows.train), len(rows.held_out)) == (280, 20)
    trained = {tuple(row.input_ids) for row in rows.train}
    assert not trained & {tuple(row.input_ids) for row in rows.held_out}
    assert rows.used.left_out == {"also in --eval-data": 20}
    assert rows.used.held_out_from == "held.jsonl"
    assert len(own_rows(encoder, files[0], eval_data=held, num_evaluation=5).held_out) == 5
    with pytest.raises(NoRowsError, match="all in --eval-data"):
        own_rows(encoder, held, eval_data=held)


@pytest.mark.parametrize(("select_by", "scoring"), [("accuracy", "completion"), ("held_out_loss", "choice")])
def test_choices_are_scored_if_the_rows_whose_accuracy_chooses_the_step_have_them_too(
    select_by: str, scoring: str, tmp_path: Path, files: tuple[str, str], encoder: PromptEncoder
) -> None:
    choices = [" no", " yes"]
    asked = [{"prompt": f"Is {i}?", "completion": choices[i % 2], "choices": choices} for i in range(4)]
    held = str(write_rows(tmp_path / "held.jsonl", asked))
    rows = own_rows(encoder, files[0], eval_data=held, select_checkpoint="epoch", select_by=select_by)
    assert rows.scored.scoring == scoring


def test_options_are_chosen_on_training_rows_not_on_the_file_of_held_out_rows(
    tmp_path: Path, files: tuple[str, str], encoder: PromptEncoder
) -> None:
    held = write_counts(tmp_path / "held.jsonl", 20, "dogs")
    rows = own_rows(encoder, files[0], eval_data=held, evaluate_on="validation")
    assert (len(rows.train), len(rows.held_out)) == (270, 30)
    assert kinds(encoder, rows) == {"cats": 300}


def test_loss_on_all_turns_takes_conversations(files: tuple[str, str], byte_tokenizer: Callable[..., Any]) -> None:
    encoder = PromptEncoder(byte_tokenizer(chat=True), loss_on="all")
    with pytest.raises(ConfigError, match="--loss-on all is about conversations, but .*a.jsonl holds none"):
        own_rows(encoder, files[0], loss_on="all")


@pytest.mark.parametrize(
    ("texts", "system"), [(("Be brief.",), "Be brief."), (("Be brief.", "Rhyme."), None), (("Be brief.", None), None)]
)
def test_the_system_text_of_all_conversations_is_known(
    texts: tuple[str | None, ...], system: str | None, tmp_path: Path, byte_tokenizer: Callable[..., Any]
) -> None:
    rows: list[dict[str, Any]] = []
    for i in range(20):
        text = texts[i % len(texts)]
        first = [] if text is None else [{"role": "system", "content": text}]
        turns = [{"role": "user", "content": f"{i}?"}, {"role": "assistant", "content": f"{i}!"}]
        rows.append({"messages": [*first, *turns]})
    encoder = PromptEncoder(byte_tokenizer(chat=True))
    assert own_rows(encoder, write_rows(tmp_path / "rows.jsonl", rows)).system == system


@pytest.mark.parametrize(("num_unique", "num_equal", "held_out"), [(10, 90, 10), (40, 3, 10), (0, 100, 0), (1, 99, 1)])
def test_equal_rows_stay_in_one_part_and_never_take_the_training_rows(
    num_unique: int, num_equal: int, held_out: int, tmp_path: Path, encoder: PromptEncoder
) -> None:
    spaced = ("Same one?", "  Same one? ", "Same\u2003one?")
    rows = [{"prompt": f"Unique {i}?", "completion": " a"} for i in range(num_unique)]
    rows[num_unique // 2 : num_unique // 2] = [{"prompt": spaced[i % 3], "completion": " b"} for i in range(num_equal)]
    data = write_rows(tmp_path / "rows.jsonl", rows)
    config = config_of(data=data, num_evaluation=10, calibration_size=1000)
    if not held_out:
        with pytest.raises(NoRowsError, match="read alike"):
            rows_of(config, encoder)
        return
    found = rows_of(config, encoder)
    assert len(found.held_out) == held_out
    assert len(found.train) == num_unique + num_equal - held_out
    assert sorted(row.id for row in found.calibration) == sorted(row.id for row in found.train)
    decode = encoder.tokenizer.decode
    texts, trained = ({" ".join(decode(row.input_ids).split()) for row in p} for p in (found.held_out, found.train))
    assert texts.isdisjoint(trained)


@pytest.mark.parametrize("given", [None, 5])
def test_own_answers_are_generated_to_the_length_of_the_longest_unless_one_is_given(
    given: int | None, tmp_path: Path, encoder: PromptEncoder
) -> None:
    rows = ({"prompt": f"{i}?", "completion": " cat" * (20 + i)} for i in range(20))
    data = write_rows(tmp_path / "rows.jsonl", rows)
    found = own_rows(encoder, data, exact_match="yes", max_new_tokens=given)
    longest = max(len(row.input_ids) - row.answer_start for row in found.held_out)  # with its end token
    assert longest > 20
    assert (found.scored.scoring, found.scored.max_new_tokens) == ("completion", given or longest)


@pytest.mark.parametrize("select_checkpoint", ["none", "epoch"])
def test_rows_that_are_scored_or_choose_the_step_are_not_calibrated_on(
    select_checkpoint: str, files: tuple[str, str], tmp_path: Path, encoder: PromptEncoder
) -> None:
    options = {"calibration_data": files[0], "calibration_size": 1000, "select_checkpoint": select_checkpoint}
    rows = own_rows(encoder, list(files), **options)
    calibrated = {tuple(row.input_ids) for row in rows.calibration}
    unseen = {tuple(row.input_ids) for row in rows.scored_or_choosing}
    assert calibrated
    assert calibrated.isdisjoint(unseen)
    assert rows.used.left_out == {"scored, so not calibrated on (--calibration-data)": 300 - len(rows.calibration)}
    trial = own_rows(encoder, list(files), evaluate_on="validation", **options)
    final = {tuple(row.input_ids) for row in own_rows(encoder, list(files)).held_out}
    assert {tuple(row.input_ids) for row in trial.calibration}.isdisjoint(final)
    held = write_counts(tmp_path / "held.jsonl", 20)
    with pytest.raises(NoRowsError, match=r"held.jsonl holds only rows that are scored too"):
        own_rows(encoder, files[1], eval_data=held, calibration_data=held)


def test_the_system_text_is_that_of_the_training_rows_alone(tmp_path: Path, byte_tokenizer: Callable[..., Any]) -> None:
    def write(name: str, first: list[dict[str, str]]) -> str:
        turns = ([*first, ASKED, {"role": "assistant", "content": f"{name}{i}"}] for i in range(20))
        return str(write_rows(tmp_path / name, ({"messages": messages} for messages in turns)))

    learnt = write("train.jsonl", [{"role": "system", "content": "Be brief."}])
    others = write("other.jsonl", [])
    encoder = PromptEncoder(byte_tokenizer(chat=True))
    rows = own_rows(encoder, learnt, eval_data=others, calibration_data=write("third.jsonl", []))
    assert rows.system == "Be brief."
    assert own_rows(encoder, others).system is None  # not that of rows which the encoder wrote before
    texts = write_texts(tmp_path / "texts.jsonl", (f"Tom has {i} cats." for i in range(20)))
    assert own_rows(encoder, [learnt, texts]).system == "Be brief."  # a text is no conversation without one


@pytest.mark.parametrize(
    ("count", "options", "why"),
    [
        (
            50,
            {"num_evaluation": 100},
            "but has 50 rows, all held out: give more rows, a smaller --num-evaluation, or others",
        ),
        (1, {}, "but has 1 row, all held out"),
    ],
)
def test_where_no_row_is_left_to_train_on_the_reason_is_the_right_one(
    count: int, options: dict[str, int], why: str, tmp_path: Path, encoder: PromptEncoder
) -> None:
    with pytest.raises(NoRowsError, match=why):
        own_rows(encoder, write_counts(tmp_path / "rows.jsonl", count), **options)
