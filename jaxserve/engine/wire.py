"""The messages between a front process and the engine core's process: msgpack, tagged."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from jaxserve.step import EngineCoreOutputs, EngineCoreRequest, EngineInfo


class Choice(msgspec.Struct, array_like=True, gc=False):
    """One of a prompt's completions."""

    request_id: str
    seed: int


class Add(msgspec.Struct, tag=True):
    """A request to admit, and its further choices: the same but for id and seed, so the prompt goes once."""

    request: EngineCoreRequest
    choices: list[Choice]
    client: int = 0
    """Who gets the outputs."""

    @classmethod
    def of(cls, requests: Sequence[EngineCoreRequest], client: int = 0) -> Add:
        """The message for the ``n`` choices of one prompt."""
        choices = [Choice(request.request_id, request.seed) for request in requests[1:]]
        return cls(requests[0], choices, client)

    def requests(self) -> Iterator[EngineCoreRequest]:
        """All of them. Only the first one scores the prompt."""
        first = self.request
        yield first
        params = first.sampling_params
        if self.choices and params.prompt_logprobs is not None:
            params = params.clone(prompt_logprobs=None)
        for choice in self.choices:
            yield msgspec.structs.replace(
                first, request_id=choice.request_id, seed=choice.seed, sampling_params=params
            )


class Abort(msgspec.Struct, tag=True):
    """Requests to end, without an output."""

    request_ids: list[str]


class ResetPrefixCache(msgspec.Struct, tag=True):
    """Forget all cached prefixes."""


class Profile(msgspec.Struct, tag=True):
    """Begin a profile, or end it. Answered with Profiled."""

    call: int
    start: bool
    client: int = 0
    """Who gets the answer."""


class Stop(msgspec.Struct, tag=True):
    """End the core's process."""


class Ready(msgspec.Struct, tag=True):
    """The core is ready to serve."""

    info: EngineInfo


class StartFailed(msgspec.Struct, tag=True):
    """The core could not start. ``kind`` names the error's class in ``jaxserve.errors``; '' is an unexpected one."""

    kind: str
    message: str
    param: str | None = None


class Outputs(msgspec.Struct, tag=True):
    """What a step came to."""

    outputs: EngineCoreOutputs


class Profiled(msgspec.Struct, tag=True):
    """A Profile was carried out, unless ``error`` says why not."""

    call: int
    error: str | None = None


class Died(msgspec.Struct, tag=True):
    """The core ends because of an error that it could not contain."""

    message: str


ToCore = Add | Abort | ResetPrefixCache | Profile | Stop
FromCore = Ready | StartFailed | Outputs | Profiled | Died
