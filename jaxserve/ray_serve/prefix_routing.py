"""PrefixRouter: which replica gets a request, by what it has cached and by load. No Ray here.

Central idea: replicas are never asked. A replica that was sent a prompt has its blocks in its prefix cache, so the
router remembers which prompts went where: hashes of their text in a chain, as the cache's own blocks are.

The rule: the replica with the lowest score, which is its requests in flight less

    share of the prompt that it was sent before x (prefix_weight + half the requests in flight of the idlest replica)

A replica that has the whole prompt thus keeps it until it has ``prefix_weight`` requests more, and half as many again,
as the idlest one; to have a tenth of it is worth a tenth of that. Among equals a hash of the prompt decides, so that
several routers that know nothing yet agree; for prompts too short for that, whose turn it is.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence

import msgspec

BLOCK_BYTES = 256
"""Of a prompt's text: about one block of the KV cache."""
MAX_BLOCKS = 1024
"""Of a prompt that are looked at; hashing these takes about a millisecond."""
MAX_REMEMBERED = 1 << 18
"""Hashes; some 50 MB."""
PROMPT_FIELDS = ("model", "cache_salt", "tools", "instructions", "system", "prompt", "messages", "input")
"""What a prompt is made of, in the order in which templates render it. The rest of a body does not matter."""

_decode = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode


def prefix_hashes(body: bytes) -> tuple[bytes, ...]:
    """The chained hashes of a request's prompt, of full blocks of its text only; none where it is not JSON.

    Args:
        body: of a request in OpenAI's or Anthropic's form.
    """
    try:
        fields = _decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return ()
    text = b"\0".join(bytes(fields[name]) for name in PROMPT_FIELDS if name in fields)
    hashes: list[bytes] = []
    parent = b""
    for start in range(0, min(len(text) // BLOCK_BYTES, MAX_BLOCKS) * BLOCK_BYTES, BLOCK_BYTES):
        block = text[start : start + BLOCK_BYTES]
        parent = hashlib.blake2b(parent + block, digest_size=12).digest()
        hashes.append(parent)
    return tuple(hashes)


class PrefixRouter:
    """Remembers what each replica was sent, and chooses.

    Args:
        prefix_weight: see the rule above.
        max_remembered: hashes; the least recently used ones are forgotten.
    """

    def __init__(self, prefix_weight: float, max_remembered: int = MAX_REMEMBERED) -> None:
        self._prefix_weight = prefix_weight
        self._max_remembered = max_remembered
        self._holders: OrderedDict[bytes, set[str]] = OrderedDict()
        self._known: frozenset[str] = frozenset()
        self._turn = 0
        self._last_turns: dict[str, int] = {}

    def choose(self, hashes: Sequence[bytes], loads: Mapping[str, int]) -> list[str]:
        """All replicas, the best first; the first one is taken to have the prompt from now on.

        Args:
            hashes: of the prompt.
            loads: requests in flight of each replica that may be chosen, by its id; at least one.
        """
        matched = self._matched(hashes, loads.keys())
        worth = self._prefix_weight + min(loads.values()) / 2

        def score(replica: str) -> tuple[float, bytes, int]:
            if not hashes:
                return loads[replica], b"", self._last_turns.get(replica, 0)
            return loads[replica] - worth * matched[replica] / len(hashes), _rank(hashes[0], replica), 0

        ranked = sorted(loads, key=score)
        self._turn += 1
        self._last_turns[ranked[0]] = self._turn
        self._remember(hashes, ranked[0])
        return ranked

    def forget_all_but(self, replicas: Collection[str]) -> None:
        """Forget replicas that are gone."""
        alive = frozenset(replicas)
        if self._known - alive:
            for key in [key for key, holders in self._holders.items() if not holders <= alive]:
                self._holders[key] &= alive
                if not self._holders[key]:
                    del self._holders[key]
            self._last_turns = {
                replica: turn for replica, turn in self._last_turns.items() if replica in alive
            }
        self._known = alive

    def _matched(self, hashes: Sequence[bytes], replicas: Collection[str]) -> dict[str, int]:
        """Leading blocks that each replica was sent before."""
        matched = dict.fromkeys(replicas, 0)
        holding = set(replicas)
        for index, key in enumerate(hashes):
            holding &= self._holders.get(key, set())
            if not holding:
                break
            for replica in holding:
                matched[replica] = index + 1
        return matched

    def _remember(self, hashes: Sequence[bytes], replica: str) -> None:
        # The last block first: a prompt's beginning is to be forgotten after its end.
        for key in reversed(hashes):
            self._holders.setdefault(key, set()).add(replica)
            self._holders.move_to_end(key)
        while len(self._holders) > self._max_remembered:
            self._holders.popitem(last=False)


def _rank(first: bytes, replica: str) -> bytes:
    """Rendezvous hashing: for each prompt another order of the replicas, and the same one in every router."""
    return hashlib.blake2b(first + replica.encode(), digest_size=8).digest()
