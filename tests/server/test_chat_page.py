"""The page at / as files: how they are served, that they are part of the package, and what they may not contain."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path

import pytest
from server_harness import Running, line, scripted

from ds4.server.chat_page import FILES

ROOT = Path(__file__).parents[2]
PAGE = Path(str(files("ds4.server") / "page"))
SCRIPTS = sorted(PAGE.glob("*.js"))
HTML = (PAGE / "index.html").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with scripted(line("</think>", "Hi"), ctx=256, api_keys=("secret",), cors=True) as running:
        yield running


def test_every_file_of_the_page_is_served() -> None:
    assert len(SCRIPTS) > 5
    names = {path.name for path in PAGE.iterdir()}
    assert set(FILES) == {"/", *(f"/page/{name}" for name in names - {"index.html"})}


@pytest.mark.parametrize("path", FILES)
def test_files_need_no_key_and_load_nothing_from_elsewhere(server: Running, path: str) -> None:
    answer = server.http.get(path)
    assert answer.status_code == 200
    assert answer.content == FILES[path].data
    policy = dict(part.strip().partition(" ")[::2] for part in answer.headers["content-security-policy"].split(";"))
    assert policy["default-src"] == "'none'"
    for name in ("script-src", "style-src", "img-src", "connect-src"):
        assert policy[name] == "'self'"
    for name in ("base-uri", "form-action", "frame-ancestors", "trusted-types"):
        assert policy[name] == "'none'"
    assert policy["require-trusted-types-for"] == "'script'"
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["referrer-policy"] == "no-referrer"
    assert answer.headers["access-control-allow-origin"] == "*"
    kinds = {"": "text/html", "js": "text/javascript", "css": "text/css", "svg": "image/svg+xml"}
    assert answer.headers["content-type"].startswith(kinds[path.rpartition(".")[2] if "." in path else ""])


def test_a_browser_is_told_when_it_has_the_newest_file(server: Running) -> None:
    first = server.http.get("/")
    tag = first.headers["etag"]
    assert first.headers["cache-control"] == "no-cache"
    for given in (tag, f"W/{tag}", f'"other", {tag}', "*"):
        again = server.http.get("/", headers={"if-none-match": given})
        assert (again.status_code, again.content) == (304, b""), given
        assert again.headers["etag"] == tag
        assert "content-security-policy" in again.headers
    for given in ('"other"', tag.strip('"'), tag[:-2] + '"'):
        assert server.http.get("/", headers={"if-none-match": given}).status_code == 200, given
    assert len({file.tag for file in FILES.values()}) == len(FILES)


def test_head_has_the_headers_and_no_body(server: Running) -> None:
    head, whole = server.http.head("/"), server.http.get("/")
    assert (head.status_code, head.content) == (200, b"")
    for name in ("content-length", "content-type", "etag", "content-security-policy"):
        assert head.headers[name] == whole.headers[name]


def test_what_is_no_file_of_the_page_is_not_open(server: Running) -> None:
    for path in ("/page/", "/page/nothing.js", "/page/../edges.py", "/page/%2e%2e/edges.py", "/page", "/index.html"):
        assert server.http.get(path).status_code == 401, path
    assert server.http.post("/").status_code == 405
    for path in ("/page/nothing.js", "/index.html"):
        assert server.http.get(path, headers={"authorization": "Bearer secret"}).status_code == 404


def test_its_responses_are_counted(server: Running) -> None:
    for path in FILES:
        server.http.get(path)
    stats = server.http.get("/stats", headers={"x-api-key": "secret"}).json()
    counted = stats["http_responses"]
    assert counted["/"]["200"] >= 1
    assert counted["/page/{file}"]["200"] >= len(FILES) - 1
    assert "/page/app.js" not in counted


def test_the_package_has_its_files() -> None:
    """By the patterns that setuptools goes by; in the source tree they are there in any case."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    package = ROOT / "src" / "ds4"
    patterns = project["tool"]["setuptools"]["package-data"]["ds4"]
    packaged = {path for pattern in patterns for path in package.glob(pattern)}
    assert set(PAGE.iterdir()) <= packaged


# ---- what is in them ------------------------------------------------------------------------------------------------


def test_nothing_is_inline_and_nothing_is_elsewhere() -> None:
    assert re.findall(r"<script(?![^>]* src=)|<style| style=| on[a-z]+=", HTML) == []
    for target in re.findall(r"""(?:src|href)="([^"]*)\"""", HTML):
        assert f"/{target}" in FILES or target in ("docs", "#message"), target
    for path in PAGE.iterdir():
        addresses = re.findall(r"https?://[\w.]+|url\(|@import", path.read_text(encoding="utf-8"))
        assert set(addresses) <= {"http://www.w3.org"}, path.name  # the name of SVG, which nobody loads


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_scripts_make_no_html_of_text(script: Path) -> None:
    code = script.read_text(encoding="utf-8")
    for way in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "Function(", "srcdoc"):
        assert way not in code, way
    assert "import(" not in code


def test_scripts_import_what_is_there() -> None:
    for script in SCRIPTS:
        for names, source in re.findall(r'^import \{ ([^}]*) \} from "(.*)";$', script.read_text("utf-8"), re.M):
            exported = (PAGE / source).read_text(encoding="utf-8")
            for name in names.split(", "):
                assert re.search(rf"^export (?:async )?(?:class|const|function\*?) {name}\b", exported, re.M), name


def test_the_elements_that_scripts_look_for_are_there() -> None:
    there = re.findall(r'\bid="([^"]*)"', HTML)
    assert len(set(there)) == len(there)
    wanted = {id for script in SCRIPTS for id in re.findall(r'byId\("([^"]*)"\)', script.read_text(encoding="utf-8"))}
    assert wanted
    assert wanted <= set(there)
    assert set(re.findall(r'\b(?:for|aria-controls|aria-describedby)="([^"]*)"', HTML)) <= set(there)
