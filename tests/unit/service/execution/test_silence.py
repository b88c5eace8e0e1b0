from __future__ import annotations

from service.execution.silence import Silence


def test_silence_grows_by_ticks_and_ends_with_a_word() -> None:
    silence = Silence()
    assert [silence.grow(1.0), silence.grow(0.5)] == [1.0, 1.5]
    silence.end()
    assert silence.grow(1.0) == 1.0
