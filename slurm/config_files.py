"""Text of every configuration file, from one frozen value; no function here writes a file.

Settings were found by trying on SLURM 22.05; each one that is not obvious says why it is there.
"""

from dataclasses import dataclass

from slurm.layout import Layout

ACCOUNT = "dev"
CRED_EXPIRE_SECONDS = 5
KILL_WAIT_SECONDS = 3
SLURMD_TIMEOUT_SECONDS = 5

# Start what can start at once: on one machine there is no storm of requests to fear.
_SCHEDULER = "bf_interval=1,sched_interval=1,sched_min_interval=0,batch_sched_delay=0"


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Options of the user; `cpus`, `memory_mb` and `gpus` are those of one simulated node."""

    nodes: int = 4
    cpus: int = 8
    memory_mb: int = 16384
    gpus: int = 4
    accounting: bool = True
    grace_seconds: int = 20


@dataclass(frozen=True, kw_only=True)
class ClusterSpec:
    """Specification of one cluster: all that its configuration files depend on but their folder.

    `host` is this machine's short name, and `address` what its name resolves to.
    `ports` are slurmctld's, slurmdbd's, and then one for each slurmd.
    """

    name: str
    user: str
    host: str
    ports: tuple[int, ...]
    address: str
    shape: Shape

    @property
    def node_names(self) -> tuple[str, ...]:
        return tuple(f"n{i}" for i in range(self.shape.nodes))

    @property
    def confined(self) -> bool:
        """Return whether slurmd and srun can be restricted to listening at `address`.

        Not where the name means another loopback address than 127.0.0.1 (Debian's 127.0.1.1): a
        step connects to where its request came from, and the kernel says 127.0.0.1 for all.
        """
        return self.address == "127.0.0.1" or not self.address.startswith("127.")

    @property
    def cluster_name(self) -> str:
        """Return SLURM's ClusterName, also the prefix of the database's tables."""
        return self.name.replace("-", "_")


def ports_needed(nodes: int) -> int:
    """Return how many ports a cluster takes: slurmctld, slurmdbd and each slurmd."""
    return 2 + nodes


def slurm_conf(spec: ClusterSpec, at: Layout) -> str:
    """Return slurm.conf: one controller, `spec.nodes` slurmd on this host, four partitions."""
    controller_port, database_port, *node_ports = spec.ports
    lines = [
        f"ClusterName={spec.cluster_name}",
        f"SlurmctldHost={spec.host}({spec.address})",
        f"SlurmctldPort={controller_port}",
        f"SlurmUser={spec.user}",
        f"SlurmdUser={spec.user}",
        # Bind to the address of this host's name, not to all addresses; there is no setting for
        # another one, so SLURM must look for its daemons there too.
        f"CommunicationParameters=NoCtldInAddrAny{',NoInAddrAny' if spec.confined else ''}",
        "AuthType=auth/munge",
        "CredType=cred/munge",
        # cred_expire *is* the delay before a requeued job may start again; by default 120 s.
        # Less than 5 is refused and taken for 120.
        f"AuthInfo=socket={at.munge_socket},cred_expire={CRED_EXPIRE_SECONDS}",
        f"StateSaveLocation={at.controller_state}",
        f"SlurmdSpoolDir={at.spools}/%n",
        f"SlurmctldPidFile={at.run}/slurmctld.own.pid",
        f"SlurmdPidFile={at.run}/slurmd-%n.own.pid",
        f"SlurmctldLogFile={at.log_file('slurmctld')}",
        f"SlurmdLogFile={at.log}/slurmd-%n.log",
        "SlurmctldDebug=info",
        "SlurmdDebug=info",
        # No cgroups: this must work inside containers, and with several clusters on one machine.
        "ProctrackType=proctrack/linuxproc",
        "TaskPlugin=task/none",
        "JobAcctGatherType=jobacct_gather/linux",
        "JobAcctGatherFrequency=task=10",
        "SwitchType=switch/none",
        "MpiDefault=none",
        "LaunchParameters=use_interactive_step",
        "SelectType=select/cons_tres",
        "SelectTypeParameters=CR_Core",
        # Believe CPUs= and RealMemory= below although the machine has less.
        "SlurmdParameters=config_overrides",
        "PreemptType=preempt/partition_prio",
        "PreemptMode=REQUEUE",
        "JobRequeue=1",
        # A preempted job that asked for `--signal` gets that signal ahead of the end.
        "SlurmctldParameters=preempt_send_user_signal",
        # Refuse at submission what no node and no limit can ever satisfy.
        "EnforcePartLimits=ALL",
        "SchedulerType=sched/backfill",
        f"SchedulerParameters={_SCHEDULER}",
        f"KillWait={KILL_WAIT_SECONDS}",
        "CompleteWait=0",
        "InactiveLimit=0",
        f"SlurmdTimeout={SLURMD_TIMEOUT_SECONDS}",
        # A node that did not answer comes back by itself; one set down by hand stays down.
        "ReturnToService=1",
        "MinJobAge=86400",
        "GresTypes=gpu",
        *_accounting_lines(spec, at, database_port),
    ]
    for node, port in zip(spec.node_names, node_ports, strict=True):
        gres = f" Gres=gpu:{spec.shape.gpus}" if spec.shape.gpus else ""
        lines.append(
            f"NodeName={node} NodeHostname={spec.host} NodeAddr={spec.address} Port={port} "
            f"CPUs={spec.shape.cpus} RealMemory={spec.shape.memory_mb}{gres} State=UNKNOWN"
        )
    lines += [
        "PartitionName=DEFAULT Nodes=ALL State=UP MaxTime=INFINITE PriorityTier=1 PreemptMode=OFF",
        "PartitionName=main Default=YES",
        f"PartitionName=low PreemptMode=REQUEUE GraceTime={spec.shape.grace_seconds}",
        "PartitionName=high PriorityTier=10",
        "PartitionName=short MaxTime=1 DefaultTime=1",
    ]
    return _text(lines)


def _accounting_lines(spec: ClusterSpec, at: Layout, port: int) -> list[str]:
    if not spec.shape.accounting:
        return ["AccountingStorageType=accounting_storage/none"]
    return [
        "AccountingStorageType=accounting_storage/slurmdbd",
        f"AccountingStorageHost={spec.address}",
        f"AccountingStoragePort={port}",
        # With munge this is the socket's path, not a password; without it each call waits 10 s.
        f"AccountingStoragePass={at.munge_socket}",
        "AccountingStorageTRES=gres/gpu",
        # Enforce limits that are set with sacctmgr; by default there are none.
        "AccountingStorageEnforce=limits,qos",
        "AccountingStoreFlags=job_comment,job_script",
    ]


def slurmdbd_conf(spec: ClusterSpec, at: Layout) -> str:
    """Return slurmdbd.conf; SLURM demands that only the owner can read it."""
    return _text(
        [
            "AuthType=auth/munge",
            f"AuthInfo=socket={at.munge_socket}",
            f"DbdHost={spec.host}",
            f"DbdAddr={spec.address}",
            f"DbdPort={spec.ports[1]}",
            # Bind to the address of the host's name, not to all; no setting names another one.
            "CommunicationParameters=NoInAddrAny",
            f"SlurmUser={spec.user}",
            f"LogFile={at.log_file('slurmdbd')}",
            f"PidFile={at.run}/slurmdbd.own.pid",
            "DebugLevel=info",
            "StorageType=accounting_storage/mysql",
            # "localhost" means the socket, which MYSQL_UNIX_PORT names: no port, no password.
            "StorageHost=localhost",
            "StorageLoc=slurm_acct_db",
            f"StorageUser={spec.user}",
        ]
    )


def gres_conf(spec: ClusterSpec, at: Layout) -> str:
    """Return gres.conf: each node's simulated GPUs; a device file each for CUDA's variable."""
    if not spec.shape.gpus:
        return _text([])
    return _text([f"Name=gpu File={at.devices}/nvidia[0-{spec.shape.gpus - 1}]"])


def cgroup_conf(at: Layout) -> str:
    """Return cgroup.conf: cgroups are not used here, but slurmd ends if it does not like them.

    It refuses a mix of versions, and a machine without any (both common in containers); version 1
    below a folder that does not exist is not looked at, and works everywhere.
    """
    return _text(["CgroupPlugin=cgroup/v1", f"CgroupMountpoint={at.root}/cgroup"])


def my_cnf(spec: ClusterSpec, at: Layout) -> str:
    """Return MariaDB's configuration: a socket in our folder only, small, fast, not crash-safe."""
    return _text(
        [
            "[mariadbd]",
            f"datadir={at.database}",
            f"socket={at.database_socket}",
            f"pid-file={at.run}/mariadbd.own.pid",
            f"user={spec.user}",
            "skip-networking",
            "innodb_buffer_pool_size=32M",
            "innodb_log_file_size=16M",
            "innodb_lock_wait_timeout=900",
            "innodb_flush_log_at_trx_commit=2",
            "performance_schema=OFF",
            f"tmpdir={at.run}",
        ]
    )


def _text(lines: list[str]) -> str:
    head = "# Written by `python -m slurm up` at each start: changes made here are lost."
    return "\n".join([head, *lines, ""])
