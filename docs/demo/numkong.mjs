/**
 * numkong.mjs: exact MaxSim in browsers and Node, over the WebAssembly modules that build.py makes.
 *
 *   const nk = await load();
 *   const passages = nk.pack([first, second], { depth: 128 });       // Float32Array of tokens x 128 each
 *   const { scores, argmax } = nk.maxsim(question, passages, { argmax: true });
 *
 * docs/webassembly.md has the rest. No dependencies, no threads; memory grows to 4 GB and `free()` gives it back.
 */

/** Stored element types and their numbers in a packed header (nk_dtype_t). */
const DTYPES = { f32: 2, f16: 3, bf16: 4 };
const DTYPE_NAMES = Object.fromEntries(Object.entries(DTYPES).map(([name, number]) => [number, name]));
const ELEMENT_BYTES = { f32: 4, f16: 2, bf16: 2 };
/** nk_metric_t. */
const METRICS = { dot: 0, cosine: 1, angular: 2 };
const REDUCTIONS = { sum: 0, mean: 1 };

const SUCCESS = 0;
const MISSING_KERNEL = -19; // nk_missing_kernel_k: another architecture's row packed it
const HEADER_BYTES = 256;
const ADDRESS_SPACE = 2 ** 32;

/** Bytes of the header that a reader needs, from numkong/packed.h. */
const HEADER = { layout: 12, dtype: 16, documents: 24, tokens: 32, depth: 40, total: 48, offsets: 56, originals: 112 };

/** The smallest module with i32x4.relaxed_dot_i8x16_i7x16_add_s (0xfd 0x113): whoever refuses it lacks the row. */
const PROBE = Uint8Array.of(
  ...[0x00, 0x61, 0x73, 0x6d, 0x01, 0x00, 0x00, 0x00], // magic and version
  ...[0x01, 0x08, 0x01, 0x60, 0x03, 0x7b, 0x7b, 0x7b, 0x01, 0x7b], // type: three v128 to one
  ...[0x03, 0x02, 0x01, 0x00], // one function of that type
  ...[0x0a, 0x0d, 0x01, 0x0b, 0x00, 0x20, 0x00, 0x20, 0x01, 0x20, 0x02, 0xfd, 0x93, 0x02, 0x0b], // its code
);

/** What every function here throws: `argument` is the name of what was wrong, `status` the C status' name if it had one. */
export class NumKongError extends Error {
  /**
   * @param {string} argument
   * @param {string} message what came, what was wanted, what to write instead
   * @param {string | null} [status]
   */
  constructor(argument, message, status = null) {
    super(`${argument}: ${message}`);
    this.name = "NumKongError";
    this.argument = argument;
    this.status = status;
  }
}

/**
 * Why this engine cannot run the v128relaxed row, or null when it can.
 * @returns {string | null}
 */
export function relaxedObstacle() {
  if (!WebAssembly.validate(PROBE)) return "this engine does not have WebAssembly relaxed SIMD";
  const node = Number(globalThis.process?.versions?.node?.split(".")[0] ?? Infinity);
  if (node < 22) return `Node ${node} computes the relaxed dot product wrong; Node 22 and newer are right`;
  return null;
}

/**
 * Load the module that suits this engine: with the v128relaxed row, or the serial one, which returns the same bits.
 *
 * @param {object} [options]
 * @param {string | URL | BufferSource | WebAssembly.Module} [options.relaxed] module with the row; default beside this file
 * @param {string | URL | BufferSource | WebAssembly.Module} [options.plain] module without vector instructions
 * @param {"v128relaxed" | "serial"} [options.row] force a row; by default the best one that runs
 * @returns {Promise<NumKong>}
 * @throws {NumKongError} the forced row does not run here, or a module cannot be fetched
 */
export async function load(options = {}) {
  const { row, relaxed = "built/numkong-relaxed.wasm", plain = "built/numkong.wasm" } = options;
  const wanted = choice("row", row ?? "v128relaxed", { v128relaxed: 1, serial: 2 }) === 1;
  const obstacle = wanted ? relaxedObstacle() : "the serial row was asked for";
  if (row === "v128relaxed" && obstacle) throw new NumKongError("row", `v128relaxed does not run here: ${obstacle}`);
  const module = obstacle ? await compile("plain", plain) : await compile("relaxed", relaxed);
  const instance = await WebAssembly.instantiate(module, {});
  instance.exports._initialize();
  return new NumKong(instance.exports, obstacle);
}

/** @returns {Promise<WebAssembly.Module>} */
async function compile(argument, source) {
  if (source instanceof WebAssembly.Module) return source;
  if (source instanceof ArrayBuffer || ArrayBuffer.isView(source)) return WebAssembly.compile(source);
  const url = new URL(source, import.meta.url);
  if (url.protocol === "file:") {
    const { readFile } = await import("node:fs/promises");
    const content = await readFile(url).catch((error) => {
      throw new NumKongError(argument, `${url} cannot be read (${error.code}); python3 docs/demo/build.py makes it`);
    });
    return WebAssembly.compile(content);
  }
  const response = await fetch(url);
  if (!response.ok)
    throw new NumKongError(argument, `${url} answered ${response.status}; python3 docs/demo/build.py makes it`);
  return WebAssembly.compile(await response.arrayBuffer());
}

/** Memory of packed collections whose objects are gone. */
const forgotten = new FinalizationRegistry(({ exports, address }) => exports.nk_wasm_release(address));

/** A collection packed in the module's memory; made by `pack` and `open`. */
export class Packed {
  #exports;
  #address;

  /** @internal */
  constructor(exports, address, contents) {
    this.#exports = exports;
    this.#address = address;
    /** @type {string} row that packed it */
    this.row = contents.row;
    /** @type {"f32" | "f16" | "bf16"} */
    this.dtype = contents.dtype;
    /** @type {number} number of token sets */
    this.count = contents.documents;
    /** @type {number} number of tokens of all sets */
    this.tokens = contents.tokens;
    /** @type {number} elements of a token */
    this.depth = contents.depth;
    /** @type {number} size in bytes */
    this.bytes = contents.total;
    /** @type {Float64Array} set b holds tokens offsets[b] to offsets[b + 1] */
    this.offsets = contents.offsets;
    Object.freeze(this);
    forgotten.register(this, { exports, address }, this);
  }

  /** @internal */
  address(argument) {
    if (this.#address === null) throw new NumKongError(argument, "this collection was freed; pack or open it again");
    return this.#address;
  }

  /** @internal */
  belongsTo(exports) {
    return this.#exports === exports;
  }

  /**
   * The packed bytes, to store or to send; `open` reads them.
   * @returns {Uint8Array}
   */
  save() {
    return new Uint8Array(this.#exports.memory.buffer, this.address("packed"), this.bytes).slice();
  }

  /** Give the memory back now. */
  free() {
    if (this.#address === null) return;
    forgotten.unregister(this);
    this.#exports.nk_wasm_release(this.#address);
    this.#address = null;
  }
}

/** One loaded module. */
export class NumKong {
  #exports;

  /** @internal */
  constructor(exports, reason) {
    this.#exports = exports;
    /** @type {string} the row that packs and scores */
    this.row = this.#text(exports.nk_wasm_row_name(exports.nk_wasm_best_row(DTYPES.f32)));
    /** @type {string | null} why it is not v128relaxed */
    this.reason = reason;
  }

  /** @returns {number} size of the module's memory; it grows and never shrinks, freed parts are used again */
  get memoryBytes() {
    return this.#exports.memory.buffer.byteLength;
  }

  /**
   * Pack token sets.
   *
   * @param {Float32Array | Uint16Array | Array<Float32Array | Uint16Array>} vectors tokens one behind the other, or a
   *   list with one array for every set. Float16Array too where the engine has it; bfloat16 and binary16 as bits.
   * @param {object} options
   * @param {number} options.depth elements of a token
   * @param {ArrayLike<number>} [options.offsets] set b holds tokens offsets[b] to offsets[b + 1]; by default one set
   * @param {"f32" | "f16" | "bf16"} [options.dtype] what a Uint16Array holds: "f16" or "bf16"
   * @param {boolean} [options.normalize] store every token divided by its norm
   * @returns {Packed}
   * @throws {NumKongError}
   */
  pack(vectors, options = {}) {
    const { depth, normalize = false } = options;
    if (!Number.isInteger(depth) || depth < 1)
      throw new NumKongError("depth", `${depth} is no number of elements; pass { depth: 128 }`);
    const parts = Array.isArray(vectors) ? vectors : [vectors];
    const dtype = elementType(parts, options.dtype);
    const lengths = parts.map((part, index) => {
      if (part.length % depth === 0) return part.length / depth;
      const name = Array.isArray(vectors) ? `vectors[${index}]` : "vectors";
      throw new NumKongError(name, `${part.length} elements are no multiple of the depth, ${depth}`);
    });
    const total = lengths.reduce((sum, length) => sum + length, 0);
    if (Array.isArray(vectors) && options.offsets !== undefined)
      throw new NumKongError("offsets", "a list of arrays has its own; pass one array of all tokens, or no offsets");
    const offsets = options.offsets === undefined ? running(lengths) : checkedOffsets(options.offsets, total);

    const scratch = [];
    try {
      const source = this.#allocate("vectors", total * depth * ELEMENT_BYTES[dtype], scratch);
      let at = source;
      for (const part of parts) {
        this.#bytes(at, part.byteLength).set(new Uint8Array(part.buffer, part.byteOffset, part.byteLength));
        at += part.byteLength;
      }
      const starts = this.#allocate("offsets", 8 * offsets.length, scratch);
      new BigUint64Array(this.#exports.memory.buffer, starts, offsets.length).set(Array.from(offsets, BigInt));
      return this.#pack({ dtype, depth, documents: offsets.length - 1, tokens: total, source, starts, normalize });
    } finally {
      scratch.forEach((address) => this.#exports.nk_wasm_release(address));
    }
  }

  /**
   * Open a packed collection. What another row packed is packed anew from the vectors that it carries.
   *
   * @param {BufferSource} bytes what `save` gave, here or on another machine
   * @returns {Packed}
   * @throws {NumKongError} the bytes are not a packed collection, are damaged or truncated, or do not fit in memory
   */
  open(bytes) {
    if (!(bytes instanceof ArrayBuffer || ArrayBuffer.isView(bytes)))
      throw new NumKongError("bytes", `${kind(bytes)}, wanted an ArrayBuffer or a Uint8Array of a packed collection`);
    const content = ArrayBuffer.isView(bytes)
      ? new Uint8Array(bytes.buffer, bytes.byteOffset, bytes.byteLength)
      : new Uint8Array(bytes);
    if (content.length < HEADER_BYTES)
      throw new NumKongError("bytes", `${content.length} bytes are less than a header; fetch the whole file`);
    const scratch = [];
    try {
      const address = this.#allocate("bytes", content.length, scratch);
      this.#bytes(address, content.length).set(content);
      const status = this.#exports.nk_wasm_check(address, content.length);
      if (status !== SUCCESS && status !== MISSING_KERNEL) {
        const claimed = this.#header(address).total;
        const hint = claimed > content.length ? ` (its header speaks of ${claimed} bytes, ${content.length} came)` : "";
        this.#check("bytes", status, hint);
      }
      const header = this.#header(address);
      if (header.layout === this.#exports.nk_wasm_best_row(DTYPES[header.dtype]) && status === SUCCESS) {
        scratch.pop();
        return this.#wrap(address, header);
      }
      return this.#repack(address, header, content.length);
    } finally {
      scratch.forEach((address) => this.#exports.nk_wasm_release(address));
    }
  }

  /**
   * Score every query set against every document, exactly.
   *
   * @param {Packed | Float32Array | Uint16Array} queries a collection, or the tokens of one query
   * @param {Packed} documents
   * @param {object} [options]
   * @param {"dot" | "cosine" | "angular"} [options.metric] default "dot"
   * @param {"sum" | "mean"} [options.reduction] default "sum"; "mean" divides by the number of query tokens
   * @param {[number, number]} [options.sets] query sets begin to end; default all
   * @param {[number, number]} [options.range] documents begin to end; default all
   * @param {boolean} [options.argmax] also which token of a document was best for every query token, -1 for none
   * @param {boolean} [options.tokenScores] also what those tokens scored
   * @param {boolean} [options.bounds] also how far a score can be from the exact one
   * @returns {{scores: Float64Array | Float32Array, sets: number, documents: number, longest: number,
   *   argmax?: Int32Array, tokenScores?: Float64Array | Float32Array, bounds?: Float64Array}}
   *   scores [sets x documents]; argmax and tokenScores [sets x documents x longest], longest being the tokens of the
   *   longest query set. Float64Array for f32 tokens, Float32Array for bf16 and f16.
   * @throws {NumKongError}
   */
  maxsim(queries, documents, options = {}) {
    this.#expect("documents", documents);
    if (!(queries instanceof Packed)) {
      const packed = this.pack(queries, { depth: documents.depth, dtype: documents.dtype });
      try {
        return this.maxsim(packed, documents, options);
      } finally {
        packed.free();
      }
    }
    this.#expect("queries", queries);
    for (const what of ["dtype", "depth"])
      if (queries[what] !== documents[what])
        throw new NumKongError("queries", `${what} ${queries[what]}, the documents have ${documents[what]}`);
    const metric = choice("metric", options.metric ?? "dot", METRICS);
    const mean = choice("reduction", options.reduction ?? "sum", REDUCTIONS);
    const [firstSet, lastSet] = checkedRange("sets", options.sets, queries.count);
    const [first, last] = checkedRange("range", options.range, documents.count);

    const sets = lastSet - firstSet;
    const columns = last - first;
    const longest = queries.offsets
      .slice(firstSet, lastSet)
      .reduce((most, start, set) => Math.max(most, queries.offsets[firstSet + set + 1] - start), 0);
    const Output = documents.dtype === "f32" ? Float64Array : Float32Array;
    const scratch = [];
    const room = (name, length, Type) => ({
      name,
      length,
      Type,
      address: this.#allocate(name, length * Type.BYTES_PER_ELEMENT, scratch),
    });
    try {
      const scores = room("scores", sets * columns, Output);
      const bounds = options.bounds && room("bounds", sets * columns, Float64Array);
      const argmax = options.argmax && room("argmax", sets * columns * longest, Int32Array);
      const tokenScores = options.tokenScores && room("tokenScores", sets * columns * longest, Output);
      const status = this.#exports.nk_wasm_score(
        queries.address("queries"),
        documents.address("documents"),
        firstSet,
        lastSet,
        first,
        last,
        metric,
        mean,
        scores.address,
        bounds ? bounds.address : 0,
        argmax ? argmax.address : 0,
        tokenScores ? tokenScores.address : 0,
        longest,
      );
      this.#check("maxsim", status);
      const result = { sets, documents: columns, longest };
      for (const { name, address, length, Type } of [scores, bounds, argmax, tokenScores].filter(Boolean))
        result[name] = new Type(this.#exports.memory.buffer, address, length).slice();
      return result;
    } finally {
      scratch.forEach((address) => this.#exports.nk_wasm_release(address));
    }
  }

  /* ------------------------------------------------------------------------------------------------ in the module */

  #text(address) {
    const bytes = this.#bytes(address, Math.min(256, this.memoryBytes - address));
    return new TextDecoder().decode(bytes.subarray(0, bytes.indexOf(0)));
  }

  /** A view that the next allocation may end: memory that grows moves. */
  #bytes(address, length) {
    return new Uint8Array(this.#exports.memory.buffer, address, length);
  }

  #allocate(argument, bytes, scratch) {
    const address = bytes < ADDRESS_SPACE ? this.#exports.nk_wasm_allocate(bytes) >>> 0 : 0;
    if (address === 0)
      throw new NumKongError(
        argument,
        `${bytes} bytes do not fit beside the ${this.memoryBytes} in use, WebAssembly addresses 4 GB; ` +
          "free() what is no longer needed, or split the collection",
        "bad_alloc",
      );
    scratch.push(address);
    return address;
  }

  #check(argument, status, hint = "") {
    if (status >= SUCCESS) return;
    const [name, sentence] = [this.#exports.nk_wasm_status_name(status), this.#exports.nk_wasm_status_sentence(status)];
    throw new NumKongError(argument, `${this.#text(sentence)}${hint}`, this.#text(name));
  }

  #expect(argument, packed) {
    if (!(packed instanceof Packed))
      throw new NumKongError(argument, `${kind(packed)}, wanted a packed collection; pack or open it first`);
    packed.address(argument);
    if (!packed.belongsTo(this.#exports))
      throw new NumKongError(argument, "it lies in another module's memory; pass its save() to open of this one");
  }

  #header(address) {
    const view = new DataView(this.#exports.memory.buffer, address, HEADER_BYTES);
    const count = (at) => Number(view.getBigUint64(at, true));
    return {
      layout: view.getUint32(HEADER.layout, true),
      dtype: DTYPE_NAMES[view.getUint32(HEADER.dtype, true)],
      documents: count(HEADER.documents),
      tokens: count(HEADER.tokens),
      depth: count(HEADER.depth),
      total: count(HEADER.total),
      offsetsAt: count(HEADER.offsets),
      originalsAt: count(HEADER.originals),
    };
  }

  #wrap(address, header) {
    const starts = new BigUint64Array(this.#exports.memory.buffer, address + header.offsetsAt, header.documents + 1);
    const row = this.#text(this.#exports.nk_wasm_row_name(header.layout));
    return new Packed(this.#exports, address, { ...header, row, offsets: Float64Array.from(starts, Number) });
  }

  #pack({ dtype, depth, documents, tokens, source, starts, normalize }) {
    const layout = this.#exports.nk_wasm_best_row(DTYPES[dtype]);
    const bytes = this.#exports.nk_wasm_pack_size(layout, DTYPES[dtype], documents, tokens, depth);
    this.#check("vectors", bytes);
    const kept = [];
    const address = this.#allocate("vectors", bytes, kept);
    const status = this.#exports.nk_wasm_pack(
      layout,
      DTYPES[dtype],
      source,
      starts,
      documents,
      depth,
      normalize ? 1 : 0,
      address,
    );
    if (status !== SUCCESS) kept.forEach((unused) => this.#exports.nk_wasm_release(unused));
    this.#check("vectors", status);
    return this.#wrap(address, this.#header(address));
  }

  /** A collection of another row, whose bytes lie at `address`, from its vectors. */
  #repack(address, header, length) {
    const { dtype, depth, documents, tokens, offsetsAt, originalsAt } = header;
    const fits =
      dtype !== undefined &&
      offsetsAt + 8 * (documents + 1) <= length &&
      originalsAt + tokens * depth * ELEMENT_BYTES[dtype] <= length;
    if (!fits) throw new NumKongError("bytes", `its header speaks of ${header.total} bytes, ${length} came`);
    const source = address + originalsAt;
    return this.#pack({ dtype, depth, documents, tokens, source, starts: address + offsetsAt, normalize: false });
  }
}

/* ------------------------------------------------------------------------------------------------------ arguments */

const kind = (value) => (value === null ? "null" : (value?.constructor?.name ?? typeof value));

function choice(argument, value, choices) {
  if (Object.hasOwn(choices, value)) return choices[value];
  throw new NumKongError(argument, `${JSON.stringify(value)}, wanted one of ${Object.keys(choices).join(", ")}`);
}

function elementType(parts, dtype) {
  const names = new Set(
    parts.map((part) => {
      const name = kind(part);
      if (name === "Float32Array") return "f32";
      if (name === "Float16Array") return "f16";
      if (name === "Uint16Array") return "bits";
      const fix = name === "Float64Array" ? "Float32Array.from(vectors)" : "new Float32Array(vectors)";
      throw new NumKongError("vectors", `${name}, wanted Float32Array, or Uint16Array with a dtype; write ${fix}`);
    }),
  );
  if (names.size > 1) throw new NumKongError("vectors", "the arrays of a list must have one type");
  const [found] = names.size ? names : [dtype ?? "f32"];
  if (found !== "bits" && (dtype === undefined || dtype === found)) return found;
  if (found === "bits" && (dtype === "bf16" || dtype === "f16")) return dtype;
  const wanted = found === "bits" ? '"bf16" or "f16" for a Uint16Array' : `"${found}" for this array`;
  throw new NumKongError("dtype", `${JSON.stringify(dtype)}, wanted ${wanted}`);
}

function running(lengths) {
  const offsets = [0];
  for (const length of lengths) offsets.push(offsets.at(-1) + length);
  return offsets;
}

function checkedOffsets(offsets, total) {
  const found = Array.from(offsets, Number);
  const falls = found.findIndex((offset, b) => !Number.isInteger(offset) || (b > 0 && offset < found[b - 1]));
  if (falls >= 0)
    throw new NumKongError("offsets", `offsets[${falls}] is ${offsets[falls]}; they are integers that never fall`);
  if (found.length === 0 || found[0] !== 0 || found.at(-1) !== total)
    throw new NumKongError("offsets", `${found[0]} to ${found.at(-1)}, wanted 0 to ${total}, the number of tokens`);
  return found;
}

function checkedRange(argument, range, count) {
  const [begin, end] = range ?? [0, count];
  if (Number.isInteger(begin) && Number.isInteger(end) && 0 <= begin && begin <= end && end <= count)
    return [begin, end];
  throw new NumKongError(argument, `${JSON.stringify(range)}, wanted [begin, end] within [0, ${count}]`);
}

/**
 * Indices of the k best scores: by score, ties by index; then infinitely bad ones, NaN last.
 *
 * @param {ArrayLike<number>} scores
 * @param {number} k
 * @param {boolean} [lowerIsBetter] for "angular"
 * @returns {number[]}
 */
export function topk(scores, k, lowerIsBetter = false) {
  if (!Number.isInteger(k) || k < 0) throw new NumKongError("k", `${k}, wanted how many indices to return`);
  const sign = lowerIsBetter ? 1 : -1;
  const key = (i) => (Number.isNaN(scores[i]) ? Infinity : sign * scores[i]);
  const later = (i) => (Number.isNaN(scores[i]) ? 1 : 0);
  const order = Array.from({ length: scores.length }, (_, i) => i);
  order.sort((i, j) => later(i) - later(j) || (key(i) < key(j) ? -1 : key(i) > key(j) ? 1 : i - j));
  return order.slice(0, k);
}
