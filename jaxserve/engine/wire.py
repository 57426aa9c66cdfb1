"""The messages between a front process and the engine core's process: msgpack, tagged."""

from __future__ import annotations

import msgspec

from jaxserve.step import EngineCoreOutputs, EngineCoreRequest, EngineInfo


class Add(msgspec.Struct, tag=True):
    """Requests to admit, in order."""

    requests: list[EngineCoreRequest]


class Abort(msgspec.Struct, tag=True):
    """Requests to end, without an output."""

    request_ids: list[str]


class ResetPrefixCache(msgspec.Struct, tag=True):
    """Forget all cached prefixes."""


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


class Died(msgspec.Struct, tag=True):
    """The core ends because of an error that it could not contain."""

    message: str


ToCore = Add | Abort | ResetPrefixCache | Stop
FromCore = Ready | StartFailed | Outputs | Died
