"""`python -m slurm up | down | status | env | remove`: the development cluster by hand."""

import shlex
import time
from typing import Annotated

import typer
from rich.console import Console

from slurm.dev_cluster import DevCluster
from slurm.errors import DevClusterError
from slurm.layout import DEFAULT_NAME

app = typer.Typer(
    help="A real SLURM on this machine, for development.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
_out = Console(highlight=False, soft_wrap=True)
_err = Console(stderr=True, highlight=False, soft_wrap=True)

Name = Annotated[str, typer.Option(help="Which cluster; any number live side by side.")]


def _say(line: str) -> None:
    _err.print(line, markup=False)


@app.command()
def up(
    name: Name = DEFAULT_NAME,
    nodes: Annotated[int, typer.Option(min=1, max=64, help="How many nodes.")] = 4,
    accounting: Annotated[bool, typer.Option(help="Run slurmdbd, so that sacct is real.")] = True,
) -> None:
    """Bring the cluster up (installs packages the first time, as root); mends a broken one."""
    began = time.monotonic()
    cluster = DevCluster(name, nodes=nodes, accounting=accounting, say=_say)
    started = cluster.up()
    seconds = time.monotonic() - began
    if started:
        _say(f"cluster {name!r} is up: started {', '.join(started)} in {seconds:.1f} s")
    else:
        _say(f"cluster {name!r} is up already")
    _say(f"next: export SLURM_CONF={shlex.quote(str(cluster.slurm_conf))}; sinfo")


@app.command()
def down(name: Name = DEFAULT_NAME) -> None:
    """Cancel the cluster's jobs and end all its processes; its history stays."""
    ended = DevCluster(name, say=_say).down()
    _say(f"cluster {name!r} is down" if ended else f"cluster {name!r} was not up")


@app.command()
def status(name: Name = DEFAULT_NAME) -> None:
    """Print what runs; exit with 1 if the cluster is not up."""
    found = DevCluster(name).status()
    for daemon, pid in found.daemons.items():
        _out.print(f"{daemon:<12} {'not running' if pid is None else f'pid {pid}'}")
    for node, state in found.nodes.items():
        _out.print(f"{node:<12} {state}")
    _out.print(f"cluster {name!r} is {'up' if found.is_up else 'not up'}: {found.slurm_conf}")
    if not found.is_up:
        raise typer.Exit(1)


@app.command()
def env(name: Name = DEFAULT_NAME) -> None:
    """Print what `eval` needs to make this shell's SLURM commands use the cluster."""
    typer.echo(f"export SLURM_CONF={shlex.quote(str(DevCluster(name).slurm_conf))}")


@app.command()
def remove(name: Name = DEFAULT_NAME) -> None:
    """Take the cluster down and delete its folder, history and all."""
    removed = DevCluster(name, say=_say).remove()
    _say(f"cluster {name!r} is removed" if removed else f"there was no cluster {name!r}")


def main() -> None:
    """Run a command; report an error that the user can fix as a message, without a traceback."""
    try:
        app()
    except DevClusterError as error:
        _say(f"error: {error}")
        raise SystemExit(1) from None


if __name__ == "__main__":
    main()
