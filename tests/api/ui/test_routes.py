"""The files of the page: what is served, with which headers, to whom; and what no file may hold."""

import re
from pathlib import Path

import aiohttp
import pytest
from fakes import proxying

from proxy.api.ui import routes as serving

FOLDER = Path(serving.__file__).parent
FILES = sorted(path for path in FOLDER.iterdir() if path.suffix in {".js", ".css", ".html", ".svg"})
SCRIPTS = [path for path in FILES if path.suffix == ".js"]
TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
KEYS = {"control": {"api_keys": ["control-key"]}, "agents": {"api_keys": ["agent-key"]}}

# What would make markup or a program of a text; and storage that outlives the tab.
FORBIDDEN = re.compile(
    r"innerHTML|outerHTML|insertAdjacentHTML|setHTML|createContextualFragment|DOMParser|document\.write|\beval\b"
    r"|new Function|javascript:|localStorage|document\.cookie|indexedDB|srcdoc|import\("
)


def name_of(path: Path) -> str:
    return path.name


async def test_each_file_is_served_with_its_type_and_no_other(store, http):
    """Nothing lies in the folder that is not served, and nothing is served that does not lie there."""
    async with proxying(None, store) as served:
        for path in FILES:
            where = "/ui" if path.name == "index.html" else f"/ui/{path.name}"
            async with http.get(served.url + where) as response:
                assert (200, TYPES[path.suffix], "utf-8") == (response.status, response.content_type, response.charset)
                assert path.read_bytes() == await response.read()
        for name in ("serving.py", "__init__.py", "none.js", "..%2fserving.py", "%2e%2e", "style.css%00", "a/b"):
            async with http.get(f"{served.url}/ui/{name}") as response:
                assert response.status in (401, 404), name

    assert {path.name for path in FILES} == serving._FILES.keys()


@pytest.mark.parametrize("path", ["/ui", "/ui/app.js"])
async def test_a_browser_is_told_to_do_nothing_that_the_page_does_not_need(store, http, path):
    """No script but ours, no frame, no form, no other origin; whatever the key."""
    async with proxying(None, store, **KEYS) as served, http.get(served.url + path) as response:
        policy = dict(rule.split(" ", 1) for rule in response.headers["Content-Security-Policy"].split("; "))
        told = [
            response.headers[name]
            for name in ("X-Content-Type-Options", "Referrer-Policy", "Cross-Origin-Opener-Policy")
        ]

    assert {
        "default-src": "'none'", "script-src": "'self'", "style-src": "'self'", "connect-src": "'self'", "img-src": "'self'",
        "base-uri": "'none'", "form-action": "'none'", "frame-ancestors": "'none'",
    } == policy  # fmt: skip
    assert ["nosniff", "no-referrer", "same-origin"] == told


async def test_a_slash_at_the_end_leads_to_the_page(store, http):
    """Also below a path that another proxy adds: the way is told relatively."""
    async with proxying(None, store, **KEYS) as served:
        async with http.get(f"{served.url}/ui/", allow_redirects=False) as response:
            assert (308, "../ui") == (response.status, response.headers["Location"])
        async with http.get(f"{served.url}/ui/") as response:
            assert (200, f"{served.url}/ui") == (response.status, str(response.url))


async def test_a_file_that_the_browser_has_is_not_sent_again(store, http):
    """By its ETag, a strong one; an unknown one is sent the file."""
    async with proxying(None, store) as served:
        async with http.get(f"{served.url}/ui/app.js") as response:
            tag, length = response.headers["ETag"], len(await response.read())
            assert "no-cache" == response.headers["Cache-Control"]
        statuses = []
        for known in (tag, f"W/{tag}", f'"other", {tag}', "*", '"other"'):
            async with http.get(f"{served.url}/ui/app.js", headers={"If-None-Match": known}) as response:
                statuses.append((response.status, len(await response.read()), response.headers["ETag"]))
        async with http.get(f"{served.url}/ui/list.js") as response:
            assert tag != response.headers["ETag"]

    assert tag.startswith('"')
    assert [(304, 0, tag)] * 4 + [(200, length, tag)] == statuses


async def test_the_files_need_no_key_and_what_they_show_does(store, http):
    """They hold nothing; a key that is no control key is no hindrance either."""
    async with proxying(None, store, **KEYS) as served:
        statuses = []
        for path in ("/ui", "/ui/app.js", "/rollouts", "/events"):
            for headers in ({}, {"Authorization": "Bearer agent-key"}):
                async with http.get(served.url + path, headers=headers) as response:
                    statuses.append(response.status)

    assert [200, 200, 200, 200, 401, 403, 401, 403] == statuses


async def test_the_page_is_on_the_control_api_alone(store):
    """Where that has a port of its own, agents' port has none."""
    said = {"control": {"listen": "127.0.0.1:0"}}
    async with proxying(None, store, **said) as served, aiohttp.ClientSession() as http:
        async with http.get(f"{served.control_url}/ui") as response:
            assert 200 == response.status
        async with http.get(f"{served.url}/ui") as response:
            assert 404 == response.status


@pytest.mark.parametrize("path", SCRIPTS, ids=name_of)
def test_no_script_makes_markup_of_text(path):
    """Elements are made of text alone, in dom.js; nothing outlives the tab."""
    assert [] == FORBIDDEN.findall(path.read_text())


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_no_file_names_another_place(path):
    """The page works offline: its only addresses are those of XML's namespaces."""
    found = re.findall(
        r"\b(?:https?:)?//[\w.-]+\.\w+[^\s\"']*", re.sub(r"^\s*//.*$", "", path.read_text(), flags=re.MULTILINE)
    )

    assert [] == [url for url in found if "www.w3.org" not in url]


def test_the_page_has_no_inline_script_nor_style():
    """The policy would block them."""
    text = (FOLDER / "index.html").read_text()

    assert [] == re.findall(r"<style|\sstyle=|\son\w+=|<script(?![^>]*\ssrc=)", text)


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_files_are_short(path):
    """As those of the program: at most 300 lines of at most 128 characters; scripts say what they hold."""
    lines = path.read_text().splitlines()

    assert len(lines) <= 300
    assert max(map(len, lines)) <= 128
    assert path.suffix != ".js" or lines[0].startswith("// ")


@pytest.mark.parametrize("path", SCRIPTS, ids=name_of)
def test_every_import_is_of_a_file_and_a_name_that_are_there(path):
    """Without a build step nobody else would find out before a browser does."""
    for names, source in re.findall(r"import \{([^}]+)\} from \"\./([\w.]+)\"", path.read_text()):
        there = (FOLDER / source).read_text()
        for name in names.split(","):
            plain = name.strip().split(" as ")[0]
            assert re.search(rf"export (?:async )?(?:function\*?|const|class) {plain}\b", there), (path.name, plain)
