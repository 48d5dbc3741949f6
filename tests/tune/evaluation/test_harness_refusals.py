"""Missing measures of the harness, which need not be installed."""

from __future__ import annotations

import pytest

from frozencore.errors import ModelError
from frozencore.tune.evaluation.harness import _headline


def test_the_metric_shown_is_accuracy_where_there_is_one_and_never_a_nan_or_a_standard_error() -> None:
    nan = float("nan")
    assert _headline({"alias": "a", "bleu,none": 0.1, "acc_stderr,none": 0.2, "acc,none": 0.5}) == "acc,none"
    assert _headline({"acc,none": nan, "bleu,none": 0.1}) == "bleu,none"
    with pytest.raises(ModelError, match="no metric that is a number: .*Check the model's weights"):
        _headline({"alias": "a", "perplexity,none": nan, "perplexity_stderr,none": 0.1})
