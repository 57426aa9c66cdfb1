"""The PrefixRouter as Ray Serve's request router of the EngineReplica deployment."""

from __future__ import annotations

import functools
from typing import Any

from jaxserve.ray_serve.calls import HTTPCall
from jaxserve.ray_serve.prefix_routing import PrefixRouter


def __getattr__(name: str) -> type[Any]:
    if name == "PrefixRequestRouter":  # Serve looks for it here, by its name
        return prefix_request_router()
    raise AttributeError(name)


@functools.cache
def prefix_request_router() -> type[Any]:
    """PrefixRequestRouter, for ``RequestRouterConfig``; made when it is needed because its base is Ray's."""
    from ray.serve.request_router import RequestRouter

    class PrefixRequestRouter(RequestRouter):
        """Counts the requests in flight to each replica, and has a PrefixRouter choose."""

        def initialize_state(self, prefix_weight: float) -> None:
            self._prefixes = PrefixRouter(prefix_weight)
            self._in_flight: dict[Any, int] = {}

        async def choose_replicas(
            self, candidate_replicas: list[Any], pending_request: Any = None
        ) -> list[list[Any]]:
            """One replica a rank, the best first: Serve takes the first that accepts the request."""
            call = pending_request.args[0] if pending_request is not None and pending_request.args else None
            avoid, hashes = (
                (call.avoid, call.hashes) if isinstance(call, HTTPCall) else (frozenset[str](), ())
            )
            if pending_request is not None:
                pending_request.routing_context.should_backoff = True  # asked again, after a while
            by_id = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
            self._prefixes.forget_all_but(by_id.keys())
            names = [name for name in by_id if name not in avoid]
            if not names:
                return []  # those that failed it are about to be replaced
            ranked = self._prefixes.choose(
                hashes, {name: self._load(by_id[name].replica_id) for name in names}
            )
            return [[by_id[name]] for name in ranked]

        def _load(self, replica_id: Any) -> int:
            """Ours, or what the replica has told, if that is more: there may be other routers."""
            return max(self._in_flight.get(replica_id, 0), self.replica_queue_len_cache.get(replica_id) or 0)

        def on_send_request(self, replica_id: Any) -> None:
            super().on_send_request(replica_id)
            self._in_flight[replica_id] = self._in_flight.get(replica_id, 0) + 1

        def on_request_completed(self, replica_id: Any, internal_request_id: str) -> None:
            super().on_request_completed(replica_id, internal_request_id)
            left = self._in_flight.get(replica_id, 0) - 1
            if left > 0:
                self._in_flight[replica_id] = left
            else:
                self._in_flight.pop(replica_id, None)

    return PrefixRequestRouter
