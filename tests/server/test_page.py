"""The page's routes: where it is served, its headers, what needs the API key; and that the wheel has its files."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from fake_engine import FakeEngine
from http_support import client_of, error

from jaxserve.config import ServerConfig
from jaxserve.server.app import create_app
from jaxserve.server.page.routes import FOLDER, INDEX, load_page, page_enabled

pytestmark = pytest.mark.anyio

ROOT = Path(__file__).parents[2]
STATIC = ROOT / "jaxserve" / "server" / "page" / "static"
NAMES = sorted(path.name for path in STATIC.iterdir())


def client_with(**settings: Any):
    return client_of(create_app(FakeEngine(), ServerConfig(**settings), ["m"]))


@pytest.mark.parametrize(
    "settings, served",
    [
        ({}, True),
        ({"host": "localhost"}, True),
        ({"host": "127.8.0.1"}, True),
        ({"host": "::1"}, True),
        ({"host": "0.0.0.0"}, False),
        ({"host": ""}, False),
        ({"host": "::"}, False),
        ({"host": "example.org"}, False),
        ({"host": "0.0.0.0", "page": True}, True),
        ({"page": False}, False),
        ({"uds": "/tmp/x.sock"}, False),
        ({"uds": "/tmp/x.sock", "page": True}, True),
    ],
)
def test_where_the_page_is_served(settings, served):
    assert page_enabled(ServerConfig(**settings)) is served


async def test_without_the_page_nothing_is_there():
    async with client_with(page=False) as client:
        for path in ("/", FOLDER + "main.js"):
            error(await client.get(path), 404)
    async with client_with(page=False, api_key=["k"]) as client:
        error(await client.get("/"), 401)


async def test_every_file_with_its_headers(client):
    for name in NAMES:
        response = await client.get("/" if name == INDEX else FOLDER + name)
        assert response.status_code == 200, name
        assert response.content == (STATIC / name).read_bytes()
        policy = response.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert "*" not in policy
        assert response.headers["x-content-type-options"] == "nosniff"
        assert response.headers["cache-control"] == "no-cache"
    assert response.headers["content-type"].startswith("text/javascript")
    index = await client.get("/")
    assert index.headers["content-type"] == "text/html; charset=utf-8"
    assert (await client.head("/")).content == b""


async def test_a_kept_file_is_not_sent_again(client):
    tag = (await client.get(FOLDER + "main.js")).headers["etag"]
    again = await client.get(FOLDER + "main.js", headers={"if-none-match": f'"other", W/{tag}'})
    assert (again.status_code, again.content) == (304, b"")
    assert again.headers["etag"] == tag
    assert (await client.get(FOLDER + "main.js", headers={"if-none-match": '"other"'})).status_code == 200


@pytest.mark.parametrize(
    "name", ["index.html", "nothing.js", "..%2froutes.py", "%2e%2e/routes.py", "routes.py", ""]
)
async def test_no_other_file(client, name):
    response = await client.get(FOLDER + name)
    assert response.status_code == 404
    assert "PageFile" not in response.text


async def test_files_name_only_files_of_the_page():
    """By relative URLs, so that they are found under a proxy's path, too; nothing comes from elsewhere."""
    for name, file in load_page().items():
        text = file.content.decode()
        named = re.findall(r'(?:src|href)="([^"#]+)"', text) if name.endswith(".html") else []
        named += re.findall(r'^import .*? from "([^"]+)";', text, re.M | re.S)
        for path in named:
            assert path.removeprefix("page/").removeprefix("./") in NAMES, (name, path)
        for url in re.findall(r"https?://[\w.-]+", text):
            assert url == "http://www.w3.org", (name, url)
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(", text), name


async def test_the_page_needs_no_key_but_all_else_does():
    async with client_with(api_key=["secret-key"]) as client:
        for name in NAMES:
            response = await client.get("/" if name == INDEX else FOLDER + name)
            assert response.status_code == 200
            assert "secret-key" not in response.text
        for path in ("/v1/models", "/metrics", FOLDER + "nothing.js", "/page", "/page/main.js/"):
            error(await client.get(path), 401)


async def test_under_a_proxys_path():
    app = create_app(FakeEngine(), ServerConfig(root_path="/llm", api_key=["k"]), ["m"])

    async def proxied(scope: Any, receive: Any, send: Any) -> None:
        # As uvicorn tells it, from a proxy that takes the path away.
        await app({**scope, "root_path": "/llm", "path": "/llm" + scope["path"]}, receive, send)

    async with client_of(proxied) as client:  # type: ignore[arg-type]
        assert "page/main.js" in (await client.get("/")).text
        assert (await client.get(FOLDER + "main.js")).status_code == 200
        error(await client.get("/v1/models"), 401)


async def test_the_document_does_not_name_it(client):
    assert not {path for path in (await client.get("/openapi.json")).json()["paths"] if "page" in path}


def test_the_wheel_has_the_files(monkeypatch):
    setuptools: Any = pytest.importorskip("setuptools")
    monkeypatch.chdir(ROOT)
    distribution = setuptools.Distribution()
    distribution.parse_config_files()
    build: Any = distribution.get_command_obj("build_py")
    build.ensure_finalized()
    assert "jaxserve.server.page" in build.packages
    build.manifest_files = {}  # else it would look for files under version control
    found = build.find_data_files("jaxserve.server.page", "jaxserve/server/page")
    assert {STATIC / name for name in NAMES} <= {Path(name).resolve() for name in found}
