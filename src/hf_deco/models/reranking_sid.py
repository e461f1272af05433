"""Items that share a semantic ID, told apart: by what a user wants of the SID, and by what the items are."""

import torch
import torch.nn.functional as F
from torch import nn

from .configuration_deco import DecoConfig
from .feed_forward_sid import FeedForward
from .losses_gear import lambda_loss
from .scoring_sid import segment_log_softmax
from .trie import SIDTrie, spread_ranges


class ItemReranker(nn.Module):
    """Scores the items of a SID, `u . v_i`, for a user.

    `u` is made of the decoder's state behind the whole SID, by the head that GEAR has there; `v_i` is a projection of
    the item's content, the one place in the model where items of one SID differ.

    *Choice*: the softmax of these scores over all items of a SID is `p(item | SID)`, so that `p(item) = p(SID)
    p(item | SID)` exactly. LambdaLoss weighs a pair the same whichever of the two was bought: what minimises it on
    lists with one bought item (Eq. 11, within the SID) are log-odds, whose softmax this is.

    Args:
        config ([`DecoConfig`]): Sizes.
    """

    def __init__(self, config: DecoConfig):
        super().__init__()
        width = config.decoder_config.hidden_size
        self.rerank_head = FeedForward(width, width, config.rerank_size)
        # A bias would add the same to all items of a SID.
        self.item_proj = nn.Linear(config.content_size, config.rerank_size, bias=False)

    def item_vectors(self, content: torch.Tensor) -> torch.Tensor:
        """Vectors `(N, rerank_size)` of items by their content `(N, d)`, whatever its scale."""
        return self.item_proj(F.rms_norm(content, content.shape[-1:]))

    def score_items(
        self, states: torch.Tensor, leaves: torch.LongTensor, trie: SIDTrie, content: torch.Tensor
    ) -> tuple[torch.LongTensor, torch.LongTensor, torch.Tensor]:
        """Score all items of many SIDs.

        Args:
            states (`torch.Tensor` of shape `(R, w)`): Decoder's state behind every SID.
            leaves (`torch.LongTensor` of shape `(R,)`): Leaf of every SID.
            trie ([`SIDTrie`]): The catalog.
            content (`torch.Tensor` of shape `(N, d)`): Content of all items of the catalog.

        Returns:
            Three tensors of shape `(C,)`, `C` the number of items: which of the SIDs an item belongs to, its position
            in `trie.item_rows`, and its score, float32. Items of one SID lie together, in order.
        """
        starts, ends = trie.item_ranges(trie.num_codebooks, leaves)
        owners, positions = spread_ranges(starts, ends - starts)
        # Users want the same items: each is projected once.
        rows, places = trie.item_rows[positions].unique(return_inverse=True)
        users, items = self.rerank_head(states).float(), self.item_vectors(content[rows]).float()
        return owners, positions, (users[owners] * items[places]).sum(-1)

    def loss(
        self,
        states: torch.Tensor,
        leaves: torch.LongTensor,
        bought: torch.LongTensor,
        trie: SIDTrie,
        content: torch.Tensor,
    ) -> torch.Tensor:
        """LambdaLoss of the items of SIDs, of which one each was bought; the mean over SIDs with several items.

        Args:
            bought (`torch.LongTensor` of shape `(R,)`): Catalog row of the bought item of every SID.
            states, leaves, trie, content: As for `score_items`.

        Returns:
            `torch.Tensor`: scalar, float32; 0 where no SID has several items.
        """
        owners, positions, scores = self.score_items(states, leaves, trie, content)
        starts, ends = trie.item_ranges(trie.num_codebooks, leaves)
        width = max((ends - starts).tolist(), default=1)
        mask = torch.arange(width, device=leaves.device) < (ends - starts).unsqueeze(1)
        lists = scores.new_zeros(mask.shape).index_put((owners, positions - starts[owners]), scores)
        labels = F.one_hot(trie.item_positions()[bought] - starts, width).to(scores.dtype)
        return lambda_loss(lists, labels, mask)

    def log_choices(
        self, states: torch.Tensor, leaves: torch.LongTensor, trie: SIDTrie, content: torch.Tensor
    ) -> torch.Tensor:
        """`log p(item | SID)` of all items of SIDs, `(C,)` float32; arguments and order as for `score_items`."""
        owners, _, scores = self.score_items(states, leaves, trie, content)
        return segment_log_softmax(scores, owners, leaves.shape[0])
