"""Measures headrace on GPUs: `python -m bench.gpu kernels NAME...`, `all_reduce`, `engine`, `rank`, `table` of records.

`rank` measures what one GPU of a layout computes, alone. `engine` starts each layout once and measures decode at every
count of requests, then prefill; results are appended to a JSON-lines file cell by cell, and cells that are there
already are skipped.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from headrace.errors import UserError

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "bench" / "results"
ENGINE, KERNELS = RESULTS / "gpu.jsonl", RESULTS / "gpu-kernels.jsonl"


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns its exit code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if given[:1] == ["kernels"]:
        from bench.kernel_cells.__main__ import main as kernels

        return kernels(given[1:])
    if given[:1] == ["all_reduce"]:
        from bench.all_reduce import main as all_reduce

        return all_reduce(given[1:])
    parser = argparse.ArgumentParser(prog="python -m bench.gpu", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("kernels", help="cells of bench/kernel_cells (see its own --help)")
    commands.add_parser("all_reduce", help="small sums over GPUs, beside NCCL's (see its own --help)")
    _engine_flags(commands.add_parser("engine", help="decode and prefill rates of layouts"))
    _rank_flags(commands.add_parser("rank", help="steps of one rank of a layout, alone on one GPU"))
    table = commands.add_parser("table", help="Markdown of what was recorded")
    table.add_argument("--engine", type=Path, nargs="*", default=[ENGINE], metavar="FILE")
    table.add_argument("--kernels", type=Path, nargs="*", default=[KERNELS], metavar="FILE")
    options = parser.parse_args(given)
    try:
        if options.command == "engine":
            return _engine(options)
        if options.command == "rank":
            return _rank(options)
    except UserError as error:
        print(f"bench.gpu {options.command}: {error}", file=sys.stderr)
        return 2
    from bench.gpu_table import read_rows, tables

    print(
        tables(
            [row for path in options.engine for row in read_rows(path)],
            [row for path in options.kernels for row in read_rows(path)],
        )
    )
    return 0


def _engine_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--model", type=Path, default=ROOT / "bench" / "configs" / "k2-slice", help="folder with a config.json")
    add("--layout", default="pp2", help="pp2, tp2, ep2, pp2ep2; several with commas between")
    add("--split", default="auto", help="auto or layers a stage, 6,2; several with slashes between: auto/5,3/4,4")
    add(
        "--requests",
        default="1,2,8,32,64,128,256",
        help="counts, or fit: what the KV cache and max_running hold (%(default)s)",
    )
    add("--prompt", type=int, default=128)
    add("--short", type=int, default=32, help="output length that is subtracted (%(default)s)")
    add("--output", type=int, default=96, help="tokens by which the longer output exceeds it (%(default)s)")
    add("--prefill", type=int, default=8192, help="prompt length of the prefill cell, 0 for none (%(default)s)")
    add("--repeats", type=int, default=3)
    add("--device", choices=("cuda", "cpu"), default="cuda")
    add("--weights", choices=("random", "checkpoint"), default="random")
    add("--routing", choices=("uniform", "model"), default="uniform")
    add("--max-len", type=int, default=16384, help="longest request (%(default)s)")
    add("--option", action="append", default=[], metavar="NAME=VALUE", help="any other option of LLM: graphs=false")
    add("--p2p", choices=("on", "off"), default="on", help="off: NCCL_P2P_DISABLE=1 for the workers")
    add("--backend", default="", help="what every stage must say it ran; by default triton+graphs, on a CPU any")
    add("--profile", type=Path, metavar="DIR", help="HEADRACE_PROFILE for the workers")
    add("--note", default="", help="part of what a cell is recorded under, to tell versions apart")
    add("--out", type=Path, default=ENGINE, metavar="FILE")
    add("--again", action="store_true", help="measure cells that are there already")
    add("--budget", type=float, default=math.inf, metavar="SECONDS", help="start nothing that might end after this")
    add("--copy", type=float, default=4.3, metavar="TB/S", help="bandwidth that floors count with (%(default)s)")
    add("--product", type=float, default=788.0, metavar="TFLOPS", help="bf16 product rate of one GPU (%(default)s)")


def _rank_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--model", type=Path, default=ROOT / "bench" / "configs" / "k2", help="folder with a config.json")
    add("--layout", default="pp8", help="pp8, tp8, ep8, pp4ep2, ...: of any number of GPUs")
    add("--split", default="auto", help="auto or layers a stage, 8,8,8,...")
    add("--stage", type=int, default=1, help="whose first rank is measured (%(default)s)")
    add("--rows", default="1,4,16,32", help="decode rows of a step (%(default)s)")
    add("--prompt", type=int, default=128, help="positions before them (%(default)s)")
    add("--prefill", type=int, default=8192, help="tokens of a prompt, 0 for none (%(default)s)")
    add("--repeats", type=int, default=5)
    add("--device", choices=("cuda", "cpu"), default="cuda")
    add("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    add("--note", default="", help="part of what a record goes by, to tell versions apart")
    add("--out", type=Path, default=ENGINE, metavar="FILE")


def _rank(options: argparse.Namespace) -> int:
    from bench.gpu_floor import split_of
    from bench.gpu_rank import RankPlan, measure_rank

    return measure_rank(
        RankPlan(
            model=options.model,
            layout=options.layout,
            split=split_of(options.split),
            stage=options.stage,
            rows=[_count("--rows", one) for one in options.rows.split(",") if one],
            prompt=options.prompt,
            prefill=options.prefill,
            repeats=options.repeats,
            device=options.device,
            dtype=options.dtype,
            backend="triton+graphs" if options.device == "cuda" else "any",
            out=options.out,
            note=options.note,
        )
    )


def _engine(options: argparse.Namespace) -> int:
    from bench.gpu_engine import FIT, Plan, layout_of, measure_all

    layouts = options.layout.split(",")
    for layout in layouts:
        try:
            layout_of(layout)
        except ValueError as error:
            raise UserError(f"--layout: {error}") from None
    more = dict(_option(text) for text in options.option)
    return measure_all(
        Plan(
            model=options.model,
            layouts=layouts,
            splits=options.split.split("/"),
            requests=[FIT if one == "fit" else _count("--requests", one) for one in options.requests.split(",") if one],
            prompt=options.prompt,
            short=options.short,
            output=options.output,
            prefill=options.prefill,
            repeats=options.repeats,
            device=options.device,
            p2p=options.p2p == "on",
            backend=options.backend or ("any" if options.device == "cpu" else "triton+graphs"),
            options={"weights": options.weights, "routing": options.routing, "max_len": options.max_len} | more,
            out=options.out,
            again=options.again,
            budget_s=options.budget,
            bytes_per_s=options.copy * 1e12,
            flops_per_s=options.product * 1e12,
            profile=options.profile,
            note=options.note,
        )
    )


def _count(flag: str, text: str) -> int:
    """A number of at least one."""
    if not text.isdecimal() or int(text) < 1:
        raise UserError(f"{flag} {text}: must be whole numbers of at least 1")
    return int(text)


def _option(text: str) -> tuple[str, Any]:
    """NAME=VALUE, the value as JSON has it where it can be read so."""
    name, _, value = text.partition("=")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value


if __name__ == "__main__":
    sys.exit(main())
