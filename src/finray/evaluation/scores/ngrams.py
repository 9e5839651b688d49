"""N-gram overlap with the reference: ROUGE by rouge-score, BLEU and chrF by sacrebleu."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np

from finray import compat
from finray.config.evaluation import ScoringConfig
from finray.evaluation.scores.base import Answered, Bounds, FloatArray, SummedScore, require


class Rouge(SummedScore):
    """Mean F-measure of rouge-score with its defaults (no stemming; only words of ASCII letters and digits)."""

    kind: ClassVar[str] = "rouge1"

    def __init__(self, settings: ScoringConfig | None = None) -> None:
        super().__init__(settings)
        require("rouge-score", self.kind)
        from rouge_score.rouge_scorer import RougeScorer

        self._scorer = RougeScorer([self.kind])

    def row(self, row: Answered) -> float:
        """The F-measure."""
        return float(self._scorer.score(row.reference, row.answer)[self.kind].fmeasure)


class Rouge2(Rouge):
    """For bigrams."""

    kind = "rouge2"


class RougeL(Rouge):
    """For the longest common subsequence."""

    kind = "rougeL"


class RougeLsum(Rouge):
    """For the longest common subsequences of lines."""

    kind = "rougeLsum"


class BLEU(SummedScore):
    """Corpus BLEU of sacrebleu with its defaults, 0 to 100: from the summed n-gram counts, not a mean over rows."""

    is_share = False
    bounds: Bounds | None = (0.0, 100.0)

    def __init__(self, settings: ScoringConfig | None = None) -> None:
        super().__init__(settings)
        require("sacrebleu", type(self).__name__.lower())
        self._metric = self._build()

    def _build(self) -> Any:
        from sacrebleu.metrics import BLEU

        return BLEU(force=True)

    def statistics(self, rows: Sequence[Answered]) -> FloatArray:
        """sacrebleu's counts of each row."""
        counts = compat.sacrebleu_counts(self._metric, [row.answer for row in rows], [row.reference for row in rows])
        return np.array(counts, dtype=np.float64)

    def total(self, sums_K: FloatArray, rows: int) -> float:  # noqa: ARG002
        """sacrebleu's score of the summed counts."""
        return compat.sacrebleu_score(self._metric, [int(total) for total in sums_K])


class ChrF(BLEU):
    """Corpus chrF of sacrebleu with its defaults, 0 to 100."""

    def _build(self) -> Any:
        from sacrebleu.metrics import CHRF

        return CHRF()
