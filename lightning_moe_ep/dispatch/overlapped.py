"""The `overlapped` dispatcher: `all_to_all` in chunks, so that rows travel while experts work.

The exchange of all chunks is started first; while the experts work on one chunk the next is on its way, and so are
the results of the one before. Backward runs the same the other way round.
"""

from __future__ import annotations

from lightning_moe_ep.dispatch.all_to_all import AllToAllDispatcher
from lightning_moe_ep.dispatch.base import register_dispatcher

CHUNKS = 2
"""Into how many chunks the tokens are cut."""

MIN_TOKENS = 512
"""Tokens a chunk must have on the longest rank; with fewer the exchange is latency, which chunks only add to, and
the dispatcher does as `all_to_all`."""


@register_dispatcher("overlapped")
class OverlappedDispatcher(AllToAllDispatcher):
    """`all_to_all` in chunks whose exchanges run beside the experts' work."""

    def num_chunks(self, num_tokens: int) -> int:
        longest = max(self.expert_group.agree_on_tokens(num_tokens))
        return CHUNKS if longest >= CHUNKS * MIN_TOKENS else 1
