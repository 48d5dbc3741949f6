"""Rows of 24 tenants from six public data sets, each of which wants something of its own of the same model.

Tenants differ by topic (SST-2's films, HellaSwag's activities, QNLI's question words), by length (SST-2), by source
(CoLA's publications, which stand one after the other) and by what they ask and the answers that they want: other words,
capitals, swapped labels, letters, signs. Half of them are of SST-2, which a model of 135 million parameters learns from
so few rows. Each has rows to train on, rows to choose learning rates on, and held-out rows. No text comes twice, in one
tenant or in two. Where all rows of a tenant have the same choices, each is the answer equally often.

A third of the tenants takes no part in calibration; SVAMP is a task that no calibrated tenant has.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path

from frozencore.tune.rows.row import RawRow, Row
from frozencore_lab.tasks.registry import find_task
from frozencore_lab.tasks.task import Split, question_of

SEED = 0
VALIDATION, HELD_OUT = 32, 48
LONGEST = 240  # characters of a prompt
SPLITS: tuple[Split, ...] = ("train", "validation", "evaluation")

SPORT = (
    r"soccer|tennis|hockey|polo|ball|karate|boxing|fencing|jump|vault|put$|discus|swim|surf|ski|boarding|BMX|motocross"
    r"|marathon|cricket|lacrosse|squash|badminton|bars|pommel|snatch|jerk|gymnast|archery|hurling|rowing|climbing"
)
CARE = r"hair|makeup|lenses|teeth|shav|tattoo|piercing|sunscreen|curlers|face|hands|mouthwash|nails"


@dataclass(frozen=True)
class Made:
    """An example with what a tenant is chosen by.

    Attributes:
        place: Where the row stands in its split, from 0 to 1.
    """

    row: RawRow
    example: Row
    place: float


@dataclass(frozen=True)
class TenantPlan:
    """A tenant: how many rows of a task it trains on, which of them are its own, and how it wants them answered.

    Attributes:
        takes: Whether a row may be the tenant's.
        styled: The row as the tenant writes it.
        calibrated: Whether the shared bases are chosen for it among others.
    """

    task: str
    num_train: int
    about: str
    takes: Callable[[Made], bool] = lambda _: True
    styled: Callable[[Made], Row] = lambda made: made.example
    calibrated: bool = True


def answers(**words: str) -> Callable[[Made], Row]:
    """Other words for the answers of a task."""
    named = {f" {old}": f" {new}" for old, new in words.items()}

    def restyled(made: Made) -> Row:
        example = made.example
        choices = tuple(named[choice] for choice in example.choices)
        return replace(example, completion=named[example.completion], choices=choices)

    return restyled


def words_in(made: Made) -> int:
    return len(str(made.row["sentence"]).split())


def mentions(pattern: str) -> Callable[[Made], bool]:
    return lambda made: re.search(rf"\b({pattern})", str(made.row["sentence"])) is not None


def first_word(word: str) -> Callable[[Made], bool]:
    return lambda made: str(made.row["question"]).lower().startswith(word)


def topic(pattern: str) -> Callable[[Made], bool]:
    return lambda made: re.search(pattern, str(made.row["activity_label"]), re.IGNORECASE) is not None


def recommended(made: Made) -> Row:
    """Whether the writer of a review would see the film again."""
    review = made.example.prompt.removesuffix("\nSentiment:")
    styled = answers(negative="no", positive="yes")(made)
    return replace(styled, prompt=f"{review}\nShould I see it?")


def lettered(made: Made) -> Row:
    """Options with letters, of which one is the answer."""
    question, options = made.example.prompt.split("\nOptions:")[0], made.example.choices
    letters = [f" {letter}" for letter in "ABCDE"[: len(options)]]
    listed = (f"{letter.strip()}.{option}" for letter, option in zip(letters, options, strict=True))
    answer = letters[options.index(made.example.completion)]
    return replace(
        made.example, prompt="\n".join((question, *listed, "Letter:")), completion=answer, choices=tuple(letters)
    )


OPERATIONS = {"Addition": "+", "Subtraction": "-", "Multiplication": "*", "Common-Division": "/"}


def operation(*, signs: bool) -> Callable[[Made], Row]:
    """Which operation solves a word problem, in a word or as a sign."""

    def styled(made: Made) -> Row:
        names = {kind: sign if signs else kind.lower().removeprefix("common-") for kind, sign in OPERATIONS.items()}
        asked = made.example.prompt.split("\nEnd with")[0]
        prompt = f"{asked}\n{'Sign' if signs else 'Operation'}:"
        choices = tuple(f" {name}" for name in names.values())
        return Row(made.example.id, prompt, f" {names[str(made.row['Type'])]}", choices)

    return styled


def subtracts(made: Made) -> Row:
    """Whether a word problem is one of subtraction."""
    asked, answer = made.example.prompt.split("\nEnd with")[0], made.row["Type"] == "Subtraction"
    return Row(made.example.id, f"{asked}\nIs this a subtraction?", " yes" if answer else " no", (" no", " yes"))


def has_operation(made: Made) -> bool:
    return made.row["Type"] in OPERATIONS


SWAPPED = answers(negative="positive", positive="negative")
TENANTS: dict[str, TenantPlan] = {
    "sst2-short": TenantPlan("sst2", 300, "reviews of at most 8 words", lambda made: words_in(made) <= 8),
    "sst2-middle": TenantPlan("sst2", 160, "reviews of 9 to 15 words", lambda made: 8 < words_in(made) < 16),
    "sst2-long": TenantPlan("sst2", 128, "reviews of 16 words or more", lambda made: words_in(made) >= 16),
    "sst2-film": TenantPlan("sst2", 128, "reviews that say film or movie", mentions("film|movie"), calibrated=False),
    "sst2-acting": TenantPlan("sst2", 128, "reviews of the acting", mentions("perform|acting|actor|cast|character")),
    "sst2-comedy": TenantPlan("sst2", 128, "reviews of comedies", mentions("comed|funny|laugh|humor|fun")),
    "sst2-swapped": TenantPlan("sst2", 160, "says the opposite", styled=SWAPPED),
    "sst2-upper": TenantPlan("sst2", 128, "capitals", styled=answers(negative="NEGATIVE", positive="POSITIVE")),
    "sst2-stars": TenantPlan(
        "sst2", 128, "stars", styled=answers(negative="one star", positive="five stars"), calibrated=False
    ),
    "sst2-german": TenantPlan("sst2", 128, "German", styled=answers(negative="schlecht", positive="gut")),
    "sst2-thumbs": TenantPlan("sst2", 128, "thumbs", styled=answers(negative="thumbs down", positive="thumbs up")),
    "sst2-letters": TenantPlan("sst2", 160, "Y for good, X for bad", styled=answers(negative="X", positive="Y")),
    "sst2-recommend": TenantPlan("sst2", 128, "says whether to see it", styled=recommended, calibrated=False),
    "cola-first": TenantPlan("cola", 160, "sentences of the first publications", lambda made: made.place < 0.3),
    "cola-swapped": TenantPlan("cola", 160, "says the opposite", styled=answers(yes="no", no="yes"), calibrated=False),
    "qnli-what": TenantPlan("qnli", 64, "questions that begin with what", first_word("what")),
    "qnli-upper": TenantPlan("qnli", 64, "capitals", styled=answers(yes="YES", no="NO")),
    "arc-which": TenantPlan("arc_challenge", 64, "questions that begin with which", first_word("which")),
    "arc-letters": TenantPlan("arc_challenge", 64, "the letter of an option", styled=lettered, calibrated=False),
    "hellaswag-sport": TenantPlan("hellaswag", 64, "captions of sports", topic(SPORT)),
    "hellaswag-care": TenantPlan("hellaswag", 64, "captions of personal care", topic(CARE)),
    "svamp-operation": TenantPlan("svamp", 64, "names the operation", has_operation, operation(signs=False), False),
    "svamp-sign": TenantPlan("svamp", 64, "gives the operation's sign", has_operation, operation(signs=True), False),
    "svamp-minus": TenantPlan("svamp", 64, "says whether to subtract", has_operation, subtracts, False),
}
QUICK_TENANTS = {
    f"{kind}-{letter}": TenantPlan(f"pocket-{kind}", 24, "made up", calibrated=letter == "a")
    for kind in ("sentiment", "entailment")
    for letter in "ab"
}
SEARCHED = ("sst2-short", "sst2-swapped", "svamp-operation")  # their validation rows choose the learning rates


@dataclass(frozen=True)
class Tenant:
    """The rows of one tenant by part."""

    plan: TenantPlan
    rows: Mapping[str, Sequence[Row]]


def rows_of(task: str, data_root: Path | None) -> list[Made]:
    """All rows of a task, those with equal texts once, without those with long prompts."""
    found = find_task(task)
    made: dict[str, Made] = {}
    for split in SPLITS:
        rows = found.source.rows(split, data_root)
        for number, row in enumerate(rows):
            example = found.to_row(row, f"{task}-{split}-{number}")
            if len(example.prompt) <= LONGEST:
                made.setdefault(question_of(example), Made(row, example, number / len(rows)))
    return list(made.values())


def make_tenants(
    plans: Mapping[str, TenantPlan], data_root: Path | None, *, validation: int = VALIDATION, held_out: int = HELD_OUT
) -> dict[str, Tenant]:
    """Draw the rows of each tenant, in the order of a hash, from those that no tenant before it has.

    Raises:
        SystemExit: A tenant's task has too few rows of its kind.
    """
    pools = {task: rows_of(task, data_root) for task in dict.fromkeys(plan.task for plan in plans.values())}
    made = {}
    for name, plan in plans.items():
        pool = [one for one in pools[plan.task] if plan.takes(one)]
        pool.sort(key=lambda one: sha256(f"{SEED}:{name}:{one.example.id}".encode()).digest())
        wanted = {"train": plan.num_train, "validation": validation, "held-out": held_out}
        drawn = list(evenly([(one, plan.styled(one)) for one in pool], sum(wanted.values())))
        if len(drawn) < sum(wanted.values()):
            raise SystemExit(f"The tenant {name} needs {sum(wanted.values())} rows, but {plan.task} has {len(drawn)}.")
        taken = {one.example.id for one, _ in drawn}
        pools[plan.task] = [one for one in pools[plan.task] if one.example.id not in taken]
        examples = iter(example for _, example in drawn)
        made[name] = Tenant(plan, {part: [next(examples) for _ in range(size)] for part, size in wanted.items()})
    return made


def evenly(pool: Sequence[tuple[Made, Row]], count: int) -> Iterator[tuple[Made, Row]]:
    """So many rows in their order; if all have the same choices, each in turn is the answer."""
    if len({example.choices for _, example in pool}) > 1:
        yield from pool[:count]
        return
    by_answer: dict[str, list[tuple[Made, Row]]] = defaultdict(list)
    for one in reversed(pool):
        by_answer[one[1].completion].append(one)
    for number in range(count):
        own = by_answer[pool[0][1].choices[number % len(pool[0][1].choices)]]
        if own:
            yield own.pop()


def manifest_of(tenants: Mapping[str, Tenant]) -> dict[str, object]:
    """What each tenant is, with hashes of its rows."""
    about = {
        name: {
            "task": tenant.plan.task,
            "about": tenant.plan.about,
            "calibrated": tenant.plan.calibrated,
            "rows": {part: len(rows) for part, rows in tenant.rows.items()},
            "sha256": {
                part: sha256("".join(map(_line, rows)).encode()).hexdigest() for part, rows in tenant.rows.items()
            },
        }
        for name, tenant in tenants.items()
    }
    return {"seed": SEED, "longest_prompt": LONGEST, "searched": list(SEARCHED), "tenants": about}


def _line(row: Row) -> str:
    line = {name: getattr(row, name) for name in ("id", "prompt", "completion", "choices")}
    return json.dumps(line, ensure_ascii=False) + "\n"
