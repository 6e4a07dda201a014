// prologue.mjs: what the scripts of test_wasm_row.py have: the JavaScript face, and a loader of the modules in a folder.
import { readFileSync } from "node:fs";
import * as face from "../../docs/demo/numkong.mjs";

export { face, readFileSync };

/** `load` of the face, for the modules in a folder. */
export const starter = (folder) => {
  const [relaxed, plain] = ["numkong-relaxed.wasm", "numkong.wasm"].map((name) => readFileSync(`${folder}/${name}`));
  return (options = {}) => face.load({ relaxed, plain, ...options });
};

/** The message of what a function throws. */
export const thrown = async (call) => {
  try {
    await call();
    return "no error";
  } catch (error) {
    return `${error.name} ${error.message}`;
  }
};
