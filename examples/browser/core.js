// A core in a link: `#core=` and base64url of the bytes that `frozencore export --to link` describes.

const SHORTEST = 23; // bits, basis id, number of layers, CRC

/** The basis id, bits and values of a fragment; throws an Error of one line. */
export function readCore(fragment) {
  const bytes = bytesOf(fragment.replace(/^#core=/, ""));
  if (bytes.length < SHORTEST || crc32(bytes.subarray(0, -4)) !== viewOf(bytes).getUint32(bytes.length - 4, true)) {
    throw new Error("This link is damaged: a part of it is missing or was changed. Ask for it again, as a whole.");
  }
  const view = viewOf(bytes), bits = bytes[0], layers = view.getUint16(17, true);
  const basis = [...bytes.subarray(1, 17)].map((byte) => byte.toString(16).padStart(2, "0")).join("");
  const sizes = Array.from({ length: layers }, (_, i) => view.getUint16(19 + 2 * i, true) ** 2);
  const scales = Array.from({ length: layers }, (_, i) => halfOf(view.getUint16(19 + 2 * layers + 2 * i, true)));
  const codes = bytes.subarray(19 + 4 * layers), mask = 2 ** bits - 1;
  const values = new Float32Array(sizes.reduce((a, b) => a + b, 0));
  let i = 0;
  sizes.forEach((size, layer) => {
    for (const end = i + size; i < end; i++) {
      const code = (codes[(i * bits) >> 3] >> ((i * bits) & 7)) & mask;
      values[i] = scales[layer] * (code + 0.5 - 2 ** (bits - 1)); // as frozencore.maths.quantise
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
