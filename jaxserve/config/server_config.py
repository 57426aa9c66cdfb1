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
    uds: str | None = setting(None, "Path of a Unix domain socket to bind instead of host and port.")
    api_server_count: int = setting(
        1,
        "API-server processes over one engine; /load then counts each process's own requests.",
    )
    page: bool | None = setting(
        None,
        "Serve a page at / to chat with the model and to watch the engine. Default: only where host is a loopback "
        "address. Its files need no API key; the page asks for it.",
    )
    root_path: str = setting("", "Path under which a proxy serves this server, such as /llm.")
    api_key: list[str] | None = setting(
        None,
        "Key(s) that clients must send. Other users of the machine see them in its process list: prefer a file or "
        "JAXSERVE_API_KEY (several, separated by commas). /health and /ping stay open.",
        parse="list",
    )
    api_key_file: str | None = setting(None, "File with further keys, one a line; lines with # are comments.")
    ssl_keyfile: str | None = setting(None, "TLS: file of the private key, PEM.")
    ssl_certfile: str | None = setting(None, "TLS: file of the certificate (chain), PEM.")
    ssl_ca_certs: str | None = setting(None, "TLS: file of the authorities that clients' certificates need.")
    ssl_cert_reqs: int = setting(
        0, "TLS: whether clients need a certificate: 0 no, 1 checked if sent, 2 yes."
    )
    served_model_name: list[str] | None = setting(
        None, "Name(s) under which the model is served; the first is reported.", parse="list"
    )
    shutdown_timeout: float = setting(5.0, "Seconds to let running requests finish after SIGTERM.")
    max_body_bytes: int = setting(
        32 << 20, "Largest request body; a larger one is refused (413).", parse="size"
    )
    max_n: int = setting(16384, "Choices that one request may ask for, over all its prompts.")
    enable_prompt_tokens_details: bool = setting(
        False, "Name the prompt tokens found in the prefix cache in chat's and completions' usage."
    )
    enable_request_id_headers: bool = setting(True, "Send X-Request-Id with every answer.")
    enable_server_load_tracking: bool = setting(False, "Count running requests for /load.")
    enable_log_requests: bool = setting(False, "Log requests with their prompts; else logs never hold them.")
    enable_dev_mode: bool = setting(
        False,
        "Offer /server_info and /reset_prefix_cache, which tell and change more than a public server may; also "
        "JAXSERVE_SERVER_DEV_MODE=1.",
    )
    trust_request_chat_template: bool = setting(
        False, "Render chat templates that requests bring (sandboxed, time-limited)."
    )
    sse_keep_alive_interval: float = setting(
        0.0, "Seconds without an event after which a stream sends a comment, for proxies; 0 never does."
    )
    response_store_bytes: int = setting(
        64 << 20,
        "Memory for stored responses (/v1/responses); 0, or several API servers, store none.",
        parse="size",
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
    allowed_methods: list[str] = setting(["*"], "CORS methods, for the origins allowed.", parse="list")
    allowed_headers: list[str] = setting(["*"], "CORS headers, for the origins allowed.", parse="list")
    allow_credentials: bool = setting(False, "CORS: let browsers of the origins allowed send credentials.")

    def __post_init__(self) -> None:
        check_at_least(self, 0, "shutdown_timeout")
        check_at_least(self, 1, "max_body_bytes", "max_n", "api_server_count")
        check_at_least(self, 0, "sse_keep_alive_interval")
        self._check_tls()
        check_at_least(self, 0, "response_store_bytes", "response_store_ttl")
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"port must be in [0, 65535], got {self.port}.", param="port")

    def _check_tls(self) -> None:
        if (self.ssl_keyfile or self.ssl_ca_certs) and not self.ssl_certfile:
            raise ConfigError("TLS needs a certificate: give --ssl-certfile too.", param="ssl_certfile")
        if self.ssl_cert_reqs not in (0, 1, 2):
            raise ConfigError(
                f"ssl_cert_reqs must be 0, 1 or 2, got {self.ssl_cert_reqs}.", param="ssl_cert_reqs"
            )
        if self.ssl_cert_reqs and not self.ssl_ca_certs:
            raise ConfigError(
                "ssl_cert_reqs asks for clients' certificates: give --ssl-ca-certs to check them.",
                param="ssl_ca_certs",
            )
