"""MNIST's file format (IDX): checked reading, and scikit-learn's digits as such files."""

from __future__ import annotations

import gzip
import os
import struct
import zlib
from pathlib import Path

import numpy as np
import numpy.typing as npt

from orchestrator.errors import DataError

Bytes = npt.NDArray[np.uint8]
IMAGES_MAGIC, LABELS_MAGIC = 2051, 2049
TRAIN_SAMPLES = 1437
NAMES = {
    ("train", "images"): "train-images-idx3-ubyte",
    ("train", "labels"): "train-labels-idx1-ubyte",
    ("test", "images"): "t10k-images-idx3-ubyte",
    ("test", "labels"): "t10k-labels-idx1-ubyte",
}


def read_idx(path: Path, magic: int) -> Bytes:
    """Return an IDX file as an array of bytes. Raises `DataError` when it is missing or damaged."""
    packed = path.with_name(path.name + ".gz")
    if not path.exists() and packed.exists():
        path = packed
    try:
        content = path.read_bytes()
        content = gzip.decompress(content) if path == packed else content
    except FileNotFoundError:
        raise DataError(f"there is no {path.name} (nor {packed.name}) in {path.parent}") from None
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path} cannot be read: {error}") from error
    axes = magic % 256
    header = 4 + 4 * axes
    if len(content) < header or struct.unpack(">i", content[:4])[0] != magic:
        found = struct.unpack(">i", content[:4])[0] if len(content) >= 4 else "nothing"
        raise DataError(
            f"{path} is not such an IDX file: its magic number must be {magic}, but is {found}"
        )
    shape = struct.unpack(f">{axes}i", content[4:header])
    expected = header + int(np.prod(shape))
    if len(content) != expected:
        raise DataError(
            f"{path} is damaged: {shape} needs {expected} bytes, but it has {len(content)}"
        )
    return np.frombuffer(content, np.uint8, offset=header).reshape(shape)


def read_digits(folder: Path, part: str) -> tuple[Bytes, Bytes]:
    """Return images (n, rows, columns) and labels (n,) of "train" or "test", MNIST's layout."""
    if not folder.is_dir():
        raise DataError(
            f"job.data_dir must be a folder with MNIST's IDX files, but {folder} is not one"
        )
    images = read_idx(folder / NAMES[part, "images"], IMAGES_MAGIC)
    labels = read_idx(folder / NAMES[part, "labels"], LABELS_MAGIC)
    if len(images) != len(labels):
        raise DataError(f"{folder}: {len(images)} {part} images, but {len(labels)} labels")
    return images, labels


def _write_idx(path: Path, array: Bytes, magic: int) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    header = struct.pack(f">{1 + array.ndim}i", magic, *array.shape)
    temporary.write_bytes(header + array.tobytes())
    temporary.replace(path)


def bundled_digits() -> Path:
    """Return a folder with scikit-learn's 1797 real digits as 28x28 IDX files, made on first use.

    Several processes may make it at once: each file appears whole, and always with the same bytes.
    """
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    folder = Path(base) / "cluster-orchestrator" / "digits"
    if all((folder / name).exists() for name in NAMES.values()):
        return folder
    from sklearn.datasets import load_digits

    found = load_digits()
    order = np.random.RandomState(0).permutation(len(found.target))
    small = np.rint(found.images[order] * (255 / 16)).astype(np.uint8)
    images = np.pad(small.repeat(3, axis=1).repeat(3, axis=2), ((0, 0), (2, 2), (2, 2)))
    labels = found.target[order].astype(np.uint8)
    folder.mkdir(parents=True, exist_ok=True)
    for part, piece in (("train", slice(0, TRAIN_SAMPLES)), ("test", slice(TRAIN_SAMPLES, None))):
        _write_idx(folder / NAMES[part, "images"], images[piece], IMAGES_MAGIC)
        _write_idx(folder / NAMES[part, "labels"], labels[piece], LABELS_MAGIC)
    return folder
