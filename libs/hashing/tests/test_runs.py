import pytest

from hybridkv.hashing import RUN_CHUNKS, KeyRuns


def run(name: str) -> list[bytes]:
    return [f"{name} {i}".encode() for i in range(RUN_CHUNKS)]


def test_a_run_is_found_by_its_group_and_its_last_hash() -> None:
    runs = KeyRuns(2)
    runs.remember(0, b"hash", run("a"))
    assert runs.find(0, b"hash") == run("a")
    assert runs.find(1, b"hash") is None
    assert runs.find(0, b"other") is None


def test_the_least_recently_used_run_goes_first_and_is_counted() -> None:
    runs = KeyRuns(1, max_keys=2 * RUN_CHUNKS + 1)
    runs.remember(0, b"a", run("a"))
    runs.remember(0, b"b", run("b"))
    runs.find(0, b"a")
    runs.remember(0, b"c", run("c"))
    assert [runs.find(0, name) is not None for name in (b"a", b"b", b"c")] == [True, False, True]
    assert (runs.num_keys, runs.num_dropped) == (2 * RUN_CHUNKS, 1)


def test_remembering_a_run_again_makes_it_recent_and_drops_nothing() -> None:
    runs = KeyRuns(1, max_keys=2 * RUN_CHUNKS)
    for name in (b"a", b"b", b"a", b"c"):
        runs.remember(0, name, run(name.decode()))
    assert [runs.find(0, name) is not None for name in (b"a", b"b", b"c")] == [True, False, True]
    assert runs.num_dropped == 1


def test_half_a_run_is_refused() -> None:
    with pytest.raises(ValueError, match="a run is"):
        KeyRuns(1).remember(0, b"a", run("a")[1:])


@pytest.mark.parametrize(("num_groups", "max_keys"), [(0, 100), (1, RUN_CHUNKS - 1)])
def test_sizes_that_hold_nothing_are_refused(num_groups: int, max_keys: int) -> None:
    with pytest.raises(ValueError, match="must be"):
        KeyRuns(num_groups, max_keys)
