"""Weeks of validations, by their ids: the unit in which what was measured is kept, and removed. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, date, datetime, time, timedelta
from typing import Self

from service.domain.ids import first_id, made_at
from service.domain.validation import ID_PREFIX


@dataclass(frozen=True, slots=True, order=True)
class Week:
    """From a Monday to the next, in UTC."""

    monday: date

    @classmethod
    def of(cls, moment: datetime) -> Self:
        """The week in which a moment lies."""
        day = moment.astimezone(UTC).date()
        return cls(day - timedelta(days=day.weekday()))

    @classmethod
    def of_validation(cls, validation_id: str) -> Self | None:
        """The week in which a validation was asked for; None where its id does not say."""
        moment = made_at(ID_PREFIX, validation_id)
        return None if moment is None else cls.of(moment)

    @property
    def begins_at(self) -> datetime:
        """Its first moment."""
        return datetime.combine(self.monday, time(), UTC)

    @property
    def ends_at(self) -> datetime:
        """The first moment after it."""
        return self.begins_at + timedelta(weeks=1)

    @property
    def first_id(self) -> str:
        """No id of the week sorts before it."""
        return first_id(ID_PREFIX, self.begins_at)

    @property
    def end_id(self) -> str:
        """Every id of the week sorts before it."""
        return first_id(ID_PREFIX, self.ends_at)

    def later(self, num_weeks: int) -> Self:
        """The week that begins so many weeks after this one."""
        return type(self)(self.monday + timedelta(weeks=num_weeks))
