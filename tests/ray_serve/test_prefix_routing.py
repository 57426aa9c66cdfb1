"""The rule by which a replica is chosen, and what of a request counts as its prompt."""

from __future__ import annotations

import json
from typing import Any

from jaxserve.ray_serve.prefix_routing import BLOCK_BYTES, MAX_BLOCKS, PrefixRouter, prefix_hashes


def chat(*contents: str, **others: Any) -> bytes:
    messages = [{"role": "user", "content": content} for content in contents]
    return json.dumps({**others, "model": "m", "messages": messages}).encode()


def text(seed: str, blocks: int) -> str:
    return (seed * BLOCK_BYTES)[:BLOCK_BYTES] * blocks


def test_hashes_follow_the_prompt_and_nothing_else() -> None:
    first = prefix_hashes(chat(text("a", 4), "question"))
    assert len(first) == 4
    assert prefix_hashes(chat(text("a", 4), "question", temperature=0.5, max_tokens=3)) == first
    longer = prefix_hashes(chat(text("a", 4), "question", text("b", 2)))
    assert longer[:4] == first  # a conversation that goes on
    assert len(longer) > 4
    other = prefix_hashes(chat("x" + text("a", 4)))
    assert not set(other) & set(first)  # in a chain: the same text after another beginning is another block
    assert prefix_hashes(chat(text("a", 4), tools=[{"type": "function"}])) != first
    assert prefix_hashes(chat(text("a", 4), cache_salt="s"))[0] != first[0]


def test_what_is_no_prompt_has_no_hashes() -> None:
    for body in (b"", b"[1]", b"{", b"\xff", b"[" * 100_000, chat("short"), b'{"prompt": null}'):
        assert prefix_hashes(body) == ()
    assert (
        len(prefix_hashes(json.dumps({"prompt": "x" * 2 * MAX_BLOCKS * BLOCK_BYTES}).encode())) == MAX_BLOCKS
    )


def test_a_prompt_goes_where_its_prefix_is_until_that_replica_is_much_more_loaded() -> None:
    router = PrefixRouter(prefix_weight=8)
    prompt = prefix_hashes(chat(text("p", 10)))
    home = router.choose(prompt, {"a": 0, "b": 0})[0]
    away = {"a": "b", "b": "a"}[home]
    for extra in range(8):
        assert router.choose(prompt, {home: extra, away: 0})[0] == home
    assert router.choose(prompt, {home: 9, away: 0})[0] == away
    # Now both have it, and the load decides.
    assert router.choose(prompt, {home: 1, away: 0})[0] == away
    assert router.choose(prompt, {home: 0, away: 1})[0] == home


def test_what_is_much_more_grows_with_the_load_and_the_shared_part() -> None:
    prompt = prefix_hashes(chat(text("p", 20)))
    half = prefix_hashes(chat(text("p", 10)[:-64], text("q", 10)))
    assert 8 <= sum(a == b for a, b in zip(prompt, half, strict=False)) <= 11

    def chosen(hashes: tuple[bytes, ...], home_load: int, away_load: int) -> bool:
        router = PrefixRouter(prefix_weight=8)
        home = router.choose(prompt, {"a": 0, "b": 0})[0]
        away = {"a": "b", "b": "a"}[home]
        return router.choose(hashes, {home: home_load, away: away_load})[0] == home

    assert chosen(prompt, 157, 100)  # 8 + 100 / 2
    assert not chosen(prompt, 159, 100)
    assert chosen(half, 125, 100)
    assert not chosen(half, 135, 100)


def test_without_a_prefix_the_load_decides_and_then_the_turn() -> None:
    router = PrefixRouter(prefix_weight=8)
    assert router.choose((), {"a": 2, "b": 1, "c": 3}) == ["b", "a", "c"]
    turns = [router.choose((), {"a": 0, "b": 0, "c": 0})[0] for _ in range(6)]
    assert sorted(turns[:3]) == sorted(turns[3:]) == ["a", "b", "c"]


def test_new_prompts_spread_over_idle_replicas_and_several_routers_agree() -> None:
    prompts = [prefix_hashes(chat(text(str(number), 3))) for number in range(64)]
    idle = dict.fromkeys("abcd", 0)
    first, second = PrefixRouter(8), PrefixRouter(8)
    chosen = [first.choose(prompt, idle)[0] for prompt in prompts]
    assert [second.choose(prompt, idle)[0] for prompt in prompts] == chosen
    assert all(chosen.count(replica) >= 4 for replica in "abcd")


def test_weight_zero_is_load_alone() -> None:
    router = PrefixRouter(prefix_weight=0)
    prompt = prefix_hashes(chat(text("p", 10)))
    home = router.choose(prompt, {"a": 0, "b": 0})[0]
    assert router.choose(prompt, {home: 1, {"a": "b", "b": "a"}[home]: 0})[0] != home


def test_replicas_that_are_gone_and_prompts_long_unused_are_forgotten() -> None:
    router = PrefixRouter(prefix_weight=8, max_remembered=30)
    prompt = prefix_hashes(chat(text("p", 10)))
    router.forget_all_but({"a"})
    assert router.choose(prompt, {"a": 0}) == ["a"]
    router.forget_all_but({"b", "c"})
    router.forget_all_but({"a", "b"})  # another one of that name has nothing
    assert router.choose(prompt, {"a": 1, "b": 0})[0] == "b"
    for number in range(4):
        router.choose(prefix_hashes(chat(text(str(number), 10))), {"a": 0})
    assert router.choose(prompt, {"a": 0, "b": 1})[0] == "a"
