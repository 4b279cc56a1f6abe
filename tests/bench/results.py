"""Invented results, for what is made of them."""

from typing import Any

RESULT: dict[str, Any] = {
    "device": "NVIDIA H200", "driver": "580.159.04", "commit": "4c12575", "trace": "high", "batch": 16, "k": 2048,
    "buffer": 4096, "record_bytes": 1152, "layers": 16, "steps": 54, "policy": "lru", "us": 105.74, "us_p10": 104.0,
    "us_p50": 108.26, "us_p90": 112.9, "us_no_io": 10.25, "us_launch": 4.0, "misses": 4321.4, "miss_rate": 0.13188,
    "gb_per_s": 47.1, "copy_gb_per_s": 55.5, "ratio_to_copy": 1.178, "rebuild_share": 0.0731,
}  # fmt: skip


def sweep_lines() -> list[dict[str, Any]]:
    """A sweep as an H200 might give it; 16 at B = 2 k belongs to both panels."""
    ratios = {2049: 0.27, 3072: 0.16, 4096: 0.132, 6144: 0.09, 8192: 0.07}
    at = {(buffer, 16): ["buffer"] for buffer in ratios} | {(4096, batch): ["batch"] for batch in (1, 2, 4, 8, 32)}
    at[4096, 16] = ["buffer", "batch"]
    lines = []
    for (buffer, batch), panels in at.items():
        io, probe = round(batch * ratios[buffer] * 47.9, 2), round(1.2 + batch * 0.3, 2)
        parts = {"us_io": io, "us_probe": probe, "us_rest": 4.1, "us": round(io + probe + 4.1, 2)}
        point = {"kind": "sweep", "panels": panels, "batch": batch, "buffer": buffer, "miss_rate": ratios[buffer]}
        lines.append({**RESULT, **point, **parts})
    return lines
