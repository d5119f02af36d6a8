"""`train.initial_weights`: the file that a new run starts from, found without a framework."""

from __future__ import annotations

import shutil
from pathlib import Path

from orchestrator.config.schema import Config
from orchestrator.errors import ConfigError, RunFolderError, UsageError
from orchestrator.rundir.checkpoints import WEIGHTS, digest_of, newest
from orchestrator.rundir.folder import INITIAL_BYTES, INITIAL_DIGEST, RunDir


def initial_weights(config: Config) -> Path | None:
    """The weights file that is meant: the one that is named, or the newest sound one of a run.

    Raises:
        ConfigError: there is none, or it is no safetensors file.
    """
    stated = config.train.initial_weights
    if stated is None:
        return None
    try:
        return _checked(Path(stated).expanduser())
    except UsageError as error:
        raise ConfigError(f"train.initial_weights={stated}: {error}") from error
    except OSError as error:
        raise ConfigError(f"train.initial_weights={stated}: {error.strerror}") from error


def _checked(path: Path) -> Path:
    from orchestrator.rundir.tensors import SafetensorsFile  # NumPy, if it is needed

    if path.is_dir():
        run = RunDir(path).existing()
        found, _ = newest(run.checkpoints, run.identity)
        if found is None:
            raise RunFolderError("that run has no weights yet: no sound checkpoint was written")
        path = found.folder / WEIGHTS
    if not SafetensorsFile(path).tensors:
        raise RunFolderError(f"{path} holds no tensors")
    return path


def keep_initial_weights(config: Config, run: RunDir) -> dict[str, str | int]:
    """Copy the file into the new run's folder, so that the run is whole whatever becomes of it.

    Returns:
        The copy's digest and length, for submission.json; nothing where no weights are asked for.
    """
    path = initial_weights(config)
    if path is None:
        return {}
    shutil.copyfile(path, run.initial_weights)
    run.initial_weights.chmod(0o600)
    length = run.initial_weights.stat().st_size
    return {INITIAL_DIGEST: digest_of(run.initial_weights), INITIAL_BYTES: length}
