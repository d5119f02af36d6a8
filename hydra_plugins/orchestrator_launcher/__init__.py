"""`hydra/launcher=orchestrator`: the points of a Hydra application run here, one after another.

That is what Hydra's basic launcher does. Sweeps of `orchestrator.launch` do not need one:
`orchestrator.sweep` places all of their points together.
"""

# No `from __future__ import annotations`: Hydra loads this before its name is in sys.modules, where
# dataclasses would look up annotations that are text.
from dataclasses import dataclass

from hydra.core.config_store import ConfigStore


@dataclass
class LauncherConf:
    """`hydra.launcher` with Hydra's basic launcher."""

    _target_: str = "hydra._internal.core_plugins.basic_launcher.BasicLauncher"


ConfigStore.instance().store(
    group="hydra/launcher", name="orchestrator", node=LauncherConf, provider="orchestrator"
)
