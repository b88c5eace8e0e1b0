"""The `gradgate` command. Exit codes: 0 pass, 1 fail, 2 inconclusive, 3 error (also for bad usage), 130 interrupted.

Every command imports what it needs when it runs, so that `gradgate serve` loads neither torch nor ray and `--help`
loads nothing. It holds no logic of its own: it parses, calls, and prints.
"""

from __future__ import annotations

import os
import signal
import sys
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from service import key_commands
from workers.contract import Device, Dtype, Launcher, Normalization, OrderingName, ProbeName, Schedule
from workers.faults import DRILL_FORM

if TYPE_CHECKING:
    from service.settings import Settings

EXIT_PASS, EXIT_FAIL, EXIT_INCONCLUSIVE, EXIT_ERROR, EXIT_INTERRUPTED = 0, 1, 2, 3, 130

app = typer.Typer(
    name="gradgate",
    help="May a large training run start on this cluster? Gradgate answers with an experiment.",
    epilog="Exit codes: 0 pass, 1 fail, 2 inconclusive, 3 error.",
    add_completion=False,
    pretty_exceptions_enable=False,
)

app.add_typer(key_commands.app, name="keys")

ApiKey = Annotated[
    str | None, typer.Option(envvar="GRADGATE_API_KEY", help="A key of `gradgate keys create`.", show_default=False)
]
Json = Annotated[bool, typer.Option("--json", help="Print the API's object; progress goes to standard error.")]
Dp = Annotated[int | None, typer.Option(help="Data-parallel replicas.", show_default="2")]
Pp = Annotated[int | None, typer.Option(help="Pipeline ranks.", show_default="2")]
Tp = Annotated[int | None, typer.Option(help="Tensor-parallel ranks.", show_default="1")]
Vpp = Annotated[int | None, typer.Option(help="Model chunks a rank; 2 or more are interleaved.", show_default="1")]
Overlap = Annotated[bool, typer.Option("--overlap", help="The gradient sync starts in the midst of backward.")]
BucketSize = Annotated[int | None, typer.Option(help="Elements at which a bucket closes, with --overlap.")]
Model = Annotated[
    str | None,
    typer.Option(
        help="A known model, or sizes as vocab_size=..,hidden_size=..,num_layers=..,num_heads=..,seq_len=..",
        show_default="tiny",
    ),
]


@app.command()
def up() -> int:
    """Run everything on this machine: Postgres, Ray, serve and dispatch. Stays up until Ctrl-C."""
    from service.stack import run_stack
    from service.terminal import open_console

    console = open_console()
    raise_on_signals()
    try:
        with run_stack(load_settings(), lambda text: console.print(text, style="dim")) as (stack, addresses):
            console.print(f"Gradgate is up:   {addresses.api_url}")
            console.print(f"API description:  {addresses.api_url}/openapi.json")
            console.print(f"Ray:              {addresses.ray_address}")
            console.print(f"Data and logs:    {addresses.home}")
            console.print(f"Try:              gradgate validate --url {addresses.api_url}")
            console.print("Ctrl-C stops it.")
            stack.wait()
    except KeyboardInterrupt:
        console.print("Stopped; nothing is left running.")
    return EXIT_PASS


@app.command()
def demo() -> int:
    """Start everything, run one validation with defaults over HTTP, show what it found, stop everything."""
    from service.demo import run_demo

    raise_on_signals()
    return exit_code(run_demo(load_settings()))


@app.command()
def serve() -> None:
    """Run the HTTP API."""
    settings = load_settings(needs_database=True)
    from service.server import serve

    serve(settings)


@app.command()
def dispatch() -> None:
    """Run the dispatcher: takes queued validations and drives gangs on Ray."""
    settings = load_settings(needs_database=True)
    from service.execution.dispatcher import run

    run(settings)


@app.command()
def migrate() -> int:
    """Bring the database of GRADGATE_DATABASE_URL to this version's tables."""
    url = load_settings(needs_database=True).database_url
    assert url is not None
    from service.storage.migration import upgrade

    upgrade(url)
    typer.echo("The database is up to date.")
    return EXIT_PASS


@app.command(hidden=True)
def postgres(
    ready_file: Annotated[Path, typer.Option(help="Where to write the URL once it answers.")],
) -> int:
    """Run the embedded Postgres of GRADGATE_HOME until SIGTERM; `gradgate up` starts this."""
    from service.stack import keep_postgres

    raise_on_signals()
    keep_postgres(load_settings().home, ready_file)
    return EXIT_PASS


@app.command()
def validate(
    url: Annotated[
        str | None, typer.Option(envvar="GRADGATE_URL", help="The server.", show_default="http://127.0.0.1:8470")
    ] = None,
    api_key: ApiKey = None,
    cluster: Annotated[str | None, typer.Option(help="The cluster to run on.", show_default="default")] = None,
    dp: Dp = None,
    pp: Pp = None,
    tp: Tp = None,
    vpp: Vpp = None,
    model: Model = None,
    micro_batch_size: Annotated[int | None, typer.Option(help="Sequences a microbatch.")] = None,
    num_microbatches: Annotated[int | None, typer.Option(help="Microbatches a step; at least pp.")] = None,
    schedule: Annotated[Schedule | None, typer.Option(help="Order of microbatches.", show_default="1f1b")] = None,
    overlap: Overlap = False,
    bucket_size: BucketSize = None,
    average_in_collective: Annotated[
        bool, typer.Option("--average-in-collective", help="Instead of scaling before each sum.")
    ] = False,
    normalization: Annotated[
        Normalization | None, typer.Option(help="What gradients are divided by.", show_default="microbatches")
    ] = None,
    probe: Annotated[list[ProbeName] | None, typer.Option(help="Repeat for several.", show_default="both")] = None,
    ordering: Annotated[
        list[OrderingName] | None, typer.Option(help="Repeat for several.", show_default="buggy, fixed, own_bucket")
    ] = None,
    steps: Annotated[int | None, typer.Option(help="Training steps a trial.", show_default="2")] = None,
    repeats: Annotated[int | None, typer.Option(help="Repeats, each with its own seed.", show_default="1")] = None,
    dtype: Annotated[Dtype | None, typer.Option(help="Of the gpt probe.", show_default="float32")] = None,
    grad_reduce_dtype: Annotated[
        Dtype | None, typer.Option(help="In what gradients are summed over dp.", show_default="float32")
    ] = None,
    device: Annotated[Device | None, typer.Option(help="Where ranks compute.", show_default="auto")] = None,
    launcher: Annotated[Launcher | None, typer.Option(help="Who starts the ranks.", show_default="pool")] = None,
    stack: Annotated[
        str | None, typer.Option(help="Put an installed stack under test, too.", show_default="reference")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Of weights and data.", show_default="0")] = None,
    deadline_s: Annotated[int | None, typer.Option(help="Time limit once taken up.", show_default="120")] = None,
    label: Annotated[list[str] | None, typer.Option(help="NAME=VALUE; repeat for several.")] = None,
    drill: Annotated[
        str | None, typer.Option(help=f"Inject a fault: {DRILL_FORM}. Never counts for admission.")
    ] = None,
    tables: Annotated[bool, typer.Option("--tables", help="Show gradients and divergence by rank, too.")] = False,
    json: Json = False,
) -> int:
    """Run one validation on a running server, follow it, and print its verdict."""
    from service.client import GradgateClient
    from service.options import build_request
    from service.progress import follow, print_details, print_json, print_outcome
    from service.terminal import open_console

    request = build_request(
        cluster=cluster,
        mesh={"dp": dp, "pp": pp, "tp": tp, "vpp": vpp},
        model=model,
        batch={"micro_batch_size": micro_batch_size, "num_microbatches": num_microbatches},
        schedule=schedule,
        overlap=overlap or None,
        bucket_size=bucket_size,
        average_in_collective=average_in_collective or None,
        normalization=normalization,
        probes=probe,
        orderings=ordering,
        steps=steps,
        repeats=repeats,
        dtype=dtype,
        grad_reduce_dtype=grad_reduce_dtype,
        device=device,
        launcher=launcher,
        stack=stack,
        seed=seed,
        deadline_s=deadline_s,
        labels=label,
        drill=drill,
    )
    with GradgateClient(url or default_url(), api_key=api_key) as client:
        validation = follow(client, request, open_console(stderr=json))
        if json:
            print_json(validation)
        else:
            if tables:
                print_details(client, validation, open_console())
            print_outcome(validation, open_console())
    return exit_code(validation)


@app.command()
def predict(
    model: Model = None,
    dp: Dp = None,
    pp: Pp = None,
    tp: Tp = None,
    vpp: Vpp = None,
    version: Annotated[
        list[str] | None, typer.Option(help="Megatron-LM version or commit; repeat for several.", show_default="all")
    ] = None,
    ordering: Annotated[list[OrderingName] | None, typer.Option(help="Predict for an ordering instead.")] = None,
    overlap: Overlap = False,
    bucket_size: BucketSize = None,
    sweep: Annotated[bool, typer.Option("--sweep", help="Over all known models, or one, and many dp.")] = False,
    sweep_dp: Annotated[
        str | None, typer.Option(help="dp sizes of a sweep, as 2,4,8.", show_default="2 to 1024")
    ] = None,
    vary: Annotated[
        str | None, typer.Option(help="Sweep one size of the model: NAME=START:STOP[:STEP], STOP included.")
    ] = None,
    json: Json = False,
) -> int:
    """Say from parameter shapes alone which elements of the tied weight come out wrong. Needs no server."""
    from service.forecast import choose_overlap, forecast, forecast_table
    from service.grid import choose_grid, forecast_grid, grid_table
    from service.options import parse_model
    from service.progress import print_json
    from service.terminal import open_console

    sync = choose_overlap(overlap, bucket_size)
    widths = choose_grid(sweep, sweep_dp, {"vary": vary}, {"dp": dp, "tp": tp, "vpp": vpp, "ordering": ordering})
    if widths:
        swept = parse_model(model) if model else None
        found, show = forecast_grid(swept, vary, widths, pp, version or [], sync), grid_table
    else:
        sizes = {"dp": dp, "pp": pp, "tp": tp, "vpp": vpp}
        found = forecast(parse_model(model or "tiny"), sizes, version or [], ordering or [], sync)
        show = forecast_table
    if json:
        print_json(found)
    else:
        open_console().print(show(found))
    return EXIT_PASS


@app.command()
def selftest(
    mesh: Annotated[str, typer.Option(help="DPxPP or DPxPPxTP local ranks.")] = "2x2",
    world_ranks: Annotated[str | None, typer.Option(help="Guilty ranks, as 0,3.", show_default="each in turn")] = None,
    faults: Annotated[
        str | None, typer.Option(help="Faults, parted by commas.", show_default="the whole catalogue")
    ] = None,
    json: Json = False,
) -> int:
    """Inject every fault on a gang of this machine: is each caught and named? Needs no server, takes minutes."""
    from service import proving
    from service.progress import print_json
    from service.terminal import open_console
    from workers.selftest import run_selftest

    size = proving.read_mesh(mesh)
    chosen, ranks = proving.read_faults(faults), proving.read_world_ranks(world_ranks, size)
    console = open_console(stderr=json)
    raise_on_signals()
    proving.print_heading(console)
    findings = run_selftest(size, chosen, ranks, lambda finding: proving.print_finding(finding, console))
    if json:
        print_json({"mesh": mesh, "findings": [proving.plain_finding(finding) for finding in findings]})
    proving.print_summary(findings, console)
    return EXIT_PASS if all(finding.ok for finding in findings) else EXIT_FAIL


def exit_code(validation: dict[str, Any]) -> int:
    """The exit code that a validation's end means; without a verdict it is an error."""
    codes = {"pass": EXIT_PASS, "fail": EXIT_FAIL, "inconclusive": EXIT_INCONCLUSIVE}
    return codes.get(validation["verdict"] or "", EXIT_ERROR)


def load_settings(*, needs_database: bool = False) -> Settings:
    """Settings from the environment. Raises UsageFault naming every bad variable."""
    from pydantic import ValidationError

    from service.options import UsageFault
    from service.settings import Settings

    try:
        settings = Settings.load()
    except ValidationError as error:
        raise UsageFault(
            "; ".join(_setting_fault(item["loc"], item["input"], item["msg"]) for item in error.errors())
        ) from None
    if needs_database and settings.database_url is None:
        raise UsageFault(
            "GRADGATE_DATABASE_URL is not set; set it to postgresql://user:password@host:port/database, or run "
            "`gradgate up`, which brings its own database"
        )
    return settings


def _setting_fault(location: tuple[int | str, ...], value: object, message: str) -> str:
    """One bad setting in words; a URL is not repeated, since it may hold a password."""
    name = f"GRADGATE_{str(location[0]).upper()}" if location else "the settings"
    shown = "" if name.endswith("_URL") else f"={value}"
    return f"{name}{shown}: {message}"


def default_url() -> str:
    """The server that GRADGATE_HOST and GRADGATE_PORT describe."""
    from service.stack import url_of

    settings = load_settings()
    return url_of(settings.host, settings.port)


def raise_on_signals() -> None:
    """Make SIGTERM and SIGHUP unwind like Ctrl-C, so that everything started is stopped; keep an ignored SIGHUP."""

    def interrupt(*_: object) -> NoReturn:
        raise KeyboardInterrupt

    signal.signal(signal.SIGINT, interrupt)  # a shell's background job starts with SIGINT ignored
    signal.signal(signal.SIGTERM, interrupt)
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        signal.signal(signal.SIGHUP, interrupt)


def run(arguments: list[str]) -> int:
    """Run a command line and return its exit code."""
    try:
        code = app(arguments or ["--help"], standalone_mode=False)
    except SystemExit as ended:  # from below Typer, as for a closed pipe; its codes are not ours
        return EXIT_ERROR if ended.code else EXIT_PASS
    except (KeyboardInterrupt, typer.Abort):
        typer.echo("interrupted", err=True)
        return EXIT_INTERRUPTED
    except typer.TyperException as error:
        typer.echo(f"error: {error.format_message()} (see gradgate --help)", err=True)
        return EXIT_ERROR
    except Exception as error:
        from service.faults import describe_expected

        if (text := describe_expected(error)) is None:
            raise
        typer.echo(f"error: {text}", err=True)
        return EXIT_ERROR
    return code or EXIT_PASS


def main() -> None:
    """The console script."""
    try:
        code = run(sys.argv[1:])
        sys.stdout.flush()
    except BrokenPipeError:  # whoever read us has gone; nothing more may be flushed at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = EXIT_ERROR
    except Exception:
        traceback.print_exc()
        code = EXIT_ERROR
    sys.exit(code)


if __name__ == "__main__":
    main()
