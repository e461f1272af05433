"""Tiny GEAR models and batches, and what such a model computes: one user and one prefix at a time."""

import torch
import torch.nn.functional as F

from hf_deco import GearConfig, GearForSIDRetrieval

SIZES = (4, 3, 5)
CONFIG = {
    "content_size": 5,
    "item_features": [{"name": "brand", "size": 7, "hashed": True}, {"name": "department", "size": 3}],
    "user_features": [
        {"name": "age", "size": 4},
        {"name": "income", "size": 3},
        {"name": "town", "size": 6, "hashed": True},
    ],
    "behaviors": [{"name": "clicks", "length": 5}, {"name": "conversions", "length": 3}],
    "feature_size": 3,
    "tower_hidden_size": 10,
    "tower_size": 6,
    "codebook_size": list(SIZES),
    "code_size": 8,
    "feature_groups": [[2, 0], [1]],
    "num_attention_heads": 2,
    "head_dim": 4,
    "intermediate_size": 9,
}


def make_gear(seed=0, scale=0.4, **options):
    """A model in eval mode whose outputs differ clearly, with a quantiser that fits its items."""
    torch.manual_seed(seed)
    model = GearForSIDRetrieval(GearConfig(**{**CONFIG, **options})).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            if not name.startswith("quantizer."):
                noise = torch.randn(parameter.shape, generator=generator) * scale
                parameter.copy_(1 + noise if name.endswith("norm.weight") else noise)
        for module in model.modules():
            if isinstance(module, torch.nn.Embedding) and module.padding_idx is not None:
                module.weight[module.padding_idx] = 0
    items = make_items(seed + 1, 60, model.config.content_size)
    model.init_quantizer(*items)
    return model


def make_items(seed, number, width=5):
    """Content embeddings and categorical features of random items; some are missing."""
    generator = torch.Generator().manual_seed(seed)
    content = torch.randn(number, width, generator=generator)
    brands = torch.randint(-1, 10**12, (number,), generator=generator)
    return content, torch.stack([brands, torch.randint(-1, 3, (number,), generator=generator)], 1)


def make_batch(seed=0, num_items=12):
    """Four requests: one of a user who has done nothing, one of a user without features, one of neither."""
    content, item_ids = make_items(seed + 5, num_items)
    return {
        "content": content,
        "item_ids": item_ids,
        "user_ids": torch.tensor([[0, 2, 90], [3, 0, 7], [-1, -1, -1], [-1, -1, -1]]),
        "behaviors": [
            torch.tensor([[1, 4, 4, 9, 0], [-1, -1, -1, -1, -1], [-1, -1, 3, 2, 11], [-1, -1, -1, -1, -1]]),
            torch.tensor([[4, -1], [-1, -1], [-1, 2], [-1, -1]]),
        ],
        "candidates": torch.tensor([[5, 6, 7], [8, 9, -1], [10, 0, 6], [5, -1, -1]]),
        "labels": torch.tensor([[0.0, 2.0, 1.0], [1.0, 0.0, 9.0], [0.0, 0.0, 3.0], [1.0, 0.0, 0.0]]),
        "impressed": torch.tensor(
            [[True, True, False], [True, False, True], [False, False, True], [True, False, False]]
        ),
        "weights": torch.tensor([[3.0, 100.0, 5.0], [0.5, 1.0, 1.0], [1.0, 1.0, 20.0], [2.0, 1.0, 1.0]]),
    }


def users_of(batch):
    """The part of a batch that says who asks."""
    return {name: batch[name] for name in ("content", "item_ids", "user_ids", "behaviors")}


def rms_norm(x, weight):
    return x / (x.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * weight


def attend(query, keys, values, num_heads):
    """One query `(w,)` over keys and values `(T, w)`, head by head."""
    heads = []
    for q, k, v in zip(query.chunk(num_heads), keys.chunk(num_heads, 1), values.chunk(num_heads, 1), strict=True):
        heads.append(((k @ q) / len(q) ** 0.5).softmax(0) @ v)
    return torch.cat(heads)


class Reference:
    """The forward pass written out: no batch, no padding, no cache."""

    def __init__(self, model):
        self.model, self.config = model, model.config

    def category(self, tables, features, column, value):
        """Embedding of one value: zeros where it is missing or was never seen."""
        weight, feature = tables[column].weight, features[column]
        if value < 0 or (value >= feature["size"] and not feature.get("hashed")):
            return torch.zeros(weight.shape[1])
        return weight[1 + (hash_in_python(value, column, feature["size"]) if feature.get("hashed") else value)]

    def item(self, batch, row):
        tables, features = self.model.item_features.categories.tables, self.config.item_features
        values = batch["item_ids"][row].tolist()
        parts = [self.category(tables, features, column, value) for column, value in enumerate(values)]
        return torch.cat([batch["content"][row], *parts])

    def user(self, batch, user):
        tables, features = self.model.user_features.tables, self.config.user_features
        values = batch["user_ids"][user].tolist()
        return [self.category(tables, features, column, value) for column, value in enumerate(values)]

    def history(self, batch, user, kind):
        return [row for row in batch["behaviors"][kind][user].tolist() if row >= 0]

    def item_tower(self, features):
        tower = self.model.item_tower
        hidden = tower.down_proj(F.silu(tower.up_proj(features)))
        hidden = hidden / hidden.norm()
        return hidden, tower.out_proj(torch.cat([hidden * len(hidden) ** 0.5, F.silu(tower.wide_proj(features))]))

    def user_tower(self, batch, user):
        tower, parts = self.model.user_tower, self.user(batch, user)
        for kind in range(len(self.config.behaviors)):
            items = [self.item(batch, row) for row in self.history(batch, user, kind)]
            parts.append(torch.stack(items).mean(0) if items else torch.zeros(self.config.item_feature_width))
        return tower.out_proj(F.silu(tower.down_proj(F.silu(tower.up_proj(torch.cat(parts))))))

    def memory(self, batch, user):
        """Tokens `(T, w)` of one user, without padding."""
        encoder, embedded = self.model.memory_encoder, self.user(batch, user)
        tokens = [encoder.start_token]
        for projection, group in zip(encoder.group_projs, self.config.feature_groups, strict=True):
            tokens.append(projection(torch.cat([embedded[column] for column in group])))
        for kind in range(len(self.config.behaviors)):
            rows = self.history(batch, user, kind)
            for place, row in enumerate(reversed(rows)):
                token = encoder.behavior_projs[kind](self.item(batch, row)) + encoder.places[kind].weight[place]
                tokens.insert(len(tokens) - place, token)
        return rms_norm(torch.stack(tokens), encoder.norm.weight)

    def state(self, memory, codes):
        """Decoder state behind a prefix; every token is read anew, layer by layer (Eq. 7)."""
        decoder, heads = self.model.decoder, self.config.num_attention_heads
        tokens = [decoder.start_token, *(decoder.tables[k].weight[code] for k, code in enumerate(codes))]
        for layer in decoder.layers:
            cross, own = layer.cross_attention, layer.self_attention
            for position, x in enumerate(tokens):
                x = x + cross.o_proj(attend(cross.q_proj(rms_norm(x, cross.norm.weight)), memory, memory, heads))
                tokens[position] = x + self.gated(layer.cross_ffn, x)
            queries, keys, values = own.qkv_proj(rms_norm(torch.stack(tokens), own.norm.weight)).chunk(3, 1)
            for position, x in enumerate(list(tokens)):
                seen = slice(0, position + 1)
                x = x + own.o_proj(attend(queries[position], keys[seen], values[seen], heads))
                tokens[position] = x + self.gated(layer.self_ffn, x)
        return tokens[-1]

    def gated(self, ffn, x):
        x = rms_norm(x, ffn.norm.weight)
        return ffn.down_proj(F.silu(ffn.gate_proj(x)) * ffn.up_proj(x))

    def rerank_vector(self, memory, codes):
        head = self.model.decoder.rerank_head
        return head.down_proj(F.silu(head.up_proj(self.state(memory, codes))))

    def next_log_probs(self, memory, prefix):
        return (self.model.decoder.heads[len(prefix)].weight @ self.state(memory, prefix)).log_softmax(0)

    def log_prob(self, memory, codes):
        return sum(self.next_log_probs(memory, codes[:level])[code] for level, code in enumerate(codes))

    def search(self, memory, sids, widths, over="vocabulary"):
        """Beam search over a set of SIDs: `[(SID, log-probability)]`, best first."""
        beams = [((), 0.0)]
        for level, width in enumerate(widths):
            candidates = []
            for prefix, score in beams:
                codes = sorted({sid[level] for sid in sids if sid[:level] == prefix})
                log_probs = self.next_log_probs(memory, prefix)[codes]
                if over == "children":
                    log_probs = log_probs.log_softmax(0)
                candidates += [
                    ((*prefix, code), score + value) for code, value in zip(codes, log_probs.tolist(), strict=True)
                ]
            beams = sorted(candidates, key=lambda pair: -pair[1])[:width]
        return beams


def hash_in_python(value, feature, size):
    """The hash of categorical values, in whole numbers."""

    def signed(number):
        return (number + 2**63) % 2**64 - 2**63

    mixed = signed((value + feature + 1) * -7046029254386353131)
    mixed = signed((mixed ^ (mixed >> 32)) * -4658895280553007687)
    return (mixed ^ (mixed >> 29)) % size
