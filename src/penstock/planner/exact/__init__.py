"""Plans of small graphs with the least traffic, proved, and the fastest plans of tiny ones."""

from penstock.planner.exact._exact import exact
from penstock.planner.exact._exhaustive import (
    Limit,
    fastest_of_order,
    orders_of,
    with_more_runs,
)
from penstock.planner.exact._peak import Peak, min_peak, min_working_set

__all__ = [
    "Limit",
    "Peak",
    "exact",
    "fastest_of_order",
    "min_peak",
    "min_working_set",
    "orders_of",
    "with_more_runs",
]
