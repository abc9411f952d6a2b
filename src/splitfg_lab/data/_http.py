"""One file over HTTP: resumed where it stopped, refused where it is not the expected one."""

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
    """A transfer that did not succeed.

    Attributes:
        again: Whether the same address may work on another try.
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
            raise TransferError(f"refused to follow a redirect to {newurl}", again=False)
        return super().redirect_request(req, fp, code, msg, headers, newurl)


def _opener() -> urllib.request.OpenerDirector:
    """An opener that knows http and https, and neither files nor ftp."""
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
    """Bring ``part`` to completion: append from where it ends if the server can, else begin again.

    Raises:
        TransferError: The transfer failed or stopped early; what arrived stays in ``part``.
        OSError: The file cannot be written.
    """
    _require_address(url)
    answer = _ask(url, part)
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
    """Raise a :class:`TransferError` for what is no address of a host on the web."""
    like = "an address looks like https://example.org/folder"
    try:
        parts = urllib.parse.urlsplit(url)
        host, _ = parts.hostname, parts.port
    except ValueError as error:
        raise TransferError(f"{url} is no address ({error}): {like}", again=False) from error
    if parts.scheme not in ("http", "https"):
        raise TransferError(f"{url} is neither http nor https: {like}", again=False)
    if not host:
        raise TransferError(f"{url} names no host: {like}", again=False)


def _next_block(url: str, stream: IO[bytes]) -> bytes:
    try:
        return stream.read(CHUNK)
    except (OSError, http.client.HTTPException) as error:
        raise TransferError(f"{url}: {error}", again=True) from error


def _ask(url: str, part: Path) -> _Answer:
    """Request what is missing of ``part``."""
    have = part.stat().st_size if part.exists() else 0
    headers = {"User-Agent": _AGENT, "Accept-Encoding": "identity"}
    if have:
        headers["Range"] = f"bytes={have}-"
    try:
        response = _opener().open(urllib.request.Request(url, headers=headers), timeout=TIMEOUT)
    except urllib.error.HTTPError as error:
        error.close()
        raise _refusal(error, part) from error
    except urllib.error.URLError as error:
        raise TransferError(f"{url}: {error.reason}", again=True) from error
    except (ValueError, http.client.InvalidURL) as error:  # a name or redirect that can never be asked for
        raise TransferError(f"{url} is no address that can be asked for ({error})", again=False) from error
    except (OSError, http.client.HTTPException) as error:
        raise TransferError(f"{url}: {error}", again=True) from error
    return _understand(url, response, have)


def _understand(url: str, response: http.client.HTTPResponse, have: int) -> _Answer:
    """Where the answer begins: 206 continues at the asked place, 200 is the whole file."""
    length = response.headers.get("Content-Length", "")
    span = re.fullmatch(r"bytes (\d+)-\d+/(\d+|\*)", response.headers.get("Content-Range", ""))
    if response.status == 200:
        return _Answer(response, 0, int(length) if length.isdigit() else None)
    if response.status == 206 and span is not None and int(span[1]) == have:
        return _Answer(response, have, int(span[2]) if span[2].isdigit() else None)
    response.close()
    raise TransferError(f"{url}: HTTP {response.status} with another part of the file", again=False)


def _refusal(error: urllib.error.HTTPError, part: Path) -> TransferError:
    if error.code == 416:  # the part is not a beginning of what the server has: start over
        part.unlink(missing_ok=True)
        return TransferError(f"{error.url}: the partial file does not fit, starting over", again=True)
    again = error.code in (408, 425, 429) or error.code >= 500
    return TransferError(f"{error.url}: HTTP {error.code} {error.reason}", again=again)
