"""Which colour stands for what, the same in every chart: Okabe and Ito's, told apart by colour-blind eyes, on dark and
on light."""

from olmorl.metrics.ledger import BINS

BLUE, ORANGE, GREEN, RED, PURPLE, SKY, YELLOW, GREY, BROWN = (
    "#0072B2",
    "#E69F00",
    "#009E73",
    "#D55E00",
    "#CC79A7",
    "#56B4E9",
    "#D8C93A",
    "#8A8F98",
    "#A56A43",
)
CYCLE = (BLUE, ORANGE, GREEN, RED, PURPLE, SKY, YELLOW, GREY)
DASHES = ("solid", "dot", "dash", "longdash", "dashdot", "longdashdot")
ACTIVITY = {
    "starting": YELLOW,
    "decode": BLUE,
    "prefill": SKY,
    "recompute": PURPLE,
    "stalled": RED,
    "training": GREEN,
    "sending": ORANGE,
    "checkpointing": BROWN,
    "waiting": GREY,
}
FATE: dict[str, str] = dict(
    zip(BINS, (GREEN, GREY, SKY, ORANGE, YELLOW, PURPLE, BLUE, RED, BROWN, "#5C6370"), strict=True)
)
