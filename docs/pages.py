"""Pages of the site that stand elsewhere or are made: two READMEs, the reference, and llms.txt."""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib.metadata import metadata
from pathlib import Path
from typing import Any

import mkdocs_gen_files
from typer.main import get_command

import frozencore
from frozencore.cli.app import program
from frozencore.cli.verbs import all_verbs

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
IN_SITE = {"README.md": "index.md", "lab/README.md": "campaigns.md", "docs/python.md": "reference/python.md"}
BY_TASK = {
    "Adapt a model": (
        "calibrate", "FrozenCoreConfig", "Calibration", "CalibrationOptions", "frozen_core_layers", "FrozenCoreModel",
        "FrozenCoreError",
    ),
    "Export an adapter": (
        "export_lora", "export_merged", "export_onnx", "export_onnx_adapter", "write_model_card",
    ),
    "Keep many adapters on one basis": (
        "save_basis", "load_basis", "Basis", "basis_id", "Core", "get_core", "CoreBank", "swap_core", "prepare_swap",
        "merge_adapters", "export_basis_model", "export_tenant", "tenant_weights",
    ),
    "Compute moments once, bases many times": (
        "collect_moments", "LayerMoments", "build_bases", "get_basis",
        "set_basis",
    ),
    "Build the basis of one layer": (
        "fcca_basis", "rawgrad_basis", "signgrad_basis", "filora_basis", "eva_basis", "lora_xs_basis", "milora_basis",
        "vera_basis", "random_basis", "LayerBasis", "Whitening",
    ),
    "Add a constructor": ("register_constructor", "CONSTRUCTORS", "build_basis", "BasisOptions", "LayerData"),
}  # fmt: skip
LINK = re.compile(r"(?<!!)\[([^\]]*)\]\((?!https?:|#)([^)#]+)(#[^)]*)?\)")


def in_site(text: str, folder: Path) -> str:
    """A page with its links as they are in the site.

    A link to a file that is not in the site becomes its words and the place of the file.
    """

    def moved(found: re.Match[str]) -> str:
        words, target, anchor = found[1], (folder / found[2]).resolve(), found[3] or ""
        place = target.relative_to(ROOT).as_posix()
        if place in IN_SITE:
            return f"[{words}]({IN_SITE[place]}{anchor})"
        if target.parent == DOCS and target.suffix == ".md":
            return f"[{words}]({target.name}{anchor})"
        return words if place in words else f"{words} (`{place}`)"

    return LINK.sub(moved, text)


def write(name: str, text: str) -> None:
    with mkdocs_gen_files.open(name, "w") as file:
        file.write(text)


def python_reference() -> Iterator[str]:
    """Every public name, from its docstring, below the task that it serves."""
    if different := set(frozencore.__all__) ^ {name for names in BY_TASK.values() for name in names}:
        raise ValueError(f"BY_TASK must hold each public name of frozencore, but differs in {sorted(different)}.")
    yield in_site((DOCS / "python.md").read_text(encoding="utf-8"), DOCS).replace("](", "](../")
    yield "Below is everything that `import frozencore` offers, by task. Deeper modules may move.\n"
    for task, names in BY_TASK.items():
        yield f"## {task}\n"
        for name in names:
            module = getattr(getattr(frozencore, name), "__module__", None)
            yield f"::: {module if isinstance(module, str) else 'frozencore.constructors'}.{name}\n"


def command_reference() -> Iterator[str]:
    """What each verb says of itself."""
    commands = get_command(program([verb.name for verb in all_verbs()])).commands
    yield "# Command line\n\nWhat `frozencore VERB --help` says. A flag without a value says yes.\n"
    for verb in all_verbs():
        command = commands[verb.name]
        yield f"## frozencore {verb.name}\n\n{verb.help}\n"
        yield from _flags(command)
        for name, own in getattr(command, "commands", {}).items():
            yield f"### frozencore {verb.name} {name}\n\n{own.help}\n"
            yield from _flags(own)


def _flags(command: Any) -> Iterator[str]:
    """A table for each panel of its options, and one for its arguments."""
    by_panel: dict[str, list[str]] = {}
    for flag in command.params:
        is_flag = flag.opts[0].startswith("-")
        panel = getattr(flag, "rich_help_panel", None) or ("" if is_flag else "Arguments")
        said = (flag.help or "").replace("|", "\\|")
        if flag.required:
            said += " *Required.*"
        elif flag.default not in (None, False, [], ()):
            said += f" Default: `{flag.default}`."
        names = ", ".join(f"`{name}`" for name in (flag.opts if is_flag else [flag.name]))
        by_panel.setdefault(panel, []).append(f"| {names} | {said} |")
    for panel, rows in by_panel.items():
        yield "\n".join([f"| {panel or 'Options'} | what it does |", "|---|---|", *rows, ""])


def index_for_machines(pages: dict[str, str]) -> Iterator[str]:
    """llms.txt: every page with its first sentence."""
    yield f"# frozencore\n\n> {metadata('frozencore')['Summary']}\n\n## Pages\n"
    for name, text in pages.items():
        title, _, rest = text.lstrip().removeprefix("# ").partition("\n")
        first = next((part for part in rest.split("\n\n") if re.match(r"\s*(?:[A-Z*]|`\w)", part)), "")
        sentence = re.split(r"(?<=\.)\s", " ".join(in_words(first).split()))[0]
        yield f"- [{title}]({name}): {sentence}"


def in_words(markdown: str) -> str:
    """Without links."""
    return re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", markdown)


HOME = (ROOT / "README.md").read_text(encoding="utf-8").replace("](docs/figures/", "](figures/")
PAGES = {
    "index.md": in_site(HOME, ROOT),
    **{
        page.name: in_site(page.read_text(encoding="utf-8"), DOCS)
        for page in sorted(DOCS.glob("*.md"))
        if f"docs/{page.name}" not in IN_SITE
    },
    "campaigns.md": in_site((ROOT / "lab" / "README.md").read_text(encoding="utf-8"), ROOT / "lab"),
    "reference/python.md": "\n".join(python_reference()),
    "reference/command-line.md": "\n".join(command_reference()),
}
for page, content in PAGES.items():
    write(page, content)
write("llms.txt", "\n".join(index_for_machines(PAGES)) + "\n")
