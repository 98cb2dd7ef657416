"""Flags from a tree of frozen dataclasses: every leaf field is a flag, its docstring the help text."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from types import UnionType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from headrace.cli.units import parse_bytes, parse_int, parse_ints, parse_seconds

Config = TypeVar("Config")

PARSERS: Mapping[str, Callable[[str], Any]] = {"kv_memory": parse_bytes}
"""Fields, by name, that are written otherwise than their type says."""
METAVARS: Mapping[str, str] = {
    "trace": "FILE", "out": "FILE", "path": "DIR", "hardware": "FILE", "plot": "FILE", "explain": "LAYOUT",
    "diagnostics": "DIR",
}  # fmt: skip
"""What stands for a field's value in the help text, where neither type nor unit says it."""


@dataclass(frozen=True, kw_only=True)
class Flag:
    """One leaf of the tree."""

    field: str
    """Its name, unique in the tree."""
    type: Any
    """The field's type, resolved."""
    default: Any
    """`dataclasses.MISSING` where a value must be given."""
    help: str

    @property
    def name(self) -> str:
        """`--max-len` for `max_len`; a unit at the end of a field's name is not part of the flag's."""
        return "--" + self.field.removesuffix("_s").replace("_", "-")

    @property
    def metavar(self) -> str | None:
        """What stands for its value in the help text, where the type's name does not say it."""
        if self.field in METAVARS:
            return METAVARS[self.field]
        if self.field.endswith("_s"):
            return "SECONDS"
        return "N,N,..." if self.parse is parse_ints else "BYTES" if self.parse is parse_bytes else None

    def show_default(self, value: Any) -> str | None:
        """The default in the help text, written as on the command line; what is off or unset is not shown."""
        if value is None or value is False or value == ():
            return None
        return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)

    @property
    def parse(self) -> Callable[[str], Any] | None:
        """How its text becomes a value, where the type alone does not say it."""
        if self.field in PARSERS:
            return PARSERS[self.field]
        options = _options(self.type)
        if any(get_origin(option) is tuple and get_args(option)[0] is int for option in options):
            return parse_ints
        if self.field.endswith("_s"):
            return parse_seconds
        # The library's own reading of an integer rounds 1.5.
        return parse_int if int in options else None


def flags_of(config: type[Any]) -> list[Flag]:
    """The flags of a tree, in the order of its fields."""
    flags = list(_walk(config))
    names = [flag.field for flag in flags]
    assert len(set(names)) == len(names), f"a field name occurs twice under {config.__name__}: {names}"
    return flags


def build(config: type[Config], values: Mapping[str, Any]) -> Config:
    """The tree with `values` by field name; what is not named keeps its default. Raises what the classes raise."""
    hints = get_type_hints(config)
    given: dict[str, Any] = {}
    for entry in fields(config):  # type: ignore[arg-type]  # a dataclass, by the callers' word
        if is_dataclass(hints[entry.name]):
            given[entry.name] = build(hints[entry.name], values)
        elif entry.name in values:
            given[entry.name] = values[entry.name]
    return config(**given)


def arguments(config: Any) -> list[str]:
    """The command line that `config` is read from, without what is as by default: the inverse of parsing."""
    words: list[str] = []
    values = _leaves(config)
    for flag in flags_of(type(config)):
        value = values[flag.field]
        if value == flag.default:
            continue
        assert value is not None, f"{flag.name} cannot be unset"
        text = ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
        words.append(flag.name if value is True else f"{flag.name}={text.lower() if value is False else text}")
    return words


def _leaves(config: Any) -> dict[str, Any]:
    """The tree's values by field name."""
    found: dict[str, Any] = {}
    for entry in fields(config):
        value = getattr(config, entry.name)
        found |= _leaves(value) if is_dataclass(value) else {entry.name: value}
    return found


def _options(annotation: Any) -> tuple[Any, ...]:
    """The members of a union, or the type itself."""
    return get_args(annotation) if isinstance(annotation, UnionType) else (annotation,)


def _walk(config: type[Any]) -> Iterator[Flag]:
    hints, docs = get_type_hints(config), _field_docs(config)
    for entry in fields(config):
        if is_dataclass(hints[entry.name]):
            yield from _walk(hints[entry.name])
        else:
            yield Flag(field=entry.name, type=hints[entry.name], default=_default(entry), help=docs.get(entry.name, ""))


def _default(entry: Field[Any]) -> Any:
    return entry.default if entry.default_factory is MISSING else entry.default_factory()


def _field_docs(config: type[Any]) -> dict[str, str]:
    """The string below each field: Python itself drops it."""
    (definition,) = ast.parse(textwrap.dedent(inspect.getsource(config))).body
    assert isinstance(definition, ast.ClassDef)
    docs: dict[str, str] = {}
    for above, below in zip(definition.body, definition.body[1:], strict=False):
        if isinstance(above, ast.AnnAssign) and isinstance(above.target, ast.Name) and isinstance(below, ast.Expr):
            text = below.value.value if isinstance(below.value, ast.Constant) else None
            if isinstance(text, str):
                docs[above.target.id] = " ".join(text.split())
    return docs
