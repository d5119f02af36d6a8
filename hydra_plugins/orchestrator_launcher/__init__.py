"""`hydra/launcher=orchestrator`: Hydra's launcher plug-in.

The points of a Hydra application that chooses it run here, one after another. Sweeps of
`orchestrator.launch` do not need it: `orchestrator.sweep` places all of their points together.
"""

# No `from __future__ import annotations`: Hydra loads this before its name is in sys.modules, where
# dataclasses would look up annotations that are text.
from dataclasses import dataclass

from hydra._internal.core_plugins import basic_launcher
from hydra.core.config_store import ConfigStore


class OrchestratorLauncher(basic_launcher.BasicLauncher):
    """Launches the points of a sweep in this process, one after another."""


@dataclass
class LauncherConf:
    """`hydra.launcher` with this launcher."""

    _target_: str = "hydra_plugins.orchestrator_launcher.OrchestratorLauncher"


ConfigStore.instance().store(
    group="hydra/launcher", name="orchestrator", node=LauncherConf, provider="orchestrator"
)
