"""Values of categorical features as the integers that a model embeds, the same in training and behind a checkpoint."""

from collections.abc import Iterable
from dataclasses import dataclass
from hashlib import blake2b

from .features_gear import MISSING

_LARGEST = 2**63 - 1


@dataclass(frozen=True)
class Category:
    """A categorical feature: a closed one has a list of values, an open-ended one a number of hash buckets.

    Args:
        name (`str`): Its name; in tables, that of its column.
        values (`tuple[str, ...]`, *optional*): Values of a closed feature; value `i` is the integer `i`. Others than
            strings are taken as they read.
        buckets (`int`, *optional*): Rows of the table that an open-ended feature is hashed into, by the model.

    Raises:
        ValueError: If it has neither or both, an empty list, or repeated values.
    """

    name: str
    values: tuple[str, ...] | None = None
    buckets: int | None = None

    def __post_init__(self):
        closed, open_ended = self.values is not None, type(self.buckets) is int and self.buckets > 0
        if closed == (self.buckets is not None) or not (closed or open_ended):
            raise ValueError(
                f"feature `{self.name}` needs either `values` or a positive number of `buckets`, got {self.values} and "
                f"{self.buckets}."
            )
        if closed:
            # A list, where a JSON file holds it; as text, which is what `encode` looks for.
            object.__setattr__(self, "values", tuple(map(text_of, self.values)))
            if not self.values or len(set(self.values)) < len(self.values):
                raise ValueError(f"feature `{self.name}` needs distinct `values`, at least one, got {self.values}.")

    def encode(self, values: Iterable) -> list[int]:
        """Integers of values: -1 where one is None, NaN or pandas' NA; in a closed feature the place of the value, and
        `len(self.values)` where it is none of them; in an open-ended one a hash of its text of 63 bits, the same on
        every machine.

        Raises:
            ValueError: If a value is a list, a set, a mapping, or an array with dimensions.
        """
        known = {} if self.values is None else {value: place for place, value in enumerate(self.values)}
        codes = []
        for value in values:
            # First, because arrays have no truth value when they are compared.
            if isinstance(value, list | tuple | dict | set | frozenset) or getattr(value, "ndim", 0):
                raise ValueError(f"feature `{self.name}` has one value an item or user, got {value!r}.")
            if _is_missing(value):
                codes.append(MISSING)
                continue
            text = text_of(value)
            if text not in known:
                if self.values is not None:
                    codes.append(len(self.values))
                    continue
                known[text] = _hash(text)
            codes.append(known[text])
        return codes

    @property
    def entry(self) -> dict:
        """The entry of `item_features` or `user_features` of [`GearConfig`]."""
        if self.values is None:
            return {"name": self.name, "size": self.buckets, "hashed": True}
        return {"name": self.name, "size": len(self.values)}

    def to_dict(self) -> dict:
        """What makes it again, as keyword arguments that JSON holds."""
        given = {"values": self.values} if self.buckets is None else {"buckets": self.buckets}
        return {"name": self.name, **given}


def text_of(value) -> str:
    """A value as it reads; a whole number that a null made a float reads as the integer it is, and a scalar of NumPy or
    PyTorch as Python's."""
    value = value.item() if hasattr(value, "item") else value
    return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)


def _is_missing(value) -> bool:
    # NA by its name, because pandas need not be there; compared even with itself, it has no truth value.
    return value is None or type(value).__name__ == "NAType" or bool(value != value)


def _hash(text: str) -> int:
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little") & _LARGEST
