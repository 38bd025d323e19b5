"""README.md runs as printed, where it needs torch."""

from documents import programs, run


def test_the_example_of_views_runs() -> None:
    [program] = programs(with_torch=True)
    run(program)
