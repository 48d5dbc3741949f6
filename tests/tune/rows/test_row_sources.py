"""Rows of one's own from a pipe and from a data set's split, by the same path as from the hub."""

from __future__ import annotations

import gzip
import io
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pandas
import pyarrow
import pyarrow.parquet
import pytest
from datasets import Dataset, load_dataset

from frozencore.errors import ConfigError, DataError
from frozencore.tune.rows.row_sources import named, read_source

ROWS = [{"text": f"Tom has {i} cats."} for i in range(6)]


def pipe(monkeypatch: pytest.MonkeyPatch, content: bytes) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content)))


def test_the_standard_input_is_the_same_rows_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """An evaluation in two prompt styles reads its sources twice."""
    for text in ("a", "b"):
        pipe(monkeypatch, b'{"text": "%s"}' % text.encode())
        assert [read_source("-") for _ in range(2)] == [[{"text": text}]] * 2


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """As a data set lies on the hub: a configuration of two splits, and a card that names them."""
    place = tmp_path / "owner" / "cats"
    (place / "few").mkdir(parents=True)
    for split, rows in (("train", ROWS), ("test", ROWS[:2])):
        Dataset.from_list(rows).to_parquet(place / "few" / f"{split}.parquet")
    splits = "".join(f"  - split: {split}\n    path: few/{split}.parquet\n" for split in ("train", "test"))
    (place / "README.md").write_text(f"---\nconfigs:\n- config_name: few\n  data_files:\n{splits}---\n")
    return place


def test_a_split_of_a_folder_is_its_rows_and_may_be_cut(folder: Path) -> None:
    assert read_source(f"{folder}:train") == ROWS
    assert read_source(f"{folder}:few:test") == ROWS[:2]
    assert read_source(f"{folder}:train[1:3]") == ROWS[1:3]


def test_a_folder_that_datasets_saved_is_one_of_its_splits(folder: Path, tmp_path: Path) -> None:
    whole = load_dataset(str(folder), "few", cache_dir=str(tmp_path / "cache"))
    saved = {"rows": Dataset.from_list(ROWS), "both": whole, "part": whole["test"]}
    for name, one in saved.items():
        one.save_to_disk(tmp_path / name)
    assert read_source(f"{tmp_path / 'rows'}:train") == read_source(f"{tmp_path / 'both'}:train") == ROWS
    assert read_source(f"{tmp_path / 'rows'}:train[1:3]") == ROWS[1:3]
    assert read_source(f"{tmp_path / 'part'}:test") == ROWS[:2]
    with pytest.raises(DataError, match="could not be read from"):
        read_source(f"{tmp_path / 'part'}:train")


@pytest.mark.parametrize("ending", ["csv", "tsv", "csv.gz"])
def test_a_table_in_a_folder_has_the_texts_of_the_file_itself(ending: str, tmp_path: Path) -> None:
    lines = "instruction,input,output\nIs it?,None,007\nIs it?,x,NA\nWhen?,y,2020-01-01\n"
    content = lines.replace(",", "\t" if ending == "tsv" else ",").encode()
    file = tmp_path / "d" / f"train.{ending}"
    file.parent.mkdir()
    file.write_bytes(gzip.compress(content) if ending == "csv.gz" else content)
    rows = read_source(str(file))
    assert [row["output"] for row in rows] == ["007", "NA", "2020-01-01"]
    assert read_source(f"{file.parent}:train") == rows
    assert read_source(f"{file.parent}:train[1:]") == rows[1:]
    assert read_source(f"{file.parent}:train[:34%]") == rows[:1]


def test_a_table_of_a_spreadsheet_may_be_separated_by_semicolons(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text('\ufeff"prompt";completion\nHow much, in all?;3,50\n"a;b";c\n')
    read = [{"prompt": "How much, in all?", "completion": "3,50"}, {"prompt": "a;b", "completion": "c"}]
    assert read_source(str(tmp_path / "rows.csv")) == read


CARDS = {
    "header: null": [{"0": "a, b", "1": 1}, {"0": "c", "1": 2}],
    'quotechar: "\'"': None,
    "encoding: latin-1": None,
}


@pytest.mark.parametrize("option", CARDS)
def test_a_card_that_says_how_a_table_is_read_is_obeyed(option: str, tmp_path: Path) -> None:
    place = tmp_path / "d"
    place.mkdir()
    card = f"---\nconfigs:\n- config_name: default\n  data_files: train.csv\n  {option}\n---\n"
    (place / "README.md").write_text(card)
    text = "a,b\nü,'c, d'\n" if "header" not in option else '"a, b",1\nc,2\n'
    encoding = "latin-1" if "latin" in option else "utf-8"
    (place / "train.csv").write_text(text if "quote" in option else text.replace("'", '"'), encoding)
    assert read_source(f"{place}:train") == (CARDS[option] or [{"a": "ü", "b": "c, d"}])


@pytest.mark.parametrize("part", ["train[abc]", "train[50%:200%]", "train[9:]", "test"])
def test_a_part_that_a_folder_of_tables_does_not_have_is_one_line(part: str, tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "train.csv").write_text("a\nb\n")
    with pytest.raises(DataError, match=r"^[^\n]*could not be read[^\n]*$"):
        read_source(f"{tmp_path / 'd'}:{part}")


def test_a_table_in_a_folder_is_refused_as_the_file_itself(tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "train.csv").write_text('a\n"He said "hi" to me"\n')
    with pytest.raises(DataError, match="train.csv cannot be read as CSV in UTF-8: line 2"):
        read_source(f"{tmp_path / 'd'}:train")


def test_tables_of_a_split_with_other_columns_are_refused(tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    for name, column in (("a", "completion"), ("b", "answer")):
        (tmp_path / "d" / f"train-{name}.csv").write_text(f"prompt,{column}\nx,y\n")
    with pytest.raises(DataError, match="could not be read"):
        read_source(f"{tmp_path / 'd'}:train")


def test_a_file_that_is_not_there_is_guessed_among_its_neighbours(tmp_path: Path) -> None:
    (tmp_path / "tickets.csv").write_text("prompt,completion\na,b\n")
    with pytest.raises(DataError, match=r"^--data: there is no file .*tikets.csv. Did you mean .*/tickets.csv\?$"):
        read_source(str(tmp_path / "tikets.csv"))
    with pytest.raises(DataError, match=r"there is no file .*/ticket\*.csv. Repeat --data for each file.$"):
        read_source(str(tmp_path / "ticket*.csv"))
    (tmp_path / "link.csv").symlink_to("moved.csv")
    with pytest.raises(DataError, match=r"there is no file .*/link.csv"):
        read_source(str(tmp_path / "link.csv"))


CONTENTS = {
    "jsonl": b'{"text": "007"}\n{"text": "2020-01-01"}\n', "json": b'[{"text": "007"}, {"text": "2020-01-01"}]',
    "csv": b"text\n007\n2020-01-01\n",
}  # fmt: skip


@pytest.mark.parametrize("name", ["a.JSONL", "a.ndjson", "a.Json", "a.CSV", "a.Tsv", "a.PARQUET"])
@pytest.mark.parametrize("compression", ["", ".gz", ".zst", ".GZ"])
def test_an_ending_in_any_case_and_a_compressed_file_give_the_texts_as_written(
    name: str, compression: str, tmp_path: Path
) -> None:
    content = CONTENTS.get({"ndjson": "jsonl", "tsv": "csv"}.get(kind := name[2:].lower(), kind))
    if content is None:
        table = pyarrow.table({"text": ["007", "2020-01-01"]})
        pyarrow.parquet.write_table(table, tmp_path / "plain")
        content = (tmp_path / "plain").read_bytes()
    if compression.lower() == ".gz":
        content = gzip.compress(content[:9]) + gzip.compress(content[9:])  # as `cat a.gz b.gz` writes it
    elif compression:
        content = pyarrow.Codec("zstd").compress(content, asbytes=True)
    (tmp_path / f"{name}{compression}").write_bytes(content)
    assert read_source(str(tmp_path / f"{name}{compression}")) == [{"text": "007"}, {"text": "2020-01-01"}]


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ("{}:nothing", r"could not be read from .*nothing"),
        ("{}:many:train", r"Data set .* \(many\) could not be read"),
        ("{}:test[2:]", "could not be read .*no data"),
        ("{}", "Name a split of its data set, as .*:train"),
        ("/no/such/folder:train", "/no/such/folder is neither a folder nor in the offline cache"),
        ("no/such.jsonl", "there is no file no/such.jsonl"),
    ],
)
def test_what_is_not_there_is_one_line(words: str, reason: str, folder: Path) -> None:
    with pytest.raises(DataError, match=reason) as error:
        read_source(words.format(folder))
    assert "\n" not in str(error.value)


def test_a_cache_that_cannot_be_written_is_named(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "home").touch()
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "home" / "datasets")
    with pytest.raises(DataError, match=r"could not be read .*/home.* Set HF_DATASETS_CACHE to a folder that can be"):
        read_source(f"{folder}:train")


@pytest.mark.parametrize("name", ["owner/cats", "cats"])
def test_with_no_hub_in_reach_a_hub_id_is_one_line_at_once(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("frozencore.tune.rows.dataset_splits.hub_answers", lambda *_: False)
    with pytest.raises(
        DataError, match=f"Data set {name} is neither a folder nor in the offline cache, and the hub does not"
    ):
        read_source(f"{name}:train")


def test_the_standard_input_is_jsonl(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = [*ROWS, {"text": "a line\u2028that JSON does not end: ä"}]
    pipe(monkeypatch, "\n\n".join(json.dumps(row, ensure_ascii=False) for row in texts).encode())
    assert read_source("-") == texts


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.csv", "a.tsv", "-"])
def test_a_byte_order_mark_is_no_part_of_the_rows(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = {".json": '[{"text": "ä"}]', ".csv": "text\nä\n", ".tsv": "text\nä\n"}.get(name[1:], '{"text": "ä"}\n')
    (tmp_path / name).write_bytes(b"\xef\xbb\xbf" + content.encode())
    pipe(monkeypatch, b"\xef\xbb\xbf" + content.encode())
    assert read_source(name if name == "-" else str(tmp_path / name)) == [{"text": "ä"}]


def arrow_with_twins() -> bytes:
    table = pyarrow.table([["a"], ["b"]], names=["text", "text"])
    with io.BytesIO() as file:
        with pyarrow.ipc.new_file(file, table.schema) as writer:
            writer.write(table)
        return file.getvalue()


@pytest.mark.parametrize("first", ["", "\n\n", " \n", ",,\n\n"])
def test_a_csv_may_begin_with_empty_lines_and_hold_long_cells(first: str, tmp_path: Path) -> None:
    long = "    indented\n" + "x" * 140_000
    (tmp_path / "a.csv").write_text(f'{first}text,other\n\n"{long}",NA\n')
    assert read_source(str(tmp_path / "a.csv")) == [{"text": long, "other": "NA"}]


def test_separators_at_the_end_of_a_line_are_no_column(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("text,other,,\na,b,,\nc,d\n,e,\n")
    rows = [{"text": "a", "other": "b"}, {"text": "c", "other": "d"}, {"text": "", "other": "e"}]
    assert read_source(str(tmp_path / "a.csv")) == rows


WRONG: list[tuple[str, bytes, str]] = [
    ("a.jsonl", b'{"text": "a"}\n{"text": \n', "a.jsonl cannot be read as JSONL.*: line 2 must be"),
    ("a.jsonl", b'{"text": "\xff\xfe"}\n', "in UTF-8: .*codec can't decode"),
    ("a.jsonl", b'{"text": "a"}\n{"text": "b", "x": 1, "text": "c"}', "'text' is given twice"),
    ("a.jsonl", b'{"messages": [{"role": "user", "content": "a", "content": "b"}]}', "'content' is given twice"),
    ("a.json", b'[{"text": "a", "text": "b"}]', "'text' is given twice"),
    ("a.json", b"3", "it must be a list of objects, or an object a line, but is 3"),
    ("a.json", b'{"text": "a"}\n3', "line 2 must be a JSON object"),
    ("a.csv", b"text,text\na,b\n", "'text' is given twice"),
    ("a.csv", b'text\n"a\n', "a.csv cannot be read as CSV in UTF-8: line 2: unexpected end of data"),
    (
        "a.csv",
        b'text\nb\n"He said \\"hi\\" to me"\n',
        "line 3: ',' expected after '\"'. Inside of a quoted cell a quote is",
    ),
    ("a.csv", b'text\n"He said "hi" to me"\n', "line 2: ',' expected after '\"'"),
    ("a.csv", b"text\n\xff\xfe\n", "in UTF-8: .*codec can't decode"),
    ("a.csv", "text\na\n".encode("utf-16"), r"in UTF-8: .*codec.* Write it in UTF-8: `iconv -f ENCODING -t UTF-8`$"),
    ("a.csv", b"text\n", "holds no rows"),
    ("a.csv", b",,text,other\n0,1,a,b\n", "the column '' is given twice"),
    ("a.tsv", b'text\tother\n"a\tb\tc\n', "a.tsv cannot be read as TSV in UTF-8: .*unexpected end"),
    ("a.csv", b"\n\n", "holds no rows"),
    (
        "a.csv",
        b"text,other\na,b,c\n",
        r"^[^:]*a.csv cannot be read as CSV in UTF-8: line 2 has 3 cells, but the header 2",
    ),
    ("a.arrow", b"ARROW1 no", "cannot be read as ARROW"),
    ("a.arrow", arrow_with_twins(), "the column 'text' is given twice"),
    ("a.parquet", b"nothing", "cannot be read as PARQUET"),
    ("a.jsonl.gz", b'{"text": "a"}', "a.jsonl.gz cannot be read as JSONL"),
    ("a.csv.gz", gzip.compress(b"text\na\n", mtime=0)[:-9], "a.csv.gz cannot be read as CSV.*: .*[Tt]runcated"),
    ("a.jsonl.zst", b'{"text": "a"}', "a.jsonl.zst cannot be read as JSONL"),
    ("a.jsonl.gz", gzip.compress(b'{"text": "\xff"}', mtime=0), "in UTF-8: .*codec can't decode"),
    ("a.json", b'[{"text": "\xff"}]', "in UTF-8: .*codec can't decode"),
    ("a.xlsx", b"text\na\n", "must name a .jsonl, .* .parquet or .arrow file"),
    ("-", b"", "holds no rows"),
    ("-", b'{"text": "a"}\n{"text"', "The standard input cannot be read as JSONL.*: line 2"),
    ("-", b"\xff", "in UTF-8: .*codec can't decode"),
]


@pytest.mark.parametrize(("name", "content", "reason"), WRONG)
def test_a_damaged_source_is_one_line(
    name: str, content: bytes, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / name).write_bytes(content)
    pipe(monkeypatch, content)
    with pytest.raises(DataError, match=reason) as error:
        read_source(name if name == "-" else str(tmp_path / name))
    assert "\n" not in str(error.value)


def test_a_terminal_is_not_waited_for_and_the_code_of_a_data_set_is_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(isatty=lambda: True))
    with pytest.raises(ConfigError, match="is a terminal"):
        read_source("-")
    (tmp_path / "cats").mkdir()
    (tmp_path / "cats" / "cats.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    with pytest.raises(DataError, match="could not be read"):
        read_source(f"{tmp_path / 'cats'}:train")
    assert not (tmp_path / "ran").exists()


def test_a_card_names_a_file_without_its_folder(folder: Path) -> None:
    (folder / "private").mkdir()
    named_as = {str(folder / "README.md"): "README.md", "-": "standard input", "a/b:train": "a/b:train"}
    named_as |= {f"{folder / 'private'}:train[:9]": "private:train[:9]"}
    assert {data: named(data) for data in named_as} == named_as


def test_a_quote_in_tab_separated_text_is_a_letter_where_each_line_has_all_columns(tmp_path: Path) -> None:
    plain, quoted = tmp_path / "plain.tsv", tmp_path / "quoted.tsv"
    plain.write_text('prompt\tcompletion\nsay 0\t"Hello he said\nsay 1\tok\nsay 2\t"Bye she said\n')
    texts = [row["completion"] for row in read_source(str(plain))]
    assert texts == ['"Hello he said', "ok", '"Bye she said']
    rows = [{"prompt": 'a "b"', "completion": "c\td\ne"}, {"prompt": "f", "completion": '"g"'}]
    pandas.DataFrame(rows).to_csv(quoted, sep="\t", index=False)
    assert read_source(str(quoted)) == rows


def test_an_object_a_line_in_a_json_file_and_spaces_in_a_header_are_read(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('{"text": "a"}\n{"text": "b"}\n')
    (tmp_path / "one.json").write_text('{"text": "a"}')
    (tmp_path / "a.csv").write_text("prompt, completion\na, b\n")
    assert read_source(str(tmp_path / "one.json")) == [{"text": "a"}]
    assert read_source(str(tmp_path / "a.json")) == [{"text": "a"}, {"text": "b"}]
    assert read_source(str(tmp_path / "a.csv")) == [{"prompt": "a", "completion": " b"}]
