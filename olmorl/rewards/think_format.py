"""Is the completion thoughts and then an answer, each in its tags, once, with nothing around them?"""

from olmorl.rewards.verdict import Verdict, scored

TAGS = ("<think>", "</think>", "<answer>", "</answer>")


def think_format(completion: str, ground_truth: object = None, prompt: str | None = None) -> Verdict:
    """The ground truth does not matter. A prompt that ends in <think> has opened the thoughts already."""
    text = completion.strip()
    if prompt is not None and prompt.rstrip().endswith("<think>") and not text.startswith("<think>"):
        text = "<think>" + text
    for tag in TAGS:
        if (count := text.count(tag)) != 1:
            return scored(0.0, f"{tag} stands there {count} times")
    opened, thought, asked, answered = map(text.index, TAGS)
    in_order = opened == 0 and opened < thought < asked < answered == len(text) - len("</answer>")
    between = text[thought + len("</think>") : asked] if in_order else ""
    answer = text[asked + len("<answer>") : answered] if in_order else ""
    return scored(float(in_order and not between.strip() and bool(answer.strip())))
