"""When a bucket is started, and what waits for it."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch
from torch import nn

from workers.errors import OverlapError
from workers.grad_buffer import GradBuffer
from workers.layout import RULES, LayoutVersion, build_layout
from workers.overlap import BucketLauncher
from workers.parameters import ParameterShape

MICROBATCHES = 3


class Chain(nn.Module):
    """`last` is registered last, so that it comes first in the buffer and in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.tied = nn.Parameter(torch.ones(8))
        self.middle = nn.Parameter(torch.ones(8))
        self.last = nn.Parameter(torch.ones(8))

    def forward(self, scale: float) -> torch.Tensor:
        return (((self.tied * scale) * self.middle) * self.last).sum()


@dataclass
class Log:
    """Started and waited for buckets, and the buffer as it was then."""

    events: list[str] = field(default_factory=list)
    seen: list[list[float]] = field(default_factory=list)


@dataclass
class Handle:
    name: str
    log: Log

    def wait(self) -> None:
        self.log.events.append(f"wait {self.name}")


def launched(version: LayoutVersion, bucket_size: int | None) -> tuple[Chain, GradBuffer, BucketLauncher, Log]:
    module, log = Chain(), Log()
    shapes = [ParameterShape(name, (8,), name == "tied") for name, _ in module.named_parameters()]
    buffer = GradBuffer(build_layout(shapes, RULES[version], 2, bucket_size), torch.device("cpu"), "tied")

    def start(index: int) -> Handle:
        log.events.append(f"start {index}")
        log.seen.append(buffer.bucket(index).tolist())
        return Handle(str(index), log)

    return module, buffer, BucketLauncher(module, buffer, MICROBATCHES, start), log


def run_step(module: Chain) -> None:
    for _ in range(MICROBATCHES):
        module(1.0).backward()


def test_a_bucket_starts_once_its_last_gradient_is_in_it() -> None:
    module, buffer, launcher, log = launched(LayoutVersion.DE4028A, bucket_size=8)
    run_step(module)
    assert log.events == ["start 0", "start 1", "start 2"]
    assert log.seen == [[3.0] * 8] * 3
    launcher.finish()
    assert log.events[3:] == ["wait 0", "wait 1", "wait 2"]
    launcher.reset()
    buffer.zero()
    run_step(module)
    launcher.finish()
    assert log.seen[3:] == [[3.0] * 8] * 3


def test_nothing_starts_before_the_last_microbatch() -> None:
    module, _, launcher, log = launched(LayoutVersion.DE4028A, bucket_size=None)
    for _ in range(MICROBATCHES - 1):
        module(1.0).backward()
    assert log.events == []
    with pytest.raises(OverlapError, match="1 of 1 buckets were never complete") as raised:
        launcher.finish()
    assert "'tied': 2" in str(raised.value)


def test_a_gradient_in_another_bucket_s_padding_waits_and_comes_late() -> None:
    # 16 elements before it, padded to 128: the tied weight lies in the first bucket's padding, its own has none of it.
    module, buffer, launcher, log = launched(LayoutVersion.C0650D83, bucket_size=None)
    run_step(module)
    assert log.events == ["start 0", "wait 0", "start 1"]
    assert log.seen[0][:24] == [3.0] * 16 + [2.0] * 8
    assert buffer.grad("tied").tolist() == [3.0] * 8
    launcher.finish()
    assert log.events[3:] == ["wait 1"]


def test_a_weight_in_a_bucket_of_its_own_is_whole_when_it_starts() -> None:
    module, buffer, launcher, log = launched(LayoutVersion.V0_13, bucket_size=None)
    run_step(module)
    launcher.finish()
    assert log.events == ["start 0", "start 1", "wait 0", "wait 1"]
    assert log.seen[1][:8] == [3.0] * 8
    assert buffer.layout.param("tied").start == buffer.layout.buckets[1].offset
