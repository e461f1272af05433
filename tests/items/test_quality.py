import json

import numpy as np
import pytest

from hf_deco.items import format_report, quality_report

CODEBOOKS = [
    np.array([[0.0], [10.0], [20.0], [30.0]], dtype=np.float32),
    np.array([[-1.0], [1.0]], dtype=np.float32),
]
EMBEDDINGS = np.array([[-1.0], [1.0], [3.0], [11.0], [31.0]], dtype=np.float32)
BEFORE = np.array([[0, 0], [0, 1], [0, 1], [1, 1], [3, 1]])
AFTER = np.array([[0, 0], [0, 1], [1, 0], [1, 1], [3, 1]])
MOVED = [False, False, True, False, False]


def rounded(value):
    if isinstance(value, dict):
        return {key: rounded(item) for key, item in value.items()}
    if isinstance(value, list):
        return [rounded(item) for item in value]
    return round(value, 9)


def test_every_number_of_a_catalog_computed_by_hand():
    report = quality_report(BEFORE, AFTER, EMBEDDINGS, CODEBOOKS, MOVED)
    # Residuals before: level 1 -1 1 3 1 1 (squares sum to 13), level 2 0 0 2 0 0 (4); after, item 2 is 9 for 3 (36).
    # The embeddings' mean is 9, their squared deviations 100 64 36 4 484 sum to 688.
    expected = {
        "num_items": 5,
        "codebook_sizes": [4, 2],
        "utilization_before": 4 / 8,
        "utilization": 5 / 8,
        "collision_rate_before": 2 / 5,
        "collision_rate_after": 0.0,
        "largest_bucket_before": 2,
        "largest_bucket_after": 1,
        "moved_share": 1 / 5,
        "levels": [
            # Shares 2/5, 2/5, 1/5 and 2/5, 3/5; perplexity is the product of share ** -share.
            {"level": 1, "size": 4, "used": 3, "usage": 3 / 4, "perplexity": 0.4**-0.8 * 0.2**-0.2, "prefixes": 3},
            {"level": 2, "size": 2, "used": 2, "usage": 1.0, "perplexity": 0.4**-0.4 * 0.6**-0.6, "prefixes": 5},
        ],
        "reconstruction_mse_before": 4 / 5,
        "reconstruction_mse_after": 36 / 5,
        "explained_variance_before": [1 - 13 / 688, 1 - 4 / 688],
        "forced_share": [0.0, 1 / 5],  # only the item under prefix 3 has no choice of the second code
        "forced_share_overall": 1 / 10,
    }
    assert rounded(report) == rounded(expected)
    assert json.loads(json.dumps(report)) == report


def test_kept_collisions_and_forced_levels():
    codes = np.array([[0, 0], [0, 0], [0, 0], [0, 1]])
    report = quality_report(codes, codes, EMBEDDINGS[:4], CODEBOOKS, np.zeros(4, dtype=bool))
    assert report["collision_rate_before"] == report["collision_rate_after"] == 3 / 4
    assert report["largest_bucket_before"] == 3 and report["utilization"] == 2 / 8 and report["moved_share"] == 0
    assert report["reconstruction_mse_before"] == report["reconstruction_mse_after"]
    assert report["forced_share"] == [1.0, 0.0]  # every ID starts with 0
    assert report["levels"][0]["perplexity"] == 1.0


def test_a_catalog_without_variance_has_nothing_to_explain():
    codes = np.zeros((3, 2), dtype=int)
    report = quality_report(codes, codes, np.ones((3, 1)), CODEBOOKS, np.zeros(3))
    assert report["explained_variance_before"] == [0.0, 0.0]
    json.dumps(report, allow_nan=False)


def test_format_report_is_one_small_table():
    text = format_report(quality_report(BEFORE, AFTER, EMBEDDINGS, CODEBOOKS, MOVED))
    assert text.splitlines() == [
        "5 items, codebook sizes (4, 2)",
        "collisions  40.00% of items before, 0.00% after (largest bucket before 2, 20.00% of items moved)",
        "mse         0.8 before, 7.2 after",
        "IDs in use  0.625 of those possible",
        "level    used    size   usage  perplexity   prefixes  explained  forced",
        "    1       3       4   75.0%         2.9          3      98.1%    0.0%",
        "    2       2       2  100.0%         2.0          5      99.4%   20.0%",
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((BEFORE[:, :1], AFTER, EMBEDDINGS, CODEBOOKS, MOVED), "`codes` must be integers of shape"),
        ((BEFORE, AFTER + 2, EMBEDDINGS, CODEBOOKS, MOVED), "outside `codebook_sizes`"),
        ((BEFORE, AFTER, EMBEDDINGS[:3], CODEBOOKS, MOVED), "`embeddings` has 3 rows for 5 items"),
        ((BEFORE, AFTER[:4], EMBEDDINGS, CODEBOOKS, MOVED), "got 5, 4 and 5 rows"),
        ((BEFORE, AFTER, EMBEDDINGS, CODEBOOKS, MOVED[:2]), "got 5, 5 and 2 rows"),
    ],
)
def test_bad_input(arguments, message):
    with pytest.raises(ValueError, match=message):
        quality_report(*arguments)


def test_purity_is_how_often_company_has_the_same_category():
    codes = np.array([[0, 0], [0, 0], [0, 1], [1, 1], [3, 1]])
    report = quality_report(codes, codes, EMBEDDINGS, CODEBOOKS, np.zeros(5), ["a", "a", "b", "c", "c"])
    # Prefix 0 holds a, a and b: each a has company a and b, b has none of its kind. Prefixes 1 and 3 hold one item.
    assert report["prefix_purity"] == [pytest.approx((1 / 2 + 1 / 2 + 0) / 3), 1.0]
    assert format_report(report).splitlines()[-1].startswith("purity      33.3% 100.0% of the others")
    unknown = quality_report(codes, codes, EMBEDDINGS, CODEBOOKS, np.zeros(5), ["", "a", "b", "", ""])
    assert unknown["prefix_purity"] == [0.0, None]  # items without a category count neither as items nor as company
    assert "purity      0.0% - of" in format_report(unknown)
    nothing = quality_report(codes, codes, EMBEDDINGS, CODEBOOKS, np.zeros(5), [""] * 5)
    assert nothing["prefix_purity"] == [None, None]
