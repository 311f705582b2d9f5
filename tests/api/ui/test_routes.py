"""The files of the web UI: their routes, headers, access, and contents."""

import re
from hashlib import sha256
from pathlib import Path

import aiohttp
import pytest
from tests.support.fakes import proxying

from proxy.api.ui import routes as serving

FOLDER = Path(serving.__file__).parent
FILES = sorted(path for path in FOLDER.iterdir() if path.suffix in {".js", ".css", ".html", ".svg"})
VENDORED = sorted(path for path in (FOLDER / "vendor").iterdir() if path.suffix in {".js", ".css"})
SCRIPTS = [path for path in FILES if path.suffix == ".js"]
TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
KEYS = {"control": {"api_keys": ["control-key"]}, "agents": {"api_keys": ["agent-key"]}}

# APIs that turn text into markup or code, and storage that outlives the tab.
FORBIDDEN = re.compile(
    r"dangerouslySetInnerHTML|innerHTML|outerHTML|insertAdjacentHTML|setHTML|createContextualFragment|DOMParser|document\.write|\beval\b"
    r"|new Function|javascript:|localStorage|document\.cookie|indexedDB|srcdoc|import\("
)


def name_of(path: Path) -> str:
    return path.name


async def test_every_file_of_the_folder_is_served_with_its_content_type_and_nothing_else(store, http):
    async with proxying(None, store) as served:
        for path in (*FILES, *VENDORED):
            path_of_file = "/ui" if path.name == "index.html" else f"/ui/{path.relative_to(FOLDER)}"
            async with http.get(served.url + path_of_file) as response:
                assert (200, TYPES[path.suffix], "utf-8") == (response.status, response.content_type, response.charset)
                assert path.read_bytes() == await response.read()
        scripts = ("serving.py", "__init__.py", "none.js", "..%2fserving.py", "vendor/..%2froutes.py")
        for name in (*scripts, "%2e%2e", "style.css%00", "a/b", "vendor/LICENSE-htm"):
            async with http.get(f"{served.url}/ui/{name}") as response:
                assert response.status in (401, 404), name

    assert {str(path.relative_to(FOLDER)) for path in (*FILES, *VENDORED)} == serving._FILES.keys()


@pytest.mark.parametrize("path", ["/ui", "/ui/app.js"])
async def test_the_content_security_policy_allows_only_what_the_page_needs(store, http, path):
    """It allows scripts of the same origin, and no frame, form or other origin."""
    async with proxying(None, store, **KEYS) as served, http.get(served.url + path) as response:
        policy = dict(rule.split(" ", 1) for rule in response.headers["Content-Security-Policy"].split("; "))
        headers = [
            response.headers[name]
            for name in ("X-Content-Type-Options", "Referrer-Policy", "Cross-Origin-Opener-Policy")
        ]

    assert policy == {
        "default-src": "'none'", "script-src": "'self'", "style-src": "'self'", "connect-src": "'self'", "img-src": "'self'",
        "base-uri": "'none'", "form-action": "'none'", "frame-ancestors": "'none'",
    }  # fmt: skip
    assert headers == ["nosniff", "no-referrer", "same-origin"]


async def test_a_trailing_slash_redirects_to_the_page(store, http):
    """The redirect is relative, so that it works below a path prefix of another proxy."""
    async with proxying(None, store, **KEYS) as served:
        async with http.get(f"{served.url}/ui/", allow_redirects=False) as response:
            assert (response.status, response.headers["Location"]) == (308, "../ui")
        async with http.get(f"{served.url}/ui/") as response:
            assert (200, f"{served.url}/ui") == (response.status, str(response.url))


async def test_the_root_redirects_browsers_to_the_page_and_is_404_for_others(store, http):
    """Without a key, also with the control API on its own port; other methods of `/` are the model API's."""
    chrome = "text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8"
    async with proxying(None, store, **KEYS) as served:
        async with http.get(served.url, headers={"Accept": chrome}, allow_redirects=False) as response:
            assert (response.status, *map(response.headers.get, ("Location", "Vary"))) == (302, "ui", "Accept")
        async with http.get(served.url, headers={"Accept": chrome}) as response:
            assert (200, f"{served.url}/ui") == (response.status, str(response.url))
        for accept in ("*/*", "application/json"):
            async with http.get(served.url, headers={"Accept": accept}) as response:
                assert (response.status, "the web UI is at /ui" in await response.text()) == (404, True)
        async with http.post(served.url) as response:
            assert response.status == 401
    separate = {**KEYS, "control": {**KEYS["control"], "listen": "127.0.0.1:0"}}
    async with (
        proxying(None, store, **separate) as served,
        http.get(served.control_url, headers={"Accept": chrome}) as response,
    ):
        assert (200, f"{served.control_url}/ui") == (response.status, str(response.url))


async def test_a_matching_etag_is_304(store, http):
    """The ETag is strong; a different one gets the file."""
    async with proxying(None, store) as served:
        async with http.get(f"{served.url}/ui/app.js") as response:
            tag, length = response.headers["ETag"], len(await response.read())
            assert response.headers["Cache-Control"] == "no-cache"
        statuses = []
        for etag in (tag, f"W/{tag}", f'"other", {tag}', "*", '"other"'):
            async with http.get(f"{served.url}/ui/app.js", headers={"If-None-Match": etag}) as response:
                statuses.append((response.status, len(await response.read()), response.headers["ETag"]))
        async with http.get(f"{served.url}/ui/list.js") as response:
            assert tag != response.headers["ETag"]

    assert tag.startswith('"')
    assert statuses == [(304, 0, tag)] * 4 + [(200, length, tag)]


async def test_the_files_require_no_key_and_the_data_requires_a_control_key(store, http):
    """The files contain no data; an agent's key does not prevent access to them."""
    async with proxying(None, store, **KEYS) as served:
        statuses = []
        for path in ("/ui", "/ui/app.js", "/ui/vendor/htm.js", "/rollouts", "/events"):
            for headers in ({}, {"Authorization": "Bearer agent-key"}):
                async with http.get(served.url + path, headers=headers) as response:
                    statuses.append(response.status)

    assert statuses == [200] * 6 + [401, 403, 401, 403]


async def test_the_page_is_served_on_the_control_api_only(store):
    sections = {"control": {"listen": "127.0.0.1:0"}}
    async with proxying(None, store, **sections) as served, aiohttp.ClientSession() as http:
        async with http.get(f"{served.control_url}/ui") as response:
            assert response.status == 200
        async with http.get(f"{served.url}/ui") as response:
            assert response.status == 404


@pytest.mark.parametrize("path", SCRIPTS, ids=name_of)
def test_no_script_uses_markup_apis_or_persistent_storage(path):
    """Templates insert values as text."""
    assert FORBIDDEN.findall(path.read_text()) == []


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_no_file_refers_to_another_host(path):
    """The page works offline; only XML namespaces are URLs."""
    found = re.findall(
        r"\b(?:https?:)?//[\w.-]+\.\w+[^\s\"']*", re.sub(r"^\s*//.*$", "", path.read_text(), flags=re.MULTILINE)
    )

    assert [url for url in found if "www.w3.org" not in url] == []


def test_the_page_has_no_inline_script_or_style():
    """The Content-Security-Policy would block them."""
    text = (FOLDER / "index.html").read_text()

    assert re.findall(r"<style|\sstyle=|\son\w+=|<script(?![^>]*\ssrc=)", text) == []


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_a_file_has_at_most_300_lines_of_128_characters(path):
    """A script begins with a comment about its contents."""
    lines = path.read_text().splitlines()

    assert len(lines) <= 300
    assert max(map(len, lines)) <= 128
    assert path.suffix != ".js" or lines[0].startswith("// ")


@pytest.mark.parametrize("path", SCRIPTS, ids=name_of)
def test_every_import_names_an_existing_file_and_export(path):
    """Without a build step only a browser would detect an error."""
    for names, source in re.findall(r"(?:import|export) (.+?) from \"\./([\w./]+)\"", path.read_text(), re.DOTALL):
        source_text = (FOLDER / source).read_text()
        for name in re.findall(r"\w+(?! as\b)(?=,|\s*\}|$)", names) if "vendor" not in source else ():
            exported = rf"export (?:(?:async )?(?:function\*?|const|class) {name}\b|\{{[^}}]*\b{name}\b)"
            assert re.search(exported, source_text), (path.name, name)


def test_vendored_files_equal_the_registrys():
    """README.md lists the version and the SHA-256 of each; one import is rewritten, because the page has no import map."""
    readme = (FOLDER / "vendor/README.md").read_text()
    table = re.findall(r"^\| `([\w.]+)` \|.*\| `([0-9a-f]{64})` \|$", readme, re.MULTILINE)
    hashes = {path.name: sha256(path.read_bytes()).hexdigest() for path in VENDORED}

    assert hashes == dict(table)
    for path in VENDORED:
        imported = set(re.findall(r"""^[^\n'"]*\bimport\b[^;'"]*\bfrom\s*["']([^"']+)["']""", path.read_text()))
        assert imported <= {"./preact.js"}, path.name
        assert not re.search(r"\beval\(|new Function\(", path.read_text()), path.name
