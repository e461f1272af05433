"""Item ids in, ranked items out: the pipeline of transformers for models that retrieve by semantic IDs."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import Pipeline

from .filters_sid import is_list
from .generation_config_sid import DEFAULT_NUM_BEAMS, SIDGenerationConfig
from .processing_deco import check_pair

TASK = "sid-retrieval"
_BATCH_SIZE = 32


def custom_pipelines() -> dict[str, dict]:
    """What a `config.json` says of the pipeline, for environments that have the checkpoint's code alone."""
    return {TASK: {"impl": "pipeline_sid.SIDRetrievalPipeline", "pt": ["AutoModel"]}}


@dataclass
class Request:
    """One user: a history, and what may or may not be returned to this user alone."""

    history: list
    allow_items: list | None = None
    deny_items: list | None = None


class SIDRetrievalPipeline(Pipeline):
    """Retrieves the next items of users: `pipeline("sid-retrieval", model="org/deco-beauty")`.

    Takes a list of item ids, oldest first, or a list of such lists, and answers each history with a ranked list of
    dictionaries: `rank` from 1 on, `item_id`, `score` (log-probability of the item's SID; with a reranking head, of the
    item) and `title` (None where the catalog has no titles). An empty history is answered with what users begin with. A
    generator or a dataset of histories is answered one by one, as an iterator; `batch_size` (32 by default) are
    searched at once.

    Args:
        top_k (`int`, *optional*): Items per history; by default what the checkpoint's generation configuration says, or
            10. Fewer come back where fewer are left.
        num_beams (`int` or `list[int]`, *optional*): Beam width; by default that of the checkpoint, or 100. A single
            width is never narrower than `top_k`.
        exclude_seen (`bool`, *optional*): Leave out the items of the history, of which `max_history_length` are read
            but all count here. By default what the checkpoint says, or False.
        allow_items, deny_items (`list[str]` or `list[list[str]]`, *optional*): Ids that alone may come, or that may
            not: for all histories, or one list for each.
        unknown_items (`str`, *optional*): What becomes of ids that are not known, `"error"` or `"drop"`, in histories
            and lists; the processor's own by default.
        generation_config ([`SIDGenerationConfig`], *optional*): Options in place of the checkpoint's.

    All filters work inside the search: a beam that is wide enough without them is wide enough with them. Options can
    be given to `pipeline` for all calls, and to a call.
    """

    _load_processor = True
    _load_tokenizer = False
    _load_feature_extractor = False
    _load_image_processor = False
    _load_video_processor = False

    def __init__(self, model, processor=None, **kwargs):
        if processor is None:
            raise ValueError(
                "`processor` is missing: give a checkpoint's name or path as `model`, or `processor=` beside a model."
            )
        check_pair(model, processor)
        if getattr(model.config, "custom_pipelines", None):  # transformers left a class in it, which is no JSON
            model.config.custom_pipelines = custom_pipelines()
        super().__init__(model=model.eval(), processor=processor, **kwargs)

    def __call__(self, inputs, *, allow_items=None, deny_items=None, batch_size=None, **kwargs):
        """Answer one history, many, or a stream of them; see the class.

        Raises:
            ValueError: If an id is not known, a list of lists is not of the histories, or an option cannot be meant.
        """
        batch_size = self._batch_size if batch_size is None else batch_size
        batch_size = _BATCH_SIZE if batch_size is None else _count("batch_size", batch_size)
        alone = isinstance(inputs, list | tuple) and not any(is_list(history) for history in inputs)
        if isinstance(inputs, list | tuple):
            inputs = [Request(history) for history in ([inputs] if alone else inputs)]
        for name, items in (("allow_items", allow_items), ("deny_items", deny_items)):
            if not is_list(items) or not any(is_list(entry) for entry in items):
                kwargs[name] = items
            elif not isinstance(inputs, list) or len(items) != len(inputs):
                given = f"{len(inputs)} histories" if isinstance(inputs, list) else "a stream of histories"
                raise ValueError(
                    f"`{name}` holds a list for each of {len(items)} histories, but there are {given}: give one for "
                    "each, or a flat list for all."
                )
            else:
                for request, own in zip(inputs, items, strict=True):
                    setattr(request, name, own)
        kwargs = {name: value for name, value in kwargs.items() if value is not None}
        answers = super().__call__(inputs, batch_size=batch_size, **kwargs)
        return answers[0] if alone else answers

    def _sanitize_parameters(
        self,
        top_k: int | None = None,
        num_beams: int | list[int] | None = None,
        exclude_seen: bool | None = None,
        allow_items: list | None = None,
        deny_items: list | None = None,
        unknown_items: str | None = None,
        generation_config: SIDGenerationConfig | None = None,
        **unknown,
    ):
        if unknown:
            raise ValueError(
                f"Unknown arguments {sorted(unknown)}; `{TASK}` takes `top_k`, `num_beams`, `exclude_seen`, "
                "`allow_items`, `deny_items`, `unknown_items`, `generation_config` and `batch_size`."
            )
        if top_k is not None:
            _count("top_k", top_k)
        unknown_items = unknown_items or getattr(self, "_preprocess_params", {}).get("unknown_items")
        preprocess = {"unknown_items": unknown_items}
        forward = {
            "top_k": top_k,
            "num_beams": num_beams,
            "exclude_seen": exclude_seen,
            "generation_config": generation_config,
        }
        for name, items in (("allow_rows", allow_items), ("deny_rows", deny_items)):
            if items is not None:
                forward[name] = self.model.item_set(self._catalog_rows(items, unknown_items))
        given = ({name: value for name, value in part.items() if value is not None} for part in (preprocess, forward))
        return *given, {}

    def _catalog_rows(self, items: list, unknown_items: str | None) -> list[int]:
        """Rows of ids in the model's catalog; known items outside it are never retrieved."""
        if not is_list(items):
            raise ValueError(f"`allow_items` and `deny_items` must be lists of item ids, got {items!r}.")
        return [row for row in self.processor.rows_of(items, unknown_items) if row < self.processor.num_items]

    def get_iterator(
        self, inputs: Iterable, num_workers: int, batch_size: int, preprocess_params, forward_params, postprocess_params
    ) -> Iterator[list[dict]]:
        """Answers one by one, searched for in batches: the processor pads, so no worker or collator is needed."""
        sized = hasattr(inputs, "__len__") and hasattr(inputs, "__getitem__")
        stream = (inputs[index] for index in range(len(inputs))) if sized else iter(inputs)
        while batch := list(islice(stream, batch_size)):
            outputs = self.forward(self.preprocess(batch, **preprocess_params), **forward_params)
            yield from self.postprocess(outputs, **postprocess_params)

    def preprocess(self, input_: list, unknown_items: str | None = None) -> dict[str, torch.Tensor]:
        """Model inputs of a batch of histories, and the rows of what they have seen and of their own lists, `(B, L)`
        each."""
        requests = [entry if isinstance(entry, Request) else Request(entry) for entry in input_]
        for request in requests:
            if not is_list(request.history):
                raise ValueError(
                    "A history must be a list of item ids: give one such list, or a list with one for each user; got "
                    f"{request.history!r}."
                )
        rows = [self.processor.rows_of(request.history, unknown_items) for request in requests]
        found = dict(self.processor(item_rows=rows))
        found["seen_rows"] = _pad([[row for row in seen if row < self.processor.num_items] for seen in rows])
        for name in ("allow", "deny"):
            own = [getattr(request, f"{name}_items") for request in requests]
            if any(items is not None for items in own):
                found[f"own_{name}_rows"] = _pad([self._catalog_rows(items, unknown_items) for items in own])
        return found

    def _forward(
        self,
        input_tensors: dict[str, torch.Tensor],
        top_k: int | None = None,
        num_beams: int | list[int] | None = None,
        exclude_seen: bool | None = None,
        allow_rows=None,
        deny_rows=None,
        generation_config: SIDGenerationConfig | None = None,
    ) -> dict[str, torch.Tensor]:
        options = self.model._prepare_generation_config(
            generation_config, num_beams=num_beams, num_return_sequences=top_k, exclude_seen=exclude_seen
        )
        if top_k is not None and not isinstance(options.num_beams, list):
            options.num_beams = max(options.num_beams or DEFAULT_NUM_BEAMS, top_k)
        own = {name: input_tensors.pop(f"own_{name}_rows", None) for name in ("allow", "deny")}
        seen = input_tensors.pop("seen_rows")
        # By id, where `generate` would go by SID: of items that share one, those that were not seen may come.
        denied = [deny_rows, own["deny"], seen if options.exclude_seen else None]
        output = self.model.generate(
            **input_tensors,
            allow_rows=allow_rows if own["allow"] is None else own["allow"],
            deny_rows=[rows if rows is deny_rows else self.model.item_set(rows) for rows in denied if rows is not None],
            generation_config=options,
            exclude_seen=False,
            return_dict_in_generate=True,
        )
        users = input_tensors["item_codes"].shape[0]
        return {"rows": output.item_rows.view(users, -1), "scores": output.sequences_scores.view(users, -1)}

    def postprocess(self, model_outputs: dict[str, torch.Tensor]) -> list[list[dict]]:
        """The ranked items of every user of a batch."""
        ids, titles = self.processor.item_ids, self.processor.titles
        answers = []
        for rows, scores in zip(model_outputs["rows"].tolist(), model_outputs["scores"].tolist(), strict=True):
            found = [(row, score) for row, score in zip(rows, scores, strict=True) if row >= 0]
            answers.append(
                [
                    {
                        "rank": rank,
                        "item_id": ids[row],
                        "score": score,
                        "title": None if titles is None else titles[row],
                    }
                    for rank, (row, score) in enumerate(found, 1)
                ]
            )
        return answers

    def save_pretrained(self, save_directory, **kwargs):
        """Save model and processor: the checkpoint that `pipeline` opens again."""
        self.model.save_pretrained(save_directory, **kwargs)
        self.processor.save_pretrained(save_directory, **kwargs)


def _count(name: str, value: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"`{name}` must be an integer of at least 1, got {value!r}.")
    return value


def _pad(rows: list[list[int]]) -> torch.LongTensor:
    """Rows of every user, `(B, L)`, -1 behind."""
    return pad_sequence([torch.tensor(own, dtype=torch.long) for own in rows], batch_first=True, padding_value=-1)


__all__ = ["SIDRetrievalPipeline"]
