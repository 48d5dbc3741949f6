"""``frozencore compress``: many adapters as one basis and a core for each, with the share of each that is kept."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Group, RenderableType
from rich.text import Text

from frozencore.cli.display import console, table_of
from frozencore.cli.flags import flag, print_unread_files
from frozencore.cli.stages import StageDisplay
from frozencore.errors import ConfigError
from frozencore.files.adapter_folder import find_adapter, read_config
from frozencore.files.atomic_write import check_output
from frozencore.files.names import COMPRESSION_FILE
from frozencore.maths.quantise import LOST_TO_ROUNDING
from frozencore.text import bytes_in_words, num_of
from frozencore.tune.locate import find_tenants, require_model

if TYPE_CHECKING:
    from frozencore.adapter.compress import CompressedAdapters, Sizes
    from frozencore.tune.compressed import Scores
    from frozencore.tune.scoring.score import Score

ENOUGH = 0.6
"""Below this share of its update an adapter may lose accuracy (docs/many-tenants.md)."""
MOST_ROWS = 40


def compress(
    adapters: Annotated[
        list[str],
        typer.Argument(help="Folders or hub ids of LoRAs of one base model, or of frozen cores on bases of their own."),
    ],
    output: Annotated[Path, typer.Option("--out", "--output", help="New folder for the basis and the cores.")],
    rank: Annotated[int, typer.Option(help="Largest rank of the basis; a core holds rank x rank values a layer.")] = 32,
    bits: Annotated[int | None, flag("bits")] = None,
    model: Annotated[
        str | None,
        typer.Option(help="The base model, to compare layers and weights with, and to record in the basis."),
    ] = None,
    tenants: Annotated[
        Path | None,
        typer.Option(
            help="Folder with a row file for adapters, named after them: score the base model, each adapter, its core, "
            "and its core trained on for an epoch. Needs --model."
        ),
    ] = None,
    same_base: Annotated[
        bool, typer.Option("--same-base", help="The adapters are of one base model, whatever name they give it.")
    ] = False,
    skip_bad: Annotated[
        bool,
        typer.Option(
            "--skip-bad",
            help="Leave out adapters that cannot be compressed, with the reason, and bad rows of --tenants.",
        ),
    ] = False,
) -> None:
    check_output(output, overwrite=None)
    if model is not None:
        require_model(model)
    elif tenants is not None:
        raise ConfigError("--tenants scores rows with the base model: give it with --model.")
    if tenants is not None:
        find_tenants(tenants)
        print_unread_files(tenants)
    if not skip_bad:
        for place in adapters:
            read_config(find_adapter(place))  # a wrong path is refused before torch is imported
    with StageDisplay(console) as progress:
        from frozencore.tune.compressed import TRAINED_ON, compress_scored

        progress.started()
        scores = compress_scored(
            adapters, output, rank=rank, bits=bits, model=model, tenants=tenants, same_base=same_base,
            skip_bad=skip_bad, written=lambda done: _print_summary(done, model), progress=progress,
        )  # fmt: skip
    if scores:
        console.print(_scores(scores))
    whole = any(not isinstance(arms["trained on"], str) for arms in scores.values())
    trained_on = f"   Trained on: {output}/NAME/{TRAINED_ON}" if whole else ""
    console.print(f"Basis: {output}/basis   Adapters: {output}/NAME/adapter{trained_on}", soft_wrap=True)


def _print_summary(done: CompressedAdapters, model: str | None) -> None:
    """Show what was written, and warn of other names of the base model."""
    console.print(_summary(done))
    if done.other_names:
        names = ", ".join(done.other_names)
        also = f", not {model}. Its" if model else ", which --same-base takes for one model. Their"
        console.print(
            f"Warning: adapters name the base model {names}{also} layers have one shape; whether the weights are the "
            "same, a LoRA does not say.",
            style="yellow", soft_wrap=True,
        )  # fmt: skip


def _scores(scores: Scores) -> RenderableType:
    """Loss and accuracy of each arm."""
    arms = list(next(iter(scores.values())))
    rows = [(name, *(_in_words(of_tenant[arm]) for arm in arms)) for name, of_tenant in scores.items()]
    title = "Held-out nats a token, and exact answers of short ones"
    whys = [(name, arm, why) for name, arms in scores.items() for arm, why in arms.items() if isinstance(why, str)]
    lines = [Text(f"{name}, {arm}: {why}") for name, arm, why in whys]
    return Group(table_of(title, ("tenant", *arms), rows, names=("tenant",)), *lines)


def _in_words(score: Score | str) -> str:
    if isinstance(score, str):
        return "no core"
    return f"{score.held_out_loss:.3f}" + (f", {score.task.accuracy:.0%}" if score.task else "")


def _summary(done: CompressedAdapters) -> Group:
    """The share that each adapter keeps, those with the least first if there are many."""
    least_first = sorted(done.kept, key=lambda name: done.kept[name].share)
    shown = least_first[:MOST_ROWS] if len(least_first) > MOST_ROWS else list(done.kept)
    rows = []
    for name in shown:
        kept = done.kept[name]
        layer = min(kept.layers, key=kept.layers.__getitem__)
        rows.append((name, f"{kept.share:.1%}", layer, f"{kept.layers[layer]:.1%}"))
    names = ("adapter", "layer that keeps least")
    title = f"{num_of(len(done.kept), 'adapter')} on one basis of rank {done.rank}"
    table = table_of(title, ("adapter", "share kept", "layer that keeps least", "share"), rows, names=names)
    lines = [Text(f"Skipped {name}: {reason}") for name, reason in done.skipped.items()]
    lines += [Text(f"{name} has the factors of {other}: they count once.") for name, other in done.equal.items()]
    if len(shown) < len(done.kept):
        rest = done.kept[least_first[MOST_ROWS]].share
        lines.append(
            Text(f"The other {len(done.kept) - len(shown):,} keep {rest:.1%} or more: {done.folder / COMPRESSION_FILE}")
        )
    few = [name for name in least_first if done.kept[name].share < ENOUGH]
    if few:
        lines.append(
            Text(
                f"Less than {ENOUGH:.0%} is kept of {num_of(len(few), 'adapter')}, the least of {few[0]}: give a "
                "larger --rank, or leave out those that have little in common with the others."
            )
        )
    return Group(table, *lines, *_sizes(done.sizes, len(done.kept), done.bits))


def _sizes(sizes: Sizes, number: int, bits: int) -> Iterator[Text]:
    """The bytes before and after, and from how many adapters on one basis pays."""
    before, after, basis, tenant = map(bytes_in_words, (sizes.before, sizes.after, sizes.basis, sizes.tenant))
    heads = f", of which {bytes_in_words(sizes.modules)} are its head and other whole modules" if sizes.modules else ""
    yield Text(f"{before} of weights became {after}: a basis of {basis}, and {tenant} an adapter{heads}.")
    if sizes.after >= sizes.before:
        yield Text("Warning: that is not smaller than before. A smaller --rank is.", style="yellow")
    if sizes.kept_unrounded - sizes.kept >= LOST_TO_ROUNDING:
        lost = f"{sizes.kept_unrounded - sizes.kept:.1%}"
        yield Text(f"Rounding to {bits} bits lost {lost} of the updates; with more --bits less is lost.")
    yield Text(
        f"It keeps {sizes.kept:.1%} of an adapter on average; in the same bytes each cut alone in float32 keeps "
        f"{sizes.kept_alone:.1%}."
    )
    if sizes.pays_from is None:
        way_out = "no number of adapters like these makes it pay. Give another --rank, or keep the adapters"
    else:
        way_out = f"it pays from {num_of(sizes.pays_from, 'adapter')} like these on"
    if sizes.pays_from is None or number < sizes.pays_from:
        yield Text(f"Warning: one basis for {num_of(number, 'adapter')} does not pay; {way_out}.", style="yellow")
    else:
        yield Text(f"One basis for all pays: {way_out}.")
