"""Predictions against loops over elements, against the figures of the real library, and at full scale."""

from __future__ import annotations

import time
from dataclasses import replace

import brute_layout
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from workers.contract import TINY, BatchSpec, Mesh, ModelSpec, Normalization, OrderingName, ProbeName, TrialSpec
from workers.errors import SpecError
from workers.intervals import Interval, count
from workers.layout import RULES, BufferLayout, LayoutRule, LayoutVersion, build_layout
from workers.parameters import ParameterShape, gpt_stage_parameters
from workers.prediction import (
    BLIND_TO_OWNERS,
    Overlap,
    misowned_intervals,
    ordering_layouts,
    predict,
    predict_model,
    trial_exposed,
    trial_misowned,
)
from workers.public_models import MODELS

ODD = ModelSpec(vocab_size=64, hidden_size=32, num_layers=2, num_heads=4, seq_len=16)


BY_LAYOUT = [name for name in OrderingName if name not in BLIND_TO_OWNERS]


def odd_stage(pp_rank: int) -> tuple[ParameterShape, ...]:
    return gpt_stage_parameters(ODD, 2, pp_rank, ffn_hidden_size=64)


def trial(ordering: OrderingName, mesh: Mesh, probe: ProbeName = ProbeName.GPT, model: ModelSpec = TINY) -> TrialSpec:
    return TrialSpec(probe, ordering, mesh, model, BatchSpec(1, 4))


def owners_by_element(layout: BufferLayout, name: str) -> list[int]:
    placed = layout.param(name)
    owners = []
    for element in range(placed.start, placed.stop):
        (bucket,) = [b for b in layout.buckets if b.offset <= element < b.offset + b.numel]
        owners.append((element - bucket.offset) // (bucket.numel // layout.dp))
    return owners


@given(
    before=st.lists(st.integers(1, 70), max_size=4),
    after=st.lists(st.integers(1, 70), max_size=4),
    tied=st.integers(1, 300),
    rule=st.sampled_from([rule for rule in RULES.values() if not rule.asserts_start]),
    dp=st.integers(1, 9),
)
def test_misowned_element_by_element(before: list[int], after: list[int], tied: int, rule: LayoutRule, dp: int) -> None:
    """The buffer reverses registration: wte comes last behind `before`, lm_head first with `after` behind it."""
    weight = ParameterShape("tied", (tied,), shared_embedding=True)
    first = [weight, *(ParameterShape(f"b{i}", (n,)) for i, n in enumerate(before))]
    last = [*(ParameterShape(f"a{i}", (n,)) for i, n in enumerate(after)), weight]
    wte, lm_head = build_layout(first, rule, dp), build_layout(last, rule, dp)
    a, b = owners_by_element(wte, "tied"), owners_by_element(lm_head, "tied")
    wrong = [element for element in range(tied) if a[element] != b[element]]
    misowned = misowned_intervals(wte, lm_head)
    assert [e for interval in misowned for e in range(interval.start, interval.stop)] == wrong
    prediction = predict(rule, Mesh(dp=dp, pp=2), first, last)
    assert prediction.ranges == misowned
    assert prediction.misowned_by_wte_owner == tuple(sum(a[e] == d for e in wrong) for d in range(dp))
    assert prediction.misowned_by_lm_head_owner == tuple(sum(b[e] == d for e in wrong) for d in range(dp))
    assert prediction.fraction == pytest.approx(len(wrong) / tied)
    if rule.version is LayoutVersion.V0_13:
        assert not wrong


@pytest.mark.parametrize("version", list(LayoutVersion))
@settings(deadline=None, max_examples=60)
@given(
    before=st.lists(st.integers(1, 200), max_size=4),
    after=st.lists(st.integers(1, 200), max_size=4),
    tied=st.integers(1, 300),
    dp=st.integers(1, 9),
    overlap=st.none() | st.builds(Overlap, st.integers(1, 300)),
)
def test_every_version_element_by_element(
    version: LayoutVersion, before: list[int], after: list[int], tied: int, dp: int, overlap: Overlap | None
) -> None:
    weight = ParameterShape("tied", (tied,), shared_embedding=True)
    first = [weight, *(ParameterShape(f"b{i}", (n,)) for i, n in enumerate(before))]
    last = [*(ParameterShape(f"a{i}", (n,)) for i, n in enumerate(after)), weight]
    prediction = predict(version, Mesh(dp=dp, pp=2), first, last, overlap)
    try:
        wte, early = brute_layout.tied_owners(first, version, dp, overlap.bucket_size if overlap else None)
        lm_head, _ = brute_layout.tied_owners(last, version, dp)
    except brute_layout.StopsByItselfError:
        assert prediction.asserts is not None
        assert prediction.wrong_elements == 0
        return
    assert prediction.asserts is None
    misowned = [e for e in range(tied) if wte[e] != lm_head[e]]
    late = [e for e in range(tied) if overlap and dp > 1 and early[e]]
    listed = [e for part in prediction.ranges for e in range(part.start, part.stop)]
    assert listed == sorted({*misowned, *late})
    assert (prediction.misowned_elements, prediction.early_elements) == (len(misowned), len(late))
    assert prediction.fraction == len(listed) / tied
    assert prediction.misowned_by_wte_owner == tuple(sum(wte[e] == d for e in misowned) for d in range(dp))
    assert prediction.misowned_by_lm_head_owner == tuple(sum(lm_head[e] == d for e in misowned) for d in range(dp))


def test_the_loops_over_elements_know_every_version() -> None:
    assert list(brute_layout.TABLE) == list(LayoutVersion)


@pytest.mark.parametrize(
    ("version", "misowned"),
    [("de4028a", 2048), ("daf0006", 0), ("a67ffda", 0), ("0650d83", 128), ("v0.13", 0)],
)
def test_tiny_at_dp2_as_the_real_library_has_it(version: str, misowned: int) -> None:
    prediction = predict_model(LayoutVersion(version), Mesh(2, 2), TINY)
    assert (prediction.misowned_elements, prediction.num_elements, prediction.asserts) == (misowned, 2048, None)


@pytest.mark.parametrize(("dp", "misowned"), [(2, 128), (3, 0), (4, 256), (128, 0)])
def test_v0_12_depends_on_dp(dp: int, misowned: int) -> None:
    prediction = predict(LayoutVersion.V0_9, Mesh(dp, 2), odd_stage(0), odd_stage(1))
    assert prediction.misowned_elements == misowned


def test_the_unaligned_edge_of_0650d83() -> None:
    prediction = predict_model(OrderingName.OWN_BUCKET_UNALIGNED, Mesh(2, 2), TINY)
    assert prediction.ranges == (Interval(0, 64), Interval(1024, 1088))
    assert prediction.misowned_by_wte_owner == (64, 64)
    assert prediction.misowned_by_lm_head_owner == (64, 64)
    assert prediction.fraction == 128 / 2048


def test_overlap_scatters_what_lies_in_padding_before_its_last_gradient_comes() -> None:
    overlapped = predict_model(OrderingName.OWN_BUCKET_UNALIGNED, Mesh(2, 2), TINY, overlap=Overlap())
    assert (overlapped.misowned_elements, overlapped.early_elements, overlapped.wrong_elements) == (128, 64, 128)
    # Other buckets on the first stage leave other padding.
    cut = predict_model(OrderingName.OWN_BUCKET_UNALIGNED, Mesh(2, 2), TINY, overlap=Overlap(3000))
    assert (cut.misowned_elements, cut.early_elements, cut.wrong_elements) == (64, 32, 64)
    assert predict_model(OrderingName.OWN_BUCKET, Mesh(2, 2), TINY, overlap=Overlap(8000)).wrong_elements == 0
    assert predict_model(OrderingName.ALL_REDUCE, Mesh(2, 2), TINY, overlap=Overlap(8000)).wrong_elements == 0


def test_overlap_makes_the_reporter_s_fix_the_bug() -> None:
    fixed = predict_model(OrderingName.FIXED, Mesh(2, 2), TINY, overlap=Overlap())
    assert fixed == predict_model(OrderingName.BUGGY, Mesh(2, 2), TINY, overlap=Overlap())
    assert fixed.misowned_elements == 2048
    for mesh in (Mesh(1, 2), Mesh(2, 1)):
        assert predict_model(OrderingName.OWN_BUCKET_UNALIGNED, mesh, TINY, overlap=Overlap()).wrong_elements == 0


def test_a_trial_and_a_forecast_agree_under_overlap() -> None:
    for ordering in BY_LAYOUT:
        spec = replace(trial(ordering, Mesh(3, 2)), overlap=True, bucket_size=5000)
        assert trial_exposed(spec) == predict_model(ordering, Mesh(3, 2), TINY, overlap=Overlap(5000)).ranges


@pytest.mark.parametrize(("dp", "elements"), [(2, 40_000_000), (40, 40_000_000), (41, 41_000_000)])
def test_megatron_s_own_bucket_size(dp: int, elements: int) -> None:
    assert Overlap().resolved(dp) == elements


def test_a_version_that_asserts() -> None:
    model = replace(TINY, hidden_size=31, num_heads=1)
    prediction = predict_model(LayoutVersion.A67FFDA, Mesh(7, 2), model)
    assert prediction.asserts is not None
    assert "not a multiple of dp 7" in prediction.asserts
    assert (prediction.misowned_elements, prediction.num_elements, prediction.ranges) == (0, 64 * 31, ())


@pytest.mark.parametrize("mesh", [Mesh(1, 2), Mesh(2, 1), Mesh(1, 1)])
@pytest.mark.parametrize("subject", [*BY_LAYOUT, *LayoutVersion])
def test_nothing_is_misowned_without_dp_or_pp(subject: OrderingName | LayoutVersion, mesh: Mesh) -> None:
    prediction = predict_model(subject, mesh, TINY)
    assert (prediction.misowned_elements, prediction.num_elements) == (0, 2048)


@pytest.mark.parametrize("ordering", [OrderingName.FIXED, OrderingName.ALL_REDUCE, OrderingName.OWN_BUCKET])
def test_subjects_are_never_misowned(ordering: OrderingName) -> None:
    for mesh in (Mesh(2, 2), Mesh(3, 2), Mesh(8, 4), Mesh(5, 3)):
        assert predict_model(ordering, mesh, TINY).misowned_elements == 0
        assert trial_misowned(trial(ordering, mesh)) == ()


def test_untied_weights_are_never_misowned() -> None:
    prediction = predict_model(LayoutVersion.DE4028A, Mesh(2, 2), TINY, tied=False)
    assert (prediction.misowned_elements, prediction.num_elements) == (0, 2048)


def test_a_trial_predicts_from_its_own_probe() -> None:
    gpt = trial_misowned(trial(OrderingName.BUGGY, Mesh(2, 2)))
    exact = trial_misowned(trial(OrderingName.BUGGY, Mesh(2, 2), ProbeName.EXACT))
    assert gpt == (Interval(0, 2048),)
    # 3104 elements a stage, with 1056 in front of wte and none in front of lm_head, cut in half at 1552.
    assert exact == (Interval(496, 1552),)
    assert trial_misowned(trial(OrderingName.BUGGY, Mesh(2, 1))) == ()
    assert trial_misowned(trial(OrderingName.BUGGY, Mesh(1, 2))) == ()


def test_stages_of_only_the_embedding_are_sharded_alike() -> None:
    alone = trial(OrderingName.BUGGY, Mesh(4, 2), ProbeName.EXACT, replace(TINY, num_layers=0))
    wte, lm_head = ordering_layouts(alone)
    assert [len(layout.params) for layout in (wte, lm_head)] == [1, 1]
    assert trial_misowned(alone) == ()


def test_175_billion_parameters_at_65536_ranks_take_well_under_a_second() -> None:
    started_s = time.perf_counter()
    predictions = [predict_model(v, Mesh(dp=1024, pp=64), MODELS["gpt3-175b"].model) for v in LayoutVersion]
    assert time.perf_counter() - started_s < 1.0
    assert predictions[0].misowned_elements > 0
    assert all(sum(p.misowned_by_wte_owner) == p.misowned_elements == count(p.ranges) for p in predictions)


def test_the_widest_data_parallel_group_takes_no_longer() -> None:
    """daf0006 gets one range wrong for each of 16,384 owners here: anything quadratic in them takes minutes."""
    started_s = time.perf_counter()
    prediction = predict_model(LayoutVersion.DAF0006, Mesh(dp=16_384, pp=64), MODELS["gpt3-175b"].model)
    assert time.perf_counter() - started_s < 5.0
    assert len(prediction.ranges) == 16_384
    assert sum(prediction.misowned_by_wte_owner) == sum(prediction.misowned_by_lm_head_owner) == 134_217_728


def test_a_mean_of_means_exposes_everything_where_ranks_hold_unlike_numbers() -> None:
    spec = replace(trial(OrderingName.MEAN_OF_MEANS, Mesh(2, 1)), normalization=Normalization.NUM_TOKENS)
    assert trial_exposed(spec) == (Interval(0, 2048),)
    assert trial_exposed(replace(spec, mesh=Mesh(1, 2))) == ()
    assert trial_exposed(replace(spec, model=replace(TINY, seq_len=1))) == ()


def test_what_is_not_known_is_refused() -> None:
    for ordering in BLIND_TO_OWNERS:
        with pytest.raises(SpecError, match="name another ordering"):
            predict_model(ordering, Mesh(2, 2), TINY)
    with pytest.raises(SpecError, match="tp 3 does not divide"):
        predict_model(OrderingName.BUGGY, Mesh(2, 2, tp=3), TINY)
    twice = [ParameterShape("a", (2,), True), ParameterShape("b", (2,), True)]
    with pytest.raises(SpecError, match="one copy of the tied weight at most"):
        predict(OrderingName.BUGGY, Mesh(2, 2), twice, twice)
    alone = build_layout([ParameterShape("a", (2,))], RULES[LayoutVersion.V0_13], 2)
    with pytest.raises(SpecError, match="holds 0 copies"):
        misowned_intervals(alone, alone)
