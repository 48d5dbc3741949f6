"""Pytest plugin: PEFT's tests, unedited, run against frozen cores.

Tables of ``parametrize`` keep their rows for LoRA, translated (rows.py). ``LoraConfig`` in a test's body makes a
frozen-core config. What only LoRA has is excluded by name with its reason (exclusions.py). A test that passes without
ever meeting a frozen core is a failure of this harness, and reported as one.
"""

from __future__ import annotations

import inspect
import json
import sys
import types
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from calibrated import basis_at_injection
from exclusions import reason_to_exclude
from rows import LoraSpelling, retargeted

from frozencore import FrozenCoreConfig, FrozenCoreModel
from frozencore.adapter.layer import FrozenCoreLinear

outcomes: dict[str, tuple[str, str]] = {}
met: list[str] = []  # what the running test has made of ours


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--constructor", default="random", help="how the bases under test are chosen")
    parser.addoption("--sabotage", default="", help="break the tuner: unmerge or scale")
    parser.addoption("--outcomes", default="", help="file for the outcome of every case, as JSON")


def pytest_configure(config: pytest.Config) -> None:
    # PEFT's shared tester names one class of it; no pipeline is ever made.
    sys.modules.setdefault("diffusers", types.SimpleNamespace(StableDiffusionPipeline=type("None", (), {})))  # type: ignore[arg-type]
    for marker in ("bitsandbytes", "single_gpu_tests", "multi_gpu_tests", "regression"):
        config.addinivalue_line("markers", marker)
    _set_default_constructor(config.getoption("--constructor"))
    _count(FrozenCoreConfig, "__post_init__")
    _count(FrozenCoreConfig, "from_pretrained")
    _count(FrozenCoreModel, "inject_adapter")
    basis_at_injection(FrozenCoreModel)
    FrozenCoreLinear.lora_A = property(lambda layer: layer.frozencore_R)  # type: ignore[attr-defined]  # what tests look at
    if config.getoption("--sabotage"):
        from sabotage import sabotage

        sabotage(config.getoption("--sabotage"))


@pytest.hookimpl(tryfirst=True)
def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    _retarget_module(metafunc.module)
    marks = metafunc.definition.own_markers
    for place, mark in enumerate(marks):
        if mark.name == "parametrize":
            names = [name.strip() for name in mark.args[0].split(",")]
            values = retargeted(metafunc.module.__name__.split(".")[-1], names, list(mark.args[1]))
            if values is not None:
                options = {key: value for key, value in mark.kwargs.items() if key != "ids"}
                marks[place] = pytest.mark.parametrize(mark.args[0], values, **options).mark


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        parameters = getattr(getattr(item, "callspec", None), "params", {})
        test = getattr(item, "originalname", item.name)
        reason = reason_to_exclude(item.path.stem, test, parameters)
        if reason:
            item.add_marker(pytest.mark.skip(reason=f"excluded: {reason}"))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo) -> Iterator[None]:
    if call.when == "setup":
        made_for_it = any(_is_ours(value) for value in getattr(getattr(item, "callspec", None), "params", {}).values())
        met[:] = ["a parameter"] if made_for_it else []
    report = yield
    if report.when == "call" and report.passed and not met:
        report.outcome = "failed"
        report.longrepr = "passed without meeting a frozen core: exclude it by name"
    return report


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """With xdist, the controller hears of every case too."""
    if report.skipped and isinstance(report.longrepr, tuple):
        reason = report.longrepr[2].removeprefix("Skipped: ").removeprefix("excluded: ")
        if reason == "got empty parameter set for (quant)":
            reason = "no quantiser could be fetched"
        outcomes[report.nodeid] = ("excluded", reason)
    elif report.failed:
        outcomes[report.nodeid] = ("failed", str(report.longrepr).strip().splitlines()[-1])
    elif report.when == "call":
        outcomes.setdefault(report.nodeid, ("passed", ""))


def pytest_sessionfinish(session: pytest.Session) -> None:
    path = session.config.getoption("--outcomes")
    if path and not hasattr(session.config, "workerinput"):
        Path(path).write_text(json.dumps(outcomes))


def _is_ours(value: Any) -> bool:
    return isinstance(value, FrozenCoreConfig)


def _count(owner: type, method: str) -> None:
    original = inspect.getattr_static(owner, method)
    is_classmethod = isinstance(original, classmethod)
    function = original.__func__ if is_classmethod else original

    def counted(self: Any, *args: Any, **kwargs: Any) -> Any:
        met.append(method)
        return function(self, *args, **kwargs)

    setattr(owner, method, classmethod(counted) if is_classmethod else counted)


def _set_default_constructor(constructor: str) -> None:
    """Most tests say nothing about bases: the constructor under test is what they get by default."""
    place = [field.name for field in fields(FrozenCoreConfig) if field.init].index("constructor")
    init = inspect.unwrap(FrozenCoreConfig.__init__)
    defaults = list(init.__defaults__ or ())
    without = len([field for field in fields(FrozenCoreConfig) if field.init]) - len(defaults)
    defaults[place - without] = constructor
    init.__defaults__ = tuple(defaults)


def _retarget_module(module: Any) -> None:
    if getattr(module, "LoraConfig", None) is LoraSpelling:
        return
    module.LoraConfig = LoraSpelling
    for skips_for_beft in ("check_beft_config", "beft_tests", "deberta_beft_tests"):
        if hasattr(module, skips_for_beft):  # they mean BEFT and skip every method on models without biases
            setattr(module, skips_for_beft, lambda *args: None)
    common: Any = sys.modules.get("tests.testing_common")
    if common is not None:
        common.LoraConfig = FrozenCoreConfig
    requires_grad = getattr(module, "TestRequiresGrad", None)
    if requires_grad is not None:
        original = requires_grad.check_requires_grad

        def check(self: Any, model: Any, *expected: str) -> None:
            cores = [name.replace("lora_A", "frozencore_R") for name in expected if "lora_B" not in name]
            original(self, model, *cores)

        requires_grad.check_requires_grad = check
