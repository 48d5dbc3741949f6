"""The generated parts of the pages, and their figures, from the files in results/.

python benchmarks/pages.py            # rewrites all;  --check says whether the pages are those of the files

A page holds a block between ``<!-- NAME:begin -->`` and ``<!-- NAME:end -->``.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import cost_tables
import federated_tables
import page_figures
import private_tables
import quality_tables
import smollm2_scores
import speed_tables
import tenant_tables
import tenants_quality_tables
import whitening_tables
from harness import RESULTS, ROOT, lines_of

MACHINE = "amd-epyc-2-cores"
DOCS, README = ROOT / "docs", ROOT / "README.md"


def found_in(name: str) -> dict[str, Any]:
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def pages() -> Iterator[tuple[Path, dict[str, str]]]:
    """Every page with its blocks by name."""
    machine, gpu = found_in(MACHINE), found_in("gpu")
    yield DOCS / "cost.md", cost_tables.blocks(machine) | speed_tables.blocks(machine, gpu)
    quality = quality_tables.blocks()
    tenants, private = tenants_quality_tables.Study(), private_tables.Study()
    yield (
        README,
        {
            "speed": speed_tables.sentences(machine, gpu),
            "smollm2-sst2": quality["smollm2-sst2"],
            "tenants-readme": tenants_quality_tables.readme(tenants),
            "served-readme": tenant_tables.served_readme(found_in(f"served-smollm2-{MACHINE}")),
            "private-readme": private_tables.quality_of(private, "sst2"),
        },
    )
    yield (
        DOCS / "smollm2.md",
        quality
        | whitening_tables.blocks(whitening_tables.Study())
        | {
            "smollm2-speed": speed_tables.smollm2(found_in("smollm2")),
            "smollm2-scores": smollm2_scores.block(found_in("smollm2-scores")),
        },
    )
    yield (
        DOCS / "many-cores.md",
        tenant_tables.many_cores(
            *(found_in(f"{n}-{MACHINE}") for n in ("tenants", "tenants-smollm2", "many-training", "many-commands"))
        )
        | tenants_quality_tables.blocks(tenants),
    )
    yield (
        DOCS / "private.md",
        private_tables.blocks(
            private, found_in("per_example"), lines_of(private_tables.OF_MOMENTS), lines_of(private_tables.OF_ATTACK)
        ),
    )
    yield DOCS / "federated.md", {"federated": federated_tables.block(found_in("federated"))}
    served = {"served": f"served-{MACHINE}", "served-smollm2": f"served-smollm2-{MACHINE}"}
    blocks = {block: tenant_tables.served(found_in(name)) for block, name in served.items()}
    yield DOCS / "serving.md", blocks


def rewritten(page: str, blocks: Mapping[str, str]) -> str:
    for name, block in blocks.items():
        marked = re.compile(rf"(<!-- {name}:begin -->\n).*?(<!-- {name}:end -->)", flags=re.DOTALL)
        page, count = marked.subn(lambda found, block=block: found[1] + block + found[2], page)
        if count != 1:
            raise ValueError(f"The page must hold the block {name!r} once, but has it {count} times.")
    return page


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="Write nothing; the status is 1 where a page differs.")
    options = parser.parse_args()
    different = []
    for page, blocks in pages():
        text = page.read_text(encoding="utf-8")
        wanted = rewritten(text, blocks)
        if wanted != text:
            different.append(page.name)
            if not options.check:
                page.write_text(wanted, encoding="utf-8")
    print(f"Other than the results: {', '.join(different) or 'nothing'}.")
    if options.check:
        return int(bool(different))
    quality_tables.figure(DOCS / "figures" / "smollm2.png")
    growth, figures = found_in(MACHINE)["parts"]["growth"], DOCS / "figures"
    page_figures.growth(growth, figures / "growth.png")
    page_figures.scale(found_in("scale"), figures / "scale.png")
    page_figures.tenants(found_in(f"tenants-{MACHINE}"), found_in(f"many-training-{MACHINE}"), figures / "tenants.png")
    tenants_quality_tables.figure(tenants_quality_tables.Study(), figures / "tenants-quality.png")
    whitening_tables.figure(whitening_tables.Study(), figures / "whitening.png")
    private_tables.figure(private_tables.Study(), figures / "private.png")
    page_figures.served(found_in(f"served-smollm2-{MACHINE}"), figures / "served.png")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
