"""Retrieved items as text."""

from __future__ import annotations


def format_items(items: list[dict]) -> str:
    """What the `sid-retrieval` pipeline says of one history, as lines of rank, score, id and title."""
    width = max((len(entry["item_id"]) for entry in items), default=0)
    return "\n".join(
        f"{entry['rank']:>4}  {entry['score']:8.3f}  {entry['item_id']:<{width}}  {entry['title'] or ''}".rstrip()
        for entry in items
    )
