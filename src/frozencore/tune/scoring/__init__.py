"""The results of scoring: a prediction for each row, and the score over all rows."""

from __future__ import annotations

import math
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Prediction:
    """A model's prediction for one example.

    Attributes:
        prediction: The chosen choice, or the generated number in normal form; ``None`` for no answer.
        logprobs: Choice tasks: the compared log-likelihood of each choice, in nats.
        text: Generated tasks: the generated text, without the prompt.
    """

    id: str
    prediction: str | None
    gold: str
    correct: bool
    logprobs: tuple[float, ...] = ()
    text: str = ""


@dataclass(frozen=True)
class RowLosses:
    """The held-out loss row by row: the row's id, the summed nats of its completion, and the number of its tokens."""

    ids: tuple[str, ...]
    nats: tuple[float, ...]
    tokens: tuple[int, ...]

    @property
    def mean(self) -> float:
        """Nats per token over all rows."""
        return math.fsum(self.nats) / sum(self.tokens)


@dataclass(frozen=True)
class TaskScore:
    """A task's score over its evaluation rows.

    Attributes:
        accuracy: Share of correct predictions, from 0 to 1.
        standard_error: Standard error of that share over the rows: ``sqrt(p (1 - p) / (n - 1))``.
        num_ties: Choice tasks: examples in which several choices share the best log-likelihood (the first counts).
        num_duplicate_choices: Choice tasks: examples with two equal choices.
        num_cut: Prompts whose beginning was cut because of the length limit.
        num_truncated: Generated tasks: answers that reached the length limit before the end token.
        num_unanswered: Generated tasks: texts without a marker followed by a number.
        chance: Expected accuracy of a uniform guess; ``None`` for generated answers.
        majority_class: Accuracy of always choosing the most frequent position; ``None`` for generated answers.
        held_out_loss: Nats per completion token, including the end token.
        time_s: Wall time of scoring, including the held-out loss.
        row_losses: The held-out loss by row; None if only its mean is known.
    """

    task: str
    held_out_loss: float
    predictions: tuple[Prediction, ...]
    time_s: float
    chance: float | None = None
    majority_class: float | None = None
    num_ties: int = 0
    num_duplicate_choices: int = 0
    num_cut: int = 0
    num_truncated: int = 0
    num_unanswered: int = 0
    row_losses: RowLosses | None = None
    num_examples: int = field(init=False)
    accuracy: float = field(init=False)
    standard_error: float = field(init=False)

    def __post_init__(self) -> None:
        count = len(self.predictions)
        share = sum(prediction.correct for prediction in self.predictions) / count
        error = math.sqrt(share * (1 - share) / max(1, count - 1))  # 0 for a single example
        vars(self).update(num_examples=count, accuracy=share, standard_error=error)
