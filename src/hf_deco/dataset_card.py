"""Dataset cards of SID tables."""

from __future__ import annotations

from pathlib import Path

from huggingface_hub import DatasetCard, DatasetCardData

from .cards import fill_template, save_rendered, without_folders
from .items.sid_table import SIDTable

TAGS = ["semantic-ids", "recommendation", "generative-retrieval"]
_SIZES = ((10**3, "n<1K"), (10**4, "1K<n<10K"), (10**5, "10K<n<100K"), (10**6, "100K<n<1M"), (10**7, "1M<n<10M"))


def write_sid_card(folder: str | Path, **options) -> bool:
    """Write `README.md` into the folder of a SID table; one that somebody wrote or edited stays as it is.

    Args:
        folder (`str` or path): Folder that `SIDTable.save` wrote.
        options: Of [`render_sid_card`].

    Returns:
        `bool`: whether the card was written.
    """
    return save_rendered(Path(folder) / "README.md", render_sid_card(SIDTable.load(folder), **options))


def render_sid_card(
    table: SIDTable,
    *,
    name: str | None = None,
    method: str | None = None,
    embedding_model: str | None = None,
    license: str | None = None,
    location: str = "path/of/this/folder",
) -> str:
    """A dataset card as text. What is not known is left out.

    Args:
        table ([`SIDTable`]): The table.
        name (`str`, *optional*): What the items are of, such as the name of a log.
        method (`str`, *optional*): How codes were learned.
        embedding_model (`str`, *optional*): What the item texts were embedded with.
        license (`str`, *optional*): Licence of the table, as the Hub names it.
        location (`str`, *optional*): What the example loads.
    """
    title = f"Semantic IDs of {name}" if name else "Semantic IDs"
    sizes = [label for limit, label in _SIZES if len(table) < limit]
    data = DatasetCardData(
        license=license,
        pretty_name=title,
        size_categories=sizes[:1] or ["n>10M"],
        tags=TAGS,
        configs=[{"config_name": "default", "data_files": "items.parquet"}],
    )
    facts = {"title": title, "method": method, "table": table, "report": table.report, "licence": license}
    facts |= {"embedding_model": without_folders(embedding_model), "location": location, "num_items": len(table)}
    return fill_template(DatasetCard, data, "sid_card.md", facts)
