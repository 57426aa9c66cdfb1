"""Chained block hashes: the hash of a block stands for its own tokens and for everything before them.

Two blocks have equal hashes only if their whole prefixes are equal: the same root (cache salt and whatever
else changes the keys and values of equal tokens) and the same tokens. SHA-256 makes a collision, by chance or
by design, practically impossible; a collision would show one user another's text.
"""

from __future__ import annotations

import functools
import hashlib
import struct
from collections.abc import Sequence

from jaxserve.request import Request


def root_hash(extra_keys: Sequence[str | None]) -> bytes:
    """The parent of a request's first block: what sets its keys and values apart beside the tokens.

    Args:
        extra_keys: in a fixed order, such as ``(cache_salt,)``; None is a key that is not set.
    """
    digest = hashlib.sha256(b"jaxserve.block")
    for key in extra_keys:
        data = b"" if key is None else key.encode("utf-8", "surrogatepass")
        # Length first (-1 when not set), so that no two lists of keys read the same.
        digest.update(struct.pack("<q", -1 if key is None else len(data)) + data)
    return digest.digest()


def block_hash(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """The hash of a full block of ``token_ids`` (int32) after the block, or root, that hashed to
    ``parent``."""
    return hashlib.sha256(parent + _packer(len(token_ids)).pack(*token_ids)).digest()


def generated_parent(parent: bytes, num_prompt_tokens: int) -> bytes:
    """What takes the place of ``parent`` for the first block with generated tokens.

    Args:
        parent: the hash of the block before it, or the root.
        num_prompt_tokens: prompt tokens in it, before the generated ones.
    """
    return hashlib.sha256(b"jaxserve.generated" + struct.pack("<q", num_prompt_tokens) + parent).digest()


def extend_block_hashes(request: Request, block_size: int, *, separate_paths: bool = False) -> list[bytes]:
    """Hash those full blocks of the request's known tokens that are not hashed yet; returns all its
    hashes.

    With ``separate_paths`` equal tokens have equal hashes only if the same ones of them were generated: these were
    computed along another path than prompts, which gives other bits.
    """
    hashes = request.block_hashes
    tokens = request.all_token_ids
    num_full = len(tokens) // block_size
    if len(hashes) < num_full:
        parent = hashes[-1] if hashes else root_hash((request.cache_salt,))
        for start in range(len(hashes) * block_size, num_full * block_size, block_size):
            if separate_paths and 0 <= request.num_prompt_tokens - start < block_size:
                parent = generated_parent(parent, request.num_prompt_tokens - start)
            parent = block_hash(parent, tokens[start : start + block_size])
            hashes.append(parent)
    return hashes


@functools.lru_cache(maxsize=8)
def _packer(count: int) -> struct.Struct:
    return struct.Struct(f"<{count}i")
