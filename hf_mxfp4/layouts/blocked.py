# SPDX-License-Identifier: Apache-2.0
"""Block scales in the order Blackwell's tensor cores read them, back in rows.

Source: cuBLAS, "1D block scaling factors layout": tiles of 128 rows x 4 scales, row after row of tiles; in a tile, row
r and column c lie at `(r % 32) * 16 + (r // 32) * 4 + c`.
"""

from __future__ import annotations

import torch

TILE_ROWS, TILE_COLUMNS = 128, 4


def padded(rows: int, columns: int) -> tuple[int, int]:
    """Rows and columns of scales, filled up to whole tiles."""
    return -(-rows // TILE_ROWS) * TILE_ROWS, -(-columns // TILE_COLUMNS) * TILE_COLUMNS


def unblock(scale: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """Scale bytes uint8 in tiles (any shape, `padded(rows, columns)` of them) -> `[rows, columns]`."""
    all_rows, all_columns = padded(rows, columns)
    tiles = scale.reshape(all_rows // TILE_ROWS, all_columns // TILE_COLUMNS, 32, 4, TILE_COLUMNS)
    return tiles.permute(0, 3, 2, 1, 4).reshape(all_rows, all_columns)[:rows, :columns]
