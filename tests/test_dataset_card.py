"""Dataset cards of SID tables."""

import datasets
import numpy as np
import pytest
from huggingface_hub import DatasetCard

from hf_deco.dataset_card import render_sid_card, write_sid_card
from hf_deco.items.sid_table import SIDTable


@pytest.fixture
def sids():
    points = np.random.default_rng(0).normal(size=(60, 8)).astype(np.float32)
    points[30:40] = points[20:30]  # items that share an ID at first
    titles = [f"Title {row}" for row in range(60)]
    return SIDTable.build([f"i{row}" for row in range(60)], points, (8, 8, 8), titles=titles, seed=7)


def test_it_says_what_the_table_holds(sids, tmp_path):
    sids.save(tmp_path / "sids")
    about = {"name": "toys", "method": "residual k-means", "embedding_model": "/home/me/minilm", "license": "mit"}
    assert write_sid_card(tmp_path / "sids", **about)
    card = DatasetCard.load(tmp_path / "sids/README.md")
    assert (card.data.pretty_name, card.data.license) == ("Semantic IDs of toys", "mit")
    assert card.data.size_categories == ["n<1K"] and "semantic-ids" in card.data.tags
    text, report = card.text, sids.report
    assert (
        "A table of 60 items" in text and "a tuple of 3 codes per item, from coarse to fine, with 8, 8, 8 codes" in text
    )
    assert "by residual k-means" in text and "by `minilm`" in text and "- Seed: 7." in text and "/home" not in text
    assert report["collision_rate_before"] > 0
    assert f"{report['collision_rate_before']:.2%} before collisions were resolved, 0.00% after" in text
    rows = [line.split("|")[1:-1] for line in text.splitlines() if line.startswith("| ") and line[2].isdigit()]
    assert [[cell.strip() for cell in row[:5]] for row in rows] == [
        [str(entry["level"]), "8", str(entry["used"]), f"{entry['perplexity']:,.1f}", str(entry["prefixes"])]
        for entry in report["levels"]
    ]


def test_its_code_loads_the_table_and_datasets_reads_the_items(sids, tmp_path):
    sids.save(tmp_path / "sids")
    write_sid_card(tmp_path / "sids")
    text = (tmp_path / "sids/README.md").read_text()
    names = {}
    exec(text.split("```python\n")[1].split("```")[0].replace("path/of/this/folder", str(tmp_path / "sids")), names)
    assert np.array_equal(names["table"].codes, sids.codes)
    items = datasets.load_dataset(str(tmp_path / "sids"), split="train", cache_dir=str(tmp_path / "cache"))
    assert items["item_id"][:2] == ["i0", "i1"] and items["title"][59] == "Title 59"


def test_an_edited_card_stays_and_another_is_renewed(sids, tmp_path):
    sids.save(tmp_path / "sids")
    path = tmp_path / "sids/README.md"
    assert write_sid_card(tmp_path / "sids") and write_sid_card(tmp_path / "sids", name="toys")
    assert "# Semantic IDs of toys" in path.read_text()
    path.write_text(path.read_text() + "\nOurs.\n")
    assert not write_sid_card(tmp_path / "sids")
    assert path.read_text().endswith("Ours.\n")


def test_a_table_from_elsewhere_has_no_quality_and_no_origin():
    table = SIDTable(["a", "b"], np.array([[0, 1], [1, 0]]), (2, 2))
    text = render_sid_card(table)
    assert "\n# Semantic IDs\n" in text and "- Titles: none." in text
    assert not any(
        word in text for word in ("Quality", "Seed", "Codes: by", "Embeddings", "centroids", "Licence", "None")
    )
