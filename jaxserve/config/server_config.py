"""ServerConfig: the HTTP side, generated into flags like the engine's configs."""

from __future__ import annotations

from dataclasses import dataclass

from jaxserve.config.fields import check_at_least, setting
from jaxserve.errors import ConfigError


@dataclass(frozen=True)
class ServerConfig:
    """Where and how the server listens."""

    host: str = setting("127.0.0.1", "Address to bind.")
    port: int = setting(8000, "Port to bind.")
    api_key: list[str] | None = setting(
        None, "Key(s) that clients must send; also JAXSERVE_API_KEY. /health stays open.", parse="list"
    )
    served_model_name: list[str] | None = setting(
        None, "Name(s) under which the model is served; the first is reported.", parse="list"
    )
    shutdown_timeout: float = setting(5.0, "Seconds to let running requests finish after SIGTERM.")
    max_body_bytes: int = setting(
        32 << 20, "Largest request body; a larger one is refused (413).", parse="size"
    )
    response_store_bytes: int = setting(
        64 << 20, "Memory for stored responses (/v1/responses); 0 stores none.", parse="size"
    )
    response_store_ttl: float = setting(3600.0, "Seconds for which a stored response is kept.")
    tool_call_parser: str = setting(
        "auto",
        "How the model writes tool calls: a parser's name, none, or auto (by its chat template and type).",
    )
    reasoning_parser: str = setting(
        "auto", "How the model marks its reasoning: a parser's name, none, or auto (likewise)."
    )
    enable_auto_tool_choice: bool = setting(True, "Let requests leave it to the model whether to call tools.")
    allowed_origins: list[str] = setting([], "CORS origins; none by default.", parse="list")

    def __post_init__(self) -> None:
        check_at_least(self, 0, "shutdown_timeout")
        check_at_least(self, 1, "max_body_bytes")
        check_at_least(self, 0, "response_store_bytes", "response_store_ttl")
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"port must be in [0, 65535], got {self.port}.", param="port")
