"""Headers of a model on the hub: the first bytes of each shard that is not in the cache, and nothing after them."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from headrace.errors import CheckpointError, UserError
from headrace.weights.headers import TensorHeader, file_headers, parse_header
from headrace.weights.hub import fetch, shards

FIRST_BYTES = 1 << 20
"""Asked for at first: a header is hardly ever longer, K2's are of half that."""
_AT_ONCE = 16
FILES = ("config.json", "model.safetensors.index.json")


def hub_headers(model: str) -> Iterator[TensorHeader] | None:
    """Every tensor of a model on the hub; None where the hub is not asked (HF_HUB_OFFLINE) or has no safetensors.

    Raises UserError naming MODEL.
    """
    from huggingface_hub import constants

    folder = fetch(model, FILES)
    names = shards(folder)
    absent = [name for name in names if not (folder / name).is_file()]
    if absent and constants.HF_HUB_OFFLINE:
        return None
    with ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="hub") as pool:
        try:
            found = list(pool.map(lambda name: _headers(model, folder, name), names))
        except UserError:
            raise
        # The client raises its transport's and its own errors; each means that the headers did not come.
        except Exception as error:
            line = next(iter(str(error).strip().splitlines()), type(error).__name__)
            raise UserError(f"MODEL {model}: headers could not be fetched from the hub: {line}") from None
    if all(one is None for one in found):
        return None
    lacking = [name for name, one in zip(names, found, strict=True) if one is None]
    if lacking:
        raise CheckpointError(
            f"MODEL {model}: on the hub {len(lacking)} of {len(names)} shards are missing: {lacking[0]}"
        )
    return (header for one in found if one is not None for header in one.values())


def _headers(model: str, folder: Path, name: str) -> dict[str, TensorHeader] | None:
    if (folder / name).is_file():
        return file_headers(folder / name)
    from huggingface_hub import hf_hub_url

    url, path = hf_hub_url(model, name, revision=folder.name), Path(model) / name
    first = _range(url, 0, FIRST_BYTES)
    if first is None:
        return None
    data, size = first
    length = int.from_bytes(data[:8], "little")
    if len(data) < 8 or 8 + length > size:
        raise CheckpointError(f"{path}: not a safetensors file, or truncated")
    while len(data) < 8 + length:
        more = _range(url, len(data), 8 + length)
        if more is None or not more[0]:
            raise CheckpointError(f"{path}: its header could not be read")
        data += more[0]
    return parse_header(data[8 : 8 + length], path, size)


def _range(url: str, start: int, stop: int) -> tuple[bytes, int] | None:
    """Bytes start to stop of a file and its size; None where it is not there."""
    from huggingface_hub.utils import build_hf_headers, get_session

    headers = {**build_hf_headers(), "Range": f"bytes={start}-{stop - 1}"}
    with get_session().stream("GET", url, headers=headers) as answer:
        if answer.status_code == 404:
            return None
        answer.raise_for_status()
        if answer.status_code != 206:  # a server without ranges sends all of it: no more than was asked for is read
            skip, size = start, int(answer.headers["Content-Length"])
        else:
            skip, size = 0, int(answer.headers["Content-Range"].rpartition("/")[2])
        data = b""
        for part in answer.iter_bytes():
            data += part
            if len(data) >= skip + stop - start:
                break
    return data[skip : skip + stop - start], size
