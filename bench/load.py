"""How fast weights load, against `safetensors` on the same files and against the disk: `python -m bench.load FOLDER`.

FOLDER is a checkpoint; `--make` writes one there first, K2's shapes with few experts. Every run is a process of its
own that opens headers, reads and fills one rank's parameters on the processor. Cold: the files' pages were dropped
right before. Bytes read are what the system counted for the processes (`read_bytes` of /proc/self/io).
"""

from __future__ import annotations

import argparse
import json
import math
import mmap
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results" / "load.jsonl"
CONFIG = Path(__file__).parent / "configs" / "k2-slice" / "config.json"
BLOCK_BYTES, READERS = 8 << 20, 4
NUM_TENSORS, NUM_SHARDS = 208_000, 60
"""Of the index that is opened: as many as Kimi K2.5 has."""


def main() -> None:
    """Measure and add a line a run to the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--make", action="store_true", help="write a checkpoint there first")
    parser.add_argument("--layouts", default="pp1,pp2,tp2,ep2", help="whose ranks load side by side")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--machine", default=platform.node(), help="what to call it in the results")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--rank", type=int, default=0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        run_one(options.folder, options.one, options.layouts, options.rank)
        return
    if options.make:
        make(options.folder)
    files = sorted(options.folder.glob("*.safetensors"))
    about = {
        "machine": options.machine,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": git_commit(),
        "cores": os.cpu_count(),
        "load_average": os.getloadavg()[0],
        "file_bytes": sum(file.stat().st_size for file in files),
    }
    index = {**about, "kind": "index", "tensors": NUM_TENSORS, **open_index()}
    show(index)
    keep(index)
    cases = [("raw", "pp1"), ("direct", "pp1"), ("fresh", "pp1"), ("safetensors", "pp1")]
    cases += [("headrace", layout) for layout in options.layouts.split(",")]
    for cold in (True, False):
        runs: dict[tuple[str, str], list[dict[str, Any]]] = {case: [] for case in cases}
        for _ in range(options.repeat):  # side by side in time: a shared disk is not as fast at all hours
            for case in cases:
                runs[case].append(measure(options.folder, files, *case, cold=cold))
        raw = max(statistics.median(run["rate"] for run in runs[kind, "pp1"]) for kind in ("raw", "direct"))
        for (kind, layout), many in runs.items():
            middle = sorted(many, key=lambda run: run["rate"])[len(many) // 2]
            rates = [run["rate"] for run in many]
            record = {**about, "kind": kind, "layout": layout, "cold": cold, **middle, "rates": rates}
            record["of_raw"] = middle["rate"] / raw
            show(record)
            keep(record)


def keep(record: dict[str, Any]) -> None:
    """Add a line to the results."""
    with RESULTS.open("a") as file:
        file.write(json.dumps(record) + "\n")


def show(record: dict[str, Any]) -> None:
    """One line of the table."""
    if record["kind"] == "index":
        print(
            f"{record['tensors']:,} tensors in an index: {record['seconds']:.2f} s, {record['cpu_s']:.2f} s of CPU",
            flush=True,
        )
        return
    print(
        f"{'cold' if record['cold'] else 'warm'} {record['kind']:<12} {record['layout']:<6} "
        f"{record['rate'] / 1e9:6.2f} GB/s ({record['of_raw']:4.0%} of raw), {record['cpu_s']:5.1f} s of CPU, "
        f"read from disk {record['read_bytes'] / record['bytes']:.4f} x {record['bytes'] / 1e9:.2f} GB, "
        f"{record['extra_bytes'] / 1e6:4.0f} MB beside the weights",
        flush=True,
    )


def make(folder: Path) -> None:
    """A few GB in K2's shapes, INT4 experts among them."""
    from headrace.weights.random import write_checkpoint

    small = {"num_hidden_layers": 4, "n_routed_experts": 32, "vocab_size": 40960, "first_k_dense_replace": 1}
    config = json.loads(CONFIG.read_text()) | small
    write_checkpoint(folder, config, dtype="bfloat16", max_shard_bytes=1 << 30)
    for file in folder.iterdir():
        with file.open("rb") as handle:
            os.fsync(handle.fileno())


def measure(folder: Path, files: list[Path], kind: str, layout: str, *, cold: bool) -> dict[str, Any]:
    """One run of all ranks at once: bytes wanted, seconds of the slowest, what the system counted for all."""
    count = math.prod(int(size) for size in layout if size.isdigit())
    command = [sys.executable, "-m", "bench.load", str(folder), "--one", kind, "--layouts", layout, "--rank"]
    ranks = [
        subprocess.Popen([*command, str(rank)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for rank in range(count)
    ]
    for rank in ranks:
        assert rank.stdout is not None and rank.stdout.readline() == "ready\n"
    for file in files:
        fd = os.open(file, os.O_RDONLY)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED if cold else os.POSIX_FADV_NORMAL)
        if not cold:
            while os.read(fd, BLOCK_BYTES):
                pass
        os.close(fd)
    for rank in ranks:
        assert rank.stdin is not None
        rank.stdin.write("go\n")
        rank.stdin.flush()
    said = [json.loads(rank.communicate()[0]) for rank in ranks]
    seconds = max(one["seconds"] for one in said)
    # What ranks share is read once from the disk, and counts once in what there is to read.
    wanted = said[0]["used_bytes"]
    return {
        "bytes": wanted,
        "seconds": seconds,
        "rate": wanted / seconds,
        "read_bytes": sum(one["read_bytes"] for one in said),
        "cpu_s": sum(one["cpu_s"] for one in said),
        "extra_bytes": max(one["extra_bytes"] for one in said),
    }


def run_one(folder: Path, kind: str, layout: str, rank: int) -> None:
    """In a process of its own: get ready, wait for a word, load, say what it took as JSON."""
    files = sorted(folder.glob("*.safetensors"))
    if kind in ("raw", "direct", "fresh"):
        used, held = sum(file.stat().st_size for file in files), 0

        def work() -> None:
            read_all(files, direct=kind == "direct", fresh=kind == "fresh")

    else:
        work, used, held = loader(folder, kind, layout, rank)
    print("ready", flush=True)
    sys.stdin.readline()
    read, cpu, memory, started = read_bytes(), time.process_time(), status("VmRSS"), time.perf_counter()
    work()
    spent = time.perf_counter() - started
    extra = status("VmHWM") - memory - held
    answer = {"seconds": spent, "read_bytes": read_bytes() - read, "cpu_s": time.process_time() - cpu}
    print(json.dumps({**answer, "used_bytes": used, "extra_bytes": extra}))


def loader(folder: Path, kind: str, layout: str, rank: int) -> tuple[Callable[[], None], int, int]:
    """(what loads a rank's model, bytes of all tensors that the model uses, bytes that this rank holds)."""
    import torch
    from safetensors import safe_open

    from headrace.config import LayoutConfig
    from headrace.layers.build import Build
    from headrace.mesh import build_mesh
    from headrace.models.registry import build_model, rules_of
    from headrace.weights.checkpoint import Checkpoint, load
    from headrace.weights.rules import bind, expand
    from headrace.weights.source import ModelSource, read_spec

    torch.set_grad_enabled(False)
    source = ModelSource("folder", folder, folder.name)
    spec = read_spec(source)
    degrees = {layout[i : i + 2]: int(layout[i + 2]) for i in range(0, len(layout), 3)}
    degrees["tp"] = max(degrees.get("tp", 1), degrees.get("ep", 1))
    mesh = build_mesh(LayoutConfig(**degrees), spec)
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // mesh.num_ranks))
    build = Build.of_rank(spec, mesh, rank, max_len=64, dtype=torch.bfloat16)
    model, rules = build_model(build), rules_of(spec)
    held = sum(parameter.nbytes for parameter in model.parameters())
    headers = Checkpoint(source, spec).tensors
    used = sum(headers[item.tensor].num_bytes for item in expand(rules, spec))

    def headrace() -> None:
        checkpoint = Checkpoint(source, spec)
        load(checkpoint, bind(model, rules, spec, checkpoint.tensors))

    def safetensors() -> None:
        slots = bind(model, rules, spec, headers)
        for file in sorted({headers[name].file for name in slots}):
            with safe_open(file, "pt") as opened:
                for name in opened.keys():  # noqa: SIM118  # not a mapping
                    for slot in slots.get(name, ()):
                        slot.dest.copy_(opened.get_slice(name)[slot.source] if slot.shape else opened.get_tensor(name))

    return headrace if kind == "headrace" else safetensors, used, held


def read_all(files: list[Path], *, direct: bool, fresh: bool) -> None:
    """Every byte of the files into a few buffers that nobody looks at.

    direct: past the page cache. fresh: into memory that nobody has touched, as weights on a processor go.
    """
    local = threading.local()
    blocks = [(file, at) for file in files for at in range(0, file.stat().st_size, BLOCK_BYTES)]
    whole = memoryview(mmap.mmap(-1, len(blocks) * BLOCK_BYTES)) if fresh else None

    def read(index: int) -> None:
        file, offset = blocks[index]
        if whole is None and not hasattr(local, "buffer"):
            local.buffer = mmap.mmap(-1, BLOCK_BYTES)
        into = local.buffer if whole is None else whole[index * BLOCK_BYTES : (index + 1) * BLOCK_BYTES]
        fd = os.open(file, os.O_RDONLY | (os.O_DIRECT if direct else 0))
        os.preadv(fd, [into], offset)
        os.close(fd)

    with ThreadPoolExecutor(READERS) as pool:
        list(pool.map(read, range(len(blocks))))


def open_index() -> dict[str, float]:
    """What the headers of as many tensors as K2.5's take, the best of three; the files are sparse."""
    from headrace.weights.headers import open_headers
    from headrace.weights.source import ModelSource

    shapes = {"weight_packed": ("I32", [2048, 896], 4), "weight_scale": ("BF16", [2048, 224], 2)}
    shapes["weight_shape"] = ("I64", [2], 8)
    with tempfile.TemporaryDirectory() as name:
        folder, places = Path(name), {}
        kinds = list(shapes.items())
        for shard in range(NUM_SHARDS):
            entries, end = {}, 0
            for i in range(shard, NUM_TENSORS, NUM_SHARDS):
                suffix, (dtype, shape, item) = kinds[i // NUM_SHARDS % len(kinds)]
                tensor = f"language_model.model.layers.{i % 61}.mlp.experts.{i}.gate_proj.{suffix}"
                begin, end = end, end + math.prod(shape) * item
                entries[tensor] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
                places[tensor] = f"{shard}.safetensors"
            header = json.dumps(entries).encode()
            with (folder / f"{shard}.safetensors").open("wb") as file:
                file.write(len(header).to_bytes(8, "little") + header)
                file.truncate(8 + len(header) + end)
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
        times = []
        for _ in range(3):
            started, cpu = time.perf_counter(), time.process_time()
            assert len(open_headers(ModelSource("folder", folder, "m")).tensors) == NUM_TENSORS
            times.append((time.perf_counter() - started, time.process_time() - cpu))
    return {"seconds": min(spent for spent, _ in times), "cpu_s": min(cpu for _, cpu in times)}


def read_bytes() -> int:
    """Bytes that the system has fetched from storage for this process."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith("read_bytes")))


def status(field: str) -> int:
    """A size of this process in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line.split()[1] for line in lines if line.startswith(field)))


def git_commit() -> str:
    """Of this tree, if there is git."""
    try:
        done = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return ""
    return done.stdout.strip()


if __name__ == "__main__":
    main()
