"""Numbers that existing runs depend on: with others, prepared data would be other files and sums have other bits."""

from __future__ import annotations

from finray.checkpoint import manifest
from finray.data.dataset import plan
from finray.data.sampling import splits
from finray.data.sampling.packing import plan_packs
from finray.data.sources import pieces
from finray.data.tokenize import chat
from finray.models import attention, blocks, head, packed
from finray.models.export import TOLERANCE
from finray.parallel import ddp
from finray.training.optim import adamw_8bit


def test_how_sources_are_cut_and_files_are_laid_out() -> None:
    """A change of any is another digest of the same rows, on which no run continues."""
    assert (pieces.PIECE_BYTES, pieces.ROWS_PER_PIECE, pieces.MOST_PARTS) == (4_194_304, 8_192, 4_096)
    assert (plan.FORMAT_VERSION, plan.ROWS_PER_BATCH, plan._ROWS_THAT_DECIDE) == (2, 1_024, 100)
    assert manifest.FORMAT_VERSION == 2
    assert chat.RENDER_DATE == (2024, 7, 26)
    assert (adamw_8bit.BLOCK, adamw_8bit.SMALLEST) == (256, 4_096)
    assert (splits.MOST_REPEATS, splits.FEW) == (1_000, 1_000_000)


def test_in_which_pieces_sums_are_made() -> None:
    chunks = (head.CHUNK_ELEMENTS, head.CHUNK_ROWS, head.TILE_ROWS)
    assert chunks == ({"cpu": 12_582_912, "cuda": 67_108_864}, 64, 256)
    assert (ddp.BUCKET_ELEMENTS, attention.EXPLICIT_UP_TO) == (8_388_608, 512)
    assert (attention.BATCHED_UP_TO, attention.BATCHED_FROM) == (128, 16)
    assert (attention.LENGTHS_OF, attention.COUNTS_OF) == (16, 4)
    assert (blocks.SMALLEST_OFFLOAD, packed._PROBES) == (1_048_576, 32)
    assert TOLERANCE == {"fp32": 0.001, "bf16": 0.05, "fp16": 0.01}


def test_rows_of_one_length_stay_in_their_order() -> None:
    plan = plan_packs([5] * 100, 10)
    assert plan.rows.tolist() == list(range(100))
    assert plan_packs([3, 9] * 40, 9).rows.tolist() == [*range(1, 80, 2), *range(0, 80, 2)]
