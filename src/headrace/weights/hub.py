"""Models from the hub: what serving needs of one, in the hub's own cache, going on where a download ended."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import re
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO, cast
from urllib.parse import urlsplit

from headrace.errors import UserError

CONFIG_FILES = ("*.json",)
MODEL_FILES = ("*.safetensors", "*.json", "*.tiktoken", "*.jinja", "*.model")
# Folders hold other formats' copies; `consolidated` is the same weights under other names.
_UNWANTED_FILES = ("*/*", "consolidated*")
_AT_ONCE = 8
"""Files fetched at a time, as the hub's own client has it."""
_SHA256 = re.compile(r"[0-9a-f]{64}")


def fetch(model: str, patterns: Sequence[str], config: Path | None = None) -> Path:
    """The folder of a model's files that match; the rest of `config`'s snapshot where that is given.

    Raises UserError naming MODEL.
    """
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import GatedRepoError, LocalEntryNotFoundError, RepositoryNotFoundError

    try:
        if config is not None and not constants.HF_HUB_OFFLINE:
            _fetch_shards(model, config)
        return Path(snapshot_download(model, allow_patterns=list(patterns), ignore_patterns=list(_UNWANTED_FILES)))
    except GatedRepoError:
        raise UserError(f"MODEL {model}: gated on the hub; ask for access on its page, then `hf auth login`") from None
    except RepositoryNotFoundError:
        raise UserError(
            f"MODEL {model}: not found: no such folder here, and no such model on the hub "
            "(a private one needs `hf auth login`)"
        ) from None
    except LocalEntryNotFoundError:
        why = (
            "HF_HUB_OFFLINE is set"
            if constants.HF_HUB_OFFLINE
            else f"{constants.ENDPOINT} cannot be reached (offline?)"
        )
        raise UserError(f"MODEL {model}: not (wholly) in the hub's cache on this machine, and {why}") from None
    # The client raises its transport's, the disk's and its own errors; each means that the model did not come.
    except Exception as error:
        line = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise UserError(f"MODEL {model}: could not be fetched from the hub: {line}") from None


def _fetch_shards(model: str, snapshot: Path) -> None:
    """Put the weights that a snapshot lacks into the cache's blobs, where the client then finds them."""
    missing = [shard for shard in shards(snapshot) if not (snapshot / shard).exists()]
    stop = threading.Event()
    with ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="hub") as pool:
        waiting = [pool.submit(_fetch_shard, model, snapshot, shard, stop) for shard in missing]
        try:
            for one in waiting:
                one.result()
        except BaseException:
            stop.set()
            for one in waiting:
                one.cancel()
            raise


def shards(snapshot: Path) -> list[str]:
    """Names of the files of a snapshot's weights, whether or not they are there."""
    index = snapshot / "model.safetensors.index.json"
    if not index.is_file():
        return ["model.safetensors"]
    try:
        names = set(json.loads(index.read_bytes())["weight_map"].values())
    except (ValueError, KeyError, AttributeError, TypeError):
        return []  # `open_headers` says what is wrong with it
    return sorted(name for name in names if isinstance(name, str) and "/" not in name)


def _fetch_shard(model: str, snapshot: Path, name: str, stop: threading.Event) -> None:
    from huggingface_hub import get_hf_file_metadata, hf_hub_url
    from huggingface_hub.errors import EntryNotFoundError
    from huggingface_hub.file_download import http_get
    from huggingface_hub.utils import build_hf_headers

    url = hf_hub_url(model, name, revision=snapshot.name)
    try:
        about = get_hf_file_metadata(url)
    except EntryNotFoundError:
        return  # `open_headers` says that it is missing
    # Chunks of files that several connections fetch are the client's business; whole ones it would begin anew.
    if about.etag is None or about.size is None or (about.xet_file_data is not None and _has_xet()):
        return
    blob = snapshot.parent.parent / "blobs" / about.etag
    blob.parent.mkdir(parents=True, exist_ok=True)
    part = blob.with_name(f"{blob.name}.part")
    with part.open("ab") as file:
        _lock(file)
        if blob.exists():  # another process fetched it meanwhile
            part.unlink(missing_ok=True)
            return
        before = file.seek(0, 2)
        if before > about.size:
            before = file.truncate(0)
        headers = build_hf_headers()
        if urlsplit(about.location).netloc != urlsplit(url).netloc:
            headers.pop("authorization", None)  # the token is the hub's alone
        into = cast("BinaryIO", _Part(file, stop))
        http_get(about.location, into, resume_size=before, headers=headers, expected_size=about.size)
        if before and _SHA256.fullmatch(about.etag) and _sha256(part) != about.etag:
            part.unlink()
            raise OSError(f"{name}: what came in several tries is not what the hub has; it will be fetched anew")
        part.replace(blob)


def _has_xet() -> bool:
    from huggingface_hub import constants

    return importlib.util.find_spec("hf_xet") is not None and not constants.HF_HUB_DISABLE_XET


class _Part:
    """A file being downloaded, whose next write ends the download once somebody wants to stop."""

    def __init__(self, file: BinaryIO, stop: threading.Event) -> None:
        self._file, self._stop = file, stop

    def write(self, data: bytes) -> int:
        if self._stop.is_set():
            raise InterruptedError("stopped")
        count = self._file.write(data)
        self._file.flush()  # what came is kept, however this process ends
        return count

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


def _lock(file: BinaryIO) -> None:
    """Wait until no other process downloads to it; where the system cannot say, the hash will."""
    try:
        import fcntl

        fcntl.flock(file, fcntl.LOCK_EX)
    except (ImportError, OSError):
        pass


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
