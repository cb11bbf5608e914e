"""Two judges of plans that share nothing agree about right plans and about plans with a fault.

The long form, of 20,000 and more mutants, is the script `mutants`.
"""

from collections import Counter

import pytest

from byte_replay import judge
from graph_cases import chain_step
from mutants import KINDS, compared, right_plan


def test_both_judges_agree_on_mutants_of_every_kind():
    counts, disagreements = compared(40 * len(KINDS))
    assert not disagreements
    assert len(KINDS) >= 30
    assert all(count["right"] + count["wrong"] > 2 for count in counts.values())
    total = sum(counts.values(), Counter())
    assert total["wrong"] > 1000
    assert total["right"] > 100


@pytest.mark.parametrize("seed", range(3))
def test_a_plan_for_another_graph_is_wrong(seed):
    assert judge(chain_step(), right_plan(seed)[1]) is not None
