"""What a stopwatch counts: the time inside `running`, and each take starts anew."""

from __future__ import annotations

import pytest
import torch

from workers import stopwatch
from workers.stopwatch import Stopwatch


def test_only_what_runs_inside_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = [0.0]
    monkeypatch.setattr(stopwatch.time, "perf_counter", lambda: now_s[0])
    watch = Stopwatch(torch.device("cpu"))
    for passed_s in (1.0, 2.0):
        with watch.running():
            now_s[0] += passed_s
        now_s[0] += 100.0
    assert (watch.take(), watch.take()) == (3.0, 0.0)
