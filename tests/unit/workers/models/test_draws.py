import pytest
import torch

from workers.models import draws


def test_a_stream_follows_from_its_seed_and_name_alone():
    first = draws.integers(0, 1000, (50,), draws.stream(7, "weights", 3))
    torch.manual_seed(99)
    assert torch.equal(first, draws.integers(0, 1000, (50,), draws.stream(7, "weights", 3)))


@pytest.mark.parametrize("other", [(8, "weights", 3), (7, "weights", 4), (7, "tokens", 3), (7, "weights")])
def test_streams_of_other_names_differ(other):
    first = draws.integers(0, 1000, (50,), draws.stream(7, "weights", 3))
    assert not torch.equal(first, draws.integers(0, 1000, (50,), draws.stream(*other)))


def test_the_global_generator_is_untouched():
    before = torch.get_rng_state()
    draws.uniform((10,), 0.02, draws.stream(0, "x"))
    draws.tiled_permutations(5, 12, draws.stream(0, "x"))
    assert torch.equal(before, torch.get_rng_state())


def test_uniform_has_the_asked_spread():
    values = draws.uniform((200, 100), 0.02, draws.stream(1, "spread"))
    assert values.dtype == torch.float32
    assert values.std().item() == pytest.approx(0.02, rel=0.02)
    assert values.abs().max().item() <= 0.02 * 3**0.5
    assert abs(values.mean().item()) < 0.001


@pytest.mark.parametrize(("size", "count"), [(5, 5), (5, 12), (5, 3), (1, 4)])
def test_tiled_permutations_repeat_no_id_before_all_were_used(size, count):
    ids = draws.tiled_permutations(size, count, draws.stream(2, "ids"))
    assert ids.dtype == torch.int64
    assert ids.numel() == count
    for start in range(0, count, size):
        tile = ids[start : start + size]
        assert tile.unique().numel() == tile.numel()
        assert tile.min() >= 0
        assert tile.max() < size
