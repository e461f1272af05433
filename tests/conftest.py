"""Tiny random models and catalogs, and from-scratch references to compare them with."""

import itertools

import numpy as np
import pandas as pd
import pytest
import torch
import torch.nn.functional as F

from hf_deco import DecoConfig, DecoForSIDRetrieval


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


def build_model(sizes=(5, 4, 6), num_items=30, catalog=None, normalize_over="children", seed=0, **kwargs):
    """A seeded model in eval mode with a catalog of random SIDs, or of the given ones (False: no catalog)."""
    config = DecoConfig(
        text_config=tiny_shape(16),
        decoder_config=tiny_shape(12),
        num_codebooks=len(sizes),
        codebook_size=list(sizes),
        code_embedding_size=6,
        normalize_over=normalize_over,
        **kwargs,
    )
    model = randomise(DecoForSIDRetrieval(config), seed).eval()
    if catalog is not False:
        model.set_catalog(random_codes(sizes, num_items, seed) if catalog is None else torch.as_tensor(catalog))
    return model


class Reference:
    """What a model computes, one history and one prefix at a time: no padding, no cache, no trie."""

    def __init__(self, model):
        self.model = model
        self.sids = sorted(set(map(tuple, model.catalog_codes.tolist())))
        self.depth = model.config.num_codebooks

    def children(self, prefix):
        return sorted({sid[len(prefix)] for sid in self.sids if sid[: len(prefix)] == tuple(prefix)})

    def concept(self, history):
        """Concept `(M, w)` of one unpadded history `(T, K)`."""
        model, fuser, head = self.model, self.model.fuser, self.model.concept_head
        state = model.start_state
        if len(history):
            embedded = torch.cat([table.weight[history[:, k].long()] for k, table in enumerate(fuser.tables)], 1)
            tokens = fuser.down_proj(F.silu(fuser.up_proj(embedded)))
            state = model.backbone(inputs_embeds=tokens[None], use_cache=False).last_hidden_state[0, -1]
        concepts = head.concept_proj(state).reshape(model.config.num_concepts, -1)
        return head.adapter_down_proj(F.silu(head.adapter_up_proj(concepts)))

    def next_log_probs(self, concept, prefix):
        """`{code: log-probability}` of the valid codes after a prefix."""
        decoder = self.model.decoder
        tokens = torch.cat([concept, *(decoder.tables[k].weight[code][None] for k, code in enumerate(prefix))])
        state = decoder.transformer(inputs_embeds=tokens[None], use_cache=False).last_hidden_state[0, -1]
        logits = decoder.heads[len(prefix)].weight @ state
        codes = self.children(prefix)
        if self.model.config.normalize_over == "vocabulary":
            log_probs = logits.log_softmax(0)[codes]
        else:
            log_probs = logits[codes].log_softmax(0)
        return dict(zip(codes, log_probs, strict=True))

    def sid_log_probs(self, concept):
        """`[(sid, log-probability)]` of the whole catalog, best first."""
        scored = {(): torch.zeros(())}
        for _ in range(self.depth):
            scored = {
                (*prefix, code): score + log_prob
                for prefix, score in scored.items()
                for code, log_prob in self.next_log_probs(concept, prefix).items()
            }
        return sorted(scored.items(), key=lambda pair: -pair[1].item())

    def beam_search(self, concept, widths):
        beams = [((), torch.zeros(()))]
        for width in widths:
            candidates = [
                ((*prefix, code), score + log_prob)
                for prefix, score in beams
                for code, log_prob in self.next_log_probs(concept, prefix).items()
            ]
            beams = sorted(candidates, key=lambda pair: -pair[1].item())[:width]
        return beams


@pytest.fixture
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
