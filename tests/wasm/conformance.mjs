// conformance.mjs: cases that test_wasm_row.py wrote, through the JavaScript face, in Node; prints what came as JSON.
//
//   node conformance.mjs MODULES CASES
import { readFileSync, starter } from "./prologue.mjs";

const [modules, file] = process.argv.slice(2);
const start = starter(modules);

const decode = (text) => {
  const bytes = Uint8Array.from(Buffer.from(text, "base64"));
  return bytes.buffer;
};
const encode = (array) => Buffer.from(array.buffer, array.byteOffset, array.byteLength).toString("base64");

const cases = JSON.parse(readFileSync(file, "utf8"));
const runs = [];
for (const row of ["v128relaxed", "serial"]) {
  const nk = await start({ row });
  const results = cases.map(({ dtype, depth, metric, reduction, queries, documents }) => {
    const [left, right] = [queries, documents].map(({ tokens, offsets }) => {
      const vectors = dtype === "f32" ? new Float32Array(decode(tokens)) : new Uint16Array(decode(tokens));
      return nk.pack(vectors, { depth, offsets, dtype });
    });
    const result = nk.maxsim(left, right, { metric, reduction, argmax: true, tokenScores: true, bounds: true });
    left.free();
    const again = nk.open(right.save());
    right.free();
    again.free();
    const { scores, argmax, tokenScores, bounds } = result;
    return [scores, argmax, tokenScores, bounds].map(encode);
  });
  runs.push({ row: nk.row, reason: nk.reason, results });
}
console.log(JSON.stringify({ node: process.versions.node, runs }));
