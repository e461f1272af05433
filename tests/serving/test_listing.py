"""Retrieved items as text."""

from hf_deco.serving.listing import format_items


def test_columns_align_and_a_missing_title_leaves_no_blanks():
    items = [
        {"rank": 1, "score": -0.5, "item_id": "B01", "title": "Soap"},
        {"rank": 12, "score": -10.25, "item_id": "B000123", "title": None},
    ]
    assert format_items(items) == "   1    -0.500  B01      Soap\n  12   -10.250  B000123"
    assert format_items([]) == ""
