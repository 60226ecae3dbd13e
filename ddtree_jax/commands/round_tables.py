"""What `bench.py round` prints, from the result that it writes as JSON."""

from typing import Any

from rich.table import Table

from ddtree_jax.commands import shell
from ddtree_jax.commands.sweep import jump_lines

KERNELS_SHOWN = 25


def kernel_table(row: dict[str, Any]) -> Table:
    table = Table(title=f"{row['label']}, context {row['context']}: kernels of a round")
    for column in ("kernel", "per round", "us each", "us per round"):
        table.add_column(column, justify="left" if column == "kernel" else "right")
    for kernel in row["kernels"][:KERNELS_SHOWN]:
        table.add_row(
            kernel["name"],
            f"{kernel['per_round']:.4g}",
            f"{kernel['us_each']:.2f}",
            f"{kernel['us_per_round']:.1f}",
        )
    rest = sum(kernel["us_per_round"] for kernel in row["kernels"][KERNELS_SHOWN:])
    table.add_row(f"{len(row['kernels'][KERNELS_SHOWN:])} others", "", "", f"{rest:.1f}")
    return table


def number_table(
    title: str, rows: list[dict[str, Any]], texts: dict[str, str], numbers: dict[str, str]
) -> Table:
    """Rows by column title and key; columns of numbers that no row has are left out."""
    table = Table(title=title)
    numbers = {
        name: key for name, key in numbers.items() if any(row.get(key) is not None for row in rows)
    }
    for column in (*texts, *numbers):
        table.add_column(column, justify="left" if column == next(iter(texts)) else "right")
    for row in rows:
        cells = [str(row[key]) for key in texts.values()]
        for key in numbers.values():
            number = row.get(key)
            cells.append("" if number is None else f"{number:.3g}")
        table.add_row(*cells)
    return table


def rounds_table(title: str, rows: list[dict[str, Any]]) -> Table:
    numbers = {
        "median ms": "median_ms",
        "p10": "p10_ms",
        "p90": "p90_ms",
        "floor ms": "floor_ms",
        "ratio": "ratio",
        "rested ms": "rested_ms",
        "rested ratio": "rested_ratio",
        "device ms": "device_ms",
        "busy ms": "busy_ms",
        "idle %": "idle_percent",
    }
    return number_table(title, rows, {"program": "label", "context": "context"}, numbers)


def stages_table(rows: list[dict[str, Any]]) -> Table:
    rows = [row | row["stages_ms"] for row in rows if "stages_ms" in row]
    parts = {part: part for row in rows for part in row["stages_ms"]}
    texts = {"program": "label", "context": "context"}
    return number_table("Parts of a round, ms, each alone", rows, texts, parts)


def parts_table(parts: list[dict[str, Any]]) -> Table:
    numbers = {
        "ms": "ms",
        "busy ms": "busy_ms",
        "floor ms": "floor_ms",
        "ratio": "ratio",
        "% of round": "round_percent",
    }
    texts = {"program": "label", "tokens": "tokens", "floor is": "bound"}
    return number_table("Beside the rounds; attention: one layer", parts, texts, numbers)


def show(result: dict[str, Any], *, kernels: bool) -> None:
    out = shell.console()
    sums = f", sums: {result['sums']}" if result["sums"] else ""
    title = (
        f"{result['shape']}, {result['layers']} layers, random weights, {result['dtype']}, "
        f"{result['tp']} x {result['device']}, attention: {result['attention']}{sums}; one reads "
        f"at {result['read_bytes_per_s'] / 1e9:.0f} GB/s, multiplies "
        f"at {result['matrix_flops_per_s'] / 1e12:.3g} TFLOP/s"
    )
    rows = result["rows"]
    out.print(rounds_table(title, rows + result["baseline"]))
    if any("stages_ms" in row for row in rows):
        out.print(stages_table(rows))
    if result["parts"]:
        out.print(parts_table(result["parts"]))
    if "jumps" in result:
        out.print(*jump_lines(result["jumps"]), sep="\n", highlight=False)
    for row in rows if kernels else ():
        out.print(kernel_table(row))
