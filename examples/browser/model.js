// A language model in ONNX Runtime, with its cache of keys and values; a core is one of its inputs.

import { Tokenizer } from "./node_modules/@huggingface/tokenizers/dist/tokenizers.min.mjs";
import * as ort from "./node_modules/onnxruntime-web/dist/ort.wasm.min.mjs";

ort.env.wasm.numThreads = 1; // more threads need headers that a plain file server does not send

const PREFIX = "frozencore_core_";

export class Model {
  /** Fetch the model that `frozencore export --to onnx` wrote into a folder beside the page. */
  static async load(folder) {
    const json = async (name) => (await fetched(`${folder}/${name}`)).json();
    const [config, tokens, settings] = await Promise.all(
      ["genai_config.json", "tokenizer.json", "tokenizer_config.json"].map(json),
    );
    const externalData = ["model.onnx.data", "basis.onnx.data"].map((path) => ({ path, data: `${folder}/${path}` }));
    const session = await ort.InferenceSession.create(`${folder}/model-web.onnx`, { externalData });
    return new Model(session, config.model, new Tokenizer(tokens, settings));
  }

  constructor(session, config, tokenizer) {
    Object.assign(this, { session, config, tokenizer });
    this.coreInput = session.inputNames.find((name) => name.startsWith(PREFIX));
    this.basis = this.coreInput.slice(PREFIX.length);
    this.numValues = session.inputMetadata[session.inputNames.indexOf(this.coreInput)].shape[1];
    this.ends = [config.eos_token_id].flat();
  }

  /** Throw an Error of one line if a core is on another basis than the model's. */
  requireBasis(core) {
    if (core.basis !== this.basis) {
      throw new Error(`This link is a core on the basis ${core.basis.slice(0, 8)}, and the model here has the basis ` +
        `${this.basis.slice(0, 8)}. Open it on the page of its model.`);
    }
  }

  /** Greedy text after a prompt, piece by piece; no core is the base model. */
  async *answer(prompt, core, numTokens) {
    const values = core ? core.values : new Float32Array(this.numValues);
    const ids = this.tokenizer.encode(prompt).ids, tokens = [];
    let past = this.emptyCache(), fresh = ids, num = 0;
    while (tokens.length < numTokens) {
      num += fresh.length;
      const feeds = {
        input_ids: integers(fresh),
        attention_mask: integers(Array(num).fill(1)),
        [this.coreInput]: new ort.Tensor("float32", values, [1, values.length]),
        ...past,
      };
      if (this.session.inputNames.includes("position_ids")) {
        feeds.position_ids = integers(fresh.map((_, i) => num - fresh.length + i));
      }
      const found = await this.session.run(feeds);
      past = Object.fromEntries(Object.keys(past).map((name) => [name, found[name.replace("past_key_values", "present")]]));
      const next = largest(found.logits.data, found.logits.dims[2]);
      if (this.ends.includes(next)) return;
      tokens.push(next);
      fresh = [next];
      yield this.tokenizer.decode(tokens);
    }
  }

  emptyCache() {
    const { num_key_value_heads: heads, head_size: size } = this.config.decoder;
    const names = this.session.inputNames.filter((name) => name.startsWith("past_key_values"));
    return Object.fromEntries(names.map((name) => [name, new ort.Tensor("float32", new Float32Array(), [1, heads, 0, size])]));
  }
}

async function fetched(place) {
  const answer = await fetch(place);
  if (!answer.ok) throw new Error(`${place} is not there (${answer.status}). The page's README says how to make it.`);
  return answer;
}

function integers(values) {
  return new ort.Tensor("int64", BigInt64Array.from(values, BigInt), [1, values.length]);
}

function largest(logits, size) {
  const last = logits.subarray(logits.length - size);
  return last.reduce((best, value, i) => (value > last[best] ? i : best), 0);
}
