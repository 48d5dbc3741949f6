"""The files that ``tune`` writes beside a run, and the figure of its training."""

from __future__ import annotations

import base64
import csv
import json
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from typing import ClassVar

import pytest
from matplotlib.figure import Figure
from matplotlib.text import Text

from frozencore.tune import figures
from frozencore.tune.figures import write_learning
from made_up import made_up_record

Command = Callable[..., tuple[int, str, str]]
SCORES = [{"step": 2, "held_out_loss": 0.5, "accuracy": 0.75}, {"step": 3, "held_out_loss": 0.4, "accuracy": 0.7}]
KEPT = {"every": 2, "rows": 70, "kept_step": 2, "by": "accuracy", "scores": SCORES, "time_s": 2.5}


@pytest.mark.parametrize("selection", [KEPT, None])
def test_every_step_has_its_line_and_the_figure_its_curves(
    selection: dict[str, object] | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[Figure] = []
    monkeypatch.setattr(figures, "save_figure", lambda figure, path: drawn.append(figure))
    training = {"num_steps": 3, "final_loss": 1.0, "losses": [3.0, None, 1.0]}
    write_learning(made_up_record({"task": "svamp"}, training=training, selection=selection or ...), tmp_path)
    rows = list(csv.reader((tmp_path / "history.csv").read_text().splitlines()))
    scored = [["0.5", "0.75"], ["0.4", "0.7"]] if selection else [["", ""], ["", ""]]
    assert rows[0] == ["step", "loss", "validation_loss", "validation_accuracy"]
    assert rows[1:] == [["1", "3.0", "", ""], ["2", "", *scored[0]], ["3", "1.0", *scored[1]]]
    curves = {line.get_label(): [list(axis) for axis in line.get_data()] for line in drawn[0].axes[0].lines}
    assert curves["each step"] == [[1, 3], [3.0, 1.0]]
    assert curves.get("validation rows") == ([[2, 3], [0.5, 0.4]] if selection else None)
    assert "smoothed" not in curves  # three steps show themselves


def test_a_long_run_has_a_smoothed_curve_and_no_number_touches_the_title(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[Figure] = []
    monkeypatch.setattr(figures, "save_figure", lambda figure, path: drawn.append(figure))
    training = {"num_steps": 21, "losses": [float(step) for step in range(21)]}
    write_learning(made_up_record({"task": "svamp"}, training=training, held_out_loss_before=20.1), tmp_path)
    axes = drawn[0].axes[0]
    (smoothed,) = [line for line in axes.lines if line.get_label() == "smoothed"]
    assert list(smoothed.get_ydata()) == [0.5, *map(float, range(2, 21))]  # twenty groups; the first has two steps
    drawn[0].canvas.draw()
    (title,) = [text for text in axes.findobj(Text) if text.get_text() == axes.get_title(loc="left")]
    assert not any(text.get_window_extent().overlaps(title.get_window_extent()) for text in axes.texts)
    assert not any("." in text.get_text() for text in axes.get_xticklabels())


@pytest.mark.parametrize(("selection", "last"), [(None, 6), (KEPT, 2)])
def test_the_figure_has_the_held_out_loss_before_and_after(
    selection: dict[str, object] | None, last: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[Figure] = []
    monkeypatch.setattr(figures, "save_figure", lambda figure, path: drawn.append(figure))
    record = made_up_record(
        {"task": "svamp"}, training={"num_steps": 6, "losses": [3.0] * 6}, selection=selection or ...,
        held_out_loss_before=4.0, held_out_loss=1.5,
        resolved={"targets": "all-linear", "recipe": {}, "max_length": 9},
    )  # fmt: skip
    write_learning(record, tmp_path)
    axes = drawn[0].axes[0]
    curves = {line.get_label(): [list(axis) for axis in line.get_data()] for line in axes.lines}
    assert curves["held-out rows, before and after"] == [[0, last], [4.0, 1.5]]
    assert {text.get_text() for text in axes.texts} == {"4.000", "1.500"}
    upright = [line.get_xdata()[0] for line in axes.lines if line.get_color() == figures.GREY]
    assert upright == ([last] if selection else [])
    assert "mean of a twentieth" not in curves


FEW = (
    "--model", "pocket", "--task", "pocket-sentiment", "--rank", "4", "--calibration-size", "32", "--num-train", "16",
    "--num-evaluation", "8", "--epochs", "1", "--device", "cpu",
)  # fmt: skip


class Hub(BaseHTTPRequestHandler):
    """A hub that takes small files and keeps them."""

    files: ClassVar[dict[str, bytes]] = {}
    visibility: ClassVar[list[str]] = []

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if self.path == "/api/repos/create":
            self.visibility.append(json.loads(body)["visibility"])
            answer: dict[str, object] = {"url": "https://huggingface.co/anna/mine"}
        elif "/preupload/" in self.path:
            paths = [file["path"] for file in json.loads(body)["files"]]
            answer = {"files": [{"path": path, "uploadMode": "regular", "shouldIgnore": False} for path in paths]}
        elif self.path == "/api/validate-yaml":  # of the card
            answer = {"errors": [], "warnings": []}
        else:
            for line in map(json.loads, body.splitlines()):
                if line["key"] == "file":
                    self.files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
            answer = {"commitUrl": "https://huggingface.co/anna/mine/commit/0", "commitOid": "0", "success": True}
        text = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *_: object) -> None:
        pass


def test_a_run_uploads_its_adapter_to_a_private_repository(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = HTTPServer(("127.0.0.1", 0), Hub)
    Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_TOKEN", "hf_x")
    words = ("tune", *FEW, "--method", "random", "--push-to-hub", "anna/mine", "--output", tmp_path / "run")
    status, out, err = command(*words)
    server.shutdown()
    assert status == 0, err
    assert f"Uploaded: http://127.0.0.1:{server.server_port}/anna/mine" in out
    adapter = tmp_path / "run" / "adapter"
    assert Hub.files == {file.name: file.read_bytes() for file in adapter.iterdir()}
    assert Hub.visibility == ["private"]


@pytest.mark.parametrize(("name", "said"), [("mine", "OWNER/NAME"), ("./anna", "OWNER/NAME"), ("anna/mine", "login")])
def test_an_upload_that_cannot_work_is_refused_before_the_training(
    name: str, said: str, command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.get_token", lambda: None)
    status, _, err = command("tune", *FEW, "--push-to-hub", name, "--output", tmp_path / "run")
    assert (status, err.count("\n")) == (2, 1)
    assert said in err
    assert not (tmp_path / "run").exists()
