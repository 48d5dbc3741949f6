"""A campaign small enough to run in a test: a few rows of one pocket task."""

from __future__ import annotations

from pathlib import Path

SMALL = """
name: small
models: {pocket: pocket}
base:
  {batch_size: 8, accumulation: 1, dtype: float32, num_train: 32, num_evaluation: 8, epochs: 1, calibration_size: 16}
studies:
  main:
    title: Two methods with search, one without
    axes: {model: [pocket], task: [pocket-sentiment], method: [fcca, eva, milora], seed: [42, 43]}
    search:
      beyond: 0
      grids:
        - {for: [fcca], warmup: [0.03, 0.1]}
        - {for: [eva], learning_rate: [2e-3, 5e-3]}
    report: {reference: fcca}
  stability:
    title: Nearness of the bases
    kind: stability
    reference_size: 24
    axes: {model: [pocket], task: [pocket-sentiment], calibration_size: [8, 24], seed: [42]}
    report: {columns: [calibration_size]}
"""


def write_spec(folder: Path, text: str = SMALL) -> Path:
    """The specification as a file."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "small.yaml"
    path.write_text(text, encoding="utf-8")
    return path
