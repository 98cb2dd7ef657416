"""The `headrace` command: commands, their flags, and how an error is said."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Sequence
from dataclasses import MISSING, dataclass, replace
from typing import Annotated, Any, Literal, NoReturn, get_args, get_origin

from cyclopts import (
    App,
    CoercionError,
    CycloptsError,
    MissingArgumentError,
    Parameter,
    RepeatArgumentError,
    UnknownOptionError,
    UnusedCliTokensError,
)

import headrace
from headrace.cli.flags import Flag, arguments, build, flags_of
from headrace.config import ServeConfig
from headrace.errors import Fault, UserError

ENVIRONMENT = {"api_key": "HEADRACE_API_KEY"}
"""Fields, by name, whose value may come from the environment: a command line can be read by every user."""


@dataclass(frozen=True)
class Command:
    """One command. Its modules are imported when it is chosen."""

    config: Callable[[], type[Any]]
    call: Callable[[Any], int]
    help: str
    positional: tuple[str, ...] = ()
    """Fields given by place, not by flag."""


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Run the command line and exit: 0 done or stopped as asked, 1 a fault, 2 the user's error."""
    sys.exit(run(sys.argv[1:] if argv is None else argv))


def run(argv: Sequence[str]) -> int:
    """Run one command line and return its exit code. An error is one line on standard error."""
    chosen = argv[0] if argv and argv[0] in COMMANDS else None
    app = make_app(chosen)
    name = f"headrace {chosen}" if chosen else "headrace"
    try:
        code = app(argv, exit_on_error=False, print_error=False, result_action="return_value")
    except CycloptsError as error:
        return _fail(name, _explain(error), 2)
    except UserError as error:
        return _fail(name, str(error), 2)
    except Fault as error:
        return _fail(name, str(error), 1)
    except KeyboardInterrupt:
        return 130
    return code if isinstance(code, int) else 0


def make_app(chosen: str | None) -> App:
    """The commands; only the chosen one gets the flags of its configuration, the others' modules are not imported."""
    app = App(
        name="headrace",
        help="Serve large language models over pipeline, tensor and expert parallelism.",
        version=lambda: headrace.__version__,
        # The default, markdown, takes a fifth of a second to import.
        help_format="plaintext",
        version_format="plaintext",
    )
    for name, command in COMMANDS.items():
        app.command(_function(command) if name == chosen else lambda: 0, name=name, help=command.help)
    return app


def _serve(config: ServeConfig) -> int:
    from headrace.supervise.supervisor import serve

    return serve(config)


def _bench(config: Any) -> int:
    from headrace.bench.run import bench

    return bench(config)


def _bench_config() -> type[Any]:
    from headrace.bench.config import BenchConfig

    return BenchConfig


def _simulate(config: Any) -> int:
    from headrace.plan.simulate import simulate

    return simulate(config)


def _simulate_config() -> type[Any]:
    from headrace.plan.config import SimulateConfig

    return SimulateConfig


def _probe(config: Any) -> int:
    from headrace.probe.run import probe

    return probe(config)


def _probe_config() -> type[Any]:
    from headrace.probe.config import ProbeConfig

    return ProbeConfig


def _wait(config: Any) -> int:
    from headrace.wait.run import wait

    return wait(config)


def _wait_config() -> type[Any]:
    from headrace.wait.config import WaitConfig

    return WaitConfig


def _service(config: Any) -> int:
    from headrace.service.run import service

    # The model is given by place, and no secret on a command line.
    serve = replace(config.serve, http=replace(config.serve.http, api_key=None))
    engine = replace(serve.engine, model=replace(serve.engine.model, model=None))
    return service(config, arguments(replace(serve, engine=engine)))


def _service_config() -> type[Any]:
    from headrace.service.config import ServiceConfig

    return ServiceConfig


def _doctor(config: Any) -> int:
    from headrace.doctor.run import doctor

    return doctor(config)


def _doctor_config() -> type[Any]:
    from headrace.doctor.config import DoctorConfig

    return DoctorConfig


def _plan(config: Any) -> int:
    from headrace.plan.run import plan
    from headrace.supervise.here import look

    return plan(config, look)


def _plan_config() -> type[Any]:
    from headrace.plan.options import PlanConfig

    return PlanConfig


COMMANDS = {
    "serve": Command(
        lambda: ServeConfig,
        _serve,
        "Serve a model over HTTP. MODEL is a folder, a .gguf file or a hub id; without it, a small embedded model.",
        ("model",),
    ),
    "bench": Command(
        _bench_config, _bench, "Measure an OpenAI-compatible server: time to first token, throughput, errors."
    ),
    "plan": Command(
        _plan_config,
        _plan,
        "Say which layouts of a model fit on a machine and how fast each would be, before a byte is loaded.",
        ("model",),
    ),
    "simulate": Command(
        _simulate_config,
        _simulate,
        "Serve requests in virtual time on hardware that need not be there: throughput, latencies, idle stages.",
        ("model",),
    ),
    "probe": Command(
        _probe_config,
        _probe,
        "Measure this machine: memory, products, links between GPUs, disk. What is wrong is said, the rest is a file.",
    ),
    "service": Command(
        _service_config,
        _service,
        "Run a model as a service of systemd: install, remove, start, stop, restart, status or logs.",
        ("action", "name", "model"),
    ),
    "wait": Command(
        _wait_config, _wait, "Wait until an OpenAI-compatible engine answers, and say why where it does not."
    ),
    "doctor": Command(
        _doctor_config, _doctor, "Name known causes of a failure in a log or a folder of diagnostics.", ("path",)
    ),
}


def _function(command: Command) -> Callable[..., int]:
    """A function with the flags of the command as its signature, which is what the library reads."""
    config = command.config()
    places = {field: place for place, field in enumerate(command.positional)}
    flags = sorted(flags_of(config), key=lambda flag: places.get(flag.field, len(places)))

    def function(*args: Any, **values: Any) -> int:
        return command.call(build(config, dict(zip(command.positional, args, strict=False)) | values))

    parameters = [_parameter(flag, flag.field in command.positional) for flag in flags]
    function.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # functions take attributes
    return function


def _parameter(flag: Flag, positional: bool) -> inspect.Parameter:
    parameter = Parameter(
        name=None if positional else flag.name,
        help=flag.help,
        metavar=flag.metavar,
        env_var=ENVIRONMENT.get(flag.field),
        negative=f"--no-{flag.name[2:]}" if flag.default is True else "",
        converter=_converter(flag),
        # The text of a list, and of a size, is one argument.
        n_tokens=1 if flag.parse else None,
        show_default=flag.show_default,
    )
    return inspect.Parameter(
        flag.field,
        inspect.Parameter.POSITIONAL_ONLY if positional else inspect.Parameter.KEYWORD_ONLY,
        default=inspect.Parameter.empty if flag.default is MISSING else flag.default,
        annotation=Annotated[flag.type, parameter],
    )


def _converter(flag: Flag) -> Callable[[Any, Sequence[Any]], Any] | None:
    parse = flag.parse
    return None if parse is None else lambda _type, tokens: parse(tokens[0].value)


def _explain(error: CycloptsError) -> str:
    if isinstance(error, MissingArgumentError) and error.argument is not None:
        return f"{error.argument.name}: needs a value"
    if isinstance(error, UnknownOptionError):
        return f"{error.token.keyword or error.token.value}: unknown flag; --help lists them"
    if isinstance(error, RepeatArgumentError):
        return f"{error.token.keyword}: given more than once"
    if isinstance(error, CoercionError) and error.argument is not None and error.token is not None:
        return f"{error.argument.name} {error.token.value}: {_wanted(error)}"
    if isinstance(error, UnusedCliTokensError) and error.unused_tokens:
        return f"{error.unused_tokens[0]}: one argument too many"
    return " ".join(str(error).split())


def _wanted(error: CoercionError) -> str:
    if isinstance(error.__cause__, UserError):
        return str(error.__cause__)
    annotation = error.argument.hint if error.argument is not None else None
    if get_origin(annotation) is Literal:
        return f"must be one of {', '.join(get_args(annotation))}"
    return "takes no value" if annotation is bool else "must be a number"


def _fail(name: str, message: str, code: int) -> int:
    print(f"{name}: {message}", file=sys.stderr)
    return code
