"""Tiny random models and catalogs, and from-scratch references to compare them with."""

import itertools

import numpy as np
import pandas as pd
import pytest
import torch
import torch.nn.functional as F

from hf_deco import BackboneConfig, BackboneForSIDRetrieval, DecoConfig, DecoForSIDRetrieval


def tiny_shape(hidden_size, num_hidden_layers=2):
    return {
        "model_type": "qwen2",
        "vocab_size": 1,
        "hidden_size": hidden_size,
        "intermediate_size": 2 * hidden_size,
        "num_hidden_layers": num_hidden_layers,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 128,
        "use_cache": False,
    }


def random_codes(sizes, num_items, seed=0):
    """`num_items` random SIDs, all different."""
    generator = torch.Generator().manual_seed(seed)
    every = torch.tensor(list(itertools.product(*map(range, sizes))), dtype=torch.int32)
    return every[torch.randperm(len(every), generator=generator)[:num_items]]


def randomise(model, seed=0, scale=0.3):
    """Weights so large that probabilities differ clearly; biases and norms included."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            noise = torch.randn(parameter.shape, generator=generator) * scale
            parameter.copy_(1 + noise if name.endswith(("norm.weight", "layernorm.weight")) else noise)
    return model


def build_model(
    sizes=(5, 4, 6),
    num_items=30,
    catalog=None,
    kind="deco",
    normalize_over="children",
    seed=0,
    text_config=None,
    **kwargs,
):
    """A seeded model in eval mode with a catalog of random SIDs, or of the given ones (False: no catalog).

    `kind` is `"deco"`, a light decoder behind the backbone, or `"backbone"`, the backbone alone.
    """
    options = {
        "text_config": text_config or tiny_shape(16),
        "num_codebooks": len(sizes),
        "codebook_size": list(sizes),
        "code_embedding_size": 6,
        "normalize_over": normalize_over,
        **kwargs,
    }
    if kind == "deco":
        model = DecoForSIDRetrieval(DecoConfig(**{"decoder_config": tiny_shape(12), **options}))
    else:
        model = BackboneForSIDRetrieval(BackboneConfig(**options))
    randomise(model, seed).eval()
    if catalog is not False:
        model.set_catalog(random_codes(sizes, num_items, seed) if catalog is None else torch.as_tensor(catalog))
    return model


class Reference:
    """What a model computes, one history and one prefix at a time: no padding, no cache, no trie."""

    def __init__(self, model):
        self.model = model
        self.sids = sorted(set(map(tuple, model.catalog_codes.tolist())))
        self.depth = model.config.num_codebooks
        self.flat = model.config.history_format == "flat"

    def children(self, prefix):
        return sorted({sid[len(prefix)] for sid in self.sids if sid[: len(prefix)] == tuple(prefix)})

    def tokens(self, history):
        """What the backbone reads of an unpadded history `(T, K)`."""
        fuser = self.model.fuser
        embedded = [table.weight[history[:, k].long()] for k, table in enumerate(fuser.tables)]
        if self.flat:
            return torch.stack(embedded, 1).flatten(0, 1)
        return fuser.down_proj(F.silu(fuser.up_proj(torch.cat(embedded, 1))))

    def read(self, tokens):
        return self.model.backbone(inputs_embeds=tokens[None], use_cache=False).last_hidden_state[0, -1]

    def state(self, history):
        return self.read(self.tokens(history)) if len(history) else self.model.start_state

    def concept(self, history):
        """Concept `(M, w)` of one unpadded history `(T, K)`."""
        model, head = self.model, self.model.concept_head
        concepts = head.concept_proj(self.state(history)).reshape(model.config.num_concepts, -1)
        return head.adapter_down_proj(F.silu(head.adapter_up_proj(concepts)))

    def known(self, history):
        """What next codes are predicted from: Deco's concept, for a full backbone the history itself."""
        return history if isinstance(self.model, BackboneForSIDRetrieval) else self.concept(history)

    def _prefix_state(self, known, prefix):
        if isinstance(self.model, BackboneForSIDRetrieval):
            if not prefix:
                return self.state(known)
            tables = self.model.fuser.tables if self.flat else self.model.tables
            codes = [tables[k].weight[code][None] for k, code in enumerate(prefix)]
            return self.read(torch.cat([self.tokens(known), *codes]))
        decoder = self.model.decoder
        tokens = torch.cat([known, *(decoder.tables[k].weight[code][None] for k, code in enumerate(prefix))])
        return decoder.transformer(inputs_embeds=tokens[None], use_cache=False).last_hidden_state[0, -1]

    def next_log_probs(self, known, prefix):
        """`{code: log-probability}` of the valid codes after a prefix, by the generator."""
        heads = getattr(self.model, "decoder", self.model).heads
        logits = heads[len(prefix)].weight @ self._prefix_state(known, prefix)
        codes = self.children(prefix)
        if self.model.config.normalize_over == "vocabulary":
            log_probs = logits.log_softmax(0)[codes]
        else:
            log_probs = logits[codes].log_softmax(0)
        return dict(zip(codes, log_probs, strict=True))

    def log_prob(self, known, sid):
        """Log-probability of a SID or prefix, by the generator."""
        return sum((self.next_log_probs(known, sid[:k])[sid[k]] for k in range(len(sid))), torch.zeros(()))

    def sid_log_probs(self, known):
        """`[(sid, log-probability)]` of the whole catalog by the generator, best first."""
        return self.beam_search(known, [len(self.sids)] * self.depth)

    def beam_search(self, known, widths, history=None):
        """Best first, by the generator or, where a history is given, by the mixture with the pointer over it."""
        beams = [((), torch.zeros(()))]
        mix = (lambda _, score: score) if history is None else self.mixer(history)
        for width in widths:
            candidates = [
                ((*prefix, code), score + log_prob)
                for prefix, score in beams
                for code, log_prob in self.next_log_probs(known, prefix).items()
            ]
            beams = sorted(candidates, key=lambda pair: -mix(*pair).item())[:width]
        return [(prefix, mix(prefix, score)) for prefix, score in beams]

    def search(self, history, widths):
        """What `generate` should return."""
        return self.beam_search(self.known(history), widths, history if self.model.config.copy_pointer else None)

    def ranking(self, history):
        """`[(sid, log-probability)]` of the whole catalog, best first."""
        return self.search(history, [len(self.sids)] * self.depth)

    def log_likelihood(self, history, sid):
        """Log-probability of a SID, the pointer included where there is one."""
        log_prob = self.log_prob(self.known(history), sid)
        return self.mixer(history)(sid, log_prob) if self.model.config.copy_pointer else log_prob

    def pointer(self, history):
        """Weights `(T,)` and gate of the pointer, zero where nothing can be copied."""
        pointer, copyable = self.model.pointer, [tuple(sid) in self.sids for sid in history.tolist()]
        if not any(copyable):
            return torch.zeros(len(history)), torch.zeros(())
        query = pointer.query_proj(self.state(history))
        keys = [pointer.key_proj(self.state(history[: t + 1])) for t in range(len(history)) if copyable[t]]
        weights = torch.zeros(len(history))
        weights[torch.tensor(copyable)] = (torch.stack(keys) @ query / len(query) ** 0.5).softmax(0)
        return weights, pointer.gate_proj(self.state(history)).sigmoid()[0]

    def mixer(self, history):
        """Function of a prefix and its log-probability: that of the mixture (Eq. 11)."""
        weights, gate = self.pointer(history)

        def mix(prefix, log_prob):
            matches = [tuple(sid[: len(prefix)]) == tuple(prefix) for sid in history.tolist()]
            return ((1 - gate) * log_prob.exp() + gate * weights[torch.tensor(matches, dtype=torch.bool)].sum()).log()

        return mix


@pytest.fixture(scope="session")
def make_model():
    return build_model


@pytest.fixture
def make_codes():
    return random_codes


@pytest.fixture
def make_reference():
    return Reference


@pytest.fixture
def randomise_weights():
    return randomise


@pytest.fixture
def make_histories():
    """Random histories `(B, T, K)` of catalog items, padded on the left, with their mask."""

    def make(model, lengths, seed=0, width=None):
        generator = torch.Generator().manual_seed(seed)
        width = width or max(max(lengths), 1)
        codes = torch.zeros((len(lengths), width, model.config.num_codebooks), dtype=torch.long)
        mask = torch.zeros((len(lengths), width), dtype=torch.long)
        for user, length in enumerate(lengths):
            if length:
                rows = torch.randint(0, model.config.num_items, (length,), generator=generator)
                codes[user, -length:], mask[user, -length:] = model.catalog_codes[rows].long(), 1
        return codes, mask

    return make


@pytest.fixture
def make_sequences():
    """Training batches `(item_codes, mask, labels)`: every label is the next item, the last one a random item.

    Padding is on the `"left"`, on the `"right"`, or on `"both"` sides.
    """

    def make(model, lengths, seed=0, padding="left"):
        generator = torch.Generator().manual_seed(seed)
        width, depth = max(lengths) + (2 if padding == "both" else 0), model.config.num_codebooks
        codes = torch.zeros((len(lengths), width, depth), dtype=torch.long)
        mask = torch.zeros((len(lengths), width), dtype=torch.long)
        labels = torch.full_like(codes, -100)
        for user, length in enumerate(lengths):
            rows = torch.randint(0, model.config.num_items, (length + 1,), generator=generator)
            start = {"left": width - length, "right": 0, "both": (width - length) // 2}[padding]
            here = slice(start, start + length)
            items = model.catalog_codes[rows].long()
            codes[user, here], labels[user, here], mask[user, here] = items[:-1], items[1:], 1
        return codes, mask, labels

    return make


# A small log that has something to learn: most users walk along a ring of items in equal steps.
NUM_ITEMS, NUM_USERS = 40, 80
STEP = 7  # neighbours in time are not neighbours in content


@pytest.fixture(scope="session")
def log_folder(tmp_path_factory):
    """Folder with `interactions.parquet`, `items.csv` and `item_embeddings.npy`."""
    folder = tmp_path_factory.mktemp("ring")
    random = np.random.default_rng(0)
    users, items, times = [], [], []
    for user in range(NUM_USERS):
        item = int(random.integers(NUM_ITEMS))
        for time in np.sort(random.integers(0, 10_000, size=int(random.integers(6, 14)))):
            users.append(f"u{user}")
            items.append(f"i{item}")
            times.append(1_000_000 + int(time))
            item = (item + STEP) % NUM_ITEMS if random.random() < 0.9 else int(random.integers(NUM_ITEMS))
    pd.DataFrame({"user_id": users, "item_id": items, "timestamp": times}).to_parquet(folder / "interactions.parquet")
    names = [f"i{item}" for item in range(NUM_ITEMS)]
    table = pd.DataFrame({"item_id": names, "title": [f"Item {name}" for name in names], "text": names})
    table.to_csv(folder / "items.csv", index=False)
    angles = 2 * np.pi * np.arange(NUM_ITEMS) / NUM_ITEMS
    waves = [wave(k * angles) for k in (1, 2, 5) for wave in (np.sin, np.cos)]
    np.save(folder / "item_embeddings.npy", np.stack(waves, 1).astype(np.float32))
    return folder


@pytest.fixture(scope="session")
def options(log_folder):
    """Options of a run of seconds on that log."""
    return {
        "interactions": str(log_folder / "interactions.parquet"),
        "items": str(log_folder / "items.csv"),
        "embeddings": str(log_folder / "item_embeddings.npy"),
        "codebook_sizes": [8, 8, 8],
        "backbone": "S",
        "decoder_width": 64,
        "decoder_layers": 1,
        "dropout": 0.0,
        "max_history_length": 6,
        "cutoffs": [10, 20],
        "num_beams": 40,
        "learning_rate": 3e-3,
        "warmup_steps": 4,
        "per_device_train_batch_size": 32,
        "disable_tqdm": True,
        "early_stopping_patience": 0,
    }


# Texts that tell items apart by their words, as the embeddings do by their angles.
COLOURS, THINGS = (
    ("red", "blue", "green", "white", "black"),
    ("soap", "brush", "cream", "lamp", "oil", "comb", "cup", "pen"),
)


@pytest.fixture(scope="session")
def item_texts():
    return [f"{COLOURS[item % 5]} {THINGS[item // 5]}, number {item}" for item in range(NUM_ITEMS)]


@pytest.fixture(scope="session")
def make_language_model():
    """Writes a Qwen2-shaped language model with random weights, and a BPE tokenizer trained on some texts."""

    def make(folder, texts, seed=0, dtype=torch.float32, tie=True, **shape):
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
        from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

        tokenizer, end = Tokenizer(models.BPE()), "<|endoftext|>"
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(
            vocab_size=300, special_tokens=[end], initial_alphabet=alphabet, show_progress=False
        )
        tokenizer.train_from_iterator(texts, trainer)
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=end, pad_token=end)
        tokenizer.save_pretrained(folder)
        torch.manual_seed(seed)
        shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2} | shape
        config = Qwen2Config(
            vocab_size=len(tokenizer), num_key_value_heads=1, tie_word_embeddings=tie, initializer_range=0.1, **shape
        )
        model = Qwen2ForCausalLM._from_config(config, dtype=dtype).eval()
        model.save_pretrained(folder)
        return model

    return make


@pytest.fixture(scope="session")
def llm_options(options, item_texts, make_language_model, tmp_path_factory):
    """Options of a run of seconds on a tiny language model, over the same log with texts that say something."""
    folder = tmp_path_factory.mktemp("llm")
    names = [f"i{item}" for item in range(NUM_ITEMS)]
    pd.DataFrame({"item_id": names, "title": item_texts, "text": item_texts}).to_csv(folder / "items.csv", index=False)
    make_language_model(folder / "language_model", item_texts)
    return {name: value for name, value in options.items() if name != "dropout"} | {
        "items": str(folder / "items.csv"),
        "backbone": str(folder / "language_model"),
        "grounding_backbone": "full",
        "grounding_epochs": 2,
        "grounding_batch_size": 8,
        "lora_rank": 4,
        "lora_alpha": 8.0,
        "num_train_epochs": 2,
        "per_device_train_batch_size": 16,
    }


# A small stream: shoppers who come back to their own four of 24 things; four more things enter in later weeks.
WEEKS = 6


@pytest.fixture(scope="session")
def stream_folder(tmp_path_factory):
    """Folder with `items.csv`, `users.csv`, `events.parquet`, `shown.csv`, `embeddings.npy` and `log.yaml`."""
    folder, random = tmp_path_factory.mktemp("stream"), np.random.default_rng(0)
    enters = np.append(np.zeros(24, dtype=int), [1, 3, 4, 5])
    rows = []
    for week in range(WEEKS):
        for user in range(20):
            for basket in range(2):
                known = np.flatnonzero(enters <= week)
                own = [(user + 6 * step) % 24 for step in range(4)]
                bought = set(random.choice(own, 2, replace=False)) | {random.choice(known[-6:])}
                time = week * 604_800 + int(random.integers(600_000))
                rows += [(f"u{user}", f"i{item}", 1_000_000 + time, f"b{week}-{user}-{basket}") for item in bought]
    events = pd.DataFrame(rows, columns=["user_id", "item_id", "timestamp", "basket"])
    events["discounted"] = random.integers(0, 2, len(events))
    events["price"] = random.uniform(0, 9, len(events)).round(2)
    events["week"] = (events["timestamp"] - 1_000_000) // 604_800
    events.to_parquet(folder / "events.parquet")
    items = pd.DataFrame({"item_id": [f"i{item}" for item in range(29)]})  # the last is never seen
    items["text"] = [f"thing {item}" for item in range(29)]
    items["kind"] = [f"k{item % 3}" if item % 5 else None for item in range(29)]
    items.to_csv(folder / "items.csv", index=False)
    users = pd.DataFrame({"user_id": [f"u{user}" for user in range(0, 20, 2)], "age": ["old", "young"] * 5})
    users.to_csv(folder / "users.csv", index=False)
    shown = [(f"i{item}", week) for week in range(WEEKS) for item in random.choice(24, 10, replace=False)]
    pd.DataFrame(shown, columns=["item_id", "week"]).to_csv(folder / "shown.csv", index=False)
    np.save(folder / "embeddings.npy", random.standard_normal((29, 6)).astype(np.float32))
    (folder / "log.yaml").write_text(
        "items: {path: items.csv, features: {kind: null, item_id: 16}}\n"
        "users: {path: users.csv, features: {age: null}}\n"
        "events: {path: events.parquet, request: basket, weight: price, period: week,\n"
        "         behaviors: {clicks: null, conversions: discounted}}\n"
        "impressions: {path: shown.csv, period: week}\n"
    )
    return folder


@pytest.fixture(scope="session")
def stream_options(stream_folder, tmp_path_factory):
    """Options of a GEAR run of seconds on that stream: 4 steps a week, the first evaluation after the second week."""
    return {
        "log": str(stream_folder / "log.yaml"),
        "embeddings": str(stream_folder / "embeddings.npy"),
        "data_dir": str(tmp_path_factory.mktemp("stream_data")),
        "history_lengths": [6, 4],
        "num_positives": 2,
        "num_negatives": 2,
        "num_popular": 2,
        "codebook_sizes": [6, 4],
        "tower_hidden_size": 12,
        "tower_size": 8,
        "code_size": 8,
        "feature_size": 4,
        "num_heads": 2,
        "head_dim": 4,
        "intermediate_size": 8,
        "seed": 0,
        "ltr_steps": 3,
        "rq_steps": 2,
        "num_beams": [6, 8],
        "cutoffs": [3, 10],
        "per_device_train_batch_size": 10,
        "warmup_steps": 2,
        "learning_rate": 1e-3,
        "tower_rate": 0.1,
        "save_steps": 7,
        "logging_steps": 1,
        "disable_tqdm": True,
    }
