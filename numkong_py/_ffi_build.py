"""Build script of the extension `numkong_py._numkong` (cffi, API mode).

The declarations that cffi needs are taken from the C headers, so there is no second list of functions, types, statuses
or dtypes to keep in step; the compiler checks them once more against the same headers.
"""

from __future__ import annotations

import os
import re
import sys
import sysconfig
from pathlib import Path

from cffi import FFI

ROOT = Path(__file__).resolve().parent.parent
HEADERS = ("types.h", "capabilities.h", "packed.h", "maxsim.h", "gradient.h", "backend.h", "xla_ffi.h")


def expand_declaring_macros(text: str) -> str:
    """Expand the function-like macros that declare public functions, once per use; leave all others alone."""
    for name, parameters, body in re.findall(r"^#define (\w+)\(([^)]*)\)((?:.*\\\n)*.*)$", text, re.M):
        if "NK_PUBLIC" not in body:
            continue

        def expand(use: re.Match[str], parameters: str = parameters, body: str = body) -> str:
            expanded = body.replace("\\\n", "\n")
            for parameter, argument in zip(parameters.split(","), use[1].split(",")):
                expanded = re.sub(rf"(?:##)?\b{parameter.strip()}\b(?:##)?", argument.strip(), expanded)
            return expanded

        text = re.sub(rf"^{name}\(([^)]*)\)$", expand, text, flags=re.M)
    return text


def declarations(text: str) -> list[str]:
    """Types, enumerators and public functions of a header, in order, without preprocessor lines."""
    text = re.sub(r"/\*.*?\*/|//[^\n]*", "", text, flags=re.S)
    text = expand_declaring_macros(text)
    text = re.sub(r"^#(?:.*\\\n)*.*$", "", text, flags=re.M)
    found = re.findall(
        r"typedef\s+(?:enum|struct)\s+\w+\s*\{[^{}]*\}\s*\w+;"
        r"|typedef\s[^;{}]+;"
        r"|enum\s*\{[^{}()]*\};"
        r"|NK_PUBLIC\s[^;{}]+;",
        text,
    )
    return [declaration.replace("NK_PUBLIC ", "") for declaration in found]


def relative(pattern: str) -> list[str]:
    return sorted(path.relative_to(ROOT).as_posix() for path in ROOT.glob(pattern))


def compile_flags() -> list[str]:
    """Plain C99 at the floor of the ABI: instruction sets are switched on inside the sources, row by row."""
    if sys.platform == "win32":
        return ["/O2"]
    optimize = [] if "-O" in os.environ.get("CFLAGS", "") else ["-O3"]
    return [*optimize, "-std=c99", "-ffp-contract=off", "-fvisibility=hidden"]


headers = [(ROOT / "include" / "numkong" / name).read_text() for name in HEADERS]

ffibuilder = FFI()
ffibuilder.cdef("\n".join(declaration for header in headers for declaration in declarations(header)))
ffibuilder.set_source(
    "numkong_py._numkong",
    "".join(f"#include <numkong/{name}>\n" for name in HEADERS),
    sources=relative("c/*.c") + relative("c/backends/*.c"),
    depends=relative("include/numkong/*") + relative("c/**/*.inc") + relative("c/**/*.h"),
    include_dirs=["include", "c"],
    extra_compile_args=compile_flags(),
    libraries=[] if sys.platform == "win32" else ["m"],
    py_limited_api=not sysconfig.get_config_var("Py_GIL_DISABLED"),
)
