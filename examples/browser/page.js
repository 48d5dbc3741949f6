// The page: a model that is fetched once, and a core that is the fragment of the link.

import { Model } from "./model.js";
import { readCore } from "./core.js";
import qrcode from "./node_modules/qrcode-generator/dist/qrcode.mjs";

const NUM_TOKENS = 24, LARGEST_QR = 2953;
const at = (id) => document.getElementById(id);
const NO_CORE = at("core").textContent;
let model = null, core = null;

function say(error) {
  at("error").hidden = !error;
  at("error").textContent = error ? error.message : "";
}

function inWords(bytes) {
  return bytes < 1e6 ? `${(bytes / 1e3).toFixed(1)} kB` : `${(bytes / 1e6).toFixed(1)} MB`;
}

function whatWasFetched() {
  const files = performance.getEntriesByType("resource");
  const sum = (part) => files.filter((file) => file.name.includes(part)).reduce((all, file) => all + file.decodedBodySize, 0);
  return `Fetched once: the model, ${inWords(sum("/model/"))}, and the runtime, ${inWords(sum("/node_modules/"))}.`;
}

/** Take the core of the link. Nothing is asked of a server: the browser does not send a fragment. */
function open() {
  core = null;
  at("qr").hidden = true;
  at("core").textContent = NO_CORE;
  at("tuned").textContent = at("tuned-rate").textContent = "";
  say(null);
  if (!location.hash) return;
  try {
    const found = readCore(location.hash);
    model.requireBasis(found);
    core = found;
  } catch (error) {
    return say(error);
  }
  at("core").textContent = `${core.values.length.toLocaleString("en")} values of ${core.bits} bits in ${inWords(core.bytes)}, ` +
    `on the basis ${core.basis.slice(0, 8)}. That is all that differs from the base model.`;
  show(location.href.length <= LARGEST_QR ? location.href : location.hash);
}

/** Show a text as a QR code, if it fits into one. */
function show(text) {
  if (text.length > LARGEST_QR) {
    at("core").textContent += " It is too large for a QR code.";
    return;
  }
  const code = qrcode(0, "L");
  code.addData(text, "Byte");
  code.make();
  at("qr").src = code.createDataURL(4, 16);
  at("qr").hidden = false;
}

/** Open the core in the QR code of a picture. */
async function read(file) {
  const picture = await createImageBitmap(file);
  const canvas = new OffscreenCanvas(picture.width, picture.height).getContext("2d");
  canvas.drawImage(picture, 0, 0);
  const { data, width, height } = canvas.getImageData(0, 0, picture.width, picture.height);
  const found = jsQR(data, width, height);
  const fragment = found && found.data.match(/#core=[\w-]+$/);
  if (!fragment) throw new Error("There is no QR code with a core in this picture. Take it again, straight and sharp.");
  location.hash = fragment[0];
}

async function ask() {
  at("answer").disabled = true;
  const prompt = at("prompt").value;
  try {
    for (const [place, given] of core ? [["base", null], ["tuned", core]] : [["base", null]]) {
      const begins = performance.now();
      let first = null, num = 0;
      at(place).textContent = "";
      for await (const text of model.answer(prompt, given, NUM_TOKENS)) {
        first ??= performance.now() - begins;
        num += 1;
        at(place).textContent = text;
      }
      const seconds = (performance.now() - begins) / 1e3;
      at(`${place}-rate`).textContent = `first token after ${Math.round(first ?? seconds * 1e3)} ms, ` +
        `${Number((num / seconds).toPrecision(2))} tokens a second`;
    }
  } finally {
    at("answer").disabled = false;
    document.body.dataset.answered = Number(document.body.dataset.answered ?? 0) + 1;
  }
}

at("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  ask().catch(say);
});
at("picture").addEventListener("change", () => read(at("picture").files[0]).catch(say));
addEventListener("hashchange", open);
try {
  model = await Model.load("model");
  at("fetched").textContent = whatWasFetched();
  at("answer").disabled = false;
  open();
} catch (error) {
  at("fetched").textContent = "There is no model.";
  say(error);
}
document.body.dataset.ready = "";
