"""Solution of a standard problem by Lanczos: plan of the memory, filter, iteration and check."""

from __future__ import annotations

import dataclasses
import math
import time
import warnings

import torch
from torch import Tensor

from penstock.errors import CapacityError, NoConvergenceError, RankError, stacklevel_of_user
from penstock.memory import Tier
from penstock.spectral._basis import Basis, gram
from penstock.spectral._ends import solve_ends
from penstock.spectral._filter import (
    ChebyshevFilter,
    SpectrumEstimate,
    choose_filter,
    estimate_spectrum,
)
from penstock.spectral._lanczos import RitzPairs, ThickRestartLanczos
from penstock.spectral._operator import LinearOperator, SquaredOperator, make_random
from penstock.spectral._problem import BasisPlan, StandardProblem, plan_basis
from penstock.spectral._refinement import refine_pairs, separate_signs, solve_projected
from penstock.spectral._report import Eigenpairs, SpectralReport, make_report

_ROUNDING = 4.0  # times the rounding unit and the norm: residuals are not asked to be less
_MOST_POLISHES = 4
_POLISHED = 4.0  # times what rounding leaves: less than that polishing does not give
_MOST_REFINEMENTS = 2
_NEAR, _MOST_NEAR = 1e-7, 8  # of the norm; pairs, beyond as many as are wanted
_REFINED_DEGREE, _REFINED_DAMPED = 6, 0.107  # T_6 is above 30 where T_6 damps so much less
_REFINED = 0.5  # times what rounding leaves: with less there is nothing to refine
_POLISH_DEGREE, _POLISH_GAIN = 12, 1e6
_DAMPED = 0.02  # of the spectrum's width, below the wanted values, is not damped by polishing
_ESTIMATE_STEPS = 20
_ACCEPTED = 1e3  # times what is asked for, where no polishing helps: the rounding of squares
_WORTHWHILE = 1.5  # times the degree: a filter that is better by less is not changed
_LEAST_FALSE = 4  # Ritz values, by which a filter that damps wanted eigenvalues is wider at first
_ORTHOGONAL = 1e-2  # times tol: residuals do not see components that are less (Simon 1984)
_LEAST_LIMIT = 64.0  # rounding units: below that sweeps are due at nearly every step
_LOCAL_PASSES = 10.0  # over a vector and one of the two before it, of a step without a sweep
_FEW_ROWS = 4096  # of a matrix that a dense solver has room and time for
_FILE_COST = 8.0  # bytes of memory that move in the time of a byte of the file
_PARTIAL_FILE_COST = 2.0  # where few steps sweep: most is read and written while products run


class StandardSolution:
    """The course of one solution of a standard problem."""

    def __init__(self, problem: StandardProblem) -> None:
        self.problem = problem
        self._started = time.perf_counter()
        self._estimate: SpectrumEstimate | None = None
        self._scale = 0.0
        self._filter = ChebyshevFilter()
        self._iterated: LinearOperator = problem.operator
        self._plan = BasisPlan(0, 0, 1)
        self._costs = 1.0, 1.0
        self._lanczos: ThickRestartLanczos | None = None
        self._is_partial = False
        self._num_false = 0  # Ritz values of the estimate that may be no eigenvalues

    def solve(self) -> Eigenpairs:
        """Return the pairs, in rising order.

        Raises:
            NoConvergenceError: The iteration gave up, or the operator failed.
            CapacityError, StoreError: The budget or the store has no room.
        """
        self._choose()
        problem, plan, operator = self.problem, self._plan, self.problem.operator
        basis = Basis(
            *(plan.num_vectors, operator.length, operator.dtype, operator.device),
            num_resident=plan.num_resident,
            file=problem.file,
            ledger=problem.ledger,
            reduce=problem.reduce,
            accuracy=_ORTHOGONAL * problem.tol,
        )
        workspace = 2 * plan.block * operator.length * operator.dtype.itemsize
        problem.ledger.add(Tier.DEVICE, workspace)
        self._lanczos = lanczos = ThickRestartLanczos(
            *(self._iterated, problem.k, self._filter, basis),
            block=plan.block,
            max_restarts=problem.max_restarts,
            generator=problem.generator,
            threshold=self._component_limit(self._filter) if self._is_partial else 0.0,
        )
        try:
            return self._finish(self._iterate(lanczos), basis)
        finally:
            basis.close()
            problem.ledger.add(Tier.DEVICE, -workspace)

    def _iterate(self, lanczos: ThickRestartLanczos) -> RitzPairs:
        """Return what has converged, or raise the error that has the best iterate."""
        try:
            start = self._fit_start(self.problem.start)
            return lanczos.solve(start, self._find_excess, self._refine)
        except StopIteration:
            raise self._give_up(f"after {self.problem.max_restarts} restarts") from None
        except RankError as error:
            if lanczos._known:  # none right after a change of the filter
                error.best = self._give_up("before another rank ended")
            raise
        except Exception as error:
            if isinstance(error, CapacityError) or not lanczos._known:
                raise
            raise self._give_up(f"because {type(error).__name__}: {error}") from error

    def _choose(self) -> None:
        """Choose what is iterated with, from an estimate of the spectrum where products are cheap.

        A product of unknown cost, or of a dense matrix, costs more than a sweep over the basis.
        """
        problem, operator = self.problem, self.problem.operator
        squared = problem.which == "SM"
        plan = plan_basis(problem, squared=squared)
        alone = plan_basis(problem, squared=squared, most_block=1)
        if plan.num_resident == plan.num_vectors and self._is_cheap(alone):
            # A block takes nearly as many steps as a vector does, each of as many products as it
            # has vectors: only where the basis is read from a file is it worth that.
            plan = alone
        is_cheap = self._is_cheap(plan)
        if is_cheap or squared:
            steps = min(operator.global_length - 1, max(60, 2 * plan.num_vectors))
            self._estimate = estimate_spectrum(operator, steps, problem.generator, problem.reduce)
            self._scale = self._estimate.norm
        sign, squares = self._direction()
        if is_cheap and not squares and self._component_limit(ChebyshevFilter(sign)):
            plan, self._is_partial = alone, True
        product, sweep = self._count_bytes(plan)
        if squares:
            self._iterated = SquaredOperator(operator)
            self._estimate = estimate_spectrum(
                self._iterated, max(60, 2 * plan.num_vectors), problem.generator, problem.reduce
            )
            product *= 2
        elif squared:
            plan = plan_basis(problem, squared=False, most_block=plan.block)
        self._plan = plan
        self._filter = ChebyshevFilter(sign)
        if self._estimate is not None and (is_cheap or squares):
            self._costs = product, sweep
            self._filter = self._make_filter(self._estimate, sign)

    def _component_limit(self, chebyshev: ChebyshevFilter) -> float:
        """Return the components in the basis that vectors may keep; 0: as few as possible.

        Residuals of the filtered operator see them times its norm.
        """
        problem, estimate = self.problem, self._estimate
        unit = torch.finfo(problem.operator.dtype).eps
        if estimate is None or len(estimate.ritz) < problem.k:
            return 0.0
        ritz = sorted(estimate.ritz, key=lambda each: -chebyshev.sign * each)[: problem.k]
        values = [chebyshev.value(each) for each in ritz]
        norm = max(1.0, *(abs(chebyshev.value(each)) for each in (estimate.low, estimate.high)))
        least = min(
            problem.tol * abs(each) * chebyshev.slope(value)
            for each, value in zip(ritz, values, strict=True)
        )
        limit = min(math.sqrt(unit), _ORTHOGONAL * least / norm)
        return limit if limit > _LEAST_LIMIT * unit else 0.0

    def _count_bytes(self, plan: BasisPlan) -> tuple[float, float]:
        """Return the bytes of a product and of orthogonalising, for each vector of a block."""
        operator, k = self.problem.operator, self.problem.k
        vector_bytes = operator.most_length * operator.dtype.itemsize
        count, spilled = plan.num_vectors, plan.num_vectors - plan.num_resident
        if self._is_partial:
            # A restart keeps some 1.5 k vectors: it reads all, writes those and sweeps over them.
            kept = min(1.5 * k, 0.75 * count)
            share = (count + 2 * kept) / (count - kept)
            moved = (1 + share) * vector_bytes * spilled / count
            sweep = 2.0 * vector_bytes * (_LOCAL_PASSES + 2 * share) + _PARTIAL_FILE_COST * moved
        else:
            sweep = 2.0 * vector_bytes * (count + k) / 2 + _FILE_COST * spilled * vector_bytes
        product = operator.sweep_bytes / plan.block + 4.0 * vector_bytes + operator.gather_bytes
        return product, sweep / plan.block

    def _is_cheap(self, plan: BasisPlan) -> bool:
        product, sweep = self._count_bytes(plan)
        return self.problem.operator.sweep_bytes > 0 and product < 4 * sweep

    def _make_filter(self, estimate: SpectrumEstimate, sign: float) -> ChebyshevFilter:
        product, sweep = self._costs
        problem = self.problem
        unit = torch.finfo(problem.operator.dtype).eps
        # What a component grows by, from a random one to one beside which the others are small.
        growth = math.log(math.sqrt(problem.operator.global_length) / max(problem.tol, unit))
        k = problem.k + self._num_false
        return choose_filter(
            *(estimate, k, sign), product_cost=product, sweep_cost=sweep, growth=growth
        )

    def _refine(self, pairs: RitzPairs) -> ChebyshevFilter | None:
        """Return a filter that damps more, where the estimate of the spectrum was too coarse."""
        old, estimate = self._filter, self._estimate
        count = self.problem.k + 3
        if old.degree == 1 or estimate is None or len(pairs.values) < count:
            return None
        values = pairs.values[:count].tolist()
        if values[-4] <= 1:
            self._num_false = max(_LEAST_FALSE, 2 * self._num_false)
            self._filter = self._make_filter(estimate, old.sign)
            return self._filter
        if values[-1] <= 1:
            return None
        ritz = tuple(sorted(old.eigenvalue(each) for each in values))
        found = self._make_filter(dataclasses.replace(estimate, ritz=ritz), old.sign)
        if found.degree < _WORTHWHILE * old.degree:
            return None
        self._filter = found
        return found

    def _direction(self) -> tuple[float, bool]:
        """Return the sign of the wanted end, and whether the operator is to be squared."""
        which, estimate = self.problem.which, self._estimate
        if which in ("LA", "SA"):
            return (1.0 if which == "LA" else -1.0), False
        assert estimate is not None
        ritz = estimate.ritz
        # Definite, as far as rounding lets one say.
        tiny = 1e-10 * estimate.norm
        if ritz[0] >= -tiny and ritz[-1] > 0:
            return -1.0, False
        if ritz[-1] <= tiny and ritz[0] < 0:
            return 1.0, False
        return -1.0, True

    def _fit_start(self, start: Tensor | None) -> Tensor | None:
        """Return as many vectors as a block has: those given, their sums, or with random ones."""
        if start is None:
            return None
        block, count = self._plan.block, len(start)
        if count >= block:
            groups = torch.arange(count, device=start.device) % block
            shape = (block, start.shape[1])
            return torch.zeros(shape, dtype=start.dtype, device=start.device).index_add_(
                0, groups, start
            )
        shape = (block - count, start.shape[1])
        drawn = make_random(shape, self.problem.operator, self.problem.generator)
        return torch.cat([start, drawn])

    def _tolerances(self, eigenvalues: Tensor, factor: float = 1.0) -> Tensor:
        """Return how large residuals may be, for eigenvalues of the operator.

        They are not asked to be less than a factor times what rounding leaves of them.
        """
        unit = torch.finfo(self.problem.operator.dtype).eps
        self._scale = max(self._scale, float(eigenvalues.abs().max()))
        rounding = _ROUNDING * unit * self._scale
        return (self.problem.tol * eigenvalues.abs()).clamp(min=factor * rounding)

    def _find_excess(self, pairs: RitzPairs) -> float:
        """Return the largest residual over what it may be."""
        k, chebyshev = self.problem.k, self._filter
        if len(pairs.values) < k:
            return math.inf
        values = pairs.values[:k].tolist()
        if chebyshev.degree > 1 and values[-1] <= 1:  # of what is damped none is told from another
            return math.inf
        if self._iterated is self.problem.operator:
            # Rounding goes by the norm, which those that are wanted may be far below.
            ends = (float(pairs.values[0]), float(pairs.values[-1]))
            self._scale = max(self._scale, *(abs(chebyshev.eigenvalue(each)) for each in ends))
            found, slopes = chebyshev.eigenvalues(values), chebyshev.slopes(values)
        else:
            # t = lambda^2, so d lambda = d t / (2 lambda); an eigenvalue near zero is told from the
            # others, which lie as far as the largest of those wanted.
            found = chebyshev.eigenvalues(values).clamp(min=0).sqrt()
            least = 0.25 * float(found.max())
            slopes = chebyshev.slopes(values) * 2 * found.clamp(min=max(least, 1e-300))
        wanted = (self._tolerances(found) * slopes).clamp(min=1e-300)  # of zeros residuals are 0
        return float((pairs.residuals[:k] / wanted).max())

    # ------------------------------------------------------------------ the end

    def _finish(self, pairs: RitzPairs, basis: Basis) -> Eigenpairs:
        """Return the Ritz pairs of the operator itself, polished until they are good enough."""
        k, near = self.problem.k, self._count_near(pairs)
        x = self._combine(pairs, basis, k + near)
        wanted = slice(near, None) if self._filter.sign > 0 else slice(0, k)

        def is_within(factor: float) -> bool:
            return bool((residuals <= self._tolerances(values, factor))[wanted].all())

        values, x, residuals = self._rayleigh_ritz(x)
        if self._iterated is not self.problem.operator:
            basis.close()  # which had the memory
            values, x, residuals = separate_signs(
                self.problem.operator,
                (values, x, residuals),
                float(self._tolerances(values).min()),
                block=self._plan.block,
                reduce=self.problem.reduce,
            )
        for _ in range(_MOST_POLISHES):
            if is_within(_POLISHED):
                break
            self._polish(x, self._choose_polish(values))
            values, x, residuals = self._rayleigh_ritz(x)
        for _ in range(_MOST_REFINEMENTS if self.problem.max_bytes is None else 0):
            if is_within(_REFINED):
                break
            found = self._improve(values, x)
            if not float(found[2][wanted].max()) < float(residuals[wanted].max()):
                break
            values, x, residuals = found
        values, x, residuals = values[wanted], x[wanted], residuals[wanted]
        bad = residuals > _ACCEPTED * self._tolerances(values)
        if bool(bad.any()):
            raise NoConvergenceError(
                f"eigs: {int(bad.sum())} of {len(x)} residuals are up to "
                f"{float(residuals.max()) * self.problem.unit:.3g}, which the rounding of the "
                "filtered operator keeps from falling; the error has the pairs. Raise tol, or ask "
                "for another end",
                values=values,
                vectors=x.T,
                residuals=residuals,
            )
        self._warn_of(values, residuals)
        return Eigenpairs(values, x.T, residuals, self.report())

    def _warn_of(self, values: Tensor, residuals: Tensor) -> None:
        """Warn of residuals that polishing could not make what was asked for."""
        if bool((residuals > self._tolerances(values, _POLISHED)).any()):
            unit = self.problem.unit
            warnings.warn(
                f"penstock.spectral: residuals are up to {float(residuals.max()) * unit:.3g}, "
                f"where {float(self._tolerances(values).max()) * unit:.3g} was asked for: rounding "
                "keeps them from falling. The result's `residuals` has each",
                stacklevel=stacklevel_of_user(),
            )

    def _combine(self, pairs: RitzPairs, basis: Basis, k: int) -> Tensor:
        operator = self.problem.operator
        out = torch.empty(k, operator.length, dtype=operator.dtype, device=operator.device)
        return basis.combine(pairs.vectors[:, :k].to(operator.device), out)

    def _rayleigh_ritz(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return eigenvalues, vectors and residuals of the operator on the span of `x`."""
        problem = self.problem
        return solve_projected(problem.operator, x, block=self._plan.block, reduce=problem.reduce)

    def _count_near(self, pairs: RitzPairs) -> int:
        """Return the pairs that are wanted no more but so near that rounding mixes them in."""
        k, chebyshev = self.problem.k, self._filter
        if self.problem.max_bytes is not None or self._iterated is not self.problem.operator:
            return 0
        values = pairs.values[k - 1 : min(len(pairs.values), 2 * k + _MOST_NEAR)].tolist()
        at = [chebyshev.eigenvalue(each) for each in values]
        is_near = [
            each > 1 and abs(place - at[0]) <= _NEAR * self._scale
            for each, place in zip(values, at, strict=True)
        ]
        slopes = chebyshev.slopes(values)
        # One that has not converged would share its residual with the wanted ones of its value.
        found = torch.tensor(at, dtype=slopes.dtype, device="cpu")
        enough = self._tolerances(found, _POLISHED) * slopes
        is_good = (pairs.residuals[k - 1 :][: len(at)] <= enough).tolist()
        count = 1
        while count < len(at) and is_near[count] and is_good[count]:
            count += 1
        return count - 1

    def _improve(self, values: Tensor, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return pairs that are refined."""
        problem = self.problem
        if self._iterated is problem.operator:
            polish = self._choose_polish(values, _REFINED_DAMPED)
            if polish.half_width < _NEAR * self._scale:  # all of the spectrum is at one place
                return values, x, torch.full_like(values, torch.inf)
            return refine_pairs(
                *(problem.operator, values, x),
                dataclasses.replace(polish, degree=_REFINED_DEGREE),
                block=self._plan.block,
                reduce=problem.reduce,
            )
        again = x.clone()
        self._polish(again, self._choose_polish(values))
        return self._rayleigh_ritz(again)

    def _choose_polish(self, values: Tensor, damped: float = _DAMPED) -> ChebyshevFilter:
        """Return a filter that damps rounding errors, which are spread over all of the spectrum.

        What lies close to the wanted values stays: it hardly adds to the residuals.
        """
        if self._estimate is None:
            steps = min(_ESTIMATE_STEPS, self.problem.operator.global_length - 1)
            self._estimate = estimate_spectrum(
                self._iterated, steps, self.problem.generator, self.problem.reduce
            )
        sign, estimate = self._filter.sign, self._estimate
        found = values if self._iterated is self.problem.operator else values**2
        worst, best = float((sign * found).min()), float((sign * found).max())
        low = min(sign * estimate.low, sign * estimate.high)
        cut = worst - damped * (worst - low)
        center, half_width = (cut + low) / 2, max((cut - low) / 2, 1e-300)
        most = math.acosh(max(1 + 1e-12, (best - center) / half_width))
        degree = max(2, min(_POLISH_DEGREE, round(math.acosh(_POLISH_GAIN) / most)))
        return ChebyshevFilter(sign, center, half_width, degree)

    def _polish(self, x: Tensor, chebyshev: ChebyshevFilter) -> None:
        """Filter the vectors, block by block, in place."""
        for begin in range(0, len(x), self._plan.block):
            part = x[begin : begin + self._plan.block]
            filtered, _ = chebyshev.apply(self._iterated, part.clone(), torch.empty_like(part))
            norms = torch.stack([gram(each[None], each[None])[0, 0].real for each in filtered])
            part.copy_(filtered / self.problem.reduce(norms).sqrt()[:, None].to(filtered.dtype))

    def _give_up(self, reason: str) -> NoConvergenceError:
        """Return the error that carries the best iterate."""
        lanczos, k = self._lanczos, self.problem.k
        assert lanczos is not None
        pairs = lanczos.best()
        k = min(k, len(pairs.values))
        lanczos.basis.count = lanczos._known
        x = self._combine(pairs, lanczos.basis, k)
        found = pairs.values[:k].tolist()
        values, slopes = self._filter.eigenvalues(found), self._filter.slopes(found)
        residuals = pairs.residuals[:k] / slopes
        order = values.argsort()
        num_good = int((residuals <= self._tolerances(values)).sum())
        return NoConvergenceError(
            f"eigs: {num_good} of {self.problem.k} eigenpairs converged {reason}; the error has "
            "the best iterate: values, vectors and estimates of residuals. Raise max_restarts or "
            f"tol, or pass the vectors as start={self._advise_dense()}",
            values=values[order],
            vectors=x[order.to(x.device)].T,
            residuals=residuals[order],
        )

    def _advise_dense(self) -> str:
        is_small = self.problem.operator.global_length <= _FEW_ROWS
        return "; of so few rows torch.linalg.eigh has all eigenvalues" if is_small else ""

    def report(self) -> SpectralReport:
        """Return the account of the solution so far."""
        plan, lanczos = self._plan, self._lanczos
        return make_report(
            self.problem,
            self._started,
            method="lanczos",
            degree=self._filter.degree,
            num_steps=lanczos.num_steps if lanczos else 0,
            num_restarts=lanczos.num_restarts if lanczos else 0,
            num_sweeps=lanczos.num_sweeps if lanczos else 0,
            num_swept=lanczos.num_swept if lanczos else 0,
            num_vectors=plan.num_vectors,
            num_resident=plan.num_resident,
        )


def solve_standard(problem: StandardProblem) -> Eigenpairs:
    """Solve a problem; those of the largest magnitude are at the ends, at one or at both."""
    if problem.which != "LM":
        return StandardSolution(problem).solve()
    steps = min(problem.operator.global_length - 1, 60 + 2 * problem.k)
    found = estimate_spectrum(problem.operator, steps, problem.generator, problem.reduce)
    ritz, k, margin = found.ritz, problem.k, 0.05 * found.norm
    ends = ["SA", "LA"]
    if len(ritz) > k and -found.low < ritz[-k] - margin:
        ends = ["LA"]
    elif len(ritz) > k and found.high < -ritz[k - 1] - margin:
        ends = ["SA"]
    if len(ends) == 2:
        return solve_ends(problem, lambda part: StandardSolution(part).solve())
    return StandardSolution(dataclasses.replace(problem, which=ends[0])).solve()
