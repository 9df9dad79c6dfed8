"""Trials are kept as they come, in turn, and a stopped sweep goes on where it was."""

import json
from pathlib import Path
from typing import Any

import pytest
from synthetic import trial

from headstart.eval.service.sweep import OFF, Cell, Trial, TrialFile, groups, measure_group, warmed

SETTINGS: dict[str, Any] = {"seed": 0, "workloads": {"mixed": {"data": "a"}}}
CELLS = [Cell("mixed", 0.0, 2, drafts) for drafts in (OFF, "chain:1", "chain:4")]


class Loop:
    """Measures in no time; `stop_at` ends it as a user or a crash would."""

    def __init__(self, stop_at: int | None = None):
        self.asked: list[tuple[str, int]] = []
        self.stop_at = stop_at

    def __call__(self, cell: Cell, number: int) -> Trial:
        if len(self.asked) == self.stop_at:
            raise KeyboardInterrupt
        self.asked.append((cell.drafts, number))
        length = 0 if cell.drafts == OFF else int(cell.drafts[6:])
        made = trial(cell.concurrency, length, number, 0.5, passes=10)
        made.seconds = 1.0
        return made


def settings() -> dict[str, Any]:
    return json.loads(json.dumps(SETTINGS))


def sweep(folder: Path, loop: Loop, seconds: float = 2.5, least: int = 2) -> int:
    return measure_group(TrialFile(folder, settings()), CELLS, loop, seconds, least)


def test_cells_take_turns_and_change_their_order(tmp_path):
    loop = Loop()
    assert sweep(tmp_path, loop) == 9
    assert loop.asked == [
        ("off", 0), ("chain:1", 0), ("chain:4", 0),
        ("chain:4", 1), ("chain:1", 1), ("off", 1),
        ("off", 2), ("chain:1", 2), ("chain:4", 2),
    ]  # fmt: skip


def test_least_trials_are_measured_whatever_they_take(tmp_path):
    assert sweep(tmp_path, Loop(), seconds=0.0, least=2) == 6


@pytest.mark.parametrize("stop_at", range(10))
def test_a_stopped_sweep_keeps_what_it_has_and_goes_on(tmp_path, stop_at):
    sweep(tmp_path / "whole", Loop())
    first, second = Loop(stop_at), Loop()
    if stop_at < 9:
        with pytest.raises(KeyboardInterrupt):
            sweep(tmp_path / "stopped", first)
        before = (tmp_path / "stopped" / "trials.jsonl").read_text()
        assert before.count("\n") == stop_at
        sweep(tmp_path / "stopped", second)
        assert (tmp_path / "stopped" / "trials.jsonl").read_text().startswith(before)
    else:
        sweep(tmp_path / "stopped", first)
    assert len(first.asked) + len(second.asked) == 9
    whole, stopped = (
        TrialFile(tmp_path / name, settings()).trials for name in ("whole", "stopped")
    )
    assert whole == stopped


@pytest.mark.parametrize("cut", [1, 40, 300])
def test_a_line_that_a_crash_cut_off_is_measured_again(tmp_path, cut):
    sweep(tmp_path, Loop())
    path = tmp_path / "trials.jsonl"
    whole = path.read_bytes()
    path.write_bytes(whole[:-cut])
    loop = Loop()
    assert sweep(tmp_path, loop) == 1 and loop.asked == [("chain:4", 2)]
    assert path.read_bytes() == whole


def test_a_damaged_line_in_between_is_named_and_nothing_is_lost(tmp_path):
    sweep(tmp_path, Loop())
    path = tmp_path / "trials.jsonl"
    lines = path.read_text().splitlines()
    lines[3] = lines[3][:50]
    path.write_text("\n".join(lines) + "\n")
    with pytest.raises(ValueError, match=r"trials.jsonl, line 4 is no trial"):
        TrialFile(tmp_path, settings())
    assert path.read_text().splitlines() == lines


def test_trials_of_other_settings_are_refused_and_kept(tmp_path):
    sweep(tmp_path, Loop())
    before = (tmp_path / "trials.jsonl").read_text()
    with pytest.raises(ValueError, match=r"another setting, seed is 0 there and 1 here"):
        TrialFile(tmp_path, settings() | {"seed": 1})
    with pytest.raises(ValueError, match=r"another setting, workloads is .*'a'.*'b'"):
        TrialFile(tmp_path, settings() | {"workloads": {"mixed": {"data": "b"}}})
    assert (tmp_path / "trials.jsonl").read_text() == before


def test_a_workload_may_be_added_later(tmp_path):
    sweep(tmp_path, Loop())
    added = {"long": {"data": "b"}}
    assert len(TrialFile(tmp_path, settings() | {"workloads": added}).trials) == 9
    recorded = json.loads((tmp_path / "trials.meta.json").read_text())["workloads"]
    assert recorded == SETTINGS["workloads"] | added
    assert len(TrialFile(tmp_path, settings()).trials) == 9


def test_first_trial_of_each_kind_of_drafts_is_preceded_by_one_that_does_not_count(tmp_path):
    loop = Loop()
    measure_group(TrialFile(tmp_path, settings()), CELLS, warmed(loop), 0.0, 2)
    assert loop.asked[:4] == [("off", 0), ("off", 0), ("chain:1", 0), ("chain:1", 0)]
    assert len(loop.asked) == 6 + 3
    assert len(TrialFile(tmp_path, settings()).trials) == 6


def test_groups_are_cells_of_one_workload_temperature_and_concurrency():
    other = Cell("mixed", 0.0, 4, OFF)
    assert groups([*CELLS[:1], other, *CELLS[1:]]) == [CELLS, [other]]
