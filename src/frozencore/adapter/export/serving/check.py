"""``check_lora_directory``: every rule applied to a directory, and what follows for each engine."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from frozencore.adapter.export.serving.config_rules import vllm_max_rank
from frozencore.adapter.export.serving.lora_directory import read_lora_directory
from frozencore.adapter.export.serving.rules import ENGINES, RULES


@dataclass(frozen=True)
class Problem:
    """A rule that a directory breaks, who minds, and the way out."""

    rule: str
    engines: tuple[str, ...]
    found: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.found}: {' and '.join(self.engines)} will not serve it right; {self.remedy}."


@dataclass(frozen=True)
class LoraReport:
    """What the engines make of a directory.

    Attributes:
        rank: r of the configuration.
        vllm_max_rank: The smallest ``--max-lora-rank`` that admits it; None if vLLM does not.
        is_tenant: It is of a basis model, not of a base model.
    """

    rank: int | None
    vllm_max_rank: int | None
    problems: tuple[Problem, ...]
    is_tenant: bool = False

    def takes(self, engine: str) -> bool:
        """Whether an engine serves the directory as PEFT would."""
        return not any(engine in problem.engines for problem in self.problems)

    @property
    def engines(self) -> tuple[str, ...]:
        """The engines that take it."""
        return tuple(engine for engine in ENGINES if self.takes(engine))


def check_lora_directory(directory: str | Path) -> LoraReport:
    """Check a LoRA directory, ours or another's, against what vLLM, SGLang and llama.cpp read.

    Whether an engine supports the base model at all is not looked at.

    Raises:
        ArtifactError: The files are missing or damaged.
    """
    lora = read_lora_directory(directory)
    found = [(rule, rule.broken(lora)) for rule in RULES]
    problems = tuple(Problem(rule.name, rule.engines, what, rule.remedy) for rule, what in found if what is not None)
    rank = lora.config.get("r")
    rank = rank if isinstance(rank, int) and rank > 0 else None
    return LoraReport(rank, vllm_max_rank(lora.largest_rank), problems, lora.is_tenant)
