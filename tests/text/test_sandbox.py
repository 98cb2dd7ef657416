from __future__ import annotations

import threading
from datetime import UTC, datetime

import pytest
from jinja2.exceptions import SecurityError, UndefinedError

from headrace.text import sandbox
from headrace.text.sandbox import Sandbox, TooMuchWork


def run(source: str, **variables: object) -> str:
    box = Sandbox(lambda: datetime(2031, 2, 3, tzinfo=UTC))
    return box.render(box.prepare(source), {"r": range(90_000), **variables})


@pytest.mark.parametrize(
    "source",
    [
        "{{ ().__class__.__bases__[0].__subclasses__() }}",
        "{{ ''['__class__'].mro() }}",
        "{{ x|attr('__class__') }}{{ (x|attr('__class__')).mro() }}",
        "{{ raise_exception.__globals__['__builtins__'] }}",
        "{{ strftime_now.__globals__.sys }}",
        "{{ namespace.__init__.__globals__ }}",
        "{{ dict.__class__.__init__.__globals__ }}",
        "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
        "{{ joiner.__init__.__globals__ }}",
        "{{ '{0.__class__.__init__.__globals__}'.format(strftime_now) }}",
        "{% set f = '{0.__class__}'.format %}{{ f(x) }}{{ f(x).nothing.more }}",
        "{% set ns = namespace() %}{% set ns.__class__ = 1 %}",
        "{{ namespace(_private=1) }}",
        "{{ [].append(1) }}",
        "{{ {}.update(a=1) }}",
        "{{ x.clear() }}",
        "{{ self._TemplateReference__context.environment }}",
        "{{ lipsum() }}",
    ],
)
def test_no_way_out(source: str) -> None:
    with pytest.raises((SecurityError, UndefinedError)):
        run(source, x=[1])


@pytest.mark.parametrize("source", ["{% include 'x' %}", "{% import 'x' as y %}{{ y }}", "{% extends 'x' %}"])
def test_no_other_file_is_read(source: str) -> None:
    with pytest.raises(TypeError, match="no loader"):
        run(source)


@pytest.mark.parametrize(
    "source",
    [
        "{% for a in r %}{% for b in r %}{% for c in r %}{% endfor %}{% endfor %}{% endfor %}",
        "{% for a in 'x' * 2000000 %}{% endfor %}",
        "{% macro f() %}{% for a in r %}{% endfor %}{% endmacro %}{% for a in r %}{{ f() }}{% endfor %}",
        "{% macro f() %}{% endmacro %}" + "{% for a in r %}{{ " + "f() ~ " * 20 + "'' }}{% endfor %}",
        "{% for a in r recursive %}{{ loop(r) }}{% endfor %}",
        "{% for a in r %}{% generation %}{% for b in r %}{% endfor %}{% endgeneration %}{% endfor %}",
    ],
)
def test_work_without_end_is_stopped(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "MOST_STEPS", 20_000)
    with pytest.raises((TooMuchWork, RecursionError)):
        run(source)


@pytest.mark.parametrize(
    "source",
    [
        "{{ 'a' * 10000000000 }}",
        "{{ 10000000000 * 'a' }}",
        "{{ [1] * 10000000000 }}",
        "{{ 10 ** 100000 }}",
        "{% set x = 7 ** 1000 %}{{ x * x * x * x * x }}",
        "{% set x = namespace(v='aaaaaaaaaa') %}{% for i in range(99) %}{% set x.v = x.v ~ x.v %}{% endfor %}",
        "{% set x = namespace(v='aaaaaaaaaa') %}{% for i in range(99) %}{% set x.v = x.v + x.v %}{% endfor %}",
        "{% set x = namespace(v=[1]) %}{% for i in range(99) %}{% set x.v = x.v + x.v %}{% endfor %}",
        "{% for i in r %}{{ 'a' * 1000 }}{% endfor %}",
        "{{ range(10000000000) | list }}",
    ],
)
def test_values_without_bound_are_refused(source: str) -> None:
    with pytest.raises((TooMuchWork, OverflowError)):
        run(source)


def test_recursion_ends_as_an_error() -> None:
    with pytest.raises(RecursionError):
        run("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}")


def test_steps_are_counted_for_each_rendering_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "MOST_STEPS", 100)
    box = Sandbox(lambda: datetime(2031, 2, 3, tzinfo=UTC))
    template = box.prepare("{% for i in range(80) %}x{% endfor %}")
    texts: list[str] = []
    threads = [threading.Thread(target=lambda: texts.append(box.render(template, {}))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert texts == ["x" * 80] * 4


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{{ 2 * 3 }} {{ 2 ** 10 }} {{ 1.5 * 2 }} {{ 2 ** -1 }} {{ 7 + 1 }}", "6 1024 3.0 0.5 8"),
        ("{{ 'ab' * 2 }}{{ 'a' + 'b' }}{{ 'a' ~ 1 ~ none }}", "abababa1None"),
        ("{{ ([1] + [2]) | join(',') }}", "1,2"),
        ("{% for i in range(5) %}{% if i == 1 %}{% continue %}{% endif %}{{ i }}{% endfor %}", "0234"),
        ("{% for i in range(5) %}{% if i == 3 %}{% break %}{% endif %}{{ i }}{% endfor %}", "012"),
        ("{% for i in [] %}x{% else %}none{% endfor %}", "none"),
        ("{% for i in [3, 4] %}{{ loop.index }}{{ loop.last }}{% endfor %}", "1False2True"),
        ("{% set ns = namespace(a=1, b=2) %}{% set ns.a = 5 %}{{ ns.a }}{{ ns.b }}", "52"),
        ("{{ dict(a=1).a }}{% for k, v in {'x': 1} | items %}{{ k }}{{ v }}{% endfor %}", "1x1"),
        ("{% macro m(a, b='z') %}{{ a }}{{ b }}{% endmacro %}{{ m('y') }}{{ m(1, b=2) }}", "yz12"),
        ("{% macro m() %}<{{ caller() }}>{% endmacro %}{% call m() %}in{% endcall %}", "<in>"),
        ("  {% if true %}\n  x\n  {% endif %}\ny\n", "  x\ny"),
        ("{% generation %}a{{ 1 }}{% endgeneration %}b", "a1b"),
        ("{{ '<&>' }}{{ {'a': '<é>'} | tojson }}", '<&>{"a": "<é>"}'),
        ("{{ strftime_now('%Y-%m-%d') }}", "2031-02-03"),
        ("{{ missing }}{{ missing is defined }}", "False"),
    ],
)
def test_what_templates_use_works(source: str, text: str) -> None:
    assert run(source) == text
