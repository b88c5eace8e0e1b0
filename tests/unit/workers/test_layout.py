"""Layout arithmetic against loops over elements; the versions themselves are held in tests/golden/test_layout.py."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workers.errors import LayoutAssertionError, SpecError
from workers.intervals import Interval, count
from workers.layout import RULES, BufferLayout, LayoutRule, LayoutVersion, PrescaleKind, build_layout, resolve
from workers.parameters import ParameterShape

sizes = st.lists(st.integers(1, 90), min_size=1, max_size=6)
non_asserting = st.sampled_from([rule for rule in RULES.values() if not rule.asserts_start])


def parameters(numels: list[int], tied_index: int) -> list[ParameterShape]:
    return [ParameterShape(f"p{i}", (numel,), i == tied_index) for i, numel in enumerate(numels)]


def owner_of(layout: BufferLayout, element: int) -> int:
    """By the definition, for one buffer element."""
    (bucket,) = [b for b in layout.buckets if b.offset <= element < b.offset + b.numel]
    return (element - bucket.offset) * layout.dp // bucket.numel


@given(sizes, st.integers(0, 5), non_asserting, st.integers(1, 7), st.none() | st.integers(1, 120))
def test_any_buffer(numels: list[int], tied_index: int, rule: LayoutRule, dp: int, bucket_size: int | None) -> None:
    layout = build_layout(parameters(numels, tied_index), rule, dp, bucket_size)
    divisor = rule.bucket_divisor(dp)
    assert [placed.name for placed in layout.params] == [f"p{i}" for i in reversed(range(len(numels)))]
    assert [placed.interval.size for placed in layout.params] == numels[::-1]
    assert all(placed.start % rule.parameter_alignment == 0 for placed in layout.params)
    assert all(a.stop <= b.start for a, b in pairwise(layout.params))
    assert layout.buckets[0].offset == 0
    assert all(a.offset + a.numel == b.offset for a, b in pairwise(layout.buckets))
    assert layout.buckets[-1].offset + layout.buckets[-1].numel == layout.buffer_numel >= layout.params[-1].stop
    assert all(bucket.numel % divisor == 0 and bucket.unpadded <= bucket.numel for bucket in layout.buckets)


@given(sizes, st.integers(0, 5), non_asserting, st.integers(1, 7))
def test_owners_element_by_element(numels: list[int], tied_index: int, rule: LayoutRule, dp: int) -> None:
    layout = build_layout(parameters(numels, tied_index), rule, dp)
    for placed in layout.params:
        by_element = [owner_of(layout, element) for element in range(placed.start, placed.stop)]
        by_interval = [dp_rank for part, dp_rank in layout.owners(placed.name) for _ in range(part.start, part.stop)]
        assert by_interval == by_element
        for dp_rank in range(dp):
            owned = layout.owned_intervals(placed.name, dp_rank)
            elements = [e for interval in owned for e in range(interval.start, interval.stop)]
            assert elements == [e for e, owner in enumerate(by_element) if owner == dp_rank]


@given(sizes, st.integers(0, 5), non_asserting, st.integers(1, 7))
def test_ranks_share_the_whole_buffer(numels: list[int], tied_index: int, rule: LayoutRule, dp: int) -> None:
    layout = build_layout(parameters(numels, tied_index), rule, dp)
    assert sum(count(layout.owned_buffer_intervals(dp_rank)) for dp_rank in range(dp)) == layout.buffer_numel


def test_more_shards_than_elements() -> None:
    layout = build_layout(parameters([3], 0), RULES[LayoutVersion.DE4028A], 5)
    assert layout.buffer_numel == 5
    assert [layout.owned_intervals("p0", dp_rank) for dp_rank in range(5)] == [
        (Interval(0, 1),),
        (Interval(1, 2),),
        (Interval(2, 3),),
        (),
        (),
    ]


def test_a_tied_weight_inside_the_padding_of_the_bucket_in_front() -> None:
    """130 elements before it leave 126 of padding, in which it fits: its own bucket has no elements."""
    layout = build_layout(parameters([20, 130], 0), RULES[LayoutVersion.C0650D83], 2)
    assert [(b.offset, b.numel, b.unpadded) for b in layout.buckets] == [(0, 256, 130), (256, 0, -106)]
    assert layout.param("p0").interval == Interval(130, 150)
    assert layout.owned_intervals("p0", 1) == (Interval(0, 20),)
    assert layout.owned_intervals("p0", 0) == ()


@pytest.mark.parametrize(
    ("version", "start"),
    [("de4028a", 3), ("daf0006", 3), ("v0.9", 128), ("v0.13", 128)],
)
def test_where_the_tied_weight_starts_behind_three_elements_at_dp2(version: str, start: int) -> None:
    layout = build_layout(parameters([8, 3], 0), RULES[LayoutVersion(version)], 2)
    # v0.9 finds 64 divisible by dp=2 and leaves it there, inside the first bucket's padding.
    assert layout.param("p0").start == (64 if version == "v0.9" else start)


@pytest.mark.parametrize(("version", "dp"), [("a67ffda", 2), ("0650d83", 2), ("v0.8", 3)])
def test_versions_that_assert(version: str, dp: int) -> None:
    with pytest.raises(LayoutAssertionError, match=rf"start at (3|64), .* dp {dp}: .*{version}"):
        build_layout(parameters([8, 3], 0), RULES[LayoutVersion(version)], dp)
    # Nothing in front of the tied weight, nothing to assert.
    assert build_layout(parameters([3, 8], 1), RULES[LayoutVersion(version)], dp).param("p1").start == 0


def test_padding_for_busbw_is_the_same_rule_with_a_larger_alignment() -> None:
    rule = replace(RULES[LayoutVersion.V0_13], bucket_alignment=2**16)
    layout = build_layout(parameters([8, 3], 0), rule, 3)
    assert [bucket.numel for bucket in layout.buckets] == [3 * 2**16, 3 * 2**16]


def test_bad_sizes_are_refused() -> None:
    rule = RULES[LayoutVersion.V0_13]
    with pytest.raises(SpecError, match="dp is 0"):
        build_layout(parameters([8], 0), rule, 0)
    with pytest.raises(SpecError, match="bucket_size is 0"):
        build_layout(parameters([8], 0), rule, 2, 0)
    layout = build_layout(parameters([8], 0), rule, 2)
    with pytest.raises(IndexError, match="dp_rank 2"):
        layout.shard(0, 2)
    with pytest.raises(KeyError, match="no parameter 'other'"):
        layout.param("other")


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("de4028a", "de4028a"),
        ("4b44f0a1ee", "0650d83"),
        ("0650d8335d45862c89f5ce1c0ea9c7acf15f5d7b", "0650d83"),
        ("v0.8", "v0.8"),
        ("core_v0.8.0", "v0.8"),
        ("0.9", "v0.9"),
        ("v0.10", "v0.9"),
        ("0.12.1", "v0.9"),
        ("core_r0.12.0", "v0.9"),
        ("v0.13", "v0.13"),
        ("v0.13.0rc2", "v0.13"),
        (" V0.14 ", "v0.13"),
        ("0.16.1", "v0.13"),
        ("1.0", "v0.13"),
    ],
)
def test_resolve(text: str, version: str) -> None:
    assert resolve(text) == version


@pytest.mark.parametrize("text", ["", "v0.7", "0.6.0", "main", "v0.x", "deadbeef", "de4028", "v0.9 or so", "13"])
def test_unknown_versions_are_refused(text: str) -> None:
    with pytest.raises(SpecError, match="has no known layout"):
        resolve(text)


def test_every_version_s_pre_scale_divides_up_to_a67ffda_and_multiplies_from_4b44f0a_on() -> None:
    dividing = {LayoutVersion.DE4028A, LayoutVersion.DAF0006, LayoutVersion.A67FFDA}
    assert {rule.version for rule in RULES.values() if rule.prescale is PrescaleKind.DIVIDE} == dividing
    assert set(RULES) == set(LayoutVersion)
