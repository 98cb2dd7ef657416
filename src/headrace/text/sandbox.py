"""Where chat templates run: Jinja's immutable sandbox, with what templates expect of it and bounds on their work.

Bounded: steps (turns of loops and calls of macros), depth, the size of the output, and strings, lists and numbers made
by `+ * ** ~`. Not bounded: what a single filter or method makes (`center`, `join`, `replace`, `%` with a width), and
the time one of them takes. A template comes with the checkpoint, never with a request.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

MOST_STEPS = 1_000_000
"""About a second of work; a template takes a few steps a message."""
MOST_CHARS = 32 * 2**20
MOST_ITEMS = 1_000_000
MOST_BITS = 4096

_steps_left: ContextVar[Iterator[int] | None] = ContextVar("steps_left", default=None)


class Refusal(TemplateError):
    """A template called `raise_exception`; the message is its own."""


class TooMuchWork(SecurityError):
    """A template went past a bound."""


def take_step() -> None:
    """Count one turn of a loop or one call of a macro."""
    left = _steps_left.get()
    if left is not None and next(left, None) is None:
        raise TooMuchWork(f"more than {MOST_STEPS} steps")


@contextmanager
def _counted_steps() -> Iterator[None]:
    token = _steps_left.set(iter(range(MOST_STEPS)))
    try:
        yield
    finally:
        _steps_left.reset(token)


def _check_size(size: int, most: int = MOST_CHARS) -> None:
    if size > most:
        raise TooMuchWork(f"a value of size {size}; at most {most} is allowed")


def _most(sequence: Any) -> int:
    return MOST_CHARS if isinstance(sequence, str) else MOST_ITEMS


class _Generator(CodeGenerator):
    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:  # noqa: N802  # Jinja's name
        # Jinja joins without asking the sandbox.
        self.write("environment.join((")
        for part in node.nodes:
            self.visit(part, frame)
            self.write(", ")
        self.write("))")


class _Generation(Extension):
    """`{% generation %}...{% endgeneration %}` marks the assistant's text for training; it shows what it holds."""

    tags = {"generation"}  # noqa: RUF012  # Jinja's attribute

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_show"), [], [], body).set_lineno(line)

    def _show(self, caller: Macro) -> str:
        return str(caller())


class _Namespace(Namespace):
    """Jinja's namespace, without names that Python's internals use."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # `self` may be a name in the namespace
        self, args = args[0], args[1:]
        names = dict(*args, **kwargs)
        for name in names:
            _refuse_private(name)
        Namespace.__init__(self, names)

    def __setitem__(self, name: str, value: Any) -> None:
        _refuse_private(name)
        Namespace.__setitem__(self, name, value)


def _refuse_private(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace may not hold {name!r}")


class _Dict:
    """`dict` as templates use it, instead of the class with all its attributes."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)


class Sandbox(ImmutableSandboxedEnvironment):
    """Compiles templates so that they count their steps and may grow values up to a bound only."""

    intercepted_binops = frozenset({"+", "*", "**"})
    code_generator_class = _Generator

    def __init__(self, now: Callable[[], datetime]) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation])
        self.take_step = take_step
        self.filters["tojson"] = _to_json
        self.globals |= {
            "raise_exception": _raise_exception,
            "strftime_now": lambda format: now().strftime(format),  # noqa: A006  # the name templates may use
            "dict": _Dict(),
            "namespace": _Namespace,
        }
        del self.globals["lipsum"]

    def prepare(self, source: str) -> jinja2.Template:
        """Compile a template; raises `jinja2.TemplateSyntaxError`."""
        tree = self.parse(source)
        repeated: list[nodes.For | nodes.Macro] = [*tree.find_all(nodes.For), *tree.find_all(nodes.Macro)]
        for node in repeated:
            step = nodes.ExprStmt(nodes.Call(nodes.EnvironmentAttribute("take_step"), [], [], None, None))
            node.body.insert(0, step.set_lineno(node.lineno).set_environment(self))
        return jinja2.Template.from_code(self, self.compile(tree), self.make_globals(None))

    def render(self, template: jinja2.Template, variables: Mapping[str, Any]) -> str:
        """Run a template; raises what its code raises, `TooMuchWork` included."""
        parts, size = [], 0
        with _counted_steps():
            for part in template.generate(variables):
                size += len(part)
                _check_size(size)
                parts.append(part)
        return "".join(parts)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Check how large the result of `left operator right` would be, then make it."""
        numbers = isinstance(left, int | float) and isinstance(right, int | float)
        if isinstance(left, int) and isinstance(right, int):
            if operator == "**":
                _check_size(left.bit_length() * max(right, 0), MOST_BITS)
            elif operator == "*":
                _check_size(left.bit_length() + right.bit_length(), MOST_BITS)
        elif operator == "*" and not numbers:
            for sequence, count in ((left, right), (right, left)):
                if isinstance(count, int) and hasattr(sequence, "__len__"):
                    _check_size(len(sequence) * max(count, 0), _most(sequence))
        elif operator == "+" and hasattr(left, "__len__") and hasattr(right, "__len__"):
            _check_size(len(left) + len(right), _most(left))
        return super().call_binop(context, operator, left, right)

    def join(self, parts: Iterable[Any]) -> str:
        """What `~` makes."""
        texts = [str(part) for part in parts]
        _check_size(sum(map(len, texts)))
        return "".join(texts)


def _raise_exception(message: Any) -> None:
    raise Refusal(str(message))


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own escapes HTML.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
