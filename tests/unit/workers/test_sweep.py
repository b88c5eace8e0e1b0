"""The grid is the single predictions, in order."""

from __future__ import annotations

from workers.contract import Mesh
from workers.layout import LayoutVersion
from workers.prediction import Overlap, predict_model
from workers.public_models import MODELS
from workers.sweep import SweptModel, sweep


def test_every_case_is_the_prediction_of_its_model_width_and_version() -> None:
    models = {name: SweptModel(MODELS[name].model, MODELS[name].tied) for name in ("tiny", "gpt2-xl", "gpt-neox-20b")}
    for overlap in (None, Overlap(1000)):
        cases = list(sweep(models, (2, 3, 64), 4, LayoutVersion, overlap))
        assert len(cases) == len(LayoutVersion) * 3 * 3
        for case in cases:
            swept = models[case.model]
            alone = predict_model(case.version, Mesh(case.dp, 4), swept.model, tied=swept.tied, overlap=overlap)
            assert (case.asserts, case.wrong_elements, case.num_elements, case.fraction) == (
                alone.asserts,
                alone.wrong_elements,
                alone.num_elements,
                alone.fraction,
            )


def test_each_slip_hits_other_models_and_the_last_version_none() -> None:
    models = {name: SweptModel(entry.model, entry.tied) for name, entry in MODELS.items()}
    hit = {version: set[tuple[str, int]]() for version in LayoutVersion}
    for case in sweep(models, (2, 3, 6, 8, 1024), 4, LayoutVersion):
        if case.wrong_elements:
            hit[case.version].add((case.model, case.dp))
    assert ("gpt3-2.7b", 6) in hit[LayoutVersion.DAF0006]
    assert ("gpt3-2.7b", 2) not in hit[LayoutVersion.DAF0006]
    assert hit[LayoutVersion.C0650D83] == {("tiny", 2), ("tiny", 8)}
    assert hit[LayoutVersion.V0_13] == set()
    assert all("gpt-neox-20b" not in {model for model, _ in hits} for hits in hit.values())
