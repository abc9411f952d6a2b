"""Download one file over HTTP, and resume a partial one."""

from __future__ import annotations

import http.client
import re
import urllib.error
import urllib.parse
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from splitfg_lab.data._writing import CHUNK, OnProgress

TIMEOUT = 30.0
_AGENT = "splitfg (research library; data fetch)"


class TransferError(Exception):
    """Failed transfer.

    Attributes:
        again: Whether another attempt at the same address may succeed.
    """

    def __init__(self, message: str, *, again: bool) -> None:
        self.again = again
        super().__init__(message)


class _SameKindOfRedirect(urllib.request.HTTPRedirectHandler):
    """Follows redirects to http(s) only, and never from https to http."""

    def redirect_request(
        self,
        req: urllib.request.Request,
        fp: IO[bytes],
        code: int,
        msg: str,
        headers: http.client.HTTPMessage,
        newurl: str,
    ) -> urllib.request.Request | None:
        scheme = urllib.parse.urlsplit(newurl).scheme
        if scheme not in ("http", "https") or (req.type == "https" and scheme != "https"):
            raise TransferError(f"the server redirects to {newurl}, which is not safe to follow", again=False)
        return super().redirect_request(req, fp, code, msg, headers, newurl)


def _opener() -> urllib.request.OpenerDirector:
    """Return an opener for http and https; urllib's default one also opens files and ftp."""
    opener = urllib.request.OpenerDirector()
    for handler in (
        urllib.request.ProxyHandler(),
        urllib.request.HTTPHandler(),
        urllib.request.HTTPSHandler(),
        urllib.request.HTTPDefaultErrorHandler(),
        urllib.request.HTTPErrorProcessor(),
        urllib.request.UnknownHandler(),
        _SameKindOfRedirect(),
    ):
        opener.add_handler(handler)
    return opener


@dataclass(frozen=True)
class _Answer:
    stream: IO[bytes]
    start: int
    total: int | None


def download(url: str, part: Path, progress: OnProgress) -> None:
    """Download a file to ``part``; append to it if the server supports ranges, else start over.

    Raises:
        TransferError: The transfer failed or stopped early; ``part`` keeps the bytes that arrived.
        OSError: The file cannot be written.
    """
    _require_address(url)
    answer = _request(url, part)
    done = answer.start
    with answer.stream, part.open("r+b" if answer.start else "wb") as file:
        file.seek(answer.start)
        while block := _next_block(url, answer.stream):
            file.write(block)
            done += len(block)
            progress(part.name.removesuffix(".part"), done, answer.total)
    if answer.total is not None and done < answer.total:
        raise TransferError(f"{url}: the connection ended after {done:,} of {answer.total:,} bytes", again=True)


def _require_address(url: str) -> None:
    """Raise a :class:`TransferError` unless ``url`` is an http or https address with a host."""
    like = "an address looks like https://example.org/folder"
    try:
        parts = urllib.parse.urlsplit(url)
        host, _ = parts.hostname, parts.port
    except ValueError as error:
        raise TransferError(f"{url} is not a valid address ({error}): {like}", again=False) from error
    if parts.scheme not in ("http", "https"):
        raise TransferError(f"{url} is neither http nor https: {like}", again=False)
    if not host:
        raise TransferError(f"{url} has no host: {like}", again=False)


def _next_block(url: str, stream: IO[bytes]) -> bytes:
    try:
        return stream.read(CHUNK)
    except (OSError, http.client.HTTPException) as error:
        raise TransferError(f"{url}: {error}", again=True) from error


def _request(url: str, part: Path) -> _Answer:
    """Request the bytes that are missing from ``part``."""
    have = part.stat().st_size if part.exists() else 0
    headers = {"User-Agent": _AGENT, "Accept-Encoding": "identity"}
    if have:
        headers["Range"] = f"bytes={have}-"
    try:
        response = _opener().open(urllib.request.Request(url, headers=headers), timeout=TIMEOUT)
    except urllib.error.HTTPError as error:
        error.close()
        raise _http_error(error, part) from error
    except urllib.error.URLError as error:
        raise TransferError(f"{url}: {error.reason}", again=True) from error
    except (ValueError, http.client.InvalidURL) as error:  # malformed names and redirects
        raise TransferError(f"{url} is not a valid address ({error})", again=False) from error
    except (OSError, http.client.HTTPException) as error:
        raise TransferError(f"{url}: {error}", again=True) from error
    return _parse_answer(url, response, have)


def _parse_answer(url: str, response: http.client.HTTPResponse, have: int) -> _Answer:
    """Find the first byte of the answer: 206 continues the file, 200 is the whole file."""
    length = response.headers.get("Content-Length", "")
    span = re.fullmatch(r"bytes (\d+)-\d+/(\d+|\*)", response.headers.get("Content-Range", ""))
    if response.status == 200:
        return _Answer(response, 0, int(length) if length.isdigit() else None)
    if response.status == 206 and span is not None and int(span[1]) == have:
        return _Answer(response, have, int(span[2]) if span[2].isdigit() else None)
    response.close()
    raise TransferError(f"{url}: HTTP {response.status} returned another part of the file", again=False)


def _http_error(error: urllib.error.HTTPError, part: Path) -> TransferError:
    if error.code == 416:  # the partial file is longer than the file on the server
        part.unlink(missing_ok=True)
        return TransferError(f"{error.url}: the partial file does not match, starting over", again=True)
    again = error.code in (408, 425, 429) or error.code >= 500
    return TransferError(f"{error.url}: HTTP {error.code} {error.reason}", again=again)
