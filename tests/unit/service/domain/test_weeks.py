from __future__ import annotations

from datetime import UTC, date, datetime, timedelta, timezone

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.domain.ids import first_id, made_at, sortable_id
from service.domain.validation import new_validation_id
from service.domain.weeks import Week

MOMENTS = st.datetimes(datetime(1970, 1, 1), datetime(9000, 1, 1), timezones=st.just(UTC))


@given(MOMENTS)
def test_the_first_id_of_a_week_is_from_its_monday_and_those_before_belong_to_the_week_before(moment):
    week = Week.of(moment)
    assert week.begins_at <= moment < week.ends_at == week.later(1).begins_at
    assert week.begins_at.weekday() == 0
    assert week.first_id <= first_id("val_", moment) < week.end_id == week.later(1).first_id
    assert Week.of_validation(week.first_id) == week
    last = first_id("val_", week.ends_at - timedelta(milliseconds=1))[:-16] + "z" * 16
    assert week.first_id < last < week.end_id
    assert Week.of_validation(last) == week


@given(MOMENTS)
def test_an_id_says_to_the_millisecond_when_it_was_made(moment):
    assert moment - timedelta(milliseconds=1) < made_at("x_", first_id("x_", moment)) <= moment


def test_an_id_made_now_lies_in_this_week():
    before = datetime.now(UTC)
    week = Week.of_validation(new_validation_id())
    assert week in (Week.of(before), Week.of(datetime.now(UTC)))


def test_weeks_are_of_utc():
    late_sunday_there = datetime(2026, 1, 4, 22, tzinfo=timezone(timedelta(hours=-5)))
    assert Week.of(late_sunday_there) == Week(date(2026, 1, 5))


@pytest.mark.parametrize("text", ["", "val_", "val_x", "val_" + "u" * 26, sortable_id("run_"), "val_" + "z" * 26])
def test_other_text_is_of_no_week(text):
    assert Week.of_validation(text) is None
