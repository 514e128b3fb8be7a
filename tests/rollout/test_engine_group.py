"""How prompts are dealt out to the engines of several ranks when more are begun than a step needs."""

from hypothesis import given, settings
from hypothesis import strategies as st

from rlightning.rollout.engine_group import deal
from rlightning.rollout.in_flight import Group
from rlightning.types import Prompt


def make_groups(count: int) -> list[Group]:
    return [Group(Prompt(number, str(number), [number], {}), 0, number) for number in range(count)]


@settings(deadline=None)
@given(st.lists(st.integers(0, 6), min_size=1, max_size=4), st.integers(0, 9), st.sampled_from([1, 2]))
def test_each_rank_gets_wanted_groups_remainder_is_spread(numbers: list[int], more: int, size: int) -> None:
    wanted = dict(enumerate(numbers * size))
    total = sum(wanted.values())
    shares = deal(make_groups(total + more if total else 0), wanted, size)
    dealt = [group.number for share in shares.values() for group in share.groups]
    assert sorted(dealt) == list(range(total + more if total else 0))
    for rank, share in shares.items():
        if rank % size:
            assert (share.groups, share.wanted) == ([], {})
            continue
        assert share.wanted == {one: wanted[one] for one in range(rank, rank + size)}
        mine = sum(share.wanted.values())
        assert mine <= len(share.groups) <= mine + -(-mine * more // max(total, 1)) + size


def test_those_that_came_first_go_to_different_ranks() -> None:
    shares = deal(make_groups(12), {0: 5, 1: 5}, 1)
    assert [group.number for group in shares[0].groups] == [0, 2, 4, 6, 8, 10]
    assert [group.number for group in shares[1].groups] == [1, 3, 5, 7, 9, 11]


def test_ranks_that_share_an_engine_have_one_share() -> None:
    shares = deal(make_groups(5), {0: 1, 1: 1, 2: 1, 3: 1}, 2)
    assert [[group.number for group in shares[rank].groups] for rank in range(4)] == [[0, 1, 4], [], [2, 3], []]
