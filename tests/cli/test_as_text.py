"""Foreign text is printed as text: no markup, no escape sequence, no formula, no tag, no command of LaTeX."""

from __future__ import annotations

import ast
import csv
import html.parser
import io
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

import frozencore
import frozencore_lab
from frozencore.cli.display import PlainConsole
from frozencore.cli.stages import StageDisplay
from frozencore_lab.campaign.spec import Campaign
from frozencore_lab.reports.comparison import read_task_means
from frozencore_lab.reports.report import Document, Section, document_page
from frozencore_lab.reports.report import Table as ReportTable
from frozencore_lab.reports.sheet import (
    Sheet,
    SheetCell,
    csv_lines,
    csv_text,
    label,
    latex,
    markdown,
    number,
    rich_table,
)

NO_RESULTS = cast(Any, SimpleNamespace(studies=(), campaign=Campaign.model_construct()))
PACKAGES = [Path(package.__file__).parent for package in (frozencore, frozencore_lab)]
HOSTILE = [
    "[/x]", "[red]", ":smile:", "\x1b[31mred", "a\x1b]0;title\x07b", "\u202eabc", "\x9b31m", "back\x08", "[link=x]y",
]  # fmt: skip
UNSEEN = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def printed(what: RenderableType, *, is_terminal: bool = False, **options: object) -> str:
    out = io.StringIO()
    PlainConsole(file=out, width=160, force_terminal=is_terminal, color_system=None).print(what, **options)
    return out.getvalue()


def as_table(text: str) -> Table:
    table = Table(title=text, caption=text)
    table.add_column(text)
    table.add_row(text)
    table.add_row(Text(text))
    return table


@pytest.mark.parametrize("text", HOSTILE)
def test_a_text_is_printed_as_it_is_by_all_that_prints(text: str) -> None:
    seen = text if text.isprintable() else None
    for what, times in ((text, 1), (Text(text), 1), (Group(text, Text(text)), 2), (as_table(text), 5)):
        found = printed(what, highlight=False)
        assert not UNSEEN.search(found)
        assert seen is None or found.count(seen) == times


@pytest.mark.parametrize("text", HOSTILE)
def test_the_display_of_a_run_prints_stages_and_notes_as_text(text: str) -> None:
    for is_terminal in (False, True):
        out = io.StringIO()
        with StageDisplay(PlainConsole(file=out, width=160, force_terminal=is_terminal, color_system=None)) as stages:
            stages(text, 1, 2, text)
            stages(text, 2, 2, text)
        assert "\x1b[31m" not in out.getvalue()
        assert "\x1b]0;" not in out.getvalue()
        assert not text.isprintable() or text in out.getvalue()


def nodes() -> list[tuple[Path, ast.AST]]:
    return [
        (path, node)
        for package in PACKAGES
        for path in package.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
    ]


def test_every_place_that_prints_uses_a_console_without_markup() -> None:
    """No other console is made, no column of a bar reads markup, and nothing is printed past the console."""
    for path, node in nodes():
        where = f"{path}:{getattr(node, 'lineno', 0)}"
        if not isinstance(node, ast.Call):
            continue
        called = ast.unparse(node.func)
        words = {word.arg: ast.unparse(word.value) for word in node.keywords}
        assert called != "Console", where
        assert called != "TextColumn" or words.get("markup") == "False", where
        assert not called.endswith("from_markup"), where
        assert words.get("markup", "False") == "False", where
        assert called not in {"typer.echo", "typer.secho", "rprint"}, where
        if called in {"sys.stdout.write", "sys.stderr.write"}:
            text = ast.unparse(node)
            fine = ("one_line", "json.dumps", "{error}", "{refused}", "__version__", "run_id")
            assert any(part in text for part in fine), where


BAD = [
    "=1+1", "+x", "-x", "@x", "\t=1", "<script>alert(1)</script>", '"><b>', "a|b", "[/x]", "*x", r"\input{x}", "$x",
    "a\nb", "`x`",
]  # fmt: skip


def sheet_of(text: str) -> Sheet:
    cells = (label(text), SheetCell("-", hint=text), number(-1.5, 2))
    return Sheet("name", text, text, (text, text, text), (cells, cells), (cells,))


class Tags(html.parser.HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.data: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.data += [value or "" for _, value in attrs]

    def handle_data(self, data: str) -> None:
        self.data.append(data)


@pytest.mark.parametrize("text", BAD)
def test_a_text_in_html_makes_no_tag(text: str) -> None:
    plain, hostile = Tags(), Tags()
    for page, value in ((plain, "x"), (hostile, text)):
        table = ReportTable(sheet_of(value), remark=value)
        section = Section("section", value, value, (), (table,), (table,), headlines=(value,))
        page.feed(document_page(Document(value, value, NO_RESULTS, (section,)), Path()))
    assert hostile.tags == plain.tags
    assert text in hostile.data


@pytest.mark.parametrize("text", BAD)
def test_no_cell_of_a_csv_is_a_formula_and_numbers_are_numbers(text: str) -> None:
    lines = list(csv.reader(io.StringIO(csv_text(sheet_of(text)))))
    assert not any(cell.lstrip()[:1] in tuple("=+-@") for line in lines for cell in line[:2] if cell)
    assert lines[1][2] == "-1.5"


def test_names_that_begin_like_formulas_come_back_from_a_csv(tmp_path: Path) -> None:
    file = tmp_path / "means.csv"
    file.write_text(csv_lines([["task", "=fcca", "-eva", "'quoted"], ["+svamp", -1.5, 2, 3], ["gsm8k", 1, 2, 3]]))
    table = read_task_means(file)
    assert table.tasks == ("+svamp", "gsm8k")
    assert list(table.columns) == ["=fcca", "-eva", "'quoted"]
    assert table.columns["=fcca"]["+svamp"] == -1.5


def test_tables_on_the_screen_and_in_markdown_show_the_text() -> None:
    for text in BAD:
        assert not UNSEEN.search(printed(rich_table(sheet_of(text))))
        row = [line for line in markdown(sheet_of(text)).splitlines() if line.startswith("|")][-1]
        assert len(re.findall(r"(?<!\\)\|", row)) == 4


@pytest.mark.parametrize("text", ["[/x]", "*x", "[2cm]"])
def test_a_cell_of_latex_is_no_option_of_the_line_before_it(text: str) -> None:
    for line in latex(sheet_of(text)).splitlines():
        assert not line.startswith(("[", "*"))
