"""One report over several campaigns: what they have in common, model beside model (paper, "Full Cross-Scale Results").

A study is in it if at least two of the campaigns have it, under one name, as a comparison of columns over tasks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

from frozencore.errors import ArtifactError, ConfigError
from frozencore_lab.campaign.results import CampaignResults, StudyResults
from frozencore_lab.reports.document import Document, Drawing, Section, Table, make_document
from frozencore_lab.reports.figures import ranking_panels
from frozencore_lab.reports.labels import sentence, value_name
from frozencore_lab.reports.tables.averages import column_averages
from frozencore_lab.reports.tables.means_across import NamedPivot, means_across, wins_across
from frozencore_lab.reports.tables.pivot import Measure, Pivot, measures_of, pivots
from frozencore_lab.reports.writing import write_document

Member = tuple[CampaignResults, StudyResults]


def across_document(campaigns: Sequence[CampaignResults]) -> Document:
    """The report before it is files: a section a study.

    Raises:
        ConfigError: Two campaigns have one name.
        ArtifactError: The campaigns have no study in common that could be set side by side.
    """
    names = [results.campaign.name for results in campaigns]
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice:
        raise ConfigError(f"Campaigns are told apart by their names, but {twice[0]!r} comes twice. Name each once.")
    sections = list(_sections(campaigns))
    if not sections:
        raise ArtifactError(
            f"The campaigns {', '.join(names)} share no study of tasks by columns with a mean. "
            "Report on each of them alone."
        )
    return make_document("Across campaigns", ", ".join(names), tuple(campaigns), sections)


def write_across(campaigns: Sequence[CampaignResults], folder: Path) -> list[Path]:
    """Write ``tables/``, ``figures/``, ``report.md`` and ``index.html`` of several campaigns together.

    Raises:
        ConfigError, ArtifactError: From :func:`across_document`; or the folder cannot be written.
    """
    return write_document(across_document(campaigns), folder)


def _sections(campaigns: Sequence[CampaignResults]) -> Iterator[Section]:
    for name in dict.fromkeys(study.name for results in campaigns for study in results.studies):
        members = [(results, study) for results in campaigns for study in results.studies if study.name == name]
        if len(members) > 1 and (section := _section(name, members)) is not None:
            yield section


def _section(name: str, members: Sequence[Member]) -> Section | None:
    titles = {study.study.title for _, study in members}
    title = titles.pop() if len(titles) == 1 else sentence(name.replace("-", " "))
    notes = {study.study.note for _, study in members}
    main: list[Table] = []
    details: list[Table] = []
    drawings = []
    for i, measure in enumerate(measures_of(members[0][1])):
        lines, remark = _comparable(_named(members, measure))
        means = means_across(lines, ("model",), f"{name}-means{measure.suffix}", title)
        if means is None:
            continue
        found = [Table(means, remark=remark)]
        if (wins := wins_across(lines, f"{name}-wins{measure.suffix}", title)) is not None:
            found.append(Table(wins))
        (details if i else main).extend(found)
        known = [one for one in lines if any(mean.value is not None for mean in column_averages(one.pivot).values())]
        if known:
            draw = partial(ranking_panels, [(", ".join(one.labels), one.pivot) for one in known])
            drawings.append(Drawing(f"{name}{measure.suffix}", f"{title}: {measure.title}", draw))
    if not main:
        return None
    runs = tuple(run for _, study in members for run in study.runs)
    note = notes.pop() if len(notes) == 1 else ""
    return Section(name, title, note, runs, tuple(main), tuple(details), tuple(drawings))


def _named(members: Sequence[Member], measure: Measure) -> list[NamedPivot]:
    """The members' tables by the model that each is of, and by the campaign where several are of one model."""
    found = [(results, pivot) for results, study in members for pivot in pivots(study, measure)]
    models = Counter(_model(pivot) for _, pivot in found)
    return [
        NamedPivot((_model(pivot) + (f" ({results.campaign.name})" if models[_model(pivot)] > 1 else ""),), pivot)
        for results, pivot in found
    ]


def _model(pivot: Pivot) -> str:
    shown = {"model": pivot.study.study.axes["model"][0], **pivot.group}
    return ", ".join(value_name(axis, value) for axis, value in shown.items())


def _comparable(lines: list[NamedPivot]) -> tuple[list[NamedPivot], str]:
    """Those over the tasks of the first, since means over other tasks do not compare; and which are left out."""
    kept = [line for line in lines if set(line.pivot.rows) == set(lines[0].pivot.rows) and line.has_mean]
    others = [", ".join(line.labels) for line in lines if line not in kept]
    return kept, f"Left out, as they are of other tasks: {', '.join(others)}." if others else ""
