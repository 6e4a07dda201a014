"""The demo's page in Debian's headless Chromium: its own command builds and serves it, keyboard and mouse drive it.

Rankings and scores are compared with NumPy's, to the bit. Screenshots go into the folder that ``NUMKONG_ARTEFACTS``
names, or into a temporary one.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tools
from oracle import ROOT

from numkong_py import demo, reference

pytestmark = pytest.mark.slow

SHOWN = 8


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """The page, served by the documented command."""
    command = [sys.executable, str(ROOT / "docs" / "demo" / "build.py"), "--serve", "--port", "0"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, tools.demo_requirements()))}
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as server:
        printed = []
        for line in server.stdout:
            printed.append(line)
            if found := re.search(r"http://localhost:\d+/", line):
                yield found[0]
                break
        else:
            pytest.fail("".join(printed)[-3000:])
        server.terminate()


@pytest.fixture(scope="module")
def seen(url: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What tests/wasm/browse.mjs saw; its screenshots are checked to be there."""
    folder = Path(os.environ.get("NUMKONG_ARTEFACTS") or tmp_path_factory.mktemp("artefacts"))
    folder.mkdir(parents=True, exist_ok=True)
    program, environment = tools.chromium()
    command = [tools.node(), ROOT / "tests" / "wasm" / "browse.mjs", url, program, folder]
    done = subprocess.run(
        list(map(str, command)),
        cwd=tools.browser_driver(),
        env={**os.environ, **environment},
        check=False,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    for name in ("page.png", "page-token.png", "page-narrow-dark.png"):
        assert (folder / name).stat().st_size > 20_000
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def wanted() -> Any:
    """NumPy's scores of every question against every passage."""
    corpus = demo.load()
    options = {"reduction": "mean", "return_argmax": True, "return_token_scores": True}
    return reference.maxsim(corpus.question_vectors, corpus.vectors, **options)


def test_rankings_and_scores_are_those_of_numpy_to_the_bit(seen: dict[str, Any], wanted: Any) -> None:
    corpus = demo.load()
    assert [shown["question"] for shown in seen["questions"]] == list(corpus.questions)
    for question, shown in enumerate(seen["questions"]):
        assert_is_numpys(shown, question, wanted)
        assert shown["row"] == "v128relaxed"
        assert len(shown["tokens"]) == len(corpus.question_spans[question]) + 1


def assert_is_numpys(shown: dict[str, Any], question: int, wanted: Any) -> None:
    """Ranking, scores, winners and similarities of a question as the page shows them."""
    ranking = np.argsort(-wanted.scores[question], kind="stable")[:SHOWN]
    assert [hit["index"] for hit in shown["passages"]] == ranking.tolist()
    length = len(demo.load().question_vectors[question])
    for hit in shown["passages"]:
        assert float(hit["score"]) == wanted.scores[question, hit["index"]]
        assert hit["argmax"] == wanted.argmax[question, hit["index"], :length].tolist()
        assert [float(value) for value in hit["similarity"]] == (
            wanted.token_scores[question, hit["index"], :length].tolist()
        )
    assert shown["map"] == [length + 1] * SHOWN


def test_the_keyboard_reaches_a_token_and_marks_what_it_met(seen: dict[str, Any], wanted: Any) -> None:
    shown = seen["byKeyboard"]
    assert shown["question"] == "Which country takes its name from silver?"
    assert_is_numpys(shown, 6, wanted)
    assert shown["announced"] == "Marked is what silver met in each passage."
    assert all(len(hit["marked"]) == 1 for hit in shown["passages"])
    first = shown["passages"][0]
    assert demo.load().ids[first["index"]] == "Argentina/name"
    assert first["marked"] == ["silver"]
    assert re.fullmatch(r"silver met silver \(0\.\d\d\)", first["said"])


def test_the_mouse_opens_a_table_and_marks_all_tokens(seen: dict[str, Any]) -> None:
    assert seen["tableIsOpen"]
    marked = seen["byMouse"]["passages"][0]["marked"]
    assert "silver" in marked and len(marked) > 1


def test_time_and_row_are_told(seen: dict[str, Any]) -> None:
    for shown in (*seen["questions"], seen["serial"]):
        assert re.search(r"420 passages, 25,577 tokens, scored in \d+\.\d ms with row \w+", shown["status"])
        assert 0 < shown["milliseconds"] < 60_000


def test_the_serial_row_shows_the_same(seen: dict[str, Any], wanted: Any) -> None:
    assert seen["serial"]["row"] == "serial"
    assert "(the serial row was asked for)" in seen["serial"]["status"]
    assert_is_numpys(seen["serial"], 6, wanted)


def test_no_other_host_and_no_complaint(seen: dict[str, Any]) -> None:
    assert seen["elsewhere"] == []
    assert seen["messages"] == []


def test_accessibility_and_narrow_screens(seen: dict[str, Any]) -> None:
    assert seen["audits"] == {"light": [], "dark": []}
    assert seen["overflow"] <= 0, "the page scrolls sideways at 360 pixels"
    for name in ('combobox "Question"', 'button "silver" [pressed]', 'heading "Ranked passages"', "status:"):
        assert name in seen["names"], seen["names"][:2000]


def test_failures_are_told_with_their_remedy(seen: dict[str, Any]) -> None:
    assert seen["failure"] == "built/passages.nkpack answered 404; run python3 docs/demo/build.py"
    assert re.match("bytes: the buffer was packed by another row .* damaged; pack again", seen["damaged"])
