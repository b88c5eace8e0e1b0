from __future__ import annotations

from service.api.rates import MAX_BUCKETS, Rates


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def test_a_minutes_worth_passes_at_once_and_then_one_at_a_time() -> None:
    clock = Clock()
    rates = Rates(60, clock)
    assert [rates.take("a") for _ in range(60)] == [0.0] * 60
    assert rates.take("a") == 1.0
    clock.now_s += 0.75
    assert rates.take("a") == 0.25
    clock.now_s += 0.25
    assert rates.take("a") == 0.0
    assert rates.take("a") == 1.0


def test_keys_do_not_share_and_idleness_earns_no_more_than_a_minute() -> None:
    clock = Clock()
    rates = Rates(2, clock)
    assert [rates.take("a"), rates.take("a"), rates.take("b")] == [0.0, 0.0, 0.0]
    assert rates.take("a") == 30.0
    clock.now_s += 3600.0
    assert [rates.take("a"), rates.take("a")] == [0.0, 0.0]
    assert rates.take("a") > 0.0


def test_buckets_are_bounded() -> None:
    rates = Rates(1, Clock())
    for number in range(MAX_BUCKETS + 10):
        rates.take(str(number))
    assert len(rates._buckets) == MAX_BUCKETS
