"""What each width costs, as a page: perplexity and error of the outputs against size, for each method."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import plotly.graph_objects as go
from plotly.subplots import make_subplots


def write_plot(path: Path, rows: Sequence[dict[str, Any]], dense_perplexity: float) -> None:
    """`rows`: of `olmorl.bench.quantize.Width`."""
    figure = make_subplots(rows=1, cols=3, subplot_titles=("perplexity, held out", "error of outputs", "tokens/s"))
    for method in dict.fromkeys(row["method"] for row in rows):
        own = [row for row in rows if row["method"] == method]
        megabytes, labels = [row["size_bytes"] / 1e6 for row in own], [f"{row['bits']} bits" for row in own]
        for column, name in enumerate(("perplexity", "error", "tokens_per_second"), 1):
            trace = go.Scatter(
                x=megabytes, y=[row[name] for row in own], text=labels, name=method, legendgroup=method,
                showlegend=column == 1, mode="lines+markers+text", textposition="top center",
            )  # fmt: skip
            figure.add_trace(trace, row=1, col=column)
    figure.add_hline(y=dense_perplexity, line_dash="dot", annotation_text="dense", row=1, col=1)
    figure.update_xaxes(title_text="MB")
    figure.write_html(path, include_plotlyjs=True)
