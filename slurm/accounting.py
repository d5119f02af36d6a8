"""Preparation of accounting before the daemons start: tables, a cluster, an account."""

import shutil
import subprocess
from pathlib import Path

from slurm import client
from slurm.config_files import ACCOUNT, ClusterSpec
from slurm.errors import DevClusterError
from slurm.install import program, search_path
from slurm.layout import Layout

_OUTPUT_LINES = 12


def create_tables(spec: ClusterSpec, at: Layout) -> None:
    """Make MariaDB's own tables, once. Partial ones are made again."""
    if at.database.exists():
        return
    aside = at.root / "mysql.new"
    if aside.exists():
        shutil.rmtree(aside)
    done = subprocess.run(
        [
            program("mariadb-install-db"),
            f"--defaults-file={at.my_cnf}",
            f"--datadir={aside}",
            # The cluster's user is authenticated by the socket, without a password.
            "--auth-root-authentication-method=socket",
            f"--auth-root-socket-user={spec.user}",
            "--skip-test-db",
            "--skip-name-resolve",
        ],
        env={"PATH": search_path(), "HOME": str(Path.home())},
        cwd=at.root,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        tail = "\n".join((done.stdout + done.stderr).splitlines()[-_OUTPUT_LINES:])
        raise DevClusterError(f"mariadb-install-db ended with {done.returncode}:\n{tail}")
    aside.rename(at.database)


def register(spec: ClusterSpec, at: Layout) -> None:
    """Register the cluster, the account and the user with slurmdbd, which slurmctld needs."""
    cluster, user = f"cluster={spec.cluster_name}", f"user={spec.user}"
    show = ("sacctmgr", "-n", "-P", "show", "assoc", cluster, f"account={ACCOUNT}", user)
    if client.call(at, *show, "format=user").strip():
        return
    known = client.call(at, "sacctmgr", "-n", "-P", "show", "cluster", "format=cluster").split()
    if spec.cluster_name not in known:
        client.call(at, "sacctmgr", "-i", "add", "cluster", spec.cluster_name)
    accounts = client.call(at, "sacctmgr", "-n", "-P", "show", "account", "format=account")
    if ACCOUNT not in accounts.split():
        client.call(at, "sacctmgr", "-i", "add", "account", ACCOUNT, cluster)
    client.call(at, "sacctmgr", "-i", "add", "user", spec.user, f"account={ACCOUNT}", cluster)
