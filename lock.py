"""One run at a time writes to a place."""

import fcntl
import os
import platform
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO


@contextmanager
def only_writer(lock: Path, place: str) -> Iterator[None]:
    """Keep other runs from writing to a place while this one does.

    The file `lock` holds the number of the process, and is gone when it is done. What counts is its
    lock (flock), which the system drops with the process, however that ends: a file left by a
    killed run is taken over.

    Args:
        lock: in the folder that is written to, or beside the file; folders are made as needed, and
            removed again if they are still empty.
        place: field and value, for error messages.

    Raises:
        ValueError: another run writes there, or nothing can be written there.
    """
    made = [folder for folder in lock.absolute().parents if not folder.exists()]  # inmost first
    try:
        lock.parent.mkdir(parents=True, exist_ok=True)
        file = _locked(lock, place)
        file.truncate(0)
        file.write(f"process {os.getpid()} on {platform.node()}")
        file.flush()
    except OSError as error:
        raise ValueError(
            f"{place} cannot be written: {error.strerror or error}; pass another"
        ) from error
    try:
        yield
    finally:
        lock.unlink(missing_ok=True)  # while it is locked, see below
        file.close()
        for folder in made:
            with suppress(OSError):
                folder.rmdir()


def _locked(lock: Path, place: str) -> IO[str]:
    """The file, open and locked."""
    while True:
        file = lock.open("a+", encoding="utf-8")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            file.seek(0)
            holder = file.read() or "another process"
            file.close()
            raise ValueError(
                f"{place}: {holder} is writing there; let it end, stop it, or pass another"
            ) from error
        except OSError:  # some network file systems
            warnings.warn(
                f"{place}: files there cannot be locked; see that no other run writes there",
                stacklevel=4,
            )
            return file
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(file.fileno()), lock.stat()):
                return file
        file.close()  # its last holder has removed it since it was opened
