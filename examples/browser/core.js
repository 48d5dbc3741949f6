// A core in a link: `#core=` and base64url of the bytes that `frozencore export --to link` describes.

const SHORTEST = 23; // bits, basis id, number of layers, CRC

/** The basis id, bits and values of a fragment; throws an Error of one line. */
export function readCore(fragment) {
  const bytes = bytesOf(fragment.replace(/^#core=/, "")), view = viewOf(bytes);
  const isWhole = bytes.length >= SHORTEST && crc32(bytes.subarray(0, -4)) === view.getUint32(bytes.length - 4, true);
  const bits = bytes[0], layers = isWhole ? view.getUint16(17, true) : 0, codes = bytes.subarray(19 + 4 * layers);
  const sizes = codes.length < 4 ? [] : Array.from({ length: layers }, (_, i) => view.getUint16(19 + 2 * i, true) ** 2);
  const count = sizes.reduce((a, b) => a + b, 0);
  if (!isWhole || ![8, 4, 2].includes(bits) || codes.length !== Math.ceil((count * bits) / 8) + 4) {
    throw new Error("This link is damaged: a part of it is missing or was changed. Ask for it again, as a whole.");
  }
  const basis = [...bytes.subarray(1, 17)].map((byte) => byte.toString(16).padStart(2, "0")).join("");
  const values = new Float32Array(count), mask = 2 ** bits - 1;
  let i = 0;
  sizes.forEach((size, layer) => {
    const scale = halfOf(view.getUint16(19 + 2 * layers + 2 * layer, true));
    for (const end = i + size; i < end; i++) {
      const code = (codes[(i * bits) >> 3] >> ((i * bits) & 7)) & mask;
      values[i] = scale * (code + 0.5 - 2 ** (bits - 1)); // as frozencore.maths.quantise
    }
  });
  return { basis, bits, values, bytes: bytes.length };
}

function bytesOf(text) {
  try {
    return Uint8Array.from(atob(text.replaceAll("-", "+").replaceAll("_", "/")), (letter) => letter.charCodeAt(0));
  } catch {
    return new Uint8Array();
  }
}

function viewOf(bytes) {
  return new DataView(bytes.buffer, bytes.byteOffset, bytes.length);
}

function halfOf(half) {
  const exponent = (half >> 10) & 31, fraction = half & 1023;
  return exponent ? 2 ** (exponent - 15) * (1 + fraction / 1024) : 2 ** -14 * (fraction / 1024); // scales are positive
}

function crc32(bytes) {
  let crc = ~0;
  for (const byte of bytes) {
    crc ^= byte;
    for (let bit = 0; bit < 8; bit++) crc = (crc >>> 1) ^ (crc & 1 ? 0xedb88320 : 0);
  }
  return ~crc >>> 0;
}
