"""Downloads against a real server on this machine that can cut, lie, refuse and redirect."""

import dataclasses
import functools
import hashlib
import http.server
import io
import socket
import threading
import urllib.request

import pytest

from splitfg.errors import DataError
from splitfg_lab.data import FileSet, fetch, find_dataset
from splitfg_lab.data._http import TransferError, _SameKindOfRedirect
from splitfg_lab.data.specs import Download

CONTENT = bytes(i * i % 251 for i in range(300_000))
DIGEST = "sha256:" + hashlib.sha256(CONTENT).hexdigest()


class Server(http.server.ThreadingHTTPServer):
    """Serves ``files``; ``cut`` holds, per request, after how many bytes the connection ends."""

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.files = {"/file.bin": CONTENT}
        self.cut, self.status, self.requests = [], {}, []
        self.ranges, self.wrong_range, self.lengths = True, False, True

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_port}"


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        server = self.server
        server.requests.append((self.path, self.headers.get("Range")))
        codes = server.status.get(self.path, [])
        if codes:
            code = codes.pop(0)
            self.send_response(code)
            if code in (301, 302):
                self.send_header("Location", server.location)
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        if self.path not in server.files:
            self.send_error(404)
            return
        self._send(server.files[self.path])

    def _send(self, body):
        start = int(self.headers["Range"][6:-1]) if self.headers.get("Range") and self.server.ranges else 0
        if start >= len(body) and start:
            self.send_error(416)
            return
        self.send_response(206 if start else 200)
        if start:
            shown = start + (7 if self.server.wrong_range else 0)
            self.send_header("Content-Range", f"bytes {shown}-{len(body) - 1}/{len(body)}")
        if self.server.lengths:
            self.send_header("Content-Length", str(len(body) - start))
        self.end_headers()
        limit = self.server.cut.pop(0) if self.server.cut else None
        self.wfile.write(body[start : None if limit is None else start + limit])

    def log_message(self, *args):
        pass


@pytest.fixture
def server():
    with Server() as made:
        thread = threading.Thread(target=functools.partial(made.serve_forever, poll_interval=0.01))
        thread.start()
        yield made
        made.shutdown()
        thread.join()


def file_set(*urls, digest=DIGEST, path="raw/file.bin"):
    entry = FileSet(name="thing", title="Thing", files=())
    return dataclasses.replace(entry, downloads=(Download(path, urls, digest),))


def get(folder, *urls, progress=None, **options):
    return fetch(file_set(*urls, **options), folder, progress, wait=0.0)


def test_a_whole_file_with_progress(server, tmp_path):
    seen = []
    (path,) = get(tmp_path, server.url + "/file.bin", progress=lambda *event: seen.append(event))
    assert path == tmp_path / "raw" / "file.bin"
    assert path.read_bytes() == CONTENT
    assert seen[-1] == ("file.bin", len(CONTENT), len(CONTENT))
    assert [done for _, done, _ in seen] == sorted(done for _, done, _ in seen)
    assert [p.name for p in path.parent.iterdir()] == ["file.bin"]


def test_a_file_that_is_there_is_not_fetched_again(server, tmp_path):
    get(tmp_path, server.url + "/file.bin")
    get(tmp_path, server.url + "/file.bin")
    assert len(server.requests) == 1


def test_a_file_in_a_read_only_folder_is_not_fetched_again(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("sys.platform", "linux")
    (tmp_path / "data" / "raw").mkdir(parents=True)
    (tmp_path / "data" / "raw" / "file.bin").write_bytes(CONTENT)
    (tmp_path / "data").chmod(0o555)
    assert get(tmp_path / "data", "http://127.0.0.1:9/file.bin") == [tmp_path / "data" / "raw" / "file.bin"]


def test_a_damaged_file_that_is_there_is_named_and_kept(server, tmp_path):
    (tmp_path / "raw").mkdir()
    (tmp_path / "raw" / "file.bin").write_bytes(b"mine")
    with pytest.raises(DataError, match="move it away"):
        get(tmp_path, server.url + "/file.bin")
    assert (tmp_path / "raw" / "file.bin").read_bytes() == b"mine"


def test_cut_connections_are_resumed_within_one_call(server, tmp_path):
    server.cut = [100_000, 50_000]
    (path,) = get(tmp_path, server.url + "/file.bin")
    assert path.read_bytes() == CONTENT
    assert [asked for _, asked in server.requests] == [None, "bytes=100000-", "bytes=150000-"]


def test_a_later_call_goes_on_where_the_first_stopped(server, tmp_path):
    server.cut = [10_000] * 4
    with pytest.raises(DataError, match="ended after 40,000 of 300,000 bytes"):
        get(tmp_path, server.url + "/file.bin")
    assert (tmp_path / "raw" / "file.bin.part").stat().st_size == 40_000
    (path,) = get(tmp_path, server.url + "/file.bin")
    assert path.read_bytes() == CONTENT
    assert server.requests[-1] == ("/file.bin", "bytes=40000-")


def test_a_server_without_ranges_starts_over(server, tmp_path):
    server.ranges, server.cut = False, [100_000]
    (path,) = get(tmp_path, server.url + "/file.bin")
    assert path.read_bytes() == CONTENT


def test_a_server_that_answers_with_another_range_is_an_error(server, tmp_path):
    server.wrong_range, server.cut = True, [100_000]
    with pytest.raises(DataError, match="another part of the file"):
        get(tmp_path, server.url + "/file.bin")


def test_a_partial_file_of_something_else_is_thrown_away(server, tmp_path):
    (tmp_path / "raw").mkdir()
    for stale in (b"x" * 1000, b"x" * (len(CONTENT) + 5)):  # resumed to the wrong content; longer than the file
        (tmp_path / "raw" / "file.bin.part").write_bytes(stale)
        (path,) = get(tmp_path, server.url + "/file.bin")
        assert path.read_bytes() == CONTENT
        path.unlink()


def test_a_finished_partial_file_needs_no_server(tmp_path):
    (tmp_path / "raw").mkdir()
    (tmp_path / "raw" / "file.bin.part").write_bytes(CONTENT)
    (path,) = get(tmp_path, "http://127.0.0.1:9/file.bin")
    assert path.read_bytes() == CONTENT


def test_a_wrong_checksum_is_an_error_and_leaves_nothing(server, tmp_path):
    server.files["/file.bin"] = CONTENT[:-1] + b"!"
    with pytest.raises(DataError, match="checksum is not sha256"):
        get(tmp_path, server.url + "/file.bin")
    assert list((tmp_path / "raw").iterdir()) == []
    assert len(server.requests) == 1


def test_the_next_address_is_tried(server, tmp_path):
    server.files["/bad"] = b"bad"
    (path,) = get(tmp_path, server.url + "/gone", server.url + "/bad", server.url + "/file.bin")
    assert path.read_bytes() == CONTENT
    assert [asked for asked, _ in server.requests] == ["/gone", "/bad", "/file.bin"]


def test_not_found_is_final_and_says_what_to_do(server, tmp_path):
    with pytest.raises(DataError) as caught:
        get(tmp_path, server.url + "/gone")
    text = str(caught.value)
    assert "HTTP 404" in text
    assert server.url + "/gone" in text
    assert str(tmp_path / "raw" / "file.bin") in text
    assert "splitfg data prepare thing --from PATH" in text
    assert len(server.requests) == 1


def test_a_busy_server_is_asked_again(server, tmp_path):
    server.status["/file.bin"] = [503, 429]
    (path,) = get(tmp_path, server.url + "/file.bin")
    assert path.read_bytes() == CONTENT


def test_nobody_there_is_a_clear_message(tmp_path):
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        port = closed.getsockname()[1]
    with pytest.raises(DataError) as caught:
        get(tmp_path, f"http://127.0.0.1:{port}/file.bin")
    assert "refused" in str(caught.value)
    assert "by hand" in str(caught.value)


@pytest.mark.parametrize("url", ["file:///etc/passwd", "ftp://127.0.0.1/x", "data:,x"])
def test_only_http_and_https(tmp_path, url):
    with pytest.raises(DataError, match="neither http nor https"):
        get(tmp_path, url)


@pytest.mark.parametrize(
    ("mirror", "complaint"),
    [
        ("http://[", "is not a valid address .*looks like https://"),
        ("http://host:port", "is not a valid address .*looks like https://"),
        ("htp:/x", "neither http nor https.*looks like https://"),
        ("", "neither http nor https.*looks like https://"),
        ("http://", "has no host.*looks like https://"),
        ("http:///x", "has no host.*looks like https://"),
        ("http://a b", "is not a valid address"),
        ("http://" + "a" * 70 + ".org", "is not a valid address"),
    ],
)
def test_a_malformed_mirror_is_told_at_once(tmp_path, monkeypatch, mirror, complaint):
    monkeypatch.setenv("no_proxy", "*")
    monkeypatch.setattr("time.sleep", lambda _seconds: pytest.fail("a malformed address does not get better"))
    with pytest.raises(DataError, match=complaint):
        fetch(file_set("http://127.0.0.1:9/file.bin"), tmp_path, mirror=mirror)


def test_redirects_are_followed_but_only_to_http(server, tmp_path):
    server.status["/moved"], server.location = [302], "/file.bin"
    (path,) = get(tmp_path, server.url + "/moved")
    assert path.read_bytes() == CONTENT
    path.unlink()
    for location in ("file:///etc/passwd", "ftp://127.0.0.1/file.bin"):
        server.status["/moved"], server.location = [302], location
        with pytest.raises(DataError, match=r"not allowed|not safe to follow"):
            get(tmp_path, server.url + "/moved")


def test_a_redirect_never_leaves_encryption():
    request = urllib.request.Request("https://example.org/a")
    follow = functools.partial(_SameKindOfRedirect().redirect_request, request, io.BytesIO(), 302, "Found", {})
    assert follow("https://example.org/b").full_url == "https://example.org/b"
    with pytest.raises(TransferError, match="not safe to follow"):
        follow("http://example.org/b")


def test_without_a_checksum_nothing_is_glued_together(server, tmp_path):
    body = b"PAR1" + CONTENT + b"PAR1"
    server.files["/t.pq"], server.cut = body, [1000]
    (path,) = get(tmp_path, server.url + "/t.pq", digest=None, path="tabular/t.parquet")
    assert path.read_bytes() == body
    assert [asked for _, asked in server.requests] == [None, None]


@pytest.mark.parametrize("body", [b"<html>sorry</html>", b"PAR1 cut short", b""])
def test_a_page_instead_of_a_table_is_an_error(server, tmp_path, body):
    server.files["/t.pq"], server.lengths = body, False
    with pytest.raises(DataError, match="not a parquet file"):
        get(tmp_path, server.url + "/t.pq", digest=None, path="tabular/t.parquet")


def test_a_mirror_replaces_every_address(server, tmp_path):
    server.files["/mirror/encoder.json"] = b"{}"
    with pytest.raises(DataError) as caught:
        fetch("gpt2_bpe", tmp_path, mirror=server.url + "/mirror/", wait=0.0)
    assert any("encoder.json: the file's checksum is not" in p for p in caught.value.problems)
    assert any("vocab.bpe: HTTP 404" in p for p in caught.value.problems)


def test_what_has_no_public_address_says_so(tmp_path):
    for name in ("otto", "wikipedia"):
        with pytest.raises(DataError) as caught:
            fetch(name, tmp_path)
        assert find_dataset(name).by_hand in str(caught.value)
        assert f"splitfg data prepare {name} --from PATH" in str(caught.value)


def test_a_full_disk_is_a_clear_message(server, tmp_path):
    (tmp_path / "raw").write_bytes(b"a file where the folder should be")
    with pytest.raises(DataError, match="cannot write"):
        get(tmp_path, server.url + "/file.bin")
