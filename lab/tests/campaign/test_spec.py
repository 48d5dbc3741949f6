"""The specification of a campaign is strict, and says on which line it is wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from frozencore.calibration.calibration_options import CalibrationOptions
from frozencore.constructors import CONSTRUCTORS
from frozencore.errors import ConfigError
from frozencore.options import options_of
from frozencore.tune.config import run_options
from frozencore_lab.campaign.job import make_job
from frozencore_lab.campaign.plan import plan
from frozencore_lab.campaign.spec import PLACES, Campaign, read_campaign
from places import LAB

HEAD = "name: x\nmodels: {pocket: pocket}\nstudies:\n  main:\n    title: t\n"
AXES = "    axes: {model: [pocket], task: [pocket-math], method: [fcca], seed: [42]}\n"
WITH_VARIANT = AXES.replace("[fcca]", "[fcca, small]")


def read(tmp_path: Path, text: str) -> object:
    path = tmp_path / "spec.yaml"
    path.write_text(text, encoding="utf-8")
    return read_campaign(path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (HEAD + AXES + "    colour: red\n", r"line 7: studies\.main\.colour: extra inputs are not permitted"),
        (HEAD + AXES + "    title: again\n", "line 7: the key 'title' is given twice"),
        (HEAD + AXES.replace("seed: [42]", "seed: [42], sede: [1]"), "line 6.*no option 'sede'. Did you mean 'seed'"),
        (HEAD + "    axes: {model: [pocket], task: [pocket-math], method: [fcca]}\n", "line .*needs the axis seed"),
        (HEAD + AXES.replace("[pocket]", "[rocket]"), "no model 'rocket'. Did you mean 'pocket'"),
        (HEAD + AXES.replace("[42]", "[42, 42]"), "names a value twice"),
        (HEAD.replace("name: x", "name: ../x") + AXES, "line 1: name: string should match pattern"),
        (HEAD.replace("name: x", f"name: {'x' * 300}") + AXES, "line 1: name"),
        (HEAD.replace("name: x", "name: X") + AXES, "line 1: name"),  # X and x are one folder on some systems
        (HEAD + AXES + "    reference_size: 8\n", "belongs to 'kind: stability'"),
        (
            HEAD + AXES + "    kind: stability\n    reference_size: 8\n    search: {grids: [{rank: [4, 8]}]}\n",
            "A stability study trains nothing: it takes no search",
        ),
        (HEAD + AXES + "    search: {grids: [{learning_rat: [1e-3]}]}\n", "line 7.*Did you mean 'learning_rate'"),
        (
            HEAD + AXES + "    search: {grids: [{learning_rate: 1e-3}]}\n",
            "line 7.*learning_rate: input should be a valid",
        ),
        (
            HEAD + AXES + "    fixed: {learning_rate: .nan}\n",
            "line 7: studies.main.fixed.learning_rate: .* finite number",
        ),
        (HEAD + AXES + "    report: {rows: [rank]}\n", "no axis of this study 'rank'"),
        (HEAD + AXES + "    variants: {small: {method: fcca, rank: 4}}\n", "small is no value of the axis method"),
        (HEAD + AXES + "    variants: {fcca: {method: eva}}\n", "variant fcca is of eva, but fcca is a method"),
        (HEAD + WITH_VARIANT + "    variants: {small: {rank: 4}}\n", "variant small does not say which method it is"),
        (HEAD + WITH_VARIANT + "    variants: {small: {method: fcca, seed: 1}}\n", "gives seed, which is an axis"),
        (HEAD + WITH_VARIANT + "    variants: {small: {method: fcca, rnak: 4}}\n", "line 7.*Did you mean 'rank'"),
        (
            HEAD + AXES + "    search: {grids: [{for: [fcaa], rank: [4, 8]}]}\n",
            "no method 'fcaa'. Did you mean 'fcca'",
        ),
        (
            HEAD + AXES + "    search: {grids: [{for: [fcca], rank: [4, 8]}, {for: [fcca], warmup: [0.1, 0.2]}]}\n",
            "A method has one grid of its search, but 2 are for fcca",
        ),
        ("- a\n- b\n", "must hold a campaign"),
        (HEAD + AXES + "    fixed: {warmup: !!python/object/apply:os.getcwd []}\n", "line 7: could not determine"),
    ],
)
def test_a_wrong_specification_gets_one_line_with_its_place(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        read(tmp_path, text)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ('learning_rate: "1e-3"', "learning_rate: input should be a valid number, but '1e-3' came"),
        ("rank: 8.5", "rank: input should be a valid integer"),
        ("rank: 0", "rank: input should be greater than or equal to 1"),
        ("whiten: sideways", "whiten must be one of both, input"),
    ],
)
def test_an_option_that_no_run_takes_is_refused_before_any_run(tmp_path: Path, option: str, message: str) -> None:
    campaign = read(tmp_path, HEAD + AXES + f"    fixed: {{{option}}}\n")
    with pytest.raises(ConfigError, match=f"Study 'main': .*{message}"):
        plan(campaign, lambda _: None)  # type: ignore[arg-type]


def test_a_number_in_scientific_notation_is_a_number(tmp_path: Path) -> None:
    campaign = read(tmp_path, HEAD + AXES + "    fixed: {learning_rate: 1e-3}\n")
    (run,) = plan(campaign, lambda _: None)  # type: ignore[arg-type]
    assert run.job is not None
    assert run.job.config.training.learning_rate == 1e-3


def test_aliases_that_expand_without_end_are_refused(tmp_path: Path) -> None:
    bomb = "a0: &a0 [x, x]\n" + "".join(f"a{i}: &a{i} [*a{i - 1}, *a{i - 1}]\n" for i in range(1, 40))
    with pytest.raises(ConfigError, match="expand to more than"):
        read(tmp_path, bomb)


def test_too_many_runs_are_refused(tmp_path: Path) -> None:
    seeds = list(range(200_000))
    with pytest.raises(ConfigError, match="larger than"):
        read(tmp_path, HEAD + AXES.replace("[42]", str(seeds)))
    campaign = read(
        tmp_path,
        HEAD
        + AXES.replace("[42]", str(seeds[:1000])[:-1] + "]").replace(
            "task: [pocket-math]", "task: [pocket-math], rank: " + str(list(range(1, 102)))
        ),
    )
    with pytest.raises(ConfigError, match="at most 100,000 runs"):
        plan(campaign, lambda _: None)  # type: ignore[arg-type]


PRESETS = sorted((LAB / "campaigns").glob("*.yaml"))


@pytest.mark.parametrize("preset", PRESETS, ids=lambda path: path.stem)
def test_every_preset_can_be_planned(preset: Path) -> None:
    campaign = read_campaign(preset)
    assert campaign.name == preset.stem
    assert {run.study for run in plan(campaign, lambda _: None)} == set(campaign.studies)


def test_the_schema_names_what_a_specification_may_hold() -> None:
    schema = Campaign.model_json_schema()
    assert {"name", "models", "studies", "base"} <= schema["properties"].keys()
    assert schema["additionalProperties"] is False


def test_the_schema_says_of_every_option_what_it_allows_its_default_and_its_help() -> None:
    schema = Campaign.model_json_schema()
    base = schema["properties"]["base"]["properties"]
    expected = {name for name in run_options() if name not in PLACES}
    holders = [CalibrationOptions, *(row.options for row in CONSTRUCTORS.values())]
    assert expected >= {name for holder in holders for name in options_of(holder)}
    assert base.keys() == expected
    assert all(option["description"] for option in base.values())
    assert base["whiten"] == {
        "enum": ["both", "input", "output", "none"], "type": "string", "default": "both",
        "description": "fcca: Sides that are whitened.",
    }  # fmt: skip
    assert [kind["type"] for kind in base["damping"]["anyOf"]] == ["number", "array"]
    assert base["damping"]["anyOf"][1]["minItems"] == base["damping"]["anyOf"][1]["maxItems"] == 2
    assert (base["group_size"]["minimum"], base["group_size"]["default"]) == (1, 999)
    study = schema["$defs"]["Study"]["properties"]
    assert study["fixed"]["properties"] == base
    lists = {name: {"type": "array", "items": option, "minItems": 1} for name, option in base.items()}
    grid = schema["$defs"]["Search"]["properties"]["grids"]["items"]["properties"]
    assert study["axes"]["properties"] == lists
    assert grid == lists | {"for": {"type": "array", "items": {"type": "string"}, "minItems": 1}}


@pytest.mark.parametrize("rows", [{"data": "-"}, {"data": ["a.jsonl", "-"]}, {"data": "a.jsonl", "eval_data": "-"}])
def test_a_run_of_a_campaign_reads_no_pipe(rows: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match="the standard input can be read once"):
        make_job("tune", {"model": "pocket", "seed": 42, **rows})
