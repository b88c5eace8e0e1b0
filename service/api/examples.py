"""Examples that stand in the OpenAPI document. Tests send the requests and check the answers' shapes."""

from __future__ import annotations

from typing import Any

VALIDATE_REQUESTS: dict[str, dict[str, Any]] = {
    "default": {"summary": "dp=2, pp=2, both probes, the buggy and two right orderings", "value": {}},
    "larger": {
        "summary": "A larger mesh and model, spread over four nodes",
        "value": {
            "mesh": {"dp": 4, "pp": 4},
            "model": {"vocab_size": 512, "hidden_size": 128, "num_layers": 8, "num_heads": 8, "seq_len": 64},
            "batch": {"micro_batch_size": 1, "num_microbatches": 8},
            "orderings": ["buggy", "own_bucket"],
            "dtype": "bfloat16",
            "placement": {"nodes": 4, "strategy": "SPREAD"},
            "labels": {"team": "research"},
        },
    },
    "interleaved": {
        "summary": "Two model chunks a rank (interleaved 1F1B): the tied weight is on the first and the last of them",
        "value": {"mesh": {"dp": 2, "pp": 2, "vpp": 2}, "batch": {"num_microbatches": 4}},
    },
    "overlap": {
        "summary": "Each bucket is scattered in the midst of backward: the reporter's fix is wrong then, and a control",
        "value": {"overlap": True, "bucket_size": 8000, "orderings": ["buggy", "fixed", "own_bucket"]},
    },
    "averaging": {
        "summary": "The collective averages, instead of a scaling by 1/dp before it",
        "value": {"average_in_collective": True, "orderings": ["buggy", "own_bucket"]},
    },
    "num_tokens": {
        "summary": "Padded batches, gradients divided by all valid tokens; the mean of the ranks' means is a control",
        "value": {"normalization": "num_tokens", "orderings": ["buggy", "mean_of_means", "fixed", "own_bucket"]},
    },
    "bf16": {
        "summary": "Gradients are accumulated in float32 and summed over dp in bfloat16",
        "value": {"dtype": "bfloat16", "grad_reduce_dtype": "bfloat16"},
    },
    "drill": {
        "summary": "Kill a rank on purpose, to see how a failure is reported",
        "value": {"drill": {"fault": "kill_in_collective", "world_rank": 3, "step": 1}},
    },
}

PREDICT_REQUESTS: dict[str, dict[str, Any]] = {
    "default": {"summary": "The reported bug on the tiny model", "value": {}},
    "version": {
        "summary": "A Megatron-LM release, a real model",
        "value": {"version": "v0.12", "mesh": {"dp": 8, "pp": 4}, "model": "gpt3-175b"},
    },
    "overlap": {
        "summary": "The reporter's fix where the gradient sync overlaps with backward",
        "value": {"ordering": "fixed", "overlap": True, "bucket_size": 8000},
    },
    "interleaved": {
        "summary": "Two model chunks a rank: each has a buffer of its own, so that other elements are misowned",
        "value": {"version": "v0.12", "mesh": {"dp": 8, "pp": 4, "vpp": 2}, "model": "gpt2-xl"},
    },
}

VALIDATION: dict[str, Any] = {
    "schema_version": 1,
    "verdict_rules_version": 1,
    "id": "val_01kbxxample000000000000000",
    "state": "completed",
    "verdict": "pass",
    "cause": None,
    "reasons": [
        {
            "code": "clean",
            "message": "every subject is clean and every control was seen where predicted",
            "judge": None,
            "world_rank": None,
            "node": None,
            "phase": None,
            "parameter": None,
            "element": None,
        }
    ],
    "observations": [],
    "collectives": [
        {
            "group": "dp",
            "primitive": "reduce_scatter",
            "op": "sum",
            "num_elements": [1, 129],
            "num_ranks": 4,
            "size_bytes": 1040,
            "seconds": 0.0004,
            "wrong_elements": 0,
            "ok": True,
        }
    ],
    "request": {"cluster": "default", "mesh": {"dp": 2, "pp": 2, "tp": 1, "vpp": 1}, "model": "tiny"},
    "trials": [
        {
            "probe": "exact",
            "ordering": "buggy",
            "role": "control",
            "predicted_diverged_elements": 8192,
            "diverged_elements": 8192,
            "tied_max_abs": 640.0,
            "reference_max_abs": 640.0,
            "grad_norm": 6964.389330731015,
            "grad_norm_max_error": 3.624000618415266,
            "ok": True,
        }
    ],
    "error": None,
    "fingerprint": [{"world_rank": 0, "node": "node-0", "backend": "gloo", "torch": "2.13.0"}],
    "timings": {"gang_s": 0.02, "trials_s": 0.11},
    "created_at": "2026-01-01T00:00:00Z",
    "started_at": "2026-01-01T00:00:00.050000Z",
    "finished_at": "2026-01-01T00:00:00.180000Z",
    "attempt": 1,
    "cancel_requested_at": None,
    "created_by": None,
}
