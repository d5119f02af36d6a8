"""A real file system that a test fills."""

import contextlib
import subprocess


class Disk:
    """A file system of 4 MiB, and a file that takes all the room there is."""

    def __init__(self, folder):
        self.folder = folder
        folder.mkdir()
        mount = ["mount", "-t", "tmpfs", "-o", "size=4m", "none", folder]
        subprocess.run(mount, check=True, capture_output=True)

    def fill(self):
        with (self.folder / "filler").open("ab", buffering=0) as file:
            for size in (65536, 4096, 1):
                with contextlib.suppress(OSError):
                    while True:
                        file.write(b"x" * size)

    def make_room(self):
        (self.folder / "filler").unlink()
