from __future__ import annotations

from workers.contract import Normalization, OrderingName, Role
from workers.layout import RULES, LayoutVersion
from workers.orderings import ORDERINGS, SyncPhase, compose

LAYERNORMS = (OrderingName.LAYERNORM_SKIPPED, OrderingName.LAYERNORM_AVERAGED)
SCATTER, ALL_REDUCE, TIE = SyncPhase.DP_REDUCE_SCATTER, SyncPhase.DP_ALL_REDUCE, SyncPhase.TIE_ALL_REDUCE


def test_the_catalogue_is_complete_and_keyed_by_name() -> None:
    assert list(ORDERINGS) == list(OrderingName)
    assert all(name is ordering.name for name, ordering in ORDERINGS.items())
    assert all(o.source and o.summary and o.expectation for o in ORDERINGS.values())


def test_layout_and_phases() -> None:
    assert {name.value: (o.layout.value, o.phases) for name, o in ORDERINGS.items()} == {
        "buggy": ("de4028a", (SCATTER, TIE)),
        "fixed": ("de4028a", (TIE, SCATTER)),
        "own_bucket": ("v0.13", (SCATTER, TIE)),
        "own_bucket_unaligned": ("0650d83", (SCATTER, TIE)),
        "all_reduce": ("de4028a", (ALL_REDUCE, TIE)),
        "mean_of_means": ("v0.13", (SyncPhase.OWN_TOKENS_SCALE, SCATTER, TIE)),
        "layernorm_skipped": ("v0.13", (SCATTER, TIE)),
        "layernorm_averaged": ("v0.13", (SCATTER, SyncPhase.LAYERNORM_AVERAGE, TIE)),
    }
    assert ORDERINGS[OrderingName.BUGGY].rule is RULES[LayoutVersion.DE4028A]


def test_roles_and_what_follows_from_the_phases() -> None:
    controls = {name for name, ordering in ORDERINGS.items() if ordering.role is Role.CONTROL}
    assert controls == {OrderingName.BUGGY, OrderingName.OWN_BUCKET_UNALIGNED, OrderingName.MEAN_OF_MEANS, *LAYERNORMS}
    bit_tied = {name for name, ordering in ORDERINGS.items() if ordering.bit_tied}
    assert bit_tied == {OrderingName.OWN_BUCKET, OrderingName.ALL_REDUCE, OrderingName.MEAN_OF_MEANS, *LAYERNORMS}
    sharded = {name for name, ordering in ORDERINGS.items() if ordering.distributed_optimizer}
    assert sharded == set(OrderingName) - {OrderingName.ALL_REDUCE}
    exposed = {name for name, ordering in ORDERINGS.items() if ordering.ties_after_scatter}
    assert exposed == set(OrderingName) - {OrderingName.FIXED, OrderingName.ALL_REDUCE}


def test_overlap_takes_the_tie_in_time_from_the_reporter_s_fix_alone() -> None:
    for name, ordering in ORDERINGS.items():
        overlapped = ordering.overlapped()
        if name is OrderingName.FIXED:
            assert (overlapped.phases, overlapped.role) == ((SCATTER, TIE), Role.CONTROL)
            assert overlapped.ties_after_scatter
        else:
            assert overlapped is ordering


def test_division_by_valid_tokens_comes_last_and_needs_no_pre_scale() -> None:
    by_tokens, by_microbatches = Normalization.NUM_TOKENS, Normalization.MICROBATCHES
    for name, ordering in ORDERINGS.items():
        if name is OrderingName.MEAN_OF_MEANS:
            assert ordering.normalized(by_tokens) is ordering
            assert ordering.normalized(by_microbatches).phases == (SCATTER, TIE)
        else:
            assert ordering.normalized(by_microbatches) is ordering
            assert ordering.normalized(by_tokens).phases == (*ordering.phases, SyncPhase.NUM_TOKENS_SCALE)
            assert ordering.normalized(by_tokens).ties_after_scatter == ordering.ties_after_scatter
    fixed = compose(OrderingName.FIXED, True, by_tokens)
    assert fixed.phases == (SCATTER, TIE, SyncPhase.NUM_TOKENS_SCALE)
    assert fixed.role is Role.CONTROL


def test_layernorms_are_summed_after_the_dp_sync_where_there_are_tensor_ranks() -> None:
    summed, skipped = SyncPhase.LAYERNORM_ALL_REDUCE, OrderingName.LAYERNORM_SKIPPED
    phases = {name: compose(name, False, Normalization.MICROBATCHES, 2).phases for name in OrderingName}
    assert phases[OrderingName.BUGGY] == (SCATTER, summed, TIE)
    assert phases[OrderingName.FIXED] == (TIE, SCATTER, summed)
    assert phases[OrderingName.ALL_REDUCE] == (ALL_REDUCE, summed, TIE)
    assert phases[skipped] == (SCATTER, TIE)
    assert phases[OrderingName.LAYERNORM_AVERAGED] == (SCATTER, SyncPhase.LAYERNORM_AVERAGE, TIE)
    overlapped = compose(OrderingName.FIXED, True, Normalization.NUM_TOKENS, 2)
    assert overlapped.phases == (SCATTER, summed, TIE, SyncPhase.NUM_TOKENS_SCALE)
    for name, ordering in ORDERINGS.items():
        alone = ordering.over_tensor_ranks(1)
        assert (alone is ordering) == (name is not OrderingName.LAYERNORM_AVERAGED)
        assert not set(alone.phases) & {summed, SyncPhase.LAYERNORM_AVERAGE}
