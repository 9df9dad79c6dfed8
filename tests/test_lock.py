"""One run at a time writes to a place, and a killed one leaves it free."""

import fcntl
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from headstart.lock import only_writer

HOLD = """
import sys, time
from pathlib import Path
from headstart.lock import only_writer
with only_writer(Path(sys.argv[1]), "out 'x'"):
    print("held", flush=True)
    time.sleep(600)
"""


def test_a_second_run_is_told_who_writes_and_the_way_out(tmp_path: Path) -> None:
    lock = tmp_path / ".lock"
    said = f"^out 'x': process {os.getpid()} on .+ is writing there; .* or pass another$"
    with only_writer(lock, "out 'x'"):
        for _ in range(2):
            with pytest.raises(ValueError, match=said), only_writer(lock, "out 'x'"):
                pass
        assert lock.exists()
    assert not list(tmp_path.iterdir())
    with only_writer(lock, "out 'x'"):
        pass


def test_a_killed_run_leaves_the_place_free(tmp_path: Path) -> None:
    lock = tmp_path / ".lock"
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(lock)], stdout=subprocess.PIPE, text=True
    )
    try:
        assert holder.stdout.readline() == "held\n"
        said = f"process {holder.pid} on"
        with pytest.raises(ValueError, match=said), only_writer(lock, "out 'x'"):
            pass
    finally:
        holder.kill()
        holder.communicate()
    assert str(holder.pid) in lock.read_text()
    with only_writer(lock, "out 'x'"):
        assert f"process {os.getpid()} on" in lock.read_text()
    assert not lock.exists()


def test_folders_that_stay_empty_are_removed_again(tmp_path: Path) -> None:
    with pytest.raises(KeyError), only_writer(tmp_path / "a" / "b" / ".lock", "out 'x'"):
        raise KeyError
    assert not list(tmp_path.iterdir())
    with only_writer(tmp_path / "a" / "b" / ".lock", "out 'x'"):
        (tmp_path / "a" / "written").touch()
    assert [p.name for p in (tmp_path / "a").iterdir()] == ["written"]


def test_a_file_that_its_last_holder_removed_is_no_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock, times = tmp_path / ".lock", []

    def flock(*arguments: Any) -> None:
        times.append(real(*arguments))
        if len(times) == 1:  # opened while the other run still held it
            lock.unlink()

    real = fcntl.flock
    monkeypatch.setattr(fcntl, "flock", flock)
    with only_writer(lock, "out 'x'"):
        assert len(times) == 2 and lock.exists()


def test_where_nothing_can_be_locked_a_run_goes_on_with_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def flock(*_: Any) -> None:
        raise OSError("No locks available")

    monkeypatch.setattr(fcntl, "flock", flock)
    said = "out 'x': files there cannot be locked"
    with pytest.warns(UserWarning, match=said), only_writer(tmp_path / ".lock", "out 'x'"):
        pass


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    lock, said = tmp_path / "file" / "below" / ".lock", "out 'x' cannot be written: Not a directory"
    with pytest.raises(ValueError, match=said), only_writer(lock, "out 'x'"):
        pass
