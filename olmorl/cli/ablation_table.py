"""How an ablation is shown: a table for the console, and a page with a bar a row."""

from typing import Any

from rich.table import Table

SHARES = ("mfu", "mbu", "slot_waste", "learner_wait_share")


def ablation_table(figures: dict[str, Any]) -> Table:
    rows = figures["rows"]
    table = Table(title=f"one load, one switch after another ({len(rows[0]['repeats'])} measurements a row)")
    table.add_column("")
    for name in (
        "tok/s",
        "trained tok/s",
        "spread",
        "planned",
        "MFU",
        "MBU",
        "slot waste",
        "learner waits",
        "stall",
        "step gain",
        "in all",
    ):
        table.add_column(name, justify="right")
    for row in rows:
        off = row["predicted_trained_tokens_per_second"] / row["trained_tokens_per_second"] - 1
        mfu, mbu, waste, waits = (f"{row[name]:.1%}" for name in SHARES)
        table.add_row(
            row["name"],
            f"{row['tokens_per_second']:,.0f}",
            f"{row['trained_tokens_per_second']:,.0f}",
            f"{row['spread']:.0%}",
            f"{row['predicted_trained_tokens_per_second']:,.0f} ({off:+.0%})",
            mfu,
            mbu,
            waste,
            waits,
            f"{row['stall_seconds']:.2f} s",
            f"{row['step_gain']:.2f} x",
            f"{row['cumulative_gain']:.2f} x",
        )
    return table


def ablation_plot(figures: dict[str, Any]) -> str:
    """A self-contained page: trained tokens a second of each row, with its spread, and what the planner said."""
    import plotly.graph_objects as go

    rows = figures["rows"]
    names = [row["name"] for row in rows]
    every = [[repeat["trained_tokens_per_second"] for repeat in row["repeats"]] for row in rows]
    middles = [row["trained_tokens_per_second"] for row in rows]
    figure = go.Figure()
    figure.add_bar(
        x=names,
        y=middles,
        name="measured",
        text=[f"{row['cumulative_gain']:.2f} x" for row in rows],
        error_y={
            "type": "data",
            "array": [max(some) - middle for some, middle in zip(every, middles, strict=True)],
            "arrayminus": [middle - min(some) for some, middle in zip(every, middles, strict=True)],
        },
    )
    figure.add_scatter(
        x=names,
        y=[row["predicted_trained_tokens_per_second"] for row in rows],
        name="planned",
        mode="markers",
        marker={"symbol": "line-ew-open", "size": 40},
    )
    figure.update_layout(yaxis_title="trained tokens/s", template="plotly_white")
    return str(figure.to_html(include_plotlyjs=True, full_html=True))
