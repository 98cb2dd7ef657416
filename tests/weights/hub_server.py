"""A stand-in for the hub: as much of its API as downloading a snapshot asks for, on a free local port."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

SHA = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class Cut:
    """A download that gets no further than `num_bytes`; the connection closes when `release` is set."""

    num_bytes: int
    release: threading.Event = field(default_factory=threading.Event)
    reached: threading.Event = field(default_factory=threading.Event)


LARGE = 50_000


@dataclass
class Hub:
    """Repositories by id, each file's bytes by path; `gated` ids are refused. `requests` is what was asked."""

    repositories: Mapping[str, Mapping[str, bytes]]
    gated: frozenset[str] = frozenset()
    requests: list[str] = field(default_factory=list)
    ranges: list[str] = field(default_factory=list)
    """Ranges that file downloads asked for."""
    cuts: list[Cut] = field(default_factory=list)
    """What happens to the next downloads of large files, one after the other."""
    hashed: bool = False
    """Whether files go by their SHA-256, as large ones do, or as git has it."""
    url: str = ""

    def fetched(self, suffix: str) -> list[str]:
        """Paths of file downloads that end so."""
        return [
            line for line in self.requests if line.startswith("GET") and "/resolve/" in line and line.endswith(suffix)
        ]


@contextmanager
def serve_hub(hub: Hub) -> Iterator[Hub]:
    """Serve it while the block runs; sets its url."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *args: object) -> None:
            """Nothing on the terminal."""

        def do_HEAD(self) -> None:
            self._answer(body=False)

        def do_GET(self) -> None:
            self._answer(body=True)

        def _answer(self, *, body: bool) -> None:
            path = self.path.partition("?")[0]
            hub.requests.append(f"{self.command} {path}")
            status, headers, data = _reply(hub, path.strip("/").split("/"))
            asked = self.headers.get("Range")
            if asked and body and status == 200:
                hub.ranges.append(asked)
                first, _, last = asked.removeprefix("bytes=").partition("-")
                start, stop = int(first), min(len(data), int(last) + 1) if last else len(data)
                headers |= {"Content-Range": f"bytes {start}-{stop - 1}/{len(data)}"}
                status, data = 206, data[start:stop]
            self.send_response(status)
            for key, value in {**headers, "Content-Length": str(len(data)), "X-Repo-Commit": SHA}.items():
                self.send_header(key, value)
            self.end_headers()
            if body and len(data) > LARGE and hub.cuts:
                cut = hub.cuts.pop(0)
                self.wfile.write(data[: cut.num_bytes])
                self.wfile.flush()
                cut.reached.set()
                cut.release.wait(60)
                self.close_connection = True
            elif body:
                self.wfile.write(data)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    hub.url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _reply(hub: Hub, parts: list[str]) -> tuple[int, dict[str, str], bytes]:
    """Status, headers and body for /api/models/ORG/NAME/(revision|tree)/REV and /ORG/NAME/resolve/REV/PATH."""
    api = parts[:2] == ["api", "models"]
    repo, rest = "/".join(parts[2:4] if api else parts[:2]), parts[4 if api else 2 :]
    files = hub.repositories.get(repo)
    if repo in hub.gated:
        return 403, {"X-Error-Code": "GatedRepo", "X-Error-Message": "Access is restricted"}, b"{}"
    if files is None:
        return 404, {"X-Error-Code": "RepoNotFound", "X-Error-Message": "Repository not found"}, b"{}"
    if api and rest[:1] == ["revision"]:
        return 200, _JSON, json.dumps({"id": repo, "sha": SHA, "siblings": [{"rfilename": f} for f in files]}).encode()
    if api and rest[:1] == ["tree"]:
        entries = [{"type": "file", "path": f, "size": len(data), "oid": _oid(data)} for f, data in files.items()]
        return 200, _JSON, json.dumps(entries).encode()
    name = "/".join(rest[2:])
    if rest[:1] == ["resolve"] and name in files:
        tag = hashlib.sha256(files[name]).hexdigest() if hub.hashed else _oid(files[name])
        return 200, {"ETag": f'"{tag}"', "Content-Type": "application/octet-stream"}, files[name]
    return 404, {"X-Error-Code": "EntryNotFound"}, b"{}"


_JSON = {"Content-Type": "application/json"}


def _oid(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()
