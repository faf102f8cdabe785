# SPDX-License-Identifier: Apache-2.0
from pathlib import Path

import pytest

from molt.records import EngineError, Fenced
from molt.trainer import ranks
from tests.unit.trainer import toy


def ask(rank: int, world: int) -> tuple[list[int], str, list[int], list[str]]:
    """What a rank comes to know: rank 0's answer, its error, everybody's number, its share."""
    answer = ranks.first(lambda: [rank])
    try:
        ranks.first(lambda: refuse(rank))
    except EngineError as error:
        return answer, str(error), ranks.gathered(10 + rank), [*ranks.share("abc")]
    raise AssertionError("the error stayed on rank 0")


def refuse(rank: int) -> None:
    assert rank == 0
    raise EngineError("engine 3 is gone")


def test_what_rank_0_learns_or_fails_with_reaches_every_rank(tmp_path: Path) -> None:
    first, second = toy.on_ranks(2, ask, tmp_path)
    assert first == ([0], "engine 3 is gone", [10, 11], ["a", "c"])
    assert second == ([0], "engine 3 is gone", [10, 11], ["b"])


def test_one_rank_alone_needs_no_group() -> None:
    def fenced() -> None:
        raise Fenced("a newer trainer")

    assert ranks.first(lambda: 7) == 7
    assert ranks.gathered(7) == [7]
    assert ranks.share("abc") == "abc"
    with pytest.raises(Fenced, match="a newer trainer"):
        ranks.first(fenced)
