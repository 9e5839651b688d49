"""The interface of scores: statistics per row, and a function of their sums, so that intervals and tests work for
all."""

from __future__ import annotations

import importlib.util
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Protocol

import numpy as np
import numpy.typing as npt

from finray.config.evaluation import ScoringConfig
from finray.config.extensions import load_named
from finray.config.tasks import metric_name, mode_of
from finray.errors import ConfigError, FinrayError
from finray.files import first_line
from finray.limits import cut

_ROOT = Path(__file__).parents[2]
FloatArray = npt.NDArray[np.float64]
# The least and the largest value of a score; None where there is none.
Bounds = tuple[float | None, float | None]


@dataclass(frozen=True, slots=True)
class Answered:
    """A row with a model's answers."""

    answers: tuple[str, ...]  # texts without special tokens; several if several were requested
    reference: str  # the answer in the data
    columns: Mapping[str, Any] = field(default_factory=dict)  # of the source row, if the score needs them
    log_likelihoods: tuple[float, ...] = ()  # of each choice (nats), if the score needs them
    choice_lengths: tuple[int, ...] = ()  # UTF-8 bytes of each choice, for normalization
    right: int = 0  # index of the choice that is the reference

    @property
    def answer(self) -> str:
        """The first answer."""
        return self.answers[0]


class Score(Protocol):
    """A measure of the quality of answers.

    A row has K statistics, which are additive. The score of N rows is a function of the sums: a mean (K = 1), or a
    ratio such as BLEU's. So bootstrap and permutation only ever add statistics.

    Attributes:
        needs: its inputs besides answers and references: ``answers``, ``columns`` or ``choices``.
        is_share: whether it lies between 0 and 1.
        higher_is_better: False as for losses; None where it is not known.
        bounds: as of :func:`bounds_of`; None for those that ``is_share`` implies.
    """

    needs: ClassVar[frozenset[str]]
    is_share: bool
    higher_is_better: bool | None
    bounds: Bounds | None

    def statistics(self, rows: Sequence[Answered]) -> FloatArray | None:
        """Statistics (N, K) of N rows; None if there are none, and only :meth:`value` works."""

    def total(self, sums_K: FloatArray, rows: int) -> float:
        """The score, from the sums of the statistics over this many rows."""

    def value(self, rows: Sequence[Answered]) -> float:
        """The score of rows."""


def bounds_of(score: Score) -> Bounds:
    """The least and the largest value of a score; a share lies between 0 and 1."""
    bounds: Bounds | None = getattr(score, "bounds", None)
    return bounds if bounds is not None else (0.0, 1.0) if score.is_share else (None, None)


class SummedScore:
    """A score by its statistics; a mean unless :meth:`total` is overridden."""

    needs: ClassVar[frozenset[str]] = frozenset({"answers"})
    is_share: bool = True
    higher_is_better: bool | None = True
    bounds: Bounds | None = None

    def __init__(self, settings: ScoringConfig | None = None) -> None:
        self.settings = settings or ScoringConfig()
        self.counts: dict[str, Any] = {}
        self.notes: list[str] = []

    def row(self, row: Answered) -> float:
        """The value of one row, for a score that is a mean of them."""
        raise NotImplementedError

    def statistics(self, rows: Sequence[Answered]) -> FloatArray | None:
        """Statistics (N, K) of N rows."""
        return np.array([[self.row(row)] for row in rows], dtype=np.float64)

    def total(self, sums_K: FloatArray, rows: int) -> float:
        """The mean."""
        return float(sums_K[0]) / rows

    def value(self, rows: Sequence[Answered]) -> float:
        """The score of rows; 0 for no rows."""
        if not rows:
            return 0.0
        statistics_NK = self.statistics(rows)
        assert statistics_NK is not None
        return self.total(statistics_NK.sum(0), len(rows))


class OwnScore(SummedScore):
    """A user's function of answers and references. It returns one number, or one per row, whose mean is the score.
    Whether more or less of it is better, its attribute ``higher_is_better`` says, or a name such as ``word_error``.

    Args:
        function: called with two lists of texts in the same order.
        name: as the user wrote it, for messages.
    """

    is_share = False

    def __init__(self, function: Callable[[list[str], list[str]], Any], name: str) -> None:
        super().__init__()
        self._function, self._name = function, name
        self.higher_is_better = getattr(
            function, "higher_is_better", False if mode_of(metric_name(name)) == "min" else None
        )
        if not (self.higher_is_better is None or isinstance(self.higher_is_better, bool)):
            raise ConfigError(
                f"`higher_is_better` of `{name}` must be True or False", where="evaluation.metrics", repair="set it so"
            )

    def statistics(self, rows: Sequence[Answered]) -> FloatArray | None:
        """The values of rows, or None if the function returns a single number."""
        values = self._called(rows)
        return None if values.ndim == 0 else values[:, None]

    def value(self, rows: Sequence[Answered]) -> float:
        """The function's number, or the mean of its values."""
        values = self._called(rows)
        return float(values.mean()) if values.size else 0.0

    def _called(self, rows: Sequence[Answered]) -> FloatArray:
        given = self._function([row.answer for row in rows], [row.reference for row in rows])
        try:
            values = np.asarray(given, dtype=np.float64)
        except (TypeError, ValueError):
            values = np.empty((0, 0))
        if values.shape not in ((), (len(rows),)):
            raise ConfigError(
                f"`{self._name}` must return one number, or one for each of the {len(rows)} rows",
                where="evaluation.metrics",
                repair="return a float, or a list with one float per answer",
            )
        if not np.isfinite(values).all():
            row = f" for row {int(np.flatnonzero(~np.isfinite(values))[0]) + 1}" if values.ndim else ""
            raise ConfigError(
                f"`{self._name}` returned no finite number{row}",
                where="evaluation.metrics",
                repair="return a number for every answer, such as 0.0 where it cannot be judged",
            )
        return values


@contextmanager
def blaming(name: str, kind: type[FinrayError] = ConfigError) -> Iterator[None]:
    """Whatever a metric raises is about that metric: it may be a user's function, which may also end the process.
    Raises FinrayError: it has failed; of this kind."""
    try:
        # Standard output may be one JSON document.
        with redirect_stdout(sys.stderr):
            yield
    except FinrayError:
        raise
    except (Exception, SystemExit) as error:
        frames = [(Path(frame.f_code.co_filename), line) for frame, line in traceback.walk_tb(error.__traceback__)]
        places = [
            f" ({file.name}, line {line})" for file, line in frames if file.is_file() and _ROOT not in file.parents
        ]
        raise kind(
            f"the metric `{name}` failed: {type(error).__name__}: {cut(first_line(error))}{''.join(places[-1:])}",
            where="evaluation.metrics",
            repair="fix it, or leave it out; the same command then continues with what is saved",
        ) from None


def score_named(name: str, settings: ScoringConfig) -> Score:
    """The score for a name in ``evaluation.metrics``, with everything it needs.
    Raises ConfigError: there is no such score, its package is not installed, or a setting is missing."""
    score: Any = load_named("finray.metrics", name, where="evaluation.metrics")
    if isinstance(score, type):
        made: Score = score(settings)
        return made
    return OwnScore(score, name)


def require(package: str, score: str, *, module: str | None = None) -> None:
    """Check that the library of a score is installed. Raises ConfigError: with the command that installs it."""
    if importlib.util.find_spec(module or package.replace("-", "_")) is None:
        raise ConfigError(
            f"`{score}` needs the package {package}, which is not installed",
            where="evaluation.metrics",
            repair=f"pip install {package} (or `pip install 'finray[scores]'`)",
        )
