"""Builds the demo that runs in a browser, and serves it: ``python3 docs/demo/build.py --serve``.

Into ``docs/demo/built/``: the two WebAssembly modules, the packed passages and questions of ``numkong-py demo``, and
their texts. What it needs (NumPy, the compiler of ``ziglang``, and ``wasmtime`` to pack with the very module that the
browser loads) it installs into an environment of its own, ``docs/demo/.venv``, unless the running Python has it.
"""

from __future__ import annotations

import argparse
import functools
import http.server
import importlib.util
import json
import os
import subprocess
import sys
import venv
from pathlib import Path
from types import ModuleType

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
REQUIREMENTS = {"numpy": "numpy", "ziglang": "ziglang==0.17.1", "wasmtime": "wasmtime==50.0.1"}


def demo_corpus() -> ModuleType:
    """``numkong_py/demo/corpus.py`` alone: the package around it needs its native extension."""
    spec = importlib.util.spec_from_file_location("demo_corpus", ROOT / "numkong_py" / "demo" / "corpus.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def build_data(folder: Path) -> None:
    """Pack the demo's passages and questions with the module in `folder`, and write their texts beside."""
    import numpy as np
    from wasm_host import Module

    corpus = demo_corpus().load()
    module = Module(folder / "numkong-relaxed.wasm")
    for name, sets in (("passages", corpus.vectors), ("questions", corpus.question_vectors)):
        packed = module.pack(np.concatenate(sets), np.cumsum([0, *map(len, sets)]), "f32")
        (folder / f"{name}.nkpack").write_bytes(module.read(packed.address, packed.nbytes))
    if max(map(ord, "".join(corpus.passages + corpus.questions))) > 0xFFFF:
        raise SystemExit("a text has characters of two UTF-16 units: spans count code points, JavaScript does not")
    passages = zip(corpus.ids, corpus.passages, corpus.spans)
    questions = zip(corpus.questions, corpus.question_spans, corpus.answers)
    texts = {
        "passages": [{"id": name, "text": text, "spans": spans} for name, text, spans in passages],
        "questions": [{"text": text, "spans": spans, "answers": answers} for text, spans, answers in questions],
    }
    (folder / "texts.json").write_text(json.dumps(texts, ensure_ascii=False, separators=(",", ":")), encoding="utf-8")


def build(folder: Path) -> None:
    """Build everything that the page loads."""
    from wasm_build import build_modules

    folder.mkdir(parents=True, exist_ok=True)
    print("compiling two WebAssembly modules (the first time also their C library: about a minute)", flush=True)
    build_modules(folder, [sys.executable, "-m", "ziglang", "cc"])
    print("packing the passages", flush=True)
    build_data(folder)
    for file in sorted(folder.iterdir()):
        print(f"{file.stat().st_size:>10} bytes  {os.path.relpath(file)}")


class Handler(http.server.SimpleHTTPRequestHandler):
    """Files with the types that modules and WebAssembly need, whatever the machine's own table says."""

    extensions_map = {  # noqa: RUF012 (the base class' own form)
        **http.server.SimpleHTTPRequestHandler.extensions_map,
        ".mjs": "text/javascript",
        ".wasm": "application/wasm",
    }

    def end_headers(self) -> None:
        self.send_header("Cache-Control", "no-cache")
        super().end_headers()

    def log_message(self, format: str, *arguments: object) -> None:
        """Say nothing."""


def server(port: int) -> http.server.ThreadingHTTPServer:
    """A server of this folder, for this machine only."""
    return http.server.ThreadingHTTPServer(("127.0.0.1", port), functools.partial(Handler, directory=str(HERE)))


def missing() -> list[str]:
    """Requirements that the running Python lacks."""
    return [need for name, need in REQUIREMENTS.items() if importlib.util.find_spec(name) is None]


def run_in_own_environment() -> int:
    """Install what is needed beside this file, and run this file again there."""
    folder = HERE / ".venv"
    python = folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    if Path(sys.prefix).resolve() == folder:
        raise SystemExit(f"{folder} lacks {', '.join(missing())}: remove the folder and run this again")
    if not python.exists():
        venv.create(folder, with_pip=True)
    print(f"installing {', '.join(REQUIREMENTS.values())} into {os.path.relpath(folder)}", flush=True)
    subprocess.run([python, "-m", "pip", "install", "--quiet", *REQUIREMENTS.values()], check=True)
    return subprocess.run([python, __file__, *sys.argv[1:]], check=False).returncode


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--serve", action="store_true", help="serve the page afterwards, for this machine only")
    parser.add_argument("--port", type=int, default=8000, help="port to serve at (default 8000)")
    arguments = parser.parse_args()
    if missing():
        return run_in_own_environment()
    build(HERE / "built")
    if not arguments.serve:
        return 0
    with server(arguments.port) as serving:
        print(f"open http://localhost:{serving.server_port}/ (stop with Ctrl-C)", flush=True)
        try:
            serving.serve_forever()
        except KeyboardInterrupt:
            return 0
    return 0


if __name__ == "__main__":
    sys.exit(main())
