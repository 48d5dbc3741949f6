"""The page of examples/browser in Chromium: links, damaged ones, another basis's, QR codes, a phone's width."""

from __future__ import annotations

import base64
import json
import shutil
import subprocess
import threading
import zlib
from dataclasses import dataclass, field
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoModelForCausalLM

from fixtures import ROOT
from frozencore import save_basis
from frozencore.adapter.export.link import core_fragment, export_qr
from frozencore.adapter.export.onnx import export_onnx
from frozencore.adapter.folders import read_adapter
from frozencore.errors import ArtifactError, ConfigError
from frozencore.tune.pocket import pocket_model_path
from tiny import adapted, tiny_llama, train_at_random

segno = pytest.importorskip("segno", reason="pip install 'frozencore[onnx]'")

PAGE = ROOT / "examples" / "browser"
STEPS = """
<!doctype html><meta name="viewport" content="width=device-width"><body style="margin:0">
<iframe id="frame" style="border:0;width:100%;height:100vh"></iframe><img src="hold" hidden>
<script type="module">
const steps = await (await fetch("steps.json")).json(), frame = document.getElementById("frame"), found = {};
const at = (id) => frame.contentDocument.getElementById(id);
async function until(holds) { while (!holds()) await new Promise((done) => setTimeout(done, 50)); }
async function open(name, fragment) {
  frame.src = `index.html?${name}${fragment}`;
  const isOpen = () => frame.contentWindow.location.search === `?${name}`;
  await until(() => isOpen() && frame.contentDocument.body?.dataset.ready !== undefined);
}
async function pictured(picture) {
  const files = new DataTransfer();
  files.items.add(new File([await (await fetch(picture)).blob()], "picture.png", { type: "image/png" }));
  const before = frame.contentWindow.location.hash;
  at("picture").files = files.files;
  at("picture").dispatchEvent(new Event("change"));
  await until(() => frame.contentWindow.location.hash !== before || !at("error").hidden);
}
for (const [name, step] of Object.entries(steps)) {
  await open(name, step.fragment);
  if (step.picture) await pictured(step.picture === "shown" ? found[step.of].qr : step.picture);
  if (step.prompt !== undefined) at("prompt").value = step.prompt;
  if (at("error").hidden && at("ask").checkValidity()) {
    at("answer").click();
    await until(() => "answered" in frame.contentDocument.body.dataset);
  }
  found[name] = {
    base: at("base").textContent, tuned: at("tuned").textContent, error: at("error").textContent, qr: at("qr").src,
    enabled: !at("answer").disabled,
    pictured: at("qr").checkVisibility(),
    hash: frame.contentWindow.location.hash, fetched: at("fetched").textContent,
    overflow: frame.contentDocument.documentElement.scrollWidth - frame.contentWindow.innerWidth,
  };
}
await fetch("report", { method: "POST", body: JSON.stringify(found) });
</script>
"""


@dataclass
class Served:
    """What the page reported; ``hold`` is answered only after that, so that a screenshot waits for it."""

    reported: threading.Event = field(default_factory=threading.Event)
    found: dict[str, Any] = field(default_factory=dict)


class Handler(SimpleHTTPRequestHandler):
    """A file server that also takes the report."""

    def __init__(self, *given: Any, served: Served, **named: Any) -> None:
        self.served = served
        super().__init__(*given, **named)

    def do_GET(self) -> None:
        if self.path == "/hold":
            self.served.reported.wait(840)
        super().do_GET()

    def do_POST(self) -> None:
        self.served.found |= json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.send_response(200)
        self.end_headers()
        self.served.reported.set()

    def log_message(self, *_: Any) -> None:
        pass


def shown(folder: Path, steps: dict[str, Any], picture: Path) -> dict[str, Any]:
    """Open the page for each step, one after the other, in a window of a phone's width; keep a screenshot."""
    (folder / "steps.json").write_text(json.dumps(steps))
    (folder / "steps.html").write_text(STEPS)
    served = Served()
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, served=served, directory=str(folder)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    words = ["chromium", "--headless", "--no-sandbox", "--hide-scrollbars", "--window-size=500,900"]
    words += [f"--user-data-dir={folder / 'profile'}", f"--screenshot={picture}"]
    try:
        subprocess.run([*words, f"http://127.0.0.1:{server.server_port}/steps.html"], check=True, timeout=900,
                       capture_output=True)  # fmt: skip
    finally:
        server.shutdown()
        server.server_close()
    assert served.found, "the page reported nothing"
    return served.found


def trained(folder: Path, *names: str, seed: int = 0, **options: object) -> None:
    """Tenants with random cores on one basis of the pocket model."""
    model = adapted("random", model=AutoModelForCausalLM.from_pretrained(pocket_model_path()), seed=seed, **options)
    save_basis(model, folder / "basis")
    for number, name in enumerate(names):
        train_at_random(model, seed=number)
        model.save_pretrained(folder / name)


@pytest.fixture
def site(tmp_path: Path) -> Path:
    trained(tmp_path / "shop", "anna", "ben", r=16)
    trained(tmp_path / "other", "cleo", seed=1, r=16)
    site = tmp_path / "site"
    site.mkdir()
    for file in PAGE.iterdir():
        if file.name != "model":
            (site / file.name).symlink_to(file)
    export_onnx(tmp_path / "shop" / "basis", site / "model", base=pocket_model_path())
    return site


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("chromium") is None, reason="Chromium opens the page")
@pytest.mark.skipif(not (PAGE / "node_modules").is_dir(), reason="npm install --prefix examples/browser")
def test_links_and_pictures_answer_by_their_core_and_wrong_ones_give_one_line(site: Path, tmp_path: Path) -> None:
    anna, ben = (core_fragment(tmp_path / "shop" / name, 4) for name in ("anna", "ben"))
    other = core_fragment(tmp_path / "other" / "cleo", 4)
    export_qr(tmp_path / "shop" / "ben", site / "ben.png", 4)
    segno.make("another text").save(str(site / "another.png"), scale=4)
    steps = {
        "none": {"fragment": ""}, "ben": {"fragment": ben},
        "cut": {"fragment": anna[:-40]}, "changed": {"fragment": anna.replace(anna[900:910], "A" * 10)},
        "other": {"fragment": other},
        "scanned": {"fragment": "", "picture": "ben.png"},
        "rescanned": {"fragment": "", "picture": "shown", "of": "ben"},
        "codeless": {"fragment": "", "picture": "another.png"}, "anna": {"fragment": anna},
        "empty": {"fragment": "", "prompt": ""}, "too long": {"fragment": "", "prompt": "Mia " * 2000},
    }  # fmt: skip
    found = shown(site, steps, tmp_path / "phone.png")
    assert len({found[name]["tuned"] for name in ("anna", "ben")} | {found["none"]["base"]}) == 3
    assert found["none"]["base"] == found["anna"]["base"] == found["ben"]["base"] != ""
    for name in ("scanned", "rescanned"):
        assert (found[name]["hash"], found[name]["tuned"]) == (ben, found["ben"]["tuned"])
    for name in ("cut", "changed"):
        assert "damaged" in found[name]["error"]
        assert found[name]["tuned"] == ""
    assert f"basis {read_adapter(tmp_path / 'other' / 'cleo').core.basis_id[:8]}" in found["other"]["error"]
    assert "no QR code" in found["codeless"]["error"]
    assert (found["empty"]["base"], found["too long"]["error"] != "") == ("", True)
    assert all(one["enabled"] for one in found.values())
    assert {name for name, one in found.items() if one["pictured"]} == {"ben", "scanned", "rescanned", "anna"}
    assert all("\n" not in one["error"] and one["overflow"] <= 0 for one in found.values())
    assert "model" in found["anna"]["fetched"]


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("chromium") is None, reason="Chromium opens the page")
def test_a_page_whose_code_does_not_load_says_what_it_takes(tmp_path: Path) -> None:
    words = ["chromium", "--headless", "--no-sandbox", f"--user-data-dir={tmp_path}", "--dump-dom"]
    done = subprocess.run([*words, (PAGE / "index.html").as_uri()], check=True, timeout=300, capture_output=True)
    assert b"npm install --prefix" in done.stdout.partition(b"</main>")[0]
    assert b"Loading the model" not in done.stdout


def test_a_fragment_holds_the_core_of_its_bits(tmp_path: Path) -> None:
    adapted("random", model=tiny_llama(), trained=True, rank_pattern={"q_proj": 2}).save_pretrained(tmp_path / "anna")
    saved = read_adapter(tmp_path / "anna")
    for bits in (8, 4, 2):
        saved.write(tmp_path / f"{bits}", saved.core.in_bits(bits, saved.ranks))
        fragment = core_fragment(tmp_path / "anna", bits)
        text = fragment.removeprefix("#core=")
        content = base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))
        assert zlib.crc32(content[:-4]) == int.from_bytes(content[-4:], "little")
        assert (content[0], content[1:17].hex()) == (bits, saved.core.basis_id)
        num_layers = int.from_bytes(content[17:19], "little")
        ranks = np.frombuffer(content, "<u2", num_layers, 19).astype(int)
        scales = np.frombuffer(content, "<f2", num_layers, 19 + 2 * num_layers).astype(np.float32)
        packed = np.frombuffer(content, np.uint8, offset=19 + 4 * num_layers)[:-4]
        codes = np.stack([packed >> shift & (2**bits - 1) for shift in range(0, 8, bits)], 1).reshape(-1)
        size = sum(ranks**2)
        values = np.repeat(scales, ranks**2) * (codes[:size] + 0.5 - 2 ** (bits - 1))
        np.testing.assert_array_equal(values, read_adapter(tmp_path / f"{bits}").core.values.numpy())


READ = """
import { readFileSync } from "node:fs";
const { readCore } = await import(process.argv[1]);
const read = (fragment) => { try { return [...readCore(fragment).values]; } catch (error) { return error.message; } };
console.log(JSON.stringify(JSON.parse(readFileSync(0)).map(read)));
"""


def with_right_checksum(content: bytes) -> str:
    whole = content + zlib.crc32(content).to_bytes(4, "little")
    return "#core=" + base64.urlsafe_b64encode(whole).decode().rstrip("=")


@pytest.mark.skipif(shutil.which("node") is None, reason="Node runs core.js")
def test_the_page_reads_the_values_of_a_core_and_refuses_sizes_that_its_link_does_not_have(tmp_path: Path) -> None:
    adapted("random", model=tiny_llama(), trained=True, rank_pattern={"q_proj": 2}).save_pretrained(tmp_path / "anna")
    saved = read_adapter(tmp_path / "anna")
    head = b"\x04" + bytes(16)
    damaged = [
        head + (1).to_bytes(2, "little") + (60_000).to_bytes(2, "little") + bytes(2),  # 3.6 billion values
        head + (5_000).to_bytes(2, "little"),
        b"\x03" + head[1:] + bytes(2),
        b"",
    ]
    links = [*(core_fragment(tmp_path / "anna", bits) for bits in (8, 4, 2)), *map(with_right_checksum, damaged)]
    words = ["node", "--input-type=module", "-e", READ, (PAGE / "core.js").as_uri()]
    done = subprocess.run(words, input=json.dumps(links), capture_output=True, text=True, check=True, timeout=60)
    found = json.loads(done.stdout)
    for bits, values in zip((8, 4, 2), found, strict=False):
        assert values == saved.core.in_bits(bits, saved.ranks).values.tolist()
    assert len(found) == 7
    assert all("This link is damaged" in message for message in found[3:])


def test_a_core_too_large_for_a_qr_code_is_refused_with_what_fits(tmp_path: Path) -> None:
    trained(tmp_path, "small", r=16)
    assert export_qr(tmp_path / "small", tmp_path / "small.png", 4) <= 2953
    trained(tmp_path / "b", "wide", r=16, target_modules="all-linear")
    with pytest.raises(ArtifactError, match="--bits 2 fits"):
        export_qr(tmp_path / "b" / "wide", tmp_path / "wide.png", 4)
    trained(tmp_path / "c", "wider", r=40, target_modules="all-linear")
    with pytest.raises(ArtifactError, match=r"At 2 bits a basis of rank 17 fits"):
        export_qr(tmp_path / "c" / "wider", tmp_path / "wide.png", 2)
    with pytest.raises(ConfigError, match=r"\.png or \.svg"):
        export_qr(tmp_path / "small", tmp_path / "small.jpg", 4)
    assert not (tmp_path / "wide.png").exists()
