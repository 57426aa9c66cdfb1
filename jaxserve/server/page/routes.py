"""GET / and /page/…: the page's own files, from memory.

They are the same for everybody and hold nothing of the model, of settings or of requests. An API key therefore does
not guard them: a browser that follows a link cannot send one. The page asks its user for the key and sends it with
every request that it makes, all of which are guarded as ever.
"""

from __future__ import annotations

import hashlib
import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources

from fastapi import APIRouter, Request
from starlette.responses import Response

from jaxserve.config import ServerConfig
from jaxserve.server.errors import HTTPProblem

INDEX = "index.html"
FOLDER = "/page/"
"""Under which all files but the index are found. They name each other by relative URLs: a proxy's path is fine."""
MEDIA_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
CONTENT_SECURITY_POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        # No text becomes markup or code, whatever the scripts do: what models write is shown here.
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
)
HEADERS = {
    "content-security-policy": CONTENT_SECURITY_POLICY,
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    # Kept, but asked for each time: after an upgrade no file is of another version than the rest.
    "cache-control": "no-cache",
}


@dataclass(frozen=True)
class PageFile:
    """One file, with its entity tag."""

    content: bytes
    media_type: str
    etag: str


def page_enabled(config: ServerConfig) -> bool:
    """Whether the page is served: as asked, else where only this machine reaches the server by itself."""
    if config.page is not None:
        return config.page
    return config.uds is None and _is_loopback(config.host)


def page_routes(files: Mapping[str, PageFile]) -> APIRouter:
    """The routes of ``files``, by name."""
    router = APIRouter()

    async def index(request: Request) -> Response:
        return _answer(files[INDEX], request)

    async def page_file(request: Request, name: str) -> Response:
        if name not in files or name == INDEX:
            raise HTTPProblem(404, f"The page has no file {name[:100]!r}.")
        return _answer(files[name], request)

    methods = ["GET", "HEAD"]
    router.add_api_route("/", index, methods=methods, include_in_schema=False)
    router.add_api_route(FOLDER + "{name}", page_file, methods=methods, include_in_schema=False)
    return router


def page_paths(files: Mapping[str, PageFile]) -> frozenset[str]:
    """The paths of ``files``."""
    return frozenset({"/", *(FOLDER + name for name in files if name != INDEX)})


def load_page() -> dict[str, PageFile]:
    """All files of the page, by name."""
    files: dict[str, PageFile] = {}
    for path in (resources.files("jaxserve.server.page") / "static").iterdir():
        suffix = path.name[path.name.rfind(".") :]
        if suffix in MEDIA_TYPES:
            content = path.read_bytes()
            tag = f'"{hashlib.sha256(content).hexdigest()[:24]}"'
            files[path.name] = PageFile(content, MEDIA_TYPES[suffix], tag)
    return files


def _answer(file: PageFile, request: Request) -> Response:
    headers = {**HEADERS, "etag": file.etag}
    known = {tag.strip().removeprefix("W/") for tag in request.headers.get("if-none-match", "").split(",")}
    if file.etag in known:
        return Response(status_code=304, headers=headers)
    return Response(file.content, headers=headers, media_type=file.media_type)


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
